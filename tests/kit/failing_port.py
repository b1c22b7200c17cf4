"""A port that fails where a test says so, in front of a real server, with a clock that is set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import holdfast
from holdfast.core.deployment import OneServer
from kit.fake_nodes import CountedSignal

if TYPE_CHECKING:
    from collections.abc import Callable

UNSENT, LOST, LATE = "unsent", "lost", "late"
"""What becomes of a request: it is not sent; its answer is lost; it has not arrived yet."""


class FailingPort:
    """The port of a client. `plan` says, per script, what becomes of its next requests."""

    def __init__(self, port: Any) -> None:
        self._port = port
        self.time = port.now()
        self.plan: dict[str, list[str]] = {}
        self.lasts = 0.0
        """Seconds that a request lasts which fails."""
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}
        """Called when the next request of a script was carried out, before its reply arrives."""
        self.limits: list[tuple[str, float]] = []
        self.gone = False
        self.forked = 0
        self.luck = 0.5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def now(self) -> float:
        return float(self.time)

    def jitter(self) -> float:
        return self.luck

    def is_gone(self, _: object) -> bool:
        return self.gone

    def process(self) -> int:
        return int(self._port.process()) + self.forked

    def sent(self, script: str) -> list[float]:
        """How long the requests of a script were given, since the last time."""
        found = [limit for name, limit in self.limits if name == script]
        self.limits = [each for each in self.limits if each[0] != script]
        return found

    async def call(self, script: Any, keys: Any, args: Any, timeout: float) -> Any:
        self.limits.append((script.name, timeout))
        self.before.pop(script.name, lambda: None)()
        fates = self.plan.get(script.name)
        fate = fates.pop(0) if fates else ""
        reply = None if fate in {UNSENT, LATE} else await self._port.call(script, keys, args, 5.0)
        self.after.pop(script.name, lambda: None)()
        if not fate:
            return reply
        self.time += self.lasts
        kind = holdfast.NodeUnavailable if fate == UNSENT else holdfast.OutcomeUnknown
        raise kind(f"it is {fate}", node="n1")


def install(client: Any) -> FailingPort:
    """Have the client use a port that fails as planned."""
    session = client._session
    port = session.port = FailingPort(session.port)
    session.deployment = OneServer(port.call, session.deployment.longest_ttl)
    session.begin()
    return port


def strike(error: BaseException, *before: Callable[[], object]) -> Callable[[], None]:
    """Make a hook that does some things, then raises an error."""

    def action() -> None:
        for each in before:
            each()
        raise error

    return action


def note_cleanups(client: Any) -> list[Any]:
    """Have the background clean nothing up from now on; return the list of what it should."""
    found: list[Any] = []

    def note(name: str, request: Any, **settings: Any) -> None:
        found.append(SimpleNamespace(name=name, args=request[2], **settings))

    client._session.renewer.clean_up = note
    return found


def wait_for(client: Any, lease: Any) -> tuple[Any, Any]:
    """Have the lease be of a waiter, and another one wait for it."""
    hold = lease._hold
    line = client._session.waiters.line(hold.spec.keys)
    line.opened(0.0, lambda: None)
    hold.waiter = line.enter(hold.token, hold.spec.keys[0], CountedSignal(), 0.0)
    return line, line.enter("another", hold.spec.keys[0], CountedSignal(), 0.0)


def has_waiter(line: Any, lease: Any) -> bool:
    """Whether the line knows the waiter of the lease."""
    return lease._hold.token in line._known


def is_asking(line: Any, waiter: Any) -> bool:
    """Whether the waiter is notified to ask the server again."""
    line.tick(0.0)
    return bool(waiter.ask)
