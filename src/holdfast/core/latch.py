"""Latches: callers wait until a number of ids has been counted down.

The rules:

1. **An id counts once.** The server keeps the ids of a latch (`scripts/_latch.lua`). A caller that
   gives none gets a new one, so that a retry after a lost reply counts once too.
2. **Waiting is an attempt to acquire** a lock that no client holds, in the queue of a lock. The
   script (`scripts/latch_wait.lua`) replies that the latch is open, or lets the token join the
   queue. The last count notifies all waiters, and each finds the open latch by one request.
3. **A latch opens once.** It stays open, and closed, for `keep` seconds after its last use.

Without the server nothing is counted. A failover may lose the last counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.atomic_arguments import encode_id
from holdfast.core.duration import in_seconds
from holdfast.core.kind import LATCH
from holdfast.core.lease_state import LeaseRef
from holdfast.core.messages import NotNeeded
from holdfast.core.retry import retry
from holdfast.core.spec import check_timeout, check_ttl, to_ms
from holdfast.core.token import encode
from holdfast.errors import AcquireTimeout, ConfigurationError, NodeUnavailable, OutcomeUnknown
from holdfast.keys import LATCH as LATCH_KIND
from holdfast.keys import Keys, keys_of
from holdfast.scripts import LATCH_COUNT, LATCH_STATE, LATCH_WAIT

if TYPE_CHECKING:
    from holdfast.core.duration import Duration
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply

COUNT_MAX = 1_000_000
"""The greatest count of a latch."""

KEEP_MIN = 1.0
"""The shortest `keep`, in seconds."""


class LatchSpec(NamedTuple):
    """One latch: the lock whose queue its waiters use, and its settings."""

    lock: LockSpec
    size: int
    """How many ids are counted until it opens."""
    keep_ms: str


def describe_latch(spec: LockSpec, *, count: int, keep: Duration, quorum: bool) -> LatchSpec:
    """Return the latch with the name of a lock.

    Raises:
        ConfigurationError: a setting is invalid, or the client uses several independent servers.
    """
    name = spec.name
    if quorum:
        raise ConfigurationError(
            f"latch {name!r}: several independent servers cannot count together: use a client of "
            "one server, of Sentinels, or of a cluster",
            lock=name,
        )
    if type(count) is not int or not 1 <= count <= COUNT_MAX:
        raise ConfigurationError(
            f"latch {name!r}: count={count!r}: give how often it is counted down until it opens, "
            f"from 1 to {COUNT_MAX}",
            lock=name,
        )
    seconds = in_seconds(keep)
    check_ttl(seconds, lock=name, least=KEEP_MIN, name="keep")
    keep_ms = to_ms(seconds)
    lock = replace(
        spec,
        keys=keys_of(b"%b:%b" % (spec.keys.lock, LATCH_KIND.encode())),
        kind=LATCH,
        acquire_script=LATCH_WAIT,
        extra_args=(str(count), keep_ms),
    )
    return LatchSpec(lock, count, keep_ms)


async def count_down(session: Session, latch: LatchSpec, once: str | int | None) -> int:
    """Count the id, unless it was counted before; return how many are left.

    If this is interrupted, the id may or may not have been counted.

    Raises:
        OutcomeUnknown: no reply; the id may or may not have been counted.
        NodeUnavailable: the server cannot be reached, or refuses; nothing was counted.
        ConfigurationError: the latch has another count, the id is invalid, or the server will never
            accept the request.
        NotHeld: this process is a child that was forked during the call.
    """
    port, lock = session.port, latch.lock
    if once is None:
        counted = port.new_token(port.actor(), lock.suffix)
    else:
        counted = f"once:{encode(encode_id(once).decode('utf-8', 'surrogateescape'))}"
    return await _count(session, lock, (counted, str(latch.size), latch.keep_ms))


async def open_latch(session: Session, latch: LatchSpec) -> bool:
    """Open the latch as an operator; return False if it does not exist.

    Raises:
        OutcomeUnknown, NodeUnavailable, ConfigurationError: as `count_down`.
    """
    made, _ = await _read(session, latch)
    if made:
        port, lock = session.port, latch.lock
        token = port.new_token(port.actor(), lock.suffix)
        await _count(session, lock, (token, "", latch.keep_ms))
    return made > 0


async def _count(session: Session, lock: LockSpec, args: tuple[str, ...]) -> int:
    request = LATCH_COUNT, lock.keys, args, lock.command_timeout
    process = session.process
    try:
        reply, _ = await retry(
            session.deployment.call,
            request,
            lambda _: session.check_process(process, lock.name),
        )
    except OutcomeUnknown as error:
        message = f"latch {lock.name!r} may or may not have been counted down: {error}"
        raise OutcomeUnknown(message, lock=lock.name, node=error.node) from None
    except NodeUnavailable as error:
        message = f"latch {lock.name!r} was not counted down: {error}"
        raise NodeUnavailable(message, lock=lock.name, node=error.node) from None
    return _check_count(reply, lock)


async def wait(session: Session, latch: LatchSpec, timeout: Duration | None) -> None:
    """Wait until the latch is open.

    If this is interrupted, the caller no longer waits.

    Raises:
        AcquireTimeout: it did not open within the timeout.
        NodeUnavailable: the server does not reply.
        ConfigurationError: the latch has another count, the timeout is invalid, or the server will
            never accept the request.
        NotHeld: this process is a child that was forked during the call.
    """
    lock = latch.lock
    seconds = in_seconds(timeout)
    check_timeout(seconds, lock=lock.name)
    try:
        await session.deployment.acquire(session, lock, seconds, LeaseRef())
    except NotNeeded as found:
        if found.reply[0] != b"open":
            _check_count(found.reply, lock)
    except AcquireTimeout:
        message = f"latch {lock.name!r} did not open within {seconds} s"
        raise AcquireTimeout(message, lock=lock.name) from None


async def left(session: Session, latch: LatchSpec) -> int:
    """Return how many are left until the latch opens; 0 if it is open.

    Raises:
        NodeUnavailable: the server does not reply.
        ConfigurationError: the latch has another count, or the server refuses the request.
    """
    made, counted = await _read(session, latch)
    if made not in {0, latch.size}:
        raise _other_count(latch.lock, made)
    return latch.size - counted


async def _read(session: Session, latch: LatchSpec) -> tuple[int, int]:
    """Return the count with which the latch was made, 0 if it does not exist, and the counted."""
    lock = latch.lock
    request = LATCH_STATE, Keys(lock.keys[:1]), (), lock.command_timeout
    try:
        reply, _ = await retry(session.deployment.call, request)
    except (OutcomeUnknown, NodeUnavailable) as error:
        message = f"latch {lock.name!r} cannot be read: {error}"
        raise NodeUnavailable(message, lock=lock.name, node=error.node) from None
    made, counted = reply
    return made, counted


def _check_count(reply: Reply, lock: LockSpec) -> int:
    """Return how many are left, by the reply of a script."""
    if reply[0] == b"count":
        raise _other_count(lock, reply[1])
    (left_over,) = reply
    return int(left_over)


def _other_count(lock: LockSpec, made: int) -> ConfigurationError:
    return ConfigurationError(
        f"latch {lock.name!r} was made with count={made}: give all clients the same count, and "
        "each use of a latch its own name",
        lock=lock.name,
    )
