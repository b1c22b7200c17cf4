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
- **Where is my token?** `_whereabouts` says of each token on which nodes it is, or may be. What is
  asked of a lease is asked there, and giving it back is not over before it is gone from all of
  them: who does not answer is seen to in the background. A lease that is renewed is given to the
  nodes that missed or lost it, so that they may go and come one after the other.

This module makes one node out of many: it answers for scripts as a single node would. How an
attempt waits and tries again is in `core.election`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from holdfast.core.events import Event
from holdfast.core.spec import TOMBSTONE_MS, keys_of
from holdfast.errors import HoldfastError, NoQuorum, OutcomeUnknown
from holdfast.port import Unconnected
from holdfast.scripts import ADOPT, CONFIRM, EVICT, INSPECT, RELEASE, RENEW, VOTE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Keys, Nodes, Post, Reply, Request
    from holdfast.scripts import Script

SLOW = 1.0
"""Seconds after which a node that has not answered a release is told again."""

ASKED, THERE, UNSURE = "asked", "there", "unsure"
"""Of a token on a node: on its way; there; perhaps there, or yet to arrive by another road."""


Note: TypeAlias = "Callable[[int, Reply | HoldfastError], object]"
"""Told of a node and its answer."""


class Tally:
    """What the nodes answered to one question, as it comes in."""

    __slots__ = ("_enough", "_watch", "answers", "failed", "given", "nodes", "note", "refused")

    def __init__(self, nodes: Sequence[int], enough: Callable[[Tally], bool], watch: Note) -> None:
        self.nodes = nodes
        self.answers: dict[int, Reply] = {}
        """Those that are more than a yes."""
        self.given: dict[int, int] = {}
        """The numbers of those who said yes."""
        self.failed: dict[int, HoldfastError] = {}
        """Those who could not be asked, or did not answer."""
        self.refused = 0
        """How many said no."""
        self._enough = enough
        self._watch = watch
        self.note: Note = _nothing
        """Told of every answer, also of those that come when the question is long settled."""

    def heard(self, _: int, node: int, answer: Reply | HoldfastError) -> bool:
        """Take in what came of asking one node; say whether it is enough."""
        if type(answer) is int and answer > 0:
            self.given[node] = answer
        elif isinstance(answer, HoldfastError):
            self.failed[node] = answer
        else:
            self.answers[node] = answer
            self.refused += 1
        self._watch(node, answer)
        self.note(node, answer)
        return self._enough(self)

    def has_heard(self, node: int) -> bool:
        """Whether it is known what came of asking this node."""
        return node in self.given or node in self.failed or node in self.answers

    @property
    def complete(self) -> bool:
        """Nothing is to come any more."""
        return len(self.given) + len(self.failed) + self.refused == len(self.nodes)


class _Yes(Tally):
    """The same, quicker for the answer that is hoped for, while no node fails.

    `noted` is called instead of `note` with each yes.
    """

    __slots__ = ("_failing", "_majority", "noted")

    def __init__(
        self,
        nodes: Sequence[int],
        enough: Callable[[Tally], bool],
        quorum: Quorum,
        noted: Callable[[int], object],
    ) -> None:
        super().__init__(nodes, enough, quorum.watch)
        self._majority = quorum.majority
        self._failing = quorum.failing
        self.noted = noted

    def heard(self, _: int, node: int, answer: Reply | HoldfastError) -> bool:
        """Take in what came of asking one node; say whether it is enough."""
        if type(answer) is not int or answer <= 0 or self._failing:
            return super().heard(_, node, answer)
        given = self.given
        given[node] = answer
        self.noted(node)
        return len(given) >= self._majority


class Election(NamedTuple):
    """What came of asking for a lock."""

    fence: int
    """0 if it was not won."""
    votes: Tally


