"""Barriers: parties wait for one another, and continue together.

The rules:

1. **A party is a token with a lease**, which it renews while it waits, every third of its ttl. So
   the others detect a party whose process has died (`scripts/_barrier.lua`).
2. **Waiting is an attempt to acquire** a lock that is never granted, in the queue of a lock. Each
   request arrives at the barrier, or renews the lease of its token (`scripts/barrier_wait.lua`).
3. **A generation ends once, for all its parties**: when the last one arrives, or when the barrier
   breaks. The server remembers how it ended for each token, for longer than a party retries. So a
   lost reply or a late message changes no outcome.
4. **A party whose timeout is over finds how its generation has ended** by the request with which
   it leaves. If the others have passed, so has this one.
5. **A party that leaves breaks the barrier**, until it is reset: after a timeout, an interrupt, an
   error, or the loss of its lease.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from holdfast.core.duration import in_seconds
from holdfast.core.kind import BARRIER
from holdfast.core.lease_state import LeaseRef
from holdfast.core.messages import NotNeeded
from holdfast.core.retry import retry
from holdfast.core.spec import TOMBSTONE_MS, check_timeout
from holdfast.core.token import permits_suffix, read_holder
from holdfast.errors import AcquireTimeout, ConfigurationError, NodeUnavailable, OutcomeUnknown
from holdfast.keys import BARRIER as BARRIER_KIND
from holdfast.keys import Keys, keys_of
from holdfast.scripts import BARRIER_END, BARRIER_STATE, BARRIER_WAIT

if TYPE_CHECKING:
    from holdfast.core.duration import Duration
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder

PARTIES_MAX = 10_000
"""The greatest number of parties."""

BreakReason = Literal["timeout", "interrupted", "lost", "aborted", "reset"]
"""Why a barrier broke.

- "timeout": the timeout of a party was over.
- "interrupted": the wait of a party was cancelled or interrupted, or failed.
- "lost": a party did not renew its lease: its process died, hung, or was cut off.
- "aborted": `abort()` was called, or `holdfast break`.
- "reset": `reset()` was called while parties waited, or after the barrier was broken.
"""

_WHY: dict[BreakReason, str] = {
    "timeout": "the timeout of a party was over",
    "interrupted": "the wait of a party was cancelled, was interrupted, or failed",
    "lost": "a party was lost: its lease expired",
    "aborted": "it was aborted",
    "reset": "it was reset",
}


class Break(NamedTuple):
    """Why a barrier is broken, and by whom."""

    reason: BreakReason
    by: Holder | None
    """The party that left or was lost, or the caller that aborted; None after a reset, and if the
    caller's own timeout was over."""

    def describe(self, name: str) -> str:
        """Return this as the message of an error."""
        by = "" if self.by is None else f" ({self.by.process})"
        advice = "" if self.reason == "reset" else "; call reset() before the next use"
        return f"barrier {name!r} is broken: {_WHY[self.reason]}{by}{advice}"


class BarrierState(NamedTuple):
    """What the server has of a barrier."""

    waiting: int
    broken: Break | None


def describe_barrier(spec: LockSpec, *, parties: int, quorum: bool) -> LockSpec:
    """Return the barrier with the name, the ttl and the label of a lock.

    Raises:
        ConfigurationError: a setting is invalid, or the client uses several independent servers.
    """
    name = spec.name
    if quorum:
        raise ConfigurationError(
            f"barrier {name!r}: several independent servers cannot count its parties together: use "
            "a client of one server, of Sentinels, or of a cluster",
            lock=name,
        )
    if type(parties) is not int or not 1 <= parties <= PARTIES_MAX:
        raise ConfigurationError(
            f"barrier {name!r}: parties={parties!r}: give how many wait for one another, from 1 to "
            f"{PARTIES_MAX}",
            lock=name,
        )
    return replace(
        spec,
        keys=keys_of(b"%b:%b" % (spec.keys.lock, BARRIER_KIND.encode())),
        suffix=spec.suffix + permits_suffix(1, parties),
        kind=BARRIER,
        acquire_script=BARRIER_WAIT,
        extra_args=(str(parties),),
    )


