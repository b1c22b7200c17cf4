"""A port without a server: a test plans every reply, and time passes only as planned.

It is also the background of its session; no background task ever runs.
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
    from holdfast.core.waiter_channel import WaiterChannel
    from holdfast.keys import Keys
    from holdfast.port import Request

CLIENT = "us"
BEGAN = 1000.0
"""The clock's time when a test begins."""
TOO_LONG = 100_000.0


class FakeSignal:
    """The signal that an attempt waits for."""

    is_set = False

    def set(self) -> None:
        self.is_set = True


class Sent(NamedTuple):
    """A request, the time at which it was sent, and its timeout (`limit`)."""

    script: str
    at: float
    args: tuple[str, ...]
    limit: float
    keys: Keys


class FakePort:
    """A fake port. `replies` holds planned results per script, and under "listen".

    A result is a reply, an error to raise, or a callable that returns either. Without a plan the
    reply is 1. The reply 0 to "listen" is a connection that is lost immediately.
    """

    def __init__(self, *, polls: bool = False, longest_ttl: float = math.inf) -> None:
        self.time = BEGAN
        self.jitter_value = 0.5
        self.pid = 7
        self.current_actor: object = "Main"
        self.blocked: set[object] = set()
        self.can_run = True
        self.wake_calls = 0
        self.replies: dict[str, list[Any]] = {}
        self.sent: list[Sent] = []
        self.slept: list[float] = []
        self.later: list[tuple[float, Callable[[], object]]] = []
        """Planned actions and their times, in order."""
        self.on_signal: Callable[[], object] = lambda: None
        """Called when a signal is created."""
        self.channels: dict[bytes, WaiterChannel] = {}
        self.events: list[Event] = []
        self._number = count(1)
        us: Any = self
        deployment = OneServer(self.call, longest_ttl)
        self.session = Session(us, lambda: us, self.events.append, deployment, polls=polls)

    def requests_of(self, script: str) -> list[Sent]:
        """Return the requests of one script."""
        return [each for each in self.sent if each.script == script]

    @property
    def cleanups(self) -> list[Request]:
        """The requests of the cleanups that were handed to the background."""
        inbox = self.session.renewer.inbox
        return [item.request for item in inbox if isinstance(item, Cleanup)]

    # The port

    def now(self) -> float:
        return self.time

    def process(self) -> int:
        return self.pid

    def actor(self) -> object:
        return self.current_actor

    def blocks(self, actor: object) -> bool:
        return actor in self.blocked

    def has_ended(self, _: object) -> bool:
        return False

    new_mutex = staticmethod(nullcontext)

    def new_token(self, actor: object, suffix: str) -> str:
        return f"hf1:{CLIENT}:{next(self._number)}:ann@web:7:{actor}:{suffix}"

    def jitter(self) -> float:
        return self.jitter_value

    def signal(self) -> FakeSignal:
        self.on_signal()
        return FakeSignal()

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        await operation

    async def call(self, script: Any, keys: Keys, args: tuple[str, ...], timeout: float) -> Any:
        return self._reply(Sent(script.name, self.time, args, timeout, keys))

    def _reply(self, sent: Sent) -> Any:
        self.sent.append(sent)
        plan = self.replies.get(sent.script)
        if plan is None:
            return 1
        assert plan, f"{sent} is one request too many"
        reply = plan.pop(0)
        reply = reply() if callable(reply) else reply
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def channel(self, make: Callable[[bytes], WaiterChannel], keys: Keys) -> WaiterChannel:
        name = channel_of(CLIENT, keys[0])
        if name not in self.channels:
            self.channels[name] = make(name)
        return self.channels[name]

    async def listen(self, channel: WaiterChannel, timeout: float, keys: Keys) -> None:
        opened = self._reply(Sent("listen", self.time, (), timeout, keys))
        if opened and not channel.is_subscribed:
            channel.on_subscribed(self.time, lambda: None)

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
        """Let the pub/sub connections send PINGs and receive PONGs; return when the next is due."""
        due = math.inf
        for channel in self.channels.values():
            if channel.is_subscribed:
                pings, wake_at = channel.tick(self.time)
                for _, payload in pings:
                    channel.on_message([b"pong", payload], self.time)
                due = min(due, wake_at)
        return due

    def _pass(self, until: float) -> None:
        """Advance the clock to `until`, or to the next planned action and run that."""
        assert until < TOO_LONG or self.later, "nothing ends this wait"
        if self.later and self.later[0][0] <= until:
            self.time, do = self.later.pop(0)
            do()
        else:
            self.time = until

    # The background

    def wake(self, _: object) -> bool:
        self.wake_calls += 1
        return self.can_run
