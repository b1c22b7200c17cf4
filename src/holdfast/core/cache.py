"""Caching: what many want is computed by one, under a lock, and kept on the server for all.

What it keeps to:

- **One computes.** Who finds nothing claims the lock of the value (`scripts/claim.lua`): an
  ordinary lock, taken by a script that first looks whether the value has come meanwhile. Who does
  not get it stands in line, and is told by the storing of the value, all at once.
- **One asks for all of its process.** A caller either leads a flight, from the look at the server
  to the end, or waits for the one that is under way.
- **Nobody is given what is older than an invalidation that had returned when they called.** An
  invalidation makes the lock's counter go on, and a value is stored only if its lease's fence is
  still the last one. A flight says of which moment its outcome is: those who came later go on to
  the next. So invalidating needs to know nothing of who computes, here or elsewhere.
- **What need not be waited for is done aside**: a value that is past its ttl but within `stale`, or
  that is about to expire, is returned, and computed anew in the background.
- **Without the server there is no cache, but there are values**: they are computed, by one of the
  process at a time, and kept by nobody. Nothing that was kept is believed in then.

All times are the server's: how long a value is left is what its key has left, as the server says
together with it.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from holdfast.core.acquire import acquire
from holdfast.core.attempt import NotNeeded
from holdfast.core.events import Event
from holdfast.core.flight import Flight, Unstored
from holdfast.core.hold import Grip
from holdfast.core.release import abandon, release
from holdfast.core.retry import TRIES, retry
from holdfast.core.spec import to_ms
from holdfast.core.value import is_due, read_kept
from holdfast.errors import (
    AcquireTimeout,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
    WouldDeadlock,
)
from holdfast.scripts import CLAIM, INVALIDATE, LOOK, STORE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from holdfast.core.hold import Hold
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.core.value import Kept, Wanted
    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script

AWAY_FOR = 2.0
"""Seconds for which a server that did not answer is not asked again."""

LOOK_AFTER = 1.0
"""Seconds between two looks whether the one who is waited for can still go on."""

AGAIN_AFTER = 1.0
"""Seconds after a failed computation in the background before this process tries it again."""


class Cache:
    """What one client knows, in one process, of the values that are wanted just now."""

    def __init__(
        self, session: Session, aside: Callable[[Coroutine[Any, Any, None]], bool]
    ) -> None:
        self.session = session
        self._aside = aside
        """Has an operation done in the background; False: there are too many."""
        self.begin()

    def begin(self) -> None:
        """Have no value under way: in a new client, and in each forked child of its process."""
        self.moments = count(1)
        """What came before what, in this process."""
        self.flights: dict[str, Flight] = {}
        self._refreshing: dict[str, Flight] = {}
        self._away_until = -math.inf

    @property
    def away(self) -> bool:
        """The server did not answer just now."""
        return self.session.port.now() < self._away_until and not self.session.closed

    def answered(self) -> None:
        """Take in that the server is there."""
        self._away_until = -math.inf

    def unanswered(self, wanted: Wanted, error: HoldfastError) -> None:
        """Take in that the server is away."""
        first = self._away_until == -math.inf
        self._away_until = self.session.port.now() + AWAY_FOR
        if first:
            detail = f"values are computed, and not kept: {error}"
            self.session.report(Event("uncached", wanted.name, detail=detail))

    def end(self, name: str, flight: Flight) -> None:
        """End a flight, as only its leader does, or whoever finds that it is gone.

        Taken out first, so that nobody joins once it is over.
        """
        if self.flights.get(name) is flight:
            del self.flights[name]
        flight.land()

    def refresh_aside(self, wanted: Wanted, seen: int) -> None:
        """Have a value computed anew in the background, if nobody here does so already."""
        port, begun = self.session.port, False
        flight = Flight(port.actor())
        other = self._refreshing.setdefault(wanted.name, flight)
        if other is not flight and not port.is_gone(other.actor):
            return
        self._refreshing[wanted.name] = flight
        operation = self._refresh(wanted, seen, flight)
        try:
            begun = self._aside(operation)
        finally:
            if not begun:
                operation.close()
                self._refreshing.pop(wanted.name, None)

    async def _refresh(self, wanted: Wanted, seen: int, flight: Flight) -> None:
        # In line behind others who compute it, if need be, so that nobody else of this process
        # asks for it meanwhile.
        failure = cast("Exception | None", None)
        try:
            await compute(self, wanted, flight, wanted.lock(CLAIM, str(seen)), None)
        except NotNeeded:
            pass
        except Unstored as computed:
            failure = computed.error
        except Exception as error:  # noqa: BLE001 - whatever the user's function may raise
            failure = error
        finally:
            if failure is None or self.session.closed:
                self._refreshing.pop(wanted.name, None)
        if failure is not None and not self.session.closed:
            detail = f"it is tried again as long as the old one may be used: {failure!r}"
            self.session.report(Event("refresh_failed", wanted.name, detail=detail))
            self.session.renewer.later(AGAIN_AFTER, lambda: self._may_refresh(wanted.name))

    def _may_refresh(self, name: str) -> None:
        self._refreshing.pop(name, None)


async def get(cache: Cache, wanted: Wanted) -> Any:  # noqa: ANN401 - whatever was computed
    """Return the value, from the server or computed; waits for whoever computes it already.

    Interrupted, it leaves nothing held, and the next who waits takes over.

    Raises:
        AcquireTimeout: others computed it for longer than the caller was ready to wait.
        WouldDeadlock: the computation asks for the very value that it is to compute.
        ConfigurationError: the server will never allow it, or the value cannot be written.
    """
    port, timeout = cache.session.port, wanted.spec.lock.timeout
    give_up = math.inf if timeout is None else port.now() + timeout
    arrived, actor = next(cache.moments), port.actor()
    while True:
        flight = Flight(actor)
        try:
            try:
                other = cache.flights.setdefault(wanted.name, flight)
                if other is flight:
                    return await _lead(cache, wanted, flight, give_up)
            finally:
                cache.end(wanted.name, flight)
        finally:
            cache.end(wanted.name, flight)  # an interrupt may have struck as it was about to
        if other.actor is actor or port.blocks(other.actor):
            raise WouldDeadlock(
                f"{wanted.name!r} is asked for by its own computation, which would wait for "
                "itself: give another key, or do not call the cached function there",
                lock=wanted.name,
            )
        await _join(cache, wanted, other, give_up)
        if arrived < other.as_of:  # else it may be older than what the caller knows of
            if other.error is not None:
                raise other.error.with_traceback(other.traceback)
            if other.payload is not None:
                return wanted.loads(other.payload)


async def _join(cache: Cache, wanted: Wanted, flight: Flight, give_up: float) -> None:
    """Wait until the flight is over, or nobody is there any more who could end it.

    A child that is forked meanwhile has none of the threads of its parent.
    """
    port, signal = cache.session.port, cache.session.port.signal()
    process = port.process()
    flight.waiting.append(signal)
    while not flight.done:
        left = give_up - port.now()
        if left <= 0:
            message = f"{wanted.name!r} was not computed within {wanted.spec.lock.timeout} s"
            raise AcquireTimeout(message, lock=wanted.name)
        if await port.wait(signal, min(left, LOOK_AFTER)):
            continue
        if port.is_gone(flight.actor) or port.process() != process:
            cache.end(wanted.name, flight)


async def _lead(cache: Cache, wanted: Wanted, flight: Flight, give_up: float) -> Any:  # noqa: ANN401 - as `get`
    spec, port = wanted.spec, cache.session.port
    kept = None
    flight.as_of = next(cache.moments)
    try:
        if cache.away:
            return wanted.loads((await _make(cache, wanted, flight))[0])
        reply = await _ask(cache, LOOK, wanted.keys, (), spec.command_timeout)
        kept = read_kept(reply)
        if kept is not None and kept.left > -spec.stale:
            value = _loaded(wanted, flight, kept)
            if value is not _UNREADABLE:
                if is_due(kept, spec, port.jitter()):
                    cache.refresh_aside(wanted, kept.fence)
                return value
        seen = 0 if kept is None else kept.fence
        timeout = None if give_up == math.inf else max(0.0, give_up - port.now())
        payload = await compute(cache, wanted, flight, wanted.lock(CLAIM, str(seen)), timeout)
        return wanted.loads(payload)
    except NotNeeded as found:
        kept = read_kept(found.reply)
        value = _UNREADABLE if kept is None else _loaded(wanted, flight, kept)
        if value is not _UNREADABLE:
            return value
    except Unstored as computed:
        cache.unanswered(wanted, computed.error)
        return wanted.loads(computed.payload)
    except (NodeUnavailable, OutcomeUnknown) as error:
        if error is flight.error or cache.session.closed:  # the function's own, or our own doing
            raise
        cache.unanswered(wanted, error)
    return wanted.loads((await _make(cache, wanted, flight))[0])


_UNREADABLE = object()


def _loaded(wanted: Wanted, flight: Flight, kept: Kept) -> Any:  # noqa: ANN401 - as `get`
    """Read what is kept; another version of the program may have written it in another way."""
    try:
        value = wanted.loads(kept.payload)
    except Exception:  # noqa: BLE001 - whatever a codec may raise
        return _UNREADABLE
    flight.payload = kept.payload
    return value


async def compute(
    cache: Cache, wanted: Wanted, flight: Flight, lock: LockSpec, timeout: float | None
) -> bytes:
    """Take the lock, compute the value, and store it if it can be stored.

    Interrupted, or if computing raises, it gives the lock back and stores nothing.

    Raises:
        NotNeeded: the value is there.
        AcquireTimeout, WouldDeadlock, NodeUnavailable, ConfigurationError: as `acquire`.
        Unstored: the server did not answer when it was to be stored.
        Exception: whatever computing it raises.
    """
    session, grip = cache.session, Grip()
    try:
        return await _under_lock(cache, wanted, flight, (lock, timeout, grip))
    except GeneratorExit:
        abandon(session, grip)
        raise
    except BaseException:
        await session.port.shielded(_let_go(session, grip))
        raise


async def _under_lock(
    cache: Cache, wanted: Wanted, flight: Flight, taking: tuple[LockSpec, float | None, Grip]
) -> bytes:
    session, grip = cache.session, taking[2]
    hold = cast("Hold", (await acquire(session, *taking))._hold)
    hold.forsaken = partial(session.port.is_gone, hold.actor)
    try:
        payload, cost = await _make(cache, wanted, flight)
    except Exception:
        await _let_go(session, grip)
        raise
    if hold.alive(session.port.now(), session.port.process()):
        try:
            # Who comes after this may know of an invalidation that came after the storing.
            moment = next(cache.moments)
            if await _store(cache, wanted, hold, payload, cost):
                flight.as_of = moment
        except (NodeUnavailable, OutcomeUnknown) as error:
            if hold.process == session.port.process():  # else a child was forked meanwhile
                _abandon(session, hold)
            raise Unstored(payload, error) from error
    await _let_go(session, grip)
    return payload


async def refresh(cache: Cache, wanted: Wanted) -> Any:  # noqa: ANN401 - as `get`
    """Compute the value now, whatever is kept, store it, and return it.

    Raises:
        AcquireTimeout, WouldDeadlock, NodeUnavailable, ConfigurationError: as `acquire`.
        OutcomeUnknown, NodeUnavailable: it could not be stored.
        Exception: whatever computing it raises.
    """
    flight, lock = Flight(cache.session.port.actor()), wanted.lock()
    try:
        return wanted.loads(await compute(cache, wanted, flight, lock, lock.timeout))
    except Unstored as computed:
        raise computed.error from None


async def invalidate(cache: Cache, wanted: Wanted) -> None:
    """Forget the value, and whatever is being computed of it.

    Raises:
        OutcomeUnknown, NodeUnavailable: the server was not heard.
        ConfigurationError: it will never allow it.
    """
    lock = wanted.lock()
    timeout = wanted.spec.command_timeout
    await _ask(cache, INVALIDATE, lock.keys, (lock.ttl_ms,), timeout, TRIES)


async def _make(cache: Cache, wanted: Wanted, flight: Flight) -> tuple[bytes, float]:
    """Compute the value; return it as it is written, and the seconds it took."""
    port = cache.session.port
    flight.as_of, began = next(cache.moments), port.now()
    try:
        flight.payload = payload = wanted.dumps(await wanted.compute())
    except Exception as error:
        flight.error, flight.traceback = error, error.__traceback__
        flight.as_of = next(cache.moments)
        raise
    return payload, port.now() - began


async def _store(cache: Cache, wanted: Wanted, hold: Hold, payload: bytes, cost: float) -> bool:
    spec = wanted.spec
    head = f"{spec.stale_ms} {to_ms(cost)}"
    written = cast("str", payload)  # bytes go out as they are
    args = hold.token, str(hold.fence), spec.life_ms, head, written
    return bool(await _ask(cache, STORE, hold.spec.keys, args, spec.command_timeout))


async def _ask(  # noqa: PLR0913, PLR0917 - as `Port.call`, and how often
    cache: Cache,
    script: Script,
    keys: Keys,
    args: tuple[str, ...],
    timeout: float,
    patience: int = 1,
) -> Reply:
    """Ask until there is an answer, for so many timeouts; all these scripts may be run twice."""
    port = cache.session.port
    end, process = port.now() + timeout * patience, port.process()

    def send() -> Awaitable[Reply]:
        return cache.session.deployment.call(
            script, keys, args, min(timeout, max(0.0, end - port.now()))
        )

    def on_failure(error: HoldfastError) -> None:
        if port.now() >= end or port.process() != process:
            raise error

    reply, _ = await retry(send, on_failure)
    cache.answered()
    return reply


def _abandon(session: Session, hold: Hold) -> None:
    """Leave a lock to the background: the server does not answer."""
    session.abandon(hold)
    hold.forget_waiter()
    session.cleanups.schedule_lease(hold)


async def _let_go(session: Session, grip: Grip) -> None:
    """Give the lock back; that it was lost is reported, and no concern of who wants the value."""
    try:
        await release(session, grip)
    except HoldfastError:
        return
