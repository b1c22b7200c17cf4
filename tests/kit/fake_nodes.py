"""A port, a background and nodes without a server, with a clock that the test sets."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

from holdfast.adapters.lines import Lines
from holdfast.core.deployment import OneServer
from holdfast.core.session import Session
from holdfast.scripts import VOTE

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from holdfast.core.events import Event
    from holdfast.core.quorum import Quorum
    from holdfast.core.renewer import Cleanup
    from holdfast.keys import Keys
    from holdfast.port import Heard, Post, Request

CLIENT = "me"


class CountedSignal:
    """A signal that nothing waits for."""

    was_set = False

    def set(self) -> None:
        self.was_set = True


class ClockedPort:
    """Port and background in one: what is sent is noted, and time passes only in pauses."""

    def __init__(self) -> None:
        self.time = 100.0
        self.number = 1
        """Of the process."""
        self.caller: object = "main"
        self.luck = 1.0
        self.blocked: set[object] = set()
        self.can_run = True
        self.roused = 0
        self.slept: list[float] = []
        self.waited: list[float] = []
        self.signals: list[object] = []
        """What was waited for."""
        self.during_pause: Callable[[], object] = lambda: None
        self.called: list[Request] = []
        self.answer: Callable[[Request], Any] = lambda _: 1
        self.listened: list[tuple[int | None, float]] = []
        self.listen_error: Exception | None = None
        self._lines = Lines(CLIENT)
        self._numbers = count(1)

    def now(self) -> float:
        return self.time

    def process(self) -> int:
        return self.number

    def actor(self) -> object:
        return self.caller

    def jitter(self) -> float:
        return self.luck

    def wall_clock(self) -> int:
        return 5_000_000

    def has_ended(self, _: object) -> bool:
        return False

    def blocks(self, actor: object) -> bool:
        return actor in self.blocked

    new_mutex = staticmethod(nullcontext)

    def draw_token(self, actor: object, suffix: str) -> str:
        return f"hf1:{CLIENT}:{next(self._numbers)}:ann@here:1:{actor}:{suffix}"

    def signal(self) -> CountedSignal:
        return CountedSignal()

    def line(self, make: Any, keys: Keys) -> Any:
        return self._lines.line(make, keys)

    async def call(self, script: Any, keys: Keys, args: tuple[str, ...], _: float) -> Any:
        request = script, keys, args
        self.called.append(request)
        return self.answer(request)

    async def listen(self, listener: Any, timeout: float, keys: Keys) -> None:
        self.listened.append((keys.node, timeout))
        if self.listen_error is not None:
            raise self.listen_error
        listener.opened(self.time, lambda: None)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        self.during_pause()

    async def wait(self, signal: object, timeout: float) -> bool:
        self.signals.append(signal)
        self.waited.append(timeout)
        self.time += timeout
        self.during_pause()
        return False

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        await operation

    def rouse(self, _: object) -> bool:
        self.roused += 1
        return self.can_run


class FakeNodes:
    """Three nodes. `rounds` has what each answers to the votes of each round; the last repeats."""

    names = ("a:1", "b:2", "c:3")
    new_locations_mutex = staticmethod(nullcontext)

    def __init__(self, port: ClockedPort) -> None:
        self._port = port
        self.rounds: list[list[Any]] = []
        self.lasts = 0.0
        """Seconds that a round of votes takes."""
        self.asked: list[tuple[str, list[int], float, tuple[str, ...]]] = []
        self.before: dict[str, Callable[[], object]] = {}
        self.slow: set[int] = set()
        """Nodes that have not answered a release yet."""

    async def ask(
        self, posts: Sequence[Post], timeout: float, heard: Heard, meanwhile: object = None
    ) -> None:
        assert meanwhile is None
        for number, (nodes, (script, _, args)) in enumerate(posts):
            self.asked.append((script.name, list(nodes), timeout, args))
            assert len(self.asked) < 1000, "it asks for ever"
            self.before.pop(script.name, lambda: None)()
            answers: list[Any] = [1, 1, 1]
            if script is VOTE:
                answers = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
                self._port.time += self.lasts
            for node in [node for node in nodes if script is VOTE or node not in self.slow]:
                heard(number, node, answers[node])

    def sent(self, script: str) -> list[tuple[list[int], float, tuple[str, ...]]]:
        """To which nodes, with which time limits, and with which arguments it was sent."""
        return [(nodes, limit, args) for name, nodes, limit, args in self.asked if name == script]


def session_of(
    port: Any,
    report: Callable[[Event], None] = lambda _: None,
    *,
    polls: bool = False,
    longest_ttl: float = 60.0,
    quorum: Quorum | None = None,
) -> Session:
    """A session of that port, which is also its background."""
    deployment = quorum or OneServer(port.call, longest_ttl)
    return Session(port, lambda: port, report, deployment, polls=polls)


def cleanups_of(session: Session) -> list[Cleanup]:
    """What the background is to clean up."""
    return list(session.renewer._cleanups.values())
