"""The parts of `api.multi_lock` and `api.async_multi_lock` that send nothing to the server."""

from __future__ import annotations

from functools import partial
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar
from weakref import ref as weak_ref

from holdfast.api.advice import MissingMethod
from holdfast.api.lease_view import LOCK_DEFAULTS, AnyLockSettings, LeaseView, LockSettings
from holdfast.core.duration import in_seconds
from holdfast.core.lease_state import LOST
from holdfast.core.lock_set import lock_set
from holdfast.core.spec import check_timeout
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import FrameType
    from typing import Self

    from holdfast.api.lease_view import HasSession
    from holdfast.core.duration import Duration
    from holdfast.core.lease_state import LeaseState
    from holdfast.core.lock_set import LockSet
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.core.spec_cache import SpecCache
    from holdfast.errors import LossReason

M = TypeVar("M", bound=LeaseView)

_SHARED = "ttl", "timeout", "renew", "max_hold", "fair", "lock_delay", "replicas", "label"
_TEMPLATE = "template"
"""The name with which the settings of the named locks are checked."""


class MultiLockSettings:
    """The settings of several locks. Reading them sends nothing to the server."""

    __slots__ = ("_given", "_locks", "_names", "_timeout")

    _wait = ""
    """Prefix, in messages, of a call that sends a request: "await " for asyncio."""

    def __init__(
        self,
        session: Session,
        specs: SpecCache,
        locks: Iterable[str | LockSettings],
        settings: tuple[Any, ...],
        timeout: Duration | None,
    ) -> None:
        if isinstance(locks, str):
            raise ConfigurationError(
                f"lock_all({locks!r}): give a list of names, or use client.lock() for one lock"
            )
        try:
            self._given = specs.describe(_TEMPLATE, *settings)
        except TypeError:  # a setting is not hashable
            self._given = specs.describe_uncached(_TEMPLATE, *settings)
        described = [self._describe(session, specs, each, settings) for each in locks]
        self._names = tuple(spec.name for spec in described)
        self._locks = lock_set(described)
        self._timeout = in_seconds(timeout)
        check_timeout(self._timeout, lock=self._locks.specs[0].name)

    @staticmethod
    def _describe(
        session: Session, specs: SpecCache, lock: str | LockSettings, settings: tuple[Any, ...]
    ) -> LockSpec:
        if not isinstance(lock, LockSettings):
            if isinstance(lock, AnyLockSettings):
                raise ConfigurationError(
                    f"{lock!r} cannot be acquired together with others: lock_all takes names, and "
                    "locks of client.lock()",
                    lock=lock.name,
                )
            try:
                return specs.describe(lock, *settings)
            except TypeError:  # the name is not hashable, and no name either
                return specs.describe_uncached(lock, *settings)
        if lock._session is not session:  # noqa: SLF001 - within the API
            raise ConfigurationError(
                f"lock {lock.name!r} belongs to another client: create it with this one, or give "
                "its name",
                lock=lock.name,
            )
        return lock._spec  # noqa: SLF001 - within the API

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the locks, in the order in which they were given."""
        return self._names

    @property
    def ttl(self) -> float:
        """Seconds for which the server keeps each lock that was given by its name."""
        return self._given.ttl

    @property
    def timeout(self) -> float | None:
        """Seconds to wait in `acquire` for all locks; None waits forever."""
        return self._timeout

    @property
    def renew(self) -> bool:
        """Whether the leases of locks that were given by name are renewed in the background."""
        return self._given.renew

    @property
    def max_hold(self) -> float | None:
        """Seconds after which these leases are no longer renewed; None for no limit."""
        return None if self._given.max_hold == inf else self._given.max_hold

    @property
    def fair(self) -> bool:
        """Whether the locks that were given by name are granted first come, first served."""
        return self._given.fair

    @property
    def lock_delay(self) -> float:
        """Seconds for which such a lock is not granted after its lease was lost."""
        return self._given.lock_delay

    @property
    def replicas(self) -> int:
        """Number of replicas that must have such a lease before it is granted."""
        return self._given.replicas

    @property
    def label(self) -> str | None:
        """Text that is shown for this holder, or None."""
        return self._given.label

    if not TYPE_CHECKING:  # type checkers must not see these
        release = MissingMethod(
            "release the lease: write '{with_} lock:', or lease = {wait}lock.acquire() and "
            "{wait}lease.release()"
        )
        extend = MissingMethod("write lease = {wait}lock.acquire() and {wait}lease.extend(seconds)")
        held = MissingMethod("write lease = {wait}lock.acquire() and lease.held")
        fences = MissingMethod("write lease = {wait}lock.acquire() and lease.fences")
        check = MissingMethod("write lease = {wait}lock.acquire() and lease.check()")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lock cannot be pickled or copied: pass the names to the other process, and call "
            "client.lock_all(names) there"
        )

    def __repr__(self) -> str:
        settings = [
            f"{name}={getattr(self, name)!r}"
            for name in _SHARED
            if getattr(self, name) != LOCK_DEFAULTS[name]
        ]
        return f"<{type(self).__name__} {', '.join([repr(list(self._names)), *settings])}>"


class MultiLeaseView(Generic[M]):
    """The properties of several leases that need no request to the server."""

    __slots__ = (
        "__weakref__",
        "_client",
        "_entered_by",
        "_entered_in",
        "_exiting",
        "_locks",
        "_lost",
        "_names",
        "_refs",
        "_session",
    )

    _entered_by: object  # the thread or task that entered `with lock`
    _entered_in: FrameType | None  # its frame
    _exiting: bool

    def __init__(self, client: HasSession, locks: LockSet, names: tuple[str, ...]) -> None:
        self._entered_in = None
        self._exiting = False
        self._client = client
        self._session = client._session  # noqa: SLF001 - within the API
        self._locks = locks
        self._names = names
        self._lost: Any = None
        self._refs = tuple(self._new_ref() for _ in locks.specs)

    def _new_ref(self) -> M:
        raise NotImplementedError

    @property
    def _states(self) -> list[LeaseState]:
        """The states of the leases.

        Raises:
            NotHeld: they were never acquired.
        """
        return [ref._state for ref in self._refs]  # noqa: SLF001 - within the API

    @property
    def leases(self) -> Mapping[str, M]:
        """The lease of each lock, by its name.

        They are in the order in which all callers acquire the locks, whatever the order of the
        names. So a database that locks a row per lease does not deadlock. If one of them is
        released early, `held` is False, and `check` and `extend` raise NotHeld.
        """
        refs = zip(self._locks.specs, self._refs, strict=True)
        return MappingProxyType({spec.name: ref for spec, ref in refs})

    @property
    def fences(self) -> Mapping[str, int]:
        """The fencing number of each lease, by the name of its lock, in the order of `leases`.

        Send the number of a lock with each write to the resource that this lock protects.
        """
        return MappingProxyType({name: lease.fence for name, lease in self.leases.items()})

    @property
    def after_loss(self) -> bool:
        """Whether the previous lease of one of the locks ended without a release.

        `lease.leases[name].after_loss` is that of one lock.
        """
        return any(ref.after_loss for ref in self._refs)

    @property
    def held(self) -> bool:
        """Whether all locks are certainly held now. Becomes False at the first deadline."""
        return all(ref.held for ref in self._refs)

    @property
    def _is_unreleased(self) -> bool:
        """Whether one of the leases was not released yet. It may be held or lost."""
        return any(ref._is_unreleased for ref in self._refs)  # noqa: SLF001 - within the API

    @property
    def _is_lost(self) -> bool:
        return any(state.state is LOST for state in self._states)

    def remaining(self) -> float:
        """Return the seconds until the first deadline, or 0.0 if one of the leases has ended."""
        return min(ref.remaining() for ref in self._refs)

    def check(self) -> None:
        """Raise an error if one of the locks is no longer held. Sends nothing to the server.

        Raises:
            LeaseLost: a lease was lost; `error.lock` is the name of its lock.
            NotHeld: a lease was released, or belongs to the process that forked this one.
        """
        for ref in self._refs:
            ref.check()

    def _when_lost(
        self, callback: Callable[[Self, LossReason], object]
    ) -> Callable[[LeaseState], Callable[[], object] | None]:
        """Return a function that binds a user's callback to these leases and the first reason.

        It returns None for later losses. The callback does not keep the leases alive,
        so that dropped leases are still detected. After a drop, it receives another object.
        """
        mine, calls = weak_ref(self), [callback]
        kind, given, states = type(self), (self._client, self._locks, self._names), self._states

        def lost(state: LeaseState) -> Callable[[], object] | None:
            try:
                call = calls.pop()  # one atomic step: another lease may be lost in another thread
            except IndexError:
                return None
            lease = mine()
            if lease is None:
                lease = kind(*given)
                for ref, each in zip(lease._refs, states, strict=True):  # noqa: SLF001 - of the same class
                    ref._lease = each  # noqa: SLF001 - within the API
            return partial(call, lease, state.loss().reason)

        return lost

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "leases cannot be pickled or copied: acquire the locks in the other process"
        )

    def __repr__(self) -> str:
        state = f"{self.remaining():.3f} s left" if self.held else "over"
        return f"<{type(self).__name__} of {list(self._names)!r}, {state}>"