async def wait(session: Session, barrier: LockSpec, timeout: Duration | None) -> int | Break:
    """Wait until all parties have arrived; return the index of this one, or why the barrier broke.

    If this is interrupted, the barrier breaks.

    Raises:
        OutcomeUnknown: the others may have passed, or the barrier is broken: the timeout was over,
            and the server did not reply; or this process was stopped for more than a minute.
        NodeUnavailable: the server does not reply; likewise.
        ConfigurationError: those that wait have another number of parties, the timeout is invalid,
            or the server will never accept the request.
        NotHeld: this process is a child that was forked during the call.
    """
    name, seconds = barrier.name, in_seconds(timeout)
    check_timeout(seconds, lock=name)
    try:
        await session.deployment.acquire(session, barrier, seconds, LeaseRef())
    except NotNeeded as found:
        reply = found.reply
    except AcquireTimeout:
        message = (
            f"barrier {name!r}: the timeout of {seconds} s was over, and the server did not reply: "
            "the barrier is broken, unless the last party arrived just before"
        )
        raise OutcomeUnknown(message, lock=name) from None
    except NodeUnavailable as error:
        message = f"barrier {name!r} was not passed by this party: {error}"
        raise NodeUnavailable(message, lock=name, node=error.node) from None
    if isinstance(reply, int):  # of the script with which a party leaves
        return reply - 1 if reply else Break("timeout", None)
    kind, value = reply
    if kind == b"passed":
        return int(value)
    if kind == b"broken":
        return read_break(value)
    raise ConfigurationError(
        f"barrier {name!r}: the clients that wait have parties={value}: give all clients the same "
        "number",
        lock=name,
    )


def read_break(mark: bytes) -> Break:
    """Parse why a barrier is broken, as the scripts store it; b"" if it was reset since."""
    reason, _, token = mark.partition(b" ")
    if not reason:
        return Break("reset", None)
    return Break(cast("BreakReason", reason.decode()), read_holder(token, 0))


async def end(session: Session, barrier: LockSpec, why: Literal["aborted", "reset"]) -> None:
    """Abort the barrier, or reset it.

    If this is interrupted, it may or may not be done. It may be repeated.

    Raises:
        OutcomeUnknown: no reply; it may or may not be done.
        NodeUnavailable: the server cannot be reached, or refuses; nothing was done.
        ConfigurationError: the server will never accept the request.
        NotHeld: this process is a child that was forked during the call.
    """
    port, name = session.port, barrier.name
    token = port.new_token(port.actor(), barrier.suffix)
    args = token, barrier.ttl_ms, f"{TOMBSTONE_MS} {why}", barrier.settings
    request = BARRIER_END, barrier.keys, args, barrier.command_timeout
    process = session.process
    try:
        await retry(
            session.deployment.call,
            request,
            lambda _: session.check_process(process, name),
        )
    except OutcomeUnknown as error:
        message = f"barrier {name!r} may or may not be {why}: {error}"
        raise OutcomeUnknown(message, lock=name, node=error.node) from None
    except NodeUnavailable as error:
        message = f"barrier {name!r} was not {why}: {error}"
        raise NodeUnavailable(message, lock=name, node=error.node) from None


async def state(session: Session, barrier: LockSpec) -> BarrierState:
    """Return how many parties wait, and whether the barrier is broken.

    Raises:
        NodeUnavailable: the server does not reply.
        ConfigurationError: the server refuses the request.
    """
    request = BARRIER_STATE, Keys(barrier.keys[:1]), (), barrier.command_timeout
    try:
        reply, _ = await retry(session.deployment.call, request)
    except (OutcomeUnknown, NodeUnavailable) as error:
        message = f"barrier {barrier.name!r} cannot be read: {error}"
        raise NodeUnavailable(message, lock=barrier.name, node=error.node) from None
    waiting, mark = reply
    return BarrierState(waiting, read_break(mark) if mark else None)
