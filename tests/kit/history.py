"""Histories of a contended lock: what the contenders and the server recorded, and checks on it.

Contenders run in separate processes (`Contenders`, which starts this file as a module). They record
each hold on the clock that all processes of the machine share. `Monitor` and `Ledger` read what the
server did from MONITOR. That record contains no delays of network or machine, so checks on it need
no tolerance.

The checks use no server. They raise an AssertionError that names the first contradicting holds.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
import redis.asyncio

import holdfast
from holdfast.scripts import ACQUIRE
from holdfast.wire.clock import now
from kit.apis import Tasks, Threads
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

    from kit.apis import Api
    from kit.clusters import Cluster
    from kit.servers import Server

LOCK = "contended"
KEY = f"holdfast:{{{LOCK}}}"
CALM_TTL, FAULTY_TTL = 30.0, 5.0
COUNTER = "counter"
"""The counter that the lock guards: a holder reads it and writes it incremented."""


class HoldRecord(NamedTuple):
    """One hold of the lock, as its holder saw it. Times are from `holdfast.wire.clock`."""

    token: str
    fence: int
    requested: float
    """Just before the call of `acquire`."""
    granted: float
    """Just after `acquire` returned."""
    ended: float
    """Just before the call of `release`."""
    deadline: float
    """The lease's deadline."""
    returned: float
    """Just after `release` returned."""
    found: int
    """The value of the counter before this holder incremented it."""

    @property
    def valid_until(self) -> float:
        """The last moment at which the holder considered the lock held."""
        return min(self.ended, self.deadline)


# Checks


def check_exclusion(holds: Iterable[HoldRecord]) -> None:
    """Check that no two contenders considered themselves the holder at the same time."""
    before: HoldRecord | None = None
    for hold in sorted(holds, key=attrgetter("granted")):
        if before is not None:
            assert hold.granted >= before.valid_until, f"two holders at once: {before}, {hold}"
        if before is None or hold.valid_until > before.valid_until:
            before = hold


def check_fences(holds: Iterable[HoldRecord]) -> None:
    """Check that a later hold has the greater fence.

    A process that did not run until after its deadline never held the lock, so it is skipped.
    """
    held = [hold for hold in holds if hold.granted < hold.deadline]
    for before, hold in itertools.pairwise(sorted(held, key=attrgetter("granted"))):
        assert hold.fence > before.fence, f"the fence did not grow: {before}, {hold}"


def check_updates(holds: Sequence[HoldRecord], left: int) -> None:
    """Check that each holder found its predecessor's value, and that `left` is the last one's."""
    for number, hold in enumerate(sorted(holds, key=attrgetter("fence"))):
        assert hold.found == number, f"an update was lost before: {hold}, not {number}"
    assert left == len(holds), f"an update was lost: {left} are left of {len(holds)}"


def check_order(holds: Iterable[HoldRecord], arrivals: Iterable[str]) -> None:
    """Check that the lock was granted in the order in which tokens arrived at the server."""
    granted = [hold.token for hold in sorted(holds, key=attrgetter("fence"))]
    known = set(granted)
    arrived = [token for token in arrivals if token in known]
    assert len(arrived) == len(granted), "a token that never arrived was granted the lock"
    for place, (arrival, grant) in enumerate(zip(arrived, granted, strict=True)):
        assert arrival == grant, f"{place}: {arrival} arrived, but {grant} was granted the lock"


def gaps(holds: Iterable[HoldRecord]) -> list[float]:
    """Return the seconds from the end of each release to the next grant, sorted.

    Only pairs whose next holder was already waiting count. A gap is negative if the next holder's
    `acquire` returned before its predecessor's `release` did.
    """
    in_order = sorted(holds, key=attrgetter("fence"))
    return sorted(
        after.granted - before.returned
        for before, after in itertools.pairwise(in_order)
        if after.requested < before.ended
    )


# The server's record


class Monitor:
    """Records every command that a server executes, in order. Use it as a context manager."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._received: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(server.unix_path)
        self._socket.sendall(b"MONITOR\r\n")
        self._end = f"the end of {id(self)}"
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            eventually(lambda: self._received, what="an answer to MONITOR")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._socket.close()

    def lines(self) -> list[bytes]:
        """Return the commands executed before this call, one per line."""
        self._server.command("ECHO", self._end)
        self._thread.join(60)
        assert not self._thread.is_alive(), "MONITOR did not report the end marker"
        return b"".join(self._received).splitlines()

    def _read(self) -> None:
        end, tail = self._end.encode(), b""
        while end not in tail:
            received = self._socket.recv(1 << 20)
            if not received:
                return
            self._received.append(received)
            tail = tail[-len(end) :] + received


class Ledger:
    """The history of the contended lock, reconstructed from the commands of a `Monitor`.

    MONITOR does not show expirations, so this works only if no lock and no waiter expires.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.arrivals: dict[str, None] = {}
        """The tokens, in the order in which they joined the queue or got the lock directly."""
        self.requests: Counter[str] = Counter()
        """How often each token requested a place in the queue."""
        self.grants: list[str] = []
        """The tokens, in the order in which they got the lock."""
        self.commands: Counter[str] = Counter()
        """How often each command was sent. Commands inside scripts do not count."""
        self.idle: list[bytes] = []
        """The commands that found the lock free although the queue was not empty."""
        self._free = True
        self._queue: set[str] = set()
        for line in lines:
            _, _, command = line.partition(b"] ")
            if b" lua] " in line:
                self._called(command)
            elif command:
                self._sent(command)

    def _sent(self, command: bytes) -> None:
        if self._free and self._queue:
            self.idle.append(command)
        self.commands[command.split(b'"', 2)[1].decode().lower()] += 1
        if command.startswith(_ACQUIRING):
            _, _, keys, *rest = _words(command)
            token, _, *waiting = rest[int(keys) :]
            # `waiting` is place, settings and serial; or the serial alone.
            if len(waiting) > 1 and waiting[0]:
                self.arrivals.setdefault(token)
                self.requests[token] += 1

    def _called(self, command: bytes) -> None:
        if command.startswith(_GRANTING):
            token = _words(command)[2]
            self.arrivals.setdefault(token)
            self.grants.append(token)
            self._free = False
        elif command.startswith(_FREEING):
            self._free = True
        elif command.startswith(_QUEUEING):
            self._queue.add(_words(command)[-1].removeprefix("!"))
        elif command.startswith(_LEAVING):
            self._queue.difference_update(word.removeprefix("!") for word in _words(command)[2:])


