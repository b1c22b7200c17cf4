"""What all kinds of locks share in the API for asyncio; as `api.acquirable` for threads."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Generic, Never, ParamSpec, TypeVar

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
from holdfast.api.lease_view import UNSET, AnyLockSettings, Unset
from holdfast.core.acquire import acquire
from holdfast.core.duration import in_seconds
from holdfast.core.spec import check_timeout
from holdfast.errors import AcquireTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from holdfast.api.async_client import AsyncClient, AsyncLease
    from holdfast.core.duration import Duration
    from holdfast.core.spec import LockSpec

L = TypeVar("L", bound="AsyncLease")
P = ParamSpec("P")
R = TypeVar("R")


class AsyncAcquirable(AnyLockSettings, Generic[L]):
    """A lock of any kind. Immutable; tasks may share it."""

    __slots__ = ("_client", "_entered", "_session")

    _wait = "await "

    def __init__(self, client: AsyncClient, spec: LockSpec) -> None:
        self._client = client
        self._session = client._session  # noqa: SLF001 - within the API
        self._spec = spec
        self._entered: list[L] = []

    def _new_lease(self) -> L:
        """Return a lease that is not acquired yet."""
        raise NotImplementedError

    async def acquire(
        self,
        *positional: Never,
        timeout: Duration | Unset | None = UNSET,
        **unknown: Never,
    ) -> L:
        """Acquire the lock and return the lease.

        If the call is cancelled at any point, the lock is not left held.

        Example:
            lease = await lock.acquire(timeout=5)
            try:
                await save(invoice, fence=lease.fence)
            finally:
                await lease.release()

        Args:
            timeout: seconds to wait, instead of the lock's `timeout`; None waits forever. It
                limits the wait while other clients hold the lock. If nothing listens at the address
                of the only server, the call fails at once. If the server hangs, the call fails
                after three to five command timeouts, or 0.1 s after `timeout` if that is sooner. A
                call that already waits in the queue fails when one ttl has passed since the last
                reply, or later if the server hangs. With 0 the server has one command timeout to
                reply.
            *positional: rejected; the error shows what to write.
            **unknown: rejected. For an argument of other lock libraries the error names the
                replacement.

        Raises:
            AcquireTimeout: other clients held the lock all the time; `error.holder` is the last
                one.
            WouldDeadlock: the caller holds the lock, and it is not reentrant.
            NodeUnavailable: the server does not reply, or refuses the request. On several servers
                the error is its subclass `NoQuorum`.
            ConfigurationError: the server will never grant the lock: a setting or its configuration
                is wrong.
            NotHeld: this process was forked during the call.
            TypeError: an argument is positional or unknown.
        """
        if positional or unknown:
            refuse("acquire", unknown, positional, self._wait)
        if timeout is UNSET:
            timeout = self._spec.timeout
        else:
            timeout = in_seconds(timeout)
            check_timeout(timeout, lock=self._spec.name)
        return await acquire(self._session, self._spec, timeout, self._new_lease())

    async def try_acquire(self, *positional: Never, **unknown: Never) -> L | None:
        """Acquire the lock if it is free, without waiting; return None if it is held.

        If the call is cancelled at any point, the lock is not left held.

        Args:
            *positional: rejected; the error shows what to write.
            **unknown: rejected; this call has no settings.

        Raises:
            NodeUnavailable: the server does not reply, or refuses the request. On several servers
                the error is its subclass `NoQuorum`.
            ConfigurationError: the server will never grant the lock: a setting or its configuration
                is wrong.
            NotHeld: this process was forked during the call.
            TypeError: an argument was given.
        """
        if positional or unknown:
            refuse("try_acquire", unknown, positional, self._wait)
        try:
            return await self.acquire(timeout=0)
        except AcquireTimeout:
            return None

    async def __aenter__(self) -> L:
        lease = self._new_lease()
        await acquire(self._session, self._spec, self._spec.timeout, lease)
        task = lease._state.actor  # noqa: SLF001 - within the API
        lease._enter(task)  # noqa: SLF001 - within the API
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
        failure = unknown_block(self._entered, self.name, "'async with await lock.acquire()")
        if error is None:
            raise failure
        note_failure(error, failure)

    if not TYPE_CHECKING:  # type checkers must not see it
        __enter__ = MissingMethod("write 'async with lock:', or use a lock of holdfast.Client")

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> Callable[P, Coroutine[Any, Any, R]]:
        """Decorate `function`, so that every call acquires the lock and releases it at the end.

        A call raises what `acquire` and the function raise. It raises what `release` raises, such
        as `LeaseLost` if the lease was lost, unless the function raised another exception.

        Raises:
            ConfigurationError: `function` is not a coroutine function, or the name of the lock has
                a field for one of its arguments, which is not replaced.
        """
        check_coroutine_function(function, "decorate it with a lock of holdfast.Client", self.name)
        check_name_of_decorator(self._spec, function, "async with")

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            async with self:
                return await function(*args, **kwargs)

        return locked
