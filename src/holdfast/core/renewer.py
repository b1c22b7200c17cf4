"""The renewer: the one background job of a client. It renews leases and carries out clean-ups.

A heap says which item is due next: a lease (to be renewed, to end its renewal at `max_hold`, or to
be declared lost at its deadline), a clean-up, or a task. The rules:

1. Everything that is due within a short time is sent in one pipeline.
2. A loss is declared at the deadline, even while replies are outstanding: a server that hangs must
   not delay it.
3. A renewal without a reply is sent again until the deadline.
4. A lease whose release has begun is not renewed. A renewal may be under way at that moment; the
   release does not wait for it. If the server runs the release first, it refuses the renewal. The
   reply is ignored, because the lease is no longer HELD.
5. Without anything to watch, the job waits for a moment and then ends, until the next `watch`. So a
   program that acquires and releases all the time does not start it each time.

Callers add items to `handed_in`, a dictionary whose single operations are atomic. They wake the job
only if the item is due before the job would wake by itself. A lease that is released sooner is
removed again, so that short leases cost the job nothing. No item is missed: a caller adds it, then
looks at `_wake_at`; the job resets `_wake_at`, then looks at the items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from holdfast.core.events import Event
from holdfast.core.hold import Hold
from holdfast.core.spec import TOMBSTONE_MS, ttl_of
from holdfast.core.token import read_party
from holdfast.errors import HoldfastError, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.keys import Keys
    from holdfast.port import Background, Reply, Request

EARLY_MOST = 0.05
"""Seconds by which a renewal may be sent early, to share a pipeline with others."""

LOOK = 0.02
"""Seconds between two looks at `handed_in` while replies are outstanding."""

BATCH = 1000
"""Requests in one pipeline, so that the replies come well within a command's timeout."""

NAP, LINGER = 0.1, 1.0
"""Seconds between two looks with nothing to watch, and after which the job ends."""

SLACK = 1000
"""The heap is compacted when it exceeds twice its size after the last time by these entries."""


@dataclass(slots=True, eq=False)
class Cleanup:
    """The release of a token that may be on a server."""

    name: str
    request: Request
    due: float
    deadline: float
    fence: int
    forget: Callable[[], object]
    """Called if the clean-up is given up: the token expires by itself."""
    live: bool = True

    @property
    def patience(self) -> float:
        """Seconds to wait for a reply: fewer for one node of several, because renewals wait too."""
        return 1.0 if self.request[1].node is None else 0.2


@dataclass(slots=True, eq=False)
class BackgroundTask:
    """A function that is called later. It must not block."""

    do: Callable[[], None]
    due: float
    live: bool = True

    @property
    def deadline(self) -> float:
        """It is never called early."""
        return self.due


