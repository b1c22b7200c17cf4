"""Acquiring a lock that one server keeps: the I/O of the states in `core.attempt`.

A free lock takes one script and one round trip. A lock that is held puts the token in a queue on
the server, which sends a message when it is this waiter's turn (`core.line`). If the server cannot
send messages to this client, the client polls.

An attempt uses one token until an operator evicts it. A request without a reply is sent again with
the same token, and the server replies as it did, or would have done, the first time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from holdfast.core.attempt import (
    Acquired,
    Attempt,
    Confirming,
    Evicted,
    Failed,
    Moment,
    Paused,
    Queued,
    Raised,
    Ready,
    Requesting,
    begin,
    on_confirmation,
    on_error,
    on_grant,
    on_holder,
    on_reply,
    on_wake,
    wake_at,
)
from holdfast.core.cleanup import cancel_token
from holdfast.core.hold import RELEASED, Grip, Hold
from holdfast.core.messages import message_in
from holdfast.core.subscribe import subscribe
from holdfast.core.time_budget import seconds_to_end
from holdfast.core.token import client_in
from holdfast.core.wait_report import LOOK_TIMEOUT, WaitReport, place_in_queue
from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.scripts import POSITION, RENEW

if TYPE_CHECKING:
    from holdfast.core.line import Line, Waiter
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script

G = TypeVar("G", bound=Grip)

NO_PLACE, NEW_PLACE = "", "0"
"""The place in the queue that a request asks for; a ticket asks for the place that it names."""


async def acquire(session: Session, spec: LockSpec, timeout: float | None, grip: G) -> G:
    """Acquire the lock into `grip`; as `core.acquire.acquire`."""
    port, process = session.port, session.process
    actor = port.actor()
    queues = timeout != 0 and not session.polls
    token = port.draw_token(actor, spec.suffix)
    asked_at = port.now()
    waiter = (
        session.waiters.enter(spec, token, asked_at) if queues and session.waiters.any_yet else None
    )
    place = NO_PLACE if waiter is None else NEW_PLACE
    acquiring: _Acquiring | None = None
    try:
        args: tuple[str, ...] = token, spec.ttl_ms
        if place or spec.settings or spec.asked:
            args = token, spec.ttl_ms, place, spec.settings, *spec.asked
        limit = min(spec.command_timeout, seconds_to_end(spec, timeout))
        try:
            reply = await session.deployment.call(spec.taking, spec.keys, args, limit)
        except HoldfastError as error:
            reply = error
        if isinstance(reply, int) and reply and port.now() < asked_at + spec.usable:
            grip._hold = hold = Hold(spec, token, reply, asked_at, actor, process, session, grip)
            hold.waiter = waiter
        else:
            attempt = begin(spec, timeout, asked_at)
            line = session.waiters.line(spec.keys) if queues else None
            acquiring = _Acquiring(session, spec, attempt, token, waiter, line, process)
            acquiring.handle(reply)
            reply = None  # a long wait keeps nothing that it does not need
            grant, is_pushed = await acquiring.run()
            token = acquiring.token
            fence, since = grant.fence, grant.since
            grip._hold = hold = Hold(spec, token, fence, since, actor, process, session, grip)
            acquiring.complete(hold)
            if is_pushed:
                hold.begin_window(grant, port.now())
        session.took(hold)
    except BaseException as error:
        if acquiring is None:  # interrupted in the first request
            attempt = begin(spec, timeout, asked_at)
            acquiring = _Acquiring(session, spec, attempt, token, waiter, None, process)
        await acquiring.fail(grip, error)
        raise
    return grip


class _Acquiring:
    """Carries out an attempt after its first request, and cleans up when it fails."""

    __slots__ = ("_line", "_process", "_report", "_session", "_spec", "attempt", "token", "waiter")

    def __init__(  # noqa: PLR0913, PLR0917 - what is known of an attempt
        self,
        session: Session,
        spec: LockSpec,
        attempt: Attempt,
        token: str,
        waiter: Waiter | None,
        line: Line | None,
        process: int,
    ) -> None:
        self._session = session
        self._spec = spec
        self._line = line
        """Where it may wait; None if it polls, or does not wait."""
        self._process = process
        self._report = WaitReport(session, spec.name, attempt.sent_at)
        self.attempt = attempt
        self.token = token
        self.waiter = waiter

    async def run(self) -> Acquired:
        """Do what each state asks for, until the lock is acquired."""
        while True:
            match self.attempt.state:
                case Acquired() as acquired:
                    return acquired
                case Failed(error):
                    self.attempt = self.attempt._replace(state=Raised())
                    try:
                        raise error from None
                    finally:
                        del error
                case Ready():
                    await self._request()
                case Queued():
                    await self._wait_for_message(cast("Waiter", self.waiter))
                case Paused(seconds):
                    await self._pause(seconds)
                case Confirming():
                    await self._confirm()
                case Evicted():
                    self._draw_another_token()
                case Requesting() | Raised():
                    raise AssertionError("nothing to do in this state")
            self._check_process()

    def _check_process(self) -> None:
        self._session.check_process(self._process, self._spec.name)

    async def _call(
        self, script: Script, keys: Keys, args: tuple[str, ...]
    ) -> Reply | HoldfastError:
        """Run a script, once; return the error if there is no reply."""
        try:
            return await self._session.deployment.call(script, keys, args, self._time_left())
        except HoldfastError as error:
            return error

    def _time_left(self) -> float:
        return self.attempt.budget.for_request(self._session.port.now())

    async def _request(self) -> None:
        port, spec, line = self._session.port, self._spec, self._line
        place, subscription = NO_PLACE, None
        if line is not None:
            subscription = line.subscription
            if subscription is None or not subscription.is_counted:
                client = client_in(self.token)
                subscription = await subscribe(self._session, spec, line, client, self._time_left)
                self._check_process()
        if line is not None and subscription is not None:
            if self.waiter is None:
                signal, now = port.signal(), port.now()
                self.waiter = line.enter(self.token, spec.keys[0], signal, now)
            place = self.attempt.ticket if subscription.is_counted else f"!{self.attempt.ticket}"
        self.attempt = self.attempt.sending(port.now())
        if self.waiter is not None:
            # Every lost connection is noticed. Here: clear `ask`, then compare the subscription.
            # `Line.cut`: clears the subscription, then sets `ask`. A grant that is cleared here is
            # not lost: the request finds that the token is the holder.
            self.waiter.grant, self.waiter.ask = None, False
            if self.waiter.line.subscription is not subscription:
                self.waiter.ask = True
        args = self.token, spec.ttl_ms, place, spec.settings, *spec.asked
        reply = await self._call(spec.taking, spec.keys, args)
        self.handle(reply)
        del reply  # an error refers to this frame

    def handle(self, reply: Reply | HoldfastError) -> None:
        """Handle the reply to a request, or that there is none."""
        self._check_process()
        session, moment = self._session, self._moment()
        if isinstance(reply, HoldfastError):
            self.attempt = on_error(self.attempt, self._spec, reply, moment)
            if isinstance(reply, OutcomeUnknown):  # it may have granted another waiter the lock
                session.waiters.recheck_all(self._spec)
        else:
            message = message_in(reply)
            if message:  # before `on_reply`: if this is interrupted, the state is still Requesting
                session.waiters.on_grant(message, self.attempt.sent_at)
            self.attempt = on_reply(self.attempt, self._spec, reply, moment)
        self._handle_grant()

    def _moment(self) -> Moment:
        session, line, now = self._session, self._line, self._session.port.now()
        can_queue = line is not None and self.waiter is None and now >= line.deaf_until
        return Moment(now, session.port.jitter(), session.closed, can_queue)

    def _handle_grant(self) -> bool:
        """Handle the grant that was pushed to this waiter; False if there is none."""
        grant = None if self.waiter is None else self.waiter.grant
        if grant is not None:
            self.attempt = on_grant(self.attempt, self._spec, grant, self._session.port.now())
        return grant is not None

    async def _pause(self, seconds: float) -> None:
        now = self._session.port.now()
        if now >= self._report.due:
            self._report.send(now, self.attempt.why())
        await self._session.port.sleep(seconds)
        if not self._handle_grant():
            self.attempt = self.attempt.ready()

    async def _wait_for_message(self, waiter: Waiter) -> None:
        """Wait in the queue until the server notifies this waiter, or until the timeout is over."""
        port, queued = self._session.port, cast("Queued", self.attempt.state)
        waiter.queued(self.attempt.sent_at, queued.recheck_after)
        if queued.was_put_back:
            waiter.line.places_lost(self.attempt.sent_at, port.now())
        while not self._handle_grant():
            now = port.now()
            self.attempt = on_wake(self.attempt, self._spec, now, must_request=waiter.ask)
            if self.attempt.state is not queued:
                return
            if now >= self._report.due:
                self._report.send(now, await self._look_at_queue())
            else:
                waiter.report_at = self._report.due
                await port.wait(waiter.signal, wake_at(self.attempt) - now)

    async def _look_at_queue(self) -> str:
        """Say who holds the lock now, and the place of this attempt in the queue."""
        request = POSITION, self._spec.keys, (self.attempt.ticket,)
        try:
            limit = min(self._time_left(), LOOK_TIMEOUT)
            reply = await self._session.deployment.call(*request, limit)
        except HoldfastError as error:
            return str(error)
        token, left_ms, ahead = reply
        self.attempt = on_holder(self.attempt, token, left_ms)
        return f"{self.attempt.why()}; {place_in_queue(ahead)}"

    async def _confirm(self) -> None:
        port, spec = self._session.port, self._spec
        sent_at, args = port.now(), (self.token, spec.ttl_ms, spec.settings, "0")
        reply = await self._call(RENEW, spec.kept_keys, args)
        self.attempt = on_confirmation(self.attempt, spec, reply, sent_at, self._moment())
        del reply  # an error refers to this frame

    def _draw_another_token(self) -> None:
        if self.waiter is not None:
            self.waiter.leave()
            self.waiter.forget()
        port = self._session.port
        self.token, self.waiter = port.draw_token(port.actor(), self._spec.suffix), None
        self.attempt = self.attempt.ready()

    # The end of an attempt

    def complete(self, hold: Hold) -> None:
        """Note in the hold what its release has to know."""
        hold.needs_tombstone = self.attempt.needs_tombstone
        if self.waiter is not None:
            hold.waiter = self.waiter
            self.waiter.leave()

    async def fail(self, grip: Grip, error: BaseException) -> None:
        """Leave nothing on the server when the attempt ends with `error`."""
        hold = grip._hold
        if hold is not None:  # interrupted after the grant, before acquire() returned
            self._session.forget(hold)
        try:
            if self._session.port.process() == self._process:  # else the attempt is the parent's
                await self._clean_up(error)
        except BaseException:
            self._session.cleanups.schedule(self._spec, self.token)
            raise
        finally:
            if hold is not None:
                hold.state = RELEASED

    async def _clean_up(self, error: BaseException) -> None:
        if self.waiter is not None:
            self.waiter.leave()
        session, spec, tombstone = self._session, self._spec, self.attempt.tombstone
        is_silent = tombstone not in {"", "0"} and self.attempt.failures
        if isinstance(error, GeneratorExit) or is_silent:
            session.waiters.recheck_all(spec)
            session.cleanups.schedule(spec, self.token)
        elif tombstone:
            if tombstone != "0":
                session.waiters.recheck_all(spec)
            await session.port.shielded(self._remove(tombstone))
            return
        self._forget_waiter()

    async def _remove(self, tombstone: str) -> None:
        try:
            await cancel_token(self._session, self._spec, self.token, tombstone, self._time_left())
        finally:
            self._forget_waiter()

    def _forget_waiter(self) -> None:
        if self.waiter is not None:
            self.waiter.forget()
