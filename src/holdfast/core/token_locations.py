"""The nodes of a quorum on which each token is, or may be.

Requests about a lease go to these nodes. A release is complete when the token is on none of them.
Replies are recorded here when they arrive, even if no caller waits for them any more. The
background cleans up a node that fails, until it replies or the token has expired there. A node that
is only slow is cleaned up after a second or two.

Several threads record replies. A reentrant mutex guards all changes. Nothing is awaited while it is
held. `_flush` hands releases over to the background after the mutex is released: the background has
a mutex too, and a signal handler that runs under that one may release a lease, which takes this
one.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from holdfast.core.spec import LOST_TOMBSTONE, TOMBSTONE_MS
from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.scripts import RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from holdfast.core.renewer import BackgroundTask
    from holdfast.port import Reply, Request

SLOW = 1.0
"""Seconds between two sweeps. The second sweep after a release retries it if a reply is missing."""

REQUESTED, PRESENT, UNSURE = "requested", "present", "unsure"
"""The state of a token on a node. REQUESTED: a request is under way. PRESENT: the node has the
token, or (token of a waiter) will receive it with the next vote. UNSURE: the node may have it, or
may still receive it on another connection."""


class _Locations(dict[int, str]):
    """The nodes that have a token, or may have it, each with its state."""

    is_lost = False
    """The lease was lost. So each release begins the lock delay, even that of a late vote."""


class TokenLocations:
    """The locations of the tokens of one client.

    `clean_up` retries a release in the background, until it succeeds or the token has expired.
    `call_later` calls a function after some seconds.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        clean_up: Callable[[Request], None],
        call_later: Callable[[float, Callable[[], None]], BackgroundTask | None],
        mutex: AbstractContextManager[object],
    ) -> None:
        self._all = nodes
        self._clean_up = clean_up
        self._call_later = call_later
        self._mutex: AbstractContextManager[object] = mutex
        self._tokens: dict[str, _Locations] = {}
        self._missing: set[tuple[str, int]] = set()
        """Pairs of a token and a node. The node refused a renewal while its vote was unread or its
        state UNSURE. `restore` sends the token again."""
        self._releasing: set[str] = set()
        """Tokens that are being released."""
        self._released: dict[str, Request] = {}
        """Releases to which a node has not replied yet, by token."""
        self._released_before: dict[str, Request] = {}
        """The same, from before the last sweep."""
        self._next_sweep: BackgroundTask | None = None
        self._closed = False
        self._due: list[Request] = []
        """Releases that the background has to carry out."""

    def close(self) -> None:
        """Stop retrying releases on slow nodes. Most of them will be carried out."""
        self._closed = True

    def disconnect(self) -> None:
        """Send nothing from now on: in a forked child, all tokens belong to the parent."""
        self._clean_up, self._call_later = _nothing, _nothing
        self._mutex = nullcontext()  # another thread of the parent may have held it

    def of(self, token: str) -> dict[int, str] | None:
        """Return the nodes that may have a token, each with its state; None if it is not known."""
        there = self._tokens.get(token)
        return None if there is None else dict(there)  # copying a dict is atomic

    def expect(self, token: str, state: str) -> _Locations:
        """Record that a token is sent to all nodes, for the lock or for a place in the queues."""
        with self._mutex:
            there = self._tokens[token] = _Locations(dict.fromkeys(self._all, state))
            return there

    def begin_release(self, token: str, *, lost: bool) -> dict[int, str] | None:
        """Record that a token is being released, so that it is not restored; return as `of`."""
        with self._mutex:
            there = self._tokens.get(token)
            if there is not None:
                there.is_lost = there.is_lost or lost
                self._releasing.add(token)
            return self.of(token)

    def note_gone(self, token: str, node: int) -> None:
        """Record that a token is no longer on a node."""
        with self._mutex:
            self._remove(token, node)

    def _remove(self, token: str, node: int) -> None:
        """As `note_gone`. The caller holds the mutex."""
        there = self._tokens.get(token)
        if there is not None:
            there.pop(node, None)
            if not there:
                self.forget(token)

    def forget_without_location(self, token: str) -> None:
        """Forget a token that is on no node."""
        with self._mutex:
            if not self._tokens.get(token):
                self.forget(token)

    def forget(self, token: str) -> None:
        """Remove all records of a token."""
        with self._mutex:
            self._tokens.pop(token, _Locations()).clear()
            self._releasing.discard(token)
            self._released.pop(token, None)
            if self._missing:
                self._missing.difference_update((token, node) for node in self._all)

    # Replies, even late ones

    def on_vote(
        self, request: Request, expected: _Locations, node: int, reply: Reply | HoldfastError
    ) -> None:
        """Record the reply to a vote. `expected` is what `expect` returned for its token."""
        _, keys, (token, ttl, _, settings, waiter) = request
        unknown = isinstance(reply, OutcomeUnknown)
        with self._mutex:
            if waiter and (unknown or isinstance(reply, list)):
                of_waiter = RELEASE, keys, (waiter, ttl, TOMBSTONE_MS, settings)
                self._note_queued(node, of_waiter, unsure=unknown)
            there = self._tokens.get(token, expected)
            if unknown or is_yes(reply):
                if node not in there:  # the token was released before this reply arrived
                    self._tokens[token] = there
                    self._retry_release(node, request)
                elif there[node] == REQUESTED:
                    there[node] = UNSURE if unknown else PRESENT
            elif there.get(node) == REQUESTED:
                self._remove(token, node)
        if self._due:
            self._flush()

    def _note_queued(self, node: int, request: Request, *, unsure: bool) -> None:
        """Record that a token is in the queue of a node, or may still be added to it."""
        there = self._tokens.get(request[2][0], _Locations())
        if node not in there:  # the token left the queue before this reply arrived
            self._retry_release(node, request)
        elif unsure:
            there[node] = UNSURE

    def on_renewal(self, token: str, node: int, reply: Reply | HoldfastError) -> None:
        """Record the reply to a renewal. A refusal means that the node does not have the token."""
        if reply not in (0, []):
            return
        with self._mutex:
            there = self._tokens.get(token)
            if there is None:
                return
            if there.get(node) != PRESENT:
                self._missing.add((token, node))
                return
            del there[node]
            if token in self._releasing:  # the node ran the release, and its reply is unread
                self.forget_without_location(token)

    def restore(self, token: str) -> tuple[list[int], list[int]]:
        """Record that a token is sent again to the nodes that lack it.

        Returns these nodes, and those of them that were not recorded before. A token that is being
        released is not sent again. The nodes are recorded as UNSURE. A later release then leaves a
        tombstone, because it may overtake this vote. And a refusal of an older renewal does not
        remove the node.
        """
        with self._mutex:
            there = self._tokens.get(token)
            if there is None or token in self._releasing:
                return [], []
            new = [node for node in self._all if node not in there]
            missing = {node for node in self._all if (token, node) in self._missing}
            nodes = [node for node in self._all if node in {*new, *missing}]
            self._missing.difference_update((token, node) for node in nodes)
            there.update(dict.fromkeys(nodes, UNSURE))
            return nodes, new

    def on_release(self, request: Request, node: int, *, tombstone: bool) -> None:
        """Record the reply to a release, with or without a `tombstone`.

        If the token may still arrive and there is no tombstone, it is released again.
        """
        token = request[2][0]
        with self._mutex:
            there = self._tokens.get(token)
            if there is not None and there.get(node) == UNSURE and not tombstone:
                self._retry_release(node, request)
            else:
                self._remove(token, node)
        if self._due:
            self._flush()

    # Cleanup

    def _retry_release(self, node: int, request: Request) -> None:
        """Release the token of a request on one node, in the background, after `_flush`."""
        _, keys, (token, ttl, _, settings, *_) = request
        there = self._tokens.setdefault(token, _Locations())
        there[node] = UNSURE
        self._releasing.add(token)  # a late reply to a renewal may have removed it
        tombstone = LOST_TOMBSTONE if there.is_lost else TOMBSTONE_MS
        self._due.append((RELEASE, keys.at(node), (token, ttl, tombstone, settings)))

    def _flush(self) -> None:
        """Hand the due releases over to the background.

        If two threads hand over the same release, it is carried out once. A release stays due until
        it was handed over, so an interruption loses none.
        """
        for request in self._due[:]:
            self._clean_up(request)
            with self._mutex:
                self._due = [each for each in self._due if each is not request]

    def release_in_background(self, request: Request) -> None:
        """Release the token of a request in the background, on all nodes that may have it."""
        with self._mutex:
            for node in list(self._tokens.get(request[2][0], ())):
                self._retry_release(node, request)
        self._flush()

    def finish_release(self, request: Request, failed: Sequence[int], *, complete: bool) -> None:
        """Clean up the nodes that failed to release a token, and later those that are slow."""
        token = request[2][0]
        with self._mutex:
            for node in failed:
                self._retry_release(node, request)
            self.forget_without_location(token)
            is_slow = token in self._tokens and not complete
            if is_slow:
                self._released[token] = request
        self._flush()
        if is_slow:
            self._sweep_later()

    def _sweep_later(self) -> None:
        if self._next_sweep is None or not self._next_sweep.is_scheduled:
            self._next_sweep = self._call_later(SLOW, self._sweep)

    def _sweep(self) -> None:
        """Clean up the tokens that were released before the last sweep, and are still on a node."""
        if self._closed:
            return
        with self._mutex:
            late, self._released_before = self._released_before, self._released
            self._released = {}
        for request in late.values():
            self.release_in_background(request)
        if self._released_before:
            self._sweep_later()


def is_yes(reply: Reply | HoldfastError) -> bool:
    """Whether a reply is a yes: a number above 0."""
    return type(reply) is int and reply > 0


def _nothing(*_: object) -> None:
    """Do nothing: this is a forked child."""
