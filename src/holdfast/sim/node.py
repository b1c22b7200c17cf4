"""A simulated server and the connections to it.

A connection delivers requests and replies in order. Messages on different connections may overtake
each other. The server executes a request even if its client has disconnected meanwhile. Faults of a
connection: a message is slow, the connection is reset, the connection goes half open (messages are
lost and neither side is notified), or a request is delivered twice.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.scripts import GUARD
from holdfast.sim.keyspace import Keyspace, ServerError
from holdfast.sim.lua import Scripts
from holdfast.sim.script_run import ScriptRun
from holdfast.sim.settings import OVERLAP
from holdfast.sim.simulation import SECOND, Future

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.keys import Keys
    from holdfast.scripts import Script
    from holdfast.sim.script_run import LockState
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Process, Simulation

EPOCH = 1_790_000_000 * SECOND
"""The wall clock of a server at the start of a run."""

LATENCY = (100, 250, 1_000, 8_000)
LATENCY_WEIGHTS = (60, 25, 12, 3)
"""Latencies of a message in microseconds, and their weights."""

SLOW = (20_000, 300_000, 1_500_000, 5_000_000)
"""Latencies of a slow message in microseconds."""

DOWN = (300_000, 4_000_000)
"""Microseconds until a crashed server is up again: shorter or longer than a client retries."""

MORE_OFTEN, MOST_OFTEN = 10, 0.4
"""The factor by which a fault is more probable at a critical point, and its highest probability."""

LAG = (500, 20_000, 300_000, 1_500_000)
LAG_WEIGHTS = (60, 25, 10, 5)
"""Replication lags in microseconds of a synchronous replica, and their weights."""

RESTART_MARKER, QUARANTINE = b"holdfast:restart-marker", b"holdfast:quarantine"
LONG_UP = 3_600_000
"""Milliseconds for which a server has been up at the start of a run."""

_SCRIPTS = Scripts()


class Watcher(Protocol):
    """Observes the data of a server before and after each script."""

    def look(self, server: Server, keys: Sequence[bytes]) -> LockState:
        """Return the state of the keys of a script; called before and after it runs."""

    def ran(self, run: ScriptRun) -> None:
        """The server ran a script without an error."""


class Server:
    """One node: its data, clock, connections and faults."""

    def __init__(
        self,
        sim: Simulation,
        name: str,
        settings: Settings,
        *,
        drift: float = 0.0,
        skew: float = 0.0,
    ) -> None:
        self.sim = sim
        self.name = name
        self.settings = settings
        self.drift = drift
        self._drift = 1.0 + drift
        self._jumped = int(skew * SECOND)
        self.data = Keyspace(self.wall_clock, self._publish)
        self._frozen_until = 0
        self._inbox: list[Callable[[], object]] = []
        self.down = False
        self._gone = self._wiped = False
        self.starts = self.promotions = 0
        """The number of restarts, and of promotions."""
        self.quarantine_ends_at = 0
        """The end of its quarantine after it lost its data."""
        self.cut_off: set[tuple[str, str]] = set()
        """The partitioned directions: (process, "to" or "from")."""
        self.known: set[str] = set()
        """The script cache: SHA1 digests."""
        self.forgetful = False
        """Whether it replies NOSCRIPT to scripts that are not in `known`."""
        self.connections: list[Connection] = []
        self.watcher: Watcher | None = None
        self._published: list[bytes] = []
        """The messages that the current script has published."""
        self.replica: Server | None = None
        self.lag = 0
        self.offset = 0
        """The number of writes sent to its followers."""
        self.followers: dict[Server, int] = {}
        """The synchronous replicas, and the number of writes that each has applied."""
        self._copies_arrive: dict[Server, int] = {}
        self._waiting: list[tuple[int, int, Future[int]]] = []

    def wall_clock(self) -> int:
        """Return the microseconds on the clock of the server."""
        return EPOCH + self._jumped + int(self.sim.now * self._drift)

    def jump(self, microseconds: int) -> None:
        """Set the clock forwards or back."""
        self._jumped += microseconds
        self.sim.note("clock jumped", self.name, microseconds)

    def true_expiry(self, key: bytes, less_ms: int) -> int | None:
        """Return the true time at which a key has `less_ms` left; None if it has no expiry."""
        left = self.data.left(key)
        return None if left < 0 else self.sim.now + self.true_span((left - less_ms) * 1000)

    def now_ms(self) -> int:
        """Return the milliseconds on the server's clock."""
        return self.wall_clock() // 1000

    def true_span(self, microseconds: int) -> int:
        """Convert a duration on the server's clock to true time."""
        return int(microseconds / self._drift)

    # Faults

    def freeze(self, microseconds: int) -> None:
        """Stop executing requests for a while, and execute those that arrive afterwards."""
        self._frozen_until = self.sim.now + microseconds
        self.sim.note("frozen", self.name, microseconds)
        self.sim.at(self._frozen_until, self._thaw)

    def _thaw(self) -> None:
        while self._inbox and self._frozen_until <= self.sim.now:
            self._inbox.pop(0)()

    def receive(self, request: Callable[[], object]) -> None:
        """Execute a request, or queue it while the server is frozen."""
        if self._frozen_until > self.sim.now or self._inbox:
            self._inbox.append(request)
        else:
            request()

    def restart(self, microseconds: int, *, wiped: bool = False) -> None:
        """Be down for a while, then start again, with or without the data."""
        self.down = True
        self._inbox.clear()
        self.sim.note("wiped" if wiped else "down", self.name, microseconds)
        self.disconnect()
        if wiped:
            self.data.restore({})
            self._wiped = True
        self.known.clear()
        self.forgetful = True
        self.sim.after(microseconds, self._up)

    def _up(self) -> None:
        if self.down and not self._gone:
            self.down = False
            self.starts += 1
            self.sim.note("up", self.name)
            for follower in list(self.followers):
                self.add_follower(follower)  # a full resynchronisation
            if self._wiped:
                self._wiped = False
                self.quarantine_ends_at = self.sim.now + int(self.settings.quarantine * SECOND)

    def guard(self, longest_ttl: float) -> float:
        """Run the guard script as `wire.guard` does; return the seconds of the quarantine."""
        mark = f"{self.name}:{self.starts}:{self.promotions}".replace(" ", "_")
        arguments = (
            mark,
            str(int(longest_ttl * 1000)),
            str(int(OVERLAP * 1000)),
            str(LONG_UP + self.sim.now // 1000),
            "1",  # a restart loses nothing
            str(int(self.promotions > 0)),
            "000",
        )
        reply = _SCRIPTS.run(GUARD.text, [RESTART_MARKER, QUARANTINE], arguments, self.data)
        self._replicate()
        assert isinstance(reply, bytes)  # noqa: S101 - what the script returns
        return int(reply[:-3]) / 1000

    @property
    def quarantined(self) -> bool:
        """Whether it grants no lock because locks that are held may be unknown to it."""
        left = self.data.run("PTTL", QUARANTINE)
        return isinstance(left, int) and left > 0

    def end(self) -> None:
        """Shut down permanently."""
        self.down, self._gone, self.replica = True, True, None
        self.followers.clear()
        self._inbox.clear()
        self.disconnect()

    @property
    def grants_nothing_until(self) -> int:
        """The end of the quarantine of a node that lost its data."""
        if self._wiped:
            return self.sim.now + int(self.settings.quarantine * SECOND)
        return self.quarantine_ends_at

    def disconnect(self) -> None:
        """Reset all connections."""
        for connection in list(self.connections):
            connection.reset()

    def heal(self) -> None:
        """End all faults."""
        self._frozen_until = 0
        self._thaw()
        self.rejoin(set(self.cut_off))
        self.data.full = False
        self._up()

    def rejoin(self, cut: set[tuple[str, str]]) -> None:
        """End a partition."""
        self.cut_off -= cut
        for connection in list(self.connections):
            connection.healed()

    def follow(self, primary: Server, lag: int) -> None:
        """Become the asynchronous replica of a primary, `lag` microseconds behind it."""
        primary.replica, primary.lag = self, lag

    def add_follower(self, follower: Server) -> None:
        """Add a synchronous replica, and copy all data to it."""
        for key in sorted({*follower.data.keys(), *self.data.keys()}):
            follower.data.put(key, self.data.entry(key))
        self.followers[follower] = self.offset

    def wait(self, offset: int, replicas: int, microseconds: int) -> Future[int]:
        """Execute WAIT: return how many replicas have all writes up to `offset`.

        The future is done when `replicas` of them have, or after `microseconds`.
        """
        reply: Future[int] = Future()
        self._waiting.append((offset, replicas, reply))
        self._resolve_waits()
        self.sim.after(microseconds, lambda: reply.set(self._acknowledged(offset)))
        return reply

    def _acknowledged(self, offset: int) -> int:
        return sum(has >= offset for has in self.followers.values())

    def _resolve_waits(self) -> None:
        for offset, replicas, reply in list(self._waiting):
            if self._acknowledged(offset) >= replicas:
                reply.set(self._acknowledged(offset))
        self._waiting = [each for each in self._waiting if not each[2].done]

    def _send_to_followers(self, entries: dict[bytes, Any]) -> None:
        self.offset += 1
        offset = self.offset
        for follower in self.followers:
            lag = LAG[self.sim.choices.pick("lag", LAG_WEIGHTS)]
            at = max(self.sim.now + lag, self._copies_arrive.get(follower, 0) + 1)
            self._copies_arrive[follower] = at
            self.sim.at(at, partial(self._copy, follower, entries, offset))

    def _copy(self, follower: Server, entries: dict[bytes, Any], offset: int) -> None:
        if self.down or follower not in self.followers:
            return
        for key, entry in entries.items():
            follower.data.put(key, entry)
        self.followers[follower] = offset
        self._resolve_waits()

    def _replicate(self) -> None:
        touched, self.data.touched = self.data.touched, set()
        replica = self.replica
        if not touched or (replica is None and not self.followers):
            return
        entries = {key: self.data.entry(key) for key in sorted(touched)}
        if replica is None:
            self._send_to_followers(entries)
            return

        def apply() -> None:
            if self.replica is replica:
                for key, entry in entries.items():
                    replica.data.put(key, entry)

        self.sim.after(self.lag, apply)

    # Requests

    def script(self, script: Script, keys: Keys, args: Sequence[Any]) -> Any:  # noqa: ANN401 - any reply
        """Run a script; return its reply without the serial."""
        watcher = self.watcher
        before = None if watcher is None else watcher.look(self, keys.names)
        self._published = []
        serial = ("000",) if script.serial else ()
        raw = _SCRIPTS.run(script.text, keys.names, (*args, *serial), self.data)
        self._replicate()
        if not script.serial:
            reply: Any = raw
        elif isinstance(raw, list):
            assert raw[-1:] == [b"000"]  # noqa: S101 - else the wire would reject it
            reply = raw[:-1]
        else:
            assert isinstance(raw, bytes)  # noqa: S101 - all other scripts return a string
            assert raw.endswith(b"000")  # noqa: S101 - as above
            reply = int(raw[:-3])
        if watcher is not None and before is not None:
            after, messages = watcher.look(self, keys.names), self._published
            run = ScriptRun(self, script.name, keys, args, reply, messages, before, after)
            watcher.ran(run)
        return reply

    def command(self, *words: bytes | str | int) -> Any:  # noqa: ANN401 - any reply
        """Run one command."""
        reply = self.data.run(*words)
        self._replicate()
        return reply

    def has_subscriber(self, channel: bytes) -> bool:
        """Whether a client is subscribed to a channel."""
        return any(channel in each.channels for each in self.connections)

    def _publish(self, channel: bytes, message: bytes) -> int:
        self._published.append(message)
        subscribed = [each for each in self.connections if channel in each.channels]
        for connection in subscribed:
            connection.push([b"message", channel, message])
        return 0 if self.settings.uncounted else len(subscribed)


def more_often(chance: float) -> float:
    """Raise the probability of a fault at a rare and critical point.

    A lease ends with one release, and a run has hundreds of messages. With the same probability for
    all messages, hardly any run would lose the reply that grants the lock to another waiter, or
    deliver a pushed grant after its lease has ended.
    """
    return max(chance, min(MORE_OFTEN * chance, MOST_OFTEN))


class Connection:
    """A connection between a process and a server, with one ordered stream in each direction."""

    def __init__(self, process: Process, server: Server) -> None:
        self.process = process
        self.server = server
        self.sim = process.sim
        self.channels: set[bytes] = set()
        self.on_push: Callable[[Any], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self.open = True
        self._dead_directions: set[str] = set()  # directions in which all messages are lost
        self._delayed: list[tuple[str, int, Callable[[], object]]] = []
        self._arrives = {"to": 0, "from": 0}
        self._without_reply: list[Future[Any]] = []
        self._starts = server.starts  # a restarted server has lost its earlier connections
        self.offset = 0
        """The replication offset of the last write on this connection."""
        server.connections.append(self)

    def _travel(self, direction: str, what: str) -> int | None:
        """Choose when a message arrives; None if it is lost."""
        sim, settings, choices = self.sim, self.server.settings, self.sim.choices
        latency = LATENCY[choices.pick("delay", LATENCY_WEIGHTS)]
        if settings.slow or settings.reset or settings.half_open:
            releases = what.startswith("reply to release")
            reset = more_often(settings.reset) if releases else settings.reset
            pushes = what in {"push", "pong"}
            slow = more_often(settings.slow) if pushes else settings.slow
            usual = max(0.0, 1.0 - slow - reset - settings.half_open)
            fate = choices.pick("fault:message", (usual, slow, reset, settings.half_open))
            if fate == 1:
                latency = SLOW[choices.pick("slow", (1, 1, 3, 2) if pushes else (4, 3, 2, 1))]
                sim.note("slow", self.process.name, direction, latency)
            elif fate == 2:  # noqa: PLR2004 - as listed above
                sim.note("reset", self.process.name, direction)
                sim.after(latency, self.reset)
                self._dead_directions.add(direction)
            elif fate == 3:  # noqa: PLR2004 - as listed above
                sim.note("half open", self.process.name, direction)
                self._dead_directions |= {"to", "from"}
        if direction in self._dead_directions:
            return None
        at = max(sim.now + latency, self._arrives[direction] + 1)
        self._arrives[direction] = at
        return at

    def _deliver(self, direction: str, what: str, callback: Callable[[], object]) -> None:
        at = self._travel(direction, what)
        process, server = self.process.name, self.server.name
        ends = (process, server) if direction == "to" else (server, process)
        number = len(self.sim.trace)
        self.sim.note("message", *ends, what, at)
        if at is not None:
            self.sim.at(at, lambda: self._arrive(direction, number, callback))

    def _arrive(self, direction: str, number: int, callback: Callable[[], object]) -> None:
        """Deliver a message, or delay it and all later ones until the partition ends."""
        cut = (self.process.name, direction) in self.server.cut_off
        gone = self.server.down or self.server.starts != self._starts
        if direction in self._dead_directions or gone:
            self.sim.trace[number] = (*self.sim.trace[number][:-1], None)
        elif cut or any(way == direction for way, *_ in self._delayed):
            self._delayed.append((direction, number, callback))
        elif direction == "from":
            self.process.call(callback)
        else:
            self.server.receive(callback)

    def healed(self) -> None:
        """Deliver the messages that a partition delayed, in order."""
        delayed, self._delayed = self._delayed, []
        for direction, number, callback in delayed:
            self._arrive(direction, number, callback)

    def request(
        self, what: str, run: Callable[[], Any], args: Sequence[str] = (), *, once: bool = False
    ) -> Future[Any]:
        """Send a request; the future is its reply, an error reply, or ConnectionResetError.

        `run` executes the request on the server and returns the reply, or a future of it. A request
        with `once` is never delivered twice.
        """
        future: Future[Any] = Future()
        if not self.open:
            future.fail(ConnectionResetError())
            return future
        self._without_reply.append(future)

        def execute() -> None:
            try:
                result, error = run(), None
            except ServerError as refused:
                result, error = None, refused
            if self._server_crashes():
                return
            if isinstance(result, Future):
                result.waiting.append(lambda: reply(result.result(), None))
                if result.done:
                    reply(result.result(), None)
            else:
                reply(result, error)

        def reply(result: Any, error: ServerError | None) -> None:  # noqa: ANN401 - any reply
            if self in self.server.connections:
                resolve = partial(self._resolve, future, result, error)
                self._deliver("from", f"reply to {what}", resolve)

        self._deliver("to", what, execute)
        doubled = 0.0 if once else self.server.settings.doubled
        if self.sim.choices.chance("fault:doubled", doubled):
            self.sim.note("doubled", self.process.name, what)
            self.sim.doubled.update(args)
            late = SLOW[self.sim.choices.pick("slow", (4, 3, 2, 1))]
            self.sim.after(late, lambda: self._deliver_again(run))
        return future

    def _server_crashes(self) -> bool:
        """Choose whether the server crashes between executing a request and replying."""
        server, choices = self.server, self.sim.choices
        if not choices.chance("fault:server_crash", server.settings.server_crash):
            return False
        server.restart(DOWN[choices.pick("down", (1, 1))])
        return True

    def send(self, what: str, run: Callable[[], object]) -> None:
        """Send a request that has no reply."""
        if self.open:
            self._deliver("to", what, run)

    def _deliver_again(self, run: Callable[[], Any]) -> None:
        def late() -> None:
            with suppress(ServerError):
                run()

        if not self.server.down:
            self.server.receive(late)

    def _resolve(self, reply: Future[Any], result: Any, error: ServerError | None) -> None:  # noqa: ANN401 - any reply
        if reply in self._without_reply:
            self._without_reply.remove(reply)
        if not self.open:
            return
        if error is None:
            reply.set(result)
        else:
            reply.fail(error)

    def push(self, message: list[bytes]) -> None:
        """Send a push message to the client."""

        def receive() -> None:
            if self.open and self.on_push is not None:
                self.on_push(message)

        self._deliver("from", "pong" if message[0] == b"pong" else "push", receive)

    def reset(self) -> None:
        """Reset the connection: both sides are notified."""
        self._removed()
        self.process.call(self._lost)

    def _removed(self) -> None:
        if self in self.server.connections:
            self.server.connections.remove(self)

    def _lost(self) -> None:
        if not self.open:
            return
        self.open = False
        without_reply, self._without_reply = self._without_reply, []
        for reply in without_reply:
            reply.fail(ConnectionResetError())
        if self.on_lost is not None:
            self.on_lost()

    def disconnect(self) -> None:
        """Close the connection, and fail all requests without a reply."""
        if not self.process.crashed:
            self.close()
            self.open = True
            self.process.call(self._lost)

    def close(self) -> None:
        """Close the connection. Messages sent before still arrive.

        A crashed process does not close its connections.
        """
        if self.open and not self.process.crashed:
            self.open = False
            self._deliver("to", "disconnect", self._removed)
