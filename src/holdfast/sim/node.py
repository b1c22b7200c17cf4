"""A simulated server, and the connections to it.

A connection carries requests one way and answers the other, each in order. Between connections
anything may overtake anything. What a client has sent is carried out even when the client has hung
up meanwhile. A message may be slow; its connection may be reset, or go half open: then what is sent
on it is lost and nobody is told; or a request may come twice, the second time by itself.
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
from holdfast.sim.world import SECOND, Future

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.keys import Keys
    from holdfast.scripts import Script
    from holdfast.sim.script_run import LockState
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import Process, World

EPOCH = 1_790_000_000 * SECOND
"""The wall clock of a server when its world begins."""

LATENCY = (100, 250, 1_000, 8_000)
LATENCY_WEIGHTS = (60, 25, 12, 3)
"""Microseconds that a message takes, and how often."""

SLOW = (20_000, 300_000, 1_500_000, 5_000_000)
"""Microseconds that a slow one takes."""

DOWN = (300_000, 4_000_000)
"""Microseconds until a server that crashed is back: shorter or longer than a client retries."""

MORE_OFTEN, MOST_OFTEN = 10, 0.4
"""How many times as often something happens where it matters most, and the highest chance of it."""

LAG = (500, 20_000, 300_000, 1_500_000)
LAG_WEIGHTS = (60, 25, 10, 5)
"""Microseconds by which a replica is behind, where that matters, and how often."""

HOME, QUARANTINE = b"holdfast:home", b"holdfast:quarantine"
LONG_UP = 3_600_000
"""Milliseconds for which a server had been up when its run began."""

_SCRIPTS = Scripts()


class Watcher(Protocol):
    """Who looks at a server's data before and after each script."""

    def look(self, server: Server, keys: Sequence[bytes]) -> LockState:
        """Look at the keys of a script, before it runs and after."""

    def ran(self, run: ScriptRun) -> None:
        """The server ran a script, and it raised no error."""


