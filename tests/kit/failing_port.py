"""A port that fails where a test plans it, in front of a real server, with a manual clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import holdfast
from holdfast.core.deployment import OneServer
from kit.fake_nodes import CountedSignal

if TYPE_CHECKING:
    from collections.abc import Callable

UNSENT, LOST, LATE = "unsent", "lost", "late"
"""Outcomes of a request: not sent; reply lost; not yet arrived at the server."""


class FailingPort:
    """The port of a client. `plan` holds, per script, the outcomes of its next requests."""

    def __init__(self, port: Any) -> None:
        self._port = port
        self.time = port.now()
        self.plan: dict[str, list[str]] = {}
        self.duration = 0.0
        """Seconds that a failing request takes."""
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}
        """Hooks per script: called once, after its next request was executed and before the reply
        arrives."""
        self.limits: list[tuple[str, float]] = []
        self.gone = False
        self.forked = 0
        self.jitter_value = 0.5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def now(self) -> float:
        return float(self.time)

    def jitter(self) -> float:
        return self.jitter_value

    def is_gone(self, _: object) -> bool:
        return self.gone

    def process(self) -> int:
        return int(self._port.process()) + self.forked

    def sent(self, script: str) -> list[float]:
        """Return the timeouts of the requests of a script since the last call."""
        found = [limit for name, limit in self.limits if name == script]
        self.limits = [each for each in self.limits if each[0] != script]
        return found

    async def call(self, script: Any, keys: Any, args: Any, timeout: float) -> Any:
        self.limits.append((script.name, timeout))
        self.before.pop(script.name, lambda: None)()
        outcomes = self.plan.get(script.name)
        outcome = outcomes.pop(0) if outcomes else ""
        reply = (
            None if outcome in {UNSENT, LATE} else await self._port.call(script, keys, args, 5.0)
        )
        self.after.pop(script.name, lambda: None)()
        if not outcome:
            return reply
        self.time += self.duration
        kind = holdfast.NodeUnavailable if outcome == UNSENT else holdfast.OutcomeUnknown
        raise kind(f"it is {outcome}", node="n1")


def install(client: Any) -> FailingPort:
    """Make the client use a port that fails as planned."""
    session = client._session
    port = session.port = FailingPort(session.port)
    session.deployment = OneServer(port.call, session.deployment.longest_ttl)
    session.begin()
    return port


def hook_raising(error: BaseException, *before: Callable[[], object]) -> Callable[[], None]:
    """Return a hook that calls `before`, then raises `error`."""

    def action() -> None:
        for each in before:
            each()
        raise error

    return action


def record_cleanups(client: Any) -> list[Any]:
    """Disable background cleanups from now on; return the list that records them."""
    found: list[Any] = []

    def record(name: str, request: Any, **settings: Any) -> None:
        found.append(SimpleNamespace(name=name, args=request[2], **settings))

    client._session.renewer.schedule_cleanup = record
    return found


def wait_for(client: Any, lease: Any) -> tuple[Any, Any]:
    """Make the lease one that a waiter acquired, and add a second waiter."""
    state = lease._lease
    channel = client._session.waiters.channel(state.spec.keys)
    channel.on_subscribed(0.0, lambda: None)
    state.waiter = channel.register(state.token, state.spec.keys[0], CountedSignal(), 0.0)
    return channel, channel.register("another", state.spec.keys[0], CountedSignal(), 0.0)


def has_waiter(channel: Any, lease: Any) -> bool:
    """Whether the channel knows the waiter of the lease."""
    return lease._lease.token in channel._registered


def drains(channel: Any, lease: Any) -> bool:
    """Whether the channel forgets the waiter of the lease when all earlier messages are read."""
    return lease._lease.token in {token for token, _ in channel._draining}


def must_recheck(channel: Any, waiter: Any) -> bool:
    """Whether the waiter must send a request to the server again."""
    channel.tick(0.0)
    return bool(waiter.must_request)
