"""A contention run: processes acquire and release one lock repeatedly while a test injects faults.

The lock guards a counter on a server without faults. A holder reads the counter and writes it
incremented. The counter rejects a fence lower than the highest one it has seen, and logs what it
accepts. A run is checked twice: by the times at which contenders considered themselves
holders, on the clock that all processes of the machine share, and by the counter and its log.

Contenders continue until the run ends. They count lock errors and retry.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

import holdfast
from holdfast.core.spec import validity_of
from holdfast.wire.clock import now
from kit.apis import Api, Tasks, Threads
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kit.servers import Server

LOCK = "contended"
KEY = f"holdfast:{{{LOCK}}}"

_READ = """
if tonumber(ARGV[1]) < tonumber(redis.call('GET', 'highest') or '0') then return -1 end
redis.call('SET', 'highest', ARGV[1])
return tonumber(redis.call('GET', 'value') or '0')
"""
_WRITE = """
if tonumber(ARGV[1]) < tonumber(redis.call('GET', 'highest') or '0') then return 0 end
redis.call('SET', 'highest', ARGV[1])
redis.call('SET', 'value', ARGV[2])
redis.call('RPUSH', 'log', ARGV[1] .. ' ' .. ARGV[3])
return 1
"""


class Turn(NamedTuple):
    """One hold of the lock, as its holder saw it. Times are from `holdfast.wire.clock`."""

    token: str
    fence: int
    requested: float
    granted: float
    valid_until: float
    how: str
    """`released`, or the name of the error that ended the hold."""


class Report(NamedTuple):
    """The results of a contention run."""

    turns: list[Turn]
    errors: Counter[str]
    log: list[tuple[int, str]]
    """The fence and token of each accepted write, in order."""
    value: int

    def check_exclusion(self) -> None:
        """Check that no two contenders considered themselves the holder at the same time."""
        last: Turn | None = None
        for turn in sorted(self.turns, key=attrgetter("granted")):
            if last is not None:
                assert turn.granted >= last.valid_until, f"two holders at once: {last}, {turn}"
            if last is None or turn.valid_until > last.valid_until:
                last = turn

    def check_fences(self, *, since: str = "granted") -> None:
        """Check that fences are unique, and that a hold after another one has the higher fence.

        Where exclusion may end, a slow contender may receive its grant after another contender
        came and went. Then `since="requested"` compares the times of the requests instead.
        """
        assert len({turn.fence for turn in self.turns}) == len(self.turns), "a fence is not unique"
        ended = sorted(self.turns, key=attrgetter("valid_until"))
        highest, done = 0, 0
        for turn in sorted(self.turns, key=attrgetter(since)):
            while ended[done].valid_until < getattr(turn, since):
                highest = max(highest, ended[done].fence)
                done += 1
            assert turn.fence > highest, f"a fence did not grow: {turn}, after {highest}"

    def check_resource(self) -> None:
        """Check that the accepted writes lost no update."""
        fences = [fence for fence, _ in self.log]
        assert fences == sorted(fences)
        assert self.value == len(self.log), f"{len(self.log) - self.value} updates were lost"
        whose: dict[int, str] = {}
        for fence, token in self.log:
            assert whose.setdefault(fence, token) == token, f"two tokens used fence {fence}"


class ContentionRun:
    """Contending processes, alternately of both APIs. Use it as a context manager."""

    def __init__(
        self,
        targets: Any,
        resource: Server,
        *,
        processes: int = 3,
        workers: int = 2,
        ttl: float = 1.0,
        **settings: Any,
    ) -> None:
        resource.command("FLUSHALL")
        self._resource = resource
        apis = [("threads", "asyncio")[number % 2] for number in range(processes)]
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", __name__, api),
                    json.dumps([targets, resource.url, workers, ttl, settings]),
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for api in apis
        ]

    def accepted(self) -> int:
        """Return how many writes the counter has accepted so far."""
        return int(self._resource.command("LLEN", "log"))

    def wait_for_turns(self, turns: int = 30, within: float = 30.0) -> None:
        """Wait until the counter has accepted that many more writes."""
        goal = self.accepted() + turns
        eventually(lambda: self.accepted() >= goal, within=within, what=f"{turns} more turns")

    def end(self) -> Report:
        """Let all contenders finish their current turn, and return what they recorded."""
        turns: list[Turn] = []
        errors: Counter[str] = Counter()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
                process.stdin = None
        for process in self._processes:
            seen, complaints = process.communicate(timeout=60)
            assert process.returncode == 0, complaints
            mine, counted = json.loads(seen.splitlines()[-1])
            turns += [Turn(*turn) for turn in mine]
            errors.update(counted)
        log = [
            entry.decode().split(" ", 1) for entry in self._resource.command("LRANGE", "log", 0, -1)
        ]
        value = int(self._resource.command("GET", "value") or 0)
        return Report(turns, errors, [(int(fence), token) for fence, token in log], value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


class _Contender:
    """One thread or task of a contending process."""

    def __init__(self, client: Any, resource: str, ttl: float, stop: threading.Event) -> None:
        self._lock = client.lock(LOCK, ttl=ttl, timeout=2 * ttl)
        self._ttl = ttl
        self._guarded = redis.Redis.from_url(resource)
        self._stop = stop
        self.turns: list[Turn] = []
        self.errors: Counter[str] = Counter()

    async def work(self) -> None:
        while not self._stop.is_set():
            try:
                lease = await self._lock.acquire()
            except holdfast.HoldfastError as error:
                self.errors[type(error).__name__] += 1
                continue
            granted, how = now(), "released"
            requested = lease._state.deadline - validity_of(self._ttl)
            self._change(lease)
            deadline, ended = lease._state.deadline, now()
            try:
                await lease.release()
            except holdfast.HoldfastError as error:
                how = type(error).__name__
                self.errors[how] += 1
            valid_until = min(deadline, ended)
            self.turns.append(Turn(lease.token, lease.fence, requested, granted, valid_until, how))
        self._guarded.close()

    def _change(self, lease: Any) -> None:
        """Read the counter and write it incremented. Blocks an event loop only briefly."""
        found: Any = self._guarded.eval(_READ, 0, str(lease.fence))
        if found >= 0:
            self._guarded.eval(_WRITE, 0, str(lease.fence), str(found + 1), lease.token)


async def _contend(api: Api, arguments: Sequence[Any]) -> None:
    targets, resource, workers, ttl, settings = arguments
    client = api.connect(targets, **settings)
    stop = threading.Event()

    def wait_for_stop() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_stop, daemon=True).start()
    contenders = [_Contender(client, resource, ttl, stop) for _ in range(workers)]
    await api.gather(*(contender.work() for contender in contenders))
    turns = [turn for contender in contenders for turn in contender.turns]
    errors = sum((contender.errors for contender in contenders), Counter[str]())
    print(json.dumps([turns, errors]), flush=True)  # noqa: T201 - the parent process reads it


if __name__ == "__main__":
    _api: Api = {kind.name: kind for kind in (Threads, Tasks)}[sys.argv[1]]()
    _api.run(_contend(_api, json.loads(sys.argv[2])))
