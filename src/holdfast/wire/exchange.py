"""The many listeners of one push connection in a cluster.

There a channel lives in the slot of its lock. So a client has one push connection to each node, on
which it subscribes to a channel for each lock of that node that is waited for, and takes it off
again when nobody has waited for a while. This stands between the connection and its listeners, and
does no input or output: to the connection's owner (`wire.blocking_ears`, `wire.loop_ears`) it is
the listener, to the listeners it is the owner.

When a slot moves away, and when the node is no longer its primary, the server takes the channel off
by itself, and says so. For the listener that is the end of its connection: what it is to hear from
then on has to come over the next one.

But a node that is being replaced may pass on what its successor publishes before it says so, and so
does a replica on which one listens by a map that is out of date. None of that may be believed. The
successor does not count who listens elsewhere: it takes them for dead, and what it told them, "the
lock is yours", holds no longer. Besides, the age of a grant is counted from PINGs (`core.line`),
which only the granting server itself answers in order with its grants. So each message begins with
the name of the node it is from. One from another node than this ends the subscription too.

All but `serves`, `want` and what the listeners rouse belongs to the owner's thread or loop.
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

LINGER = 5.0
"""Seconds that a channel which nobody needs stays subscribed to."""

TOGETHER = 0.25
"""Seconds between two PINGs, at least: those of many listeners become one."""

_ENDED = "the connection ended"


class Wish:
    """Somebody's wish to have a listener subscribed, or taken off."""

    def __init__(self, listener: Listener, *, join: bool) -> None:
        self.listener = listener
        self.join = join
        self.sent_at = 0.0
        self.answer: str | None = None
        """Why it was not fulfilled: what the server said, or that the connection has ended."""
        self.settled: Callable[[], object] = _nobody
        """Called when it is fulfilled, or will not be."""

    def settle(self, answer: str | None) -> None:
        """Say what became of it."""
        self.answer = answer
        self.settled()


class _Entry:
    """One subscription."""

    __slots__ = ("due", "idle_since", "listener", "scheduled")

    def __init__(self, listener: Listener, now: float) -> None:
        self.listener = listener
        self.idle_since = now
        self.due = now
        self.scheduled = math.inf  # when its entry in the heap comes up


