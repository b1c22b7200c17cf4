"""What must hold of atomic operations, checked at the server and at the caller.

- STEP: what a server carries out does to its key what `atomic_model` says, and nothing else. A key
  changes by nothing else.
- ONCE: an operation without an id is carried out at most once, and so is one with an id, however
  often it is requested. Its answer is kept for an hour.
- ANSWER: a caller is given the answer of what was carried out, or the error that is documented for
  what happened. After `NodeUnavailable` and `Contended` nothing was carried out, nor is later.
- LATE: an operation that is not answered ends after three command timeouts.

Where a server loses data (a failover, an eviction, a restart without data) ids are lost too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import (
    ConfigurationError,
    Contended,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
    ScriptFailed,
    WrongValue,
)
from holdfast.sim.atomic_model import Effect, Misuse, Update
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.keyspace import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.atomic import Steps
    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script
    from holdfast.sim.atomic_model import Operation
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.keyspace import Entry
    from holdfast.sim.node import Server
    from holdfast.sim.settings import Settings

TRIES = 3
"""Requests after which a server that does not answer counts as away."""

HOUR_MS = 3_600_000
PAUSE = 0.05
"""Seconds that an update rests at most before it tries again."""

SOON = 0.05
"""Seconds: a few messages' time."""


class AtomicCheck:
    """What was carried out, on all servers of one run."""

    def __init__(self, settings: Settings, checks: Checks) -> None:
        self.fail = checks.fail
        self.reached = checks.reached
        self._world = checks.world
        self.forgets = bool(settings.failover or settings.wipe or settings.evict)
        self.calm = settings.calm
        self._jumps = settings.clock_jump > 0
        self._left: dict[tuple[Server, bytes], Entry | None] = {}
        """What each key held when an operation was last carried out on it."""
        self._answers: dict[tuple[str, str], list[tuple[Operation, object]]] = {}
        """What each id was used for, and how it was answered."""

    def is_doubled(self) -> bool:
        """Whether some request was carried out a second time by itself."""
        return bool(self._world.doubled)

    def note(self, call: Call, what: str) -> None:
        """Write down what became of a call."""
        who = call.client.machine.name
        self._world.note("atomic", who, f"{call.operation}: {what}")

    def carry_out(
        self, call: Call, attempt: Attempt, server: Server, run: Callable[[], Reply]
    ) -> Reply:
        """Have a server carry out a request, and compare what it does with the model."""
        key, now_ms = attempt.keys[0], server.wall_clock() // 1000
        before, keys = _seen(server, key), set(server.data.keys())
        self._is_as_it_was_left(server, key, before, now_ms)
        known = self._known(call, attempt, server)
        error: ServerError | None = None
        reply: Reply = None
        try:
            reply = run()
        except ServerError as raised:
            error = raised
        effect = self._expected(call, attempt, before, known, now_ms)
        if error is not None and server.data.full and "OOM" in str(error):
            self.reached["an atomic operation that a full server refused"] += 1
            effect = Effect(before, ScriptFailed, is_final=False)
            call.answers.append(ScriptFailed if attempt.is_plain_script else None)
        elif error is not None and not (attempt.is_plain_script and effect.answer is ScriptFailed):
            self.fail("STEP", f"{call.operation}: {error}")
        elif not attempt.reads:
            call.carried_out(effect, again=known is not None)
        after = _seen(server, key)
        if after != effect.entry:
            what = f"{attempt.name} of {call.operation} made {after} of {before}"
            self.fail("STEP", f"{what}, and not {effect.entry}")
        self._left[server, key] = after
        self._keeps_its_answer(call, attempt, server, effect, known)
        new = set(server.data.keys()) - keys - {key, *(attempt.keys[1:] if effect.is_final else ())}
        if new:
            self.fail("STEP", f"{call.operation} left {sorted(new)}")
        if error is not None:
            raise error
        return reply

    def _is_as_it_was_left(
        self, server: Server, key: bytes, now: Entry | None, now_ms: int
    ) -> None:
        """A key is changed by operations, and by its expiry."""
        left = self._left.get((server, key), now)
        over = left is not None and left.expires is not None and now_ms > left.expires
        excused = self.forgets or self._jumps  # a clock that is set back revives what has expired
        if left != now and not excused and not (over and now is None):
            self.fail("STEP", f"{key!r} was {left}, and is {now}")

    def _known(self, call: Call, attempt: Attempt, server: Server) -> Effect | None:
        """What an id was answered before, if the server has to know it."""
        operation = call.operation
        if operation.once is None:
            return None
        answers = self._answers.get(operation.id, [])
        if self.forgets:
            record = server.data.string(attempt.keys[-1])
            answers = answers if record is not None else []
        if not answers:
            return None
        self.reached["an atomic operation that found its earlier result"] += 1
        # Where answers are lost there may be several.
        given = [answer for meaning, answer in answers if meaning == operation.meaning]
        if len(given) < len(answers):
            self.reached["an id that was used for something else"] += 1
            given.append(ConfigurationError)
        call.answers += given
        return Effect(_seen(server, attempt.keys[0]), given[-1])

    @staticmethod
    def _expected(
        call: Call, attempt: Attempt, entry: Entry | None, known: Effect | None, now_ms: int
    ) -> Effect:
        operation = call.operation
        if attempt.reads:
            wrong = entry is not None and not isinstance(entry.value, bytes)
            if wrong:
                call.answers.append(WrongValue)
            return Effect(entry, None, is_final=False)
        if known is not None:
            return known
        if isinstance(operation, Update):
            return operation.written(entry, attempt.seen, now_ms)
        return operation.effect(entry, now_ms)

    def _keeps_its_answer(
        self, call: Call, attempt: Attempt, server: Server, effect: Effect, known: Effect | None
    ) -> None:
        """What an id was answered is kept for an hour."""
        operation = call.operation
        if operation.once is None or known is not None or not effect.is_final:
            return
        self._answers.setdefault(operation.id, []).append((operation.meaning, effect.answer))
        left = server.data.left(attempt.keys[-1])
        if abs(left - HOUR_MS) > 1:
            self.fail("ONCE", f"the answer to {operation} is kept for {left} ms")


