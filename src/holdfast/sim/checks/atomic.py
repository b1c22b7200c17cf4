"""The checks of atomic operations, on the server and in the client.

- STEP: an operation changes its key as `atomic_model` specifies, and nothing else changes it.
- ONCE: an operation is executed at most once. One with an id is executed at most once even if it is
  requested several times, and its result is kept for an hour.
- ANSWER: a caller receives the result of what was executed, or the documented error. After
  `NodeUnavailable` and `Contended` nothing was executed, and nothing is executed later.
- LATE: an operation without a reply ends after three command timeouts.

A server that loses data (by failover, eviction or a restart without data) also loses ids.
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

    from holdfast.core.atomic import AtomicOperations
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
"""Requests without a reply after which an operation ends."""

HOUR_MS = 3_600_000
PAUSE = 0.05
"""Seconds: the longest pause of an update before it retries."""

SOON = 0.05
"""Seconds: the time of a few messages."""


class AtomicCheck:
    """The operations that were executed on all servers of one run."""

    def __init__(self, settings: Settings, checks: Checks) -> None:
        self.fail = checks.fail
        self.reached = checks.reached
        self._sim = checks.sim
        self.loses_data = bool(settings.failover or settings.wipe or settings.evict)
        self.calm = settings.calm
        self._jumps = settings.clock_jump > 0
        self._left: dict[tuple[Server, bytes], Entry | None] = {}
        """The value of each key after the last operation on it."""
        self._results: dict[tuple[str, str], list[tuple[Operation, object]]] = {}
        """The operations and results of each id."""

    def is_doubled(self) -> bool:
        """Whether a request was delivered twice."""
        return bool(self._sim.doubled)

    def note(self, call: Call, what: str) -> None:
        """Add the result of a call to the trace."""
        client = call.client.machine.name
        self._sim.note("atomic", client, f"{call.operation}: {what}")

    def execute(
        self, call: Call, attempt: Attempt, server: Server, run: Callable[[], Reply]
    ) -> Reply:
        """Execute a request on a server, and compare its effect with the model."""
        key, now_ms = attempt.keys[0], server.wall_clock() // 1000
        before, keys = _seen(server, key), set(server.data.keys())
        self._check_unchanged(server, key, before, now_ms)
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
            call.results.append(ScriptFailed if attempt.is_plain_script else None)
        elif error is not None and not (attempt.is_plain_script and effect.result is ScriptFailed):
            self.fail("STEP", f"{call.operation}: {error}")
        elif not attempt.reads:
            call.executed(effect, again=known is not None)
        after = _seen(server, key)
        if after != effect.entry:
            what = f"{attempt.name} of {call.operation} changed {before} to {after}"
            self.fail("STEP", f"{what}, not to {effect.entry}")
        self._left[server, key] = after
        self._check_reply_kept(call, attempt, server, effect, known)
        new = set(server.data.keys()) - keys - {key, *(attempt.keys[1:] if effect.is_final else ())}
        if new:
            self.fail("STEP", f"{call.operation} created {sorted(new)}")
        if error is not None:
            raise error
        return reply

    def _check_unchanged(self, server: Server, key: bytes, now: Entry | None, now_ms: int) -> None:
        """Check that only operations and its expiry have changed a key."""
        left = self._left.get((server, key), now)
        over = left is not None and left.expires is not None and now_ms > left.expires
        excused = self.loses_data or self._jumps  # a clock that is set back revives expired keys
        if left != now and not excused and not (over and now is None):
            self.fail("STEP", f"{key!r} was {left}, and is now {now}")

    def _known(self, call: Call, attempt: Attempt, server: Server) -> Effect | None:
        """Return the earlier result of an id if the server must have it."""
        operation = call.operation
        if operation.once is None:
            return None
        results = self._results.get(operation.id, [])
        if self.loses_data:
            record = server.data.string(attempt.keys[-1])
            results = results if record is not None else []
        if not results:
            return None
        self.reached["an atomic operation that found its earlier result"] += 1
        # If results are lost, one id may have several.
        given = [result for meaning, result in results if meaning == operation.meaning]
        if len(given) < len(results):
            self.reached["an id that was used for something else"] += 1
            given.append(ConfigurationError)
        call.results += given
        return Effect(_seen(server, attempt.keys[0]), given[-1])

    @staticmethod
    def _expected(
        call: Call, attempt: Attempt, entry: Entry | None, known: Effect | None, now_ms: int
    ) -> Effect:
        operation = call.operation
        if attempt.reads:
            wrong = entry is not None and not isinstance(entry.value, bytes)
            if wrong:
                call.results.append(WrongValue)
            return Effect(entry, None, is_final=False)
        if known is not None:
            return known
        if isinstance(operation, Update):
            return operation.written(entry, attempt.seen, now_ms)
        return operation.effect(entry, now_ms)

    def _check_reply_kept(
        self, call: Call, attempt: Attempt, server: Server, effect: Effect, known: Effect | None
    ) -> None:
        """Check that the result of an id is kept for an hour (ONCE)."""
        operation = call.operation
        if operation.once is None or known is not None or not effect.is_final:
            return
        self._results.setdefault(operation.id, []).append((operation.meaning, effect.result))
        left = server.data.left(attempt.keys[-1])
        if abs(left - HOUR_MS) > 1:
            self.fail("ONCE", f"the result of {operation} is kept for {left} ms")


def _seen(server: Server, key: bytes) -> Entry | None:
    """Return the value of a key, or None if it has expired."""
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

    def execute(self, server: Server, run: Callable[[], Reply]) -> Reply:
        """Execute the request on a server, and check what it did."""
        return self._call.check.execute(self._call, self, server, run)


class Call:
    """One call of an operation by a client."""

    def __init__(self, check: AtomicCheck, client: SimClient, operation: Operation) -> None:
        self.check = check
        self.client = client
        self.operation = operation
        self.tries = 0
        self.results: list[object] = []
        """The valid results, given what was executed so far."""
        self._seen: bytes | None = None
        self._failed_comparisons = 0
        self._done = 0
        self._ended_with = ""
        """The name of the error after which nothing may be executed."""
        self._began = client.now()

    # On the server

    def attempt(self, script: Script, keys: Keys) -> Attempt:
        """Start a request."""
        return Attempt(self, script, keys, self._seen)

    def executed(self, effect: Effect, *, again: bool) -> None:
        """A server executed the operation."""
        if isinstance(self.operation, Update) and effect.result is False:
            self._failed_comparisons += 1
            self.check.reached["an update that found another's value"] += 1
            return
        if not again:
            self.results.append(effect.result)
        if effect.is_final and not again:
            self._done += 1
        if self._done > 1 and not (self.check.loses_data and self.operation.once is not None):
            self.check.fail("ONCE", f"{self.operation} was executed {self._done} times")
        if self._ended_with and not again and effect.is_final:
            self._fail_executed()

    # In the client

    async def run(self, steps: AtomicOperations) -> BaseException | None:
        """Call the operation, check its result, and return the error that it raised."""
        client, task = self.client, self.client.actor()
        client.operations[task] = self
        try:
            result = await self._called(steps)
        except HoldfastError as error:
            if isinstance(self.operation, Misuse):
                self._check_misuse(error)
            else:
                self._check_error(error)
            self._check_time()
            return error
        finally:
            client.operations.pop(task, None)
        self.check.note(self, repr(result))
        if not any(_is_same(result, each) for each in self.results):
            self._wrong(f"returned {result!r}")
        self._check_time()
        return None

    async def _called(self, steps: AtomicOperations) -> object:
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

    def _check_misuse(self, error: HoldfastError) -> None:
        """Check that an invalid argument raises `ConfigurationError`, and nothing is sent."""
        if type(error) is not ConfigurationError or self.tries:
            self._wrong(f"sent {self.tries} requests and raised {error!r}")

    def _check_error(self, error: HoldfastError) -> None:
        """Check that an error is documented and true."""
        kind = type(error)
        self.check.note(self, kind.__name__)
        if error.lock != self.operation.key:
            self._wrong(f"raised an error about {error.lock!r}")
        if isinstance(error, OutcomeUnknown):
            self.check.reached["an atomic operation without a reply"] += 1
            if self.operation.once is not None and self.tries < TRIES:
                self._wrong("has an id, and was not retried")
        elif isinstance(error, NodeUnavailable):
            self.check.reached["an atomic operation that was not executed"] += 1
            self._check_not_executed(kind)
        elif isinstance(error, Contended) and isinstance(self.operation, Update):
            self.check.reached["an update that lost every comparison"] += 1
            self._check_not_executed(kind)
            took, timeout = self.client.now() - self._began, self.operation.timeout
            if not self._failed_comparisons or timeout is None or took < timeout - PAUSE:
                self._wrong(f"raised Contended after {took} s")
        elif kind not in self.results:
            self._wrong(f"raised {error!r}")
        without_reply = isinstance(error, (OutcomeUnknown, NodeUnavailable))
        if without_reply and self.check.calm and not self.client.closed:
            self._wrong(f"raised {error!r} without a fault")

    def _check_not_executed(self, kind: type) -> None:
        self._ended_with = kind.__name__
        if self._done:
            self._fail_executed()

    def _fail_executed(self) -> None:
        """Fail: it was executed after its error. A request that was delivered twice may do that."""
        if not self.check.is_doubled():
            self._wrong(f"was executed, and raised {self._ended_with}")

    def _wrong(self, what: str) -> None:
        self.check.fail("ANSWER", f"{self.operation} {what}; expected: {self.results}")

    def _check_time(self) -> None:
        operation, limit = self.operation, TRIES * COMMAND_TIMEOUT
        if isinstance(operation, Update):
            if operation.timeout is None:
                return
            limit = 2 * limit + operation.timeout + operation.takes + PAUSE
        late = self.client.now() - self._began - limit
        if late > SOON and not self.client.was_stopped_since(self._began):
            self.check.fail("LATE", f"{operation} took {late:.3f} s too long")


def _is_same(result: object, expected: object) -> bool:
    return isinstance(result, type(expected)) and result == expected
