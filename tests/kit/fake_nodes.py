"""A port, a background and nodes without a server, with a manual clock."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

from holdfast.adapters.waiter_channels import WaiterChannels
from holdfast.core.deployment import OneServer
from holdfast.core.session import Session
from holdfast.scripts import VOTE

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from holdfast.core.events import Event
    from holdfast.core.quorum import Quorum
    from holdfast.core.renewer import Cleanup
    from holdfast.keys import Keys
    from holdfast.port import OnReply, Post, Request

CLIENT = "me"


class CountedSignal:
    """A signal that only records whether it was set."""

    was_set = False

    def set(self) -> None:
        self.was_set = True


class ClockedPort:
    """Port and background in one. It records requests; time passes only in pauses."""

    def __init__(self) -> None:
        self.time = 100.0
        self.number = 1
        """The process id."""
        self.caller: object = "main"
        self.jitter_value = 1.0
        self.blocked: set[object] = set()
        self.can_run = True
        self.wake_calls = 0
        self.slept: list[float] = []
        self.waited: list[float] = []
        self.signals: list[object] = []
        """The signals that were waited for."""
        self.during_pause: Callable[[], object] = lambda: None
        self.called: list[Request] = []
        self.answer: Callable[[Request], Any] = lambda _: 1
        self.listened: list[tuple[int | None, float]] = []
        self.listen_error: Exception | None = None
        self._channels = WaiterChannels(CLIENT)
        self._numbers = count(1)

    def now(self) -> float:
        return self.time

    def process(self) -> int:
        return self.number

    def actor(self) -> object:
        return self.caller

    def jitter(self) -> float:
        return self.jitter_value

    def wall_clock(self) -> int:
        return 5_000_000

    def has_ended(self, _: object) -> bool:
        return False

    def blocks(self, actor: object) -> bool:
        return actor in self.blocked

    new_mutex = staticmethod(nullcontext)

    def new_token(self, actor: object, suffix: str) -> str:
        return f"hf1:{CLIENT}:{next(self._numbers)}:ann@here:1:{actor}:{suffix}"

    def signal(self) -> CountedSignal:
        return CountedSignal()

    def channel(self, make: Any, keys: Keys) -> Any:
        return self._channels.channel(make, keys)

    async def call(self, script: Any, keys: Keys, args: tuple[str, ...], _: float) -> Any:
        request = script, keys, args
        self.called.append(request)
        return self.answer(request)

    async def listen(self, listener: Any, timeout: float, keys: Keys) -> None:
        self.listened.append((keys.node, timeout))
        if self.listen_error is not None:
            raise self.listen_error
        listener.on_subscribed(self.time, lambda: None)

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

    def wake(self, _: object) -> bool:
        self.wake_calls += 1
        return self.can_run


class FakeNodes:
    """Three nodes. `rounds` holds the replies to each round of votes; the last round repeats."""

    names = ("a:1", "b:2", "c:3")
    new_locations_mutex = staticmethod(nullcontext)

    def __init__(self, port: ClockedPort) -> None:
        self._port = port
        self.rounds: list[list[Any]] = []
        self.duration = 0.0
        """Seconds that a round of votes takes."""
        self.requests: list[tuple[str, list[int], float, tuple[str, ...]]] = []
        self.before: dict[str, Callable[[], object]] = {}
        self.slow: set[int] = set()
        """Nodes that do not reply to a release."""

    async def send_all(
        self, posts: Sequence[Post], timeout: float, on_reply: OnReply, on_tick: object = None
    ) -> None:
        assert on_tick is None
        for number, (nodes, (script, _, args)) in enumerate(posts):
            self.requests.append((script.name, list(nodes), timeout, args))
            assert len(self.requests) < 1000, "the attempt does not end"
            self.before.pop(script.name, lambda: None)()
            answers: list[Any] = [1, 1, 1]
            if script is VOTE:
                answers = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
                self._port.time += self.duration
            for node in [node for node in nodes if script is VOTE or node not in self.slow]:
                on_reply(number, node, answers[node])

    def sent(self, script: str) -> list[tuple[list[int], float, tuple[str, ...]]]:
        """Return nodes, timeout and arguments of each request of a script."""
        return [
            (nodes, limit, args) for name, nodes, limit, args in self.requests if name == script
        ]


def session_of(
    port: Any,
    report: Callable[[Event], None] = lambda _: None,
    *,
    polls: bool = False,
    longest_ttl: float = 60.0,
    quorum: Quorum | None = None,
) -> Session:
    """Make a session with this port, which is also its background."""
    deployment = quorum or OneServer(port.call, longest_ttl)
    return Session(port, lambda: port, report, deployment, polls=polls)


def cleanups_of(session: Session) -> list[Cleanup]:
    """Return the pending cleanups of a session."""
    return list(session.renewer._cleanups.values())
