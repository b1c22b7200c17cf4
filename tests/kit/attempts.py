"""Attempts to acquire the lock "a" through a `FakePort`: requests and planned replies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.adapters.thread_port import run
from holdfast.core.acquire import acquire
from holdfast.core.lease_state import LeaseRef, LeaseState
from holdfast.core.spec import describe, validity_of
from holdfast.errors import NodeUnavailable, OutcomeUnknown
from holdfast.port import Unreplicated
from kit.lock_settings import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.spec import LockSpec
    from holdfast.core.waiter import Waiter
    from kit.fake_port import FakePort

TTL = 10.0
VALIDITY = validity_of(TTL)
UNSENT = NodeUnavailable("the server is unreachable", node="n1")
LOST = OutcomeUnknown("the reply was lost", node="n1")
UNCOPIED = Unreplicated("a replica is missing", node="n1")
OTHER = b"hf1:them:1:bob@db:9:Main:nightly"
FULL_TOMBSTONE, NO_TOMBSTONE = "60000", "0"
KEY = b"holdfast:{a}"
TOKEN = "hf1:us:1:ann@web:7:Main:"  # noqa: S105 - no secret
refs: list[LeaseRef] = []
"""References that keep every lease alive: a garbage-collected lease counts as dropped."""


def spec_of(**settings: Any) -> LockSpec:
    """Describe the lock, with a command timeout of one second.

    `extra_args` holds the extra arguments of its script.
    """
    extra_args = settings.pop("extra_args", ())
    spec = describe("a", **{**PLAIN, "ttl": TTL, "command_timeout": 1.0, **settings})
    return replace(spec, extra_args=extra_args)


def get(port: FakePort, timeout: float | None = None, **settings: Any) -> LeaseState:
    """Acquire the lock."""
    ref = LeaseRef()
    spec = spec_of(longest_ttl=port.session.deployment.longest_ttl, **settings)
    assert run(acquire(port.session, spec, timeout, ref)) is ref
    assert ref._lease is not None
    refs.append(ref)
    return ref._lease


def held(
    left_ms: int = 60_000,
    ticket: int = 0,
    *,
    token: bytes = OTHER,
    put_back: int = 0,
    message: bytes = b"",
) -> list[Any]:
    """Return the reply that another client holds the lock."""
    return [token, left_ms, b"%d" % ticket, put_back, message]


def after(port: FakePort, seconds: float, answer: Any) -> Callable[[], Any]:
    """Return a planned reply that arrives after `seconds`."""

    def wait() -> Any:
        port.time += seconds
        return answer

    return wait


def at(port: FakePort, time: float, answer: Any) -> Callable[[], Any]:
    """Return a planned reply that arrives at `time`."""

    def wait() -> Any:
        port.time = time
        return answer

    return wait


def grant(token: str, fence: int = 70, seconds: float = 1.0) -> bytes:
    """Return the message that grants the lock to a waiter."""
    return b"G:%d:%d:%d:%b%b" % (fence, seconds * 1000, len(token), token.encode(), KEY)


def plan(port: FakePort, *acquiring: Any, **others: list[Any]) -> None:
    """Plan the replies to the acquire script, and to other scripts by name."""
    port.replies.update(acquire=list(acquiring), **others)


def places(port: FakePort) -> list[str]:
    """Return the place argument of each acquire request."""
    return [each.args[2] if len(each.args) > 2 else "" for each in port.requests_of("acquire")]


def pings_of(port: FakePort) -> list[Any]:
    """Return the PINGs that the pub/sub connection sends later: some while any caller waits."""
    pings, _ = waiter_channel_of(port).tick(port.time + 5)
    return list(pings)


def waiter_channel_of(port: FakePort) -> Any:
    """Return the waiter channel of this client."""
    return port.session.waiters.channel(spec_of().keys)


def subscribed_channel(port: FakePort) -> Any:
    """Return the waiter channel, with a pub/sub connection that the server counts."""
    channel = waiter_channel_of(port)
    channel.on_subscribed(port.time, lambda: None)
    channel.subscription.is_counted = True
    port.session.waiters.has_waited = True
    return channel


def add_other_waiter(port: FakePort) -> Waiter:
    """Add another caller of this client that waits for the same lock."""
    token, channel = "hf1:us:0:ann@web:7:Other:", subscribed_channel(port)
    waiter: Waiter = channel.register(token, KEY, port.signal(), port.time)
    return waiter
