"""A campaign: processes that go on taking a lock while things go wrong, and what came of it.

What the lock guards is kept on a server that nothing happens to: a counter that is read and then
written one greater, and that takes a read or a write only with a fence as high as any it has seen.
It also keeps a log of what it accepted. So a campaign can be judged twice: by what the contenders
believed, on a clock that all processes of a machine share, and by the guarded thing itself.

Contenders go on until they are told to stop; errors about a lock are counted, and they try again.
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
from kit.faces import Face, Tasks, Threads
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
    """One holding of the lock, as its holder saw it. Times are of `holdfast.wire.clock`."""

    token: str
    fence: int
    asked: float
    granted: float
    believed_until: float
    how: str
    """"released", or the name of the error that ended it."""


class Report(NamedTuple):
    """What came of a campaign."""

    turns: list[Turn]
    errors: Counter[str]
    log: list[tuple[int, str]]
    """What the guarded thing accepted, in its order: fence and token."""
    value: int

    def check_exclusion(self) -> None:
        """No two believed in having the lock at one moment."""
        last: Turn | None = None
        for turn in sorted(self.turns, key=attrgetter("granted")):
            if last is not None:
                assert turn.granted >= last.believed_until, f"both had it: {last}, {turn}"
            if last is None or turn.believed_until > last.believed_until:
                last = turn

    def check_fences(self, *, since: str = "granted") -> None:
        """No two had one fence; who was granted after another had ended has the higher one.

        Where exclusion may end, a slow one may hear of its grant when another has come and gone
        since: then it counts when it was `asked` for.
        """
        assert len({turn.fence for turn in self.turns}) == len(self.turns), "a fence came twice"
        ended = sorted(self.turns, key=attrgetter("believed_until"))
        highest, done = 0, 0
        for turn in sorted(self.turns, key=attrgetter(since)):
            while ended[done].believed_until < getattr(turn, since):
                highest = max(highest, ended[done].fence)
                done += 1
            assert turn.fence > highest, f"a fence did not grow: {turn}, after {highest}"

    def check_resource(self) -> None:
        """What the fences let through lost no update."""
        fences = [fence for fence, _ in self.log]
        assert fences == sorted(fences)
        assert self.value == len(self.log), f"{len(self.log) - self.value} updates were lost"
        whose: dict[int, str] = {}
        for fence, token in self.log:
            assert whose.setdefault(fence, token) == token, f"{fence} let two through"


class Campaign:
    """Contenders in processes of their own, of both faces in turn, while this is open."""

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
        faces = [("threads", "asyncio")[number % 2] for number in range(processes)]
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", __name__, face),
                    json.dumps([targets, resource.url, workers, ttl, settings]),
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for face in faces
        ]

    def accepted(self) -> int:
        """How many turns have been through so far."""
        return int(self._resource.command("LLEN", "log"))

    def goes_on(self, turns: int = 30, within: float = 30.0) -> None:
        """Wait until so many more turns have been through."""
        goal = self.accepted() + turns
        eventually(lambda: self.accepted() >= goal, within=within, what=f"{turns} more turns")

    def end(self) -> Report:
        """Have all contenders finish their turns, and return what they saw."""
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
    """One worker of a contending process."""

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
            asked = lease._held.deadline - validity_of(self._ttl)
            self._change(lease)
            deadline, ended = lease._held.deadline, now()
            try:
                await lease.release()
            except holdfast.HoldfastError as error:
                how = type(error).__name__
                self.errors[how] += 1
            believed = min(deadline, ended)
            self.turns.append(Turn(lease.token, lease.fence, asked, granted, believed, how))
        self._guarded.close()

    def _change(self, lease: Any) -> None:
        """Read, and write one greater: short enough for an event loop to wait for."""
        found: Any = self._guarded.eval(_READ, 0, str(lease.fence))
        if found >= 0:
            self._guarded.eval(_WRITE, 0, str(lease.fence), str(found + 1), lease.token)


async def _contend(face: Face, arguments: Sequence[Any]) -> None:
    targets, resource, workers, ttl, settings = arguments
    client = face.connect(targets, **settings)
    stop = threading.Event()

    def until_told() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=until_told, daemon=True).start()
    contenders = [_Contender(client, resource, ttl, stop) for _ in range(workers)]
    await face.together(*(contender.work() for contender in contenders))
    turns = [turn for contender in contenders for turn in contender.turns]
    errors = sum((contender.errors for contender in contenders), Counter[str]())
    print(json.dumps([turns, errors]), flush=True)  # noqa: T201 - for the one who started this


if __name__ == "__main__":
    _told_by: Face = {kind.name: kind for kind in (Threads, Tasks)}[sys.argv[1]]()
    _told_by.run(_contend(_told_by, json.loads(sys.argv[2])))
