"""The renewer: the one background job of a client. It renews leases and carries out cleanups.

A heap orders its items by their due time. An item is a lease, a cleanup, or a task. A lease is due
when it has to be renewed, when its renewal ends (`max_hold`), and at its deadline. The rules:

1. Requests that are due within a short time are sent in one pipeline.
2. A lease is declared lost at its deadline, even while replies are outstanding. A server that hangs
   does not delay that.
3. A renewal without a reply is sent again until the deadline.
4. A lease is not renewed after its release has begun. A renewal may be under way at that moment,
   and the release does not wait for it. If the server runs the release first, it refuses the
   renewal. That reply is ignored, because the lease is no longer HELD.
5. When there are no items, the job waits for `IDLE_TIMEOUT` and then ends. The next item starts it
   again. So a program that acquires and releases all the time does not start a thread each time.

Any thread adds items to `inbox`, a dictionary whose single operations are atomic. It wakes the job
only if the item is due before the job wakes by itself. A lease that is released before that is
removed from `inbox`, so a short lease costs the job nothing.

`_wake_at` is inf while the job works or does not run, so each caller wakes it then. Invariant: no
item is missed. The caller adds the item, then reads `_wake_at`. The job sets `_wake_at`, then reads
`inbox`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from holdfast.core.events import Event
from holdfast.core.lease_state import LeaseState
from holdfast.core.spec import TOMBSTONE_MS, ttl_of
from holdfast.core.token import parse_token
from holdfast.errors import HoldfastError, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.keys import Keys
    from holdfast.port import Background, Reply, Request

EARLY_MAX = 0.05
"""Seconds by which a renewal may be sent early, to share a pipeline with others."""

CHECK_INBOX_EVERY = 0.02
"""Seconds between two checks of `inbox` while replies are outstanding."""

BATCH = 1000
"""Requests in one pipeline, at most, so that the replies arrive within a command timeout."""

IDLE_POLL, IDLE_TIMEOUT = 0.1, 1.0
"""Seconds between two checks of `inbox` without items, and after which the job ends."""

SLACK = 1000
"""The heap is compacted at twice its last compacted size plus this many entries."""


@dataclass(slots=True, eq=False)
class Cleanup:
    """The release of a token that a server may have."""

    name: str
    request: Request
    due: float
    deadline: float
    fence: int
    forget: Callable[[], object]
    """Called if the cleanup is given up. The token then expires by itself."""
    is_scheduled: bool = True

    @property
    def reply_timeout(self) -> float:
        """Seconds to wait for a reply. Short for one quorum node: renewals wait behind it."""
        return 1.0 if self.request[1].node is None else 0.2


@dataclass(slots=True, eq=False)
class BackgroundTask:
    """A function that the renewer calls later. It must not block."""

    do: Callable[[], object]
    due: float
    is_scheduled: bool = True

    @property
    def deadline(self) -> float:
        """The same as `due`, so that it is never called early."""
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
        self.inbox: dict[LeaseState | Cleanup | BackgroundTask, None] = {}
        """New items. A lease that ends is removed again."""
        self._heap: list[tuple[float, int, LeaseState | Cleanup | BackgroundTask]] = []
        self._order = count()
        self._compact_at = SLACK
        self._ready: list[LeaseState | Cleanup] = []
        self._cleanups: dict[tuple[Keys, tuple[str, ...]], Cleanup] = {}
        """The scheduled cleanups, by keys and arguments."""
        self._wake_at = math.inf
        self._closed = False
        self._renews_all = False

    def schedule(self, lease: LeaseState) -> bool:
        """Schedule a lease, or apply its new due time if it is scheduled.

        Returns False if the background job cannot run.
        """
        return self._submit(lease, lease.next_due())

    def unschedule(self, lease: LeaseState) -> None:
        """Remove a lease that has ended from `inbox`, if it is still there."""
        self.inbox.pop(lease, None)

    def _submit(self, item: LeaseState | Cleanup | BackgroundTask, due: float) -> bool:
        self.inbox[item] = None
        return due >= self._wake_at or self._background.wake(self)

    def schedule_cleanup(
        self,
        name: str,
        request: Request,
        *,
        fence: int,
        ttl: float,
        forget: Callable[[], object],
    ) -> None:
        """Send a release in the background until it is carried out, or the token has expired.

        It replaces a scheduled cleanup with the same request, whose reply may be older than a new
        grant to the token.
        """
        now = self._background.now()
        deadline = now + max(ttl, int(TOMBSTONE_MS) / 1000)
        earlier = self._cleanups.get(request[1:])
        if earlier is not None:
            earlier.is_scheduled = False
            deadline = max(deadline, earlier.deadline)
        cleanup = Cleanup(name, request, now, deadline, fence, forget)
        self._cleanups[request[1:]] = cleanup
        self._submit(cleanup, -math.inf)

    def renew_all(self) -> None:
        """Renew all leases now: the server may have lost them. Any thread may call this."""
        self._renews_all = True
        self._background.wake(self)

    def call_later(self, seconds: float, do: Callable[[], object]) -> BackgroundTask | None:
        """Call `do` after that many seconds, even if the client is closed by then.

        Returns None if the background job cannot run.
        """
        task = BackgroundTask(do, self._background.now() + seconds)
        if self._submit(task, task.due):
            return task
        self.inbox.pop(task, None)
        return None

    def close(self) -> None:
        """Stop renewing. Leases that are still held are still declared lost at their deadlines."""
        self._closed = True
        if self._wake_at < math.inf:
            self._background.wake(self)

    async def run(self) -> None:
        """Work until no item is scheduled."""
        idle_since: float | None = None
        while True:
            self._wake_at = math.inf
            wake_at = self._advance()
            if self._ready:
                await self._send_batch()
                continue
            now = self._background.now()
            if wake_at is not None:
                idle_since = None
            elif idle_since is None:
                idle_since = now
            elif self._closed or now >= idle_since + IDLE_TIMEOUT:
                return
            self._wake_at = wake_at or now + IDLE_POLL
            if not self.inbox:
                await self._background.sleep_until(self._wake_at)

    def _set_due(self, item: LeaseState | Cleanup | BackgroundTask, due: float) -> None:
        item.due = due
        heappush(self._heap, (due, next(self._order), item))

    def _drain_inbox(self) -> None:
        while self.inbox:
            try:
                item, _ = self.inbox.popitem()
            except KeyError:  # another thread has removed the last one
                break
            if item.is_scheduled:
                self._set_due(item, item.next_due() if isinstance(item, LeaseState) else item.due)
        # A closed client drops ended items at once, so that its job can end.
        if len(self._heap) > self._compact_at or self._closed:
            self._heap = [
                (due, order, item)
                for due, order, item in self._heap
                if item.is_scheduled and item.due == due
            ]
            heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + SLACK

    def _advance(self) -> float | None:
        """Declare losses, collect what is to be sent, and return when the next item is due."""
        self._drain_inbox()
        now = self._background.now()
        if self._renews_all:
            self._renews_all = False
            for item in {item for _, _, item in self._heap}:
                if isinstance(item, LeaseState):
                    self._set_due(item, now)
        while self._heap:
            due, _, item = self._heap[0]
            if not item.is_scheduled or item.due != due:
                heappop(self._heap)
                continue
            if due > now + _early(item, due):
                return due
            heappop(self._heap)
            if isinstance(item, BackgroundTask):
                item.is_scheduled = False
                item.do()
                continue
            if now >= item.deadline:
                self._give_up(item)
                continue
            # Schedule its deadline first. It then stays in the heap while the request waits or is
            # outstanding.
            self._set_due(item, item.deadline)
            if self._is_to_be_sent(item, now):
                self._ready.append(item)
        return None

    def _on_tick(self) -> float:
        """Do everything but sending; return when to call this again."""
        due, soon = self._advance(), self._background.now() + CHECK_INBOX_EVERY
        return soon if due is None else min(due, soon)

    def _give_up(self, item: LeaseState | Cleanup) -> None:
        if isinstance(item, LeaseState):
            item.lose(item.expiry_reason())
            return
        self._end(item)
        item.forget()
        if item.request[1].node is not None:  # `node_failed` was reported for it
            return
        detail = "its token could not be removed from the server, and stays until it expires"
        self._report(Event("cleanup_failed", item.name, item.fence, detail))

    def _end(self, cleanup: Cleanup) -> None:
        cleanup.is_scheduled = False
        if self._cleanups.get(cleanup.request[1:]) is cleanup:
            del self._cleanups[cleanup.request[1:]]

    def _prepare_renewal(self, lease: LeaseState, now: float) -> bool:
        """Return whether to send a renewal now.

        Also ends the renewal at `max_hold` or if the lease is abandoned, drops a finished task, and
        reports `max_hold` and `not_released`, once each.
        """
        if self._closed:
            return False
        if lease.renewing and now + _early(lease, lease.renew_until) >= lease.renew_until:
            lease.renewing = False
            detail = f"held for max_hold={lease.spec.max_hold} s: no longer renewed"
            self._report(Event("max_hold", lease.spec.name, lease.fence, detail))
        if lease.is_abandoned is not None and lease.is_abandoned():
            lease.renewing = False
        if not lease.renewing:
            return False
        # A finished task keeps its result, which may refer to the lease. Drop the task, or the
        # lease is never collected and reported.
        if lease.spec.owner is None and lease.actor is not None and self._has_ended(lease.actor):
            lease.actor = None
        if lease.is_dropped and not lease.reported_dropped:
            lease.reported_dropped = True
            self._report(Event("not_released", lease.spec.name, lease.fence, _dropped(lease)))
        return True

    def _is_to_be_sent(self, item: LeaseState | Cleanup, now: float) -> bool:
        return item.is_scheduled and (
            not isinstance(item, LeaseState) or self._prepare_renewal(item, now)
        )

    def _next_batch(self) -> list[LeaseState | Cleanup]:
        """Return what is sent next.

        Cleanups on single nodes of a quorum are sent separately, so that renewals do not wait for a
        node that hangs.
        """
        batch, self._ready = self._ready[:BATCH], self._ready[BATCH:]
        urgent: list[LeaseState | Cleanup] = []
        others: list[LeaseState | Cleanup] = []
        for item in batch:
            is_urgent = isinstance(item, LeaseState) or item.request[1].node is None
            (urgent if is_urgent else others).append(item)
        if not urgent:
            return others
        self._ready += others
        return urgent

    async def _send_batch(self) -> None:
        # Checked again: the items may have waited for the replies to an earlier batch.
        sent_at = self._background.now()
        batch = [item for item in self._next_batch() if self._is_to_be_sent(item, sent_at)]
        if not batch:
            return
        # Invariant: no lease is renewed late because the replies to this batch are awaited. So wait
        # no longer than the reply timeout of any lease that is renewed.
        limits = [
            item.reply_timeout
            for _, _, item in self._heap
            if isinstance(item, LeaseState) and item.is_scheduled and item.renewing
        ]
        timeout = min([max(item.reply_timeout for item in batch), *limits])
        requests = [_request(item, sent_at) for item in batch]
        try:
            replies = await self._background.call_many(requests, timeout, self._on_tick)
        except Exception as error:  # noqa: BLE001 - any error means that nothing was renewed
            replies = [NodeUnavailable(f"not renewed: {error!r}")] * len(batch)
        for item, request, reply in zip(batch, requests, replies, strict=True):
            if isinstance(item, LeaseState):
                item.note_downgrade(request, reply)
                if item.is_outdated(request, reply):
                    self._set_due(item, sent_at)
                    continue
            if item.is_scheduled:
                self._handle_reply(item, sent_at, reply)

    def _handle_reply(self, item: LeaseState | Cleanup, sent_at: float, reply: Reply) -> None:
        now = self._background.now()
        if isinstance(reply, HoldfastError):
            if isinstance(item, LeaseState) and not item.last_renewal_failed:
                item.last_renewal_failed = True
                self._report(Event("renewal_failed", item.spec.name, item.fence, str(reply)))
            if isinstance(item, Cleanup) and self._closed:
                self._give_up(item)
            else:
                self._set_due(item, min(now + item.reply_timeout / 2, item.deadline))
        elif not isinstance(item, LeaseState):
            self._end(item)
        elif not reply:
            item.lose(item.refusal_reason(reply, now))
        elif item.apply_renewal(sent_at, item.spec.ttl, now):
            self._set_due(item, item.next_due())


def _dropped(lease: LeaseState) -> str:
    info = parse_token(lease.token.encode())
    name = "" if info is None else f", acquired by {info.thread!r},"
    return (
        f"its lease{name} was garbage-collected without release(): the lock stays held until its "
        "client is closed or its process ends"
    )


def _early(item: LeaseState | Cleanup | BackgroundTask, due: float) -> float:
    """Return how many seconds early an item may be handled.

    That is less than the pause before a retry, which would otherwise be sent at once. A deadline is
    never early.
    """
    if due >= item.deadline:
        return 0.0
    if isinstance(item, LeaseState):
        return min(EARLY_MAX, item.spec.first_due / 2, item.reply_timeout / 4)
    return EARLY_MAX


def _request(item: LeaseState | Cleanup, now: float) -> Request:
    if not isinstance(item, LeaseState):
        return item.request
    # Request at least the time that an extended lease has left: a quorum may write the lease to a
    # node that lost it, and that node has only this ttl.
    return item.renewal_request(max(item.spec.ttl, ttl_of(item.deadline - now)))
