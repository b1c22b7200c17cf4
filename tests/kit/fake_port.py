"""A port without a server: a test plans every answer, and time passes only where it says so.

It is also the background of its session, in which nothing ever runs.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.deployment import OneServer
from holdfast.core.messages import channel_of
from holdfast.core.renewer import Cleanup
from holdfast.core.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.core.events import Event
    from holdfast.core.line import Line
    from holdfast.keys import Keys
    from holdfast.port import Request

CLIENT = "us"
BEGAN = 1000.0
"""The time at which every test begins."""
TOO_LONG = 100_000.0


class FakeSignal:
    """What an attempt waits for."""

    is_set = False

    def set(self) -> None:
        self.is_set = True


class Sent(NamedTuple):
    """A request: when it was sent, what, and how long its answer was awaited."""

    script: str
    at: float
    args: tuple[str, ...]
    limit: float
    keys: Keys


class FakePort:
    """`answers` has, per script and for "listen", what comes next: a reply, an error, or a call.

    Without a plan the answer is 1. The answer 0 to "listen" is a connection that is lost at once.
    """

    def __init__(self, *, polls: bool = False, longest_ttl: float = math.inf) -> None:
        self.time = BEGAN
        self.luck = 0.5
        self.pid = 7
        self.who: object = "Main"
        self.blocked: set[object] = set()
        self.can_run = True
        self.roused = 0
        self.answers: dict[str, list[Any]] = {}
        self.sent: list[Sent] = []
        self.slept: list[float] = []
        self.later: list[tuple[float, Callable[[], object]]] = []
        """What happens at which time, in order."""
        self.on_signal: Callable[[], object] = lambda: None
        """What happens when a signal is made."""
        self.lines: dict[bytes, Line] = {}
        self.events: list[Event] = []
        self._number = count(1)
        us: Any = self
        deployment = OneServer(self.call, longest_ttl)
        self.session = Session(us, lambda: us, self.events.append, deployment, polls=polls)

    def of(self, script: str) -> list[Sent]:
        """The requests of one script."""
        return [each for each in self.sent if each.script == script]

    @property
    def cleanups(self) -> list[Request]:
        """What is left to the background."""
        handed_in = self.session.renewer.handed_in
        return [item.request for item in handed_in if isinstance(item, Cleanup)]

    # The port

    def now(self) -> float:
        return self.time

    def process(self) -> int:
        return self.pid

    def actor(self) -> object:
        return self.who

    def blocks(self, actor: object) -> bool:
        return actor in self.blocked

    def has_ended(self, _: object) -> bool:
        return False

    new_mutex = staticmethod(nullcontext)

    def draw_token(self, actor: object, suffix: str) -> str:
        return f"hf1:{CLIENT}:{next(self._number)}:ann@web:7:{actor}:{suffix}"

    def jitter(self) -> float:
        return self.luck

    def signal(self) -> FakeSignal:
        self.on_signal()
        return FakeSignal()

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        await operation

    async def call(self, script: Any, keys: Keys, args: tuple[str, ...], timeout: float) -> Any:
        return self._answer(Sent(script.name, self.time, args, timeout, keys))

    def _answer(self, sent: Sent) -> Any:
        self.sent.append(sent)
        plan = self.answers.get(sent.script)
        if plan is None:
            return 1
        assert plan, f"{sent} is one request too many"
        answer = plan.pop(0)
        answer = answer() if callable(answer) else answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def line(self, make: Callable[[bytes], Line], keys: Keys) -> Line:
        channel = channel_of(CLIENT, keys[0])
        if channel not in self.lines:
            self.lines[channel] = make(channel)
        return self.lines[channel]

    async def listen(self, line: Line, timeout: float, keys: Keys) -> None:
        opened = self._answer(Sent("listen", self.time, (), timeout, keys))
        if opened and not line.listening:
            line.opened(self.time, lambda: None)

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        until = self.time + seconds
        while self.time < until:
            self._pass(until)

    async def wait(self, signal: FakeSignal, timeout: float) -> bool:
        until = self.time + timeout
        while True:
            due = self._tick()
            if signal.is_set or self.time >= until:
                was_set, signal.is_set = signal.is_set, False
                return was_set
            self._pass(min(due, until))

    def _tick(self) -> float:
        """Let the push connections work, which answer PINGs at once; say when to do so again."""
        due = math.inf
        for line in self.lines.values():
            if line.listening:
                pings, wake_at = line.tick(self.time)
                for _, payload in pings:
                    line.heard([b"pong", payload], self.time)
                due = min(due, wake_at)
        return due

    def _pass(self, until: float) -> None:
        """Let time pass until then, or until something happens before."""
        assert until < TOO_LONG or self.later, "nothing ends this wait"
        if self.later and self.later[0][0] <= until:
            self.time, do = self.later.pop(0)
            do()
        else:
            self.time = until

    # The background

    def rouse(self, _: object) -> bool:
        self.roused += 1
        return self.can_run
