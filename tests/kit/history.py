"""Histories: what contenders for a lock saw, what the server did, and whether that was as promised.

Contenders run in processes of their own (`Contenders`, which starts this very file) and write down
each of their holds, on a clock that all processes of a machine share. What the server did is read
off its MONITOR (`Monitor`, `Ledger`): that knows no delays of the network or the machine, so that
what it shows needs no margin for them.

The checks are sweeps over such records. They touch no server, and fail with an AssertionError that
names the first holds that contradict one another.
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
from kit.faces import Tasks, Threads
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

    from kit.clusters import Cluster
    from kit.faces import Face
    from kit.servers import Server

LOCK = "contended"
KEY = f"holdfast:{{{LOCK}}}"
TTL_IN_PEACE, TTL_IN_TURMOIL = 30.0, 5.0
COUNTER = "counter"
"""What the lock guards: a number that is read, and then written one greater."""


class Hold(NamedTuple):
    """One holding of the lock, as its holder saw it. Times are of `holdfast.wire.clock`."""

    token: str
    fence: int
    asked: float
    """Just before asking for the lock."""
    granted: float
    """Just after getting it."""
    ended: float
    """Just before giving it back, and with it the belief to have it."""
    deadline: float
    """When the belief would have ended by itself."""
    returned: float
    """Just after giving it back."""
    found: int
    """What the guarded counter was, before this holder wrote one more."""

    @property
    def believed_until(self) -> float:
        """The last moment at which its holder took the lock for its own."""
        return min(self.ended, self.deadline)


# The checks


def check_exclusion(holds: Iterable[Hold]) -> None:
    """No two believed in having the lock at one moment."""
    before: Hold | None = None
    for hold in sorted(holds, key=attrgetter("granted")):
        if before is not None:
            assert hold.granted >= before.believed_until, f"both had it: {before}, {hold}"
        if before is None or hold.believed_until > before.believed_until:
            before = hold


def check_fences(holds: Iterable[Hold]) -> None:
    """A later holder has the greater fence.

    A holder that was not given the processor before its deadline held nothing when it looked.
    """
    held = [hold for hold in holds if hold.granted < hold.deadline]
    for before, hold in itertools.pairwise(sorted(held, key=attrgetter("granted"))):
        assert hold.fence > before.fence, f"the fence did not grow: {before}, {hold}"


def check_updates(holds: Sequence[Hold], left: int) -> None:
    """Each holder found what the one before it had written, and the last one's is `left`."""
    for number, hold in enumerate(sorted(holds, key=attrgetter("fence"))):
        assert hold.found == number, f"an update was lost before: {hold}, not {number}"
    assert left == len(holds), f"an update was lost: {left} are left of {len(holds)}"


def check_order(holds: Iterable[Hold], arrivals: Iterable[str]) -> None:
    """They had it in the order in which their tokens came to the server."""
    served = [hold.token for hold in sorted(holds, key=attrgetter("fence"))]
    there = set(served)
    came = [token for token in arrivals if token in there]
    assert len(came) == len(served), "some were served who never came"
    for place, (first_come, first_served) in enumerate(zip(came, served, strict=True)):
        assert first_come == first_served, f"{place}: {first_come} came, {first_served} was served"


def gaps(holds: Iterable[Hold]) -> list[float]:
    """Seconds from one holder's having given the lock back to the next one's going on.

    Only where the next one waited already; below zero if it went on even before the other did.
    """
    in_order = sorted(holds, key=attrgetter("fence"))
    return sorted(
        after.granted - before.returned
        for before, after in itertools.pairwise(in_order)
        if after.asked < before.ended
    )


# What the server did


