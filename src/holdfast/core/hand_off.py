"""Passing a lease from one process to another.

`export` ends the lease in this process without releasing it, and returns a text. `adopt` replaces
the token on the server and keeps the fence: it is the same lease, and the next one has a greater
fence. Of two processes that adopt the same text at most one gets the lease. If none does, it
expires.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.core.cleanup import cancel_token
from holdfast.core.extend import renew_now
from holdfast.core.hold import RELEASED, Grip, Hold
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
    """End the lease in this process without releasing it; return the text for `adopt`.

    The server keeps it for a whole ttl from now on. If this is interrupted, the lease stays as it
    was.

    Raises:
        LeaseLost: the lease is lost.
        NotHeld: it was released, or belongs to the process from which this one was forked.
        ConfigurationError: it is held at several levels, by an owner, or on several servers.
        OutcomeUnknown, NodeUnavailable: no reply; the lease is still held.
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
    await renew_now(session, grip, hold, spec.ttl)
    text = _write(hold, session.port.now())
    session.forget(hold)
    hold.forget_waiter(session.port.now())  # a late message must not return the grant
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
    # Clean-ups rely on no lock of this client having a longer ttl.
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
    """Raise ConfigurationError for a text that `export` did not return."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"this is not what lease.export() returned ({error}): pass it on unchanged"
        raise ConfigurationError(message) from None


def _check(spec: LockSpec, *, adopted: bool) -> None:
    if not adopted:
        message = f"the exported lease of {spec.name!r} is over: it ran out, or was adopted already"
        raise LeaseLost(message, lock=spec.name, reason="taken")


async def adopt(session: Session, text: str, grip: G, command_timeout: float) -> G:
    """Adopt an exported lease into `grip`.

    If this is interrupted, the lock is released if it was adopted.

    Raises:
        LeaseLost: it expired, was evicted, or was adopted before.
        NodeUnavailable: the server does not reply.
        ConfigurationError: `export` did not return this text.
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
        session.check_process(process, spec.name)
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
        _check(spec, adopted=bool(given) and port.now() < asked_at + spec.validity)
        grip._hold = hold = Hold(spec, token, fence, asked_at, actor, process, session, grip)
        hold.needs_tombstone, hold.longest_ttl = uncertain, longest
        session.took(hold)
    except BaseException as error:
        if grip._hold is not None:
            session.forget(grip._hold)
        try:
            if process != port.process():  # a forked child: the attempt is its parent's
                pass
            elif isinstance(error, GeneratorExit):
                session.cleanups.schedule(spec, token, longest=longest)
            elif maybe_adopted or not isinstance(error, HoldfastError):
                await port.shielded(cancel_token(session, spec, token, longest=longest))
        finally:
            if grip._hold is not None:
                grip._hold.state = RELEASED
        raise
    return grip
