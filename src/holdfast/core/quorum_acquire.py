"""Acquiring a lock that several nodes keep (`core.quorum`): all are asked, and a majority decides.

An attempt asks in rounds until one of them is won:

1. Each round has its own token. A round that is not won is withdrawn before the next one; nodes
   that did not reply are cleaned up in the background.
2. The deadline of the lease counts from before the round. A round is won only while `min_validity`
   is left.
3. The waiting attempts have no order. One that finds the lock held subscribes at every node, and
   asks again when a node reports that the lock is free there, or after a pause. If no attempt has a
   majority, it pauses at random: of the attempts that took votes from each other, one is first.
4. While too few nodes can vote, because they are down or in quarantine, it retries until the
   timeout: servers and their clients may have been started at the same moment.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from holdfast.core.hold import RELEASED, Grip, Hold
from holdfast.core.quarantine import ADVICE, pause_in
from holdfast.core.retry import TRIES
from holdfast.core.rounds import in_one_line
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
    from holdfast.core.line import Waiter
    from holdfast.core.quorum import Quorum
    from holdfast.core.rounds import Vote
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder
    from holdfast.port import Request, Signal

G = TypeVar("G", bound=Grip)

BETWEEN_ROUNDS = Backoff(0.004, 0.25)
LONGEST_SUBSCRIBED = 1.0
"""The longest pause, in seconds, of an attempt that a majority of the nodes will notify, or that
waits for nodes that are down."""


async def acquire(
    session: Session, quorum: Quorum, spec: LockSpec, timeout: float | None, grip: G
) -> G:
    """Acquire the lock into `grip`, as `core.acquire.acquire` does.

    Raises:
        AcquireTimeout: others held it, or no attempt had a majority, until the timeout.
        NoQuorum: too few nodes replied, or were allowed to vote, until the timeout.
        ConfigurationError: a majority of the nodes will never grant it.
        NotHeld: this process was forked meanwhile, and is the child.
    """
    process = session.process
    attempt = _Attempt(session, quorum, spec, timeout, process)
    try:
        fence = await attempt.run()
        token, sent_at, actor = attempt.token, attempt.sent_at, attempt.actor
        grip._hold = hold = Hold(spec, token, fence, sent_at, actor, process, session, grip)
        session.took(hold)
        await attempt.stop_waiting()
    except BaseException as error:
        if grip._hold is not None:  # interrupted after the grant, before acquire() returned
            session.forget(grip._hold)
        try:
            if process != session.port.process():
                attempt.forget()
            elif isinstance(error, GeneratorExit):
                attempt.abandon()
            else:
                await session.port.shielded(attempt.undo())
        finally:
            if grip._hold is not None:
                grip._hold.state = RELEASED
        raise
    return grip


class _Attempt:
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
        """Of the last round."""
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
        """What the nodes notify, once the attempt has subscribed."""
        self._waiters: list[Waiter] = []
        self._notified: Signal = self._port.signal()

    async def run(self) -> int:
        """Ask until a round is won; return the fence."""
        port, spec = self._port, self._spec
        while True:
            self.token = port.draw_token(self.actor, spec.suffix)
            self.sent_at = port.now()
            args = self.token, spec.ttl_ms, str(port.wall_clock()), spec.settings
            request = VOTE, spec.keys, (*args, self._waiter_token)
            fence, votes = await self._quorum.vote(request, self._time_left(), self._left_to_win)
            self._check_process()
            if fence and self._left_to_win() > 0:
                return fence
            await self._withdraw(hurry=votes.agrees_on_holder())
            pause = self._pause_after(votes)
            if port.now() >= self._report.due:
                self._report.send(port.now(), self._why(votes)[0])
            if votes.agrees_on_holder() or (votes.no and not votes.yes):
                await self._subscribe()
                await port.wait(self._notified, pause)
            else:
                await port.sleep(pause)
            self._check_process()

    def _check_process(self) -> None:
        self._session.check_process(self._process, self._spec.name)

    def _left_to_win(self) -> float:
        """Return the seconds in which the round can still be won."""
        return min(self.sent_at + self._spec.usable, self._budget.end) - self._port.now()

    def _time_left(self) -> float:
        return self._budget.for_request(self._port.now())

    # Leaving nothing behind

    def _releasing(self, token: str) -> Request:
        return RELEASE, self._spec.keys, (token, self._spec.ttl_ms, "0", self._spec.settings)

    async def _withdraw(self, *, hurry: bool) -> None:
        request = self._releasing(self.token)
        await self._quorum.withdraw(request, self._time_left(), hurry=hurry)
        self._withdrawn = self.token

    async def stop_waiting(self) -> None:
        """Leave the queues of the nodes."""
        if self._waiter_token:
            self._forget_waiters()
            await self._quorum.leave_queues(self._releasing(self._waiter_token))

    async def undo(self) -> None:
        """Leave nothing on the nodes, in the background if this is interrupted."""
        try:
            await self._withdraw(hurry=self._withdrawn == self.token)
            await self.stop_waiting()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Clean up in the background, where nothing can be awaited."""
        self._forget_waiters()
        for token in (self.token, self._waiter_token):
            self._quorum.locations.abandon(self._releasing(token))

    def forget(self) -> None:
        """Keep nothing in this process: it is a forked child, and the attempt is its parent's."""
        self._forget_waiters()
        for token in (self.token, self._waiter_token):
            self._quorum.locations.forget(token)

    def _forget_waiters(self) -> None:
        for waiter in self._waiters:
            waiter.forget()

    # Waiting

    async def _subscribe(self) -> None:
        """Have every node notify this attempt, if it can; none is waited for."""
        if self._waiter_token or self._session.polls:
            return
        port = self._port
        self._waiter_token = port.draw_token(self.actor, "")
        self._quorum.locations.expect(self._waiter_token, PRESENT)
        for node in self._quorum.all:
            keys = self._spec.keys.at(node)
            line = self._session.waiters.line(keys)
            waiter = line.enter(self._waiter_token, keys[0], self._notified, port.now())
            self._waiters.append(waiter)
            if line.subscription is None and port.now() >= line.deaf_until:
                try:
                    await port.listen(line, 0.0, keys)
                except ConfigurationError:
                    line.deaf_until = math.inf
                except NodeUnavailable:
                    pass  # it may be available a moment later

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
        is_known = quarantine is not None or self._failures >= TRIES
        over = now >= budget.give_up or votes.is_refused_for_good()
        if too_few and ((over and is_known) or now >= budget.end or self._session.closed):
            raise self._no_quorum(votes, quarantine)
        if now >= budget.give_up and not too_few:
            raise self._timed_out(votes)
        if quarantine is not None:
            pause = pause_in(quarantine, self._port.jitter())
        else:
            pause = self._backoff.pause(self._port.jitter())
            listening = sum(waiter.line.listening for waiter in self._waiters)
            is_long = too_few or listening >= self._quorum.majority
            longest = LONGEST_SUBSCRIBED if is_long else BETWEEN_ROUNDS.longest
            self._backoff = self._backoff._replace(longest=longest).doubled()
        return max(0.0, min(pause, budget.give_up - now))

    # Why it failed

    def _no_quorum(self, votes: Vote, quarantine: Quarantined | None) -> HoldfastError:
        name, outcomes = self._spec.name, votes.outcomes()
        if self._session.closed:
            message = f"{name!r} was not acquired: this client was closed"
            return NodeUnavailable(message, lock=name)
        if votes.is_refused_for_good():
            message = f"{name!r} can never be acquired here: {in_one_line(outcomes)}"
            return ConfigurationError(message, lock=name)
        if quarantine is not None:
            message = f"{name!r} was not acquired: {_quarantined(votes, quarantine)}"
        else:
            nodes = in_one_line(outcomes)
            message = f"{name!r} was not acquired, too few of its nodes answer: {nodes}"
        return NoQuorum(message, lock=name, nodes=outcomes)

    def _timed_out(self, votes: Vote) -> AcquireTimeout:
        name, (why, holder) = self._spec.name, self._why(votes)
        message = f"{name!r} was not acquired within {self._budget.timeout} s: {why}"
        return AcquireTimeout(message, lock=name, holder=holder)

    def _why(self, votes: Vote) -> tuple[str, Holder | None]:
        """Say why a round was not won, and who holds the lock, if that is known."""
        if votes.has_too_many_failures():
            return f"too few nodes answer: {in_one_line(votes.outcomes())}", None
        held = votes.holders
        if held:
            [(token, _)] = Counter(reply[0] for reply in held).most_common(1)
            left_ms = max(reply[1] for reply in held if reply[0] == token)
            holder = read_holder(token, left_ms)
            return f"held by {holder}", holder
        if votes.has_majority():
            return "its nodes answer too late to leave min_validity of its ttl", None
        return "others asked for it at the same time", None


def _quarantined(votes: Vote, quarantine: Quarantined) -> str:
    """Say when a majority may vote, once for all nodes in quarantine."""
    failures = list(votes.failed.values())
    others = [error for error in failures if not isinstance(error, Quarantined)]
    text = (
        f"{len(failures) - len(others)} of {len(votes.nodes)} nodes are new, have restarted or "
        "were promoted, and may not know all locks that are held; a majority may not vote for "
        f"another {math.ceil(quarantine.seconds)} s"
    )
    return f"{text}{''.join(f'; {error}' for error in others)}: {ADVICE}"
