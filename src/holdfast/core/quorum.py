"""A lock that several independent nodes keep. The token that a majority accepts holds the lock.

To acquire a lock, a client sends a token to all nodes at the same time. Each node decides by itself
whether to vote for the token. A vote means that the node grants the lock to the token. A majority
of votes is a lease, for these reasons:

- **Exclusion.** Any two majorities share a node, and that node votes for one token at a time.
- **Time.** The deadline counts from before the first request, as on one server. A majority that is
  reached after the deadline does not count. Clocks may differ, but must run at about the same rate.
- **Fences.** Each node gives its vote a number, which is higher than all its earlier numbers. If a
  majority gives the same number, that is the fence. Otherwise the client writes the highest number
  to every node that has the token, until a majority has the same number. Any two majorities share a
  node. On that node the later lease got its number after the earlier one, so its number is higher.
  So fences grow, even if clocks are wrong or leases expire early. All nodes receive the same
  timestamp as a hint, so that they usually give the same number at once.

  The highest number of a majority alone is no fence. Node 1 of three has number 1 from an abandoned
  vote. A wins nodes 1 and 2, and receives 2 and 1: fence 2. Then B wins nodes 2 and 3, and receives
  2 and 1: fence 2 again.
- **Release.** `core.token_locations` records on which nodes each token may be. A release removes
  the token from all of them.
- **Restoration.** After a renewal, the client sends the token again to nodes that missed or lost
  it. So nodes may fail and come back one after the other.

`core.rounds` has one class for each kind of request. `core.quorum_acquire` waits and retries.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from holdfast.core.events import Event
from holdfast.core.fence import fence_above
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

    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.lock_set import LockSet
    from holdfast.core.rounds import Enough
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.keys import Keys
    from holdfast.port import Nodes, Post, Reply, Request
    from holdfast.scripts import Script

SHORTEST_ROUND = 0.001
"""Seconds to wait for votes, even if no time is left."""

G = TypeVar("G", bound="LeaseRef")


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
        """How many nodes may fail without preventing a majority."""
        self._nodes = nodes
        self._background = background
        self._report = report
        self.locations = TokenLocations(self.all, _nothing, _nothing, nodes.new_locations_mutex())
        self._failing: set[int] = set()
        """The nodes that were reported as failed."""
        self._closed = False

    def begin(self, session: Session) -> None:
        """Start without tokens: for a new client, and in each forked child of its process."""
        self.locations.disconnect()  # a call that was under way at the fork still refers to them
        clean_up, call_later = session.cleanups.schedule_request, session.renewer.call_later
        mutex = self._nodes.new_locations_mutex()
        self.locations = TokenLocations(self.all, clean_up, call_later, mutex)
        self._port = session.port
        self._failing = set()
        self._closed = False

    def close(self) -> None:
        """Stop waiting for nodes that have not replied, and stop reporting nodes."""
        self._closed = True
        self.locations.close()

    async def acquire(self, session: Session, spec: LockSpec, timeout: float | None, ref: G) -> G:
        """Acquire a lock; as `core.acquire.acquire`."""
        return await acquire(session, self, spec, timeout, ref)

    def release_request(self, lease: LeaseState) -> Request:
        """Return the request that releases a lease.

        A release by another thread or task than the one that acquired the lock may overtake the
        vote on another connection. So it leaves a tombstone, which makes the node refuse the vote.
        """
        tombstone = "0" if lease.actor is self._port.actor() else TOMBSTONE_MS
        mode = lease.tombstone_argument(tombstone)
        return self.removal_request(lease.spec, lease.token, mode, lease.longest_ttl)

    def removal_request(
        self, spec: LockSpec, token: str, tombstone: str, longest: float = 0.0
    ) -> Request:
        """Return the request that removes a token.

        Its ttl sets how long the background retries the request on a node that fails. So it is the
        `longest` ttl that the token ever had.
        """
        ttl_ms = to_ms(longest) if longest > spec.ttl else spec.ttl_ms
        return RELEASE, spec.keys, (token, ttl_ms, tombstone, spec.settings)

    def settings(self, delay_ms: int, owner_suffix: str) -> str:
        """Return the settings of a lock for the scripts. A node of a quorum is never fair."""
        return settings_of(delay_ms, owner_suffix, fair=False)

    def runs_together(self, locks: LockSet) -> bool:  # noqa: ARG002 - the same for all
        """Return False: the votes about each lock are separate."""
        return False

    def forget(self, token: str, node: int | None) -> None:
        """Forget a token on one node, or on all: it has been removed, or will expire."""
        if node is None:
            self.locations.forget(token)
        else:
            self.locations.note_gone(token, node)

    # Acquiring

    async def vote(
        self, request: Request, timeout: float, left: Callable[[], float]
    ) -> tuple[int, Vote]:
        """Request the vote of every node; return the fence, or 0, and the votes.

        There is a fence if a majority voted yes, and agreed on one number while time was `left`.
        Otherwise the caller has to withdraw the token.
        """
        votes = Vote(self, request)
        # Wait for at least 1 ms. Otherwise a node without the script would receive the repeated
        # vote after the release.
        await self._send(votes, max(timeout, SHORTEST_ROUND))
        given, wanted = votes.yes, 0
        while len(numbers := list(given.values())) >= self.majority:
            [(fence, agreed)] = Counter(numbers).most_common(1)
            if agreed >= self.majority:
                return fence, votes
            if left() <= 0:
                break
            wanted = fence_above([*numbers, wanted])
            confirmation = Confirmation(self, request, wanted)
            await self._send(confirmation, min(timeout, left()))
            given = confirmation.yes
        return 0, votes

    async def withdraw(self, request: Request, timeout: float, *, wait_if_no_votes: bool) -> None:
        """Release a token that did not get the lock.

        Waits for the nodes that voted. If none voted: waits for one reply, whose outcome may
        explain the failure, or for none without `wait_if_no_votes`. The other nodes are cleaned up
        in the background.
        """
        token, locations = request[2][0], self.locations
        there = locations.of(token)
        if not there:
            locations.forget(token)
            return
        have_it = [node for node, state in there.items() if state == PRESENT]
        waits = have_it or wait_if_no_votes
        await self._release(
            request, timeout if waits else 0.0, lambda each: all(map(each.has_reply_of, have_it))
        )

    async def leave_queues(self, request: Request) -> None:
        """Remove a token from the queues of all nodes, without waiting for it."""
        if self.locations.of(request[2][0]) is not None:
            await self._release(request, 0.0, Round.is_complete)

    # The interface of a single server

    async def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script on the nodes concerned; return what one server would reply (`port.Call`)."""
        one_round = self._round((script, keys, args), _is_released)
        await self._send(one_round, timeout)
        result = one_round.result()
        if isinstance(one_round, Release):
            one_round.clean_up()
        return result

    async def call_many(
        self, requests: Sequence[Request], timeout: float, on_tick: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Renew and release in the background; as `Background.call_many`.

        A release is complete only when every node that may have the token has replied.
        """
        rounds = [self._round(request, Round.is_complete) for request in requests]
        await self._send_all(rounds, timeout, on_tick)
        restorations = [
            Restoration(each, request)
            for each, request in zip(rounds, requests, strict=True)
            if isinstance(each, Renewal) and each.has_majority()
        ]
        await self._send_all(restorations, 0.0, on_tick)
        for each in rounds:
            if isinstance(each, Release):  # such as of a lease that was lost on every node
                self.locations.forget_without_location(each.token)
        return [_result(each) for each in rounds]

    def _round(self, request: Request, is_released: Enough) -> Round:
        script = request[0]
        if script is RELEASE:
            return Release(self, request, is_released)
        return {RENEW: Renewal, EVICT: Eviction, INSPECT: Inspection}[script](self, request)

    async def _release(self, request: Request, timeout: float, enough: Enough) -> None:
        release = Release(self, request, enough)
        await self._send(release, timeout)
        release.clean_up()

    async def _send(self, one_round: Round, timeout: float) -> None:
        await self._nodes.send_all(one_round.posts, timeout, one_round.on_reply)

    async def _send_all(
        self, rounds: Sequence[Round], timeout: float, on_tick: Callable[[], float]
    ) -> None:
        """Send the requests of all rounds in the background, and wait until every round is over."""
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
            await self._background.send_all(posts, timeout, on_reply, on_tick)

    def note_health(self, node: int, reply: Reply | HoldfastError) -> None:
        """Report a node that starts to fail, and one that works again."""
        if self._closed:  # its own connections are being closed
            return
        if isinstance(reply, HoldfastError):
            if node not in self._failing and not isinstance(reply, (Interrupted, Unconnected)):
                self._failing.add(node)
                self._report(Event("node_failed", detail=str(reply)))
        elif reply and node in self._failing:  # a node that cannot write also replies with 0
            self._failing.discard(node)
            self._report(Event("node_back", detail=f"{self.names[node]} is available again"))


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
    """Do nothing: before `begin` there are no tokens."""
