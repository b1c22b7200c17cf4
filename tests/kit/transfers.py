"""Processes that transfer amounts under several locks, while a test injects faults.

Each transfer holds the locks of two accounts; each inspection holds the lock of one, as a plain
lock. The accounts are on a server without faults, which rejects a fence lower than the highest one
that it has seen for that account. So the sum of all accounts stays the same.

A campaign is checked by the times at which workers considered themselves holders, on the clock that
all processes of the machine share, and by the accounts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

import holdfast
from holdfast.wire.clock import now
from kit.apis import Api, Tasks, Threads
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kit.servers import Server

ACCOUNTS = ("account:1", "account:2", "account:3", "account:4")

_READ = """
for number, account in ipairs(KEYS) do
  local seen = redis.call('GET', 'fence ' .. account) or '0'
  if tonumber(ARGV[number]) < tonumber(seen) then return false end
end
for number, account in ipairs(KEYS) do redis.call('SET', 'fence ' .. account, ARGV[number]) end
return redis.call('GET', KEYS[1]) or '0'
"""
_TRANSFER = """
for number, account in ipairs(KEYS) do
  local seen = redis.call('GET', 'fence ' .. account) or '0'
  if tonumber(ARGV[number]) < tonumber(seen) then return 0 end
end
for number, account in ipairs(KEYS) do redis.call('SET', 'fence ' .. account, ARGV[number]) end
redis.call('SET', KEYS[1], ARGV[3] - 1)
redis.call('INCR', KEYS[2])
redis.call('INCR', 'transfers')
return 1
"""


class AccountHold(NamedTuple):
    """One hold of one lock, as its holder saw it. Times are from `holdfast.wire.clock`."""

    account: str
    fence: int
    granted: float
    valid_until: float


class TransferReport(NamedTuple):
    """The results of a campaign."""

    holds: list[AccountHold]
    errors: Counter[str]
    transfers: int
    balances: list[int]

    def check(self) -> None:
        """Check exclusion and fences of each lock, and that no amount was lost."""
        for account in ACCOUNTS:
            mine = [hold for hold in self.holds if hold.account == account]
            assert mine
            assert len({hold.fence for hold in mine}) == len(mine), "a fence is not unique"
            last: AccountHold | None = None
            for hold in sorted(mine, key=attrgetter("granted")):
                if last is not None:
                    assert hold.granted >= last.valid_until, f"two holders at once: {last}, {hold}"
                    assert hold.fence > last.fence, f"a fence did not grow: {last}, {hold}"
                if last is None or hold.valid_until > last.valid_until:
                    last = hold
        assert sum(self.balances) == 0, f"an amount was lost: {self.balances}"


class Transfers:
    """Transferring processes, alternately of both APIs. Use it as a context manager."""

    def __init__(self, targets: Any, accounts: Server, *, ttl: float = 1.0) -> None:
        accounts.command("FLUSHALL")
        self._accounts = accounts
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", __name__, api),
                    json.dumps([targets, accounts.url, ttl, number]),
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, api in enumerate(("threads", "asyncio", "threads", "asyncio"))
        ]
        self._killed: set[int] = set()

    def done(self) -> int:
        """Return how many transfers were accepted so far."""
        return int(self._accounts.command("GET", "transfers") or 0)

    def wait_for(self, transfers: int = 20, within: float = 60.0) -> None:
        """Wait until that many more transfers were accepted."""
        goal = self.done() + transfers
        eventually(lambda: self.done() >= goal, within=within, what=f"{transfers} more transfers")

    def kill(self, number: int) -> None:
        """Kill one process, whatever it holds."""
        self.processes[number].kill()
        self._killed.add(number)

    def end(self) -> TransferReport:
        """Let all workers finish, and return what they recorded. Killed ones recorded nothing."""
        holds: list[AccountHold] = []
        errors: Counter[str] = Counter()
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
                process.stdin = None
        for number, process in enumerate(self.processes):
            seen, complaints = process.communicate(timeout=60)
            if number in self._killed:
                continue
            assert process.returncode == 0, complaints
            mine, counted = json.loads(seen.splitlines()[-1])
            holds += [AccountHold(*hold) for hold in mine]
            errors.update(counted)
        balances = [int(self._accounts.command("GET", each) or 0) for each in ACCOUNTS]
        return TransferReport(holds, errors, self.done(), balances)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


class _Worker:
    def __init__(self, client: Any, accounts: str, ttl: float, seed: int) -> None:
        self._client = client
        self._ttl = ttl
        self._accounts: Any = redis.Redis.from_url(accounts)
        self._random = random.Random(seed)  # noqa: S311 - it must be reproducible
        self.holds: list[AccountHold] = []
        self.errors: Counter[str] = Counter()

    async def work(self, stop: threading.Event) -> None:
        while not stop.is_set():
            names = self._random.sample(ACCOUNTS, self._random.choice((1, 2, 2, 2)))
            settings = {"ttl": self._ttl, "timeout": 2 * self._ttl}
            several = len(names) > 1
            lock = self._client.lock_all(names, **settings) if several else None
            lock = lock or self._client.lock(names[0], **settings)
            try:
                lease = await lock.acquire()
            except holdfast.HoldfastError as error:
                self.errors[type(error).__name__] += 1
                continue
            await self._use(names, lease.leases if several else {names[0]: lease}, lease)
        self._accounts.close()

    async def _use(self, names: list[str], leases: Any, lease: Any) -> None:
        granted, fences = now(), [str(leases[name].fence) for name in names]
        if len(names) > 1:  # blocks an event loop only briefly
            balance = self._accounts.eval(_READ, len(names), *names, *fences)
            if balance is not None:  # else the fences were stale
                self._accounts.eval(_TRANSFER, len(names), *names, *fences, balance)
        deadlines = {name: leases[name]._lease.deadline for name in names}
        ended = now()
        try:
            await lease.release()
        except holdfast.HoldfastError as error:
            self.errors[type(error).__name__] += 1
        self.holds += [
            AccountHold(name, leases[name].fence, granted, min(deadlines[name], ended))
            for name in names
        ]


async def _transfer(api: Api, arguments: Sequence[Any]) -> None:
    targets, accounts, ttl, number = arguments
    client, stop = api.connect(targets), threading.Event()

    def wait_for_stop() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_stop, daemon=True).start()
    workers = [_Worker(client, accounts, ttl, 10 * number + each) for each in range(2)]
    await api.gather(*(worker.work(stop) for worker in workers))
    holds = [hold for worker in workers for hold in worker.holds]
    errors = sum((worker.errors for worker in workers), Counter[str]())
    print(json.dumps([holds, errors]), flush=True)  # noqa: T201 - the parent process reads it


if __name__ == "__main__":
    _api: Api = {kind.name: kind for kind in (Threads, Tasks)}[sys.argv[1]]()
    _api.run(_transfer(_api, json.loads(sys.argv[2])))
