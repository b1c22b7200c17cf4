"""Semaphores and read-write locks for asyncio. `api.shared` has the same API for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from holdfast.api.advice import MissingMethod
from holdfast.api.async_acquirable import AsyncAcquirable
from holdfast.api.async_client import AsyncLease
from holdfast.api.lease_view import ALWAYS, AnyLockSettings
from holdfast.core.downgrade import downgrade
from holdfast.core.permits import evict, holders

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from holdfast.api.async_client import AsyncClient
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder

L = TypeVar("L", bound=AsyncLease)


class AsyncSharedLock(AsyncAcquirable[L]):
    """A lock with several holders: a semaphore, or one side of an rwlock."""

    __slots__ = ()

    async def holders(self) -> list[Holder]:
        """Return the current holders.

        The one whose lease expires first, unless it is renewed, comes first.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        return await holders(self._session, self._spec)

    async def evict(self, holder: Holder) -> bool:
        """End the lease of `holder`, and grant its permits to waiters: for operators.

        The holder's process is not stopped. It gets `LeaseLost` when it next renews or releases.
        Until then it considers itself a holder, so let the resource check fences.

        If the call is cancelled, the holder may or may not have been evicted;
        the call can be repeated.

        Args:
            holder: one that `holders()` returned.

        Returns:
            True if `holder` still had its lease, False if not.

        Raises:
            OutcomeUnknown: the server did not reply; the holder may or may not have been evicted.
            NodeUnavailable: the server cannot be reached, or refuses the request.
            ConfigurationError: the server will never do this: its configuration is wrong.
        """
        return await evict(self._session, self._spec, holder)


class AsyncSemaphore(AsyncSharedLock[AsyncLease]):
    """A semaphore: its name and its settings. Immutable; tasks may share it.

    Use it as a `Lock`: as a context manager or as a decorator, or call `acquire`. Each time takes
    `weight` permits, until the lease is released or lost.

    Example:
        gpu = client.semaphore("gpu", limit=4)
        async with gpu as lease:  # takes a permit, and releases it at the end
            ...

    `acquire` raises `WouldDeadlock` if the permits that this thread or task holds, together with
    `weight`, exceed the limit.
    """

    __slots__ = ()

    _MADE_BY = "semaphore(name, limit=...)"
    _SHOWN: Mapping[str, object] = {
        "limit": ALWAYS,
        "weight": 1,
        **AnyLockSettings._SHOWN,  # noqa: SLF001 - within the API
    }

    def _new_lease(self) -> AsyncLease:
        return AsyncLease(self._client)

    @property
    def limit(self) -> int:
        """How many permits may be in use when this semaphore is granted its own."""
        return self._spec.limit

    @property
    def weight(self) -> int:
        """The permits that one lease takes."""
        return self._spec.weight


class AsyncReadLock(AsyncSharedLock[AsyncLease]):
    """The side of an rwlock for readers: any number of them hold it together.

    Use it as a `Lock`: as a context manager or as a decorator, or call `acquire`.

    `acquire` raises `WouldDeadlock` if this thread or task holds the rwlock already, for reading or
    for writing. A second reader could wait behind a writer that waits for the first.
    """

    __slots__ = ()

    _MADE_BY = "rwlock(name).read()"

    def _new_lease(self) -> AsyncLease:
        return AsyncLease(self._client)


class AsyncWriteLease(AsyncLease):
    """One holding of an rwlock by a writer, from `acquire` to `release`."""

    __slots__ = ()

    async def downgrade(self) -> Self:
        """Continue as a reader, without a gap in which another client could write.

        It stays the same lease, with the same fence, and is released as before. Readers that are
        next in the queue are granted the lock. Calling it again does nothing.

        If the call is cancelled, the client completes it in the background.
        The lease stays valid, and can be released at any time.

        Example:
            async with client.rwlock("catalog").write() as lease:
                save(catalog, fence=lease.fence)
                await lease.downgrade()
                check(catalog)

        Returns:
            This lease.

        Raises:
            LeaseLost: the lease had been lost.
            NotHeld: the lease was released, or belongs to the process that forked this one.
            OutcomeUnknown: the server did not reply. The lease is held, at least by a reader; the
                client completes the call in the background.
            NodeUnavailable: the server cannot be reached; as above.
        """
        await downgrade(self._session, self)
        return self


class AsyncWriteLock(AsyncSharedLock[AsyncWriteLease]):
    """The side of an rwlock for writers: one of them holds it, and no reader beside it.

    Use it as a `Lock`: as a context manager or as a decorator, or call `acquire`.

    `acquire` raises `WouldDeadlock` if this thread or task holds the rwlock already. A reader
    cannot become a writer: release the lease, then acquire the lock to write, and read again what
    may have changed in between.
    """

    __slots__ = ()

    _MADE_BY = "rwlock(name).write()"

    def _new_lease(self) -> AsyncWriteLease:
        return AsyncWriteLease(self._client)


class AsyncRWLock(AnyLockSettings):
    """A read-write lock: its name and its settings. Immutable; tasks may share it.

    Example:
        catalog = client.rwlock("catalog")
        async with catalog.read() as lease:
            ...
        async with catalog.write() as lease:
            ...
    """

    __slots__ = ("_client", "_session", "_writer")

    _MADE_BY = "rwlock(name)"
    _wait = "await "

    def __init__(self, client: AsyncClient, reader: LockSpec, writer: LockSpec) -> None:
        self._client = client
        self._session = client._session  # noqa: SLF001 - within the API
        self._spec = reader
        self._writer = writer

    def read(self) -> AsyncReadLock:
        """Return the side for readers, which many clients can hold together."""
        return AsyncReadLock(self._client, self._spec)

    def write(self) -> AsyncWriteLock:
        """Return the side for writers, which one client can hold."""
        return AsyncWriteLock(self._client, self._writer)

    async def holders(self) -> list[Holder]:
        """Return the current holders, readers or one writer (`Holder.exclusive`).

        The one whose lease expires first, unless it is renewed, comes first.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        return await holders(self._session, self._spec)

    async def evict(self, holder: Holder) -> bool:
        """End the lease of `holder`, and grant its permits to waiters: for operators.

        The holder's process is not stopped. It gets `LeaseLost` when it next renews or releases.
        Until then it considers itself a holder, so let the resource check fences.

        If the call is cancelled, the holder may or may not have been evicted;
        the call can be repeated.

        Args:
            holder: one that `holders()` returned.

        Returns:
            True if `holder` still had its lease, False if not.

        Raises:
            OutcomeUnknown: the server did not reply; the holder may or may not have been evicted.
            NodeUnavailable: the server cannot be reached, or refuses the request.
            ConfigurationError: the server will never do this: its configuration is wrong.
        """
        return await evict(self._session, self._spec, holder)

    if not TYPE_CHECKING:  # type checkers must not see these
        acquire = MissingMethod(
            "write {wait}rwlock.read().acquire() or {wait}rwlock.write().acquire()"
        )
        try_acquire = MissingMethod(
            "write {wait}rwlock.read().try_acquire() or {wait}rwlock.write().try_acquire()"
        )
        __enter__ = MissingMethod("write '{with_} rwlock.read():' or '{with_} rwlock.write():'")
        __aenter__ = MissingMethod("write '{with_} rwlock.read():' or '{with_} rwlock.write():'")