class Exchange:
    """Passes on what comes down one connection, and what its listeners want to send."""

    channel = b""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        """Called when the server takes a channel off: the map of the cluster has changed."""
        self.listening = False
        self._name = b""
        """Of the node, once it has said so."""
        self._refusal = _ENDED
        self._unsent: list[Command] = []
        self._rouse: Callable[[], None] = _nobody
        self._wishes: deque[Wish] = deque()
        self._asked: deque[Wish] = deque()  # SSUBSCRIBE was sent and not answered; in order
        self._entries: dict[bytes, _Entry] = {}
        self._roused: deque[_Entry] = deque()
        self._heap: list[tuple[float, int, _Entry]] = []
        self._order = count()
        self._unsent_pings: list[tuple[_Entry, bytes]] = []
        self._pings: deque[tuple[bytes, list[tuple[_Entry, bytes]]]] = deque()
        self._pinged_at = 0.0

    # For those who want to listen

    def serves(self, listener: Listener) -> bool:
        """Whether the listener is subscribed here, as far as is known."""
        entry = self._entries.get(listener.channel)
        return entry is not None and entry.listener is listener

    def want(self, wish: Wish) -> None:
        """Have it fulfilled by the owner, soon; called from any thread."""
        self._wishes.append(wish)
        # Told first, looked at second: a connection that ends does these two the other way.
        if self.listening:
            self._rouse()
            return
        with suppress(ValueError):  # the owner was quicker
            self._wishes.remove(wish)
            wish.settle(_ENDED)

    # For the one who owns the connection

    def opened(self, sent_at: float, rouse: Callable[[], None]) -> None:
        """The connection is there."""
        self._name, self._refusal = b"", _ENDED
        self._unsent = [(b"CLUSTER", b"MYID")]  # now or never: soon only PINGs are allowed
        self._pinged_at = sent_at
        self._rouse = rouse
        self.listening = True

    def cut(self, now: float) -> None:
        """The connection is gone, and all subscriptions with it."""
        self.listening = False
        self._rouse = _nobody
        entries, self._entries = self._entries, {}
        self._heap.clear()
        self._roused.clear()
        self._pings.clear()
        self._unsent_pings.clear()
        for entry in entries.values():
            entry.listener.cut(now)
        self._fail_wishes()

    def _fail_wishes(self) -> None:
        while self._asked:
            self._asked.popleft().settle(self._refusal)
        with suppress(IndexError):  # who wished for it may be quicker
            while self._wishes:
                self._wishes.popleft().settle(self._refusal)

    @property
    def idle(self) -> bool:
        """Nobody needs the connection."""
        return not self._entries and not self._asked and not self._wishes

    def heard(self, message: Any, now: float) -> None:  # noqa: ANN401 - any message
        """Pass on one message.

        Raises:
            ValueError: it cannot be one.
        """
        if isinstance(message, hiredis.ReplyError):
            if not self._name or not self._asked:
                self._refusal = str(message)
                raise ValueError(self._refusal)
            self._asked.popleft().settle(str(message))
            return
        if not self._name and isinstance(message, bytes):
            self._name = message
            return
        if isinstance(message, bytes):  # while nothing is subscribed to, a PONG is its payload
            message = [b"pong", message]
        try:
            kind, about, *rest = message
        except (TypeError, ValueError):
            raise ValueError("not a message") from None
        entry = self._entries.get(about)
        if kind == b"pong":
            self._ponged(about, now)
        elif kind == b"ssubscribe":
            self._subscribed(about, now)
        elif kind == b"smessage" and entry is not None:
            self._told(entry, rest, now)
        elif kind == b"sunsubscribe" and entry is not None:  # not because we wanted it
            del self._entries[about]
            self._lost()
            entry.listener.cut(now)

    def _told(self, entry: _Entry, rest: list[Any], now: float) -> None:
        message = rest[0] if rest else None
        if not isinstance(message, bytes):
            raise ValueError("not a message")  # noqa: TRY004 - of the kind that callers expect
        channel = entry.listener.channel
        if message.startswith(self._name):
            entry.listener.heard([b"message", channel, message[len(self._name) :]], now)
            return
        self._lost()
        self._take_off(entry, self._unsent, now)
        self._rouse()

    def _subscribed(self, channel: bytes, now: float) -> None:
        wish = self._asked.popleft() if self._asked else None
        if wish is None or wish.listener.channel != channel:
            raise ValueError("a subscription that was not asked for")
        if channel not in self._entries:
            entry = self._entries[channel] = _Entry(wish.listener, now)
            wish.listener.opened(wish.sent_at, lambda: self._rouse_for(entry))
            self._rouse_for(entry)
        wish.settle(None)

    def _rouse_for(self, entry: _Entry) -> None:
        self._roused.append(entry)
        self._rouse()

    def _ponged(self, payload: bytes, now: float) -> None:
        ping, answers = self._pings.popleft() if self._pings else (b"", [])
        if ping != payload:
            raise ValueError("an answer to a PING that was not sent")
        for entry, own in answers:
            if self._is_current(entry):
                entry.listener.heard([b"pong", own], now)

    def _is_current(self, entry: _Entry) -> bool:
        return self._entries.get(entry.listener.channel) is entry

    def tick(self, now: float) -> tuple[Sequence[Command], float]:
        """Do what is due for all listeners; return what to send, and when to look again.

        Raises:
            TimeoutError: the server does not answer PINGs.
        """
        commands, self._unsent = self._unsent, []
        self._grant_wishes(commands, now)
        due: dict[_Entry, None] = {}
        while self._roused:
            due[self._roused.popleft()] = None
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
                self._look(entry, commands, now)
        wake_at = self._heap[0][0] if self._heap else now + LINGER
        if self._unsent_pings and now >= self._pinged_at + TOGETHER:
            payload = b"%d" % next(self._order)
            self._pings.append((payload, self._unsent_pings))
            self._unsent_pings, self._pinged_at = [], now
            commands.append((b"PING", payload))
        elif self._unsent_pings:
            wake_at = min(wake_at, self._pinged_at + TOGETHER)
        busy = self._wishes or self._roused or self._unsent
        return commands, now if busy else wake_at

    def _grant_wishes(self, commands: list[Command], now: float) -> None:
        while self._wishes:
            wish = self._wishes.popleft()  # only the owner takes any while it is listening
            entry = self._entries.get(wish.listener.channel)
            if wish.join and entry is None:
                wish.sent_at = now
                self._asked.append(wish)
                commands.append((b"SSUBSCRIBE", wish.listener.channel))
                continue
            if not wish.join and entry is not None:
                self._take_off(entry, commands, now)
            wish.settle(None)

    def _take_off(self, entry: _Entry, commands: list[Command], now: float) -> None:
        del self._entries[entry.listener.channel]
        commands.append((b"SUNSUBSCRIBE", entry.listener.channel))
        entry.listener.cut(now)

    def _look(self, entry: _Entry, commands: list[Command], now: float) -> None:
        listener = entry.listener
        wanted, wake_at = listener.tick(now)
        self._unsent_pings += [(entry, payload) for _, payload in wanted]
        if not listener.idle:
            entry.idle_since = now
        elif now >= entry.idle_since + LINGER:
            self._take_off(entry, commands, now)
            return
        entry.due = min(wake_at, entry.idle_since + LINGER)
        self._schedule(entry)

    def _schedule(self, entry: _Entry) -> None:
        if entry.due < entry.scheduled:
            entry.scheduled = entry.due
            heappush(self._heap, (entry.due, next(self._order), entry))


def _nobody() -> None:
    """Nobody is there to be roused."""
