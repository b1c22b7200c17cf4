"""The API for asyncio. `api.client` has the same API for threads: a test compares the two."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Concatenate, Literal, Never, NoReturn, ParamSpec, TypeVar

from holdfast.adapters.asyncio_port import call_on_loop, call_soon_on_loop
from holdfast.api.advice import (
    MissingMethod,
    check_ttl_is_no_function,
    refuse,
)
from holdfast.api.async_acquirable import AsyncAcquirable
from holdfast.api.async_body import LeaseBody
from holdfast.api.deployments import deploy_on_asyncio
from holdfast.api.events import (
    IN_A_THREAD,
    EventDispatcher,
    call_logged_on_loop,
    check_is_no_coroutine_function,
)
from holdfast.api.lease_view import (
    LeaseView,
    LockSettings,
    checked_command_timeout,
    checked_seconds,
    checked_wait,
    require_one_server,
)
from holdfast.core.evict import evict
from holdfast.core.export import adopt, export
from holdfast.core.extend import extend
from holdfast.core.inspect import holder
from holdfast.core.lease_state import LOST
from holdfast.core.release import release
from holdfast.core.spec import checked_longest_ttl
from holdfast.core.spec_cache import SpecCache
from holdfast.core.value import describe_cache
from holdfast.keys import checked_namespace
from holdfast.wire.process import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from types import TracebackType
    from typing import Self

    from holdfast.api.async_atomic import AsyncAtomic
    from holdfast.api.async_barrier import AsyncBarrier
    from holdfast.api.async_cached import AsyncCached, AsyncCaching
    from holdfast.api.async_election import AsyncElection
    from holdfast.api.async_latch import AsyncLatch
    from holdfast.api.async_multi_lock import AsyncMultiLock
    from holdfast.api.async_once import AsyncOnce
    from holdfast.api.async_periodic import AsyncPeriodic
    from holdfast.api.async_rate import AsyncRate
    from holdfast.api.async_shared import AsyncRWLock, AsyncSemaphore
    from holdfast.api.codecs import Codec
    from holdfast.api.periodic_run import PeriodicRun
    from holdfast.api.targets import Target
    from holdfast.core.duration import Duration
    from holdfast.core.events import Event
    from holdfast.core.permits import SharedSpecs
    from holdfast.core.rate import Rates
    from holdfast.errors import LossReason
    from holdfast.holder import Holder

_IN_A_TASK = "give a plain function that calls asyncio.create_task, and keeps the task"

P = ParamSpec("P")
R = TypeVar("R")


class AsyncClient:
    """Create locks on Redis or Valkey, and renew their leases: the client for asyncio.

    Example:
        client = holdfast.AsyncClient("redis://localhost")
        async with client.lock("invoice:42", timeout=10) as lease:
            await save(invoice, fence=lease.fence)

    `target` is one of these:

    - a URL: `redis://`, `rediss://`, `unix://`, `redis+sentinel://host:port,host:port/service` or
      `redis+cluster://host:port,host:port`;
    - a redis-py or valkey-py client: its connection settings are copied;
    - a list of three or more independent servers: a lock is held when a majority has granted it;
    - `"local"`: the embedded server, which holdfast starts on demand. Its locks exclude only
      processes of this user on this machine.

    Without a target, the client uses `HOLDFAST_URL`. If that is not set, it uses the embedded
    server and logs a warning.

    Creating a client opens no connection. All tasks may share one client. After a fork, the child
    process opens new connections and holds no lease.

    Every duration is in seconds, or a `datetime.timedelta`.

    Args:
        target: the server or servers.
        command_timeout: seconds to wait for one reply. For a lock with a short ttl it is less: at
            most a quarter of the ttl, or a tenth of it on several servers.
        min_validity: seconds that must remain until the deadline when a lease is granted.
        wait: with "push" the server notifies waiting clients, first come, first served. With "poll"
            they poll, in no order; use it where pub/sub does not work.
        namespace: the application that the locks belong to. Clients with different namespaces never
            exclude each other, and share no cached values. The same is true of clients with and
            without a namespace. Locks with `key=` and atomic operations use their key without the
            namespace. An id given as `once=` belongs to that key, and is the same in all
            namespaces.
        longest_ttl: the longest ttl of any lock on these servers. Behind Sentinels, no lock is
            granted for `longest_ttl` + 11 s after a change of primary. On several servers, a server
            that may have lost its data does not vote for `longest_ttl`.
        on_event: called with each `Event`, in a separate thread. It must not be a coroutine
            function. If it blocks, at most 10,000 events are queued; newer ones are dropped.
        *positional: rejected; the error shows what to write.
        **unknown: rejected.

    Raises:
        ConfigurationError: `target` is not a server, or a setting is invalid.
        TypeError: an argument is positional or unknown.
    """

    def __init__(  # noqa: PLR0913 - the settings of a client, all optional
        self,
        target: Target | None = None,
        *positional: Never,
        command_timeout: Duration = 1.0,
        min_validity: Duration = 0.0,
        wait: Literal["push", "poll"] = "push",
        namespace: str | None = None,
        longest_ttl: Duration = 60.0,
        on_event: Callable[[Event], object] | None = None,
        **unknown: Never,
    ) -> None:
        if positional or unknown:
            refuse("AsyncClient", unknown, positional)
        self._command_timeout = checked_command_timeout(command_timeout)
        self._min_validity = checked_seconds("min_validity", min_validity)
        self._namespace = checked_namespace(namespace)
        check_is_no_coroutine_function("on_event", on_event, IN_A_THREAD)
        self._events = EventDispatcher(on_event)
        self._deployment = deploy_on_asyncio(
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
        *positional: Never,
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
        """Describe a lock. This sends nothing to the server.

        Example:
            lock = client.lock("invoice:42", ttl=30, timeout=10)
            async with lock as lease:
                ...

        Args:
            name: what is locked. Locks with the same name exclude each other.
            ttl: seconds for which the server keeps the lock without a renewal.
            timeout: seconds to wait in `acquire`: None waits forever, 0 does not wait. On several
                servers and behind Sentinels, `acquire` also waits while too few servers reply or
                may grant locks.
            renew: renew the lease in the background until it is released. This does not work in
                `atexit` handlers.
            max_hold: seconds after which the lease is no longer renewed; an event and a warning
                report it.
            reentrant: allow the task that holds the lock to acquire it again.
            owner: allow every client that gives this name to acquire the lock again, in any
                process. The lock is free when all of them have released it, or their leases have
                expired.
            fair: grant the lock first come, first served. With False, any client that requests a
                free lock gets it, even if others wait.
            lock_delay: seconds for which the lock is not granted after a lease was lost (not after
                a release). All clients should give the same value.
            replicas: number of replicas that must have the lease before it is granted or renewed. A
                lease survives a failover only if this counts all replicas. But then no lock is
                granted while a replica is down.
            key: the exact key on the server, to exclude other lock libraries that use this key.
            label: text that `holder()` and the command line show for this holder.
            *positional: rejected; the error shows what to write.
            **unknown: rejected. For an argument of other lock libraries the error names the
                replacement.

        Raises:
            ConfigurationError: a setting is invalid; the message shows what to write instead.
            TypeError: an argument is positional or unknown.
        """
        if positional or unknown:
            refuse("lock", unknown, positional, wait="await ")
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
        except TypeError:  # a setting is not hashable
            spec = self._specs.describe_uncached(*given)
        return AsyncLock(self, spec)

    def lock_all(  # noqa: PLR0913 - the settings of the locks, all optional
        self,
        locks: Iterable[str | AsyncLock],
        *positional: Never,
        ttl: Duration = 30.0,
        timeout: Duration | None = None,
        renew: bool = True,
        max_hold: Duration | None = None,
        fair: bool = True,
        lock_delay: Duration = 0.0,
        replicas: int = 0,
        label: str | None = None,
        **unknown: Never,
    ) -> AsyncMultiLock:
        """Describe several locks that are acquired together: all of them, or none.

        Callers that acquire the same locks never deadlock, whatever the order of the names. This
        sends nothing to the server.

        Example:
            async with client.lock_all(["account:1", "account:2"], timeout=10) as lease:
                await transfer(fences=lease.fences)

        Args:
            locks: their names. A lock with other settings is given as `client.lock(...)`; of that
                lock all settings count but its timeout.
            ttl: seconds for which the server keeps each lock without a renewal.
            timeout: seconds to wait in `acquire` for all locks together: None waits forever, 0
                does not wait.
            renew: renew the leases in the background until they are released.
            max_hold: seconds after which the leases are no longer renewed, counted from the moment
                when all are held.
            fair: grant each lock first come, first served.
            lock_delay: seconds for which a lock is not granted after its lease was lost.
            replicas: number of replicas that must have a lease before it is granted.
            label: text that `holder()` and the command line show for this holder.
            *positional: rejected; the error shows what to write.
            **unknown: rejected. For an argument of other lock libraries the error names the
                replacement.

        Raises:
            ConfigurationError: `locks` is empty, or has a lock twice, or a lock of another client;
                or a setting is invalid.
            TypeError: an argument is positional or unknown.
        """
        from holdfast.api.async_multi_lock import AsyncMultiLock  # noqa: PLC0415 - imported on first use

        if positional or unknown:
            refuse("lock_all", unknown, positional, wait="await ")
        settings = ttl, None, renew, max_hold, False, None, fair, lock_delay, replicas, None, label
        return AsyncMultiLock(self, locks, settings, timeout)

    def semaphore(  # noqa: PLR0913 - the settings of a semaphore, all but one optional
        self,
        name: str,
        *positional: Never,
        limit: int,
        weight: int = 1,
        ttl: Duration = 30.0,
        timeout: Duration | None = None,
        renew: bool = True,
        max_hold: Duration | None = None,
        replicas: int = 0,
        label: str | None = None,
        **unknown: Never,
    ) -> AsyncSemaphore:
        """Describe a semaphore: a lock with several holders. This sends nothing to the server.

        Example:
            async with client.semaphore("gpu", limit=4, weight=2) as lease:
                train(model)

        Each lease takes `weight` permits, and at most `limit` permits are in use. Permits are
        granted first come, first served: a lease with a large weight is not overtaken. The permits
        of a client that dies are free again after the ttl.

        Args:
            name: what is limited. Locks and rwlocks with this name are independent of it.
            limit: the number of permits. Clients may give different limits, for example while a new
                limit is being deployed: each is granted its permits only while at most its own
                limit is in use, its own permits included.
            weight: the permits that one lease takes.
            ttl: seconds for which the server keeps a lease without a renewal.
            timeout: seconds to wait in `acquire`: None waits forever, 0 does not wait.
            renew: renew the lease in the background until it is released.
            max_hold: seconds after which the lease is no longer renewed; an event and a warning
                report it.
            replicas: number of replicas that must have the lease before it is granted or renewed.
            label: text that `holders()` and the command line show for this holder.
            *positional: rejected; the error shows what to write.
            **unknown: rejected.

        Raises:
            ConfigurationError: a setting is invalid; the message shows what to write instead. Or
                this client uses several independent servers, which cannot count together.
            TypeError: an argument is positional or unknown.
        """
        if positional or unknown:
            refuse("semaphore", unknown, positional)
        from holdfast.api.async_shared import AsyncSemaphore  # noqa: PLC0415 - imported on first use

        settings = ttl, timeout, renew, max_hold, replicas, label
        return AsyncSemaphore(self, self._shared_specs.semaphore(name, limit, weight, *settings))

    def rwlock(  # noqa: PLR0913 - the settings of an rwlock, all optional
        self,
        name: str,
        *positional: Never,
        ttl: Duration = 30.0,
        timeout: Duration | None = None,
        renew: bool = True,
        max_hold: Duration | None = None,
        replicas: int = 0,
        label: str | None = None,
        **unknown: Never,
    ) -> AsyncRWLock:
        """Describe a lock for many readers or one writer. This sends nothing to the server.

        Example:
            catalog = client.rwlock("catalog")
            async with catalog.read() as lease:
                ...
            async with catalog.write() as lease:
                ...
                await lease.downgrade()  # others may read from now on

        It is granted first come, first served, so neither readers nor writers starve. Readers that
        are next to each other in the queue are granted it together. Each reader expires by itself.

        Args:
            name: what is locked. Locks and semaphores with this name are independent of it.
            ttl: seconds for which the server keeps a lease without a renewal.
            timeout: seconds to wait in `acquire`: None waits forever, 0 does not wait.
            renew: renew the lease in the background until it is released.
            max_hold: seconds after which the lease is no longer renewed; an event and a warning
                report it.
            replicas: number of replicas that must have the lease before it is granted or renewed.
            label: text that `holders()` and the command line show for this holder.
            *positional: rejected; the error shows what to write.
            **unknown: rejected.

        Raises:
            ConfigurationError: a setting is invalid; the message shows what to write instead. Or
                this client uses several independent servers, which cannot count together.
            TypeError: an argument is positional or unknown.
        """
        if positional or unknown:
            refuse("rwlock", unknown, positional)
        from holdfast.api.async_shared import AsyncRWLock  # noqa: PLC0415 - imported on first use

        settings = ttl, timeout, renew, max_hold, replicas, label
        return AsyncRWLock(self, *self._shared_specs.rwlock(name, *settings))

    @functools.cached_property
    def _shared_specs(self) -> SharedSpecs:
        from holdfast.core.permits import SharedSpecs  # noqa: PLC0415 - imported on first use

        return SharedSpecs(self._specs.of_client)

    @functools.cached_property
    def _caching(self) -> AsyncCaching:
        from holdfast.api.async_cached import AsyncCaching  # noqa: PLC0415 - imported on first use

        return AsyncCaching(self._session, self._command_timeout)

    @functools.cached_property
    def atomic(self) -> AsyncAtomic:
        """Operations that the server runs in one step, so that no lock is needed.

        Example:
            sold = await client.atomic.take("stock:42", once=order.id)
            if not sold:
                raise SoldOut

        Raises:
            ConfigurationError: this client uses several independent servers, which have no atomic
                step.
        """
        from holdfast.api.async_atomic import AsyncAtomic  # noqa: PLC0415 - imported on first use

        return AsyncAtomic(require_one_server(self._deployment.port), self._command_timeout)

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
        """Cache the results of a function for all processes: a decorator.

        Example:
            @client.cached(ttl=60, key="user:{user_id}")
            async def load_user(user_id):
                return await database.fetch(user_id)

        If there is no value, or it has expired, one caller computes it under a lock. The other
        callers wait, and are notified when the value is stored. All callers receive the value as
        the codec encodes and decodes it.

        If the function raises, the callers that wait in the same process receive the exception, and
        nothing is stored. Callers in other processes then run the function themselves, one after
        the other. While the server is unreachable, each process computes the value itself, one
        caller at a time, and nothing is stored.

        With `stale` or `early` the function also runs in the background, in a separate task, with
        the arguments of the call.

        Args:
            ttl: seconds for which a value is served.
            key: name of the value: a format string with the arguments, such as "user:{user_id}", or
                a function that takes the arguments and returns text. By default, the function's
                name and all its arguments, if their `repr` is the same in every process. Functions
                with the same key share their values.
            stale: seconds after the ttl for which the old value is still served, while a new one is
                computed in the background.
            early: how early frequently used values are recomputed in the background, so that they
                never expire: 1.0 is usual, a higher number is earlier.
            codec: how values are encoded: `JSON` (the default), `PICKLE`, `RAW`, or an object with
                `dumps` and `loads`.
            lock_ttl: ttl of the lock under which a value is computed. If the computing process
                dies, another one computes the value within this time, provided that computing takes
                less than half of it.
            timeout: seconds to wait while another client computes the value; None waits forever.

        Raises:
            ConfigurationError: a setting is invalid; the message shows what to write instead.
        """
        check_ttl_is_no_function(ttl)
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

    @functools.cached_property
    def _rates(self) -> tuple[type[AsyncRate], Rates]:
        from holdfast.api.async_rate import AsyncRate  # noqa: PLC0415 - imported on first use
        from holdfast.core.rate import Rates  # noqa: PLC0415 - likewise

        port = require_one_server(
            self._deployment.port,
            "a rate is counted on one server, because no two servers see the same requests",
            instead="",
        )
        rates = Rates(self._session, port, self._command_timeout, self._namespace)
        return AsyncRate, rates

    def rate(
        self,
        name: str,
        *positional: Never,
        limit: int,
        per: Duration = 1.0,
        burst: int | None = None,
        on_unavailable: Literal["raise", "allow"] = "raise",
    ) -> AsyncRate:
        """Limit how often something happens, by all clients together. This sends nothing.

        Example:
            rate = client.rate("api:ann", limit=10, per=1.0, burst=20)
            if not await rate.try_acquire():
                raise TooManyRequests

        A total cost of `limit` is allowed in `per` seconds, evenly, by the clock of the server. An
        unused rate saves up to `burst`, which is then allowed at once. So any t seconds have at
        most burst + limit * t / per.

        The server keeps one time per name, and no settings: each request is judged by its own. So a
        new limit takes effect with the next request. Clients with different limits share the time:
        if one uses 5 of its 10 per second, the others have half of their limits left.

        Args:
            name: what is limited. All clients that give this name share the rate.
            limit: the total cost that is allowed in `per` seconds.
            per: seconds. A month is 2,592,000.
            burst: the highest total cost that is allowed at once; None for the limit.
            on_unavailable: "raise", or "allow" to allow requests while the server is unreachable,
                or if a request gets no reply. Such a verdict has the reason in `unavailable`.
            *positional: rejected; the error shows what to write.

        Raises:
            ConfigurationError: a setting is invalid, or this client uses several independent
                servers, which do not count together.
            TypeError: an argument is positional.
        """
        if positional:
            refuse("rate", {}, positional)
        rate, rates = self._rates
        return rate(rates.describe(name, limit, per, burst, on_unavailable))

    def election(
        self,
        name: str,
        *positional: Never,
        ttl: Duration = 30.0,
        replicas: int = 0,
        label: str | None = None,
    ) -> AsyncElection:
        """Elect one leader among all clients that name this election. This sends nothing.

        Example:
            election = client.election("scheduler", label="http://10.0.0.7:8080")
            async with election.lead() as term:
                await schedule(fence=term.number)

            await election.run(schedule)  # leads again after each loss
            await election.leader()  # in any process

        A term is a lease: renewed in the background, and lost at its deadline by the clock of this
        process, before another client can become the leader. Its number is a fence. Candidates wait
        in a queue on the server. `watch` notifies others of each new leader. It works on every
        deployment, including several independent servers.

        Args:
            name: what is led. Locks with this name are independent of it.
            ttl: seconds after which the next candidate leads, if the process of the leader died.
            replicas: number of replicas that must have the term before it begins or is renewed.
            label: text that `leader()` shows to others, for example the address at which they reach
                this process.
            *positional: rejected; the error shows what to write.

        Raises:
            ConfigurationError: a setting is invalid; the message shows what to write instead.
            TypeError: an argument is positional.
        """
        if positional:
            refuse("election", {}, positional)
        from holdfast.api.async_election import AsyncElection  # noqa: PLC0415 - imported on first use
        from holdfast.core.election import describe_election  # noqa: PLC0415 - as above

        spec = self.lock(name, ttl=ttl, replicas=replicas, label=label)._spec  # noqa: SLF001 - same module
        quorum = self._session.deployment.is_quorum
        return AsyncElection(self, describe_election(spec, self._namespace, quorum=quorum))

    def once(  # noqa: PLR0913 - settings, all optional
        self,
        name: str,
        *positional: Never,
        keep: Duration = 86_400.0,
        ttl: Duration = 30.0,
        timeout: Duration | None = None,
        max_hold: Duration | None = None,
        label: str | None = None,
        codec: Codec | None = None,
    ) -> AsyncOnce:
        """Do the work with this id once, for all processes; later callers receive its result.

        Example:
            async with client.once(f"order {order.id}", keep=86400) as run:
                if run.first:
                    run.result = await charge(order)
            return run.result

        The first caller holds a lease while it does the work. Other callers wait, and are notified
        when the result is stored. If the work raises, or its process dies, the next caller does it.
        Without the server the work is not done. This call itself sends nothing.

        Args:
            name: the id of the work, the same for each attempt at it.
            keep: seconds for which the result is kept. After that, the work is done again.
            ttl: seconds after which the work of a process that died is done by the next caller.
                While the process lives, the lease is renewed.
            timeout: seconds to wait while another caller does the work: None waits forever. With
                0, `AcquireTimeout` is raised at once, and names the holder.
            max_hold: seconds after which the lease is no longer renewed, so that work that hangs
                is done by the next caller.
            label: text that the command line and `error.holder` show for this caller.
            codec: how the result is encoded: `JSON` (the default), `PICKLE`, `RAW`, or an object
                with `dumps` and `loads`.
            *positional: rejected; the error shows what to write.

        Raises:
            ConfigurationError: a setting is invalid, or this client uses several independent
                servers. The message shows what to write instead.
            TypeError: an argument is positional.
        """
        if positional:
            refuse("once", {}, positional)
        from holdfast.api.async_once import AsyncOnce  # noqa: PLC0415 - imported on first use
        from holdfast.api.codecs import JSON  # noqa: PLC0415 - as above
        from holdfast.core.once import describe_work  # noqa: PLC0415 - as above

        spec = self.lock(name, ttl=ttl, timeout=timeout, max_hold=max_hold, label=label)._spec  # noqa: SLF001 - same module
        quorum = self._session.deployment.is_quorum
        work = describe_work(spec, self._namespace, keep, quorum=quorum)
        return AsyncOnce(self, work, JSON if codec is None else codec)

    def latch(
        self, name: str, *positional: Never, count: int, keep: Duration = 86_400.0
    ) -> AsyncLatch:
        """Describe a latch, which opens when `count` ids are counted down. This sends nothing.

        Example:
            imports = client.latch("imports 2026-11-19", count=3)
            await imports.count_down(once=job.id)  # in each of three jobs
            await imports.wait(timeout=3600)  # in the process that continues after them

        Args:
            name: what is waited for. A latch opens once, so each use has its own name. Locks and
                other kinds with this name are independent of it.
            count: how many ids are counted until it opens. All clients give the same count.
            keep: seconds for which the latch is kept after its last use, open or not. After that,
                this name is a new latch. A wait counts as a use when it begins, and each half hour.
            *positional: rejected; the error shows what to write.

        Raises:
            ConfigurationError: a setting is invalid, or this client uses several independent
                servers. The message shows what to write instead.
            TypeError: an argument is positional.
        """
        if positional:
            refuse("latch", {}, positional)
        from holdfast.api.async_latch import AsyncLatch  # noqa: PLC0415 - imported on first use
        from holdfast.core.latch import describe_latch  # noqa: PLC0415 - as above

        deployment = self._session.deployment
        ttl = min(30.0, deployment.longest_ttl)  # of no lease; it limits the command timeout
        spec = self.lock(name, ttl=ttl)._spec  # noqa: SLF001 - same module
        latch = describe_latch(spec, count=count, keep=keep, quorum=deployment.is_quorum)
        return AsyncLatch(self._session, latch)

    def barrier(
        self,
        name: str,
        *positional: Never,
        parties: int,
        ttl: Duration = 30.0,
        label: str | None = None,
    ) -> AsyncBarrier:
        """Describe a barrier, at which `parties` callers wait for one another. This sends nothing.

        Example:
            barrier = client.barrier("phase-1", parties=8)
            await load(shard)
            await barrier.wait(timeout=60)  # until all eight have loaded
            await join(shard)

        As `threading.Barrier`, for processes on any machine. When all have passed, it can be used
        again. A party that gives up, or dies, breaks it for all of them: `BrokenBarrier`.

        Args:
            name: what the parties wait for. Locks and other kinds with this name are independent of
                it.
            parties: how many wait for one another. All clients give the same number.
            ttl: seconds after which a waiting party whose process died or hangs counts as lost.
                While it waits, it renews its lease after each third of this time.
            label: text that errors and the command line show for this party.
            *positional: rejected; the error shows what to write.

        Raises:
            ConfigurationError: a setting is invalid, or this client uses several independent
                servers. The message shows what to write instead.
            TypeError: an argument is positional.
        """
        if positional:
            refuse("barrier", {}, positional)
        from holdfast.api.async_barrier import AsyncBarrier  # noqa: PLC0415 - imported on first use
        from holdfast.core.barrier import describe_barrier  # noqa: PLC0415 - as above

        spec = self.lock(name, ttl=ttl, label=label)._spec  # noqa: SLF001 - same module
        quorum = self._session.deployment.is_quorum
        return AsyncBarrier(self._session, describe_barrier(spec, parties=parties, quorum=quorum))

    def periodic(  # noqa: PLR0913 - the settings of a job, all but one optional
        self,
        name: str,
        *positional: Never,
        every: Duration,
        at_least: Duration = 0.0,
        offset: Duration = 0.0,
        ttl: Duration = 30.0,
        max_hold: Duration | None = None,
        label: str | None = None,
    ) -> Callable[
        [Callable[Concatenate[PeriodicRun[AsyncLease], P], Coroutine[Any, Any, R]]],
        AsyncPeriodic[P, R],
    ]:
        """Run a function at most once per period, over all machines that call it: a decorator.

        Example:
            @client.periodic("nightly", every=86400, at_least=60)
            async def nightly(run):
                await back_up(fence=run.fence)

            outcome = await nightly()  # from cron, or in a loop, on each machine
            if isinstance(outcome, holdfast.Skipped):
                print(outcome)

        The function receives a `PeriodicRun` before its other arguments. Of a method, decorate the
        bound method: `client.periodic(...)(self.refresh)`. The server decides by its clock which
        call runs, and records the start at once. So a run that raises or whose process dies is not
        repeated in its period. No run begins while another one lasts.

        A call that runs the function returns what the function returns. Other calls return a
        `Skipped`, without waiting for the run. A call raises what the function raises; `LeaseLost`
        if the lease was lost, as `with lock`; and `NodeUnavailable` without the server. After
        `NodeUnavailable` the function did not run, and its period may count as started.

        Args:
            name: the name of the job, the same on all machines.
            every: seconds of a period, at least 0.1. The first one began at the epoch (1970-01-01
                00:00 UTC), so a period of 86400 is a day in UTC.
            at_least: seconds that must have passed since the last start, less than `every`. Without
                it, two machines whose clocks differ by a second may run before and after midnight.
            offset: seconds by which periods begin later, less than `every`: 7200 for 02:00 UTC.
            ttl: seconds after which the lock of a process that died is free. While the process
                lives, its lease is renewed.
            max_hold: seconds after which the lease is no longer renewed, so that a run that hangs
                does not prevent later runs.
            label: text that the command line and `Skipped.by` show for this process.
            *positional: rejected; the error shows what to write.

        Raises:
            ConfigurationError: a setting is invalid, or this client uses several independent
                servers. The message shows what to write instead.
            TypeError: an argument is positional.
        """
        if positional:
            refuse("periodic", {}, positional)
        from holdfast.api.async_periodic import decorator  # noqa: PLC0415 - imported on first use
        from holdfast.core.periodic import describe_job  # noqa: PLC0415 - as above

        job = describe_job(
            self.lock(name, ttl=ttl, max_hold=max_hold, label=label)._spec,  # noqa: SLF001 - same module
            self._namespace,
            every=every,
            at_least=at_least,
            offset=offset,
            quorum=self._session.deployment.is_quorum,
        )
        return decorator(self, job)

    async def adopt(self, text: str) -> AsyncLease:
        """Take over a lease that another process exported, with its settings and its fence.

        If the call is cancelled, the lease is not left held.

        Example:
            text = await lease.export()
            ...
            async with await other_client.adopt(text) as lease:  # in the other process
                ...

        Args:
            text: what `lease.export()` returned. Keep it secret: any client that has it can take
                the lease.

        Raises:
            LeaseLost: the lease expired, or another client has adopted it.
            NodeUnavailable: the server does not reply.
            ConfigurationError: `text` is not what `lease.export()` returned, or this client uses
                several servers.
            NotHeld: this process was forked during the call.
        """
        return await adopt(self._session, text, AsyncLease(self), self._command_timeout)

    async def aclose(self) -> None:
        """Close all connections and stop renewing.

        Leases are not released. A lease that is still held expires, and is reported as lost; one
        event, `closed_while_held`, names all of them. Keys that an interrupted operation left on a
        server expire too.

        Cached values that are being computed in the background are cancelled.
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
            "process. Pass the URL to the other process, and create a client there"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    if not TYPE_CHECKING:  # type checkers must not see it
        __enter__ = MissingMethod("write 'async with', or use holdfast.Client")