def _seen(server: Server, key: bytes) -> Entry | None:
    """What a key holds, unless it has expired."""
    return server.data.entry(key) if server.data.left(key) != -2 else None  # noqa: PLR2004 - absent


class Attempt:
    """One request of a call."""

    def __init__(self, call: Call, script: Script, keys: Keys, seen: bytes | None) -> None:
        self._call = call
        self.keys = keys
        self.name = script.name
        self.seen = seen
        self.reads = script.name == "read"
        self.is_plain_script = not script.serial and call.operation.once is None
        self.once = call.operation.once is None and not self.reads

    def carry_out(self, server: Server, run: Callable[[], Reply]) -> Reply:
        """Have the server carry it out, and look what it did."""
        return self._call.check.carry_out(self._call, self, server, run)


class Call:
    """One call of an operation by a client, to its end."""

    def __init__(self, check: AtomicCheck, client: SimClient, operation: Operation) -> None:
        self.check = check
        self.client = client
        self.operation = operation
        self.tries = 0
        self.answers: list[object] = []
        """What it may be answered, by what was carried out so far."""
        self._seen: bytes | None = None
        self._compared_in_vain = 0
        self._done = 0
        self._over = ""
        """The error after which nothing may be carried out."""
        self._began = client.now()

    # At the server

    def attempt(self, script: Script, keys: Keys) -> Attempt:
        """Begin a request."""
        return Attempt(self, script, keys, self._seen)

    def carried_out(self, effect: Effect, *, again: bool) -> None:
        """Take in that a server carried it out."""
        if isinstance(self.operation, Update) and effect.answer is False:
            self._compared_in_vain += 1
            self.check.reached["an update that found another's value"] += 1
            return
        if not again:
            self.answers.append(effect.answer)
        if effect.is_final and not again:
            self._done += 1
        if self._done > 1 and not (self.check.forgets and self.operation.once is not None):
            self.check.fail("ONCE", f"{self.operation} was carried out {self._done} times")
        if self._over and not again and effect.is_final:
            self._is_refuted()

    # At the client

    async def run(self, steps: Steps) -> BaseException | None:
        """Call it; return the error that it raised."""
        client, task = self.client, self.client.actor()
        client.operations[task] = self
        try:
            answer = await self._called(steps)
        except HoldfastError as error:
            if isinstance(self.operation, Misuse):
                self._was_refused(error)
            else:
                self._failed(error)
            self._in_time()
            return error
        finally:
            client.operations.pop(task, None)
        self.check.note(self, repr(answer))
        if not any(_is_same(answer, each) for each in self.answers):
            self._wrong(f"was answered {answer!r}")
        self._in_time()
        return None

    async def _called(self, steps: Steps) -> object:
        operation = self.operation
        if not isinstance(operation, Update):
            return await operation.call(steps)

        async def change(value: bytes | None) -> bytes:
            await self.client.sleep(operation.takes)
            self._seen = value
            return operation.made(value)

        return await steps.update(
            operation.key, change, operation.ttl, operation.timeout, operation.once
        )

    def _was_refused(self, error: HoldfastError) -> None:
        """An argument cannot work: nothing is sent."""
        if type(error) is not ConfigurationError or self.tries:
            self._wrong(f"sent {self.tries} requests and raised {error!r}")

    def _failed(self, error: HoldfastError) -> None:
        """It ended with an error: that is one that is documented, and what it says is so."""
        kind = type(error)
        self.check.note(self, kind.__name__)
        if error.lock != self.operation.key:
            self._wrong(f"raised an error about {error.lock!r}")
        if isinstance(error, OutcomeUnknown):
            self.check.reached["an atomic operation without a reply"] += 1
            if self.operation.once is not None and self.tries < TRIES:
                self._wrong("has an id, and was not requested again")
        elif isinstance(error, NodeUnavailable):
            self.check.reached["an atomic operation that was not carried out"] += 1
            self._nothing_was_done(kind)
        elif isinstance(error, Contended) and isinstance(self.operation, Update):
            self.check.reached["an update that lost every comparison"] += 1
            self._nothing_was_done(kind)
            took, timeout = self.client.now() - self._began, self.operation.timeout
            if not self._compared_in_vain or timeout is None or took < timeout - PAUSE:
                self._wrong(f"was given up after {took} s")
        elif kind not in self.answers:
            self._wrong(f"raised {error!r}")
        unheard = isinstance(error, (OutcomeUnknown, NodeUnavailable))
        if unheard and self.check.calm and not self.client.closed:
            self._wrong(f"raised {error!r} though nothing went wrong")

    def _nothing_was_done(self, kind: type) -> None:
        self._over = kind.__name__
        if self._done:
            self._is_refuted()

    def _is_refuted(self) -> None:
        """It was carried out, and the caller knows otherwise; a doubled request may do that."""
        if not self.check.is_doubled():
            self._wrong(f"was carried out, and raised {self._over}")

    def _wrong(self, what: str) -> None:
        self.check.fail("ANSWER", f"{self.operation} {what}; expected: {self.answers}")

    def _in_time(self) -> None:
        operation, limit = self.operation, TRIES * COMMAND_TIMEOUT
        if isinstance(operation, Update):
            if operation.timeout is None:
                return
            limit = 2 * limit + operation.timeout + operation.takes + PAUSE
        late = self.client.now() - self._began - limit
        if late > SOON and not self.client.was_stopped_since(self._began):
            self.check.fail("LATE", f"{operation} took {late:.3f} s too long")


def _is_same(answer: object, expected: object) -> bool:
    return isinstance(answer, type(expected)) and answer == expected
