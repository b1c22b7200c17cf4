"""The face for asyncio. `faces.client` is its twin; a test keeps the two in step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, ParamSpec, TypeVar

from holdfast.adapters.tasks import tell, tell_soon
from holdfast.core.acquire import acquire
from holdfast.core.duration import in_seconds
from holdfast.core.evict import evict
from holdfast.core.extend import extend
from holdfast.core.hand_off import adopt, export
from holdfast.core.hold import LOST
from holdfast.core.inspect import holder
from holdfast.core.release import release
from holdfast.core.spec import check_timeout, checked_longest_ttl
from holdfast.core.spec_cache import SpecCache
from holdfast.core.value import describe_cache
from holdfast.errors import AcquireTimeout, ConfigurationError, HoldfastError
from holdfast.faces.deployments import over_tasks
from holdfast.faces.entered import last_of, leave
from holdfast.faces.events import Herald, guarded_on_a_loop
from holdfast.faces.facts import (
    UNSET,
    LeaseFacts,
    LockFacts,
    Unset,
    checked_command_timeout,
    checked_port,
    checked_seconds,
    checked_wait,
    generator_advice,
    refuse,
)
from holdfast.keys import checked_namespace
from holdfast.wire.process import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType
    from typing import Self

    from holdfast.core.duration import Duration
    from holdfast.core.events import Event
    from holdfast.core.spec import LockSpec
    from holdfast.errors import LossReason
    from holdfast.faces.async_atomic import AsyncAtomic
    from holdfast.faces.async_cached import AsyncCached, AsyncCaching
    from holdfast.faces.codecs import Codec
    from holdfast.faces.targets import Target
    from holdfast.holder import Holder

P = ParamSpec("P")
R = TypeVar("R")


class AsyncClient:
    """Makes locks on a server, in a cluster or on a majority of servers, and keeps leases alive.

    `target` is a URL (redis://, rediss://, unix://, redis+cluster://host:port,host:port), a
    redis-py or valkey-py client whose connection settings are taken over, a list of three or more
    of these servers, each by itself, or "local": the embedded server, which starts by itself, and
    whose locks exclude processes of this user on this machine only. Without a target HOLDFAST_URL
    is used, else the embedded server, with a warning. Making a client opens no connection. A client
    may be shared by all tasks, and survives a fork: the child connects again and holds nothing.

    Every length of time is in seconds, or a `datetime.timedelta`.

    Args:
        target: the server, the servers, or some nodes of the cluster.
        command_timeout: seconds to wait for one answer of the server; a lock with a short ttl
            waits less, a quarter of it, and one on several servers a tenth.
        min_validity: seconds of its time that a lease must have left when it is given.
        wait: "push" to be told when it is one's turn, first come, first served; "poll" to ask
            again and again, without order, where the server may not speak to its clients.
        namespace: the application that these locks belong to. Clients with different namespaces,
            or with and without one, never exclude one another, and share no cached values. Locks
            with `key=` and atomic operations use their key as it is given. An id of `once=` belongs
            to that key, and is the same in all namespaces.
        longest_ttl: the longest ttl that anybody gives a lock on these servers, in seconds. Behind
            Sentinels, after a change of primary, nobody gets a lock for so long and 11 s more; of
            several servers, one that may have lost its data has no vote for so long.
        on_event: called, in a thread of its own, with each `Event`.

    Raises:
        ConfigurationError: `target` is not a server.
    """

    def __init__(  # noqa: PLR0913 - the settings of a client, all optional
        self,
        target: Target | None = None,
        *,
        command_timeout: Duration = 1.0,
        min_validity: Duration = 0.0,
        wait: Literal["push", "poll"] = "push",
        namespace: str | None = None,
        longest_ttl: Duration = 60.0,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        self._command_timeout = checked_command_timeout(command_timeout)
        self._min_validity = checked_seconds("min_validity", min_validity)
        self._namespace = checked_namespace(namespace)
        self._events = Herald(on_event)
        self._deployment = over_tasks(
            target,
            self._command_timeout,
            checked_longest_ttl(longest_ttl),
            self._events.report,
            polls=checked_wait(wait),
        )
        self._session = self._events.session = self._deployment.session
        reset_after_fork(self._session.begin)
        self._specs = SpecCache(
            command_timeout=self._command_timeout,
            longest_ttl=self._session.deployment.longest_ttl,
            min_validity=self._min_validity,
            quorum=self._session.deployment.is_quorum,
            namespace=self._namespace,
        )

    def lock(  # noqa: PLR0913 - the settings of a lock, all optional
        self,
        name: str,
        *,
        ttl: Duration = 30.0,
        timeout: Duration | None = None,
        renew: bool = True,
        max_hold: Duration | None = None,
        reentrant: bool = False,
        owner: str | None = None,
        fair: bool = True,
        lock_delay: Duration = 0.0,
        replicas: int = 0,
        key: str | None = None,
        label: str | None = None,
        **unknown: Never,
    ) -> AsyncLock:
        """Describe a lock. Costs nothing and talks to nobody.

        Args:
            name: what is locked. All who give this name exclude one another.
            ttl: seconds the server keeps the lock without news of its holder.
            timeout: seconds that acquiring waits; None for ever, 0 not at all. On several servers,
                and behind Sentinels, it also waits while too few servers answer or may grant locks.
            renew: keep the lease alive until it is released; not possible in atexit handlers.
            max_hold: seconds after which it is renewed no more, with an event and a warning.
            reentrant: the task that holds it may take it again.
            owner: whoever gives this name may take it again, in any process. It is free when the
                last of them has released it, or is gone.
            fair: first come, first served. False lets whoever asks while it is free have it.
            lock_delay: seconds for which nobody gets it after its holder was lost, not after a
                release. All who use the lock should give the same.
            replicas: so many replicas of the server must have it before the lease is given, or
                renewed. It keeps a lease from being lost with its server if all replicas are
                counted, none of them left out; and nobody gets the lock while one is away.
            key: the exact key on the server, to exclude other lock clients that use it.
            label: shown to whoever asks who holds the lock.
            **unknown: refused; for an argument of other lock clients the error says what to write.

        Raises:
            ConfigurationError: a setting cannot work, and the message says what to write.
        """
        if unknown:
            refuse("lock", unknown, wait="await ")
        given = (
            name,
            ttl,
            timeout,
            renew,
            max_hold,
            reentrant,
            owner,
            fair,
            lock_delay,
            replicas,
            key,
            label,
        )
        try:
            spec = self._specs.describe(*given)
        except TypeError:  # a setting cannot be hashed
            spec = self._specs.describe_uncached(*given)
        return AsyncLock(self, spec)

    @functools.cached_property
    def _caching(self) -> AsyncCaching:
        from holdfast.faces.async_cached import AsyncCaching  # noqa: PLC0415 - who only locks pays nothing

        return AsyncCaching(self._session, self._command_timeout)

    @functools.cached_property
    def atomic(self) -> AsyncAtomic:
        """Operations that are one step on the server, so that no lock is needed.

        Raises:
            ConfigurationError: this client has several servers, which cannot do anything in one
                step.
        """
        from holdfast.faces.async_atomic import AsyncAtomic  # noqa: PLC0415 - who only locks pays nothing

        return AsyncAtomic(checked_port(self._deployment.port), self._command_timeout)

    def cached(  # noqa: PLR0913 - the settings of a cached function, all but one optional
        self,
        ttl: Duration,
        *,
        key: str | Callable[..., str] | None = None,
        stale: Duration | None = None,
        early: float | None = None,
        codec: Codec | None = None,
        lock_ttl: Duration = 10.0,
        timeout: Duration | None = None,
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], AsyncCached[P, R]]:
        """Keep what a function returns, for all who call it with the same arguments, anywhere.

        When there is no value, or it has expired, one caller computes it, under a lock; the others
        wait for it, and are told when it is there. All get it as it was written and read again.
        What the function raises is passed on to those who waited in its process, and is not kept;
        those of other processes then try it themselves, one after the other. While the server
        cannot be reached, values are computed, in each process one at a time, and kept by nobody.

        With `stale` and `early` the function also runs in the background, in a task of its own:
        its arguments must be fit for that.

        Args:
            ttl: seconds for which a value is served.
            key: names the value: a format string over the arguments, such as "user:{user_id}", or
                a function of them that returns a text. By default the function's name and all its
                arguments, where these tell it all. Functions with the same key share their values.
            stale: seconds after the ttl for which an old value is served while a new one is
                computed in the background.
            early: how eagerly values are computed anew in the background before they expire, so
                that those which are asked for often never do: 1.0 is usual, more is sooner.
            codec: how a value is written and read: `JSON` by default, `PICKLE`, `RAW`, or your own.
            lock_ttl: seconds within which others have a value when the one who computes has died,
                if computing takes less than half of it: after the other half they take over.
            timeout: seconds to wait for somebody else's computation; None for ever.

        Raises:
            ConfigurationError: a setting cannot work, and the message says what to write.
        """
        spec = describe_cache(
            ttl=ttl,
            stale=stale,
            early=early,
            lock_ttl=lock_ttl,
            timeout=timeout,
            command_timeout=self._command_timeout,
            quorum=self._session.deployment.is_quorum,
            namespace=self._namespace,
        )
        return self._caching.decorator(spec, key, codec)

    async def adopt(self, text: str) -> AsyncLease:
        """Carry on a lease that another process exported, with its settings and its fence.

        Cancelled, it leaves nothing held. Keep such a text to yourself: who has it can take the
        lease.

        Raises:
            LeaseLost: it ran out, or was adopted by somebody else.
            NodeUnavailable: the server does not answer.
            ConfigurationError: `text` is not what `lease.export()` returned.
        """
        return await adopt(self._session, text, AsyncLease(self), self._command_timeout)

    async def aclose(self) -> None:
        """Close all connections and stop renewing.

        A lease that is still held is not released: it expires, and is reported lost. One event,
        `closed_while_held`, names all such leases. What could not be cleaned up on a server yet
        expires too. Cached values that are being computed in the
        background are given up.
        """
        if "_caching" in self.__dict__:
            await self._caching.close()
        for end in self._deployment.ends:
            end()
        if self._deployment.end_tasks is not None:
            await self._deployment.end_tasks()

    close = aclose

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._deployment.name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a client cannot be pickled or copied: its connections and leases belong to this "
            "process. Pass on the URL, and make a client in each process"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncLock(LockFacts):
    """A lock: its name and its settings. Immutable, and may be shared by tasks.

    Use it as a context manager, as a decorator, or through `acquire`.
    """

    __slots__ = ("_client", "_entered", "_session")

    _wait = "await "

    def __init__(self, client: AsyncClient, spec: LockSpec) -> None:
        self._client = client
        self._session = client._session  # noqa: SLF001 - one face, one file
        self._spec = spec
        self._entered: list[AsyncLease] = []

    async def acquire(
        self,
        *positional: Never,
        timeout: Duration | Unset | None = UNSET,
        **unknown: Never,
    ) -> AsyncLease:
        """Take the lock and return the lease.

        Cancelled at any moment, it leaves nothing held.

        Args:
            timeout: seconds to wait instead of the lock's own `timeout`. It limits the wait
                while others hold the lock: a single server that is absent is reported at once, one
                that hangs after three to five command timeouts, or 0.1 s after `timeout` if that
                is sooner. With 0 the server has one command timeout to answer.
            *positional: refused; the error says what to write.
            **unknown: refused; for an argument of other lock clients the error says what to write.

        Raises:
            AcquireTimeout: others held it all the while; the error says who.
            WouldDeadlock: the caller holds it, and it is not reentrant.
            NodeUnavailable: the server does not answer, or refuses to work.
            ConfigurationError: the server will never grant it.
        """
        if positional or unknown:
            refuse("acquire", unknown, positional, self._wait)
        if timeout is UNSET:
            timeout = self._spec.timeout
        else:
            timeout = in_seconds(timeout)
            check_timeout(timeout, lock=self._spec.name)
        return await acquire(self._session, self._spec, timeout, AsyncLease(self._client))

    async def try_acquire(self) -> AsyncLease | None:
        """Take the lock if it is free, without waiting; None if somebody holds it.

        Raises:
            NodeUnavailable: the server does not answer, or refuses to work.
            ConfigurationError: the server will never grant it.
        """
        try:
            return await self.acquire(timeout=0)
        except AcquireTimeout:
            return None

    async def locked(self) -> bool:
        """Say whether anybody holds the lock.

        Raises:
            NodeUnavailable: the server does not answer.
        """
        return await self.holder() is not None

    async def holder(self) -> Holder | None:
        """Say who holds the lock; None when nobody does.

        Raises:
            NodeUnavailable: the server does not answer.
        """
        return await holder(self._session, self._spec)

    async def evict(self, holder: Holder) -> bool:
        """Take the lock from `holder`, and hand it to whoever is next in line: for operators.

        `holder` is whom `holder()` told of; who got the lock since is left alone. They are not
        stopped: they learn of it when they renew or release, as `LeaseLost`, and until then two
        may believe that they hold it. Let the resource look at fences. All holds of an owner end.
        If its holder gave the lock a `lock_delay`, that begins, and nobody gets it meanwhile;
        where it has begun already, it ends.

        Cancelled, it may have been done or not; it may be tried again.

        Returns:
            True if it was theirs, False if it was not any more.

        Raises:
            OutcomeUnknown: the server did not answer.
            NodeUnavailable: the server cannot be reached, or refuses to work.
            ConfigurationError: the server will never do this.
        """
        return await evict(self._session, self._spec, holder)

    async def __aenter__(self) -> AsyncLease:
        lease = AsyncLease(self._client)
        await acquire(self._session, self._spec, self._spec.timeout, lease)
        task = lease._held.actor  # noqa: SLF001 - one face, one file
        lease._enter(task)  # noqa: SLF001 - one face, one file
        lease._entered_by = task  # noqa: SLF001 - one face, one file
        self._entered.append(lease)
        return lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lease = last_of(self._entered, asyncio.current_task, self._spec.name)
        leave(self._entered, lease, asyncio.current_task)
        await lease.__aexit__(kind, error, traceback)

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> Callable[P, Coroutine[Any, Any, R]]:
        """Hold the lock whenever `function` runs: `@lock` above it.

        Raises:
            ConfigurationError: calling and awaiting it does not run it (it is no coroutine
                function).
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(generator_advice(function), lock=self.name)
        if not inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"{getattr(function, '__name__', function)} is not a coroutine function: decorate "
                "it with a lock of holdfast.Client",
                lock=self.name,
            )

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            async with self:
                return await function(*args, **kwargs)

        return locked