class AsyncLock(AsyncAcquirable["AsyncLease"], LockSettings):
    """A lock: its name and its settings. Immutable; tasks may share it.

    Use it as a context manager or as a decorator, or call `acquire`.

    Example:
        lock = client.lock("invoice:42")
        async with lock as lease:  # acquires, and releases at the end
            ...

        @lock  # acquires for each call
        async def close_books():
            ...

    Entering raises what `acquire` raises. Leaving raises what `release` raises, such as `LeaseLost`
    if the lease was lost. If the block raised another exception, that one is raised, with a note of
    what `release` raised. Leaving raises NotHeld, and releases nothing, if `__aenter__` and
    `__aexit__` are called by different functions, while several blocks of this lock are open.
    """

    __slots__ = ()

    def _new_lease(self) -> AsyncLease:
        return AsyncLease(self._client)

    async def locked(self) -> bool:
        """Return whether the lock is held, by any client.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        return await self.holder() is not None

    async def holder(self) -> Holder | None:
        """Return the current holder, or None if the lock is free.

        During a lock delay the lock has no holder.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        return await holder(self._session, self._spec)

    async def evict(self, holder: Holder) -> bool:
        """Take the lock from `holder` and hand it to the first waiter: for operators.

        The holder's process is not stopped. It gets `LeaseLost` when it next renews or releases.
        Until then two clients may both consider themselves the holder, so let the resource check
        fences.

        If the lock has an owner, all holds of that owner end. If the holder gave the lock a
        `lock_delay`, the delay begins, and no lock is granted until it is over. If the delay has
        begun already, it ends.

        If the call is cancelled, the holder may or may not have been evicted; the call can be
        repeated.

        Example:
            holder = await lock.holder()
            if holder is not None:
                await lock.evict(holder)

        Args:
            holder: what `holder()` returned. A client that acquired the lock later keeps it.

        Returns:
            True if `holder` still had the lock, False if not.

        Raises:
            OutcomeUnknown: the server did not reply; the holder may or may not have been evicted.
            NodeUnavailable: the server cannot be reached, or refuses the request.
            ConfigurationError: the server will never do this: its configuration is wrong.
        """
        return await evict(self._session, self._spec, holder)


