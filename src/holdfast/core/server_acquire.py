"""Acquiring a lock that one server keeps: the I/O for the states in `core.attempt`.

To acquire a free lock takes one script and one round trip. If the lock is held, the script puts the
token in a queue on the server. The server sends a message when it is this waiter's turn
(`core.waiter_channel`). If the server cannot send messages to this client, the client polls.

An attempt uses one token, unless an operator evicts it. A request without a reply is sent again
with the same token. If the first request was executed, the server repeats its result. If not, it
executes it now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from holdfast.core.attempt import (
    Acquired,
    Confirming,
    Evicted,
    Failed,
    Moment,
    Paused,
    Queued,
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
from holdfast.core.lease_state import RELEASED, LeaseRef, LeaseState
from holdfast.core.messages import NotNeeded, message_in
from holdfast.core.spec import TOMBSTONE_MS
from holdfast.core.subscribe import subscribe
from holdfast.core.time_budget import check_remembered, seconds_to_end
from holdfast.core.token import client_in
from holdfast.core.wait_report import POSITION_TIMEOUT, WaitReport, place_in_queue
from holdfast.core.waiter import NEVER
from holdfast.errors import AcquireTimeout, HoldfastError, OutcomeUnknown

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.core.waiter import Waiter
    from holdfast.core.waiter_channel import WaiterChannel
    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script

G = TypeVar("G", bound=LeaseRef)

NO_PLACE, NEW_PLACE = "", "0"
"""The place argument: "" none; "0" a new place; a ticket returns to an old place. A "!" before the
last two means that the server does not count this subscription."""


async def acquire(session: Session, spec: LockSpec, timeout: float | None, ref: G) -> G:
    """Acquire the lock; as `core.acquire.acquire`."""
    port, process = session.port, session.process
    actor = port.actor()
    may_queue = timeout != 0 and not session.polls
    token = port.new_token(actor, spec.suffix)
    sent_at = port.now()
    waiter: Waiter | None = None
    runner: _AttemptRunner | None = None
    try:
        try:
            if may_queue and session.waiters.has_waited:
                waiter = session.waiters.register(spec, token, sent_at)
            place = NO_PLACE if waiter is None else NEW_PLACE
            limit = min(spec.command_timeout, seconds_to_end(spec, timeout))
            try:
                reply = await session.deployment.call(
                    spec.acquire_script, spec.keys, _acquire_args(spec, token, place), limit
                )
            except HoldfastError as error:
                reply = error
            if isinstance(reply, int) and reply and port.now() < sent_at + spec.usable:
                ref._lease = lease = LeaseState(
                    spec, token, reply, sent_at, actor, process, session, ref
                )
                lease.waiter = waiter
            else:
                channel = session.waiters.channel(spec.keys) if may_queue else None
                runner = _AttemptRunner(
                    session, spec, timeout, sent_at, token, waiter, channel, process
                )
                runner.handle(reply)
                reply = None  # so that a long wait does not keep it alive
                ref._lease = lease = runner.new_lease(await runner.run(ref), actor, ref)
            session.track(lease)
        except BaseException as error:
            # No runner yet: the first request was interrupted, or its grant could not be tracked.
            if runner is None:
                runner = _AttemptRunner(
                    session, spec, timeout, sent_at, token, waiter, None, process
                )
            await runner.fail(ref, error)
            raise
    except BaseException:
        # A signal may also arrive after an error, before `fail` begins: as after a timeout.
        if (runner is None or not runner.has_cleaned_up) and port.process() == process:
            token = token if runner is None else runner.token
            session.cleanups.schedule(spec, token)
            session.waiters.unregister(spec, token)
        raise
    return ref


def _acquire_args(spec: LockSpec, token: str, place: str) -> tuple[str, ...]:
    if place or spec.settings or spec.extra_args:
        return token, spec.ttl_ms, place, spec.settings, *spec.extra_args
    return token, spec.ttl_ms


class _AttemptRunner:
    """Carries out an attempt after its first request, and cleans up if it fails."""

    __slots__ = (
        "_channel",
        "_leave_reply",
        "_process",
        "_session",
        "_spec",
        "_wait_report",
        "attempt",
        "has_cleaned_up",
        "token",
        "waiter",
    )

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of an attempt
        self,
        session: Session,
        spec: LockSpec,
        timeout: float | None,
        sent_at: float,
        token: str,
        waiter: Waiter | None,
        channel: WaiterChannel | None,
        process: int,
    ) -> None:
        self._session = session
        self._spec = spec
        self._channel = channel
        """The channel on which it may wait; None if it polls, or does not wait."""
        self._process = process
        self._wait_report = WaitReport(session, spec.name, sent_at)
        if not spec.kind.reports_waits:
            self._wait_report.due = NEVER
        self.attempt = begin(spec, timeout, sent_at)
        self.token = token
        self.waiter = waiter
        self._leave_reply: Reply | None = None
        """The reply with which a party left its barrier."""
        self.has_cleaned_up = False
        """`fail` has ended, or there is nothing to clean up in this process."""

    async def run(self, ref: LeaseRef) -> Acquired:
        """Do what each state requires, until the lock is acquired."""
        while True:
            self._session.check_held_meanwhile(ref)
            match self.attempt.state:
                case Acquired() as acquired:
                    return acquired
                case Failed(error):
                    # The error refers to this frame: break the cycle, which would keep both alive.
                    self.attempt = self.attempt.ready()
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
                    self._replace_token()
                case Requesting():
                    raise AssertionError("unreachable: a request always ends in another state")
            self._check_process()

    def _check_process(self) -> None:
        self._session.check_process(self._process, self._spec.name)

    async def _call(
        self, script: Script, keys: Keys, args: tuple[str, ...]
    ) -> Reply | HoldfastError:
        """Run a script once; return the reply, or the error."""
        try:
            return await self._session.deployment.call(script, keys, args, self._time_left())
        except HoldfastError as error:
            return error

    def _time_left(self) -> float:
        return self.attempt.budget.for_request(self._session.port.now())

    async def _request(self) -> None:
        port, spec, channel = self._session.port, self._spec, self._channel
        place, subscription = NO_PLACE, None
        if spec.kind.is_party:
            check_remembered(spec, self.attempt.sent_at, port.now())
        if channel is not None:
            subscription = channel.subscription
            if subscription is None or not subscription.is_counted:
                client = client_in(self.token)
                subscription = await subscribe(
                    self._session, spec, channel, client, self._time_left
                )
                self._check_process()
        if channel is not None and subscription is not None:
            if self.waiter is None:
                signal, now = port.signal(), port.now()
                self.waiter = channel.register(self.token, spec.keys.lock, signal, now)
            place = self.attempt.ticket if subscription.is_counted else f"!{self.attempt.ticket}"
        self.attempt = self.attempt.sending(port.now())
        if self.waiter is not None:
            # Invariant: a waiter detects every lost connection. Here: clear `must_request`, then
            # check that the subscription which was read above is the current one.
            # `WaiterChannel.on_disconnect`: clear the subscription, then set `must_request`.
            # Without the comparison, clearing could erase the flag of that disconnect.
            # A grant that is cleared here is not lost: the reply shows that the token has the lock.
            self.waiter.grant, self.waiter.must_request = None, False
            if self.waiter.channel.subscription is not subscription:
                self.waiter.must_request = True
        args = _acquire_args(spec, self.token, place)
        reply = await self._call(spec.acquire_script, spec.keys, args)
        self.handle(reply)
        del reply  # an error refers to this frame

    def handle(self, reply: Reply | HoldfastError) -> None:
        """Handle the reply to a request, or its error."""
        self._check_process()
        session, moment = self._session, self._moment()
        if isinstance(reply, HoldfastError):
            self.attempt = on_error(self.attempt, self._spec, reply, moment)
            if isinstance(reply, OutcomeUnknown):
                # The lost reply may contain a grant to another waiter of this client.
                session.waiters.recheck_all(self._spec)
        else:
            message = message_in(reply)
            if message:  # before `on_reply`, so that an interruption leaves the state Requesting
                session.waiters.on_grant(message, self.attempt.sent_at)
            self.attempt = on_reply(self.attempt, self._spec, reply, moment)
        self._handle_grant()

    def _moment(self) -> Moment:
        session, channel, now = self._session, self._channel, self._session.port.now()
        should_subscribe = (
            channel is not None and self.waiter is None and now >= channel.push_disabled_until
        )
        return Moment(now, session.port.jitter(), session.closed, should_subscribe)

    def _handle_grant(self) -> bool:
        """Handle the grant that was pushed to this waiter; return False if there is none."""
        grant = None if self.waiter is None else self.waiter.grant
        if grant is not None:
            self.attempt = on_grant(self.attempt, self._spec, grant, self._session.port.now())
        return grant is not None

    async def _pause(self, seconds: float) -> None:
        now = self._session.port.now()
        if now >= self._wait_report.due:
            self._wait_report.send(now, self.attempt.why(self._spec))
        await self._session.port.sleep(seconds)
        if not self._handle_grant():
            self.attempt = self.attempt.ready()

    async def _wait_for_message(self, waiter: Waiter) -> None:
        """Wait in the queue until the server notifies this waiter, or until the timeout is over."""
        port, queued = self._session.port, cast("Queued", self.attempt.state)
        waiter.enter_timer(self.attempt.sent_at, queued.recheck_after)
        if queued.place_was_lost:
            waiter.channel.places_lost(self.attempt.sent_at, port.now())
        while not self._handle_grant():
            now = port.now()
            self.attempt = on_wake(self.attempt, self._spec, now, must_request=waiter.must_request)
            if self.attempt.state is not queued:
                return
            if now >= self._wait_report.due:
                self._wait_report.send(now, await self._query_position())
            else:
                waiter.report_at = self._wait_report.due
                await port.wait(waiter.signal, wake_at(self.attempt, self._spec) - now)

    async def _query_position(self) -> str:
        """Describe the holder of the lock now, and the place of this attempt in the queue."""
        if self._spec.kind.awaits:
            return self._spec.kind.awaits
        request = self._spec.kind.position, self._spec.keys, (self.attempt.ticket,)
        try:
            limit = min(self._time_left(), POSITION_TIMEOUT)
            reply = await self._session.deployment.call(*request, limit)
        except HoldfastError as error:
            return str(error)
        token, left_ms, ahead = reply
        self.attempt = on_holder(self.attempt, token, left_ms)
        return f"{self.attempt.why(self._spec)}; {place_in_queue(ahead)}"

    async def _confirm(self) -> None:
        port, spec = self._session.port, self._spec
        sent_at, args = port.now(), (self.token, spec.ttl_ms, spec.settings, "0")
        reply = await self._call(spec.kind.renew, spec.renewal_keys, args)
        self.attempt = on_confirmation(self.attempt, spec, reply, sent_at, self._moment())
        del reply  # an error refers to this frame

    def _replace_token(self) -> None:
        if self.waiter is not None:
            self.waiter.leave_timer()
            self.waiter.unregister()
        port = self._session.port
        self.token, self.waiter = port.new_token(port.actor(), self._spec.suffix), None
        self.attempt = self.attempt.ready()

    # The end of an attempt

    def new_lease(self, acquired: Acquired, actor: object, ref: LeaseRef) -> LeaseState:
        """Return the lease of the attempt, with what its release needs."""
        grant, session = acquired.grant, self._session
        lease = LeaseState(
            self._spec, self.token, grant.fence, grant.since, actor, self._process, session, ref
        )
        lease.needs_tombstone = self.attempt.needs_tombstone
        if self.waiter is not None:
            lease.waiter = self.waiter
            self.waiter.leave_timer()
        if acquired.is_unconfirmed:
            lease.begin_window(grant, session.port.now())
        return lease

    async def fail(self, ref: LeaseRef, error: BaseException) -> None:
        """Remove everything from the server when the attempt ends with `error`.

        Raises:
            NotNeeded: `error` is the timeout of a party of a barrier. `reply` is the reply with
                which it left.
        """
        lease = ref._lease
        if lease is not None:  # interrupted after the grant, before acquire() returned
            self._session.forget(lease)
        try:
            if self._session.port.process() == self._process:  # not in a forked child
                await self._clean_up(error)
            self.has_cleaned_up = True
        finally:
            if lease is not None:
                lease.state = RELEASED
        if self._leave_reply is not None and isinstance(error, AcquireTimeout):
            raise NotNeeded(self._leave_reply)

    async def _clean_up(self, error: BaseException) -> None:
        if self.waiter is not None:
            self.waiter.leave_timer()
        session, spec, tombstone = self._session, self._spec, self.attempt.tombstone
        may_arrive = tombstone not in {"", "0"}
        if may_arrive:  # its reply may have contained a grant to another waiter
            session.waiters.recheck_all(spec)
        # Do not wait for the server if the event loop is closed (GeneratorExit), or if the last
        # request got no reply. The background removes the token.
        if isinstance(error, GeneratorExit) or (may_arrive and self.attempt.failures):
            if tombstone:
                session.cleanups.schedule(spec, self.token)
            self._unregister_waiter()
        elif tombstone:
            if spec.kind.is_party:
                why = "timeout" if isinstance(error, AcquireTimeout) else "interrupted"
                if isinstance(error, (NotNeeded, OutcomeUnknown)):  # if it waits, it breaks
                    why = ""
                tombstone = f"{TOMBSTONE_MS} {why}"
            await session.port.shielded(self._remove(tombstone))
        else:
            self._unregister_waiter()

    async def _remove(self, tombstone: str) -> None:
        spec = self._spec
        try:
            reply = await cancel_token(
                self._session, spec, self.token, tombstone, self._time_left()
            )
            if spec.kind.is_party:
                self._leave_reply = reply
        finally:
            self._unregister_waiter()

    def _unregister_waiter(self) -> None:
        # By its token: the interrupt may have come before the waiter was assigned.
        self._session.waiters.unregister(self._spec, self.token)