class AsyncLease(LeaseFacts):
    """One holding of a lock: what `acquire` returns, and the truth about it."""

    __slots__ = ("_body", "_cancelled", "_cancelling")

    _lost: asyncio.Event | None
    _body: asyncio.Task[Any] | None
    """The task that is in its `async with` block."""

    @property
    def lost(self) -> asyncio.Event:
        """Set at the deadline, or when the loss is learnt: wait for it, or look at it."""
        if self._lost is None:
            event = asyncio.Event()
            loop = asyncio.get_running_loop()
            self._held.watch(lambda _: tell(loop, event.set))
            self._lost = event
        return self._lost

    def on_lost(self, callback: Callable[[Self, LossReason], object]) -> None:
        """Have `callback(lease, reason)` called, on this event loop, when the lease is lost.

        `lost` is set by then. What the callback raises is logged, except SystemExit and
        KeyboardInterrupt, which end the loop as they do from any of its callbacks.
        """
        loop = asyncio.get_running_loop()
        lost = self._when_lost(callback)
        self._held.watch_last(
            lambda hold: tell_soon(loop, functools.partial(guarded_on_a_loop, lost(hold)))
        )

    async def extend(self, ttl: Duration) -> None:
        """Have `ttl` seconds left, counted from now, more or fewer than before.

        Cancelled, it leaves the lease as it was.

        Raises:
            LeaseLost: it was no longer ours.
            NotHeld: it was released, or was taken by the process this one was forked from.
            OutcomeUnknown: the server did not answer; the old deadline stands.
            NodeUnavailable: the server cannot be reached; the old deadline stands.
        """
        await extend(self._session, self, ttl)

    async def export(self) -> str:
        """Let go without releasing, and return a text by which `client.adopt` carries the lease on.

        Whoever adopts it has a whole ttl to do so, counted from now. Cancelled, it leaves the
        lease as it was.

        Raises:
            LeaseLost: it was no longer ours.
            NotHeld: it was released, or was taken by the process this one was forked from.
            ConfigurationError: it is held at several levels, or by an owner.
            OutcomeUnknown: the server did not answer; the lease is still ours.
            NodeUnavailable: the server cannot be reached; likewise.
        """
        return await export(self._session, self)

    async def release(self) -> None:
        """Give the lock back. Once it has succeeded, calling it again does nothing.

        Cancelled, it still gives the lock back before the cancellation is passed on.

        Raises:
            LeaseLost: it was no longer ours.
            NotHeld: it was taken by the process this one was forked from.
            OutcomeUnknown: the server did not answer; it is tried again in the background, and
                may be tried again here.
            NodeUnavailable: the server cannot be reached; likewise.
        """
        await release(self._session, self)

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
            await release(self._session, self)
        else:
            await self._leave_after(error, task)

    def _enter(self, task: Any) -> None:  # noqa: ANN401 - the core knows no tasks
        """Have the task cancelled if the lease is lost while it is in the body."""
        if task is None:
            raise RuntimeError("'async with' a lease belongs in a task")
        self._cancelling = task.cancelling()
        self._cancelled = False
        self._body = task
        # Set first, looked at second: a loss does these two in the other order.
        if self._held.state is LOST:
            self._cancel_body()

    def _cancel_body(self) -> None:
        """Cancel the body of the `async with`, if the lease is in one. Called from any thread."""
        task = getattr(self, "_body", None)
        if task is not None:
            tell(task.get_loop(), self._cancel)

    def _cancel(self) -> None:
        if self._body is not None and not self._cancelled:
            self._cancelled = True
            self._body.cancel()

    async def _leave_after(
        self, error: BaseException | None, task: asyncio.Task[Any] | None
    ) -> None:
        """Release it after a body that raised `error`, or was cancelled because of the loss."""
        ours = task is not None and self._cancelled and await self._is_ours(error, task)
        try:
            await release(self._session, self)
        except HoldfastError as failure:
            if ours:
                raise failure from error
            if error is None:
                raise

    async def _is_ours(self, error: BaseException | None, task: asyncio.Task[Any]) -> bool:
        """Whether `error` is only our own cancellation."""
        if not isinstance(error, asyncio.CancelledError):
            # Our cancellation has not been delivered: it must not strike after the body.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        others = task.uncancel()
        if others > self._cancelling and error is None:
            raise asyncio.CancelledError
        return isinstance(error, asyncio.CancelledError) and others <= self._cancelling
