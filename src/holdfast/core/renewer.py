"""The renewer: the one background job of a client, which keeps its leases alive.

It owns time. A heap says which hold is due next, and for what: to be renewed, to have its renewal
ended by `max_hold`, or to be declared lost because its deadline has come. It also carries out
clean-ups that an interrupted operation could not finish. The rules:

1. Everything due within a short window is renewed in one pipeline.
2. A deadline is declared the moment it comes, also while answers are outstanding: a hung server
   must not make a loss known late.
3. A renewal without an answer is tried again until the strict deadline.
4. A hold whose release has begun is not renewed. A renewal may be under way at that moment; the
   release does not wait for it. If the server runs the release first, it refuses the renewal, as
   the lock is no longer the token's. The reply is ignored, as the hold is no longer live.
5. With nothing to watch the job lingers for a moment, so that a program which takes and releases
   locks all the time does not start and end it each time; then it ends, until the next `watch`.

Callers hand things in through a dictionary, whose single operations need no lock, and wake the
job only when what they hand in is due before it would wake by itself. A lease that is released
sooner is taken out again, so that short holdings never cost the job anything. The two sides meet
in the order "hand in, then look whether it sleeps" against "say that I wake, then look what was
handed in": whichever comes first, one of them sees the other.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from holdfast.core.events import Event
from holdfast.core.hold import Hold
from holdfast.core.spec import TOMBSTONE_MS, WINDOW_LONGEST, keys_of, settings_of, to_ms, ttl_of
from holdfast.core.token import read_party
from holdfast.errors import HoldfastError, NodeUnavailable
from holdfast.scripts import RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.port import Background, Keys, Reply, Request

_Same: TypeAlias = "tuple[int | None, Keys, tuple[str, ...]]"

WINDOW = 0.05
"""Seconds by which a renewal may come early, to share a pipeline with others."""

LOOK = 0.02
"""Seconds between two looks at what was handed in while answers are outstanding."""

BATCH = 1000
"""Requests in one pipeline, so that its answers come well within a command's timeout."""

NAP, LINGER = 0.1, 1.0
"""Seconds between two looks with nothing to watch, and after which the job ends."""

SLACK = 1000
"""Entries the heap may have beyond twice what was alive when it was last cleared of dead ones."""


class Cleanup:
    """The taking back of a token whose fate on the server is unknown."""

    __slots__ = (
        "again",
        "deadline",
        "due",
        "fence",
        "forget",
        "live",
        "name",
        "patience",
        "request",
    )

    def __init__(  # noqa: PLR0913 - what is known of it
        self,
        name: str,
        request: Request,
        *,
        now: float,
        deadline: float,
        fence: int,
        forget: Callable[[], object] | None,
    ) -> None:
        self.name = name
        self.request = request
        self.again = False
        """It was asked for since it was sent."""
        self.forget = forget
        """Called when nothing more is done about it."""
        # Renewals wait behind it: one node of several is not worth much of their time.
        self.patience = 1.0 if request[1].node is None else 0.2
        self.fence = fence
        self.live = True
        self.due = now
        self.deadline = deadline


class Errand:
    """Something to be done later, in passing: it must not block."""

    __slots__ = ("deadline", "do", "due", "live")

    def __init__(self, do: Callable[[], None], due: float) -> None:
        self.do = do
        self.due = self.deadline = due
        self.live = True


