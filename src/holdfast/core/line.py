"""The line: those of one client who wait, and the push connection that all of them share.

In a cluster each lock that is waited for has a line of its own, because its channel lives where the
lock does; several lines then share a connection, which `wire.exchange` divides among them.

The server puts a waiter's name in a queue and speaks to its client when something concerns it. This
is what the client makes of that. It does no input or output: whoever owns the connection passes on
what was received (`heard`), asks what there is to send and when to look again (`tick`), and says
when the connection began and ended (`opened`, `cut`).

**How old is a grant?** A lock that was handed over is ours for a short window, which the server
counts from a moment we do not know. But pushes and answers come down one connection in order: a
grant that arrives after the answer to a PING was made after that PING was sent. It was also made
after its waiter first asked for a place in the queue. So every grant is handed on with the later of
these two moments, and its deadline counts from there. A process that slept for a minute finds a
deadline that has passed. A grant that comes with the answer to one of our releases was made after
that release was sent.

**What if a push is lost?** For each lock there is one moment at which somebody has to ask again:
when the holder's time is up, as last heard, or a grant's window is over. `tick` then has the first
waiter of that lock ask. When the connection was lost, everybody asks.

One thread or loop calls `opened`, `heard`, `tick` and `cut`, and only it touches the timers. All
others register in a dictionary, and hand in the rest through a deque: single operations both.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.spec import keys_of, tag_of
from holdfast.core.token import SHARDED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Command, Signal

PING_EVERY = 1.0
"""Seconds between two PINGs while anybody waits."""

PATIENCE = 2.0
"""Seconds without an answer to a PING after which the connection counts as dead."""

ASK_AT_LEAST = 1800.0
"""Seconds after which somebody asks in any case: the server forgets a queue after twice as long."""

LAG = 0.05
"""Seconds by which a look may be late before this process counts as having been paused."""

NEVER = math.inf

_PARTS_LEAST = 2  # of a PONG: the word and the payload

_QUEUED, _LEFT, _GRANTED, _WATCHES = "queued", "left", "granted", "watches"


class Grant(NamedTuple):
    """The lock is the waiter's for `seconds`, from some moment after `since` on."""

    fence: int
    seconds: float
    since: float


class Waiter:
    """One attempt that stands in line. `grant` and `ask` are what it was told, then `signal`."""

    __slots__ = ("ask", "grant", "key", "line", "report_at", "signal", "since", "token", "waits")

    def __init__(self, line: Line, token: str, key: bytes, signal: Signal, since: float) -> None:
        self.line = line
        self.since = since  # its token was not sent before, so no grant to it is older
        self.report_at = NEVER  # when it is woken to report that it waits
        self.token = token
        self.key = key
        self.signal = signal
        self.grant: Grant | None = None
        self.ask = False
        self.waits = False  # the line will have it ask when somebody has to

    def tell_to_ask(self) -> None:
        """Have it ask the server again."""
        self.ask = True
        self.signal.set()

    def queued(self, asked_at: float, left: float) -> None:
        """Take in the answer to an asking: it stands in line, and the holder has `left` seconds."""
        self.line.hand_in(_QUEUED, self, asked_at, left)
        self.waits = True  # last: a grant that comes in between must not keep it in line

    def leave(self) -> None:
        """Wait no more; a push for this token is still expected, and ignored."""
        if self.waits:
            self.waits = False
            self.line.hand_in(_LEFT, self, NEVER, NEVER)

    def forget(self) -> None:
        """Let the token be unknown: it is over, and a grant for it is handed back."""
        self.line.forget(self.token)

    def outlive(self, now: float) -> None:
        """Let the token be unknown soon: it is somebody else's, who must not lose it to a push."""
        self.line.outlive(self.token, now)


class _Timer:
    """The waiters for one lock, in order, and when one of them has to ask."""

    __slots__ = ("due", "scheduled", "told_at", "waiters")

    def __init__(self) -> None:
        self.waiters: OrderedDict[str, Waiter] = OrderedDict()
        self.due: float
        self.told_at = -NEVER  # when a push last said so
        self.scheduled = NEVER  # when its entry in the heap comes up


class Ear:
    """What was found out about one connection. The next one has to find it out again."""

    counted: bool | None = None
    """The server counts it among its listeners; None: not found out yet."""
    heard_itself: Signal | None = None
    """Set when what we published to ourselves arrives, or never will. While it is there, and
    nothing is found out yet, somebody is about to."""

    def __init__(self) -> None:
        self.curious: list[Signal] = []
        """Those who wait until it is found out."""

    def ended(self) -> None:
        """Nothing more will be heard: whoever waits for that goes on."""
        heard = self.heard_itself
        for signal in self.curious if heard is None else [heard, *self.curious]:
            signal.set()


