"""Handing a lease from one process to another, which carries it on.

The exporter lets go without releasing, and what it gives out is a text. Whoever adopts it takes the
lock over under a token of its own, with the same fence: it is the same lease, and whoever comes
next has a greater one. Of two who adopt the same text at most one gets the lease; if nobody does,
it runs out.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.core.cleanup import cancel_token
from holdfast.core.extend import keep
from holdfast.core.hold import RELEASED, Grip, Hold, forked
from holdfast.core.release import check
from holdfast.core.retry import retry
from holdfast.core.spec import check_ttl, describe
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    LeaseLost,
    NodeUnavailable,
    OutcomeUnknown,
)
from holdfast.port import Uncopied
from holdfast.scripts import ADOPT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec

G = TypeVar("G", bound=Grip)

_MARK = "hf1-lease-"


async def export(session: Session, grip: Grip) -> str:
    """Let go of the lease without releasing it; return the text by which it can be adopted.

    The server keeps it for a whole ttl from now on. Interrupted, it leaves the lease as it was.

    Raises:
        LeaseLost: it was no longer ours.
        NotHeld: it was released, or belongs to the process this one was forked from.
        ConfigurationError: it is held at several levels, or by an owner.
        OutcomeUnknown, NodeUnavailable: the server was not heard; the lease is still ours.
    """
    _check_deployment(session)
    hold = check(session, grip)
    spec = hold.spec
    if spec.owner is not None:
        raise ConfigurationError(
            f"{spec.name!r} has the owner {spec.owner!r}: whoever gives this name can take it "
            "without an export",
            lock=spec.name,
        )
    if len(hold.grips) > 1:
        raise ConfigurationError(
            f"{spec.name!r} is held at several levels: release the inner ones, then export",
            lock=spec.name,
        )
    await keep(session, grip, hold, spec.ttl)
    text = _write(hold, session.port.now())
    session.forget(hold)
    if hold.waiter is not None:  # a late message must not return the grant, and so the export
        hold.waiter.forget_after_drain(session.port.now())
    hold.state = RELEASED
    return text


def _check_deployment(session: Session) -> None:
    if session.deployment.is_quorum:
        raise ConfigurationError(
            "a lease that several servers keep cannot be exported or adopted: release it, and "
            "acquire the lock in the other process"
        )


def _write(hold: Hold, now: float) -> str:
    spec = hold.spec
    facts = {
        "token": hold.token,
        "fence": hold.fence,
        "name": spec.name,
        "key": spec.keys[0].decode("utf-8", "surrogateescape"),
        "ttl": spec.ttl,
        "longest": hold.longest_ttl,
        "renew": spec.renew,
        "max_hold": None if spec.max_hold == math.inf else max(0.001, hold.renew_until - now),
        "reentrant": spec.reentrant,
        "fair": spec.fair,
        "lock_delay": spec.lock_delay,
        "replicas": spec.replicas,
        "label": spec.label,
    }
    return _MARK + base64.urlsafe_b64encode(json.dumps(facts).encode()).decode()


def _read(text: str, session: Session, command_timeout: float) -> tuple[str, int, float, LockSpec]:
    with _refusing_others():
        if not text.startswith(_MARK):
            raise ValueError("it does not begin like one")
        facts: dict[str, Any] = json.loads(
            base64.b64decode(text[len(_MARK) :], altchars=b"-_", validate=True)
        )
        token, fence, name = str(facts.pop("token")), int(facts.pop("fence")), facts.pop("name")
        longest = facts.pop("longest")
        check_ttl(longest, lock=name, name="longest")
    # It is seen to for as long as any lock of this client may last.
    check_ttl(longest, lock=name, longest=session.deployment.longest_ttl, name="longest")
    with _refusing_others():
        spec = describe(
            name,
            **facts,
            timeout=None,
            owner=None,
            command_timeout=command_timeout,
            longest_ttl=session.deployment.longest_ttl,
        )
    return token, fence, longest, spec


@contextlib.contextmanager
def _refusing_others() -> Iterator[None]:
    """Say that it is no text of ours, whatever is wrong with it."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"this is not what lease.export() returned ({error}): pass it on unchanged"
        raise ConfigurationError(message) from None


def _check(spec: LockSpec, given: bool) -> None:  # noqa: FBT001 - whether it was
    if not given:
        message = f"the exported lease of {spec.name!r} is over: it ran out, or was adopted already"
        raise LeaseLost(message, lock=spec.name, reason="taken")


async def adopt(session: Session, text: str, grip: G, command_timeout: float) -> G:
    """Take the exported lease into `grip`.

    Interrupted, it gives the lock back if it had taken it over.

    Raises:
        LeaseLost: it ran out, was broken, or was adopted by somebody else.
        NodeUnavailable: the server does not answer.
        ConfigurationError: `text` was not made by `export`.
        NotHeld: this process was forked meanwhile, and is the child.
    """
    _check_deployment(session)
    exported, fence, longest, spec = _read(text, session, command_timeout)
    port, process = session.port, session.process
    actor = port.actor()
    token = port.draw_token(actor, spec.suffix)
    args = token, spec.ttl_ms, exported, spec.settings
    asked_at = port.now()
    maybe_adopted = False
    uncopied: Uncopied | None = None

    def on_failure(error: HoldfastError) -> None:
        nonlocal maybe_adopted, uncopied
        if process != port.process():
            raise forked(spec.name) from None
        maybe_adopted = maybe_adopted or isinstance(error, OutcomeUnknown)
        uncopied = error if isinstance(error, Uncopied) else uncopied

    try:
        try:
            given, uncertain = await retry(
                lambda: session.deployment.call(ADOPT, spec.keys, args, spec.command_timeout),
                on_failure,
            )
        except (OutcomeUnknown, NodeUnavailable) as error:
            # Missing replicas explain more than a last try without a reply.
            message = f"{spec.name!r} was not adopted: {uncopied or error}"
            raise NodeUnavailable(message, lock=spec.name, node=error.node) from None
        maybe_adopted = uncertain or bool(given)
        _check(spec, bool(given) and port.now() < asked_at + spec.validity)
        grip._hold = hold = Hold(spec, token, fence, asked_at, actor, process, session, grip)
        hold.tainted, hold.longest_ttl = uncertain, longest
        session.took(hold, asked_at + spec.first_due)
    except BaseException as error:
        if grip._hold is not None:
            session.abandon(grip._hold)
        if process != port.process():  # a forked child: the attempt is its parent's
            raise
        if isinstance(error, GeneratorExit):
            session.cleanups.schedule(spec, token, longest=longest)
            raise
        if maybe_adopted or not isinstance(error, HoldfastError):
            await port.shielded(cancel_token(session, spec, token, longest=longest))
        raise
    return grip
