"""Line: the waiters of one client on one pub/sub channel.

A client has one channel. In a cluster it has one per hash tag, because a channel is on the node of
its locks; several lines then share a connection (`wire.exchange`).

The server has the queue of each lock, and publishes messages for the tokens in it. This module
handles them, without I/O. The owner of the connection calls `opened`, `heard`, `tick` and `cut`.

**The age of a grant.** A grant that the server pushes is valid for a short window, which the server
counts from a moment that the client does not know. But messages and replies arrive on one
connection in order: a grant that arrives after the reply to a PING was made after that PING was
sent. It was also made after its waiter was registered. So a grant counts from the later of these
two moments: one that is read only after a pause of the process has expired. A grant that comes with
the reply to a release of this client was made after that release was sent.

**A lost message.** For each lock there is a moment at which one waiter has to request again: when
the lease of the holder, or the window of a grant, should be over. `tick` then has the first waiter
do so. After a lost connection all waiters request again.

One thread or event loop calls `opened`, `heard`, `tick` and `cut`, and only it uses the timers. All
other threads register waiters in a dictionary, append to deques, and set single fields of a waiter
or a line, each of which is one atomic step.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.messages import read_message
from holdfast.core.subscription import Subscription
from holdfast.keys import tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.messages import Message
    from holdfast.port import Command, Signal

PING_EVERY = 1.0
"""Seconds between two PINGs while there are waiters."""

PATIENCE = 2.0
"""Seconds without a reply to a PING after which the connection counts as lost."""

REQUEST_WITHIN = 1800.0
"""Most seconds until a waiter requests again. The server deletes an idle queue after 3,600."""

LAG = 0.05
"""Seconds by which a tick may be late before this process counts as having been paused."""

NEVER = math.inf

_MIN_PARTS = 2  # of a PONG: the word and the payload

_QUEUED, _LEFT, _GRANTED, _WATCHES = "queued", "left", "granted", "watches"


class Grant(NamedTuple):
    """The waiter has the lock for `seconds`, from some moment after `since` on."""

    fence: int
    seconds: float
    since: float


class Waiter:
    """An attempt that waits. The line sets `grant` or `ask` (request again), then `signal`."""

    __slots__ = ("ask", "grant", "key", "line", "report_at", "signal", "since", "token", "waits")

    def __init__(self, line: Line, token: str, key: bytes, signal: Signal, since: float) -> None:
        self.line = line
        self.since = since  # no request with its token is older, so no grant to it is
        self.report_at = NEVER  # when the attempt has to be woken to report that it waits
        self.token = token
        self.key = key
        self.signal = signal
        self.grant: Grant | None = None
        self.ask = False
        self.waits = False  # it is among the waiters of a timer

    def recheck(self) -> None:
        """Have the attempt request again."""
        self.ask = True
        self.signal.set()

    def queued(self, asked_at: float, left: float) -> None:
        """Note that the token is in the queue, and that the holder has `left` seconds."""
        self.line.hand_in(_QUEUED, self, asked_at, left)
        # After `hand_in`. In the other order a grant between the two lines would clear `waits`, and
        # nobody would remove the entry that is handed in then.
        self.waits = True

    def leave(self) -> None:
        """Remove it from its timer. The token stays registered: nobody reads a late grant to it."""
        if self.waits:
            self.waits = False
            self.line.hand_in(_LEFT, self, NEVER, NEVER)

    def forget(self) -> None:
        """Unregister the token: a later grant to it is released in the background."""
        self.line.forget(self.token)

    def forget_after_drain(self, now: float) -> None:
        """Unregister the token when every message that was sent before now has arrived."""
        self.line.forget_after_drain(self.token, now)


class _Timer:
    """The waiters for one lock, in order, and when one of them has to request again."""

    __slots__ = ("due", "notified_at", "scheduled", "waiters")

    def __init__(self) -> None:
        self.waiters: OrderedDict[str, Waiter] = OrderedDict()
        self.due: float
        self.notified_at = -NEVER  # when the last message about this lock arrived
        self.scheduled = NEVER  # when its entry in the heap is due


class Line:
    """The waiters on one channel."""

    def __init__(
        self,
        channel: bytes,
        hand_back: Callable[[bytes, str, int], None],
        leave_queue: Callable[[bytes, str, int], None],
    ) -> None:
        self.channel = channel
        self.sharded = bool(tag_of(channel))
        """It uses sharded pub/sub, in a cluster."""
        self.subscription: Subscription | None = None
        """None while there is no connection."""
        self.deaf_until = -NEVER
        """No subscription is tried before this time: it failed, or the server refuses it."""
        self.wake_at = NEVER
        """When the owner of the connection calls `tick` next by itself; -inf during a tick."""
        self._rouse: Callable[[], None] = _nobody
        self._hand_back = hand_back
        self._leave_queue = leave_queue
        self._known: dict[str, Waiter] = {}
        self._inbox: deque[tuple[str, Waiter, float, float]] = deque()
        self._timers: dict[bytes, _Timer] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._order = count()
        self._waiting = 0
        self._paused = False  # the last tick was late: the timeout of PINGs is not checked
        self._heard_since: float  # while there is a connection
        self._pings: deque[tuple[bytes, float]] = deque()
        self._to_forget: deque[tuple[str, float]] = deque()
        self._rechecked_at = -NEVER
        self._to_recheck: deque[bytes] = deque()

    # For the attempts that wait

    def enter(self, token: str, key: bytes, signal: Signal, now: float) -> Waiter:
        """Register a waiter, before its first request: from then on it may be granted the lock."""
        waiter = self._known[token] = Waiter(self, token, key, signal, now)
        return waiter

    def hand_in(self, what: str, waiter: Waiter, at: float, seconds: float) -> None:
        """Note what happened to a waiter. A waiter for its lock requests `seconds` after `at`."""
        self._inbox.append((what, waiter, at, seconds))
        if at + seconds < self.wake_at:
            self._rouse()

    def forget(self, token: str) -> None:
        """Unregister a token."""
        self._known.pop(token, None)

    def forget_after_drain(self, token: str, now: float) -> None:
        """Unregister the token when every message that was sent before now has arrived.

        Without a connection it is kept for the next one. The server may have subscribed that one,
        and sent a message, before the client knows that it is open.
        """
        self._to_forget.append((token, now))
        if now < self.wake_at:
            self._rouse()

    def places_lost(self, asked_at: float, now: float) -> None:
        """Have all waiters request again, once: a request at `asked_at` found places lost."""
        if asked_at >= self._rechecked_at:
            self._rechecked_at = now
            self.recheck_all()

    def recheck_all(self) -> None:
        """Have all waiters request again."""
        for waiter in list(self._known.values()):
            waiter.recheck()

    def recheck_soon(self, key: bytes) -> None:
        """Have all waiters for the lock with this key request again: a grant may be lost.

        The next `tick` does it, once for all callers. Without a connection all request anyway.
        """
        if self.subscription is not None:
            self._to_recheck.append(key)
            self._rouse()

    # For the owner of the connection

    def opened(self, sent_at: float, rouse: Callable[[], None]) -> None:
        """Note that the channel is subscribed to, by a request that was sent at `sent_at`."""
        self._pings.clear()
        self._heard_since = sent_at
        self._rouse = rouse
        self.subscription = Subscription()

    def cut(self, now: float) -> None:
        """Note that the connection is lost, and perhaps a grant with it."""
        lost, self.subscription = self.subscription, None
        if lost is not None:
            lost.on_echo()
        self._rouse = _nobody
        self.wake_at = NEVER
        self._to_recheck.clear()
        while self._to_forget:
            self.forget(self._to_forget.popleft()[0])
        self._rechecked_at = now
        self.recheck_all()

    def heard(self, message: object, now: float) -> None:
        """Handle one message.

        Raises:
            ValueError: it is no message of holdfast.
        """
        if not isinstance(message, list) or len(message) < _MIN_PARTS:
            raise ValueError("not a message")
        if message[0] == b"pong":
            self._ponged(message[1])
        if message[0] != b"message":
            return
        received = read_message(message[-1])
        waiter, subscription = self._known.get(received.token), self.subscription
        if received.kind == b"G":
            since = -NEVER
            # Another server than the one that replies to PINGs may pass on a grant. Its age is not
            # known then, and it has to be confirmed.
            if waiter is not None and subscription is not None and subscription.is_counted:
                since = max(self._heard_since, waiter.since)
            self.granted(received, since, now)
        elif received.kind == b"P":
            if subscription is not None:
                subscription.on_echo()
        elif waiter is None:
            # The attempt has ended, but its token is still in the queue: leaving failed, or was
            # undone by a failover. There it would receive messages that a waiter needs.
            self._leave_queue(received.key, received.token, received.delay_ms)
        elif received.kind == b"A":
            waiter.recheck()
        else:
            self.hand_in(_WATCHES, waiter, now, received.ms / 1000)

    def _ponged(self, payload: bytes) -> None:
        while self._pings:
            ping, sent_at = self._pings.popleft()
            if ping == payload:
                self._heard_since = sent_at
                while self._to_forget and self._to_forget[0][1] < sent_at:
                    self.forget(self._to_forget.popleft()[0])
                return
        raise ValueError("a reply to a PING that was not sent")

    def granted(self, message: Message, since: float, now: float) -> None:
        """Handle a grant that was made after `since`; it may have come with a reply."""
        waiter, seconds = self._known.get(message.token), message.ms / 1000
        if waiter is None or waiter.key != message.key:
            self._hand_back(message.key, message.token, message.delay_ms)
            return
        waiter.grant, waiter.waits = Grant(message.fence, seconds, since), False
        waiter.signal.set()
        # When the window of the grant ends, the next waiter of this client requests the lock.
        self.hand_in(_GRANTED, waiter, now, seconds)

    def tick(self, now: float) -> tuple[Sequence[Command], float]:
        """Do what is due; return what to send now, and when to call this again.

        Raises:
            TimeoutError: the server does not reply to PINGs.
        """
        paused = now > self.wake_at + LAG and not self._paused
        self._paused = paused
        self.wake_at = -NEVER  # it is running: `hand_in` does not have to wake it
        self._take_in()
        self._ask_where_due(now)
        keys = set()
        while self._to_recheck:
            keys.add(self._to_recheck.popleft())
        if keys:
            for waiter in list(self._known.values()):
                if waiter.key in keys:
                    waiter.recheck()
        ping: list[Command] = []
        wake_at = NEVER
        needs_pings = bool(self._waiting or self._to_forget)
        if needs_pings:
            oldest = self._pings[0][1] if self._pings else NEVER
            if now >= oldest + PATIENCE and not paused:
                raise TimeoutError("PINGs are not answered")
            last = self._pings[-1][1] if self._pings else self._heard_since
            if now >= last + PING_EVERY:
                payload, last = b"%d" % next(self._order), now
                self._pings.append((payload, now))
                ping.append((b"PING", payload))
                self._wake_to_report(now)
            wake_at = last + PING_EVERY
        if self._heap:
            wake_at = min(wake_at, self._heap[0][0])
        self.wake_at = wake_at
        # What other threads handed in meanwhile did not wake the owner.
        has_more = self._inbox or (self._to_forget and not needs_pings)
        return (ping, now) if has_more else (ping, wake_at)

    def _wake_to_report(self, now: float) -> None:
        """Wake waiters whose report is due. One timer per waiter would make every wait slower."""
        for waiter in list(self._known.values()):
            if now >= waiter.report_at:
                waiter.report_at = NEVER
                waiter.signal.set()

    @property
    def listening(self) -> bool:
        """The channel is subscribed to."""
        return self.subscription is not None

    @property
    def idle(self) -> bool:
        """There are no waiters."""
        return not self._known and not self._inbox

    def _take_in(self) -> None:
        while self._inbox:
            what, waiter, at, seconds = self._inbox.popleft()
            timer = self._timers.get(waiter.key)
            if timer is None:
                if what is _LEFT:
                    continue
                timer = self._timers[waiter.key] = _Timer()
            if what is _LEFT or what is _GRANTED:
                self._take_out(timer, waiter.token)
            elif what is _QUEUED and waiter.token not in timer.waiters:
                timer.waiters[waiter.token] = waiter
                self._waiting += 1
            if what is _GRANTED or what is _WATCHES:
                timer.notified_at = at
            elif what is _LEFT or at <= timer.notified_at:  # a message was newer
                continue
            self._request_at(waiter.key, timer, at + min(seconds, REQUEST_WITHIN))

    def _take_out(self, timer: _Timer, token: str) -> None:
        if timer.waiters.pop(token, None) is not None:
            self._waiting -= 1

    def _request_at(self, key: bytes, timer: _Timer, due: float) -> None:
        timer.due = due
        if due < timer.scheduled:
            timer.scheduled = due
            heappush(self._heap, (due, next(self._order), key))

    def _ask_where_due(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heappop(self._heap)
            timer = self._timers.get(key)
            if timer is None or timer.scheduled != due:
                continue
            timer.scheduled = NEVER
            # An attempt that was interrupted may have been forgotten without leaving its timer.
            for token in [token for token in timer.waiters if token not in self._known]:
                self._take_out(timer, token)
            if not timer.waiters:
                del self._timers[key]
            elif timer.due > now:
                self._request_at(key, timer, timer.due)
            else:
                # If it is not granted the lock, the next one requests after a second.
                token, waiter = next(iter(timer.waiters.items()))
                timer.waiters.move_to_end(token)
                waiter.recheck()
                self._request_at(key, timer, now + PING_EVERY)


def _nobody() -> None:
    """Without a connection there is nothing to wake."""
