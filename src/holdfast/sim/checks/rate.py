"""The checks of a rate, on the server and in the client.

- RATE: a request changes its key as `rate_model` specifies, and its caller receives the result. The
  cost that is allowed in t seconds is at most burst + limit * t / per, by the server's clock. A
  reserved cost counts at the time at which its caller may use it.
- WAITS: `acquire` sends one request and sleeps once, exactly until its cost is available; it does
  not wait longer than its timeout.
- UNRESERVE: an interrupted wait returns its reservation if that is the last one, and only then. A
  returned reservation is not used.

A server that loses data, or whose clock is set back, may exceed the rate.
"""

from __future__ import annotations

from bisect import insort
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import HoldfastError, NodeUnavailable, NotHeld, OutcomeUnknown, RateLimited
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.keyspace import ServerError
from holdfast.sim.simulation import SECOND, Cancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.core.rate import Verdict
    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.keyspace import Entry
    from holdfast.sim.node import Server
    from holdfast.sim.rate_model import RateModel
    from holdfast.sim.settings import Settings

SOON = 0.05
"""Seconds: the time of a few messages."""


class Kind(Enum):
    """What a client calls."""

    TAKE = "take"
    ACQUIRE = "acquire"
    PEEK = "peek"
    RESET = "reset"
    MISUSE = "misuse"


class _Use(NamedTuple):
    """A cost that was allowed, and from when its caller may use it, by the server's clock."""

    at: int
    number: int
    cost: int
    call: Call


class RateCheck:
    """The requests that were executed in one run."""

    def __init__(self, settings: Settings, checks: Checks, model: RateModel | None) -> None:
        self.fail = checks.fail
        self.reached = checks.reached
        self.sim = checks.sim
        self.settings = settings
        self._model = model
        """The settings of all clients, if they are the same."""
        self.loses_data = bool(settings.failover or settings.wipe or settings.evict)
        self._jumps = settings.clock_jump > 0
        self._left: dict[Server, Entry | None] = {}
        """The value of the key after the last request."""
        self._uses: list[_Use] = []
        self._number = 0

    # On the server

    def execute(
        self, call: Call, script: str, keys: Keys, server: Server, run: Callable[[], Reply]
    ) -> Reply:
        """Execute a request on a server, and compare its effect with the model."""
        now, key = server.wall_clock(), keys[0]
        before, others = _seen(server, key), set(server.data.keys()) - {key}
        self._check_unchanged(server, before, now)
        try:
            reply = run()
        except ServerError as error:
            if not (server.data.full and "OOM" in str(error)):
                self.fail("RATE", f"{call}: {error}")
            if _seen(server, key) != before:
                self.fail("RATE", f"{call} failed and changed the key")
            raise
        after = self._left[server] = _seen(server, key)
        if set(server.data.keys()) - {key} - others:
            self.fail("RATE", f"{call} created another key")
        if script == "unreserve":
            self._check_unreserved(call, before, after, now)
        else:
            self._check_taken(call, before, after, now, reply)
        return reply

    def _check_unchanged(self, server: Server, before: Entry | None, now: int) -> None:
        """Check that the key changes only by requests, and expires only when it is not needed."""
        left = self._left.get(server)
        if left == before or self.loses_data or self._jumps:
            return
        time, _ = parsed(left)
        if before is not None or time is None or time > now:
            self.fail("RATE", f"the key was {left}, and is {before} at {now}")

    def _check_taken(
        self, call: Call, before: Entry | None, after: Entry | None, now: int, reply: Reply
    ) -> None:
        model, (time, _) = call.model, parsed(before)
        full_at = model.after(time, now, call.cost)
        left = now + model.span - full_at
        if reply[0] != left:
            self.fail("RATE", f"{call} returned {reply[0]}, not {left}")
        kept = left < 0 or call.kind is Kind.PEEK
        available_at = full_at - model.time_of(call.cost) if kept else full_at
        call.executed(left, model.remaining(available_at, now))
        if call.kind is Kind.PEEK or left + call.longest < 0:
            self.reached["a rate refused a request"] += call.kind is Kind.TAKE
            self.reached["a wait for a rate beyond the timeout"] += call.kind is Kind.ACQUIRE
            if after != before:
                self.fail("RATE", f"{call} changed {before} to {after}")
            return
        written, token = parsed(after)
        call.token = token
        if written != full_at or bool(token) != (call.kind is Kind.ACQUIRE):
            self.fail("RATE", f"{call} changed {before} to {after}, not to {full_at}")
        expires = 0 if after is None or after.expires is None else after.expires * 1000
        if not full_at <= expires <= full_at + 2000:
            self.fail(
                "RATE", f"{call}: the key expires at {expires}, and is needed until {full_at}"
            )
        self._number += 1
        insort(self._uses, _Use(now + max(0, -left), self._number, call.cost, call))
        self._check_uses()

    def _check_uses(self) -> None:
        """Check all windows: between any two uses, both included."""
        model = self._model
        if model is None or self.loses_data or self._jumps:
            return
        uses = [use for use in self._uses if not use.call.returned]
        for first, begin in enumerate(uses):
            total = 0
            for use in uses[first:]:
                total += use.cost
                if total * model.interval > model.span + use.at - begin.at:
                    window = (use.at - begin.at) / SECOND
                    self.fail("RATE", f"a cost of {total} was allowed in {window} s by {model}")

    def _check_unreserved(
        self, call: Call, before: Entry | None, after: Entry | None, now: int
    ) -> None:
        if call.kind is Kind.RESET:
            self._uses.clear()
            if after is not None:
                self.fail("RATE", f"{call} left {after}")
            return
        time, token = parsed(before)
        if time is None or not token or token != call.token:
            self.reached["a reservation that was not the last one"] += time is not None
            if after != before:
                self.fail("UNRESERVE", f"{call} with {call.token} changed {before} to {after}")
            return
        self.reached["a reservation returned"] += 1
        call.returned = True
        left = time - call.model.time_of(call.cost)
        written, rest = parsed(after)
        if rest or written != (left if left > now else None):
            self.fail("UNRESERVE", f"{call} changed {before} to {after}, not to {left}")
        expires = 0 if after is None or after.expires is None else after.expires * 1000
        if after is not None and not left <= expires <= left + 2000:
            self.fail("UNRESERVE", f"{call}: the key expires at {expires}, not {left}")

    def is_last(self, call: Call) -> bool:
        """Whether the reservation of a call is the last request on its server."""
        return any(parsed(left)[1] == call.token for left in self._left.values())


