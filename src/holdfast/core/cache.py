"""Caching: one caller computes a value under a lock, and the server keeps it for all callers.

The rules:

1. **One caller computes.** A caller that finds no value acquires the lock of the value. It is an
   ordinary lock, acquired by a script that first checks whether the value has been stored in the
   meantime (`scripts/claim.lua`). Other callers wait in the queue. Storing the value notifies all
   of them at the same time.
2. **One caller per process sends requests.** The callers of one process share a flight
   (`core.flight`). The first caller is the leader: it reads the value from the server, and computes
   it if necessary. The others wait for the result.
3. **An invalidation is never missed.** A caller never gets a value that is older than an
   invalidation that had returned before the call. An invalidation increments the fence counter of
   the lock, and a value is stored only if the fence of its lease is still the last one. So an
   invalidation does not have to know which callers compute. Within a process, a logical clock
   (`Cache.ticks`) orders calls and results. A caller uses the result of a flight only if it arrived
   before the tick of the result (`Flight.as_of`). Otherwise it starts the next flight.
4. **Refreshes run in the background.** A value that is past its ttl but within `stale`, or that
   will expire soon, is returned at once, and computed again in the background.
5. **Without the server, values are computed and not stored**, by one caller per process at a time.

All times are those of the server. The remaining time of a value is what its key has left, which the
server returns together with the value.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from holdfast.core.acquire import acquire
from holdfast.core.events import Event
from holdfast.core.flight import Flight, NotStored
from holdfast.core.lease_state import LeaseRef
from holdfast.core.messages import NotNeeded
from holdfast.core.release import release, release_in_background
from holdfast.core.retry import TRIES, retry
from holdfast.core.spec import to_ms
from holdfast.core.value import is_due, read_stored
from holdfast.errors import (
    AcquireTimeout,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
    WouldDeadlock,
)
from holdfast.scripts import CLAIM, INVALIDATE, READ_CACHED, STORE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from holdfast.core.lease_state import LeaseState
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.core.value import CacheEntry, StoredValue
    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script

SERVER_DOWN_FOR = 2.0
"""Seconds for which no request is sent to a server that did not reply."""

CHECK_LEADER_EVERY = 1.0
"""Seconds between two checks whether the leader of a flight can still continue."""

RETRY_REFRESH_AFTER = 1.0
"""Seconds after a failed refresh before this process tries the next one."""


class Cache:
    """The flights of one client in one process, and whether its server is down."""

    def __init__(
        self, session: Session, run_in_background: Callable[[Coroutine[Any, Any, None]], bool]
    ) -> None:
        self.session = session
        self._run_in_background = run_in_background
        """Runs an operation in the background. Returns False if there are too many."""
        self.begin()

    def begin(self) -> None:
        """Start without flights: in a new client, and in each forked child of its process."""
        self.ticks = count(1)
        """A logical clock: it orders calls and results in this process."""
        self.flights: dict[str, Flight] = {}
        self._refreshing: dict[str, Flight] = {}
        self._down_until = -math.inf

    @property
    def is_server_down(self) -> bool:
        """Whether the server did not reply lately."""
        return self.session.port.now() < self._down_until and not self.session.closed

    def on_server_up(self) -> None:
        """Note that the server replied."""
        self._down_until = -math.inf

    def on_server_down(self, entry: CacheEntry, error: HoldfastError) -> None:
        """Note that the server did not reply; report it the first time."""
        first = self._down_until == -math.inf
        self._down_until = self.session.port.now() + SERVER_DOWN_FOR
        if first:
            detail = f"values are computed and not stored: {error}"
            self.session.report(Event("uncached", entry.name, detail=detail))

    def end(self, name: str, flight: Flight) -> None:
        """End a flight: by its leader, or by a caller that finds that the leader is gone.

        The flight is removed first, so that no caller joins it after its end.
        """
        if self.flights.get(name) is flight:
            del self.flights[name]
        flight.finish()

    def refresh_in_background(self, entry: CacheEntry, seen: int) -> None:
        """Compute a value again in the background, unless this process does so already."""
        port, begun = self.session.port, False
        flight = Flight(port.actor())
        other = self._refreshing.setdefault(entry.name, flight)
        if other is not flight and not port.is_gone(other.actor):
            return
        self._refreshing[entry.name] = flight
        operation = self._refresh(entry, seen, flight)
        try:
            begun = self._run_in_background(operation)
        finally:
            if not begun:
                operation.close()
                self._refreshing.pop(entry.name, None)

    async def _refresh(self, entry: CacheEntry, seen: int, flight: Flight) -> None:
        # Without a timeout: it may wait in the queue while another process computes the value.
        # During that time no other caller of this process starts a refresh.
        failure = cast("Exception | None", None)
        try:
            await compute(self, entry, flight, entry.lock(CLAIM, str(seen)), None)
        except NotNeeded:
            pass
        except NotStored as computed:
            failure = computed.error
        except Exception as error:  # noqa: BLE001 - any error of the user's function
            failure = error
        finally:
            if failure is None or self.session.closed:
                self._refreshing.pop(entry.name, None)
        if failure is not None and not self.session.closed:
            detail = f"it is retried as long as the old value may be used: {failure!r}"
            self.session.report(Event("refresh_failed", entry.name, detail=detail))
            allow_next = partial(self._refreshing.pop, entry.name, None)
            self.session.renewer.call_later(RETRY_REFRESH_AFTER, allow_next)


async def get(cache: Cache, entry: CacheEntry) -> Any:  # noqa: ANN401 - any value
    """Return the value, from the server or computed. Wait if another caller computes it.

    If this call is interrupted, it releases the lock, and a waiting caller takes over.

    Raises:
        AcquireTimeout: another caller computed the value until the timeout was over.
        WouldDeadlock: the computation of the value requests the same value.
        ConfigurationError: the server refuses the requests permanently, or the value cannot be
            encoded.
    """
    port, timeout = cache.session.port, entry.spec.lock.timeout
    give_up = math.inf if timeout is None else port.now() + timeout
    arrived, actor = next(cache.ticks), port.actor()
    while True:
        flight = Flight(actor)
        try:
            try:
                other = cache.flights.setdefault(entry.name, flight)
                if other is flight:
                    return await _get_as_leader(cache, entry, flight, give_up)
            finally:
                cache.end(entry.name, flight)
        finally:
            cache.end(entry.name, flight)  # again: an interrupt may have prevented the first call
        if other.actor is actor or port.blocks(other.actor):
            raise WouldDeadlock(
                f"the computation of {entry.name!r} requests the same value, and would wait for "
                "itself: use another key, or do not call the cached function there",
                lock=entry.name,
            )
        await _join(cache, entry, other, give_up)
        if arrived < other.as_of:  # otherwise an invalidation before this call may be newer
            if other.error is not None:
                raise other.error.with_traceback(other.traceback)
            if other.payload is not None:
                return entry.loads(other.payload)


async def _join(cache: Cache, entry: CacheEntry, flight: Flight, give_up: float) -> None:
    """Wait until the flight is over; end it if its leader is gone.

    The leader is gone if its event loop is closed, or if this process was forked: a child has none
    of the other threads of its parent.
    """
    port, signal = cache.session.port, cache.session.port.signal()
    process = port.process()
    try:
        flight.waiting[signal] = None
        while not flight.done:
            left = give_up - port.now()
            if left <= 0:
                message = f"{entry.name!r} was not computed within {entry.spec.lock.timeout} s"
                raise AcquireTimeout(message, lock=entry.name)
            if await port.wait(signal, min(left, CHECK_LEADER_EVERY)):
                continue
            if port.is_gone(flight.actor) or port.process() != process:
                cache.end(entry.name, flight)
    finally:
        flight.waiting.pop(signal, None)


async def _get_as_leader(cache: Cache, entry: CacheEntry, flight: Flight, give_up: float) -> Any:  # noqa: ANN401 - as `get`
    spec, port = entry.spec, cache.session.port
    stored = None
    flight.as_of = next(cache.ticks)
    try:
        if cache.is_server_down:
            return entry.loads((await _compute_value(cache, entry, flight))[0])
        reply = await _request(cache, READ_CACHED, entry.keys, (), spec.command_timeout)
        stored = read_stored(reply)
        if stored is not None and stored.left > -spec.stale:
            value = _load(entry, flight, stored)
            if value is not _UNREADABLE:
                if is_due(stored, spec, port.jitter()):
                    cache.refresh_in_background(entry, stored.fence)
                return value
        seen = 0 if stored is None else stored.fence
        timeout = None if give_up == math.inf else max(0.0, give_up - port.now())
        payload = await compute(cache, entry, flight, entry.lock(CLAIM, str(seen)), timeout)
        return entry.loads(payload)
    except NotNeeded as found:
        stored = read_stored(found.reply)
        value = _UNREADABLE if stored is None else _load(entry, flight, stored)
        if value is not _UNREADABLE:
            return value
    except NotStored as computed:
        cache.on_server_down(entry, computed.error)
        return entry.loads(computed.payload)
    except (NodeUnavailable, OutcomeUnknown) as error:
        if error is flight.error or cache.session.closed:  # the user's function raised it
            raise
        cache.on_server_down(entry, error)
    return entry.loads((await _compute_value(cache, entry, flight))[0])


_UNREADABLE = object()


def _load(entry: CacheEntry, flight: Flight, stored: StoredValue) -> Any:  # noqa: ANN401 - as `get`
    """Decode a stored value. Another version of the program may have encoded it differently."""
    try:
        value = entry.loads(stored.payload)
    except Exception:  # noqa: BLE001 - any error of a codec
        return _UNREADABLE
    flight.payload = stored.payload
    return value


async def compute(
    cache: Cache, entry: CacheEntry, flight: Flight, lock: LockSpec, timeout: float | None
) -> bytes:
    """Acquire the lock, compute the value, and store it unless it was invalidated.

    If this is interrupted, or the computation raises, the lock is released and nothing is stored.

    Raises:
        NotNeeded: the server has the value.
        AcquireTimeout, WouldDeadlock, NodeUnavailable, ConfigurationError: as `acquire`.
        NotStored: the server did not reply to the request to store the value.
        Exception: any error of the computation.
    """
    session, ref = cache.session, LeaseRef()
    try:
        return await _under_lock(cache, entry, flight, (lock, timeout, ref))
    except GeneratorExit:
        release_in_background(session, ref)
        raise
    except BaseException:
        await session.port.shielded(_release_quietly(session, ref))
        raise


async def _under_lock(
    cache: Cache,
    entry: CacheEntry,
    flight: Flight,
    acquisition: tuple[LockSpec, float | None, LeaseRef],
) -> bytes:
    session, ref = cache.session, acquisition[2]
    lease = cast("LeaseState", (await acquire(session, *acquisition))._lease)
    lease.is_abandoned = partial(session.port.is_gone, lease.actor)
    try:
        payload, cost = await _compute_value(cache, entry, flight)
    except Exception:
        await _release_quietly(session, ref)
        raise
    if lease.is_valid(session.port.now(), session.port.process()):
        try:
            # The tick is from before the request: a caller that arrives later may know of an
            # invalidation that came after the value was stored.
            tick = next(cache.ticks)
            if await _store(cache, entry, lease, payload, cost):
                flight.as_of = tick
        except (NodeUnavailable, OutcomeUnknown) as error:
            if lease.process == session.port.process():  # not in a forked child
                session.end_locally(lease)
                lease.unregister_waiter()
                session.cleanups.schedule_lease(lease)
            raise NotStored(payload, error) from error
    await _release_quietly(session, ref)
    return payload


async def refresh(cache: Cache, entry: CacheEntry) -> Any:  # noqa: ANN401 - as `get`
    """Compute the value now, even if the server has one; store it, and return it.

    Raises:
        AcquireTimeout, WouldDeadlock, NodeUnavailable, ConfigurationError: as `acquire`.
        OutcomeUnknown, NodeUnavailable: the value could not be stored.
        Exception: any error of the computation.
    """
    flight, lock = Flight(cache.session.port.actor()), entry.lock()
    try:
        return entry.loads(await compute(cache, entry, flight, lock, lock.timeout))
    except NotStored as computed:
        raise computed.error from None


async def invalidate(cache: Cache, entry: CacheEntry) -> None:
    """Delete the value, and discard the result of a computation that is under way.

    Raises:
        OutcomeUnknown, NodeUnavailable: the server did not reply.
        ConfigurationError: the server refuses the request permanently.
    """
    lock = entry.lock()
    timeout = entry.spec.command_timeout
    await _request(cache, INVALIDATE, lock.keys, (lock.ttl_ms,), timeout, TRIES)


async def _compute_value(cache: Cache, entry: CacheEntry, flight: Flight) -> tuple[bytes, float]:
    """Compute the value; return it encoded, and the seconds that it took."""
    port = cache.session.port
    flight.as_of, began = next(cache.ticks), port.now()
    try:
        flight.payload = payload = entry.dumps(await entry.compute())
    except Exception as error:
        flight.error, flight.traceback = error, error.__traceback__
        flight.as_of = next(cache.ticks)
        raise
    return payload, port.now() - began


async def _store(
    cache: Cache, entry: CacheEntry, lease: LeaseState, payload: bytes, cost: float
) -> bool:
    spec = entry.spec
    head = f"{spec.stale_ms} {to_ms(cost)}"
    written = cast("str", payload)  # bytes are sent unchanged
    args = lease.token, str(lease.fence), spec.life_ms, head, written
    return bool(await _request(cache, STORE, lease.spec.keys, args, spec.command_timeout))


async def _request(  # noqa: PLR0913, PLR0917 - the parts of a request
    cache: Cache,
    script: Script,
    keys: Keys,
    args: tuple[str, ...],
    timeout: float,
    timeouts: int = 1,
) -> Reply:
    """Send a request, with retries, for `timeouts` times the timeout. It may run twice."""
    port = cache.session.port
    end, process = port.now() + timeout * timeouts, port.process()

    def send() -> Awaitable[Reply]:
        return cache.session.deployment.call(
            script, keys, args, min(timeout, max(0.0, end - port.now()))
        )

    def on_failure(error: HoldfastError) -> None:
        if port.now() >= end or port.process() != process:
            raise error

    reply, _ = await retry(send, (), on_failure)
    cache.on_server_up()
    return reply


async def _release_quietly(session: Session, ref: LeaseRef) -> None:
    """Release the lock, and ignore errors. A loss is reported as an event."""
    with suppress(HoldfastError):
        await release(session, ref)
