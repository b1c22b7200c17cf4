"""Semaphores and rwlocks: several leases of one key, each of which takes a weight of a limit.

Acquiring, renewing and releasing are those of a lock, with the scripts of `core.kind.SHARED`. An
rwlock is a semaphore with a limit that readers never reach: a reader takes 1 permit, and a writer
takes all of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from holdfast.core.kind import SHARED
from holdfast.core.retry import retry
from holdfast.core.spec import LockSpec, describe
from holdfast.core.spec_cache import SPECS_MAX
from holdfast.core.token import permits_suffix, read_holder
from holdfast.errors import ConfigurationError, NodeUnavailable, OutcomeUnknown, WouldDeadlock
from holdfast.keys import RWLOCK, SEMAPHORE, keys_of, kind_in
from holdfast.scripts import ACQUIRE_SHARED, EVICT_SHARED, HOLDERS

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.holder import Holder

LIMIT_MAX = 1_000_000
"""The greatest limit of a semaphore."""

WHOLE = 1_000_000_000
"""The limit of an rwlock, and the weight of a writer: more than there are readers."""


_SETTINGS = "ttl", "timeout", "renew", "max_hold", "replicas", "label"


def describe_semaphore(name: str, *, limit: int, weight: int, **settings: Any) -> LockSpec:  # noqa: ANN401 - as `core.spec.describe` takes
    """Check the settings of a semaphore; return its spec.

    Raises:
        ConfigurationError: a setting is invalid. The message shows what to write instead.
    """
    if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
        message = f"limit={limit!r}: give the number of permits, from 1 to {LIMIT_MAX}"
        raise ConfigurationError(f"semaphore {name!r}: {message}", lock=name)
    if type(weight) is not int or not 1 <= weight <= limit:
        message = f"weight={weight!r}: give the permits of one lease, from 1 to the limit {limit}"
        raise ConfigurationError(f"semaphore {name!r}: {message}", lock=name)
    return _shared(SEMAPHORE, name, weight, limit, settings)


def describe_rwlock(name: str, *, write: bool, **settings: Any) -> LockSpec:  # noqa: ANN401 - as `core.spec.describe` takes
    """Check the settings of an rwlock; return the spec of its writers or readers.

    Raises:
        ConfigurationError: a setting is invalid. The message shows what to write instead.
    """
    return _shared(RWLOCK, name, WHOLE if write else 1, WHOLE, settings)


def _shared(kind: str, name: str, weight: int, limit: int, settings: dict[str, Any]) -> LockSpec:
    if settings["quorum"]:
        raise ConfigurationError(
            f"{kind} {name!r}: several independent servers cannot count its holders together: use "
            "a client of one server, of a primary with replicas, or of a cluster",
            lock=name,
        )
    spec = describe(
        name,
        **settings,
        reentrant=False,
        owner=None,
        fair=True,
        lock_delay=0.0,
        key=None,
    )
    keys = keys_of(b"%b:%b" % (spec.keys.lock, kind.encode()), replicas=spec.replicas)
    return replace(
        spec,
        keys=keys,
        suffix=spec.suffix + permits_suffix(weight, limit),
        acquire_script=ACQUIRE_SHARED,
        is_shared=True,
        kind=SHARED,
        weight=weight,
        limit=limit,
    )


class SharedSpecs:
    """The semaphores and rwlocks of one client. Describing one again is a lookup.

    `of_client` are the settings that all locks of the client share. The methods take the other
    settings in the order of `_SETTINGS`.
    """

    def __init__(self, of_client: dict[str, Any]) -> None:
        self._of_client = of_client
        self._semaphore = lru_cache(SPECS_MAX, typed=True)(self._describe_semaphore)
        self._rwlock = lru_cache(SPECS_MAX, typed=True)(self._describe_rwlock)

    def semaphore(self, *given: Any) -> LockSpec:  # noqa: ANN401 - as the user gave them
        """Return the spec of a semaphore: of its name, limit, weight and settings.

        Raises:
            ConfigurationError: a setting is invalid.
        """
        try:
            return self._semaphore(*given)
        except TypeError:  # a setting is not hashable
            return self._describe_semaphore(*given)

    def rwlock(self, *given: Any) -> tuple[LockSpec, LockSpec]:  # noqa: ANN401 - as above
        """Return the specs of readers and writers of an rwlock: of its name and settings.

        Raises:
            ConfigurationError: a setting is invalid.
        """
        try:
            return self._rwlock(*given)
        except TypeError:  # as above
            return self._describe_rwlock(*given)

    def _describe_semaphore(self, name: str, limit: int, weight: int, *settings: Any) -> LockSpec:  # noqa: ANN401 - as above
        return describe_semaphore(name, limit=limit, weight=weight, **self._all(settings))

    def _describe_rwlock(self, name: str, *settings: Any) -> tuple[LockSpec, LockSpec]:  # noqa: ANN401 - as above
        given = self._all(settings)
        return describe_rwlock(name, write=False, **given), describe_rwlock(
            name, write=True, **given
        )

    def _all(self, settings: tuple[Any, ...]) -> dict[str, Any]:
        return {**dict(zip(_SETTINGS, settings, strict=True)), **self._of_client}


def check_permits(session: Session, spec: LockSpec) -> None:
    """Check that the caller does not wait for permits that it holds itself.

    Raises:
        WouldDeadlock: it would wait for itself, or for a task that cannot run while it waits.
    """
    held = session.held
    mine = held.weight_of_caller(spec)
    if mine and kind_in(spec.keys.lock) == RWLOCK:
        # Even a second read: it may wait behind a writer that waits for the first.
        asked, has = (
            "write" if spec.weight == spec.limit else "read",
            "writing" if mine >= spec.limit else "reading",
        )
        advice = "release it first"
        if has == "writing" and asked == "read":
            advice = "call lease.downgrade(), which keeps the lock for reading"
        raise WouldDeadlock(
            f"rwlock {spec.name!r} is held for {has} by this thread or task, and would be acquired "
            f"to {asked}: {advice}",
            lock=spec.name,
        )
    if mine + spec.weight > spec.limit:
        raise WouldDeadlock(
            f"semaphore {spec.name!r}: this thread or task holds {mine} of {spec.limit} permits, "
            f"and would wait for {spec.weight} more: release the first ones, or acquire all of "
            "them at once with weight=",
            lock=spec.name,
        )
    if held.weight_blocked_by_waiting(spec) + spec.weight > spec.limit:
        raise WouldDeadlock(
            f"{spec.name!r} is held by another task or callback of this event loop, which cannot "
            "release it while this call blocks the loop: use holdfast.AsyncClient in coroutines",
            lock=spec.name,
        )


def describe_use(spec: LockSpec, used: int, holder: Holder) -> str:
    """Describe why permits were not granted; `holder` is the one whose lease expires first."""
    if not used:
        return "other waiters are ahead in the queue"
    kind, fits = kind_in(spec.keys.lock), used + spec.weight <= spec.limit
    if kind == RWLOCK:
        among = "" if used == 1 or used >= spec.limit else f" {used} readers, among them"
        held = f"held for {'writing' if used >= spec.limit else 'reading'} by{among} {holder}"
        return f"a writer is ahead in the queue; {held}" if fits else held
    held = f"{used} of {spec.limit} permits are in use"
    why = "waiters are ahead in the queue" if fits else f"it needs {spec.weight}"
    return f"{held}, and {why}; among the holders is {holder}"


async def holders(session: Session, spec: LockSpec) -> list[Holder]:
    """Return the holders; the first to expire unless renewed comes first.

    Raises:
        NodeUnavailable: the server does not reply.
        ConfigurationError: the server refuses the request.
    """
    request = HOLDERS, spec.keys, (), spec.command_timeout
    try:
        reply, _ = await retry(session.deployment.call, request)
    except (OutcomeUnknown, NodeUnavailable) as error:
        message = f"the holders of {spec.name!r} are not known: {error}"
        raise NodeUnavailable(message, lock=spec.name, node=error.node) from None
    (found,) = reply
    return [
        read_holder(token, left_ms) for token, left_ms in zip(found[::2], found[1::2], strict=True)
    ]


async def evict(session: Session, spec: LockSpec, holder: Holder) -> bool:
    """End the lease of `holder`; return False if it has ended already.

    If this call is interrupted, the outcome is unknown. It may be retried.

    Raises:
        OutcomeUnknown: the server did not reply; the holder may have been evicted.
        NodeUnavailable: the server cannot be reached, or refuses.
        ConfigurationError: the server will never do this.
    """
    args = holder.token, spec.ttl_ms, spec.settings
    request = EVICT_SHARED, spec.keys, args, spec.command_timeout
    try:
        reply, may_have_run = await retry(session.deployment.call, request)
    except OutcomeUnknown as error:
        message = f"the holder of {spec.name!r} may or may not have been evicted: {error}"
        raise OutcomeUnknown(message, lock=spec.name, node=error.node) from None
    except NodeUnavailable as error:
        message = f"the holder of {spec.name!r} was not evicted: {error}"
        raise NodeUnavailable(message, lock=spec.name, node=error.node) from None
    return reply == 1 or may_have_run  # an earlier try may have evicted it