class Monitor:
    """Every command that a server carries out while this is open, in order; see `lines`."""

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
        """What was carried out before this call, a line a command."""
        self._server.command("ECHO", self._end)
        self._thread.join(60)
        assert not self._thread.is_alive(), "MONITOR does not come to its end"
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
    """The life of the contended lock, played again from what a `Monitor` saw.

    The server does not list what expires: this is for histories in which nobody is lost.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.arrivals: dict[str, None] = {}
        """The tokens, in the order in which they stood in line, or got the lock at once."""
        self.askings: Counter[str] = Counter()
        """How often each of them asked to stand in line."""
        self.grants: list[str] = []
        """The tokens, in the order in which they got the lock."""
        self.commands: Counter[str] = Counter()
        """How often each command was sent. What a script calls is not counted."""
        self.idle: list[bytes] = []
        """The commands that found the lock free although somebody stood in line."""
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
            if len(waiting) > 1 and waiting[0]:  # a place, settings and the serial; or that alone
                self.arrivals.setdefault(token)
                self.askings[token] += 1

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


# The contenders


class Contenders:
    """Processes of one face, each with so many workers that take so many turns at the lock.

    The lock may be in a cluster whose nodes come and go: then the counter is kept elsewhere, on
    `counts`, and a worker goes on when it is told that a lease is lost or a node away.
    """

    def __init__(  # noqa: PLR0913 - who contends, and for what
        self,
        server: Server | Cluster,
        face: type[Face],
        *,
        processes: int,
        workers: int,
        turns: int,
        counts: Server | None = None,
    ) -> None:
        counter = "" if counts is None else counts.url
        words = [sys.executable, "-m", __name__, server.url, counter, face.name]
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

    def run(self, *, within: float) -> list[Hold]:
        """Let them all begin, and return what they saw once all are done."""
        end = now() + within
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        holds: list[Hold] = []
        for process in self._processes:
            seen, _ = process.communicate(timeout=max(0.0, end - now()))
            assert process.returncode == 0, "a contender failed; its traceback is on stderr"
            holds += [Hold(*json.loads(line)) for line in seen.splitlines()]
        return holds


async def _done(result: Any) -> Any:
    """Wait for what a client of asyncio answers; a blocking one's answer is there."""
    return await result if inspect.isawaitable(result) else result


async def _take_turns(
    lock: Any, counter: Any, turns: int, forgiven: tuple[type[Exception], ...]
) -> list[Hold]:
    holds: list[Hold] = []
    while len(holds) < turns:
        asked = now()
        try:
            lease = await lock.acquire(timeout=30)
        except forgiven:
            continue
        granted = now()
        found = int(await _done(counter.get(COUNTER)) or 0)
        await _done(counter.set(COUNTER, found + 1))
        deadline, ended = lease._held.deadline, now()
        with contextlib.suppress(*forgiven):
            await lease.release()
        holds.append(Hold(lease.token, lease.fence, asked, granted, ended, deadline, now(), found))
    return holds


async def _contend(face: Face, url: str, counts: str, workers: int, turns: int) -> None:
    library: Any = redis if isinstance(face, Threads) else redis.asyncio
    client, counter = face.connect(url), library.Redis.from_url(counts or url)
    lock, forgiven = client.lock(LOCK, ttl=TTL_IN_PEACE), tuple[type[Exception], ...]()
    if counts:
        lock, forgiven = client.lock(LOCK, ttl=TTL_IN_TURMOIL), _FORGIVEN
    await _done(counter.ping())
    async with client.lock(f"warm-up of {os.getpid()}"):
        pass
    print("ready", flush=True)  # noqa: T201 - said to the one who started this process
    sys.stdin.readline()
    stories = (_take_turns(lock, counter, turns, forgiven) for _ in range(workers))
    seen = await face.together(*stories)
    await _done(counter.close() if isinstance(face, Threads) else counter.aclose())
    for hold in itertools.chain(*seen):
        print(json.dumps(hold))  # noqa: T201 - likewise


if __name__ == "__main__":
    _url, _counts, _face, _workers, _turns = sys.argv[1:]
    _told_by: Face = {kind.name: kind for kind in (Threads, Tasks)}[_face]()
    _told_by.run(_contend(_told_by, _url, _counts, int(_workers), int(_turns)))