class Renewer:
    """Renews the leases of one client in one process, and declares them lost."""

    def __init__(
        self,
        background: Background,
        report: Callable[[Event], None],
        has_ended: Callable[[object], bool],
    ) -> None:
        self._background = background
        self._report = report
        self._has_ended = has_ended
        self.handed_in: dict[Hold | Cleanup | BackgroundTask, None] = {}
        """Items that the job has not seen yet. A lease that ends is removed again."""
        self._heap: list[tuple[float, int, Hold | Cleanup | BackgroundTask]] = []
        self._order = count()
        self._compact_at = SLACK
        self._ready: list[Hold | Cleanup] = []
        self._cleanups: dict[tuple[Keys, tuple[str, ...]], Cleanup] = {}
        """The live ones, by keys and arguments."""
        self._wake_at = math.inf
        self._closed = False
        self._looks_again = False

    def watch(self, hold: Hold) -> bool:
        """Watch a lease from now on, or look again at one whose next due time has changed.

        Returns False if there can be no background job.
        """
        return self._hand_in(hold, hold.next_due())

    def unwatch(self, hold: Hold) -> None:
        """Drop a lease that has ended, if the job has not seen it yet."""
        self.handed_in.pop(hold, None)

    def _hand_in(self, item: Hold | Cleanup | BackgroundTask, due: float) -> bool:
        self.handed_in[item] = None
        return due >= self._wake_at or self._background.rouse(self)

    def clean_up(
        self,
        name: str,
        request: Request,
        *,
        fence: int,
        ttl: float,
        forget: Callable[[], object],
    ) -> None:
        """Send a release in the background until it is carried out, or the token has expired.

        It replaces an earlier clean-up by the same request, whose reply may be under way: what that
        has released may have been granted again since.
        """
        now = self._background.now()
        deadline = now + max(ttl, int(TOMBSTONE_MS) / 1000)
        earlier = self._cleanups.get(request[1:])
        if earlier is not None:
            earlier.live = False
            deadline = max(deadline, earlier.deadline)
        cleanup = Cleanup(name, request, now, deadline, fence, forget)
        self._cleanups[request[1:]] = cleanup
        self._hand_in(cleanup, -math.inf)

    def look_again(self) -> None:
        """Renew all leases now: the server may have lost them. Called from any thread."""
        self._looks_again = True
        self._background.rouse(self)

    def later(self, seconds: float, do: Callable[[], None]) -> BackgroundTask | None:
        """Call `do` after that many seconds, even if the client is closed by then.

        Returns None if there can be no background job.
        """
        task = BackgroundTask(do, self._background.now() + seconds)
        if self._hand_in(task, task.due):
            return task
        self.handed_in.pop(task, None)
        return None

    def close(self) -> None:
        """Stop renewing. The deadlines of the leases that are still held are watched."""
        self._closed = True
        if self._wake_at < math.inf:
            self._background.rouse(self)

    async def run(self) -> None:
        """Work until there is nothing to watch."""
        idle_since: float | None = None
        while True:
            self._wake_at = math.inf
            wake_at = self._advance()
            if self._ready:
                await self._work()
                continue
            now = self._background.now()
            if wake_at is not None:
                idle_since = None
            elif idle_since is None:
                idle_since = now
            elif self._closed or now >= idle_since + LINGER:
                return
            self._wake_at = wake_at or now + NAP
            if not self.handed_in:
                await self._background.rest(self._wake_at)

    def _schedule(self, item: Hold | Cleanup | BackgroundTask, due: float) -> None:
        item.due = due
        heappush(self._heap, (due, next(self._order), item))

    def _take_in(self) -> None:
        while self.handed_in:
            try:
                item, _ = self.handed_in.popitem()
            except KeyError:  # the last one was just released
                break
            if item.live:
                self._schedule(item, item.next_due() if isinstance(item, Hold) else item.due)
        if len(self._heap) > self._compact_at or self._closed:
            self._heap = [
                (due, order, item)
                for due, order, item in self._heap
                if item.live and item.due == due
            ]
            heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + SLACK

    def _advance(self) -> float | None:
        """Declare losses, collect what is to be sent, and return when the next item is due."""
        self._take_in()
        now = self._background.now()
        if self._looks_again:
            self._looks_again = False
            for item in {item for _, _, item in self._heap}:
                if isinstance(item, Hold):
                    self._schedule(item, now)
        while self._heap:
            due, _, item = self._heap[0]
            if not item.live or item.due != due:
                heappop(self._heap)
                continue
            if due > now + _early(item, due):
                return due
            heappop(self._heap)
            if isinstance(item, BackgroundTask):
                item.live = False
                item.do()
                continue
            if now >= item.deadline:
                self._give_up(item)
                continue
            # Its deadline is watched while it waits to be sent, and for a reply.
            self._schedule(item, item.deadline)
            if self._is_to_be_sent(item, now):
                self._ready.append(item)
        return None

    def _meanwhile(self) -> float:
        """Do everything but sending; return when to be called again."""
        due, soon = self._advance(), self._background.now() + LOOK
        return soon if due is None else min(due, soon)

    def _give_up(self, item: Hold | Cleanup) -> None:
        if isinstance(item, Hold):
            item.lose(item.overdue())
            return
        self._end(item)
        item.forget()
        if item.request[1].node is not None:  # `node_failed` was reported for it
            return
        detail = "the server could not be told to forget it: it stays until it expires, if ever"
        self._report(Event("cleanup_failed", item.name, item.fence, detail))

    def _end(self, cleanup: Cleanup) -> None:
        cleanup.live = False
        if self._cleanups.get(cleanup.request[1:]) is cleanup:
            del self._cleanups[cleanup.request[1:]]

    def _may_renew(self, hold: Hold, now: float) -> bool:
        """Return whether a renewal may be sent now; end and report what ends by now."""
        if self._closed:
            return False
        if hold.renewing and now + _early(hold, hold.renew_until) >= hold.renew_until:
            hold.renewing = False
            detail = f"held for max_hold={hold.spec.max_hold} s: it is not renewed any more"
            self._report(Event("max_hold", hold.spec.name, hold.fence, detail))
        if hold.forsaken is not None and hold.forsaken():
            hold.renewing = False
        if not hold.renewing:
            return False
        # A task that is done keeps its result, or the frames of its error, and so its lease.
        if hold.spec.owner is None and hold.actor is not None and self._has_ended(hold.actor):
            hold.actor = None
        if hold.is_dropped and not hold.reported_dropped:
            hold.reported_dropped = True
            self._report(Event("not_released", hold.spec.name, hold.fence, _dropped(hold)))
        return True

    def _is_to_be_sent(self, item: Hold | Cleanup, now: float) -> bool:
        return item.live and (not isinstance(item, Hold) or self._may_renew(item, now))

    def _next_batch(self) -> list[Hold | Cleanup]:
        """Take what is sent next. Clean-ups of one node of several are sent later, alone."""
        batch, self._ready = self._ready[:BATCH], self._ready[BATCH:]
        first = [item for item in batch if isinstance(item, Hold) or item.request[1].node is None]
        if not first or len(first) == len(batch):
            return batch
        self._ready += [item for item in batch if item not in first]
        return first

    async def _work(self) -> None:
        # These items may have waited for the replies to an earlier batch.
        asked_at = self._background.now()
        batch = [item for item in self._next_batch() if self._is_to_be_sent(item, asked_at)]
        if not batch:
            return
        timeout = max(item.patience for item in batch)
        requests = [_request(item, asked_at) for item in batch]
        try:
            replies = await self._background.call_many(requests, timeout, self._meanwhile)
        except Exception as error:  # noqa: BLE001 - in any case they are not renewed
            replies = [NodeUnavailable(f"not renewed: {error!r}")] * len(batch)
        for item, reply in zip(batch, replies, strict=True):
            if item.live:
                self._answered(item, asked_at, reply)

    def _answered(self, item: Hold | Cleanup, asked_at: float, reply: Reply) -> None:
        now = self._background.now()
        if isinstance(reply, HoldfastError):
            if isinstance(item, Hold) and not item.unanswered:
                item.unanswered = True
                self._report(Event("renewal_failed", item.spec.name, item.fence, str(reply)))
            if isinstance(item, Cleanup) and self._closed:
                self._give_up(item)
            else:
                self._schedule(item, min(now + item.patience / 2, item.deadline))
        elif not isinstance(item, Hold):
            self._end(item)
        elif not reply:
            item.lose(item.refusal(reply, now))
        elif item.prolong(asked_at, item.spec.ttl, now):
            self._schedule(item, item.next_due())


def _dropped(hold: Hold) -> str:
    party = read_party(hold.token.encode())
    name = "" if party is None else f", acquired by {party.thread!r},"
    return (
        f"its lease{name} was garbage-collected without release(): the lock stays held until its "
        "client is closed or its process ends"
    )


def _early(item: Hold | Cleanup | BackgroundTask, due: float) -> float:
    """Return by how much it may be done early: less than the pause after a failure.

    A deadline is never early.
    """
    if due >= item.deadline:
        return 0.0
    if isinstance(item, Hold):
        return min(EARLY_MOST, item.spec.first_due / 2, item.patience / 4)
    return EARLY_MOST


def _request(item: Hold | Cleanup, now: float) -> Request:
    if not isinstance(item, Hold):
        return item.request
    # An extended lease is renewed for all that is left of it: a node may be given it again.
    return item.renewal(max(item.spec.ttl, ttl_of(item.deadline - now)))
