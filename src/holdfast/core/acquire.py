"""Acquiring: one script and one round trip when the lock is free, or when it becomes free.

What an attempt keeps to:

- One token for the whole attempt. A request without an answer is sent again under it, and the
  server answers as it did, or would have done, the first time. Only an attempt whose grant was
  evicted before it arrived draws another one, and keeps its place in the queue.
- The deadline counts from the first of the sendings that were not answered.
- Who waits stands in a queue on the server, and is told when it is their turn (`core.line`). It
  asks again only when told to, and keeps its place by the ticket it got. Where the server cannot
  speak to us, or is not to, the lock is asked for again and again instead.
- An attempt that ends without the lock, while it stands in line or some request of it may still be
  carried out, takes its token back: at once when it can, in the background when the server is
  silent, or when nothing can be awaited because the event loop is closed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

from holdfast.core.election import win
from holdfast.core.events import Event
from holdfast.core.hold import Grip, Hold, forked
from holdfast.core.line import Ear, Grant, Line, Waiter
from holdfast.core.quarantine import ADVICE, EXPIRY, pause_in
from holdfast.core.spec import TOMBSTONE_MS, WINDOW_LONGEST, validity_of
from holdfast.core.token import client_in, is_ours, read_holder
from holdfast.core.wait_report import LOOK_TIMEOUT, WaitReport, place_in_queue
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
    WouldDeadlock,
)
from holdfast.port import Quarantined, Uncopied
from holdfast.scripts import POSITION, PROBE, RENEW

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply

G = TypeVar("G", bound=Grip)

PAUSE_FIRST, PAUSE_LONGEST = 0.002, 0.25
"""Seconds between two askings for a held lock where one has to poll: doubled up to the longest."""

NO_EXPIRY = 30.0
"""Seconds after which to ask again for a lock whose holder has no expiry."""

DEAF_FOR, DEAF_FOR_LONG = 1.0, 60.0
"""Seconds of polling after the push connection failed, or let nothing through, before it is tried
again."""

TRIES = 3
"""Sendings of a request before the server counts as away: a connection that was closed while idle
may cost one, and an answer lost on the way another."""

LATE_GRANTS = 3
"""So many answers that outlive their own lease, and the ttl is too short for this server."""

_HELD = 5  # parts of the answer that somebody else has it


class NotNeeded(Exception):  # noqa: N818 - that is what it says
    """What the lock would have been taken for is there: `reply` is what `spec.taking` answered."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


async def acquire(session: Session, spec: LockSpec, timeout: float | None, grip: G) -> G:
    """Take the lock into `grip`, waiting up to `timeout` seconds (None: for ever, 0: not at all).

    Raises:
        AcquireTimeout: it was held by others all the while.
        WouldDeadlock: the caller holds it, it is not reentrant, and the caller would wait; or it is
            held by a task that could not run meanwhile.
        NodeUnavailable: the server does not answer; nothing is held.
        ConfigurationError: the server will never grant it.
        NotNeeded: the script that was to take it said so instead; nothing is held.
        NotHeld: this process was forked meanwhile, as by a signal handler, and is the child.
    """
    if (spec.keys[0] in session.held or session.co_held) and _reenter(session, spec, timeout, grip):
        return grip
    if session.quorum is not None:
        return await win(session, session.quorum, spec, timeout, grip)
    port, process = session.port, session.process
    actor = port.actor()
    queues = timeout != 0 and not session.polls
    token = port.draw_token(actor, spec.suffix)
    asked_at = port.now()
    waiter = session.waiter(spec, token, asked_at) if queues and session.has_waited else None
    place = "" if waiter is None else "0"
    attempt: _Attempt | None = None
    try:
        try:
            args: tuple[str, ...] = token, spec.ttl_ms
            if place or spec.settings or spec.asked:
                args = token, spec.ttl_ms, place, spec.settings, *spec.asked
            limit = spec.command_timeout
            if timeout and timeout < limit:
                limit = min(limit, spec.end_of_waiting(0.0, timeout))
            reply = await port.call(spec.taking, spec.keys, args, limit)
        except (OutcomeUnknown, NodeUnavailable) as error:
            reply = error
        if isinstance(reply, int) and reply and port.now() < asked_at + spec.usable:
            grip._hold = hold = Hold(spec, token, reply, asked_at, actor, process, session, grip)
            hold.waiter = waiter
            due = asked_at + spec.first_due
        else:
            attempt = _Attempt(session, spec, timeout, token, asked_at, waiter, process)
            attempt.line = session.line(spec.keys) if queues else None
            attempt.reply, reply = reply, None  # nothing that is not needed stays for a long wait
            grant = await attempt.run()
            token = attempt.token
            fence, since = grant.fence, grant.since
            grip._hold = hold = Hold(spec, token, fence, since, actor, process, session, grip)
            due = attempt.hand_over(hold, grant)
        session.took(hold, due)
    except BaseException as error:
        if attempt is None:
            attempt = _Attempt(session, spec, timeout, token, asked_at, waiter, process)
        await _fail(session, attempt, grip, error, process)
        if isinstance(error, ConfigurationError) and not error.lock:
            message = f"{spec.name!r} was not acquired: {error}"
            raise ConfigurationError(message, lock=spec.name) from None
        raise
    return grip


