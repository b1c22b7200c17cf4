"""Acquiring a lock that several nodes keep (`core.quorum`): all are asked, the majority decides.

What an attempt keeps to:

- A token of its own for every round. Whatever a round that was not won is known to have got is
  given back before the next one; what it may have got from nodes that did not answer, as they do.
- The deadline counts from before the round. A round is won only while `min_validity` is left.
- Nobody stands in line: of those who ask, one is quicker. Who finds the lock held leaves word where
  it is, and asks again when told that it is free there, or after a while. Who had a part of it that
  nobody has a majority of waits at random before asking again: of those who took it from each other
  one will be first.
- While too few nodes can vote, because they are away or in quarantine, it retries until the
  timeout: servers and their clients may be started at the same moment.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from holdfast.core.hold import Grip, Hold, forked
from holdfast.core.quarantine import ADVICE, pause_in
from holdfast.core.tally import in_one_line
from holdfast.core.token import read_holder
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
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.core.tally import Tally
    from holdfast.holder import Holder
    from holdfast.port import Request, Signal

G = TypeVar("G", bound=Grip)

PAUSE_FIRST, PAUSE_LONGEST, TOLD_LONGEST = 0.004, 0.25, 1.0
"""Seconds between two rounds, at random up to that, doubled up to the longest: for a client that
polls; and for one that will be notified, or waits for nodes that are away."""

TRIES = 3
"""Rounds in which too few nodes answer before NoQuorum is raised, even if the timeout is over."""


async def win(
    session: Session, quorum: Quorum, spec: LockSpec, timeout: float | None, grip: G
) -> G:
    """Take the lock into `grip`, as `core.acquire.acquire` does.

    Raises:
        AcquireTimeout: it was held by others, or went back and forth, all the while.
        NoQuorum: too few nodes answered, or were allowed to vote, all the while; nothing is held.
        ConfigurationError: a majority of the nodes will never grant it.
        NotHeld: this process was forked meanwhile, and is the child.
    """
    process = session.process
    candidate = _Candidate(session, quorum, spec, timeout, process)
    try:
        fence = await candidate.run()
        token, asked_at, actor = candidate.token, candidate.asked_at, candidate.actor
        grip._hold = hold = Hold(spec, token, fence, asked_at, actor, process, session, grip)
        session.took(hold, asked_at + spec.first_due)
        await candidate.leave()
    except BaseException as error:
        if grip._hold is not None:  # interrupted between the grant and its being handed over
            session.disown(grip._hold)
        if process != session.port.process():
            candidate.forget()
        elif isinstance(error, GeneratorExit):
            candidate.abandon()
        else:
            await session.port.shielded(candidate.withdraw())
        raise
    return grip


class _Candidate:
    """One attempt."""

    def __init__(
        self,
        session: Session,
        quorum: Quorum,
        spec: LockSpec,
        timeout: float | None,
        process: int,
    ) -> None:
        self._port = session.port
        self._process = process
        self._session = session
        self._quorum = quorum
        self._spec = spec
        self._timeout = timeout
        self.asked_at = self._port.now()
        self.actor = self._port.actor()
        self.token = ""
        self._give_up = math.inf if timeout is None else self.asked_at + timeout
        self._end = spec.end_of_waiting(self.asked_at, timeout)
        """When the caller gets its answer, whatever happens."""
        self._report = WaitReport(session, spec.name, self.asked_at)
        self._pause = PAUSE_FIRST
        self._failures = 0
        self._waiter = ""
        self._waiters: list[Waiter] = []
        self._told: Signal | None = None
        self._given_back = ""
        """The token of the last round that was given back."""

    async def run(self) -> int:
        """Ask until it is won; return the fence."""
        port, spec, quorum = self._port, self._spec, self._quorum
        while True:
            self.token = port.draw_token(self.actor, spec.suffix)
            self.asked_at = port.now()
            hint = str(port.wall_clock())
            request = VOTE, spec.keys, (self.token, spec.ttl_ms, hint, spec.settings, self._waiter)
            fence, votes = await quorum.elect(request, self._limit(), self._left)
            self._check_process()
            if fence and self._left() > 0:
                return fence
            await self._give_back(hurry=quorum.name_one(votes))
            pause = self._pause_after(votes)
            if port.now() >= self._report.due:
                self._report.send(port.now(), self._why(votes)[0])
            if quorum.name_one(votes) or (votes.refused and not votes.given):
                await port.wait(await self._listen(), pause)
            else:
                await port.sleep(pause)
            self._check_process()

    def _check_process(self) -> None:
        if self._port.process() != self._process:
            raise forked(self._spec.name)

    def _left(self) -> float:
        """What is left of the time in which the round can be won."""
        return min(self.asked_at + self._spec.usable, self._end) - self._port.now()

    def _limit(self) -> float:
        return max(0.0, min(self._spec.command_timeout, self._end - self._port.now()))

    async def _give_back(self, *, hurry: bool) -> None:
        """Give back what the last round got."""
        request = self._taking_back(self.token)
        await self._quorum.give_back(request, self._limit(), hurry=hurry)
        self._given_back = self.token

    def _taking_back(self, token: str) -> Request:
        return RELEASE, self._spec.keys, (token, self._spec.ttl_ms, "0", self._spec.settings)

    async def withdraw(self) -> None:
        """Leave nothing behind, also when interrupted."""
        through = False
        try:
            await self._give_back(hurry=self._given_back == self.token)
            await self.leave()
            through = True
        finally:
            if not through:
                self.abandon()

    def abandon(self) -> None:
        """Clean up in the background, where nothing can be awaited."""
        self.forget_waiters()
        for token in (self.token, self._waiter):
            self._quorum.whereabouts.abandon(self._taking_back(token))

    def forget(self) -> None:
        """Keep nothing in this process: it is a forked child, and the attempt is its parent's."""
        self.forget_waiters()
        for token in (self.token, self._waiter):
            self._quorum.whereabouts.forget(token)

    # Waiting to be told

    async def _listen(self) -> Signal:
        """Have each node that can speak to us do so; none is waited for."""
        port, spec = self._port, self._spec
        told = self._told = self._told or port.signal()
        if self._waiter or self._session.polls:
            return told
        self._waiter = port.draw_token(self.actor, "")
        self._quorum.whereabouts.expect(self._waiter)
        for node in range(len(self._quorum.names)):
            keys = spec.keys.at(node)
            line = self._session.line(keys)
            self._waiters.append(line.enter(self._waiter, keys[0], told, port.now()))
            if line.ear is None and port.now() >= line.deaf_until:
                try:
                    await port.listen(line, 0.0, keys)
                except ConfigurationError:
                    line.deaf_until = math.inf
                except NodeUnavailable:
                    pass  # it may be so a moment later
        return told

    async def leave(self) -> None:
        """Wait no more."""
        if not self._waiter:
            return
        self.forget_waiters()
        await self._quorum.leave(self._taking_back(self._waiter))

    def forget_waiters(self) -> None:
        """Keep nothing in this process of the waiting."""
        for waiter in self._waiters:
            waiter.forget()

    def _pause_after(self, votes: Tally) -> float:
        """Say how long to wait before the next round, or give up."""
        now = self._port.now()
        too_few = self._quorum.lacks_majority(votes)
        if not too_few:
            self._failures = 0
            # Cleaning up may take twice as long as this round took.
            grace = min(self._spec.command_timeout, 2 * (now - self.asked_at))
            self._end = max(self._end, self._give_up + grace)
        elif not self._quorum.was_interrupted(votes):
            self._failures += 1
        quarantine = self._quorum.quarantine(votes)
        is_known = quarantine is not None or self._failures >= TRIES
        over = now >= self._give_up or self._quorum.refuses_for_good(votes)
        if too_few and ((over and is_known) or now >= self._end or self._session.closed):
            raise self._no_quorum(votes, quarantine)
        if now >= self._give_up and not too_few:
            raise self._timed_out(votes)
        if quarantine is not None:
            pause = pause_in(quarantine, self._port.jitter())
        else:
            pause = self._pause * (0.25 + 0.75 * self._port.jitter())
            told = sum(waiter.line.listening for waiter in self._waiters) >= self._quorum.majority
            self._pause = min(2 * self._pause, TOLD_LONGEST if told or too_few else PAUSE_LONGEST)
        return max(0.0, min(pause, self._give_up - now))

    def _no_quorum(self, votes: Tally, quarantine: Quarantined | None) -> HoldfastError:
        name, nodes = self._spec.name, self._quorum.outcomes(votes)
        if self._session.closed:
            message = f"{name!r} was not acquired: this client was closed"
            return NodeUnavailable(message, lock=name)
        if self._quorum.refuses_for_good(votes):
            message = f"{name!r} can never be acquired here: {in_one_line(nodes)}"
            return ConfigurationError(message, lock=name)
        if quarantine is not None:
            return self._too_young(votes, quarantine, nodes)
        message = f"{name!r} was not acquired, too few of its nodes answer: {in_one_line(nodes)}"
        return NoQuorum(message, lock=name, nodes=nodes)

    def _too_young(
        self, votes: Tally, quarantine: Quarantined, nodes: dict[str, str]
    ) -> HoldfastError:
        """Say when a majority may vote, once for all nodes in quarantine."""
        failures = list(votes.failed.values())
        others = [error for error in failures if not isinstance(error, Quarantined)]
        message = (
            f"{self._spec.name!r} was not acquired: {len(failures) - len(others)} of {len(nodes)} "
            "nodes are new, have restarted or were promoted, and may not know all locks that are "
            "held; "
            f"a majority may not vote for another {math.ceil(quarantine.seconds)} s"
        )
        said = "".join(f"; {error}" for error in others)
        return NoQuorum(f"{message}{said}: {ADVICE}", lock=self._spec.name, nodes=nodes)

    def _timed_out(self, votes: Tally) -> AcquireTimeout:
        name, (why, holder) = self._spec.name, self._why(votes)
        message = f"{name!r} was not acquired within {self._timeout} s: {why}"
        return AcquireTimeout(message, lock=name, holder=holder)

    def _why(self, votes: Tally) -> tuple[str, Holder | None]:
        """Say why a round was not won, and who holds the lock, if that is known."""
        if self._quorum.lacks_majority(votes):
            return f"too few nodes answer: {in_one_line(self._quorum.outcomes(votes))}", None
        held = [answer for answer in list(votes.answers.values()) if isinstance(answer, list)]
        holder = None
        if held:
            [(token, _)] = Counter(answer[0] for answer in held).most_common(1)
            left_ms = max(answer[1] for answer in held if answer[0] == token)
            holder = read_holder(token, left_ms)
        if holder:
            why = f"held by {holder}"
        elif len(votes.given) >= self._quorum.majority:
            why = "its nodes answer too late to leave min_validity of its ttl"
        else:
            why = "others asked for it at the same time"
        return why, holder
