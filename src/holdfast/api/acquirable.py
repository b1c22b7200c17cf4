"""What all kinds of locks share in the API for threads: acquiring, `with`, and the decorator.

`api.async_acquirable` has the same for asyncio.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Generic, Never, ParamSpec, TypeVar

from holdfast.adapters.thread_port import block_owner, run
from holdfast.api.active_leases import (
    enter,
    exiting_lease,
    note_failure,
    remove,
    remove_exited,
    unknown_block,
)
from holdfast.api.advice import (
    MissingMethod,
    check_name_of_decorator,
    check_plain_function,
    refuse,
)
from holdfast.api.lease_view import UNSET, AnyLockSettings, Unset
from holdfast.core.acquire import acquire
from holdfast.core.duration import in_seconds
from holdfast.core.spec import check_timeout
from holdfast.errors import AcquireTimeout, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from holdfast.api.client import Client, Lease
    from holdfast.core.duration import Duration
    from holdfast.core.spec import LockSpec

L = TypeVar("L", bound="Lease")
P = ParamSpec("P")
R = TypeVar("R")


class Acquirable(AnyLockSettings, Generic[L]):
    """A lock of any kind. Immutable; threads may share it."""

    __slots__ = ("_client", "_entered", "_session")

    def __init__(self, client: Client, spec: LockSpec) -> None:
        self._client = client
        self._session = client._session  # noqa: SLF001 - within the API
        self._spec = spec
        self._entered: list[L] = []

    def _new_lease(self) -> L:
        """Return a lease that is not acquired yet."""
        raise NotImplementedError

    def acquire(
        self,
        *positional: Never,
        timeout: Duration | Unset | None = UNSET,
        **unknown: Never,
    ) -> L:
        """Acquire the lock and return the lease.

        If the call is interrupted by a signal handler at any point, the lock is not left held.

        Example:
            lease = lock.acquire(timeout=5)
            try:
                save(invoice, fence=lease.fence)
            finally:
                lease.release()

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
        lease = self._new_lease()
        try:
            run(acquire(self._session, self._spec, timeout, lease))
            return lease  # noqa: TRY300 - an interrupt here must be caught too
        except BaseException:
            lease._abandon()  # noqa: SLF001 - within the API
            raise

    def try_acquire(self, *positional: Never, **unknown: Never) -> L | None:
        """Acquire the lock if it is free, without waiting; return None if it is held.

        If the call is interrupted by a signal handler at any point, the lock is not left held.

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
            return self.acquire(timeout=0)
        except AcquireTimeout:
            return None

    def __enter__(self) -> L:
        lease = self._new_lease()
        try:
            run(acquire(self._session, self._spec, self._spec.timeout, lease))
            enter(self._entered, lease, block_owner())
            return lease  # noqa: TRY300 - an interrupt here must be caught too
        except BaseException:
            remove(self._entered, lease)
            lease._abandon()  # noqa: SLF001 - within the API
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # No statement before the try: an interrupt there would leave the lock held.
        try:
            lease = exiting_lease(self._entered, block_owner)
            if lease is None:
                raise unknown_block(self._entered, self.name, "'with lock.acquire()")  # noqa: TRY301 - handled below
            # In case that an interrupt prevents its removal.
            lease._exiting = True  # noqa: SLF001 - within the API
            lease.__exit__(kind, error, traceback)
        except BaseException as failure:
            lease = exiting_lease(self._entered, block_owner)
            if lease is not None:
                if not isinstance(failure, HoldfastError):
                    lease._abandon()  # noqa: SLF001 - within the API
                remove_exited(self._entered, lease, block_owner)
            if error is None or not isinstance(failure, HoldfastError):
                raise
            note_failure(error, failure)
            return
        # Removed last, so that an interrupt before this line still finds the lease above.
        remove_exited(self._entered, lease, block_owner)

    if not TYPE_CHECKING:  # type checkers must not see it
        __aenter__ = MissingMethod(
            "write 'with lock:', or use a lock of holdfast.AsyncClient in coroutines"
        )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate `function`, so that every call acquires the lock and releases it at the end.

        A call raises what `acquire` and the function raise. It raises what `release` raises, such
        as `LeaseLost` if the lease was lost, unless the function raised another exception.

        Raises:
            ConfigurationError: `function` is a coroutine function or a generator function, whose
                body does not run during the call; or the name of the lock has a field for one of
                its arguments, which is not replaced.
        """
        advice = "decorate it with a lock of holdfast.AsyncClient"
        check_plain_function(function, advice, self.name)
        check_name_of_decorator(self._spec, function, "with")

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return locked
