"""Acquiring a lock that several nodes keep (`core.quorum`): a majority of their votes decides.

An attempt requests votes in rounds until it wins a round:

1. Each round has its own token. A round that is not won is withdrawn before the next one. Nodes
   that did not reply are cleaned up in the background.
2. The deadline of the lease counts from before the round. A round is won only while `min_validity`
   is left.
3. Waiting attempts have no order. An attempt that finds the lock held subscribes on every node. It
   starts the next round when a node reports that the lock is free there, or after a pause.
4. If several attempts took votes from each other, each pauses for a random time, so that one of
   them comes first.
5. While too few nodes can vote, because they are down or in quarantine, the attempt retries until
   its timeout. For example, servers and clients may be started at the same moment.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from holdfast.core.fence import hint_of
from holdfast.core.lease_state import RELEASED, LeaseRef, LeaseState
from holdfast.core.quarantine import ADVICE, pause_in
from holdfast.core.retry import TRIES
from holdfast.core.rounds import format_outcomes
from holdfast.core.subscribe import RETRY_AFTER
from holdfast.core.time_budget import Backoff, TimeBudget
from holdfast.core.token import read_holder
from holdfast.core.token_locations import PRESENT
from holdfast.core.wait_report import WaitReport
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    NoQuorum,
)
from holdfast.port import Quarantined
from holdfast.scripts import RELEASE, VOTE

if TYPE_CHECKING:
    from holdfast.core.quorum import Quorum
    from holdfast.core.rounds import Vote
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.core.waiter_channel import WaiterChannel
    from holdfast.holder import Holder
    from holdfast.port import Request, Signal

G = TypeVar("G", bound=LeaseRef)

BETWEEN_ROUNDS = Backoff(0.004, 0.25)
LONGEST_SUBSCRIBED = 1.0
"""The longest pause, in seconds, if a majority will notify this attempt, or if too many nodes are
down."""


async def acquire(
    session: Session, quorum: Quorum, spec: LockSpec, timeout: float | None, ref: G
) -> G:
    """Acquire the lock; as `core.acquire.acquire`.

    Raises:
        AcquireTimeout: other clients held it, or no attempt had a majority, until the timeout.
        NoQuorum: too few nodes replied, or were allowed to vote, until the timeout.
        ConfigurationError: a majority of the nodes will never grant it.
        NotHeld: this process is a child that was forked during the call.
    """
    process = session.process
    attempt = _QuorumAttempt(session, quorum, spec, timeout, process)
    try:
        fence = await attempt.run(ref)
        token, sent_at, actor = attempt.token, attempt.sent_at, attempt.actor
        ref._lease = lease = LeaseState(spec, token, fence, sent_at, actor, process, session, ref)
        session.track(lease)
        await attempt.stop_waiting()
    except BaseException as error:
        if ref._lease is not None:  # interrupted after the grant, before acquire() returned
            session.forget(ref._lease)
        try:
            if process != session.port.process():
                attempt.forget()
            elif isinstance(error, GeneratorExit):
                attempt.undo_in_background()
            else:
                await session.port.shielded(attempt.undo())
        finally:
            if ref._lease is not None:
                ref._lease.state = RELEASED
        raise
    return ref


class _QuorumAttempt:
    """One attempt, with all its rounds."""

    def __init__(
        self,
        session: Session,
        quorum: Quorum,
        spec: LockSpec,
        timeout: float | None,
        process: int,
    ) -> None:
        self._session = session
        self._port = session.port
        self._quorum = quorum
        self._spec = spec
        self._process = process
        self.actor = self._port.actor()
        self.token = ""
        """The token of the last round."""
        self.sent_at = self._port.now()
        """When the last round began."""
        self._budget = TimeBudget.begin(spec, timeout, self.sent_at)
        self._report = WaitReport(session, spec.name, self.sent_at)
        self._backoff = BETWEEN_ROUNDS
        self._failures = 0
        """Rounds in which too few nodes replied, since the last in which enough did."""
        self._withdrawn = ""
        """The last token that was withdrawn."""
        self._waiter_token = ""
        """The token under which the attempt is in the queues of the nodes; "" before that."""
        self._channels: list[WaiterChannel] = []
        """The channel of each node, in which the waiter token is registered."""
        self._notified: Signal = self._port.signal()

    async def run(self, ref: LeaseRef) -> int:
        """Request votes until a round is won; return the fence."""
        port, spec = self._port, self._spec
        while True:
            self.token = port.new_token(self.actor, spec.suffix)
            self.sent_at = port.now()
            args = self.token, spec.ttl_ms, hint_of(port.wall_clock()), spec.settings
            request = VOTE, spec.keys, (*args, self._waiter_token)
            fence, votes = await self._quorum.vote(
                request, self._time_left(), self._round_time_left
            )
            self._check_process()
            if fence and self._round_time_left() > 0:
                return fence
            await self._withdraw(wait_if_no_votes=not votes.agrees_on_holder())
            pause = self._pause_after(votes)
            if port.now() >= self._report.due:
                self._report.send(port.now(), self._why(votes)[0])
            if votes.agrees_on_holder() or (votes.no and not votes.yes):
                await self._subscribe()
                self._session.check_held_meanwhile(ref)
                await port.wait(self._notified, pause)
            else:
                await port.sleep(pause)
            self._check_process()
            self._session.check_held_meanwhile(ref)

    def _check_process(self) -> None:
        self._session.check_process(self._process, self._spec.name)

    def _round_time_left(self) -> float:
        """Return the seconds in which the round can still be won."""
        return min(self.sent_at + self._spec.usable, self._budget.end) - self._port.now()

    def _time_left(self) -> float:
        return self._budget.for_request(self._port.now())

    # Cleanup

    def _releasing(self, token: str) -> Request:
        """Return the release of a token. Its ttl sets how long the background retries it."""
        return RELEASE, self._spec.keys, (token, self._spec.ttl_ms, "0", self._spec.settings)

    async def _withdraw(self, *, wait_if_no_votes: bool) -> None:
        request = self._releasing(self.token)
        await self._quorum.withdraw(request, self._time_left(), wait_if_no_votes=wait_if_no_votes)
        self._withdrawn = self.token

    async def stop_waiting(self) -> None:
        """Leave the queues of the nodes."""
        if self._waiter_token:
            self._unregister_waiters()
            await self._quorum.leave_queues(self._releasing(self._waiter_token))

    async def undo(self) -> None:
        """Remove everything from the nodes. If this is interrupted, the background does it."""
        try:
            await self._withdraw(wait_if_no_votes=self._withdrawn != self.token)
            await self.stop_waiting()
        except BaseException:
            self.undo_in_background()
            raise

    def undo_in_background(self) -> None:
        """Clean up in the background, because nothing can be awaited here."""
        self._unregister_waiters()
        for token in (self.token, self._waiter_token):
            self._quorum.locations.release_in_background(self._releasing(token))

    def forget(self) -> None:
        """Forget the attempt in this process: it is a forked child, and the parent continues it."""
        self._unregister_waiters()
        for token in (self.token, self._waiter_token):
            self._quorum.locations.forget(token)

    def _unregister_waiters(self) -> None:
        for channel in self._channels:
            channel.unregister(self._waiter_token)

    # Waiting

    async def _subscribe(self) -> None:
        """Subscribe on every node where no subscription exists, and wait for none of them."""
        if self._session.polls:
            return
        if not self._waiter_token:
            self._register_waiters()
        now = self._port.now()
        for node, channel in zip(self._quorum.all, self._channels, strict=True):
            if channel.subscription is not None or now < channel.push_disabled_until:
                continue
            channel.push_disabled_until = now + RETRY_AFTER
            try:
                await self._port.listen(channel, 0.0, self._spec.keys.at(node))
            except ConfigurationError:
                channel.push_disabled_until = math.inf
            except NodeUnavailable:
                pass  # with a timeout of 0, it only starts to connect

    def _register_waiters(self) -> None:
        self._waiter_token = self._port.new_token(self.actor, "")
        self._quorum.locations.expect(self._waiter_token, PRESENT)
        keys, waiters = self._spec.keys, self._session.waiters
        # Assigned before any waiter is registered, so that an interrupt finds all of them.
        self._channels = [waiters.channel(keys.at(node)) for node in self._quorum.all]
        for channel in self._channels:
            channel.register(self._waiter_token, keys.lock, self._notified, self._port.now())

    def _pause_after(self, votes: Vote) -> float:
        """Return how long to pause before the next round.

        Raises:
            AcquireTimeout, NoQuorum, NodeUnavailable, ConfigurationError: there is no next round.
        """
        now, budget = self._port.now(), self._budget
        too_few = votes.has_too_many_failures()
        if not too_few:
            self._failures = 0
            self._budget = budget.after_reply(self.sent_at, now)
        elif not votes.was_interrupted():
            self._failures += 1
        quarantine = votes.quarantine()
        cause_is_known = quarantine is not None or self._failures >= TRIES
        may_stop = now >= budget.give_up or votes.is_refused_permanently()
        if too_few and ((may_stop and cause_is_known) or now >= budget.end or self._session.closed):
            raise self._no_quorum(votes, quarantine)
        if now >= budget.give_up and not too_few:
            raise self._timed_out(votes)
        if quarantine is not None:
            pause = pause_in(quarantine, self._port.jitter())
        else:
            pause = self._backoff.pause(self._port.jitter())
            listening = sum(channel.is_subscribed for channel in self._channels)
            is_long = too_few or listening >= self._quorum.majority
            longest = LONGEST_SUBSCRIBED if is_long else BETWEEN_ROUNDS.longest
            self._backoff = self._backoff._replace(longest=longest).doubled()
        return max(0.0, min(pause, budget.give_up - now))

    # Errors

    def _no_quorum(self, votes: Vote, quarantine: Quarantined | None) -> HoldfastError:
        name, outcomes = self._spec.name, votes.outcomes()
        if self._session.closed:
            message = f"{name!r} was not acquired: this client was closed: create a new client"
            return NodeUnavailable(message, lock=name)
        if votes.is_refused_permanently():
            message = f"{name!r} can never be acquired here: {format_outcomes(outcomes)}"
            return ConfigurationError(message, lock=name)
        if quarantine is not None:
            message = f"{name!r} was not acquired: {_quarantined(votes, quarantine)}"
        else:
            nodes = format_outcomes(outcomes)
            message = f"{name!r} was not acquired: too few of its nodes replied: {nodes}"
        return NoQuorum(message, lock=name, nodes=outcomes)

    def _timed_out(self, votes: Vote) -> AcquireTimeout:
        name, (why, holder) = self._spec.name, self._why(votes)
        message = f"{name!r} was not acquired within {self._budget.timeout} s: {why}"
        return AcquireTimeout(message, lock=name, holder=holder)

    def _why(self, votes: Vote) -> tuple[str, Holder | None]:
        """Describe why a round was not won; return also the holder, if it is known."""
        if votes.has_too_many_failures():
            return f"too few nodes replied: {format_outcomes(votes.outcomes())}", None
        held = votes.holders
        if held:
            [(token, _)] = Counter(reply[0] for reply in held).most_common(1)
            left_ms = max(reply[1] for reply in held if reply[0] == token)
            holder = read_holder(token, left_ms)
            return f"held by {holder}", holder
        if votes.has_majority():
            return "its nodes replied too late: less than min_validity of the ttl was left", None
        return "other clients requested it at the same time", None


def _quarantined(votes: Vote, quarantine: Quarantined) -> str:
    """Describe when a majority may vote, in one text for all nodes in quarantine."""
    failures = list(votes.failed.values())
    others = [error for error in failures if not isinstance(error, Quarantined)]
    text = (
        f"{len(failures) - len(others)} of {len(votes.nodes)} nodes are new, have restarted or "
        "were promoted, and may not know all locks that are held; a majority may not vote for "
        f"another {math.ceil(quarantine.seconds)} s"
    )
    return f"{text}{''.join(f'; {error}' for error in others)}: {ADVICE}"