async def _fail(
    session: Session, attempt: _Attempt, grip: Grip, error: BaseException, process: int
) -> None:
    """Leave nothing behind when an attempt ends with `error`."""
    if grip._hold is not None:  # interrupted between the grant and its being handed over
        session.disown(grip._hold)
    if process != session.port.process():  # a forked child: the attempt is its parent's
        return
    # A refusal is an answer: that request was not carried out.
    refused = isinstance(error, ConfigurationError) and grip._hold is None
    if isinstance(error, GeneratorExit):
        attempt.abandon()
    else:
        await attempt.undo(asking=not refused)


def _reenter(session: Session, spec: LockSpec, timeout: float | None, grip: Grip) -> bool:
    """Take again what the caller holds, if it may; refuse to wait for what could never come."""
    hold = session.mine(spec)
    if hold is not None and spec.reentrant:
        grip._hold = hold
        hold.grips.add(ref(grip))
        return True
    if timeout == 0:
        return False
    if hold is not None:
        raise WouldDeadlock(
            f"{spec.name!r} is held by this very thread or task, which would wait for itself: "
            "give the lock reentrant=True, or release it first",
            lock=spec.name,
        )
    if session.is_blocked_by_waiting(spec):
        raise WouldDeadlock(
            f"{spec.name!r} is held by another task or callback of this event loop, which cannot "
            "release it while this call blocks the loop: use holdfast.AsyncClient in coroutines",
            lock=spec.name,
        )
    return False