class Server:
    """One node: its data, its clock, who is connected, and whether it works."""

    def __init__(
        self,
        world: World,
        name: str,
        settings: Settings,
        *,
        drift: float = 0.0,
        skew: float = 0.0,
    ) -> None:
        self.world = world
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
        """How often it was started again, and promoted."""
        self.young_until = 0
        """When it has been up for long enough, after it lost its data."""
        self.cut_off: set[tuple[str, str]] = set()
        """Who does not get through: (process, "to" or "from")."""
        self.known: set[str] = set()
        """The scripts it knows, by SHA1."""
        self.forgetful = False
        """It forgets scripts: they are sent by name first, and by text when it does not know."""
        self.connections: list[Connection] = []
        self.watcher: Watcher | None = None
        self._published: list[bytes] = []
        """What the script that runs has published."""
        self.replica: Server | None = None
        self.lag = 0
        self.offset = 0
        """How many writes its followers were sent."""
        self.followers: dict[Server, int] = {}
        """Replicas that are waited for, and how many writes each has."""
        self._underway: dict[Server, int] = {}
        self._waiting: list[tuple[int, int, Future[int]]] = []

    def wall_clock(self) -> int:
        """Microseconds on the server's own clock."""
        return EPOCH + self._jumped + int(self.world.now * self._drift)

    def jump(self, microseconds: int) -> None:
        """Set the clock forwards, or back."""
        self._jumped += microseconds
        self.world.note("clock jumped", self.name, microseconds)

    def true_expiry(self, key: bytes, less_ms: int) -> int | None:
        """When the key has so much left, in true time, if nothing happens; None if it stays."""
        left = self.data.left(key)
        return None if left < 0 else self.world.now + self.true_span((left - less_ms) * 1000)

    def true_span(self, microseconds: int) -> int:
        """How long it takes, in true time, until so much has passed on the server's clock."""
        return int(microseconds / self._drift)

    # Faults

    def freeze(self, microseconds: int) -> None:
        """Answer nothing for a while; what comes meanwhile is carried out afterwards."""
        self._frozen_until = self.world.now + microseconds
        self.world.note("frozen", self.name, microseconds)
        self.world.at(self._frozen_until, self._thaw)

    def _thaw(self) -> None:
        while self._inbox and self._frozen_until <= self.world.now:
            self._inbox.pop(0)()

    def receive(self, request: Callable[[], object]) -> None:
        """Carry a request out, when its turn comes."""
        if self._frozen_until > self.world.now or self._inbox:
            self._inbox.append(request)
        else:
            request()

    def restart(self, microseconds: int, *, wiped: bool = False) -> None:
        """Be away for a while, and come back with the data, or without."""
        self.down = True
        self._inbox.clear()
        self.world.note("wiped" if wiped else "down", self.name, microseconds)
        self.hang_up()
        if wiped:
            self.data.restore({})
            self._wiped = True
        self.known.clear()
        self.forgetful = True
        self.world.after(microseconds, self._up)

    def _up(self) -> None:
        if self.down and not self._gone:
            self.down = False
            self.starts += 1
            self.world.note("up", self.name)
            for follower in list(self.followers):
                self.lead(follower)  # what was on its way to it is lost: it fetches everything
            if self._wiped:
                self._wiped = False
                self.young_until = self.world.now + int(self.settings.quarantine * SECOND)

    def guard(self, longest_ttl: float) -> float:
        """Greet a connection as `wire.guard` does; return the seconds of a quarantine."""
        mark = f"{self.name}:{self.starts}:{self.promotions}".replace(" ", "_")
        arguments = (
            mark,
            str(int(longest_ttl * 1000)),
            str(int(OVERLAP * 1000)),
            str(LONG_UP + self.world.now // 1000),
            "1",  # a restart loses nothing
            str(int(self.promotions > 0)),
            "000",
        )
        answer = _SCRIPTS.run(GUARD.text, [HOME, QUARANTINE], arguments, self.data)
        self._replicate()
        assert isinstance(answer, bytes)  # noqa: S101 - it is what the script answers
        return int(answer[:-3]) / 1000

    @property
    def quarantined(self) -> bool:
        """Whether it grants no lock, because it may not know of locks that are held."""
        left = self.data.run("PTTL", QUARANTINE)
        return isinstance(left, int) and left > 0

    def end(self) -> None:
        """Be gone for good."""
        self.down, self._gone, self.replica = True, True, None
        self.followers.clear()
        self._inbox.clear()
        self.hang_up()

    @property
    def silent_until(self) -> int:
        """Until when it is not to be asked, because it knows nothing of what it gave."""
        if self._wiped:
            return self.world.now + int(self.settings.quarantine * SECOND)
        return self.young_until

    def hang_up(self) -> None:
        """Reset all connections."""
        for connection in list(self.connections):
            connection.reset()

    def heal(self) -> None:
        """Have nothing go wrong any more."""
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
        """Be the replica of another one, `lag` microseconds behind."""
        primary.replica, primary.lag = self, lag

    def lead(self, follower: Server) -> None:
        """Have a replica that is waited for; it begins with all the data."""
        for key in sorted({*follower.data.keys(), *self.data.keys()}):
            follower.data.put(key, self.data.entry(key))
        self.followers[follower] = self.offset

    def wait(self, offset: int, replicas: int, microseconds: int) -> Future[int]:
        """Wait until so many replicas have so many writes, or for so long: how many have."""
        answer: Future[int] = Future()
        self._waiting.append((offset, replicas, answer))
        self._look_who_has()
        self.world.after(microseconds, lambda: answer.set(self._have(offset)))
        return answer

    def _have(self, offset: int) -> int:
        return sum(has >= offset for has in self.followers.values())

    def _look_who_has(self) -> None:
        for offset, replicas, answer in list(self._waiting):
            if self._have(offset) >= replicas:
                answer.set(self._have(offset))
        self._waiting = [each for each in self._waiting if not each[2].done]

    def _send_on(self, entries: dict[bytes, Any]) -> None:
        self.offset += 1
        offset = self.offset
        for follower in self.followers:
            lag = LAG[self.world.choices.pick("lag", LAG_WEIGHTS)]
            at = max(self.world.now + lag, self._underway.get(follower, 0) + 1)
            self._underway[follower] = at
            self.world.at(at, partial(self._copied, follower, entries, offset))

    def _copied(self, follower: Server, entries: dict[bytes, Any], offset: int) -> None:
        if self.down or follower not in self.followers:
            return
        for key, entry in entries.items():
            follower.data.put(key, entry)
        self.followers[follower] = offset
        self._look_who_has()

    def _replicate(self) -> None:
        touched, self.data.touched = self.data.touched, set()
        replica = self.replica
        if not touched or (replica is None and not self.followers):
            return
        entries = {key: self.data.entry(key) for key in sorted(touched)}
        if replica is None:
            self._send_on(entries)
            return

        def apply() -> None:
            if self.replica is replica:
                for key, entry in entries.items():
                    replica.data.put(key, entry)

        self.world.after(self.lag, apply)

    # Requests

    def script(self, script: Script, keys: Keys, args: Sequence[Any]) -> Any:  # noqa: ANN401 - any answer
        """Run a script; its answer without the serial, if it has one."""
        watcher = self.watcher
        before = None if watcher is None else watcher.look(self, keys.names)
        self._published = []
        serial = ("000",) if script.serial else ()
        answer = _SCRIPTS.run(script.text, keys.names, (*args, *serial), self.data)
        self._replicate()
        if not script.serial:
            reply: Any = answer
        elif isinstance(answer, list):
            assert answer[-1:] == [b"000"]  # noqa: S101 - else the wire would not take it
            reply = answer[:-1]
        else:
            assert isinstance(answer, bytes)  # noqa: S101 - what all scripts answer otherwise
            assert answer.endswith(b"000")  # noqa: S101 - as above
            reply = int(answer[:-3])
        if watcher is not None and before is not None:
            after, messages = watcher.look(self, keys.names), self._published
            run = ScriptRun(self, script.name, keys, args, reply, messages, before, after)
            watcher.ran(run)
        return reply

    def command(self, *words: bytes | str | int) -> Any:  # noqa: ANN401 - any answer
        """Run one command."""
        answer = self.data.run(*words)
        self._replicate()
        return answer

    def hears(self, channel: bytes) -> bool:
        """Whether anybody is subscribed to it."""
        return any(channel in each.channels for each in self.connections)

    def _publish(self, channel: bytes, message: bytes) -> int:
        self._published.append(message)
        hearing = [each for each in self.connections if channel in each.channels]
        for connection in hearing:
            connection.push([b"message", channel, message])
        return 0 if self.settings.uncounted else len(hearing)


def more_often(chance: float) -> float:
    """Raise the chance of a fault at a moment that is rare, and after which much can go wrong.

    A lease ends with one release, and a run has hundreds of messages: with the same chance for all
    of them, hardly any run would lose the reply that grants the lock to another waiter, or deliver
    a pushed grant after its lease has ended.
    """
    return max(chance, min(MORE_OFTEN * chance, MOST_OFTEN))


class Connection:
    """One stream each way between a process and a server."""

    def __init__(self, process: Process, server: Server) -> None:
        self.process = process
        self.server = server
        self.world = process.world
        self.channels: set[bytes] = set()
        self.on_push: Callable[[Any], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self.open = True
        self._deaf: set[str] = set()  # directions in which nothing arrives any more
        self._held_up: list[tuple[str, int, Callable[[], object]]] = []
        self._arrives = {"to": 0, "from": 0}
        self._unanswered: list[Future[Any]] = []
        self._starts = server.starts  # a server that is started again knows no earlier connection
        self.offset = 0
        """How many writes its server had sent on, when the last of this connection was."""
        server.connections.append(self)

    def _travel(self, direction: str, what: str) -> int | None:
        """Decide when a message arrives; None if never."""
        world, settings, choices = self.world, self.server.settings, self.world.choices
        latency = LATENCY[choices.pick("delay", LATENCY_WEIGHTS)]
        if settings.slow or settings.reset or settings.half_open:
            releases = what.startswith("answer to release")
            reset = more_often(settings.reset) if releases else settings.reset
            pushes = what in {"push", "pong"}
            slow = more_often(settings.slow) if pushes else settings.slow
            usual = max(0.0, 1.0 - slow - reset - settings.half_open)
            fate = choices.pick("fault:message", (usual, slow, reset, settings.half_open))
            if fate == 1:
                latency = SLOW[choices.pick("slow", (1, 1, 3, 2) if pushes else (4, 3, 2, 1))]
                world.note("slow", self.process.name, direction, latency)
            elif fate == 2:  # noqa: PLR2004 - as listed above
                world.note("reset", self.process.name, direction)
                world.after(latency, self.reset)
                self._deaf.add(direction)
            elif fate == 3:  # noqa: PLR2004 - as listed above
                world.note("half open", self.process.name, direction)
                self._deaf |= {"to", "from"}
        if direction in self._deaf:
            return None
        at = max(world.now + latency, self._arrives[direction] + 1)
        self._arrives[direction] = at
        return at

    def _deliver(self, direction: str, what: str, callback: Callable[[], object]) -> None:
        at = self._travel(direction, what)
        process, server = self.process.name, self.server.name
        ends = (process, server) if direction == "to" else (server, process)
        number = len(self.world.trace)
        self.world.note("message", *ends, what, at)
        if at is not None:
            self.world.at(at, lambda: self._arrive(direction, number, callback))

    def _arrive(self, direction: str, number: int, callback: Callable[[], object]) -> None:
        """What meets a partition is held up until it heals, and whatever comes after it."""
        cut = (self.process.name, direction) in self.server.cut_off
        gone = self.server.down or self.server.starts != self._starts
        if direction in self._deaf or gone:
            self.world.trace[number] = (*self.world.trace[number][:-1], None)
        elif cut or any(way == direction for way, *_ in self._held_up):
            self._held_up.append((direction, number, callback))
        elif direction == "from":
            self.process.call(callback)
        else:
            self.server.receive(callback)

    def healed(self) -> None:
        """Let what was held up by a partition arrive, in order."""
        held_up, self._held_up = self._held_up, []
        for direction, number, callback in held_up:
            self._arrive(direction, number, callback)

    def ask(
        self, what: str, run: Callable[[], Any], args: Sequence[str] = (), *, once: bool = False
    ) -> Future[Any]:
        """Send a request; the future is its answer, an error reply, or ConnectionResetError.

        What `run` returns is the answer; a future is, when it is known. A request that may be
        carried out only `once` is never doubled: no connection does that by itself.
        """
        answer: Future[Any] = Future()
        if not self.open:
            answer.fail(ConnectionResetError())
            return answer
        self._unanswered.append(answer)

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

        def reply(result: Any, error: ServerError | None) -> None:  # noqa: ANN401 - any answer
            if self in self.server.connections:
                settle = partial(self._settle, answer, result, error)
                self._deliver("from", f"answer to {what}", settle)

        self._deliver("to", what, execute)
        doubled = 0.0 if once else self.server.settings.doubled
        if self.world.choices.chance("fault:doubled", doubled):
            self.world.note("doubled", self.process.name, what)
            self.world.doubled.update(args)
            late = SLOW[self.world.choices.pick("slow", (4, 3, 2, 1))]
            self.world.after(late, lambda: self._again(run))
        return answer

    def _server_crashes(self) -> bool:
        """Decide whether the server crashes after it carried out a request, before it replies."""
        server, choices = self.server, self.world.choices
        if not choices.chance("fault:server_crash", server.settings.server_crash):
            return False
        server.restart(DOWN[choices.pick("down", (1, 1))])
        return True

    def tell(self, what: str, run: Callable[[], object]) -> None:
        """Send something that has no answer of its own."""
        if self.open:
            self._deliver("to", what, run)

    def _again(self, run: Callable[[], Any]) -> None:
        def late() -> None:
            with suppress(ServerError):
                run()

        if not self.server.down:
            self.server.receive(late)

    def _settle(self, answer: Future[Any], result: Any, error: ServerError | None) -> None:  # noqa: ANN401 - any answer
        if answer in self._unanswered:
            self._unanswered.remove(answer)
        if not self.open:
            return
        if error is None:
            answer.set(result)
        else:
            answer.fail(error)

    def push(self, message: list[bytes]) -> None:
        """Send the client something that is not an answer to a request."""

        def hear() -> None:
            if self.open and self.on_push is not None:
                self.on_push(message)

        self._deliver("from", "pong" if message[0] == b"pong" else "push", hear)

    def reset(self) -> None:
        """End, with both sides told."""
        self._forgotten()
        self.process.call(self._lost)

    def _forgotten(self) -> None:
        if self in self.server.connections:
            self.server.connections.remove(self)

    def _lost(self) -> None:
        if not self.open:
            return
        self.open = False
        unanswered, self._unanswered = self._unanswered, []
        for answer in unanswered:
            answer.fail(ConnectionResetError())
        if self.on_lost is not None:
            self.on_lost()

    def hang_up(self) -> None:
        """Hang up, and have those who wait for an answer know."""
        if not self.process.crashed:
            self.close()
            self.open = True
            self.process.call(self._lost)

    def close(self) -> None:
        """Hang up; what was sent before still arrives. A process that crashed does not do it."""
        if self.open and not self.process.crashed:
            self.open = False
            self._deliver("to", "hang up", self._forgotten)