def parsed(entry: Entry | None) -> tuple[int | None, str]:
    """Return the time in the key, and the token of the reservation or ''."""
    if entry is None or not isinstance(entry.value, bytes):
        return None, ""
    time, _, token = entry.value.partition(b" ")
    return int(time), token.decode()


def _seen(server: Server, key: bytes) -> Entry | None:
    """Return the value of the key, or None if it has expired."""
    return server.data.entry(key) if server.data.left(key) != -2 else None  # noqa: PLR2004 - absent


class Attempt:
    """One request of a call. It may be delivered twice: that only makes the rate lower."""

    once = False

    def __init__(self, call: Call, script: Script, keys: Keys) -> None:
        self._call = call
        self._script = script.name
        self._keys = keys

    def execute(self, server: Server, run: Callable[[], Reply]) -> Reply:
        """Execute the request on a server, and check what it did."""
        return self._call.check.execute(self._call, self._script, self._keys, server, run)


class Call:
    """One call of a client."""

    def __init__(  # noqa: PLR0913 - its arguments
        self,
        check: RateCheck,
        client: SimClient,
        kind: Kind,
        model: RateModel,
        cost: int,
        *,
        timeout: float | None,
        allows: bool,
    ) -> None:
        self.check = check
        self.client = client
        self.kind = kind
        self.model = model
        self.cost = cost
        self.timeout = timeout
        self.allows = allows
        self.tries = 0
        self.token = ""
        self.returned = False
        self.longest = 0
        """Microseconds that the call may wait."""
        if kind is Kind.ACQUIRE:
            self.longest = 2**60 if timeout is None else round(timeout * SECOND)
        self._results: list[tuple[int, int]] = []
        """What is left of the burst, and the remaining cost: for each time it was executed."""
        self._slept: list[float] = []
        self._ended_with = ""
        self._began = client.now()
        self._generation = client.generation
        self._event = len(check.sim.trace)

    def __repr__(self) -> str:
        return f"{self.kind.value}({self.cost}) of {self.client.machine.name} by {self.model}"

    # On the server

    def attempt(self, script: Script, keys: Keys) -> Attempt:
        """Start a request."""
        return Attempt(self, script, keys)

    def executed(self, left: int, remaining: int) -> None:
        """A server executed the request."""
        self._results.append((left, remaining))
        if self.check.sim.doubled or self.kind is Kind.PEEK:
            return
        if len(self._results) > 1:
            self.check.fail("RATE", f"{self} was executed {len(self._results)} times")
        if self._ended_with:
            self.check.fail("RATE", f"{self} was executed after {self._ended_with}")

    # In the client

    def sleeps(self, seconds: float) -> None:
        """The call begins to sleep."""
        self._slept.append(seconds)
        self.check.reached["a reservation"] += 1
        waits = [-left / SECOND for left, _ in self._results if left < 0]
        if len(self._slept) > 1 or seconds not in waits:
            self.check.fail("WAITS", f"{self} sleeps {self._slept}, not one of {waits}")
        if seconds * SECOND > self.longest + 1:
            self.check.fail("WAITS", f"{self} waits {seconds} s, longer than its timeout")

    async def run(self, action: Callable[[], Awaitable[Verdict | None]]) -> None:
        """Call the rate, and check the result."""
        client, task = self.client, self.client.actor()
        client.operations[task] = self
        try:
            verdict = await action()
        except HoldfastError as error:
            self._note(type(error).__name__)
            self._check_error(error)
        except Cancelled:
            self._note("cancelled")
            self._check_unreserved()
            raise
        else:
            self._note(repr(verdict))
            if verdict is not None:
                self._check_verdict(verdict)
        finally:
            client.operations.pop(task, None)
        self._check_time()

    def _note(self, what: str) -> None:
        self.check.sim.note("rate", self.client.machine.name, f"{self}: {what}")

    def _wrong(self, what: str) -> None:
        self.check.fail("RATE", f"{self} {what}; executed: {self._results}")

    def _check_verdict(self, verdict: Verdict) -> None:
        if verdict.unavailable:
            self.check.reached["a request allowed without the server"] += 1
            if not (self.allows and verdict.allowed) or self._has_no_faults():
                self._wrong(f"returned {verdict}")
            return
        forked = self.kind is Kind.ACQUIRE and self.client.generation != self._generation
        if verdict.allowed and (self.returned or forked):
            self.check.fail("UNRESERVE", f"{self} uses a reservation that is not its own")
        if verdict.allowed and not (verdict.retry_after == 0.0 and verdict):
            self._wrong(f"returned {verdict}")
        if not any(self._is_right(verdict, *result) for result in self._results):
            self._wrong(f"returned {verdict}")

    def _is_right(self, verdict: Verdict, left: int, remaining: int) -> bool:
        if left >= 0 or (self.kind is Kind.ACQUIRE and self._slept):
            return verdict.allowed and verdict.remaining == (remaining if left >= 0 else 0)
        refused = not verdict.allowed and verdict.remaining == remaining
        return refused and self.kind is not Kind.ACQUIRE and verdict.retry_after == -left / SECOND

    def _check_error(self, error: HoldfastError) -> None:
        if isinstance(error, RateLimited):
            waits = [-left / SECOND for left, _ in self._results if left + self.longest < 0]
            if self.kind is not Kind.ACQUIRE or error.retry_after not in waits:
                self._wrong(f"raised {error!r} with {error.retry_after}")
        elif isinstance(error, NotHeld):
            if self.client.generation == self._generation:
                self._wrong("raised NotHeld without a fork")
        elif isinstance(error, (OutcomeUnknown, NodeUnavailable)):
            unknown = isinstance(error, OutcomeUnknown)
            self.check.reached["a request to a rate without a reply"] += unknown
            if not unknown:
                self._check_not_executed()
            allowed = self.allows and self.kind is not Kind.RESET and not self.client.closed
            if allowed or self._has_no_faults():
                self._wrong(f"raised {error!r}")
        else:
            self._wrong(f"raised {error!r}")
        if error.lock != "it":
            self._wrong(f"raised an error about {error.lock!r}")

    def _check_not_executed(self) -> None:
        self._ended_with = "NodeUnavailable"
        if self._results and self.kind is not Kind.PEEK and not self.check.sim.doubled:
            self._wrong("raised NodeUnavailable, and was executed")

    def _has_no_faults(self) -> bool:
        return self.check.settings.calm and not self.client.closed

    def _check_unreserved(self) -> None:
        """Check that an interrupted wait has returned its reservation."""
        settings, client = self.check.settings, self.client
        faults = settings.full or settings.close or settings.fork or settings.crash
        if not self._slept or not settings.prompt or faults or self.check.loses_data:
            return
        name = client.machine.name
        for _, kind, actor, *rest in self.check.sim.trace[self._event :]:
            if kind == "cancelled" and actor == name and rest[0].endswith("shielded"):
                return
        if self.check.is_last(self):
            self.check.fail("UNRESERVE", f"{self} was interrupted, and kept its reservation")

    def _check_time(self) -> None:
        slept, client = sum(self._slept), self.client
        took = client.now() - self._began
        if took < slept:
            self.check.fail("WAITS", f"{self} took {took} s, and its wait is {slept} s")
        late = took - slept - COMMAND_TIMEOUT
        if late > SOON and not client.was_stopped_since(self._began):
            self.check.fail("WAITS", f"{self} took {late:.3f} s too long")
