"""The subscriptions of many listeners on one pub/sub connection to a cluster node.

In a cluster, a channel belongs to the slot of its lock. So a client has one pub/sub connection per
node. On it, the client subscribes to one channel for each lock of that node that it waits for, and
unsubscribes when no waiter has used the channel for a while.

`NodeSubscriptions` does no I/O. For the reader of the connection (`wire.pubsub_thread` or
`wire.pubsub_asyncio`) it is the listener. For the listeners it is the reader of the connection.

When a slot moves away, or the node is no longer its primary, the server unsubscribes the channel
and reports that with SUNSUBSCRIBE. For the listener this is the end of its connection.

Before that, the node may forward messages that its successor publishes. So does a replica that the
client subscribed on because of an outdated slot map. Such a message must not be used, for two
reasons. The successor does not count subscribers of other nodes: it considers the waiter dead, and
revokes its grant. And the age of a grant is measured by PINGs (`core.waiter_channel`), which only
the granting server answers in order with its grants. So each message begins with the id of the node
that published it. A message from another node ends the subscription, too.

Any thread may call `contains`, `submit` and the `wake` callbacks. Only the thread or loop that owns
the connection uses the rest.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

import hiredis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Command, Listener

IDLE_TIMEOUT = 5.0
"""Seconds after which an unused channel is unsubscribed."""

MIN_PING_INTERVAL = 0.25
"""Seconds between two PINGs, at least. One PING serves many listeners."""

_ENDED = "the connection ended"


class SubscriptionRequest:
    """A request to subscribe a listener, or to unsubscribe it."""

    def __init__(self, listener: Listener, *, subscribe: bool) -> None:
        self.listener = listener
        self.subscribe = subscribe
        self.sent_at = 0.0
        self.error: str | None = None
        """Why it failed: the error reply of the server, or that the connection ended."""
        self.on_done: Callable[[], object] = _do_nothing
        """Called when it has succeeded or failed."""

    def finish(self, error: str | None) -> None:
        """Report success (None) or the error."""
        self.error = error
        self.on_done()


class _Entry:
    """One subscribed channel."""

    __slots__ = ("due", "idle_since", "listener", "scheduled")

    def __init__(self, listener: Listener, now: float) -> None:
        self.listener = listener
        self.idle_since = now
        self.due = now
        self.scheduled = math.inf  # the time of its entry in the heap


class NodeSubscriptions:
    """Distributes the messages of one connection to its listeners, and merges their commands."""

    name = b""

    def __init__(self, on_slot_lost: Callable[[], None]) -> None:
        self._on_slot_lost = on_slot_lost
        """Called when the server unsubscribes a channel: the slot map has changed."""
        self.is_subscribed = False
        self._node_id = b""
        """The id of the node, from CLUSTER MYID; empty until the node has replied."""
        self._error = _ENDED
        self._unsent: list[Command] = []
        self._wake: Callable[[], None] = _do_nothing
        self._requests: deque[SubscriptionRequest] = deque()
        self._awaiting_reply: deque[SubscriptionRequest] = deque()
        """The requests whose SSUBSCRIBE was sent and has no reply yet, in order."""
        self._entries: dict[bytes, _Entry] = {}
        self._woken: deque[_Entry] = deque()
        self._heap: list[tuple[float, int, _Entry]] = []
        self._order = count()
        self._unsent_pings: list[tuple[_Entry, bytes]] = []
        self._pings: deque[tuple[bytes, list[tuple[_Entry, bytes]]]] = deque()
        self._pinged_at = 0.0

    # Called by threads that want to subscribe

    def contains(self, listener: Listener) -> bool:
        """Whether the listener is subscribed here, as far as is known."""
        entry = self._entries.get(listener.name)
        return entry is not None and entry.listener is listener

    def submit(self, request: SubscriptionRequest) -> None:
        """Queue a request for the reader of the connection. Can be called from any thread."""
        self._requests.append(request)
        # A request must not stay queued after the connection has ended.
        # This thread: append the request, then read `is_subscribed`.
        # The reader, at the end: clear `is_subscribed`, then fail the queued requests.
        # In any other order, neither of the two might fail the request.
        if self.is_subscribed:
            self._wake()
            return
        with suppress(ValueError):  # the reader has already failed it
            self._requests.remove(request)
            request.finish(_ENDED)

    # Called by the reader of the connection

    def on_subscribed(self, sent_at: float, wake: Callable[[], None]) -> None:
        """Start to use a new connection."""
        self._node_id, self._error = b"", _ENDED
        self._unsent = [(b"CLUSTER", b"MYID")]  # must precede the first subscription
        self._pinged_at = sent_at
        self._wake = wake
        self.is_subscribed = True

    def on_disconnect(self, now: float) -> None:
        """End all subscriptions: the connection has ended."""
        # When `is_subscribed` is cleared, another thread may open a new connection at once.
        # The old reader: reset everything, clear `is_subscribed`, then fail the requests.
        # The new reader: `on_subscribed`, then subscribe the listeners that requested it.
        # In any other order, the old reader could reset what belongs to the new connection.
        error = self._error
        self._wake = _do_nothing
        entries, self._entries = self._entries, {}
        unanswered, self._awaiting_reply = self._awaiting_reply, deque()
        self._heap.clear()
        self._woken.clear()
        self._pings.clear()
        self._unsent_pings.clear()
        for entry in entries.values():
            entry.listener.on_disconnect(now)
        self.is_subscribed = False
        for request in unanswered:
            request.finish(error)
        with suppress(IndexError):  # `submit` or the new reader may remove a request
            while self._requests:
                self._requests.popleft().finish(error)

    @property
    def idle(self) -> bool:
        """Whether no listener needs the connection."""
        return not self._entries and not self._awaiting_reply and not self._requests

    def on_message(self, message: Any, now: float) -> None:  # noqa: ANN401 - any message
        """Handle one message.

        Raises:
            ValueError: it is not a valid message, or an unexpected error reply.
        """
        if isinstance(message, hiredis.ReplyError):
            if not self._node_id or not self._awaiting_reply:
                self._error = str(message)
                raise ValueError(self._error)
            self._awaiting_reply.popleft().finish(str(message))
            return
        if not self._node_id and isinstance(message, bytes):
            self._node_id = message
            return
        if isinstance(message, bytes):  # without any subscription, the reply to PING is its payload
            message = [b"pong", message]
        try:
            kind, about, *rest = message
        except (TypeError, ValueError):
            raise ValueError("not a message") from None
        entry = self._entries.get(about)
        if kind == b"pong":
            self._on_pong(about, now)
        elif kind == b"ssubscribe":
            self._on_ssubscribe(about, now)
        elif kind == b"smessage" and entry is not None:
            self._on_smessage(entry, rest, now)
        elif kind == b"sunsubscribe" and entry is not None:  # not requested
            del self._entries[about]
            self._on_slot_lost()
            entry.listener.on_disconnect(now)

    def _on_smessage(self, entry: _Entry, rest: list[Any], now: float) -> None:
        message = rest[0] if rest else None
        if not isinstance(message, bytes):
            raise ValueError("not a message")  # noqa: TRY004 - callers catch ValueError
        channel = entry.listener.name
        if message.startswith(self._node_id):
            entry.listener.on_message([b"message", channel, message[len(self._node_id) :]], now)
            return
        self._on_slot_lost()
        self._unsubscribe(entry, self._unsent, now)
        self._wake()

    def _on_ssubscribe(self, channel: bytes, now: float) -> None:
        request = self._awaiting_reply.popleft() if self._awaiting_reply else None
        if request is None or request.listener.name != channel:
            raise ValueError("a reply to a subscription that was not requested")
        if channel not in self._entries:
            entry = self._entries[channel] = _Entry(request.listener, now)
            request.listener.on_subscribed(request.sent_at, lambda: self._wake_for(entry))
            self._wake_for(entry)
        request.finish(None)

    def _wake_for(self, entry: _Entry) -> None:
        self._woken.append(entry)
        self._wake()

    def _on_pong(self, payload: bytes, now: float) -> None:
        ping, answers = self._pings.popleft() if self._pings else (b"", [])
        if ping != payload:
            raise ValueError("a reply to a PING that was not sent")
        for entry, ping_payload in answers:
            if self._is_current(entry):
                entry.listener.on_message([b"pong", ping_payload], now)

    def _is_current(self, entry: _Entry) -> bool:
        return self._entries.get(entry.listener.name) is entry

    def tick(self, now: float) -> tuple[Sequence[Command], float]:
        """Run what is due for all listeners. Return commands to send, and when to call again.

        Raises:
            TimeoutError: the server does not reply to PINGs.
        """
        commands, self._unsent = self._unsent, []
        self._send_requests(commands, now)
        due: dict[_Entry, None] = {}
        while self._woken:
            due[self._woken.popleft()] = None
        while self._heap and self._heap[0][0] <= now:
            at, _, entry = heappop(self._heap)
            if entry.scheduled != at:
                continue
            entry.scheduled = math.inf
            if entry.due <= now:
                due[entry] = None
            else:
                self._schedule(entry)
        for entry in due:
            if self._is_current(entry):
                self._tick_entry(entry, commands, now)
        wake_at = self._heap[0][0] if self._heap else now + IDLE_TIMEOUT
        if self._unsent_pings and now >= self._pinged_at + MIN_PING_INTERVAL:
            payload = b"%d" % next(self._order)
            self._pings.append((payload, self._unsent_pings))
            self._unsent_pings, self._pinged_at = [], now
            commands.append((b"PING", payload))
        elif self._unsent_pings:
            wake_at = min(wake_at, self._pinged_at + MIN_PING_INTERVAL)
        busy = self._requests or self._woken or self._unsent
        return commands, now if busy else wake_at

    def _send_requests(self, commands: list[Command], now: float) -> None:
        while self._requests:
            try:
                request = self._requests.popleft()
            except IndexError:  # the previous reader has failed it
                return
            entry = self._entries.get(request.listener.name)
            if request.subscribe and entry is None:
                request.sent_at = now
                self._awaiting_reply.append(request)
                commands.append((b"SSUBSCRIBE", request.listener.name))
                continue
            if not request.subscribe and entry is not None:
                self._unsubscribe(entry, commands, now)
            request.finish(None)

    def _unsubscribe(self, entry: _Entry, commands: list[Command], now: float) -> None:
        del self._entries[entry.listener.name]
        commands.append((b"SUNSUBSCRIBE", entry.listener.name))
        entry.listener.on_disconnect(now)

    def _tick_entry(self, entry: _Entry, commands: list[Command], now: float) -> None:
        listener = entry.listener
        wanted, wake_at = listener.tick(now)
        self._unsent_pings += [(entry, payload) for _, payload in wanted]
        if not listener.idle:
            entry.idle_since = now
        elif now >= entry.idle_since + IDLE_TIMEOUT:
            self._unsubscribe(entry, commands, now)
            return
        entry.due = min(wake_at, entry.idle_since + IDLE_TIMEOUT)
        self._schedule(entry)

    def _schedule(self, entry: _Entry) -> None:
        if entry.due < entry.scheduled:
            entry.scheduled = entry.due
            heappush(self._heap, (entry.due, next(self._order), entry))


def _do_nothing() -> None:
    """Do nothing: there is no connection to wake."""