class Quorum:
    """Several nodes, as one."""

    def __init__(self, nodes: Nodes, background: Nodes, report: Callable[[Event], None]) -> None:
        self.names = nodes.names
        self.majority = len(self.names) // 2 + 1
        self._spare = len(self.names) - self.majority  # how many one can do without
        self._all = range(len(self.names))
        self._asked = dict.fromkeys(self._all, ASKED)
        self._nodes = nodes
        self._background = background
        self._report = report
        self.begin(_nothing, _nothing)

    def begin(
        self,
        clean_up: Callable[[Request], None],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """Know of no token: in a forked child, none is ours.

        `clean_up` has the background carry out a request, until it is done or too late to matter;
        `later` has it do something after so many seconds.
        """
        self._clean_up = clean_up
        self._later = later
        self._whereabouts: dict[str, dict[int, str]] = {}
        self._leaving: set[str] = set()
        """The tokens that are being given back."""
        self.failing: set[int] = set()
        """The nodes that do not work, as far as is known."""
        self._released: dict[str, Request] = {}
        """Of tokens that were released, and not yet by every node, the request."""
        self._released_before: dict[str, Request] = {}
        self._sweeps = self._closed = False

    def close(self) -> None:
        """Leave alone what slow nodes were told and have not answered: they do it all the same."""
        self._closed = True

    # Electing

    async def elect(self, request: Request, timeout: float, left: Callable[[], float]) -> Election:
        """Ask every node for its vote, and have those who gave it agree about the fence.

        It is won only if a majority agrees while there is time `left`. What was given has to be
        given back otherwise.
        """
        _, keys, args = request
        token, waiter = args[0], "".join(args[4:])
        there = self._whereabouts.get(token, {})  # an adoption may be tried again
        self._whereabouts[token] = there = {**self._asked, **there} if there else {**self._asked}

        def is_there(node: int, state: str = THERE) -> None:
            over = node not in there or self._whereabouts.get(token) is not there
            if there.get(node) is not UNSURE:  # as when it is being given again
                there[node] = state
            if over:  # it was given up meanwhile, and this came, or will come, after that
                self._see_to(node, request)

        def note(node: int, answer: Reply | HoldfastError) -> None:
            unknown = isinstance(answer, OutcomeUnknown)
            if waiter and (unknown or isinstance(answer, list)):
                self._is_queued(node, (RELEASE, keys, (waiter, *args[1:])), unsure=unknown)
            if unknown or _is_yes(answer):
                is_there(node, UNSURE if unknown else THERE)
            elif there.get(node) is ASKED:
                there.pop(node, None)

        tally = _Yes(self._all, self._is_decided, self, is_there)
        tally.note = note
        await self._nodes.ask([(self._all, request)], timeout, tally.heard)
        return Election(await self._agree(request, tally.given, timeout, left), tally)

    def _is_decided(self, tally: Tally) -> bool:
        missed = len(tally.failed) + tally.refused
        return len(tally.given) >= self.majority or missed > self._spare

    async def _agree(
        self, request: Request, given: dict[int, int], timeout: float, left: Callable[[], float]
    ) -> int:
        _, keys, (token, ttl, _, settings, *_) = request
        while len(given) >= self.majority:
            fence = next(iter(given.values()))
            if len(set(given.values())) > 1:
                fence, agreed = Counter(given.values()).most_common(1)[0]
                if agreed >= self.majority:
                    return fence
            else:
                return fence
            if left() <= 0:
                break
            fence = max(given.values())
            confirm = CONFIRM, keys, (token, ttl, str(fence), settings)
            tally = Tally(list(self._whereabouts[token]), self._stands_at(fence), self.watch)
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

    async def give_back(self, request: Request, timeout: float) -> None:
        """Leave nothing of a token that was not elected.

        Returns when those who gave it their vote have taken it back; who did not answer is seen to
        in the background.
        """
        token = request[2][0]
        there = self._whereabouts.get(token)
        if not there:
            self.forget(token)
            return
        have_it = {node for node, state in there.items() if state is THERE}
        tally = await self._release(
            request, timeout, lambda each: all(map(each.has_heard, have_it))
        )
        self._leave(request, tally)

    def expect(self, token: str) -> None:
        """Know that a token will stand in the queues of all nodes."""
        self._whereabouts[token] = dict.fromkeys(self._all, THERE)

    def _is_queued(self, node: int, request: Request, *, unsure: bool) -> None:
        """Know that a token is in a node's queue, or may yet be put there."""
        stands = self._whereabouts.get(request[2][0], {})
        if node not in stands:  # it has left meanwhile, and this came after that
            self._see_to(node, request)
        elif unsure:
            stands[node] = UNSURE

    async def leave(self, request: Request) -> None:
        """Have a token taken out of the queues, and do not wait for it."""
        if request[2][0] in self._whereabouts:
            self._leave(request, await self._release(request, 0.0, _settled))

    def forget(self, token: str) -> None:
        """Care for a token no more: it is another's, or expires by itself."""
        self._whereabouts.pop(token, None)
        self._leaving.discard(token)
        self._released.pop(token, None)

    def abandon(self, request: Request) -> None:
        """Have the background take a token back, wherever it may be."""
        for node in list(self._whereabouts.get(request[2][0], ())):
            self._see_to(node, request)

    # One node out of many

    async def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script on the nodes that matter, and answer for them; as `Port.call`."""
        request = script, keys, args
        if script is ADOPT:
            return await self._adopt(request, timeout)
        if script is RELEASE:
            tally = await self._release(request, timeout, self._is_released)
            answer = self._answer(script, tally)
            self._leave(request, tally)
            return answer
        posts, tally = self._question(request)
        await self._nodes.ask(posts, timeout, tally.heard)
        return self._answer(script, tally)

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
            more, tally = self._question(request)
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
            token, ttl, settings = args
            nodes, voted, confirmed = self._missing_at(token, tally)
            if nodes:
                fence, every = str(max(tally.given.values())), keys_of(keys[0])
                posts.append((nodes, (VOTE, every, (token, ttl, fence, settings, ""))))
                posts.append((nodes, (CONFIRM, every, (token, ttl, fence, settings))))
                notes += voted, confirmed

        def heard(number: int, node: int, answer: Reply | HoldfastError) -> bool:
            notes[number](node, answer)
            return False

        if posts:
            await self._background.ask(posts, 0.0, heard, meanwhile)

    def _missing_at(self, token: str, tally: Tally) -> tuple[list[int], Note, Note]:
        """Where a token is to be given again, and what to note of the vote and of its number."""
        there = self._whereabouts.get(token)
        if there is None:
            return [], _nothing, _nothing
        nodes = [n for n in self._all if n not in there or tally.answers.get(n) == 0]
        new = {node for node in nodes if node not in there}

        def voted(node: int, answer: Reply | HoldfastError) -> None:
            self.watch(node, answer)
            if node in new and not _is_yes(answer) and not isinstance(answer, OutcomeUnknown):
                self._is_gone(token, node)

        def confirmed(node: int, answer: Reply | HoldfastError) -> None:
            if node in new and _is_yes(answer) and there.get(node) is UNSURE:
                there[node] = THERE

        # Noted first, looked at second: a release does these two in the other order. Where it finds
        # the token noted it takes it back, also if it overtakes the vote, which is on another road.
        there.update(dict.fromkeys(nodes, UNSURE))
        if token in self._leaving or self._whereabouts.get(token) is not there:
            for node in new:
                self._is_gone(token, node)
            nodes = []
        return nodes, voted, confirmed

    def _outcome(self, script: Script, tally: Tally) -> Reply | HoldfastError:
        if script is RELEASE and tally.failed:
            return self._unheard(tally)
        try:
            return self._answer(script, tally)
        except HoldfastError as error:
            return error

    async def _release(
        self, request: Request, timeout: float, enough: Callable[[Tally], bool]
    ) -> Tally:
        posts, tally = self._question(request, enough)
        await self._nodes.ask(posts, timeout, tally.heard)
        return tally

    def _leave(self, request: Request, tally: Tally) -> None:
        """See to the nodes that failed to release a token, and soon to those that are slow."""
        token = request[2][0]
        for node in tally.failed:
            self._see_to(node, request)
        if token in self._whereabouts and not tally.complete:
            self._released[token] = request
            if not self._sweeps:
                self._sweeps = True
                self._later(SLOW, self._sweep)

    def _sweep(self) -> None:
        """See to what was not released everywhere before the last sweep, and still is not."""
        if self._closed:
            return
        for token, request in self._released_before.items():
            for node in list(self._whereabouts.get(token, ())):
                self._see_to(node, request)
        self._released_before, self._released = self._released, {}
        self._sweeps = bool(self._released_before)
        if self._sweeps:
            self._later(SLOW, self._sweep)

    async def _adopt(self, request: Request, timeout: float) -> Reply:
        """Take an exported lease over on a majority; asked again, it goes on where it was.

        What it got stays until its token is released: it is the only copy of the lease.
        """
        fence, votes = await self.elect(request, timeout, lambda: timeout)
        if not fence and votes.refused <= self._spare:
            raise self._unheard(votes)
        if fence:
            _, keys, (_, ttl, exported, settings) = request
            for node in votes.failed:  # it may still be the exporter's there
                self._see_to(node, (RELEASE, keys, (exported, ttl, "0", settings)))
        return fence

    def _see_to(self, node: int, request: Request) -> None:
        """Have the token of a request taken back on a node, until it answers."""
        _, keys, (token, ttl, _, settings, *_) = request
        self._whereabouts.setdefault(token, {})[node] = UNSURE
        self._clean_up((RELEASE, keys.at(node), (token, ttl, TOMBSTONE_MS, settings)))

    # Whom to ask, and what to make of it

    def _question(
        self, request: Request, enough: Callable[[Tally], bool] | None = None
    ) -> tuple[list[Post], Tally]:
        script, keys, args = request
        if script is INSPECT:
            return [(self._all, request)], Tally(self._all, self._is_known, self.watch)
        there = self._whereabouts.get(args[0])
        if script is RELEASE and there is not None:
            self._leaving.add(args[0])
        if keys.node is None:
            nodes = list(self._all if there is None else there)
        else:
            nodes = [keys.node] if there and keys.node in there else []
        if script is RENEW:
            tally: Tally = _Yes(nodes, self._is_kept, self, _nothing)
            tally.note = self._not_there(args[0])
            return [(nodes, request)], tally
        if args[2] != "0" or there is None or UNSURE not in there.values():
            return [(nodes, request)], self._ending(request, nodes, enough, [])
        # A tombstone is left where a request may yet arrive by another road.
        unsure = [node for node in nodes if there.get(node) is UNSURE]
        sure = [node for node in nodes if node not in unsure]
        buried = script, keys, (*args[:2], TOMBSTONE_MS, *args[3:])
        return [(sure, request), (unsure, buried)], self._ending(request, nodes, enough, unsure)

    def _not_there(self, token: str) -> Note:
        """Note where a token that is asked after turns out not to be."""

        def note(node: int, answer: Reply | HoldfastError) -> None:
            there = self._whereabouts.get(token)
            if there is not None and answer == 0 and there.get(node) is THERE:
                there.pop(node, None)

        return note

    def _ending(
        self,
        request: Request,
        nodes: list[int],
        enough: Callable[[Tally], bool] | None,
        buried: list[int],
    ) -> Tally:
        """Count those who have released a token, and note where it is not any more.

        Where it turns out meanwhile that it may yet arrive, it is buried too.
        """
        token, _, tombstone, *_ = request[2]

        def gone(node: int) -> None:
            there = self._whereabouts.get(token)
            unsure = there is not None and there.get(node) is UNSURE
            if unsure and tombstone == "0" and node not in buried:
                self._see_to(node, request)
            else:
                self._is_gone(token, node)

        def note(node: int, answer: Reply | HoldfastError) -> None:
            if not isinstance(answer, HoldfastError):
                gone(node)

        if enough is None:
            tally = Tally(nodes, _is_complete, self.watch)
        else:
            tally = _Yes(nodes, enough, self, gone)
        tally.note = note
        return tally

    def _is_gone(self, token: str, node: int) -> None:
        """Note that a token is not on a node any more."""
        there = self._whereabouts.get(token)
        if there is not None:
            there.pop(node, None)
            if not there:
                self.forget(token)

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
        holders = Counter(map(_holder, _answers(tally)))
        return max(holders.values(), default=0) >= self.majority

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
        if self._missing(tally) > self._spare:
            return 0
        raise self._unheard(tally)

    def _holder(self, tally: Tally) -> Reply:
        answers = _answers(tally)
        if len(answers) < self.majority:
            raise self._unheard(tally)
        token, times = Counter(map(_holder, answers)).most_common(1)[0]
        if not token or times < self.majority:
            return []
        lefts = sorted(answer[1] for answer in answers if _holder(answer) == token)
        fences = [answer[2] for answer in answers if _holder(answer) == token]
        # It is held until it is gone from so many nodes that no majority is left.
        return [token, lefts[-self.majority], Counter(fences).most_common(1)[0][0]]

    # Nodes that fail

    def lacks_majority(self, tally: Tally) -> bool:
        """Whether so many nodes failed that no majority is left."""
        return len(tally.failed) > self._spare

    def _unheard(self, tally: Tally) -> HoldfastError:
        """Say that, and of which nodes, too few were heard."""
        nodes = self.outcomes(tally)
        said = "; ".join(f"{name}: {what}" for name, what in nodes.items())
        message = f"no majority of the {len(nodes)} nodes answered ({said})"
        if tally.given or any(isinstance(e, OutcomeUnknown) for e in tally.failed.values()):
            return OutcomeUnknown(message)
        return NoQuorum(message, nodes=nodes)

    def outcomes(self, tally: Tally) -> dict[str, str]:
        """What came of asking each node, in words."""
        return {name: _in_words(tally, node) for node, name in enumerate(self.names)}

    def watch(self, node: int, answer: Reply | HoldfastError) -> None:
        """Report a node that begins to fail, and one that is back."""
        if self._closed:  # it is us who do not hear it any more
            return
        if isinstance(answer, HoldfastError):
            if node not in self.failing and not isinstance(answer, Unconnected):
                self.failing.add(node)
                self._report(Event("node_failed", "", 0, str(answer)))
        elif self.failing and node in self.failing:
            self.failing.discard(node)
            self._report(Event("node_back", "", 0, f"{self.names[node]} answers again"))


def _answers(tally: Tally) -> list[list[bytes]]:
    return [answer for answer in tally.answers.values() if isinstance(answer, list)]


def _holder(answer: list[bytes]) -> bytes:
    return answer[0] if answer else b""


def _is_yes(answer: Reply | HoldfastError) -> bool:
    return type(answer) is int and answer > 0


def _is_complete(tally: Tally) -> bool:
    return tally.complete


def _in_words(tally: Tally, node: int) -> str:
    if node in tally.failed:
        return str(tally.failed[node])
    if node in tally.given:
        return "yes"
    if node in tally.answers:
        return "held by another" if tally.answers[node] else "no"
    return "has not answered yet" if node in tally.nodes else "does not have it"


def _settled(*_: object) -> bool:
    return True


def _nothing(*_: object) -> None:
    """Nobody is to be told."""
