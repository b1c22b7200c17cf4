"""Rounds: one request to several nodes, and the result of their replies.

Each kind of request is a class. It determines to which nodes the request goes, when enough replies
have arrived, and the result. A node replies yes with a number above 0. It replies no with 0, with
an empty list (it does not have the key), or with the holder of the lock.

Replies may arrive after a round is over, and in other threads. Every reply is recorded in
`TokenLocations` when it arrives. So code that iterates over the replies of a round uses a copy.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, TypeAlias, cast

from holdfast.core.spec import LOST_TOMBSTONE, TOMBSTONE_MS
from holdfast.core.token_locations import REQUESTED, UNSURE, is_yes
from holdfast.errors import ConfigurationError, HoldfastError, NoQuorum, OutcomeUnknown
from holdfast.keys import keys_of
from holdfast.port import Interrupted, Quarantined
from holdfast.scripts import CONFIRM, VOTE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.core.quorum import Quorum
    from holdfast.port import Post, Reply, Request

Enough: TypeAlias = "Callable[[Round], bool]"
"""Returns whether the caller needs no further reply."""


class Round:
    """One request to several nodes. The base class of all kinds."""

    __slots__ = ("failed", "locations", "no", "nodes", "posts", "quorum", "yes")

    def __init__(self, quorum: Quorum, posts: Sequence[Post]) -> None:
        self.quorum = quorum
        self.locations = quorum.locations  # a forked child replaces those of the quorum
        self.posts = posts
        self.nodes = [node for nodes, _ in posts for node in nodes]
        self.yes: dict[int, int] = {}
        self.no: dict[int, Reply] = {}
        self.failed: dict[int, HoldfastError] = {}
        """Errors: no connection, no reply, a refusal, or a quarantine."""

    def on_reply(self, _post: int, node: int, reply: Reply | HoldfastError) -> bool:
        """Handle the reply or error of one node; return whether the round is over."""
        if type(reply) is int and reply > 0:  # `is_yes`, inlined
            self.yes[node] = reply
        elif isinstance(reply, HoldfastError):
            self.failed[node] = reply
        else:
            self.no[node] = reply
        self.quorum.note_health(node, reply)
        self._note(node, reply)
        return self._is_over()

    def _note(self, node: int, reply: Reply | HoldfastError) -> None:
        """Record what a reply shows about the location of the token."""

    def _is_over(self) -> bool:
        return self.is_complete()

    def is_complete(self) -> bool:
        """Whether there is a reply or an error from every node."""
        return len(self.yes) + len(self.no) + len(self.failed) == len(self.nodes)

    def has_reply_of(self, node: int) -> bool:
        """Whether there is a reply or an error from this node."""
        return node in self.yes or node in self.no or node in self.failed

    def has_majority(self) -> bool:
        """Whether a majority of all nodes voted yes."""
        return len(self.yes) >= self.quorum.majority

    def result(self) -> Reply:
        """Return what a single server would have replied.

        Raises:
            NoQuorum, OutcomeUnknown: too few nodes replied.
        """
        if self.has_majority():
            return max(self.yes.values())
        if self._not_there() > self.quorum.spare:
            # [] (no key) only if every node without the token has just replied so.
            empty = [reply for reply in list(self.no.values()) if reply == []]
            return [] if len(empty) == self._not_there() else 0
        raise self.no_majority()

    def _not_there(self) -> int:
        """Count the nodes that are known not to have the token."""
        return len(self.quorum.names) - len(self.nodes) + len(self.no)

    @property
    def holders(self) -> list[Reply]:
        """The replies that name a holder: [token, ms, …]; in an inspection also [] for none."""
        return [reply for reply in list(self.no.values()) if isinstance(reply, list)]

    def agrees_on_holder(self) -> bool:
        """Whether a majority names the same holder, or no holder."""
        holders = Counter(map(_token_in, self.holders))
        return any(times >= self.quorum.majority for times in holders.values())

    def no_majority(self) -> HoldfastError:
        """Return the error that too few nodes replied, with the outcome of each node."""
        outcomes = self.outcomes()
        message = f"no majority of the {len(outcomes)} nodes replied ({format_outcomes(outcomes)})"
        failures = list(self.failed.values())
        unknown = any(isinstance(error, OutcomeUnknown) for error in failures)
        if self.yes or unknown or not self.is_complete():
            return OutcomeUnknown(message)
        return NoQuorum(message, nodes=outcomes)

    def outcomes(self) -> dict[str, str]:
        """Describe the outcome of each node, by its name."""
        names = self.quorum.names
        return {name: without_name(self._outcome(node), name) for node, name in enumerate(names)}

    def _outcome(self, node: int) -> str:
        if node in self.failed:
            return str(self.failed[node])
        if node in self.yes:
            return "yes"
        if node in self.no:
            return "held by another" if self.no[node] else "no"
        return "has not replied yet" if node in self.nodes else "does not have it"


class Vote(Round):
    """Requests the vote of every node for a token."""

    __slots__ = ("_expected", "_request")

    def __init__(self, quorum: Quorum, request: Request) -> None:
        super().__init__(quorum, [(quorum.all, request)])
        self._request = request
        self._expected = self.locations.expect(request[2][0], REQUESTED)

    def _note(self, node: int, reply: Reply | HoldfastError) -> None:
        self.locations.on_vote(self._request, self._expected, node, reply)

    def _is_over(self) -> bool:
        missed = len(self.failed) + len(self.no)
        return self.has_majority() or missed > self.quorum.spare

    def has_too_many_failures(self) -> bool:
        """Whether too many nodes failed for a majority."""
        return len(self.failed) > self.quorum.spare

    def is_refused_permanently(self) -> bool:
        """Whether too many nodes refuse permanently for a majority."""
        failures = list(self.failed.values())
        permanent_errors = [error for error in failures if isinstance(error, ConfigurationError)]
        return len(permanent_errors) > self.quorum.spare

    def was_interrupted(self) -> bool:
        """Whether an interruption kept replies from being read. The nodes may be fine."""
        return any(isinstance(error, Interrupted) for error in list(self.failed.values()))

    def quarantine(self) -> Quarantined | None:
        """Return the quarantine at whose end a majority may vote.

        Returns None if no quarantine prevents a majority, or if too many other nodes fail anyway.
        """
        failures = list(self.failed.values())
        ends = [error for error in failures if isinstance(error, Quarantined)]
        ends.sort(key=lambda error: error.seconds)
        needed = len(failures) - self.quorum.spare
        return ends[needed - 1] if 0 < needed <= len(ends) else None


class Confirmation(Round):
    """Raises the number of a token to the same fence on every node that may have the token."""

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
    """Renews a token on every node that may have it."""

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
    """Sends a token that was just renewed to the nodes that do not have it.

    These nodes count from the next renewal on. They do not count for this one: the holder relies on
    a majority that has had the token all the time. No caller waits for the replies.
    """

    __slots__ = ("_new", "_token")

    def __init__(self, renewal: Renewal, request: Request) -> None:
        _, keys, (self._token, ttl, settings, _) = request
        nodes, self._new = renewal.locations.restore(self._token)
        fence, every = str(max(renewal.yes.values())), keys_of(keys.lock)
        vote = VOTE, every, (self._token, ttl, fence, settings, "")
        confirmation = CONFIRM, every, (self._token, ttl, fence, settings)
        posts: list[Post] = [(nodes, vote), (nodes, confirmation)] if nodes else []
        super().__init__(renewal.quorum, posts)

    def on_reply(self, post: int, node: int, reply: Reply | HoldfastError) -> bool:
        """Record the nodes that refused the vote."""
        self.quorum.note_health(node, reply)
        refused = not is_yes(reply) and not isinstance(reply, OutcomeUnknown)
        if post == 0 and node in self._new and refused:
            self.locations.note_gone(self._token, node)
        return False


class Release(Round):
    """Removes a token from every node that may have it.

    It leaves a tombstone on a node where a request with the token may still arrive on another
    connection.
    """

    __slots__ = ("_enough", "_request", "_tombstones", "token")

    def __init__(self, quorum: Quorum, request: Request, enough: Enough) -> None:
        script, keys, (token, ttl, tombstone, settings) = request
        self.token = token
        there = quorum.locations.begin_release(token, lost=tombstone == LOST_TOMBSTONE)
        if keys.node is None:
            nodes = list(quorum.all if there is None else there)
        else:
            nodes = [keys.node] if there and keys.node in there else []
        posts: list[Post] = [(nodes, request)]
        is_plain = tombstone in {"0", "0 seen"}
        self._tombstones = [] if is_plain else nodes
        if is_plain and there is not None and UNSURE in there.values():
            self._tombstones = [node for node in nodes if there.get(node) == UNSURE]
            others = [node for node in nodes if node not in self._tombstones]
            mode = tombstone.replace("0", TOMBSTONE_MS, 1)
            with_tombstone = script, keys, (token, ttl, mode, settings)
            posts = [(others, request), (self._tombstones, with_tombstone)]
        super().__init__(quorum, posts)
        self._request = request
        self._enough = enough

    def _note(self, node: int, reply: Reply | HoldfastError) -> None:
        if not isinstance(reply, HoldfastError):
            self.locations.on_release(self._request, node, tombstone=node in self._tombstones)

    def _is_over(self) -> bool:
        return self._enough(self)

    def clean_up(self) -> None:
        """Release the token in the background: now on nodes that failed, later on slow nodes."""
        # Read this before `failed`. A node that fails in between then counts as slow, and is still
        # cleaned up.
        complete = self.is_complete()
        self.locations.finish_release(self._request, list(self.failed), complete=complete)


class Eviction(Round):
    """Takes a lock from its holder, on every node."""

    def __init__(self, quorum: Quorum, request: Request) -> None:
        super().__init__(quorum, [(quorum.all, request)])

    def result(self) -> Reply:
        """Return a number above 0 if the holder lost the lock; 0 if it did not hold it."""
        too_few = len(self.yes) + len(self.no) < self.quorum.majority
        if too_few and (self.yes or len(self.no) <= self.quorum.spare):
            raise self.no_majority()
        return max(self.yes.values(), default=0)


class Inspection(Round):
    """Requests the holder from every node."""

    def __init__(self, quorum: Quorum, request: Request) -> None:
        super().__init__(quorum, [(quorum.all, request)])

    def _is_over(self) -> bool:
        return self.is_complete() or self.agrees_on_holder()

    def result(self) -> Reply:
        """Return the holder that a majority names; [] if there is none."""
        replies, majority = self.holders, self.quorum.majority
        if len(replies) < majority:
            raise self.no_majority()
        [(token, times)] = Counter(map(_token_in, replies)).most_common(1)
        if not token or times < majority:
            return []
        named = [reply for reply in replies if _token_in(reply) == token]
        lefts = sorted(reply[1] for reply in named)
        [(fence, _)] = Counter(reply[2] for reply in named).most_common(1)
        # The lock is held until the key has expired on too many nodes for a majority.
        return [token, lefts[-majority], fence]


def format_outcomes(outcomes: Mapping[str, str]) -> str:
    """Return the outcomes as one text, in which each node is named once."""
    return "; ".join(f"{name}: {text}" for name, text in outcomes.items())


def without_name(text: str, node: str) -> str:
    """Return what happened on a node without its name, which is shown beside it."""
    return re.sub(r"(?<!\w)" + re.escape(node) + r"(?!\w)", "it", text)


def _token_in(reply: Reply) -> bytes:
    return cast("bytes", reply[0]) if reply else b""
