"""On which of several nodes each token is, or may be.

Requests about a lease go to those nodes, and a release is complete when the token is on none of
them. Replies are noted here whenever they arrive, even if no caller waits for them any more. The
background cleans up a node that fails to reply, until it replies or the token has expired there. A
node that is only slow has a second or two first.

Several threads note replies. `mutex`, which is reentrant, guards all changes. Nothing is awaited
while it is held. What the background has to do is handed to it afterwards (`_flush`): that takes
another mutex, and a signal handler may strike there that releases a lease.
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
"""Seconds between two sweeps. The second sweep after a release retries it, if it got no reply."""

ASKED, PRESENT, UNSURE = "asked", "present", "unsure"
"""Of a token on a node: a request is under way; it is there; it may be there, or arrive later on
another connection."""


class _Nodes(dict[int, str]):
    """The nodes where a token is, or may be, and how sure that is."""

    is_lost = False
    """Its lease was lost: each release of it begins the lock delay, even one of a late vote."""


class TokenLocations:
    """Where the tokens of one client are.

    `clean_up` has the background carry out a request, until it is done or too late to matter.
    `later` has it do something after that many seconds.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        clean_up: Callable[[Request], None],
        later: Callable[[float, Callable[[], None]], BackgroundTask | None],
        mutex: AbstractContextManager[object],
    ) -> None:
        self._all = nodes
        self._clean_up = clean_up
        self._later = later
        self._mutex: AbstractContextManager[object] = mutex
        self._tokens: dict[str, _Nodes] = {}
        self._missing: set[tuple[str, int]] = set()
        """(token, node): the node refused a renewal, but its vote may be a yes that no thread has
        read yet. `restore` sends the token there again."""
        self._leaving: set[str] = set()
        """Tokens that are being released."""
        self._released: dict[str, Request] = {}
        """Releases to which some node has not replied yet, by token."""
        self._released_before: dict[str, Request] = {}
        """Those of before the last sweep."""
        self._next_sweep: BackgroundTask | None = None
        self._closed = False
        self._due: list[Request] = []
        """Releases that the background has to carry out."""

    def close(self) -> None:
        """Stop retrying releases to which a slow node has not replied: most are carried out."""
        self._closed = True

    def disconnect(self) -> None:
        """Send nothing from now on: in a forked child, all these tokens are the parent's."""
        self._clean_up, self._later = _nothing, _nothing
        self._mutex = nullcontext()  # another thread of the parent may have held it

    def of(self, token: str) -> dict[int, str] | None:
        """Return the nodes where a token is, or may be, and how sure that is; None if unknown."""
        there = self._tokens.get(token)
        return None if there is None else dict(there)  # to copy a dict is one step

    def expect(self, token: str, state: str) -> _Nodes:
        """Note that a token is sent to all nodes: ASKED for the lock, or PRESENT in the queues."""
        with self._mutex:
            there = self._tokens[token] = _Nodes(dict.fromkeys(self._all, state))
            return there

    def leaving(self, token: str, *, lost: bool) -> dict[int, str] | None:
        """Note that a token is being released; as `of`. It is given to no more nodes."""
        with self._mutex:
            there = self._tokens.get(token)
            if there is not None:
                there.is_lost = there.is_lost or lost
                self._leaving.add(token)
            return self.of(token)

    def note_gone(self, token: str, node: int) -> None:
        """Note that a token is no longer on a node."""
        with self._mutex:
            there = self._tokens.get(token)
            if there is not None:
                there.pop(node, None)
                self.forget_if_nowhere(token)

    def forget_if_nowhere(self, token: str) -> None:
        """Forget a token that is on no node."""
        with self._mutex:
            if not self._tokens.get(token):
                self.forget(token)

    def forget(self, token: str) -> None:
        """Remove all that is known of a token."""
        with self._mutex:
            self._tokens.pop(token, _Nodes()).clear()
            self._leaving.discard(token)
            self._released.pop(token, None)
            self._missing.difference_update((token, node) for node in self._all)

    # Replies, also late ones

    def on_vote(
        self, request: Request, expected: _Nodes, node: int, reply: Reply | HoldfastError
    ) -> None:
        """Note the reply to a vote; `expected` is what `expect` returned for its token."""
        _, keys, (token, ttl, _, settings, waiter) = request
        unknown = isinstance(reply, OutcomeUnknown)
        with self._mutex:
            if waiter and (unknown or isinstance(reply, list)):
                of_waiter = RELEASE, keys, (waiter, ttl, TOMBSTONE_MS, settings)
                self._note_queued(node, of_waiter, unsure=unknown)
            there = self._tokens.get(token, expected)
            if unknown or is_yes(reply):
                if node not in there:  # it was released before this reply came
                    self._tokens[token] = there
                    self._retry_release(node, request)
                elif there[node] == ASKED:
                    there[node] = UNSURE if unknown else PRESENT
            elif there.get(node) == ASKED:
                self.note_gone(token, node)
        self._flush()

    def _note_queued(self, node: int, request: Request, *, unsure: bool) -> None:
        """Note that a token is in a node's queue, or may yet be put there."""
        there = self._tokens.get(request[2][0], _Nodes())
        if node not in there:  # it has left meanwhile, and this came after that
            self._retry_release(node, request)
        elif unsure:
            there[node] = UNSURE

    def on_renewal(self, token: str, node: int, reply: Reply | HoldfastError) -> None:
        """Note the reply to a renewal: a refusal says that the token is not there."""
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
            if token in self._leaving:  # the release was quicker: its reply is not read yet
                self.forget_if_nowhere(token)

    def restore(self, token: str) -> tuple[list[int], list[int]]:
        """Note that a token is sent again to the nodes that lack it; return them, and the new ones.

        Not while it is being released. A release that comes later finds these nodes noted, and
        leaves a tombstone there: it may overtake the vote, which uses another connection. The token
        stays unsure there: a renewal that was sent before the vote may be refused after it.
        """
        with self._mutex:
            there = self._tokens.get(token)
            if there is None or token in self._leaving:
                return [], []
            new = [node for node in self._all if node not in there]
            missing = {node for node in self._all if (token, node) in self._missing}
            nodes = [node for node in self._all if node in {*new, *missing}]
            self._missing.difference_update((token, node) for node in nodes)
            there.update(dict.fromkeys(nodes, UNSURE))
            return nodes, new

    def on_release(self, request: Request, node: int, *, tombstone: bool) -> None:
        """Note the reply to a release, which left a tombstone there or did not.

        If it turned out meanwhile that the token may still arrive, it is released again.
        """
        token = request[2][0]
        with self._mutex:
            there = self._tokens.get(token)
            if there is not None and there.get(node) == UNSURE and not tombstone:
                self._retry_release(node, request)
            else:
                self.note_gone(token, node)
        self._flush()

    # Until it is gone

    def _retry_release(self, node: int, request: Request) -> None:
        """Have the background release the token of a request on a node; needs `_flush`."""
        _, keys, (token, ttl, _, settings, *_) = request
        there = self._tokens.setdefault(token, _Nodes())
        there[node] = UNSURE
        self._leaving.add(token)  # a late reply to a renewal may have had it forgotten
        tombstone = LOST_TOMBSTONE if there.is_lost else TOMBSTONE_MS
        self._due.append((RELEASE, keys.at(node), (token, ttl, tombstone, settings)))

    def _flush(self) -> None:
        """Hand over to the background what it has to do.

        Two threads may hand over the same, which is cleaned up once. An interruption loses nothing.
        """
        for request in self._due[:]:
            self._clean_up(request)
            with self._mutex:
                self._due = [each for each in self._due if each is not request]

    def abandon(self, request: Request) -> None:
        """Have the token of a request released wherever it may be, in the background."""
        with self._mutex:
            for node in list(self._tokens.get(request[2][0], ())):
                self._retry_release(node, request)
        self._flush()

    def leave(self, request: Request, failed: Sequence[int], *, complete: bool) -> None:
        """Clean up the nodes that failed to release a token, and soon those that are slow."""
        token = request[2][0]
        with self._mutex:
            for node in failed:
                self._retry_release(node, request)
            self.forget_if_nowhere(token)
            is_slow = token in self._tokens and not complete
            if is_slow:
                self._released[token] = request
        self._flush()
        if is_slow:
            self._sweep_later()

    def _sweep_later(self) -> None:
        if self._next_sweep is None or not self._next_sweep.live:
            self._next_sweep = self._later(SLOW, self._sweep)

    def _sweep(self) -> None:
        """Clean up what was released before the last sweep, and is still on some node."""
        if self._closed:
            return
        with self._mutex:
            late, self._released_before = self._released_before, self._released
            self._released = {}
        for request in late.values():
            self.abandon(request)
        if self._released_before:
            self._sweep_later()


def is_yes(reply: Reply | HoldfastError) -> bool:
    """Whether a node said yes, with a number."""
    return type(reply) is int and reply > 0


def _nothing(*_: object) -> None:
    """Do nothing, in a forked child."""