class Renewer:
    """Keeps the leases of one client, in one process, and tells when one is lost."""

    def __init__(
        self,
        background: Background,
        report: Callable[[Event], None],
        has_ended: Callable[[object], bool],
    ) -> None:
        self._background = background
        self._report = report
        self._has_ended = has_ended
        self.handed_in: dict[Hold | Cleanup | Errand, None] = {}
        """What was not looked at yet; whoever ends a hold takes it out again."""
        self._heap: list[tuple[float, int, Hold | Cleanup | Errand]] = []
        self._order = count()
        self._compact_at = SLACK
        self._ready: list[Hold | Cleanup] = []
        self._cleanups: dict[_Same, Cleanup] = {}
        """Those that are not over."""
        self._wake_at = math.inf
        self._closed = False
        self._looks_again = False

    def watch(self, hold: Hold, due: float) -> bool:
        """Watch the hold from now on, or look again at one whose next due time has changed.

        False if nothing can be done in the background.
        """
        self.handed_in[hold] = None
        return due >= self._wake_at or self._background.rouse(self)

    def clean_up(
        self,
        name: str,
        request: Request,
        *,
        fence: int,
        ttl: float = 0,
        forget: Callable[[], object] | None = None,
    ) -> None:
        """See to it, for as long as it matters, that a token is taken back; then `forget` it.

        However often it is asked for, it is one thing to do.
        """
        now = self._background.now()
        deadline = now + max(ttl, int(TOMBSTONE_MS) / 1000)
        cleanup = self._cleanups.get(_same(request))
        if cleanup is not None:
            cleanup.deadline = max(cleanup.deadline, deadline)
            cleanup.again = True
        # Noted first, looked at second: when it is over these two are done the other way.
        if cleanup is None or not cleanup.live:
            cleanup = self._cleanups[_same(request)] = Cleanup(
                name, request, now=now, deadline=deadline, fence=fence, forget=forget
            )
        self.handed_in[cleanup] = None
        self._background.rouse(self)

    def look_again(self) -> None:
        """Renew now all that is to be renewed some time: it may be lost. Called from any thread."""
        self._looks_again = True
        self._background.rouse(self)

    def later(self, seconds: float, do: Callable[[], None]) -> Errand | None:
        """Call `do` after that many seconds, even if the client is closed by then.

        None if nothing can be done in the background.
        """
        errand = Errand(do, self._background.now() + seconds)
        self.handed_in[errand] = None
        if errand.due >= self._wake_at or self._background.rouse(self):
            return errand
        self.handed_in.pop(errand, None)
        return None

    def close(self) -> None:
        """Renew nothing from now on; the deadlines of what is still held are watched to the end."""
        self._closed = True
        if self._wake_at < math.inf:
            self._background.rouse(self)

    async def run(self) -> None:
        """Work until nothing is watched any more."""
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

    def _schedule(self, item: Hold | Cleanup | Errand, due: float) -> None:
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
        """Declare what is over, collect what is to be sent, and say when the next thing is due."""
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
            if isinstance(item, Errand):
                item.live = False
                item.do()
                continue
            if now >= item.deadline:
                self._give_up(item)
                continue
            # Its deadline stays watched while it waits to be sent and to be answered.
            self._schedule(item, item.deadline)
            if self._is_to_be_sent(item, now):
                self._ready.append(item)
        return None

    def _meanwhile(self) -> float:
        """Go on with everything but sending; say when to be called again."""
        due, soon = self._advance(), self._background.now() + LOOK
        return soon if due is None else min(due, soon)

    def _give_up(self, item: Hold | Cleanup) -> None:
        if isinstance(item, Hold):
            item.lose(item.overdue())
            return
        if self._begins_anew(item):
            return
        if item.forget is not None:
            item.forget()
        if item.request[1].node is not None:  # one of several, which is known to fail
            return
        detail = "the server could not be told to forget it: it stays until it expires, if ever"
        self._report(Event("cleanup_failed", item.name, item.fence, detail))

    def _begins_anew(self, cleanup: Cleanup) -> bool:
        """End it; say whether another begins, because it was asked for since it was sent."""
        cleanup.live = False
        if self._cleanups.get(_same(cleanup.request)) is cleanup:
            del self._cleanups[_same(cleanup.request)]
        if not cleanup.again:
            return False
        left = cleanup.deadline - self._background.now()
        self.clean_up(
            cleanup.name, cleanup.request, fence=cleanup.fence, ttl=left, forget=cleanup.forget
        )
        return True

    def _may_renew(self, hold: Hold, now: float) -> bool:
        """Say whether a renewal may be sent now; report that `max_hold` ends its renewal."""
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
        """Take what is sent next; what waits for one node of several is sent by itself, later."""
        batch, self._ready = self._ready[:BATCH], self._ready[BATCH:]
        first = [item for item in batch if isinstance(item, Hold) or item.request[1].node is None]
        if not first or len(first) == len(batch):
            return batch
        self._ready += [item for item in batch if item not in first]
        return first

    async def _work(self) -> None:
        # What was collected may have waited since for the replies to an earlier batch.
        asked_at = self._background.now()
        batch = [item for item in self._next_batch() if self._is_to_be_sent(item, asked_at)]
        if not batch:
            return
        timeout = max(item.patience for item in batch)
        requests = [_request(item, asked_at) for item in batch]
        for item in batch:
            if isinstance(item, Cleanup):
                item.again = False
        try:
            replies = await self._background.call_many(requests, timeout, self._meanwhile)
        except Exception as error:  # noqa: BLE001 - whatever it is, these are not renewed yet
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
            self._begins_anew(item)
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


def _same(request: Request) -> _Same:
    """What tells it from all others."""
    _, keys, args = request
    return keys.node, keys, args


def _early(item: Hold | Cleanup | Errand, due: float) -> float:
    """By how much this may be done before it is due: less than the pause after a failure."""
    if due >= item.deadline:
        return 0.0
    if isinstance(item, Hold):
        return min(WINDOW, item.spec.first_due / 2, item.patience / 4)
    return WINDOW


def _request(item: Hold | Cleanup, now: float) -> Request:
    if not isinstance(item, Hold):
        return item.request
    # As long as the holder believes in it, if it was extended: a node may be given it anew.
    return item.renewal(max(item.spec.ttl, ttl_of(item.deadline - now)))


def taking_back_blindly(
    key: bytes, token: str, delay_ms: int, tombstone: str = TOMBSTONE_MS, *, guarded: bool = False
) -> Request:
    """Make the request that ends a token of which only the lock's key and delay are known."""
    owner = token.rpartition(":")[2]
    group = owner if owner.startswith("&") else ""
    settings = settings_of(delay_ms, group, guarded=guarded)
    return RELEASE, keys_of(key, holds=True), (token, to_ms(WINDOW_LONGEST), tombstone, settings)