_ACQUIRING = f'"EVALSHA" "{ACQUIRE.sha}" '.encode()
_GRANTING = f'"SET" "{KEY}" '.encode()
_FREEING = f'"DEL" "{KEY}"'.encode()
_QUEUEING = f'"ZADD" "{KEY}:queue" "NX" '.encode()
_LEAVING = f'"ZREM" "{KEY}:queue" '.encode()
_FORGIVEN = holdfast.NodeUnavailable, holdfast.OutcomeUnknown, holdfast.LeaseLost
_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')


def _words(command: bytes) -> list[str]:
    return [word.decode() for word in _WORD.findall(command)]


# Contenders


class Contenders:
    """Processes of one API. Each has `workers` workers that acquire the lock `turns` times.

    The lock may be in a cluster whose nodes fail. Then the counter is on another server, `counts`,
    and a worker retries when a lease is lost or a node is unavailable.
    """

    def __init__(  # noqa: PLR0913 - all but two are keyword-only
        self,
        server: Server | Cluster,
        api: type[Api],
        *,
        processes: int,
        workers: int,
        turns: int,
        counts: Server | None = None,
    ) -> None:
        counter = "" if counts is None else counts.url
        words = [sys.executable, "-m", __name__, server.url, counter, api.name]
        words += [str(workers), str(turns)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._processes = [
            subprocess.Popen(
                words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(processes)
        ]

    def __enter__(self) -> Self:
        try:
            for process in self._processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n", "a contender did not start"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def run(self, *, within: float) -> list[HoldRecord]:
        """Start all workers, wait for them, and return the holds that they recorded."""
        end = now() + within
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        holds: list[HoldRecord] = []
        for process in self._processes:
            seen, _ = process.communicate(timeout=max(0.0, end - now()))
            assert process.returncode == 0, "a contender failed; its traceback is on stderr"
            holds += [HoldRecord(*json.loads(line)) for line in seen.splitlines()]
        return holds


async def _done(result: Any) -> Any:
    """Await the result of an asyncio client; return that of a blocking one."""
    return await result if inspect.isawaitable(result) else result


async def _take_turns(
    lock: Any, counter: Any, turns: int, forgiven: tuple[type[Exception], ...]
) -> list[HoldRecord]:
    holds: list[HoldRecord] = []
    while len(holds) < turns:
        requested = now()
        try:
            lease = await lock.acquire(timeout=30)
        except forgiven:
            continue
        granted = now()
        found = int(await _done(counter.get(COUNTER)) or 0)
        await _done(counter.set(COUNTER, found + 1))
        deadline, ended = lease._state.deadline, now()
        with contextlib.suppress(*forgiven):
            await lease.release()
        holds.append(
            HoldRecord(lease.token, lease.fence, requested, granted, ended, deadline, now(), found)
        )
    return holds


async def _contend(api: Api, url: str, counts: str, workers: int, turns: int) -> None:
    library: Any = redis if isinstance(api, Threads) else redis.asyncio
    client, counter = api.connect(url), library.Redis.from_url(counts or url)
    lock, forgiven = client.lock(LOCK, ttl=CALM_TTL), tuple[type[Exception], ...]()
    if counts:
        lock, forgiven = client.lock(LOCK, ttl=FAULTY_TTL), _FORGIVEN
    await _done(counter.ping())
    async with client.lock(f"warm-up of {os.getpid()}"):
        pass
    print("ready", flush=True)  # noqa: T201 - the parent process reads it
    sys.stdin.readline()
    scenarios = (_take_turns(lock, counter, turns, forgiven) for _ in range(workers))
    seen = await api.gather(*scenarios)
    await _done(counter.close() if isinstance(api, Threads) else counter.aclose())
    for hold in itertools.chain(*seen):
        print(json.dumps(hold))  # noqa: T201 - the parent process reads it


if __name__ == "__main__":
    _url, _counts, _face, _workers, _turns = sys.argv[1:]
    _client_api: Api = {kind.name: kind for kind in (Threads, Tasks)}[_face]()
    _client_api.run(_contend(_client_api, _url, _counts, int(_workers), int(_turns)))
