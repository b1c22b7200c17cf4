"""Where is my token? On which of several nodes each one is, or may be.

What is asked of a lease is asked there, and giving it back is not over before it is gone from all
of them. Answers come when they come, also when nobody waits for them any more, and each is noted
here. A node that fails to answer is seen to in the background until it does, or until the token has
expired there; one that is only slow is given a second or two first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.spec import LOST_TOMBSTONE, TOMBSTONE_MS
from holdfast.core.tally import is_no, is_yes, nothing
from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.scripts import ADOPT, RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.core.renewer import Errand
    from holdfast.core.tally import Note, Tally, Yes
    from holdfast.port import Reply, Request

SLOW = 1.0
"""Seconds between two sweeps: who has not answered a release for a whole one is told again."""

ASKED, THERE, UNSURE, THEIRS = "asked", "there", "unsure", "theirs"
"""Of a token on a node: on its way; there; perhaps there, or yet to arrive by another road; left to
whoever adopts it."""


class _Places(dict[int, str]):
    """The nodes where a token is, or may be, and how sure that is."""

    lost = False
    """Its lease was lost: where it arrives late, the lock delay begins."""


class Whereabouts:
    """Of all our tokens.

    `clean_up` has the background carry out a request, until it is done or too late to matter;
    `later` has it do something after so many seconds. `longest` is the ttl, in milliseconds, that
    no lock exceeds.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        clean_up: Callable[[Request], None],
        later: Callable[[float, Callable[[], None]], Errand | None],
        longest: str,
    ) -> None:
        self._all = nodes
        self._asked = dict.fromkeys(nodes, ASKED)
        self._clean_up = clean_up
        self._later = later
        self._longest = longest
        self._tokens: dict[str, _Places] = {}
        self._missing: set[tuple[str, int]] = set()
        """The tokens, and the nodes on which a renewal did not find them. The thread that acquired
        a lock reads a late answer to its vote only with its next request: until then the node
        counts as asked. Without this, a node that always answers last is never given the lease."""
        self._leaving: set[str] = set()
        """The tokens that are being given back."""
        self._released: dict[str, Request] = {}
        """Of tokens that were released, and not yet by every node, the request."""
        self._released_before: dict[str, Request] = {}
        self._next_sweep: Errand | None = None
        self._closed = False

    def close(self) -> None:
        """Leave alone what slow nodes were told and have not answered: most do it all the same."""
        self._closed = True

    def disconnect(self) -> None:
        """Send nothing from now on: in a forked child, all these tokens are the parent's."""
        self._clean_up, self._later = nothing, nothing

    def of(self, token: str) -> dict[int, str] | None:
        """The nodes where a token is, or may be, and how sure that is; None if it is not ours.

        Other threads may change it at any time.
        """
        return self._tokens.get(token)

    def expect(self, token: str) -> None:
        """Note that a token will stand in the queues of all nodes."""
        self._tokens[token] = _Places(dict.fromkeys(self._all, THERE))

    def note_leaving(self, token: str) -> None:
        """Note that a token is being given back."""
        self._leaving.add(token)

    def note_gone(self, token: str, node: int) -> None:
        """Note that a token is not on a node any more."""
        there = self._tokens.get(token)
        if there is not None:
            there.pop(node, None)
            if not there:
                self.forget_if_nowhere(token)

    def forget_if_nowhere(self, token: str) -> None:
        """Care no more for a token that turned out to be on no node."""
        if not self._tokens.get(token, True):
            there = self._tokens.pop(token, _Places())
            if there:  # another thread has just noted that it is somewhere
                self._tokens.setdefault(token, there).update(there)
        # Of one that is not known only that: another thread may be noting that it is somewhere.
        if token not in self._tokens:
            self._forget_leaving(token)

    def forget(self, token: str) -> None:
        """Care for a token no more: it is another's, or expires by itself."""
        self._tokens.pop(token, None)
        self._forget_leaving(token)

    def _forget_leaving(self, token: str) -> None:
        self._leaving.discard(token)
        self._released.pop(token, None)
        if self._missing:
            self._missing.difference_update((token, node) for node in self._all)

    def hand_on(self, token: str) -> None:
        """Leave a token to whoever adopts it, also where it turns out later to have arrived."""
        there = self._tokens.get(token, _Places())
        there.update(dict.fromkeys(self._all, THEIRS))
        self.forget(token)

    # What to note of answers, also of those that come late

    def asking(self, request: Request) -> tuple[Callable[[int], None], Note]:
        """Note that all nodes are asked for a token; return what notes a yes, and what the rest."""
        _, keys, args = request
        token, waiter = args[0], "".join(args[4:])
        there = self._tokens.get(token)
        if there is None:
            self._tokens[token] = there = _Places(self._asked)
        else:  # an adoption that is tried again: what came of the last try may come yet
            there.update({node: UNSURE for node in self._all if there.get(node) is not THERE})

        def is_there(node: int, state: str = THERE) -> None:
            over = self._tokens.get(token) is not there
            known = there.get(node)  # looked at second: who hands it on notes that first
            if known is THEIRS:
                return
            if known is not UNSURE:  # as when it is being given again
                there[node] = state
            if over or known is None:
                # It was given up, and this came, or will come, later.
                self.see_to(node, request, lost=there.lost)

        def note(node: int, answer: Reply | HoldfastError) -> None:
            unknown = isinstance(answer, OutcomeUnknown)
            if waiter and (unknown or isinstance(answer, list)):
                self._note_queued(node, (RELEASE, keys, (waiter, *args[1:])), unsure=unknown)
            if unknown or is_yes(answer):
                is_there(node, UNSURE if unknown else THERE)
            elif there.get(node) is ASKED:
                self.note_gone(token, node)

        return is_there, note

    def _note_queued(self, node: int, request: Request, *, unsure: bool) -> None:
        """Note that a token is in a node's queue, or may yet be put there."""
        stands = self._tokens.get(request[2][0], _Places())
        if node not in stands:  # it has left meanwhile, and this came after that
            self.see_to(node, request)
        elif unsure:
            stands[node] = UNSURE

    def renewing(self, token: str) -> Note:
        """Note where a token that is asked after turns out not to be."""

        def note(node: int, answer: Reply | HoldfastError) -> None:
            there = self._tokens.get(token)
            if there is None or not is_no(answer):
                return
            if there.get(node) is THERE:
                there.pop(node, None)
                if token in self._leaving:  # the release was quicker: its answer is not read
                    self.forget_if_nowhere(token)
                return
            self._missing.add((token, node))
            # Noted first, looked at second: who forgets the token does these two the other way.
            if self._tokens.get(token) is not there:
                self._missing.discard((token, node))

        return note

    def giving_again(self, token: str) -> tuple[list[int], Note]:
        """Where a token is to be given again, and what to note of the vote.

        It stays unsure there: a renewal that was sent before the vote may be refused after it, and
        would be taken to say that the token is gone.
        """
        there = self._tokens.get(token)
        if there is None:
            return [], nothing
        missing = {node for node in self._all if (token, node) in self._missing}
        nodes = [node for node in self._all if node not in there or node in missing]
        self._missing.difference_update((token, node) for node in nodes)
        new = {node for node in nodes if node not in there}

        def voted(node: int, answer: Reply | HoldfastError) -> None:
            if node in new and not is_yes(answer) and not isinstance(answer, OutcomeUnknown):
                self.note_gone(token, node)

        # Noted first, looked at second: a release does these two in the other order. Where it finds
        # the token noted it takes it back, also if it overtakes the vote, which is on another road.
        there.update(dict.fromkeys(nodes, UNSURE))
        if token in self._leaving or self._tokens.get(token) is not there:
            for node in new:
                self.note_gone(token, node)
            nodes = []
        return nodes, voted

    def ending(self, request: Request, buried: Sequence[int]) -> tuple[Callable[[int], None], Note]:
        """What to note of a release, of a yes and of the rest, that leaves tombstones on some.

        Where it turns out meanwhile that the token may yet arrive, it is buried too.
        """
        token, _, tombstone, *_ = request[2]
        if token in self._tokens and tombstone == LOST_TOMBSTONE:
            self._tokens[token].lost = True

        def gone(node: int) -> None:
            there = self._tokens.get(token)
            unsure = there is not None and there.get(node) is UNSURE
            if unsure and tombstone == "0" and node not in buried:
                self.see_to(node, request)
            else:
                self.note_gone(token, node)

        def note(node: int, answer: Reply | HoldfastError) -> None:
            if not isinstance(answer, HoldfastError):
                gone(node)

        return gone, note

    # Until it is gone

    def see_to(self, node: int, request: Request, *, lost: bool = False) -> None:
        """Have the token of a request taken back on a node by the background."""
        script, keys, (token, ttl, tombstone, settings, *_) = request
        lost = lost or (script is RELEASE and tombstone == LOST_TOMBSTONE)
        if script is ADOPT:  # it is there for as long as what was exported, which may be extended
            ttl = self._longest
        self._leaving.add(token)  # which a late refusal of its vote may have had forgotten
        self._note_unsure(token, [node])
        tombstone = LOST_TOMBSTONE if lost else TOMBSTONE_MS
        self._clean_up((RELEASE, keys.at(node), (token, ttl, tombstone, settings)))

    def _note_unsure(self, token: str, nodes: Iterable[int]) -> None:
        unsure = dict.fromkeys(nodes, UNSURE)
        self._tokens.setdefault(token, _Places()).update(unsure)
        # Noted first, looked at second: who forgets it does these two in the other order.
        self._tokens.setdefault(token, _Places()).update(unsure)

    def abandon(self, request: Request) -> None:
        """Have the token of a request taken back wherever it may be."""
        for node in list(self._tokens.get(request[2][0], ())):
            self.see_to(node, request)

    def leave(self, request: Request, tally: Tally) -> None:
        """See to the nodes that failed to release a token, and soon to those that are slow."""
        token, is_complete = request[2][0], tally.complete  # before its failures are looked at
        for node in list(tally.failed):
            self.see_to(node, request)
        self.forget_if_nowhere(token)
        if token in self._tokens and not is_complete:
            self._released[token] = request
            self._sweep_later()

    def _sweep_later(self) -> None:
        """Have what was released looked at again, unless that will be."""
        if self._next_sweep is None or not self._next_sweep.live:
            self._next_sweep = self._later(SLOW, self._sweep)

    def _sweep(self) -> None:
        """See to what was not released everywhere before the last sweep, and still is not."""
        if self._closed:
            return
        for request in list(self._released_before.values()):
            self.abandon(request)
        self._released_before, self._released = self._released, {}
        if self._released_before or self._released:
            self._sweep_later()

    def end_export(self, request: Request, votes: Yes) -> None:
        """Take what was exported back from nodes that are not the adopter's, heard now or later.

        It may be there, or yet to arrive there. Who has not answered is seen to soon.
        """
        _, keys, (_, _, exported, settings) = request
        its_end = RELEASE, keys, (exported, self._longest, TOMBSTONE_MS, settings)
        noted, note = votes.noted, votes.note

        def adopted(node: int) -> None:
            noted(node)
            self.note_gone(exported, node)

        def also(node: int, answer: Reply | HoldfastError) -> None:
            note(node, answer)
            if is_yes(answer):
                self.note_gone(exported, node)
            else:
                self.see_to(node, its_end)

        votes.noted, votes.note = adopted, also
        # Noted first, looked at second: an answer that comes now does these two the other way.
        self._note_unsure(exported, self._all)
        for node in list(votes.given):
            self.note_gone(exported, node)
        for node in list(votes.answers):
            self.see_to(node, its_end)
        self.leave(its_end, votes)
