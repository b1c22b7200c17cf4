"""A lock kept by several independent nodes: whoever has it on a majority of them holds it.

A token is sent to all nodes at once, and each says by itself whether it is free there. What makes a
majority of them worth a lease:

- **Time.** The deadline counts from before the first sending, as on one node; a majority that was
  reached too late is none. Server clocks matter only by their rates.
- **Fences.** Each node numbers what it gives. If a majority gave the same number, that is the
  fence. If not, the highest number heard is written wherever the token still stands, until a
  majority stands at exactly one number. Any two majorities share a node; there the later lease was
  made after the earlier one had its number, and making one raises the number. So fences grow,
  whatever becomes of clocks and expiry. To make the first case the usual one all nodes are given
  the same hint of the time.
- **Giving it back.** `core.whereabouts` knows of each token on which nodes it may be, and lets none
  of them keep it. A lease that is renewed is given to the nodes that missed or lost it: they may go
  and come one after the other.

This module makes one node out of many: it answers for scripts as a single node would. How an
attempt waits and tries again is in `core.election`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.events import Event
from holdfast.core.spec import TOMBSTONE_MS, TTL_MAX, keys_of, to_ms
from holdfast.core.tally import Tally, Yes, in_one_line, is_complete, nothing
from holdfast.core.whereabouts import THERE, UNSURE, Whereabouts
from holdfast.errors import ConfigurationError, HoldfastError, NoQuorum, OutcomeUnknown
from holdfast.port import Interrupted, Quarantined, Unconnected
from holdfast.scripts import ADOPT, CONFIRM, EVICT, INSPECT, RELEASE, RENEW, VOTE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.renewer import Errand
    from holdfast.core.tally import Note
    from holdfast.port import Keys, Nodes, Post, Reply, Request
    from holdfast.scripts import Script

SHORTEST_ROUND = 0.001
"""Seconds to wait for votes, even if no time is left."""


class Election(NamedTuple):
    """What came of asking for a lock."""

    fence: int
    """0 if it was not won."""
    votes: Yes


class Quorum:
    """Several nodes, as one."""

    def __init__(self, nodes: Nodes, background: Nodes, report: Callable[[Event], None]) -> None:
        self.names = nodes.names
        self.majority = len(self.names) // 2 + 1
        self._spare = len(self.names) - self.majority  # how many one can do without
        self._all = range(len(self.names))
        self._nodes = nodes
        self._background = background
        self._report = report
        self.whereabouts = Whereabouts(self._all, nothing, nothing, to_ms(TTL_MAX))
        self.begin(nothing, nothing, TTL_MAX)

    def begin(
        self,
        clean_up: Callable[[Request], None],
        later: Callable[[float, Callable[[], None]], Errand | None],
        longest_ttl: float,
    ) -> None:
        """Know of no token: in a forked child, none is ours. All is for `Whereabouts`."""
        self.whereabouts.disconnect()  # a call that was under way at the fork still has it
        self.whereabouts = Whereabouts(self._all, clean_up, later, to_ms(longest_ttl))
        self.failing: set[int] = set()
        """The nodes that do not work, as far as is known."""
        self._closed = False

    def close(self) -> None:
        """Care no more for what nodes do, or fail to do."""
        self._closed = True
        self.whereabouts.close()

    # Electing

    async def elect(self, request: Request, timeout: float, left: Callable[[], float]) -> Election:
        """Ask every node for its vote, and have those who gave it agree about the fence.

        It is won only if a majority agrees while there is time `left`. What was given has to be
        given back otherwise.
        """
        is_there, note = self.whereabouts.asking(request)
        tally = Yes(self._all, self._is_decided, self, is_there)
        tally.note = note
        # A node that no longer knows the script is sent the vote again while the caller waits. If
        # it did not wait at all, the node would receive the vote after the release of the token.
        timeout = max(timeout, SHORTEST_ROUND)
        await self._nodes.ask([(self._all, request)], timeout, tally.heard)
        return Election(await self._agree(request, tally.given, timeout, left), tally)

    def _is_decided(self, tally: Tally) -> bool:
        missed = len(tally.failed) + tally.refused
        return len(tally.given) >= self.majority or missed > self._spare

    async def _agree(
        self, request: Request, given: dict[int, int], timeout: float, left: Callable[[], float]
    ) -> int:
        _, keys, (token, ttl, _, settings, *_) = request
        while len(numbers := list(given.values())) >= self.majority:
            [(fence, agreed)] = Counter(numbers).most_common(1)
            if agreed >= self.majority:
                return fence
            if left() <= 0:
                break
            highest = max(numbers)
            confirm = CONFIRM, keys, (token, ttl, str(highest), settings)
            nodes = list(self.whereabouts.of(token) or ())
            tally = Tally(nodes, self._stands_at(highest), self.watch)
            await self._nodes.ask([(tally.nodes, confirm)], min(timeout, left()), tally.heard)
            given = tally.given
        return 0

    def _stands_at(self, fence: int) -> Callable[[Tally], bool]:
        def enough(tally: Tally) -> bool:
            given = list(tally.given.values())
            if len(given) >= self.majority and max(given) > fence:
                return True
            too_few = len(tally.nodes) - len(tally.failed) - tally.refused < self.majority
            return given.count(fence) >= self.majority or too_few

        return enough

    async def give_back(self, request: Request, timeout: float, *, hurry: bool) -> None:
        """Leave nothing of a token that was not elected.

        Returns when those who gave it their vote have taken it back; who did not answer is seen to
        in the background. Without `hurry` somebody else is heard first: then errors say more.
        """
        token = request[2][0]
        whereabouts = self.whereabouts
        there = whereabouts.of(token)
        if not there:
            whereabouts.forget(token)
            return
        have_it = {node for node, state in list(there.items()) if state is THERE}
        tally = await self._release(request, 0.0 if hurry and not have_it else timeout, have_it)
        whereabouts.leave(request, tally)

    async def leave(self, request: Request) -> None:
        """Have a token taken out of the queues, and do not wait for it."""
        whereabouts = self.whereabouts
        if whereabouts.of(request[2][0]) is not None:
            whereabouts.leave(request, await self._release(request, 0.0, set()))

    # One node out of many

    async def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script on the nodes that matter, and answer for them; as `Port.call`."""
        request, whereabouts = (script, keys, args), self.whereabouts
        if script is ADOPT:
            return await self._adopt(request, timeout)
        posts, tally = self._question(request, None if script is RELEASE else is_complete)
        await self._nodes.ask(posts, timeout, tally.heard)
        answer = self._answer(script, tally)
        if script is RELEASE:
            whereabouts.leave(request, tally)
        return answer

    async def call_many(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Run scripts in the background; as `Background.call_many`.

        A release is through only when every node that may have the token has answered.
        """
        posts: list[Post] = []
        whose: list[Tally] = []
        tallies: list[Tally] = []
        for request in requests:
            more, tally = self._question(request, is_complete)
            tallies.append(tally)
            posts += more
            whose += [tally] * len(more)
        unsettled = {tally for tally in tallies if tally.nodes}

        def heard(number: int, node: int, answer: Reply | HoldfastError) -> bool:
            tally = whose[number]
            if tally.heard(number, node, answer):
                unsettled.discard(tally)
            return not unsettled

        await self._background.ask(posts, timeout, heard, meanwhile)
        await self._give_again(requests, tallies, meanwhile)
        for script, _, (token, *_) in requests:
            if script is RELEASE:  # as of a lease that was lost because no node had it
                self.whereabouts.forget_if_nowhere(token)
        return [
            self._outcome(script, tally)
            for (script, *_), tally in zip(requests, tallies, strict=True)
        ]

    async def _give_again(
        self, requests: Sequence[Request], tallies: list[Tally], meanwhile: Callable[[], float]
    ) -> None:
        """Give leases that were just renewed to the nodes that do not have them; wait for none.

        They count from the next renewal on, and not for this one: what the holder believes in is
        that a majority has had it all the time.
        """
        posts: list[Post] = []
        notes: list[Note] = []
        for (script, keys, args), tally in zip(requests, tallies, strict=True):
            if script is not RENEW or len(tally.given) < self.majority:
                continue
            token, ttl, settings, _ = args
            nodes, voted = self.whereabouts.giving_again(token)
            if nodes:
                fence, every = str(max(tally.given.values())), keys_of(keys[0])
                posts.append((nodes, (VOTE, every, (token, ttl, fence, settings, ""))))
                posts.append((nodes, (CONFIRM, every, (token, ttl, fence, settings))))
                notes += voted, nothing

        def heard(number: int, node: int, answer: Reply | HoldfastError) -> bool:
            self.watch(node, answer)
            notes[number](node, answer)
            return False

        if posts:
            await self._background.ask(posts, 0.0, heard, meanwhile)

    def _outcome(self, script: Script, tally: Tally) -> Reply | HoldfastError:
        if script is RELEASE and tally.failed:
            return self._unheard(tally)
        try:
            return self._answer(script, tally)
        except HoldfastError as error:
            return error

    async def _release(self, request: Request, timeout: float, awaited: set[int]) -> Tally:
        """Have a token given back; wait for the answers of some nodes."""
        posts, tally = self._question(request, lambda each: all(map(each.has_heard, awaited)))
        await self._nodes.ask(posts, timeout, tally.heard)
        return tally

    async def _adopt(self, request: Request, timeout: float) -> Reply:
        """Take an exported lease over on a majority; asked again, it goes on where it was.

        What it got stays until its token is released: it is the only copy of the lease. The lease
        has its fence, which stood at a majority once: the nodes need not agree about it again.
        """
        whereabouts = self.whereabouts
        votes = (await self.elect(request, timeout, lambda: 0.0)).votes
        if len(votes.given) >= self.majority:
            whereabouts.end_export(request, votes)
            return 1
        if votes.refused <= self._spare:
            raise self._unheard(votes)
        return 0

    # Whom to ask, and what to make of it

    def _question(
        self, request: Request, enough: Callable[[Tally], bool] | None
    ) -> tuple[list[Post], Tally]:
        """Whom to ask, and when a release is through: at a majority, if nothing else is given."""
        script, keys, args = request
        if script is INSPECT:
            return [(self._all, request)], Tally(self._all, self._is_known, self.watch)
        there = self.whereabouts.of(args[0])
        if script is RELEASE and there is not None:
            self.whereabouts.note_leaving(args[0])
        if keys.node is None:
            nodes = list(self._all if there is None else there)
        else:
            nodes = [keys.node] if there and keys.node in there else []
        if script is RENEW:
            tally: Tally = Yes(nodes, self._is_kept, self, nothing)
            tally.note = self.whereabouts.renewing(args[0])
            return [(nodes, request)], tally
        if args[2] != "0" or there is None or UNSURE not in there.values():
            return [(nodes, request)], self._ending(request, nodes, enough, [])
        # A tombstone is left where a request may yet arrive by another road.
        unsure = [node for node in nodes if there.get(node) is UNSURE]
        sure = [node for node in nodes if node not in unsure]
        buried = script, keys, (*args[:2], TOMBSTONE_MS, *args[3:])
        return [(sure, request), (unsure, buried)], self._ending(request, nodes, enough, unsure)

    def _ending(
        self,
        request: Request,
        nodes: list[int],
        enough: Callable[[Tally], bool] | None,
        buried: list[int],
    ) -> Tally:
        """Count those who have released a token."""
        gone, note = self.whereabouts.ending(request, buried)
        if enough is None:
            tally: Tally = Yes(nodes, self._is_released, self, gone)
        else:
            tally = Tally(nodes, enough, self.watch)
        tally.note = note
        return tally

    def _missing(self, tally: Tally) -> int:
        """How many nodes are known not to have it."""
        return len(self.names) - len(tally.nodes) + tally.refused

    def _is_kept(self, tally: Tally) -> bool:
        lost = self._missing(tally) > self._spare
        return lost or len(tally.given) >= self.majority or tally.complete

    def _is_released(self, tally: Tally) -> bool:
        return len(tally.given) >= self.majority or tally.complete

    def _is_known(self, tally: Tally) -> bool:
        return tally.complete or self.name_one(tally)

    def name_one(self, tally: Tally) -> bool:
        """Whether a majority names the same holder, or nobody."""
        holders = Counter(map(_holder, tally.holders))
        return any(times >= self.majority for times in holders.values())

    def _answer(self, script: Script, tally: Tally) -> Reply:
        """What a single node would have answered.

        Raises:
            NoQuorum, OutcomeUnknown: too few answered to say.
        """
        if script is INSPECT:
            return self._holder(tally)
        given = tally.given
        if script is EVICT and len(given) + tally.refused >= self.majority:
            return max(given.values(), default=0)  # they have no majority any more
        if len(given) >= self.majority:
            return max(given.values())
        missing = self._missing(tally)
        if missing > self._spare:
            # A node that is not asked any more said no before, which may have been for any reason.
            return [] if list(tally.answers.values()).count([]) == missing else 0
        raise self._unheard(tally)

    def _holder(self, tally: Tally) -> Reply:
        answers = tally.holders
        if len(answers) < self.majority:
            raise self._unheard(tally)
        [(token, times)] = Counter(map(_holder, answers)).most_common(1)
        if not token or times < self.majority:
            return []
        lefts = sorted(answer[1] for answer in answers if _holder(answer) == token)
        fences = [answer[2] for answer in answers if _holder(answer) == token]
        [(fence, _)] = Counter(fences).most_common(1)
        # It is held until it is gone from so many nodes that no majority is left.
        return [token, lefts[-self.majority], fence]

    # Nodes that fail

    def lacks_majority(self, tally: Tally) -> bool:
        """Whether so many nodes failed that no majority is left."""
        return len(tally.failed) > self._spare

    def refuses_for_good(self, tally: Tally) -> bool:
        """Whether too many nodes refuse for good, so that no majority is left."""
        failures = list(tally.failed.values())
        return sum(isinstance(each, ConfigurationError) for each in failures) > self._spare

    def quarantine(self, tally: Tally) -> Quarantined | None:
        """Return the quarantine at whose end a majority may vote.

        None if no quarantine prevents a majority, or if nodes would still be missing at its end.
        """
        failures = list(tally.failed.values())
        ends = [error for error in failures if isinstance(error, Quarantined)]
        ends.sort(key=lambda error: error.seconds)
        needed = len(failures) - self._spare
        return ends[needed - 1] if 0 < needed <= len(ends) else None

    def was_interrupted(self, tally: Tally) -> bool:
        """Whether answers were not read, which says nothing about the nodes."""
        return any(isinstance(error, Interrupted) for error in list(tally.failed.values()))

    def _unheard(self, tally: Tally) -> HoldfastError:
        """Say that, and of which nodes, too few were heard."""
        nodes = self.outcomes(tally)
        message = f"no majority of the {len(nodes)} nodes answered ({in_one_line(nodes)})"
        failures = list(tally.failed.values())
        if tally.given or any(isinstance(error, OutcomeUnknown) for error in failures):
            return OutcomeUnknown(message)
        return NoQuorum(message, nodes=nodes)

    def outcomes(self, tally: Tally) -> dict[str, str]:
        """What came of asking each node, in words."""
        return {name: tally.in_words(node) for node, name in enumerate(self.names)}

    def watch(self, node: int, answer: Reply | HoldfastError) -> None:
        """Report a node that begins to fail, and one that is back."""
        if self._closed:  # it is us who do not hear it any more
            return
        if isinstance(answer, HoldfastError):
            if node not in self.failing and not isinstance(answer, (Interrupted, Unconnected)):
                self.failing.add(node)
                self._report(Event("node_failed", detail=str(answer)))
        elif answer and node in self.failing:  # a no says little: who refuses to write says it too
            self.failing.discard(node)
            self._report(Event("node_back", detail=f"{self.names[node]} answers again"))


def _holder(answer: list[bytes]) -> bytes:
    return answer[0] if answer else b""
