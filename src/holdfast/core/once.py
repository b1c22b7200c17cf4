"""Idempotent work: one caller per id runs, and later callers receive its result.

The rules:

1. **A run in progress is a lease.** Its lock is an ordinary lock, acquired by the script that
   `core.cache` uses too (`scripts/claim.lua`): it returns the result, if there is one, and
   otherwise acquires the lock or joins its queue. If the run raises or crashes, the lock is
   released or expires, and the first waiter runs.
2. **Only the holder stores the result**, in the same script that releases the lock and notifies all
   waiters (`scripts/finish.lua`). So while a result is there, no client holds the lock.
3. **A caller knows whether its result was stored.** A retry after a lost reply finds the fence of
   its lease in the result. It shows that nothing was stored only while a stored result would still
   be there. After that, and without any reply, the outcome is unknown.
4. **A result that the server did not confirm is stored in the background**, as long as the lock
   may have the token. If the lock were released instead, the next caller would repeat the work.

Without the server nothing runs. A failover may lose a result together with the lock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

from holdfast.core.acquire import acquire
from holdfast.core.duration import in_seconds
from holdfast.core.lease_state import LOST, RELEASED
from holdfast.core.messages import NotNeeded
from holdfast.core.release import (
    begin_release,
    check_process,
    check_valid,
    on_failure,
    take_over_release,
)
from holdfast.core.retry import retry
from holdfast.core.spec import DRIFT, TOMBSTONE_MS, check_ttl, to_ms
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    LeaseLost,
    NodeUnavailable,
    OutcomeUnknown,
    WouldDeadlock,
)
from holdfast.keys import keys_of_kind
from holdfast.scripts import CLAIM, FINISH

if TYPE_CHECKING:
    from holdfast.core.duration import Duration
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.record import Record
    from holdfast.core.retry import RetryResult
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply, Request

KEEP_MIN = 1.0
"""The shortest `keep`, in seconds."""


class Work(NamedTuple):
    """The work with one id: its lock, and the seconds for which its result is kept."""

    lock: LockSpec
    keep: float


class Result(NamedTuple):
    """The result of a run, encoded."""

    payload: bytes = b""
    is_empty: bool = True
    """The run set no result, which reads as None with any codec."""
    fence: int = 0
    """The fence of the run that stored it."""


def read_result(reply: Reply) -> Result:
    """Parse the reply of CLAIM that contains a result."""
    head, _, payload = reply[0].partition(b"\n")
    fence, is_empty, _ = map(int, head.split())
    return Result(payload, bool(is_empty), fence)


async def peek(record: Record) -> Result | None:
    """Return the result; None if there is none. Do not wait for one.

    Raises:
        NodeUnavailable, WrongValue, ConfigurationError: as `Record.read`.
    """
    stored = await record.read()
    return None if stored is None else read_result((stored,))


def describe_work(spec: LockSpec, namespace: str, keep: Duration, *, quorum: bool) -> Work:
    """Return the work whose lock has the name and the settings of `spec`.

    Raises:
        ConfigurationError: `keep` is invalid, or the client uses several independent servers.
    """
    if quorum:
        raise ConfigurationError(
            "once() stores a result and releases its lock in one step, which several independent "
            "servers do not have: use a client of one server, of Sentinels, or of a cluster",
            lock=spec.name,
        )
    seconds = in_seconds(keep)
    check_ttl(seconds, lock=spec.name, least=KEEP_MIN, name="keep", of="once", example=86_400)
    keys = keys_of_kind("once", spec.name, namespace, "result")
    lock = replace(spec, keys=keys, acquire_script=CLAIM, extra_args=("0",))
    return Work(lock, float(seconds))


async def begin(session: Session, work: Work, ref: LeaseRef) -> Result | None:
    """Acquire the lock of the work; or return the result, if there is one.

    If this is interrupted, nothing is held.

    Raises:
        AcquireTimeout: another caller ran until the timeout was over.
        WouldDeadlock: the caller runs this work already.
        NodeUnavailable, ConfigurationError, NotHeld: as `acquire`.
    """
    try:
        await acquire(session, work.lock, work.lock.timeout, ref)
    except NotNeeded as found:
        return read_result(found.reply)
    except WouldDeadlock:
        name = work.lock.name
        raise WouldDeadlock(
            f"{name!r} is run by this thread or task, or by one that it blocks, and would wait for "
            "itself: use another id",
            lock=name,
        ) from None
    return None


async def finish(session: Session, work: Work, ref: LeaseRef, result: Result) -> None:
    """Store the result, release the lock, and notify all waiters.

    If this is interrupted, the result is stored before the interruption is passed on, or in the
    background.

    Raises:
        LeaseLost: the lease was lost, and the result was not stored.
        NotHeld: the lease was released, or belongs to the process that forked this one.
        OutcomeUnknown: no reply. Storing is retried in the background, unless the client is closed.
        NodeUnavailable: the client is closed, and nothing was stored.
        ConfigurationError: the server refuses the request; nothing was stored.
    """
    # From then on a result that an earlier try has stored may be gone.
    gone_at = session.port.now() + work.keep * (1 - DRIFT)
    try:
        lease = _check_held(session, ref)
        request = _request(work, lease, result)
        if not begin_release(session, lease, ref):
            check_valid(session, ref)  # raises: another thread has released it
        reply, may_have_run = await _send(session, lease, request)
        _handle(session, lease, reply, may_be_gone=may_have_run and session.port.now() >= gone_at)
    except HoldfastError:
        raise
    except BaseException as error:
        found = ref._lease
        if found is not None and take_over_release(session, found, ref):
            await _interrupted(session, found, _request(work, found, result), gone_at, error)
        raise


async def _send(session: Session, lease: LeaseState, request: Request) -> RetryResult:
    try:
        return await retry(
            session.deployment.call,
            (*request, lease.spec.command_timeout),
            lambda error: on_failure(session, lease, error),
        )
    except (OutcomeUnknown, NodeUnavailable, ConfigurationError) as error:
        _give_up(session, lease, request, error)


def _handle(session: Session, lease: LeaseState, reply: Reply, *, may_be_gone: bool) -> None:
    """Handle a reply: the result was stored, or refused."""
    check_process(session, lease)
    lease.unregister_waiter()
    name = lease.spec.name
    if reply == 1 or may_be_gone:
        lease.state = RELEASED
    if reply == 1:
        return
    if may_be_gone:
        message = f"the result of {name!r} may or may not have been stored: the reply was lost"
        raise OutcomeUnknown(message, lock=name)
    lease.lose(lease.refusal_reason(reply, session.port.now()))
    raise _not_stored(lease)


def _check_held(session: Session, ref: LeaseRef) -> LeaseState:
    try:
        return check_valid(session, ref)
    except LeaseLost:
        raise _not_stored(cast("LeaseState", ref._lease)) from None


def _not_stored(lease: LeaseState) -> LeaseLost:
    loss = lease.loss()
    message = f"the result was not stored: {loss}"
    return LeaseLost(message, lock=loss.lock, reason=loss.reason, fence=loss.fence)


def _request(work: Work, lease: LeaseState, result: Result) -> Request:
    tombstone = TOMBSTONE_MS if lease.needs_tombstone else "0"
    head, payload = f"{int(result.is_empty)} 0", cast("str", result.payload)  # sent unchanged
    args = lease.token, str(lease.fence), to_ms(work.keep), head, payload, tombstone
    return FINISH, lease.spec.keys, args


def _give_up(
    session: Session, lease: LeaseState, request: Request, error: HoldfastError
) -> NoReturn:
    """Leave the request to the background, and raise. A closed client has no background."""
    check_process(session, lease)
    lease.unregister_waiter()
    if lease.state is not LOST:
        lease.state = RELEASED
    name, node = lease.spec.name, getattr(error, "node", "")
    may_have_run = lease.release_may_have_run
    if isinstance(error, ConfigurationError) and not may_have_run:
        session.cleanups.schedule_lease(lease)
        message = f"the result of {name!r} was not stored: {error}"
        raise ConfigurationError(message, lock=name) from None
    if session.closed:
        kind = OutcomeUnknown if may_have_run else NodeUnavailable
        might = "may or may not have been" if may_have_run else "was not"
        message = f"the result of {name!r} {might} stored: this client is closed"
        raise kind(message, lock=name, node=node) from None
    session.cleanups.schedule_end(lease, request)
    message = (
        f"the result of {name!r} may or may not be stored: {error}; storing it is retried in the "
        "background until the lock expires"
    )
    raise OutcomeUnknown(message, lock=name, node=node) from None


async def _interrupted(
    session: Session, lease: LeaseState, request: Request, gone_at: float, by: BaseException
) -> None:
    if isinstance(by, GeneratorExit):
        session.cleanups.schedule_end(lease, request)
        lease.unregister_waiter()
        lease.state = RELEASED
    else:
        await session.port.shielded(_complete(session, lease, request, gone_at))


async def _complete(session: Session, lease: LeaseState, request: Request, gone_at: float) -> None:
    """Store the result of an interrupted call, or leave it to the background."""
    try:
        reply = await session.deployment.call(*request, lease.spec.command_timeout)
        if reply != 1 and session.port.now() < gone_at:
            lease.lose(lease.refusal_reason(reply, session.port.now()))
    except BaseException as error:
        session.cleanups.schedule_end(lease, request)
        if not isinstance(error, HoldfastError):
            raise
    finally:
        lease.unregister_waiter()
        if lease.state is not LOST:
            lease.state = RELEASED
