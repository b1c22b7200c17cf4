"""A lock that several independent nodes keep: a token that a majority accepts holds it.

A token is sent to all nodes at once, and each decides by itself whether to give it the lock. Why a
majority of them is worth a lease:

- **Time.** The deadline counts from before the first request, as on one server. A majority that was
  reached too late is none. Only the rates of the servers' clocks matter.
- **Fences.** Each node numbers what it gives. If a majority gave the same number, that is the
  fence. If not, the highest number is written wherever the token is, until a majority has exactly
  one number. Any two majorities share a node. There the later lease was made after the earlier one
  had its number, and making one raises the number. So fences grow, whatever happens to clocks and
  expiry. All nodes are sent the same time as a hint, so that they usually give the same number.
- **Releasing.** `core.token_locations` knows on which nodes each token may be, and removes it from
  all of them. A lease that is renewed is given to the nodes that missed or lost it, so that nodes
  may fail and come back one after the other.

`core.rounds` has each kind of request; `core.quorum_acquire` waits and tries again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from holdfast.core.events import Event
from holdfast.core.quorum_acquire import acquire
from holdfast.core.rounds import (
    Confirmation,
    Eviction,
    Inspection,
    Release,
    Renewal,
    Restoration,
    Round,
    Vote,
)
from holdfast.core.spec import TOMBSTONE_MS, TTL_MAX, settings_of, to_ms
from holdfast.core.token_locations import PRESENT, TokenLocations
from holdfast.errors import HoldfastError
from holdfast.port import Interrupted, Unconnected
from holdfast.scripts import EVICT, INSPECT, RELEASE, RENEW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.hold import Grip, Hold
    from holdfast.core.rounds import Enough
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.keys import Keys
    from holdfast.port import Nodes, Post, Reply, Request
    from holdfast.scripts import Script

SHORTEST_ROUND = 0.001
"""Seconds to wait for votes, even if there is no time left."""

G = TypeVar("G", bound="Grip")


class Quorum:
    """The deployment in which several nodes vote about each lock."""

    is_quorum = True

    def __init__(
        self,
        nodes: Nodes,
        background: Nodes,
        report: Callable[[Event], None],
        longest_ttl: float = TTL_MAX,
    ) -> None:
        self.longest_ttl = longest_ttl
        self.names = nodes.names
        self.all = range(len(self.names))
        self.majority = len(self.names) // 2 + 1
        self.spare = len(self.names) - self.majority
        """How many nodes may be missing."""
        self._nodes = nodes
        self._background = background
        self._report = report
        self.locations = TokenLocations(self.all, _nothing, _nothing, nodes.new_locations_mutex())
        self._failing: set[int] = set()
        """The nodes that do not work, as far as is known."""
        self._closed = False

    def begin(self, session: Session) -> None:
        """Begin without tokens: for a new client, and in each forked child of its process."""
        self.locations.disconnect()  # a call that was under way at the fork still has them
        clean_up, later = session.cleanups.schedule_request, session.renewer.later
        mutex = self._nodes.new_locations_mutex()
        self.locations = TokenLocations(self.all, clean_up, later, mutex)
        self._port = session.port
        self._failing = set()
        self._closed = False

    def close(self) -> None:
        """Stop waiting for nodes that have not replied, and reporting them."""
        self._closed = True
        self.locations.close()

    async def acquire(self, session: Session, spec: LockSpec, timeout: float | None, grip: G) -> G:
        """Acquire a lock; as `core.acquire.acquire`."""
        return await acquire(session, self, spec, timeout, grip)

    def releasing(self, hold: Hold) -> Request:
        """Return the request that releases a lease.

        If the caller is not the thread or task that acquired it, its requests may reach a node
        before the vote does: a tombstone keeps the vote out.
        """
        tombstone = "0" if hold.actor is self._port.actor() else TOMBSTONE_MS
        return self.ending(hold.spec, hold.token, tombstone, hold.longest_ttl)

    def ending(self, spec: LockSpec, token: str, tombstone: str, longest: float = 0.0) -> Request:
        """Return the request that removes a token.

        A node that fails is retried for the ttl in the request: for the `longest` that it had.
        """
        ttl_ms = to_ms(longest) if longest > spec.ttl else spec.ttl_ms
        return RELEASE, spec.keys, (token, ttl_ms, tombstone, spec.settings)

    def settings(self, delay_ms: int, group: str) -> str:
        """Return the settings of a lock as the scripts read them: no node hands a lock over."""
        return settings_of(delay_ms, group, fair=False)

    def forget(self, token: str, node: int | None) -> None:
        """Forget a token, on one node or on all: it has been removed, or will expire there."""
        if node is None:
            self.locations.forget(token)
        else:
            self.locations.note_gone(token, node)

    # Acquiring

    async def vote(
        self, request: Request, timeout: float, left: Callable[[], float]
    ) -> tuple[int, Vote]:
        """Ask every node for its vote; return the fence, or 0, and the votes.

        There is a fence if a majority voted yes, and agreed on one number while there was time
        `left`. Otherwise the caller has to withdraw the token.
        """
        votes = Vote(self, request)
        # A node that no longer knows the script is sent the vote again while the caller waits. If
        # it did not wait at all, the node would receive the vote after the release of the token.
        await self._ask(votes, max(timeout, SHORTEST_ROUND))
        given = votes.yes
        while len(numbers := list(given.values())) >= self.majority:
            [(fence, agreed)] = Counter(numbers).most_common(1)
            if agreed >= self.majority:
                return fence, votes
            if left() <= 0:
                break
            confirmation = Confirmation(self, request, max(numbers))
            await self._ask(confirmation, min(timeout, left()))
            given = confirmation.yes
        return 0, votes

    async def withdraw(self, request: Request, timeout: float, *, hurry: bool) -> None:
        """Release a token that did not get the lock.

        Returns when the nodes that gave it the lock have replied; the others are cleaned up in the
        background. If no node gave it, `hurry` says not to wait for any reply. Otherwise one is
        awaited, so that errors can say more.
        """
        token, locations = request[2][0], self.locations
        there = locations.of(token)
        if not there:
            locations.forget(token)
            return
        have_it = [node for node, state in there.items() if state == PRESENT]
        waits = have_it or not hurry
        await self._release(
            request, timeout if waits else 0.0, lambda each: all(map(each.has_reply_of, have_it))
        )

    async def leave_queues(self, request: Request) -> None:
        """Remove a token from the queues of all nodes, without waiting for it."""
        if self.locations.of(request[2][0]) is not None:
            await self._release(request, 0.0, Round.is_complete)

    # As one server

    async def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script on the nodes that matter, and reply as one server would (`port.Call`)."""
        one_round = self._round((script, keys, args), _is_released)
        await self._ask(one_round, timeout)
        result = one_round.result()
        if isinstance(one_round, Release):
            one_round.clean_up()
        return result

    async def call_many(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Renew and release in the background; as `Background.call_many`.

        A release is complete only when every node that may have the token has replied.
        """
        rounds = [self._round(request, Round.is_complete) for request in requests]
        await self._ask_all(rounds, timeout, meanwhile)
        restorations = [
            Restoration(each, request)
            for each, request in zip(rounds, requests, strict=True)
            if isinstance(each, Renewal) and each.has_majority()
        ]
        await self._ask_all(restorations, 0.0, meanwhile)
        for each in rounds:
            if isinstance(each, Release):  # as of a lease that was lost because no node had it
                self.locations.forget_if_nowhere(each.token)
        return [_result(each) for each in rounds]

    def _round(self, request: Request, is_released: Enough) -> Round:
        script = request[0]
        if script is RELEASE:
            return Release(self, request, is_released)
        return {RENEW: Renewal, EVICT: Eviction, INSPECT: Inspection}[script](self, request)

    async def _release(self, request: Request, timeout: float, enough: Enough) -> None:
        release = Release(self, request, enough)
        await self._ask(release, timeout)
        release.clean_up()

    async def _ask(self, one_round: Round, timeout: float) -> None:
        await self._nodes.ask(one_round.posts, timeout, one_round.on_reply)

    async def _ask_all(
        self, rounds: Sequence[Round], timeout: float, meanwhile: Callable[[], float]
    ) -> None:
        """Ask in the background, until every round is over."""
        posts: list[Post] = []
        whose: list[tuple[Round, int]] = []
        for each in rounds:
            posts += each.posts
            whose += [(each, number) for number in range(len(each.posts))]
        not_over = {each for each in rounds if each.nodes}

        def on_reply(post: int, node: int, reply: Reply | HoldfastError) -> bool:
            each, number = whose[post]
            if each.on_reply(number, node, reply):
                not_over.discard(each)
            return not not_over

        if posts:
            await self._background.ask(posts, timeout, on_reply, meanwhile)

    def watch(self, node: int, reply: Reply | HoldfastError) -> None:
        """Report a node that begins to fail, and one that is back."""
        if self._closed:  # this client has stopped reading
            return
        if isinstance(reply, HoldfastError):
            if node not in self._failing and not isinstance(reply, (Interrupted, Unconnected)):
                self._failing.add(node)
                self._report(Event("node_failed", detail=str(reply)))
        elif reply and node in self._failing:  # a node that refuses to write says no as well
            self._failing.discard(node)
            self._report(Event("node_back", detail=f"{self.names[node]} answers again"))


def _is_released(release: Round) -> bool:
    return release.has_majority() or release.is_complete()


def _result(one_round: Round) -> Reply | HoldfastError:
    if isinstance(one_round, Release) and one_round.failed:
        return one_round.no_majority()
    try:
        return one_round.result()
    except HoldfastError as error:
        return error


def _nothing(*_: object) -> None:
    """Before `begin` there are no tokens."""
