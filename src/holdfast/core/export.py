"""Passing a lease from one process to another.

`export` ends the lease in this process without releasing it, and returns a text. `adopt`, in the
other process, replaces the token on the server and keeps the fence: it is the same lease. If two
processes adopt the same text, at most one gets the lease. If none does, the lease expires.

A lease on a quorum is not exported: its token would have to be removed from the nodes that did not
accept the adopter.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.core.cleanup import cancel_token
from holdfast.core.extend import renew_now
from holdfast.core.kind import ELECTION
from holdfast.core.lease_state import RELEASED, LeaseRef, LeaseState
from holdfast.core.release import check_valid, restore_loss
from holdfast.core.retry import retry
from holdfast.core.spec import check_ttl, describe
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    LeaseLost,
    NodeUnavailable,
    OutcomeUnknown,
)
from holdfast.port import Unreplicated
from holdfast.scripts import ADOPT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec

G = TypeVar("G", bound=LeaseRef)

_MARK = "hf1-lease-"


async def export(session: Session, ref: LeaseRef) -> str:
    """End the lease in this process without releasing it; return the text for `adopt`.

    The server keeps the lease for a whole ttl from now on. If this call is interrupted, the lease
    is still held here.

    Raises:
        LeaseLost: the lease is lost.
        NotHeld: it was released, or belongs to the process from which this one was forked.
        ConfigurationError: it is held at several levels, by an owner, or on several servers; or it
            is a term of an election.
        OutcomeUnknown, NodeUnavailable: no reply; the lease is still held.
    """
    _check_deployment(session)
    lease = check_valid(session, ref)
    spec = lease.spec
    if spec.limit:
        raise ConfigurationError(
            f"{spec.name!r} has several holders, whose leases cannot be exported: release it, and "
            "acquire it in the other process",
            lock=spec.name,
        )
    if spec.kind is ELECTION:
        raise ConfigurationError(
            f"{spec.name!r} is an election, whose terms cannot be exported: resign, and lead in "
            "the other process",
            lock=spec.name,
        )
    if spec.owner is not None:
        raise ConfigurationError(
            f"{spec.name!r} has the owner {spec.owner!r}: a process that gives the same owner can "
            "acquire the lock without an export",
            lock=spec.name,
        )
    if len(lease.refs) > 1:
        raise ConfigurationError(
            f"{spec.name!r} is held at several levels: release the inner ones, then export",
            lock=spec.name,
        )
    sent_at = await renew_now(session, ref, lease, spec.ttl)
    lease.apply_renewal(sent_at, spec.ttl, session.port.now())
    text = _write(lease, session.port.now())
    try:
        session.forget(lease)
        lease.unregister_waiter(session.port.now())  # a late message must not return the grant
        lease.state = RELEASED
    except BaseException:
        session.track(lease)  # interrupted: it is still held, and has to be renewed
        raise
    if restore_loss(lease):  # such as by an eviction, since the renewal
        raise lease.loss()
    return text


def _check_deployment(session: Session) -> None:
    if session.deployment.is_quorum:
        raise ConfigurationError(
            "a lease that several servers keep cannot be exported or adopted: release it, and "
            "acquire the lock in the other process"
        )


def _write(lease: LeaseState, now: float) -> str:
    spec = lease.spec
    fields = {
        "token": lease.token,
        "fence": lease.fence,
        "name": spec.name,
        "key": spec.keys.lock.decode("utf-8", "surrogateescape"),
        "ttl": spec.ttl,
        "longest": lease.longest_ttl,
        "renew": spec.renew,
        "max_hold": None if spec.max_hold == math.inf else max(0.001, lease.renew_until - now),
        "reentrant": spec.reentrant,
        "fair": spec.fair,
        "lock_delay": spec.lock_delay,
        "replicas": spec.replicas,
        "label": spec.label,
    }
    return _MARK + base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()


def _read(text: str, session: Session, command_timeout: float) -> tuple[str, int, float, LockSpec]:
    with _refusing_others():
        if not text.startswith(_MARK):
            raise ValueError(f"it does not begin with {_MARK}")
        fields: dict[str, Any] = json.loads(
            base64.b64decode(text[len(_MARK) :], altchars=b"-_", validate=True)
        )
        token, fence, name = str(fields.pop("token")), int(fields.pop("fence")), fields.pop("name")
        longest = fields.pop("longest")
        check_ttl(longest, lock=name, name="longest")
    # Cleanups rely on the fact that no lock of this client has a longer ttl.
    check_ttl(longest, lock=name, longest=session.deployment.longest_ttl, name="longest")
    with _refusing_others():
        spec = describe(
            name,
            **fields,
            timeout=None,
            owner=None,
            command_timeout=command_timeout,
            longest_ttl=session.deployment.longest_ttl,
        )
    return token, fence, longest, spec


@contextlib.contextmanager
def _refusing_others() -> Iterator[None]:
    """Convert the errors of a text that `export` did not return to ConfigurationError."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"this is not what lease.export() returned ({error}): pass it on unchanged"
        raise ConfigurationError(message) from None


def _check(spec: LockSpec, *, adopted: bool) -> None:
    if not adopted:
        message = f"the exported lease of {spec.name!r} has expired, or was adopted before"
        raise LeaseLost(message, lock=spec.name, reason="taken")


async def adopt(session: Session, text: str, ref: G, command_timeout: float) -> G:
    """Adopt an exported lease; set the lease of `ref`, and return `ref`.

    If this call is interrupted, an adopted lease is released.

    Raises:
        LeaseLost: it expired, was evicted, or was adopted before.
        NodeUnavailable: the server does not reply.
        ConfigurationError: `export` did not return this text.
        NotHeld: this process is a child that was forked during the call.
    """
    _check_deployment(session)
    exported, fence, longest, spec = _read(text, session, command_timeout)
    port, process = session.port, session.process
    actor = port.actor()
    token = port.new_token(actor, spec.suffix)
    args = token, spec.ttl_ms, exported, spec.settings
    sent_at = port.now()
    maybe_adopted = False
    unreplicated: Unreplicated | None = None

    def on_failure(error: HoldfastError) -> None:
        nonlocal maybe_adopted, unreplicated
        session.check_process(process, spec.name)
        maybe_adopted = maybe_adopted or isinstance(error, OutcomeUnknown)
        unreplicated = error if isinstance(error, Unreplicated) else unreplicated

    try:
        try:
            request = ADOPT, spec.keys, args, spec.command_timeout
            given, may_have_run = await retry(session.deployment.call, request, on_failure)
        except (OutcomeUnknown, NodeUnavailable) as error:
            # The error about missing replicas explains more than a last try without a reply.
            message = f"{spec.name!r} was not adopted: {unreplicated or error}"
            raise NodeUnavailable(message, lock=spec.name, node=error.node) from None
        maybe_adopted = may_have_run or bool(given)
        _check(spec, adopted=bool(given) and port.now() < sent_at + spec.validity)
        ref._lease = lease = LeaseState(spec, token, fence, sent_at, actor, process, session, ref)
        lease.needs_tombstone, lease.longest_ttl = may_have_run, longest
        session.track(lease)
    except BaseException as error:
        if ref._lease is not None:
            session.forget(ref._lease)
        try:
            if process != port.process():  # a forked child: the parent continues
                pass
            elif isinstance(error, GeneratorExit):
                session.cleanups.schedule(spec, token, longest=longest)
            elif maybe_adopted or not isinstance(error, HoldfastError):
                await port.shielded(cancel_token(session, spec, token, longest=longest))
        finally:
            if ref._lease is not None:
                ref._lease.state = RELEASED
        raise
    return ref
