"""Rounds: one request to several nodes, their replies as they arrive, and what follows from them.

Each kind of request is a class: to which nodes it goes, when enough replies have arrived, and what
they amount to. A node says yes with a number above 0, no with 0, with an empty list (it does not
have the key), or with the holder of the lock.

Replies also arrive when a round is over, and in other threads. Each is noted (`TokenLocations`)
whenever it arrives. So code that iterates over the replies of a round iterates over a copy.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias, cast

from holdfast.core.spec import LOST_TOMBSTONE, TOMBSTONE_MS
from holdfast.core.token_locations import ASKED, UNSURE, is_yes
from holdfast.errors import ConfigurationError, HoldfastError, NoQuorum, OutcomeUnknown
from holdfast.keys import keys_of
from holdfast.port import Interrupted, Quarantined
from holdfast.scripts import CONFIRM, VOTE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.core.quorum import Quorum
    from holdfast.port import Post, Reply, Request

Enough: TypeAlias = "Callable[[Round], bool]"
"""Whether the caller has to wait for no further reply."""


class Round:
    """What all kinds of requests have in common."""

    __slots__ = ("failed", "locations", "no", "nodes", "posts", "quorum", "yes")

    def __init__(self, quorum: Quorum, posts: Sequence[Post]) -> None:
        self.quorum = quorum
        self.locations = quorum.locations  # in a forked child the quorum gets new ones
        self.posts = posts
        self.nodes = [node for nodes, _ in posts for node in nodes]
        self.yes: dict[int, int] = {}
        self.no: dict[int, Reply] = {}
        self.failed: dict[int, HoldfastError] = {}
        """Errors: no connection, no reply, a refusal, or a quarantine."""

    def on_reply(self, _post: int, node: int, reply: Reply | HoldfastError) -> bool:
        """Handle what came of one of the posts at one node; return whether that is enough."""
        if is_yes(reply):
            self.yes[node] = reply  # type: ignore[assignment]  # a number
        elif isinstance(reply, HoldfastError):
            self.failed[node] = reply
        else:
            self.no[node] = reply
        self.quorum.watch(node, reply)
        self._note(node, reply)
        return self._is_over()

    def _note(self, node: int, reply: Reply | HoldfastError) -> None:
        """Note what a reply says about where the token is."""

    def _is_over(self) -> bool:
        return self.is_complete()

    def is_complete(self) -> bool:
        """Whether no reply is missing."""
        return len(self.yes) + len(self.no) + len(self.failed) == len(self.nodes)

    def has_reply_of(self, node: int) -> bool:
        """Whether it is known what came of asking this node."""
        return node in self.yes or node in self.no or node in self.failed

    def has_majority(self) -> bool:
        """Whether a majority of all nodes said yes."""
        return len(self.yes) >= self.quorum.majority

    def result(self) -> Reply:
        """Return what a single server would have replied.

        Raises:
            NoQuorum, OutcomeUnknown: too few nodes replied to say.
        """
        if self.has_majority():
            return max(self.yes.values())
        if self._not_there() > self.quorum.spare:
            # Only if every node without the token has just replied that it has no key.
            empty = [reply for reply in list(self.no.values()) if reply == []]
            return [] if len(empty) == self._not_there() else 0
        raise self.no_majority()

    def _not_there(self) -> int:
        """Count the nodes that are known not to have the token."""
        return len(self.quorum.names) - len(self.nodes) + len(self.no)

    @property
    def holders(self) -> list[Reply]:
        """The replies with a holder: [token, ms, …]; of an inspection also [] for none."""
        return [reply for reply in list(self.no.values()) if isinstance(reply, list)]

    def agrees_on_holder(self) -> bool:
        """Whether a majority names the same holder, or none."""
        holders = Counter(map(_token_in, self.holders))
        return any(times >= self.quorum.majority for times in holders.values())

    def no_majority(self) -> HoldfastError:
        """Make the error that says that too few nodes replied, and which."""
        outcomes = self.outcomes()
        message = f"no majority of the {len(outcomes)} nodes answered ({in_one_line(outcomes)})"
        failures = list(self.failed.values())
        unknown = any(isinstance(error, OutcomeUnknown) for error in failures)
        if self.yes or unknown or not self.is_complete():
            return OutcomeUnknown(message)
        return NoQuorum(message, nodes=outcomes)

    def outcomes(self) -> dict[str, str]:
        """Say in words what came of asking each node."""
        return {name: self._outcome(node) for node, name in enumerate(self.quorum.names)}

    def _outcome(self, node: int) -> str:
        if node in self.failed:
            return str(self.failed[node])
        if node in self.yes:
            return "yes"
        if node in self.no:
            return "held by another" if self.no[node] else "no"
        return "has not answered yet" if node in self.nodes else "does not have it"


class Vote(Round):
    """Asks every node to give the lock to a token."""

    __slots__ = ("_expected", "_request")

    def __init__(self, quorum: Quorum, request: Request) -> None:
        super().__init__(quorum, [(quorum.all, request)])
        self._request = request
        self._expected = self.locations.expect(request[2][0], ASKED)

    def _note(self, node: int, reply: Reply | HoldfastError) -> None:
        self.locations.on_vote(self._request, self._expected, node, reply)

    def _is_over(self) -> bool:
        missed = len(self.failed) + len(self.no)
        return self.has_majority() or missed > self.quorum.spare

    def has_too_many_failures(self) -> bool:
        """Whether so many nodes failed that no majority is left."""
        return len(self.failed) > self.quorum.spare

    def is_refused_for_good(self) -> bool:
        """Whether so many nodes will always refuse that no majority is left."""
        failures = list(self.failed.values())
        refusals = [error for error in failures if isinstance(error, ConfigurationError)]
        return len(refusals) > self.quorum.spare

    def was_interrupted(self) -> bool:
        """Whether replies were not read, which says nothing about the nodes."""
        return any(isinstance(error, Interrupted) for error in list(self.failed.values()))

    def quarantine(self) -> Quarantined | None:
        """Return the quarantine at whose end a majority may vote.

        None if no quarantine prevents a majority, or if nodes would still be missing at its end.
        """
        failures = list(self.failed.values())
        ends = [error for error in failures if isinstance(error, Quarantined)]
        ends.sort(key=lambda error: error.seconds)
        needed = len(failures) - self.quorum.spare
        return ends[needed - 1] if 0 < needed <= len(ends) else None


class Confirmation(Round):
    """Raises the number of a token to the same fence wherever the token may be."""

    __slots__ = ("_fence",)

    def __init__(self, quorum: Quorum, vote: Request, fence: int) -> None:
        _, keys, (token, ttl, _, settings, *_) = vote
        request = CONFIRM, keys, (token, ttl, str(fence), settings)
        super().__init__(quorum, [(list(quorum.locations.of(token) or ()), request)])
        self._fence = fence

    def _is_over(self) -> bool:
        numbers = list(self.yes.values())
        if len(numbers) >= self.quorum.majority and max(numbers) > self._fence:
            return True  # another confirmation is needed
        possible = len(self.nodes) - len(self.failed) - len(self.no)
        return numbers.count(self._fence) >= self.quorum.majority or possible < self.quorum.majority


class Renewal(Round):
    """Renews a token wherever it may be."""

    __slots__ = ("_token",)

    def __init__(self, quorum: Quorum, request: Request) -> None:
        self._token = request[2][0]
        there = quorum.locations.of(self._token)
        super().__init__(quorum, [(list(quorum.all if there is None else there), request)])

    def _note(self, node: int, reply: Reply | HoldfastError) -> None:
        self.locations.on_renewal(self._token, node, reply)

    def _is_over(self) -> bool:
        lost = self._not_there() > self.quorum.spare
        return lost or self.has_majority() or self.is_complete()


class Restoration(Round):
    """Gives a token that was just renewed to the nodes that do not have it.

    They count from the next renewal on, and not for this one: the holder relies on a majority
    having had the token all the time. No caller waits for the replies.
    """

    __slots__ = ("_new", "_token")

    def __init__(self, renewal: Renewal, request: Request) -> None:
        _, keys, (self._token, ttl, settings, _) = request
        nodes, self._new = renewal.locations.restore(self._token)
        fence, every = str(max(renewal.yes.values())), keys_of(keys[0])
        vote = VOTE, every, (self._token, ttl, fence, settings, "")
        confirmation = CONFIRM, every, (self._token, ttl, fence, settings)
        posts: list[Post] = [(nodes, vote), (nodes, confirmation)] if nodes else []
        super().__init__(renewal.quorum, posts)

    def on_reply(self, post: int, node: int, reply: Reply | HoldfastError) -> bool:
        """Note where the vote was refused."""
        self.quorum.watch(node, reply)
        refused = not is_yes(reply) and not isinstance(reply, OutcomeUnknown)
        if post == 0 and node in self._new and refused:
            self.locations.note_gone(self._token, node)
        return False


class Release(Round):
    """Removes a token wherever it may be.

    It leaves a tombstone where a request may still arrive on another connection.
    """

    __slots__ = ("_enough", "_request", "_tombstones", "token")

    def __init__(self, quorum: Quorum, request: Request, enough: Enough) -> None:
        script, keys, (token, ttl, tombstone, settings) = request
        self.token = token
        there = quorum.locations.leaving(token, lost=tombstone == LOST_TOMBSTONE)
        if keys.node is None:
            nodes = list(quorum.all if there is None else there)
        else:
            nodes = [keys.node] if there and keys.node in there else []
        posts: list[Post] = [(nodes, request)]
        self._tombstones = [] if tombstone == "0" else nodes
        if tombstone == "0" and there is not None and UNSURE in there.values():
            self._tombstones = [node for node in nodes if there.get(node) == UNSURE]
            others = [node for node in nodes if node not in self._tombstones]
            buried = script, keys, (token, ttl, TOMBSTONE_MS, settings)
            posts = [(others, request), (self._tombstones, buried)]
        super().__init__(quorum, posts)
        self._request = request
        self._enough = enough

    def _note(self, node: int, reply: Reply | HoldfastError) -> None:
        if not isinstance(reply, HoldfastError):
            self.locations.on_release(self._request, node, tombstone=node in self._tombstones)

    def _is_over(self) -> bool:
        return self._enough(self)

    def clean_up(self) -> None:
        """Have the background release the token on nodes that failed, and on slow ones later."""
        complete = self.is_complete()  # first: a node that fails after this is cleaned up later
        self.locations.leave(self._request, list(self.failed), complete=complete)


class Eviction(Round):
    """Takes a lock from its holder, on every node."""

    def __init__(self, quorum: Quorum, request: Request) -> None:
        super().__init__(quorum, [(quorum.all, request)])

    def result(self) -> Reply:
        """Return the number of an eviction if the holder has no majority any more; 0 for none."""
        too_few = len(self.yes) + len(self.no) < self.quorum.majority
        if too_few and (self.yes or len(self.no) <= self.quorum.spare):
            raise self.no_majority()
        return max(self.yes.values(), default=0)


class Inspection(Round):
    """Asks every node for the holder."""

    def __init__(self, quorum: Quorum, request: Request) -> None:
        super().__init__(quorum, [(quorum.all, request)])

    def _is_over(self) -> bool:
        return self.is_complete() or self.agrees_on_holder()

    def result(self) -> Reply:
        """Return the holder that a majority names; empty if there is none."""
        replies, majority = self.holders, self.quorum.majority
        if len(replies) < majority:
            raise self.no_majority()
        [(token, times)] = Counter(map(_token_in, replies)).most_common(1)
        if not token or times < majority:
            return []
        named = [reply for reply in replies if _token_in(reply) == token]
        lefts = sorted(reply[1] for reply in named)
        [(fence, _)] = Counter(reply[2] for reply in named).most_common(1)
        # It is held until it is gone from so many nodes that no majority is left.
        return [token, lefts[-majority], fence]


def in_one_line(outcomes: Mapping[str, str]) -> str:
    """List the outcome of each node; no node is named twice."""
    return "; ".join(text if name in text else f"{name}: {text}" for name, text in outcomes.items())


def _token_in(reply: Reply) -> bytes:
    return cast("bytes", reply[0]) if reply else b""
