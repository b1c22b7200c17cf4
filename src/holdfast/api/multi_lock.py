"""Several locks at once, for threads: `client.lock_all`.

`api.async_multi_lock` has the same API for asyncio: a test compares the two.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar

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
from holdfast.api.client import Lease, Lock
from holdfast.api.lease_view import UNSET, Unset
from holdfast.api.multi_view import MultiLeaseView, MultiLockSettings
from holdfast.core.acquire_all import acquire_all
from holdfast.core.duration import in_seconds
from holdfast.core.extend import extend_all
from holdfast.core.release_all import release_all
from holdfast.core.spec import check_timeout
from holdfast.errors import AcquireTimeout, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Self

    from holdfast.api.client import Client
    from holdfast.core.duration import Duration
    from holdfast.core.lease_state import LeaseState
    from holdfast.errors import LossReason

P = ParamSpec("P")
R = TypeVar("R")


class MultiLock(MultiLockSettings):
    """Several locks that are acquired together. Immutable; threads may share it.

    Use it as a context manager or as a decorator, or call `acquire`.

    The locks are acquired in a fixed order, which does not depend on the order of the names. So two
    callers never wait for each other, unless one of them already holds another lock that the other
    one waits for. Name all locks in one call to avoid that.

    Example:
        accounts = client.lock_all(["account:1", "account:2"])
        with accounts as lease:  # acquires all, and releases them at the end
            ...

    Entering raises what `acquire` raises. Leaving raises what `release` raises, such as `LeaseLost`
    if a lease was lost, unless the block raised another exception.
    """

    __slots__ = ("_client", "_entered", "_session")

    def __init__(
        self,
        client: Client,
        locks: Iterable[str | Lock],
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
        self._entered: list[MultiLease] = []

    @property
    def locks(self) -> tuple[Lock, ...]:
        """The single locks, in the order in which they are acquired."""
        return tuple(Lock(self._client, spec) for spec in self._locks.specs)

    def acquire(
        self,
        *positional: Never,
        timeout: Duration | Unset | None = UNSET,
        **unknown: Never,
    ) -> MultiLease:
        """Acquire all locks and return their leases as one. If it fails, none of them is held.

        While the call waits for one lock, it holds those that come before it in the fixed order,
        and renews them. If the call is interrupted by a signal handler at any point, no lock is
        left held.

        Example:
            lease = accounts.acquire(timeout=5)
            try:
                transfer(fences=lease.fences)
            finally:
                lease.release()

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
        lease = MultiLease(self._client, self._locks, self._names)
        try:
            run(acquire_all(self._session, self._locks, timeout, lease._refs))  # noqa: SLF001 - same module
            return lease  # noqa: TRY300 - an interrupt here must be caught too
        except BaseException:
            lease._abandon()  # noqa: SLF001 - same module
            raise

    def try_acquire(self, *positional: Never, **unknown: Never) -> MultiLease | None:
        """Acquire all locks if they are free, without waiting; return None if one is held.

        If the call is interrupted by a signal handler at any point, no lock is left held.

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
            return self.acquire(timeout=0)
        except AcquireTimeout:
            return None

    def __enter__(self) -> MultiLease:
        lease = MultiLease(self._client, self._locks, self._names)
        try:
            run(acquire_all(self._session, self._locks, self._timeout, lease._refs))  # noqa: SLF001 - same module
            enter(self._entered, lease, block_owner())
            return lease  # noqa: TRY300 - an interrupt here must be caught too
        except BaseException:
            remove(self._entered, lease)
            lease._abandon()  # noqa: SLF001 - same module
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # No statement before the try: an interrupt there would leave the locks held.
        try:
            lease = exiting_lease(self._entered, block_owner)
            if lease is None:
                raise unknown_block(self._entered, self._names[0], "'with lock.acquire()")  # noqa: TRY301 - handled below
            # In case that an interrupt prevents its removal.
            lease._exiting = True  # noqa: SLF001 - within the API
            lease.__exit__(kind, error, traceback)
        except BaseException as failure:
            lease = exiting_lease(self._entered, block_owner)
            if lease is not None:
                if not isinstance(failure, HoldfastError):
                    lease._abandon()  # noqa: SLF001 - same module
                remove_exited(self._entered, lease, block_owner)
            if error is None or not isinstance(failure, HoldfastError):
                raise
            note_failure(error, failure)
            return
        # Removed last, so that an interrupt before this line still finds the lease above.
        remove_exited(self._entered, lease, block_owner)

    if not TYPE_CHECKING:  # type checkers must not see it
        __aenter__ = MissingMethod(
            "write 'with lock:', or use lock_all of holdfast.AsyncClient in coroutines"
        )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate `function`, so that every call acquires all locks and releases them at the end.

        A call raises what `acquire` and the function raise. It raises what `release` raises, such
        as `LeaseLost` if a lease was lost, unless the function raised another exception.

        Raises:
            ConfigurationError: `function` is a coroutine function or a generator function, whose
                body does not run during the call; or the name of a lock has a field for one of its
                arguments, which is not replaced.
        """
        advice = "decorate it with lock_all of holdfast.AsyncClient"
        check_plain_function(function, advice, self._names[0])
        for spec in self._locks.specs:
            check_name_of_decorator(spec, function, "with")

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return locked


