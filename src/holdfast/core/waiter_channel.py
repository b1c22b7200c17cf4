"""The waiters of one client on one pub/sub channel.

The server has the queue of each lock, and publishes a message to a client when one of its waiters
has to act. This module handles these messages. It does no I/O: the reader of the connection calls
`on_subscribed`, `on_message`, `tick` and `on_disconnect`.

A client has one channel. In a cluster it has one channel per hash tag, on the node of the locks
with this tag. The channels on one node share a connection (`wire.node_subscriptions`).

**The age of a grant.** A pushed grant is valid for a short window. The server counts the window
from a moment that the client does not know. Two earlier moments are known:

- Messages and replies arrive in order on one connection. So a grant that arrives after the reply to
  a PING was made after that PING was sent (`_synced_at`).
- No grant to a waiter is older than the waiter.

A grant counts from the later of the two. So a grant that a paused process reads too late has
expired. A grant may also arrive in the reply to a request of this client, mostly a release: such a
grant was made after that request was sent.

**A grant that no caller waits for** is released: one to a token that is not registered. So a token
stays registered until its release has a reply.

**A lost message.** Each lock has a timer. It is due when the lease of the holder, or the window of
a grant, should be over. Then `tick` has the first waiter request again. When the connection is
lost, all waiters request again.

**Threads.** One thread or event loop reads the connection, and only it uses the timers. Any other
thread adds waiters to a dictionary, appends to a deque, or sets a field of a waiter or channel.
Each of these is one atomic step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from holdfast.core.messages import read_message
from holdfast.core.subscription import Subscription
from holdfast.core.waiter import LEFT, NEVER, QUEUED, Grant, Waiter
from holdfast.keys import tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.messages import Message
    from holdfast.port import Command, Signal

PING_EVERY = 1.0
"""Seconds between two PINGs while there are waiters."""

PING_TIMEOUT = 2.0
"""Seconds without a reply to a PING after which the connection counts as lost."""

REQUEST_WITHIN = 1800.0
"""Seconds. A waiter requests at least this often: the server deletes an idle queue after 3,600."""

LAG = 0.05
"""Seconds. A tick that is later than this means that the process was paused."""

_MIN_PARTS = 2  # a PONG has two parts: the word and the payload

_GRANTED, _REQUEST_LATER = "granted", "request later"


class _Timer:
    """The waiters for one lock, in order, and when the first of them has to request again."""

    __slots__ = ("due", "notified_at", "notified_early", "scheduled", "waiters")

    def __init__(self) -> None:
        self.waiters: OrderedDict[str, Waiter] = OrderedDict()
        self.notified_early: Waiter | None = None
        """A waiter that was to request later before the reply to its own request had arrived."""
        self.due: float
        self.notified_at = -NEVER  # when the last message about this lock arrived
        self.scheduled = NEVER  # the time of its entry in the heap


class WaiterChannel:
    """The waiters of one client on one channel.

    `return_grant` releases, in the background, a grant to a token that is not registered.
    `leave_queue` removes such a token from the queue. Both take the key of the lock, the token, and
    the lock delay in milliseconds.
    """

    def __init__(
        self,
        name: bytes,
        return_grant: Callable[[bytes, str, int], None],
        leave_queue: Callable[[bytes, str, int], None],
    ) -> None:
        self.name = name
        self.sharded = bool(tag_of(name))
        """Whether it uses sharded pub/sub, as in a cluster."""
        self.subscription: Subscription | None = None
        """None while there is no connection."""
        self.push_disabled_until = -NEVER
        """No subscription or probe begins before this time: one has failed, or was refused."""
        self.wake_at = NEVER
        """When the reader of the connection calls `tick` next; -inf during a tick."""
        self._wake: Callable[[], None] = _no_connection
        self._return_grant = return_grant
        self._leave_queue = leave_queue
        self._registered: dict[str, Waiter] = {}
        self._inbox: deque[tuple[str, Waiter, float, float]] = deque()
        self._timers: dict[bytes, _Timer] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._order = count()
        self._waiting = 0
        self._paused = False
        """The last tick was late, and skipped the PING check."""
        self._synced_at: float  # when the last PING with a reply, or the subscription, was sent
        self._pings: deque[tuple[bytes, float]] = deque()
        self._draining: deque[tuple[str, float]] = deque()
        self._rechecked_at = -NEVER
        self._to_recheck: deque[bytes] = deque()

    # For waiting attempts, in any thread

    def register(self, token: str, key: bytes, signal: Signal, now: float) -> Waiter:
        """Register a waiter, before the first request that may grant it the lock."""
        waiter = self._registered[token] = Waiter(self, token, key, signal, now)
        return waiter

    def submit(self, what: str, waiter: Waiter, at: float, seconds: float) -> None:
        """Pass an input to the next tick.

        It sets the lock's timer to `at + seconds`, when a waiter has to request again; unless it is
        LEFT, or QUEUED and older than the last message.
        """
        self._inbox.append((what, waiter, at, seconds))
        if at + seconds < self.wake_at:
            self._wake()

    def unregister(self, token: str, drain_from: float | None = None) -> None:
        """Unregister the token. A later grant to it is released in the background.

        With `drain_from` it is unregistered when all messages that were sent before that time have
        arrived. Without a connection, the token stays until the next connection has answered a
        PING: the server may publish there before the client has read the reply to its SUBSCRIBE.
        """
        if drain_from is None:
            self._registered.pop(token, None)
            return
        self._draining.append((token, drain_from))
        if drain_from < self.wake_at:
            self._wake()

    def places_lost(self, sent_at: float, now: float) -> None:
        """A request sent at `sent_at` found its place lost. Have all waiters request again.

        Does nothing if they were notified to request again after `sent_at`.
        """
        if sent_at >= self._rechecked_at:
            self._rechecked_at = now
            self.recheck_all()

    def recheck_all(self) -> None:
        """Have all waiters request again."""
        for waiter in list(self._registered.values()):
            waiter.recheck()

    def recheck_soon(self, key: bytes) -> None:
        """Have all waiters for the lock with this key request again: a grant may be lost.

        The next `tick` does it, once for all callers. Without a connection, `on_disconnect` has
        already done it.
        """
        if self.subscription is not None:
            self._to_recheck.append(key)
            self._wake()

    # For the reader of the connection, in one thread

    def on_subscribed(self, sent_at: float, wake: Callable[[], None]) -> None:
        """Note that the channel is subscribed to, by a request that was sent at `sent_at`."""
        self._pings.clear()
        self._synced_at = sent_at
        self._wake = wake
        self.subscription = Subscription()

    def on_disconnect(self, now: float) -> None:
        """Have all waiters request again: the connection is lost, and perhaps a grant with it."""
        self._wake = _no_connection
        self.wake_at = NEVER
        self._to_recheck.clear()
        while self._draining:
            self.unregister(self._draining.popleft()[0])
        self._rechecked_at = now
        # Last: as soon as this is None, another thread may subscribe. Its connection must not lose
        # the `_wake` that `on_subscribed` sets.
        lost, self.subscription = self.subscription, None
        if lost is not None:
            lost.on_echo()
        self.recheck_all()

    def on_message(self, message: object, now: float) -> None:
        """Handle one message.

        Raises:
            ValueError: it is no message of holdfast.
        """
        if not isinstance(message, list) or len(message) < _MIN_PARTS:
            raise ValueError("not a message")
        if message[0] == b"pong":
            self._on_pong(message[1])
        if message[0] != b"message":
            return
        received = read_message(message[-1])
        waiter, subscription = self._registered.get(received.token), self.subscription
        if received.kind == b"G":
            since = -NEVER
            # If the server does not count this subscription, a proxy or a replica may pass on the
            # grant. Then PINGs do not show its age, and it has to be confirmed.
            if waiter is not None and subscription is not None and subscription.is_counted:
                since = max(self._synced_at, waiter.since)
            self.on_grant(received, since, now)
        elif received.kind == b"P":
            if subscription is not None:
                subscription.on_echo()
        elif waiter is None:
            # The attempt has ended, but its token is still in the queue: a request to leave failed,
            # or a failover undid it. Each message to it is one that a waiter does not get.
            self._leave_queue(received.key, received.token, received.delay_ms)
        elif received.kind == b"A":
            waiter.recheck()
        else:
            self.submit(_REQUEST_LATER, waiter, now, received.ms / 1000)

    def _on_pong(self, payload: bytes) -> None:
        while self._pings:
            ping, sent_at = self._pings.popleft()
            if ping == payload:
                self._synced_at = sent_at
                while self._draining and self._draining[0][1] < sent_at:
                    self.unregister(self._draining.popleft()[0])
                return
        raise ValueError("a reply to a PING that was not sent")

    def on_grant(self, message: Message, since: float, now: float) -> None:
        """Handle a grant that was made after `since`, and arrived as a message or in a reply."""
        waiter, seconds = self._registered.get(message.token), message.ms / 1000
        if waiter is None or waiter.key != message.key:
            self._return_grant(message.key, message.token, message.delay_ms)
            return
        waiter.grant, waiter.in_timer = Grant(message.fence, seconds, since), False
        waiter.signal.set()
        # When the window of the grant is over, the next waiter of this client requests again.
        self.submit(_GRANTED, waiter, now, seconds)

    def tick(self, now: float) -> tuple[Sequence[Command], float]:
        """Do what is due; return the commands to send now, and when to call this again.

        Raises:
            TimeoutError: the server does not reply to PINGs.
        """
        # The first late tick after a pause skips the PING check: the PONG may be unread. The
        # reader reads what has arrived before the next tick.
        paused = now > self.wake_at + LAG and not self._paused
        self._paused = paused
        self.wake_at = -NEVER  # `submit` does not have to wake the reader during a tick
        self._drain_inbox()
        self._recheck_where_due(now)
        keys = set()
        while self._to_recheck:
            keys.add(self._to_recheck.popleft())
        if keys:
            for waiter in list(self._registered.values()):
                if waiter.key in keys:
                    waiter.recheck()
        ping: list[Command] = []
        wake_at = NEVER
        needs_pings = bool(self._waiting or self._draining)
        if needs_pings:
            oldest = self._pings[0][1] if self._pings else NEVER
            if now >= oldest + PING_TIMEOUT and not paused:
                raise TimeoutError("the server does not reply to PINGs")
            last = self._pings[-1][1] if self._pings else self._synced_at
            if now >= last + PING_EVERY:
                payload, last = b"%d" % next(self._order), now
                self._pings.append((payload, now))
                ping.append((b"PING", payload))
                self._wake_to_report(now)
            wake_at = last + PING_EVERY
        if self._heap:
            wake_at = min(wake_at, self._heap[0][0])
        self.wake_at = wake_at
        # Invariant: no input waits for longer than until it is due. Here: set `wake_at`, then look
        # at the inbox. `submit`, in another thread: append to the inbox, then look at `wake_at`.
        # Without this line an input that came during the tick would wait for the next one.
        has_more = self._inbox or (self._draining and not needs_pings)
        return (ping, now) if has_more else (ping, wake_at)

    def _wake_to_report(self, now: float) -> None:
        """Wake the waiters that have to report a long wait.

        It is done with the PINGs. A timer per waiter would cost each wait an entry in a heap.
        """
        for waiter in list(self._registered.values()):
            if now >= waiter.report_at:
                waiter.report_at = NEVER
                waiter.signal.set()

    @property
    def is_subscribed(self) -> bool:
        """Whether the channel is subscribed to."""
        return self.subscription is not None

    @property
    def idle(self) -> bool:
        """Whether there are no waiters."""
        return not self._registered and not self._inbox

    def _drain_inbox(self) -> None:
        while self._inbox:
            what, waiter, at, seconds = self._inbox.popleft()
            timer = self._timers.get(waiter.key)
            if timer is None:
                if what is LEFT:
                    continue
                timer = self._timers[waiter.key] = _Timer()
            if what is LEFT or what is _GRANTED:
                self._remove(timer, waiter.token)
            elif waiter.token not in timer.waiters:
                if what is QUEUED:
                    timer.waiters[waiter.token] = waiter
                    self._waiting += 1
                else:
                    timer.notified_early = waiter
            if what is LEFT:
                continue
            if what is QUEUED and at <= timer.notified_at:  # a later message has set the timer
                continue
            if what is not QUEUED:
                timer.notified_at = at
            self._request_at(waiter.key, timer, at + min(seconds, REQUEST_WITHIN))

    def _remove(self, timer: _Timer, token: str) -> None:
        if timer.waiters.pop(token, None) is not None:
            self._waiting -= 1

    def _request_at(self, key: bytes, timer: _Timer, due: float) -> None:
        timer.due = due
        if due < timer.scheduled:
            timer.scheduled = due
            heappush(self._heap, (due, next(self._order), key))

    def _recheck_where_due(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heappop(self._heap)
            timer = self._timers.get(key)
            if timer is None or timer.scheduled != due:
                continue
            timer.scheduled = NEVER
            # An interrupted attempt may have unregistered its token without leaving the timer.
            for token in [token for token in timer.waiters if token not in self._registered]:
                self._remove(timer, token)
            if not timer.waiters:
                del self._timers[key]
                if timer.notified_early is not None:
                    timer.notified_early.recheck()
            elif timer.due > now:
                self._request_at(key, timer, timer.due)
            else:
                # If this waiter is not granted the lock, the next one requests after a second.
                token, waiter = next(iter(timer.waiters.items()))
                timer.waiters.move_to_end(token)
                waiter.recheck()
                self._request_at(key, timer, now + PING_EVERY)


def _no_connection() -> None:
    """Do nothing: without a connection there is no reader to wake."""