class Line:
    """Everybody who waits on one channel: of a client, or of a client for one lock of a cluster."""

    def __init__(
        self,
        channel: bytes,
        hand_back: Callable[[bytes, str, int], None],
        leave_queue: Callable[[bytes, str, int], None],
    ) -> None:
        self.channel = channel
        self.sharded = bool(tag_of(channel))
        """It is of a cluster, where the node that grants a lock counts who listens for it there."""
        self.ear: Ear | None = None
        """What is known of the connection, while there is one."""
        self.deaf_until = -NEVER
        """Until then listening is not tried: it failed, or is not to be had."""
        self.wake_at = NEVER
        self._rouse: Callable[[], None] = _nobody
        self._hand_back = hand_back
        self._leave_queue = leave_queue
        self._known: dict[str, Waiter] = {}
        self._inbox: deque[tuple[str, Waiter, float, float]] = deque()
        self._timers: dict[bytes, _Timer] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._order = count()
        self._waiting = 0
        self._paused: bool
        self._heard_since: float  # while there is a connection
        self._pings: deque[tuple[bytes, float]] = deque()
        self._outlived: deque[tuple[str, float]] = deque()
        self._rallied_at = -NEVER
        self._to_rally: deque[bytes] = deque()

    # For those who wait

    def enter(self, token: str, key: bytes, signal: Signal, now: float) -> Waiter:
        """Be known, before the first asking: from then on the server may grant."""
        waiter = self._known[token] = Waiter(self, token, key, signal, now)
        return waiter

    def hand_in(self, what: str, waiter: Waiter, at: float, seconds: float) -> None:
        """Note what became of a waiter; its lock is to be asked for `seconds` after `at`."""
        self._inbox.append((what, waiter, at, seconds))
        if at + seconds < self.wake_at:
            self._rouse()

    def forget(self, token: str) -> None:
        """Know the token no more."""
        self._known.pop(token, None)

    def outlive(self, token: str, now: float) -> None:
        """Forget the token when all that was pushed before now has arrived.

        Without a connection it is kept for the next one. The server may have subscribed that one,
        and sent it a message, before the client knows that it is open.
        """
        self._outlived.append((token, now))
        if now < self.wake_at:
            self._rouse()

    def places_lost(self, asked_at: float, now: float) -> None:
        """Have everybody ask again: who asked at `asked_at` learnt that places were lost."""
        if asked_at >= self._rallied_at:
            self._rallied_at = now
            self.rally()

    def rally(self) -> None:
        """Have everybody ask again."""
        for waiter in list(self._known.values()):
            waiter.tell_to_ask()

    def rally_soon(self, key: bytes) -> None:
        """Have everybody ask again who waits for the lock with this key: a grant may be lost.

        Many may notice at once: the next `tick` sees to all. Without a connection all ask anyway.
        """
        self._to_rally.append(key)
        self._rouse()

    def answered(self, message: bytes, asked_at: float, now: float) -> None:
        """Take in a grant that came with the answer to a request sent at `asked_at`."""
        kind, number, px, delay, token, key = read_message(message)
        if kind == b"G":
            self._granted(token, key, delay, Grant(number, px / 1000, asked_at), now)

    # For the one who owns the connection

    def opened(self, sent_at: float, rouse: Callable[[], None]) -> None:
        """The channel is subscribed to, by a request sent at `sent_at`."""
        self._pings.clear()
        self._heard_since = sent_at
        self._rouse = rouse
        self.ear = Ear()

    def cut(self, now: float) -> None:
        """The connection is gone, and with it perhaps a grant."""
        ear, self.ear = self.ear, None
        self._rouse = _nobody
        self.wake_at = NEVER
        self._to_rally.clear()
        while self._outlived:
            self.forget(self._outlived.popleft()[0])
        self._rallied_at = now
        self.rally()
        if ear is not None:
            ear.ended()

    def heard(self, message: object, now: float) -> None:
        """Take in one message of the connection.

        Raises:
            ValueError: it is none of ours.
        """
        if not isinstance(message, list) or len(message) < _PARTS_LEAST:
            raise ValueError("not a message")
        if message[0] == b"pong":
            self._ponged(message[1])
        if message[0] != b"message":
            return
        kind, number, px, delay, token, key = read_message(message[-1])
        waiter = self._known.get(token)
        if kind == b"G":
            since = -NEVER
            # A server that does not count us is not the one that answers our PINGs.
            if waiter is not None and self.ear is not None and self.ear.counted:
                since = max(self._heard_since, waiter.since)
            self._granted(token, key, delay, Grant(number, px / 1000, since), now)
        elif kind == b"P":
            heard = self.ear.heard_itself if self.ear is not None else None
            if heard is not None:
                heard.set()
        elif waiter is None:
            # The attempt has ended, but the server still has it in the queue: leaving failed, or
            # was undone by a failover. There it would receive messages that a waiter needs.
            self._leave_queue(key, token, delay)
        elif kind == b"A":
            waiter.tell_to_ask()
        else:
            self.hand_in(_WATCHES, waiter, now, px / 1000)

    def _ponged(self, payload: bytes) -> None:
        while self._pings:
            ping, sent_at = self._pings.popleft()
            if ping == payload:
                self._heard_since = sent_at
                while self._outlived and self._outlived[0][1] < sent_at:
                    self.forget(self._outlived.popleft()[0])
                return
        raise ValueError("an answer to a PING that was not sent")

    def _granted(self, token: str, key: bytes, delay: int, grant: Grant, now: float) -> None:
        waiter = self._known.get(token)
        if waiter is None or waiter.key != key:
            self._hand_back(key, token, delay)
            return
        waiter.grant, waiter.waits = grant, False
        waiter.signal.set()
        # Whoever of this client is next looks whether it was taken up.
        self.hand_in(_GRANTED, waiter, now, grant.seconds)

    def tick(self, now: float) -> tuple[Sequence[Command], float]:
        """Do what is due; return what to send now, if anything, and when to look again.

        Raises:
            TimeoutError: the server does not answer PINGs.
        """
        paused = now > self.wake_at + LAG and not self._paused
        self._paused = paused
        self.wake_at = -NEVER  # busy: whoever hands something in need not rouse
        self._take_in()
        self._ask_where_due(now)
        keys = set()
        while self._to_rally:
            keys.add(self._to_rally.popleft())
        if keys:
            for waiter in list(self._known.values()):
                if waiter.key in keys:
                    waiter.tell_to_ask()
        ping: list[Command] = []
        wake_at = NEVER
        if self._waiting or self._outlived:
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
        return (ping, now) if self._inbox else (ping, wake_at)

    def _wake_to_report(self, now: float) -> None:
        """Wake waiters whose report is due. One timer per waiter would make every wait slower."""
        for waiter in list(self._known.values()):
            if now >= waiter.report_at:
                waiter.report_at = NEVER
                waiter.signal.set()

    @property
    def listening(self) -> bool:
        """The channel is subscribed to."""
        return self.ear is not None

    @property
    def idle(self) -> bool:
        """Nobody waits."""
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
                timer.told_at = at
                self._look(waiter.key, timer, at + seconds)
            elif (
                what is _QUEUED and at > timer.told_at
            ):  # else a push that overtook it knows better
                self._look(waiter.key, timer, at + min(seconds, ASK_AT_LEAST))

    def _take_out(self, timer: _Timer, token: str) -> None:
        if timer.waiters.pop(token, None) is not None:
            self._waiting -= 1

    def _look(self, key: bytes, timer: _Timer, due: float) -> None:
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
            if not timer.waiters:
                del self._timers[key]
            elif timer.due > now:
                self._look(key, timer, timer.due)
            else:
                # If nothing comes of it, the next one asks.
                token, waiter = next(iter(timer.waiters.items()))
                timer.waiters.move_to_end(token)
                waiter.tell_to_ask()
                self._look(key, timer, now + PING_EVERY)


def channel_of(client: str, lock_key: bytes) -> bytes:
    """Where the server speaks to this client about this lock.

    In a cluster each hash tag has a channel, which lives where the lock does, and moves with it.
    """
    channel = b"holdfast:push:" + client.encode()
    if not client.startswith(SHARDED):
        return channel
    return b"%b:{%b}" % (channel, tag_of(keys_of(lock_key)[1]))


def read_message(message: bytes) -> tuple[bytes, int, int, int, str, bytes]:
    """Take apart what the scripts say: kind, fence, ms, the lock's delay (ms), token and key."""
    if not isinstance(message, bytes):
        raise ValueError("not a message")  # noqa: TRY004 - of the kind that callers expect
    kind, fence, time, size, rest = message.split(b":", 4)
    px, _, delay = time.partition(b" ")
    token, key = rest[: int(size)], rest[int(size) :]
    return kind, int(fence), int(px), int(delay or 0), token.decode(), key


def _nobody() -> None:
    """Nobody is there to be roused."""