class AsyncLease(LeaseBody, LeaseView):
    """One holding of a lock, from `acquire` to `release`.

    A lease ends when it is released, or when it is lost: at its deadline, or when a renewal finds
    that the lock is gone. `held` never reports a lease that has ended. Leaving `async with lease`
    releases it. A loss cancels the `async with` block, which then raises `LeaseLost`.

    Example:
        async with client.lock("report") as lease:
            for page in pages:
                lease.check()  # raises LeaseLost
                await write(page, fence=lease.fence)
    """

    __slots__ = ("_body", "_cancelled", "_cancelling")

    _lost: asyncio.Event | None

    @property
    def lost(self) -> asyncio.Event:
        """An `asyncio.Event` that is set when the lease is lost.

        That is at the deadline, or earlier if a renewal finds that the lock is gone.

        Raises:
            NotHeld: the lease was never acquired.
            RuntimeError: no event loop is running.
        """
        if self._lost is None:
            event = asyncio.Event()
            loop = asyncio.get_running_loop()
            self._state.on_loss(lambda _: call_on_loop(loop, event.set))
            self._lost = event
        return self._lost

    def on_lost(self, callback: Callable[[Self, LossReason], object]) -> None:
        """Call `callback(lease, reason)` on this event loop when the lease is lost.

        `lost` is already set by then. If the lease is already lost, the callback is called at once.
        An exception from the callback is logged. SystemExit and KeyboardInterrupt end the loop, as
        they do from any other callback of the loop.

        Args:
            callback: takes the lease and a `LossReason`. It must not be a coroutine function, but
                it may call `asyncio.create_task`.

        Raises:
            NotHeld: the lease was never acquired.
            ConfigurationError: `callback` is a coroutine function.
            RuntimeError: no event loop is running.
        """
        check_is_no_coroutine_function("on_lost", callback, _IN_A_TASK)
        loop = asyncio.get_running_loop()
        lost = self._when_lost(callback)
        self._state.on_loss(
            lambda state: call_soon_on_loop(
                loop, functools.partial(call_logged_on_loop, lost(state))
            ),
            last=True,
        )

    async def extend(self, ttl: Duration) -> None:
        """Set the remaining time to `ttl` seconds from now, longer or shorter than before.

        A shorter time applies in this process only: the server keeps the later expiry. If the call
        is cancelled, the deadline stays as it was.

        Example:
            await lease.extend(60)  # 60 s left, counted from now

        Args:
            ttl: seconds from now.

        Raises:
            LeaseLost: the lease had been lost.
            NotHeld: the lease was released, or belongs to the process that forked this one.
            OutcomeUnknown: the server did not reply; the old deadline stays.
            NodeUnavailable: the server cannot be reached; the old deadline stays.
            ConfigurationError: `ttl` is invalid.
        """
        await extend(self._session, self, ttl)

    async def export(self) -> str:
        """End this lease without releasing the lock, and return text with which it can be adopted.

        Another process continues the lease with `client.adopt(text)`. It has one ttl to do so,
        counted from now. If the call is cancelled, the lease stays as it was.

        Example:
            text = await lease.export()
            ...
            async with await other_client.adopt(text) as lease:  # in the other process
                ...

        Raises:
            LeaseLost: the lease had been lost.
            NotHeld: the lease was released, or belongs to the process that forked this one.
            ConfigurationError: the lock was acquired more than once (`reentrant`), has an owner, or
                is on several servers.
            OutcomeUnknown: the server did not reply; this process still holds the lease.
            NodeUnavailable: the server cannot be reached; this process still holds the lease.
        """
        return await export(self._session, self)

    async def release(self) -> None:
        """Release the lock. After a successful release, calling it again does nothing.

        If the call is cancelled, it still releases the lock before it passes on the cancellation.

        Raises:
            LeaseLost: the lease had been lost: another client may have held the lock.
            NotHeld: the lease belongs to the process that forked this one.
            OutcomeUnknown: the server did not reply. The client retries in the background, and you
                may call `release` again.
            NodeUnavailable: the server cannot be reached. The client retries in the background, and
                you may call `release` again.
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
            await self._exit_after(error, task)

    @property
    def _is_lost(self) -> bool:
        return self._state.state is LOST
