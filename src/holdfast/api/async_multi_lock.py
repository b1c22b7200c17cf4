"""Several locks at once, for asyncio: `client.lock_all`.

`api.multi_lock` has the same API for threads: a test compares the two.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar
from weakref import ref as weak_ref

from holdfast.adapters.asyncio_port import call_on_loop, call_soon_on_loop
from holdfast.api.active_leases import (
    enter,
    exiting_lease,
    note_failure,
    remove,
    unknown_block,
)
from holdfast.api.advice import (
    MissingMethod,
    check_coroutine_function,
    check_name_of_decorator,
    refuse,
)
from holdfast.api.async_body import LeaseBody
from holdfast.api.async_client import AsyncLease, AsyncLock
from holdfast.api.events import call_logged_on_loop
from holdfast.api.lease_view import UNSET, Unset
from holdfast.api.multi_view import MultiLeaseView, MultiLockSettings
from holdfast.core.acquire_all import acquire_all
from holdfast.core.duration import in_seconds
from holdfast.core.extend import extend_all
from holdfast.core.release_all import release_all
from holdfast.core.spec import check_timeout
from holdfast.errors import AcquireTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from types import TracebackType
    from typing import Self

    from holdfast.api.async_client import AsyncClient
    from holdfast.core.duration import Duration
    from holdfast.core.lease_state import LeaseState
    from holdfast.errors import LossReason

P = ParamSpec("P")
R = TypeVar("R")


class AsyncMultiLock(MultiLockSettings):
    """Several locks that are acquired together. Immutable; tasks may share it.

    Use it as a context manager or as a decorator, or call `acquire`.

    The locks are acquired in a fixed order, which does not depend on the order of the names. So two
    callers never wait for each other, unless one of them already holds another lock that the other
    one waits for. Name all locks in one call to avoid that.

    Example:
        accounts = client.lock_all(["account:1", "account:2"])
        async with accounts as lease:  # acquires all, and releases them at the end
            ...

    Entering raises what `acquire` raises. Leaving raises what `release` raises, such as `LeaseLost`
    if a lease was lost, unless the block raised another exception.
    """

    __slots__ = ("_client", "_entered", "_session")

    _wait = "await "

    def __init__(
        self,
        client: AsyncClient,
        locks: Iterable[str | AsyncLock],
        settings: tuple[Any, ...],
        timeout: Duration | None,
    ) -> None:
        self._client = client
        self._session = client._session  # noqa: SLF001 - within the API
        super().__init__(
            self._session,
            client._specs,  # noqa: SLF001 - within the API
            locks,
            settings,
            timeout,
        )
        self._entered: list[AsyncMultiLease] = []

    @property
    def locks(self) -> tuple[AsyncLock, ...]:
        """The single locks, in the order in which they are acquired."""
        return tuple(AsyncLock(self._client, spec) for spec in self._locks.specs)

    async def acquire(
        self,
        *positional: Never,
        timeout: Duration | Unset | None = UNSET,
        **unknown: Never,
    ) -> AsyncMultiLease:
        """Acquire all locks and return their leases as one. If it fails, none of them is held.

        While the call waits for one lock, it holds those that come before it in the fixed order,
        and renews them. If the call is cancelled at any point, no lock is
        left held.

        Example:
            lease = await accounts.acquire(timeout=5)
            try:
                await transfer(fences=lease.fences)
            finally:
                await lease.release()

        Args:
            timeout: seconds to wait for all locks together, instead of the `timeout` that
                `lock_all` was given; None waits forever. A call whose timeout is over ends three
                command timeouts later at the latest.
            *positional: rejected; the error shows what to write.
            **unknown: rejected. For an argument of other lock libraries the error names the
                replacement.

        Raises:
            AcquireTimeout: other clients held one of the locks; `error.lock` is its name, and
                `error.holder` its last holder.
            WouldDeadlock: the caller holds one of the locks, and it is not reentrant.
            LeaseLost: one of the leases was lost while the call waited for another lock, because
                it was not renewed (`renew=False`), evicted, or the server lost it.
            NodeUnavailable: the server does not reply, or refuses the request. On several servers
                the error is its subclass `NoQuorum`.
            ConfigurationError: the server will never grant one of the locks: a setting or its
                configuration is wrong.
            NotHeld: this process was forked during the call.
            TypeError: an argument is positional or unknown.
        """
        if positional or unknown:
            refuse("acquire", unknown, positional, self._wait)
        if timeout is UNSET:
            timeout = self._timeout
        else:
            timeout = in_seconds(timeout)
            check_timeout(timeout, lock=self._names[0])
        lease = AsyncMultiLease(self._client, self._locks, self._names)
        await acquire_all(self._session, self._locks, timeout, lease._refs)  # noqa: SLF001 - same module
        return lease

    async def try_acquire(self, *positional: Never, **unknown: Never) -> AsyncMultiLease | None:
        """Acquire all locks if they are free, without waiting; return None if one is held.

        If the call is cancelled at any point, no lock is left held.

        Args:
            *positional: rejected; the error shows what to write.
            **unknown: rejected; this call has no settings.

        Raises:
            NodeUnavailable: the server does not reply, or refuses the request. On several servers
                the error is its subclass `NoQuorum`.
            ConfigurationError: the server will never grant one of the locks: a setting or its
                configuration is wrong.
            LeaseLost: one of the leases was lost before the last lock was granted.
            NotHeld: this process was forked during the call.
            TypeError: an argument was given.
        """
        if positional or unknown:
            refuse("try_acquire", unknown, positional, self._wait)
        try:
            return await self.acquire(timeout=0)
        except AcquireTimeout:
            return None

    async def __aenter__(self) -> AsyncMultiLease:
        lease = AsyncMultiLease(self._client, self._locks, self._names)
        await acquire_all(self._session, self._locks, self._timeout, lease._refs)  # noqa: SLF001 - same module
        task = asyncio.current_task()
        lease._enter(task)  # noqa: SLF001 - same module
        enter(self._entered, lease, task)
        return lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lease = exiting_lease(self._entered, asyncio.current_task)
        if lease is not None:
            remove(self._entered, lease)
            await lease.__aexit__(kind, error, traceback)
            return
        failure = unknown_block(self._entered, self._names[0], "'async with await lock.acquire()")
        if error is None:
            raise failure
        note_failure(error, failure)

    if not TYPE_CHECKING:  # type checkers must not see it
        __enter__ = MissingMethod("write 'async with lock:', or use lock_all of holdfast.Client")

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> Callable[P, Coroutine[Any, Any, R]]:
        """Decorate `function`, so that every call acquires all locks and releases them at the end.

        A call raises what `acquire` and the function raise. It raises what `release` raises, such
        as `LeaseLost` if a lease was lost, unless the function raised another exception.

        Raises:
            ConfigurationError: `function` is not a coroutine function, or the name of a lock has a
                field for one of its arguments, which is not replaced.
        """
        advice = "decorate it with lock_all of holdfast.Client"
        check_coroutine_function(function, advice, self._names[0])
        for spec in self._locks.specs:
            check_name_of_decorator(spec, function, "async with")

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            async with self:
                return await function(*args, **kwargs)

        return locked


class _Member(AsyncLease):
    """The lease of one of several locks. Its loss cancels the block of all of them."""

    __slots__ = ("_of",)

    def __init__(self, client: AsyncClient, of: AsyncMultiLease) -> None:
        super().__init__(client)
        self._of = weak_ref(of)

    def _cancel_body(self) -> None:
        of = self._of()
        if of is not None:
            of._cancel_body()  # noqa: SLF001 - same module
        super()._cancel_body()


class AsyncMultiLease(LeaseBody, MultiLeaseView[AsyncLease]):
    """One holding of several locks, from `acquire` to `release`.

    It is lost as soon as one of its leases is lost. The others are then still held, and renewed,
    until it is released. Leaving `async with lease` releases it. A loss cancels the
    `async with` block, which then raises `LeaseLost`.

    Example:
        async with client.lock_all(["account:1", "account:2"]) as lease:
            for payment in payments:
                lease.check()  # raises LeaseLost
                await transfer(payment, fences=lease.fences)
    """

    __slots__ = ("_body", "_cancelled", "_cancelling")

    _client: AsyncClient
    _lost: asyncio.Event | None

    def _new_ref(self) -> AsyncLease:
        return _Member(self._client, self)

    @property
    def lost(self) -> asyncio.Event:
        """An `asyncio.Event` that is set when one of the leases is lost.

        That is at the first deadline, or earlier if a renewal finds that a lock is gone.

        Raises:
            NotHeld: the locks were never acquired.
            RuntimeError: no event loop is running.
        """
        if self._lost is None:
            event = asyncio.Event()
            loop = asyncio.get_running_loop()
            for state in self._states:
                state.on_loss(lambda _: call_on_loop(loop, event.set))
            self._lost = event
        return self._lost

    def on_lost(self, callback: Callable[[Self, LossReason], object]) -> None:
        """Call `callback(lease, reason)` on this event loop when the first lease is lost.

        It is called once, even if other leases are lost afterwards. `lost` is already set by then.
        If a lease is already lost, the callback is called at once. An exception from the callback
        is logged. SystemExit and KeyboardInterrupt end the loop, as they do from any other callback
        of the loop.

        Args:
            callback: takes this lease of all locks, and the `LossReason` of the one that was lost.

        Raises:
            NotHeld: the locks were never acquired.
            RuntimeError: no event loop is running.
        """
        loop = asyncio.get_running_loop()
        lost = self._when_lost(callback)

        def on_loss(state: LeaseState) -> None:
            bound = lost(state)
            if bound is not None:
                call_soon_on_loop(loop, functools.partial(call_logged_on_loop, bound))

        for state in self._states:
            state.on_loss(on_loss, last=True)

    async def extend(self, ttl: Duration) -> None:
        """Set the remaining time of each lease to `ttl` seconds from now, longer or shorter.

        A shorter time applies in this process only: the server keeps the later expiry. If the call
        is cancelled, or fails, some leases may be extended and others not.

        Example:
            await lease.extend(60)  # 60 s left, counted from now

        Args:
            ttl: seconds from now.

        Raises:
            LeaseLost: a lease had been lost.
            NotHeld: a lease was released, or belongs to the process that forked this one.
            OutcomeUnknown: the server did not reply; an old deadline stays.
            NodeUnavailable: the server cannot be reached; an old deadline stays.
            ConfigurationError: `ttl` is invalid.
        """
        await extend_all(self._session, self._refs, ttl)

    async def release(self) -> None:
        """Release all locks, even if one of them cannot be released.

        After a successful release, calling it again does nothing. If the call is interrupted by a
        signal handler, it still releases the locks before it passes on the cancellation.

        Raises:
            LeaseLost: a lease had been lost: another client may have held its lock. The message
                names each lock that was lost, or whose release has an unknown outcome.
            NotHeld: the leases belong to the process that forked this one.
            OutcomeUnknown: the server did not reply. The client retries in the background, and you
                may call `release` again.
            NodeUnavailable: the server cannot be reached. The client retries in the background, and
                you may call `release` again.
        """
        await release_all(self._session, self._locks, self._refs)

    async def __aenter__(self) -> Self:
        self._enter(asyncio.current_task())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._body = self._body, None
        if error is None and not self._cancelled:
            await release_all(self._session, self._locks, self._refs)
        else:
            await self._exit_after(error, task)