class MultiLease(MultiLeaseView[Lease]):
    """One holding of several locks, from `acquire` to `release`.

    It is lost as soon as one of its leases is lost. The others are then still held, and renewed,
    until it is released. Leaving `with lease` releases it. A loss does not interrupt a `with`
    block: use `check`, `lost` or `on_lost`.

    Example:
        with client.lock_all(["account:1", "account:2"]) as lease:
            for payment in payments:
                lease.check()  # raises LeaseLost
                transfer(payment, fences=lease.fences)
    """

    __slots__ = ()

    _client: Client
    _lost: threading.Event | None

    def _new_ref(self) -> Lease:
        return Lease(self._client)

    @property
    def lost(self) -> threading.Event:
        """A `threading.Event` that is set when one of the leases is lost.

        That is at the first deadline, or earlier if a renewal finds that a lock is gone.

        Raises:
            NotHeld: the locks were never acquired.
        """
        if self._lost is None:
            event = threading.Event()
            for state in self._states:
                state.on_loss(lambda _: event.set())
            self._lost = event
        return self._lost

    def on_lost(self, callback: Callable[[Self, LossReason], object]) -> None:
        """Call `callback(lease, reason)` in a dedicated thread when the first lease is lost.

        It is called once, even if other leases are lost afterwards. `lost` is already set by then.
        If a lease is already lost, the callback is called at once. An exception from the callback
        is logged. If no thread can be started, the thread that delivers events runs the callback
        later.

        Args:
            callback: takes this lease of all locks, and the `LossReason` of the one that was lost.

        Raises:
            NotHeld: the locks were never acquired.
        """
        call = self._client._events.call  # noqa: SLF001 - within the API
        lost = self._when_lost(callback)

        def on_loss(state: LeaseState) -> None:
            bound = lost(state)
            if bound is not None:
                call(bound)

        for state in self._states:
            state.on_loss(on_loss, last=True)

    def extend(self, ttl: Duration) -> None:
        """Set the remaining time of each lease to `ttl` seconds from now, longer or shorter.

        A shorter time applies in this process only: the server keeps the later expiry. If the call
        is interrupted by a signal handler, or fails, some leases may be extended and others not.

        Example:
            lease.extend(60)  # 60 s left, counted from now

        Args:
            ttl: seconds from now.

        Raises:
            LeaseLost: a lease had been lost.
            NotHeld: a lease was released, or belongs to the process that forked this one.
            OutcomeUnknown: the server did not reply; an old deadline stays.
            NodeUnavailable: the server cannot be reached; an old deadline stays.
            ConfigurationError: `ttl` is invalid.
        """
        run(extend_all(self._session, self._refs, ttl))

    def release(self) -> None:
        """Release all locks, even if one of them cannot be released.

        After a successful release, calling it again does nothing. If the call is interrupted by a
        signal handler, it still releases the locks before it passes on the interruption.

        Raises:
            LeaseLost: a lease had been lost: another client may have held its lock. The message
                names each lock that was lost, or whose release has an unknown outcome.
            NotHeld: the leases belong to the process that forked this one.
            OutcomeUnknown: the server did not reply. The client retries in the background, and you
                may call `release` again.
            NodeUnavailable: the server cannot be reached. The client retries in the background, and
                you may call `release` again.
        """
        run(release_all(self._session, self._locks, self._refs))

    def _abandon(self) -> None:
        """Release what an interrupted call may have acquired."""
        for ref in self._refs:
            ref._mark_unseen()  # noqa: SLF001 - within the API
        with contextlib.suppress(HoldfastError):
            run(release_all(self._session, self._locks, self._refs))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            run(release_all(self._session, self._locks, self._refs))
        except HoldfastError as failure:
            if error is None:
                raise
            note_failure(error, failure)
        except BaseException:
            self._abandon()
            raise
