"""Attempts to acquire the lock "a" through a `FakePort`: requests, and answers to them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.adapters.threads import run
from holdfast.core.acquire import acquire
from holdfast.core.hold import Grip, Hold
from holdfast.core.spec import describe, validity_of
from holdfast.errors import NodeUnavailable, OutcomeUnknown
from holdfast.port import Uncopied
from kit.lock_settings import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.line import Waiter
    from holdfast.core.spec import LockSpec
    from kit.fake_port import FakePort

TTL = 10.0
VALIDITY = validity_of(TTL)
UNSENT = NodeUnavailable("it is away", node="n1")
LOST = OutcomeUnknown("it is lost", node="n1")
UNCOPIED = Uncopied("a replica is missing", node="n1")
OTHER = b"hf1:them:1:bob@db:9:Main:nightly"
FULL_TOMBSTONE, NO_TOMBSTONE = "60000", "0"
KEY = b"holdfast:{a}"
TOKEN = "hf1:us:1:ann@web:7:Main:"  # noqa: S105 - no secret
grips: list[Grip] = []
"""Kept, so that no lease counts as dropped."""


def spec_of(**settings: Any) -> LockSpec:
    """The lock, with a command timeout of one second; `asked` is what its script wants to know."""
    asked = settings.pop("asked", ())
    spec = describe("a", **{**PLAIN, "ttl": TTL, "command_timeout": 1.0, **settings})
    return replace(spec, asked=asked)


def get(port: FakePort, timeout: float | None = None, **settings: Any) -> Hold:
    """Acquire the lock."""
    grip = Grip()
    spec = spec_of(longest_ttl=port.session.deployment.longest_ttl, **settings)
    assert run(acquire(port.session, spec, timeout, grip)) is grip
    assert grip._hold is not None
    grips.append(grip)
    return grip._hold


def held(
    left_ms: int = 60_000,
    ticket: int = 0,
    *,
    token: bytes = OTHER,
    put_back: int = 0,
    message: bytes = b"",
) -> list[Any]:
    """The answer that another client holds the lock."""
    return [token, left_ms, b"%d" % ticket, put_back, message]


def after(port: FakePort, seconds: float, answer: Any) -> Callable[[], Any]:
    """Answer after that time."""

    def wait() -> Any:
        port.time += seconds
        return answer

    return wait


def at(port: FakePort, time: float, answer: Any) -> Callable[[], Any]:
    """Answer at that time."""

    def wait() -> Any:
        port.time = time
        return answer

    return wait


def grant(token: str, fence: int = 70, seconds: float = 1.0) -> bytes:
    """The message that a waiter is granted the lock."""
    return b"G:%d:%d:%d:%b%b" % (fence, seconds * 1000, len(token), token.encode(), KEY)


def plan(port: FakePort, *acquiring: Any, **others: list[Any]) -> None:
    """Plan the answers to the requests for the lock, and to those of other scripts."""
    port.answers.update(acquire=list(acquiring), **others)


def places(port: FakePort) -> list[str]:
    """The place that each request for the lock asked for."""
    return [each.args[2] if len(each.args) > 2 else "" for each in port.of("acquire")]


def pings_of(port: FakePort) -> list[Any]:
    """What the push connection of this client sends later: PINGs, while any caller waits."""
    pings, _ = line_of(port).tick(port.time + 5)
    return list(pings)


def line_of(port: FakePort) -> Any:
    """The waiters of this client."""
    return port.session.waiters.line(spec_of().keys)


def listening(port: FakePort) -> Any:
    """The same, with a push connection that is known to work."""
    line = line_of(port)
    line.opened(port.time, lambda: None)
    line.subscription.is_counted = True
    return line


def other_waiter(port: FakePort) -> Waiter:
    """Another caller of this client that waits for the same lock."""
    token, line = "hf1:us:0:ann@web:7:Other:", listening(port)
    waiter: Waiter = line.enter(token, KEY, port.signal(), port.time)
    return waiter