class _Attempt:
    """An attempt whose first asking was in vain."""

    __slots__ = (
        "_abandoned",
        "_answered_at",
        "_asked_at",
        "_asking",
        "_counts_anew",
        "_end",
        "_failures",
        "_give_up",
        "_held_by",
        "_in_line",
        "_late",
        "_pause",
        "_process",
        "_report",
        "_session",
        "_silent",
        "_sits_out",
        "_spec",
        "_ticket",
        "_timeout",
        "_uncopied",
        "_waiter",
        "line",
        "reply",
        "token",
    )

    def __init__(  # noqa: PLR0913, PLR0917 - what is known of an attempt
        self,
        session: Session,
        spec: LockSpec,
        timeout: float | None,
        token: str,
        began_at: float,
        waiter: Waiter | None,
        process: int,
    ) -> None:
        self._session = session
        self._spec = spec
        self._timeout = timeout
        self._process = process
        self.token = token
        self._give_up = math.inf if timeout is None else began_at + timeout
        self._end = spec.end_of_waiting(began_at, timeout)
        """When the caller gets its answer, whatever happens."""
        self._asked_at = began_at
        self._counts_anew = False
        self._sits_out = spec.longest_ttl < math.inf and timeout != 0
        """Behind Sentinels another server may take over, and the caller has time to wait for it."""
        self._answered_at = began_at if self._sits_out else -math.inf
        self._report = WaitReport(session, spec.name, began_at)
        self._failures = self._late = 0
        self._pause = PAUSE_FIRST
        self._ticket = "0"
        self._held_by: tuple[bytes, int] | None = None
        self.reply: Reply | HoldfastError
        """What the last asking brought."""
        self.line: Line | None
        """Where to stand in line, for those who may."""
        self._waiter = waiter
        self._in_line = False
        """The last reply gave this token a place in the queue."""
        self._asking = True
        """A request is under way."""
        self._uncopied: Uncopied | None = None
        """That replicas are missing says more than that a last, hurried asking was not answered."""
        self._abandoned = False
        """Some request will never be answered, and may still be carried out."""
        self._silent = False
        """The server did not answer the last request: waiting for it once more is in vain."""

    async def run(self) -> Grant:
        """Wait and ask until the lock is ours."""
        port = self._session.port
        while True:
            self._check_process()
            now, reply = port.now(), self.reply
            if isinstance(reply, int) and reply and now < self._asked_at + self._spec.usable:
                return Grant(reply, self._spec.ttl, self._asked_at)
            self._take_in(reply, now)
            if self._waiter is None or self._waiter.grant is None:
                pause = self._pause_after(reply, now, port.jitter())
                if pause is not None and now >= self._report.due:
                    self._report.send(now, self._why(reply))
                reply = self.reply = None
                if pause is not None:
                    await port.sleep(pause)
                elif self._waiter is not None:
                    await self._wait_in_line(self._waiter)
            self._check_process()
            if self._waiter is not None and self._waiter.grant is not None:
                grant = await self._confirmed(self._waiter.grant)
                if grant is not None:
                    return grant
                self._check_process()
            self.reply = await self._ask()

    def _check_process(self) -> None:
        if self._session.port.process() != self._process:
            raise forked(self._spec.name)

    def hand_over(self, hold: Hold, grant: Grant) -> float:
        """Tell the hold all that is known; return when it is due to be renewed."""
        hold.tainted = self._abandoned
        if self._waiter is not None:
            hold.waiter = self._waiter
            self._waiter.leave()
        return hold.begin(grant.since, grant.seconds, self._session.port.now())

    async def undo(self, *, asking: bool) -> None:
        """Leave nothing behind when it ends without the lock; `asking`: perhaps amid a request."""
        session, spec = self._session, self._spec
        abandoned = (asking and self._asking) or self._abandoned
        if self._waiter is not None:
            self._waiter.leave()
        if abandoned and self._silent:
            self.abandon()
            return
        if abandoned:
            session.rally(spec)
        if abandoned or self._in_line:
            await session.port.shielded(self._leave(TOMBSTONE_MS if abandoned else "0"))
        elif self._waiter is not None:
            self._waiter.forget()

    def abandon(self) -> None:
        """Clean up in the background: the server is silent, or nothing can be awaited."""
        session, spec = self._session, self._spec
        session.rally(spec)
        session.see_to(spec, self.token)
        if self._waiter is not None:
            self._waiter.leave()
            self._waiter.forget()

    async def _leave(self, tombstone: str) -> None:
        try:
            await take_back(self._session, self._spec, self.token, tombstone, self._limit())
        finally:
            if self._waiter is not None:
                self._waiter.forget()

    # Asking

    async def _ask(self) -> Reply | HoldfastError:
        port, spec = self._session.port, self._spec
        place, ear = "", None
        if self.line is not None:
            ear = self.line.ear
            if ear is None or not ear.counted:
                ear = await self._listen(self.line)
                self._check_process()
        if self.line is not None and ear is not None:
            if self._waiter is None:
                signal, now = port.signal(), port.now()
                self._waiter = self.line.enter(self.token, spec.keys[0], signal, now)
            place = self._ticket if ear.counted else f"!{self._ticket}"
        now = port.now()
        if self._counts_anew:
            self._asked_at, self._counts_anew = now, False
        limit = max(0.0, min(spec.command_timeout, self._end - now))
        self._asking = True
        if self._waiter is not None:
            # Told first, looked at second: a connection that is lost does these two the other way.
            self._waiter.grant, self._waiter.ask = None, False
            if self._waiter.line.ear is not ear:
                self._waiter.ask = True
        args = self.token, spec.ttl_ms, place, spec.settings, *spec.asked
        try:
            return await port.call(spec.taking, spec.keys, args, limit)
        except (OutcomeUnknown, NodeUnavailable) as error:
            return error

    async def _confirmed(self, grant: Grant) -> Grant | None:
        """Make sure of a grant that was pushed: believe it if it is young, else ask to renew it.

        The fence is then the one that renewing answers: the push may be older than a later grant.
        What replicas must have is never believed: it was written on another's connection.
        """
        port, spec = self._session.port, self._spec
        asked_at = port.now()
        # A grant that another client returned may be for longer than the ttl of this lock.
        grant = grant._replace(seconds=min(grant.seconds, spec.ttl))
        least = max(grant.seconds / 2, spec.validity - spec.usable)  # which is min_validity
        young = asked_at + least < grant.since + validity_of(grant.seconds)
        if young and spec.renew and not spec.replicas:
            return grant
        limit = max(0.0, min(spec.command_timeout, self._end - asked_at))
        try:
            args = self.token, spec.ttl_ms, spec.settings, "0"
            fence = await port.call(RENEW, spec.kept_keys, args, limit)
        except (OutcomeUnknown, NodeUnavailable):
            return None
        if fence and port.now() < asked_at + spec.usable:
            return Grant(fence, spec.ttl, asked_at)
        return None

    # Listening

    async def _listen(self, line: Line) -> Ear | None:
        """See that the server can speak to us, before it is asked to; None if it cannot now."""
        port = self._session.port
        if port.now() < line.deaf_until:
            return None
        try:
            if line.ear is None or line.ear.counted is None:
                await port.listen(line, self._limit(), self._spec.keys)
            ear = line.ear
            if ear is not None and ear.counted is None:
                await self._find_out(line, ear)
        except ConfigurationError as error:
            self._deaf(line, math.inf, f"waiting polls: {error}")
        except (OutcomeUnknown, NodeUnavailable):
            line.deaf_until = port.now() + DEAF_FOR
        ear = line.ear
        known = ear is not None and ear.counted is not None
        return ear if known else None

    async def _find_out(self, line: Line, ear: Ear) -> None:
        """Find out whether the server counts us among its listeners, and whether we hear it."""
        port = self._session.port
        if ear.heard_itself is not None:  # somebody is about to
            known = port.signal()
            ear.curious.append(known)
            if ear.heard_itself is not None:
                await port.wait(known, self._limit())
            return
        try:
            ear.heard_itself = port.signal()
            client = client_in(self.token)
            count = await port.call(PROBE, self._spec.keys, (client,), self._limit())
            if count == 0 and line.sharded:  # it is another node that keeps the lock
                line.deaf_until = port.now() + DEAF_FOR
                return
            heard = count > 0 or await port.wait(ear.heard_itself, self._limit())
            if heard:  # else it is probed again later
                ear.counted = count > 0
        finally:
            ear.heard_itself = None
            for signal in ear.curious:
                signal.set()
        if not heard and line.ear is ear:
            until = port.now() + DEAF_FOR_LONG
            self._deaf(line, until, "waiting polls: what the server publishes does not arrive")
            line.rally()

    def _deaf(self, line: Line, until: float, detail: str) -> None:
        if line.deaf_until < until:
            line.deaf_until = until
            self._session.report(Event("polling", self._spec.name, detail=detail))

    def _limit(self) -> float:
        left = self._end - self._session.port.now()
        return max(0.0, min(self._spec.command_timeout, left))

    # Waiting

    async def _wait_in_line(self, waiter: Waiter) -> None:
        """Wait until the line tells something, or until it is no longer worth it.

        A request without a reply may still arrive and be granted, and nobody is notified of that.
        So after one, this returns from time to time, to ask again.
        """
        port = self._session.port
        while waiter.grant is None and not waiter.ask:
            now = port.now()
            left = self._give_up - now
            if left <= 0:
                raise self._timed_out()
            if now >= self._report.due:
                self._report.send(now, await self._look_at_queue())
            else:
                waiter.report_at = self._report.due
                limit = min(left, WINDOW_LONGEST) if self._abandoned else left
                if not await port.wait(waiter.signal, limit) and limit < left:
                    return

    async def _look_at_queue(self) -> str:
        """Say who holds the lock now, and the place of this attempt in the queue."""
        request = POSITION, self._spec.keys, (self._ticket,)
        try:
            limit = min(self._limit(), LOOK_TIMEOUT)
            reply = await self._session.port.call(*request, limit)
        except HoldfastError as error:
            return self._why(error)
        token, left_ms, ahead = reply
        if token:
            self._held_by = token, left_ms
        return f"{self._why(reply)}; {place_in_queue(ahead)}"

    def _why(self, reply: Reply | HoldfastError) -> str:
        """Say why the lock is not ours yet, as far as is known."""
        if isinstance(reply, HoldfastError):
            return str(reply)
        return f"held by {read_holder(*self._held_by)}" if self._held_by else "not granted yet"

    def _timed_out(self) -> AcquireTimeout:
        name, holder = self._spec.name, self._held_by and read_holder(*self._held_by)
        message = f"{name!r} was not acquired within {self._timeout} s: held by {holder}"
        return AcquireTimeout(message, lock=name, holder=holder)

    def _take_in(self, reply: Reply | HoldfastError, now: float) -> None:
        """Learn what there is to learn from an answer that was not a grant, or from its absence."""
        quarantined = isinstance(reply, Quarantined)
        self._silent = isinstance(reply, HoldfastError) and not quarantined
        if quarantined:  # an answer, and nothing was carried out
            self._asking, self._counts_anew = False, True
            self._failures, self._answered_at = 0, now
            return
        if isinstance(reply, HoldfastError):
            if isinstance(reply, OutcomeUnknown):
                self._abandoned = True
                self._uncopied = reply if isinstance(reply, Uncopied) else self._uncopied
                self._session.rally(self._spec)  # it may have granted somebody else of ours
            self._asking = False  # last: see below
            self._failures += 1
            return
        self._counts_anew = True
        if isinstance(reply, int) and reply:
            self._late += 1
            self._abandoned = True  # the server may have it, whatever becomes of the next request
            return
        # In this order: an interruption in between must not leave the token in the queue. A place
        # that it got before is kept, even if this request did not ask for one.
        held = reply != 0 and len(reply) == _HELD
        placed = held and reply[2] != b"0"
        self._in_line = placed or (held and self._ticket != "0")
        self._asking = False
        self._failures, self._answered_at = 0, now
        # Leaving the queue may take twice as long as this reply took.
        grace = min(self._spec.command_timeout, 2 * (now - self._asked_at))
        self._end = max(self._end, self._give_up + grace)
        if reply == 0:
            self._draw_another_token()
            return
        if len(reply) < _HELD:
            raise NotNeeded(reply)
        token, left_ms, ticket, _, message = reply
        self._held_by = token, left_ms
        if placed:
            self._ticket = ticket.decode()
        if message:
            self._session.granted(message, self._asked_at)

    def _draw_another_token(self) -> None:
        """Go on after an eviction, at the same place in the queue.

        The server granted the lock to the token, and an operator evicted it before the grant
        arrived here. The server has a tombstone for the token, and so refuses all its requests that
        may still be under way.
        """
        if self._waiter is not None:
            self._waiter.leave()
            self._waiter.forget()
        port = self._session.port
        self.token = port.draw_token(port.actor(), self._spec.suffix)
        self._waiter, self._in_line, self._abandoned = None, False, False

    def _pause_after(self, reply: Reply | HoldfastError, now: float, jitter: float) -> float | None:
        """Say how long to pause before asking again, or give up; None means to wait in line."""
        if isinstance(reply, HoldfastError):
            return self._unanswered(reply, now, jitter)
        if isinstance(reply, int):
            return 0.0 if reply == 0 else self._too_late(now)
        if now >= self._give_up:
            raise self._timed_out()
        if self._waiter is None and self.line is not None and now >= self.line.deaf_until:
            return 0.0  # it was not asked to put us in line yet
        token, left_ms, ticket, put_back, _ = reply
        pause = self._pause * (0.5 + 0.5 * jitter)
        self._pause = min(self._pause * 2, PAUSE_LONGEST)
        left = NO_EXPIRY if left_ms < 0 else left_ms / 1000 + EXPIRY
        if not is_ours(token):
            left = min(left, pause)  # it will not hand over to us
        if self._waiter is None or ticket == b"0":
            return min(pause, left, self._give_up - now)
        self._waiter.queued(self._asked_at, left)
        if put_back:
            self._waiter.line.places_lost(self._asked_at, now)
        return None

    def _unanswered(self, error: HoldfastError, now: float, jitter: float) -> float:
        # A waiter in the queue waits through an outage for up to its ttl after the last reply.
        # Behind Sentinels every caller does, until its timeout; but not while replicas are missing:
        # its token may have the lock then, and keeps others from it.
        fresh = now <= self._answered_at + self._spec.ttl
        waits = fresh or (self._sits_out and self._uncopied is None)
        given_up = self._failures >= TRIES and not waits
        too_late = now >= (self._give_up if isinstance(error, Quarantined) else self._end)
        if given_up or self._session.closed or too_late:
            error = self._uncopied or error
            name, node = self._spec.name, getattr(error, "node", "")
            why = "this client was closed" if self._session.closed else str(error)
            if isinstance(error, Quarantined) and not self._session.closed:
                why = f"{why}: {ADVICE}"
            message = f"{name!r} was not acquired: {why}"
            raise NodeUnavailable(message, lock=name, node=node) from None
        if isinstance(error, Quarantined):
            return min(pause_in(error, jitter), self._give_up - now)
        return 0.0 if self._failures < TRIES else min(PAUSE_LONGEST * jitter, self._end - now)

    def _too_late(self, now: float) -> float:
        """The grant is too old to be worth anything. Asking again renews it, and counts anew."""
        if self._late < LATE_GRANTS and now < self._end:
            return 0.0
        raise NodeUnavailable(
            f"{self._spec.name!r} was not acquired: the server's answers take longer than the "
            f"lock's ttl of {self._spec.ttl} s: give it a longer ttl",
            lock=self._spec.name,
        )


async def take_back(  # noqa: PLR0913 - what is known of a token, of all kinds
    session: Session,
    spec: LockSpec,
    token: str,
    tombstone: str = TOMBSTONE_MS,
    timeout: float = math.inf,
    *,
    longest: float = 0.0,
) -> None:
    """Take a token back whatever became of it; in the background if `timeout` does not do.

    `longest` is the most that was asked for, if that may be more than the ttl.
    """
    done = False
    try:
        asked_at, request = session.port.now(), session.ending(spec, token, tombstone, longest)
        reply = await session.port.call(*request, min(timeout, spec.command_timeout))
        session.released(reply, asked_at)
        done = True
    except HoldfastError:
        pass
    finally:
        if not done:
            session.rally(spec)
            session.see_to(spec, token, longest=longest)
