"""Periodic jobs: at most one run per period over all machines.

The rules:

1. **The server decides**, by its clock, in the script that grants the lock of the job
   (`scripts/start.lua`). So the clocks of the machines do not matter. The number of a period is the
   time since the epoch, minus the offset, divided by the length of a period.
2. **The start is recorded in that script.** A run that fails or crashes is not repeated in its
   period, and neither is one whose caller never received the grant: at most once.
3. **A run is a lease.** While it lasts, no other run begins, even in later periods.
4. **A call does not wait for another one.** It starts the run, or returns why not. A call that may
   start receives the number of the period and the last start, and sends a second request with this
   number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from holdfast.core.acquire import acquire
from holdfast.core.duration import in_seconds
from holdfast.core.messages import NotNeeded
from holdfast.core.retry import TRIES
from holdfast.core.spec import check_ttl, is_number, to_ms
from holdfast.core.token import read_holder
from holdfast.errors import ConfigurationError, WouldDeadlock
from holdfast.keys import keys_of_kind
from holdfast.scripts import START

if TYPE_CHECKING:
    from holdfast.core.duration import Duration
    from holdfast.core.lease_state import LeaseRef
    from holdfast.core.record import Record
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder

EVERY_MIN = 0.1
"""The shortest period, in seconds."""

RECORD_LIFE = 30 * 86_400.0
"""Seconds for which the last start is kept, at least. Two periods more are added."""

Why: TypeAlias = Literal["done", "running", "too_soon"]


@dataclass(frozen=True)
class LastRun:
    """The last run that was started, by any client.

    `at` is when it started, in seconds since the epoch by the server's clock, and `by` the process
    that ran it.
    """

    at: float
    by: Holder


@dataclass(frozen=True)
class Skipped:
    """What a call of a periodic job returns if it did not run the job. It is false.

    Example:
        outcome = nightly()
        if isinstance(outcome, holdfast.Skipped):
            print(f"not run: {outcome}")

    - `why`: "done" if this period's run was started before, even if it failed; "running" if a run
      is in progress; "too_soon" if the last one started less than `at_least` ago.
    - `by`: the process that runs or ran the job.
    - `at`: when that run started, in seconds since the epoch by the server's clock.
    - `next`: seconds until a call may start the next run. With "running" the present run also has
      to end.
    """

    why: Why
    by: Holder
    at: float
    next: float

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        by = f"{self.by.host}, pid {self.by.pid}"
        text = {
            "done": f"this period's run was started by {by}",
            "running": f"{by} runs it now",
            "too_soon": f"{by} started it too short a time ago",
        }
        return f"{text[self.why]}; the next run may start in {self.next:.0f} s"


class Started(NamedTuple):
    """A run that was started."""

    number: int
    """The number of its period."""
    last: LastRun | None
    """The run before it."""


class Job(NamedTuple):
    """A periodic job: its lock, and its periods."""

    lock: LockSpec
    every_ms: int
    offset_ms: int
    at_least_ms: int


def describe_job(  # noqa: PLR0913 - the settings of a job
    spec: LockSpec,
    namespace: str,
    *,
    every: Duration,
    at_least: Duration,
    offset: Duration,
    quorum: bool,
) -> Job:
    """Return the job whose lock has the name and the settings of `spec`.

    Raises:
        ConfigurationError: a setting is invalid, or the client uses several independent servers.
    """
    name = spec.name
    if quorum:
        raise ConfigurationError(
            "periodic() grants a lock and records the start of its run in one step, by one clock. "
            "Several independent servers have neither: use a client of one server, of Sentinels, "
            "or of a cluster",
            lock=name,
        )
    every, at_least, offset = in_seconds(every), in_seconds(at_least), in_seconds(offset)
    check_ttl(every, lock=name, least=EVERY_MIN, name="every", of="periodic", example=86_400)
    for what, given in (("at_least", at_least), ("offset", offset)):
        if not is_number(given) or not 0 <= given < every:
            message = f"periodic {name!r}: {what}={given!r}: give seconds, 0 or more, below every="
            raise ConfigurationError(f"{message}{every!r}", lock=name)
    every_ms, at_least_ms, offset_ms = (int(to_ms(each)) for each in (every, at_least, offset))
    life_ms = int(to_ms(RECORD_LIFE)) + 2 * every_ms
    lock = replace(
        spec,
        keys=keys_of_kind("periodic", name, namespace, "last"),
        acquire_script=START,
        extra_args=(str(every_ms), str(offset_ms), str(at_least_ms), str(life_ms)),
    )
    return Job(lock, every_ms, offset_ms, at_least_ms)


class Start(NamedTuple):
    """The record of the last start, with the settings of the job that was started."""

    at_ms: int
    by: Holder
    every_ms: int
    offset_ms: int
    at_least_ms: int

    @property
    def next_ms(self) -> int:
        """When a call with the same settings may start the next run, since the epoch."""
        period = (self.at_ms - self.offset_ms) // self.every_ms
        next_period_ms = self.offset_ms + (period + 1) * self.every_ms
        return max(next_period_ms, self.at_ms + self.at_least_ms)


def read_start(record: bytes) -> Start:
    """Parse the record of the last start."""
    at_ms, fence, every, offset, at_least, token = record.split(b" ", 5)
    by = read_holder(token, 0, fence)
    return Start(int(at_ms), by, int(every), int(offset), int(at_least))


async def start(session: Session, job: Job, ref: LeaseRef) -> Started | Skipped:
    """Start the run of the present period, under the lease of `ref`; or return why not.

    If this is interrupted, nothing is held. The period may count as started.

    Raises:
        NodeUnavailable, ConfigurationError, NotHeld: as `acquire`.
    """
    number, last = "", b""
    while True:
        lock = replace(job.lock, extra_args=(*job.lock.extra_args, number))
        try:
            await _acquire(session, lock, ref)
        except NotNeeded as found:
            why, seen_last, now_ms, rest = found.reply
        else:
            return Started(int(number), _last_run(last))
        if why == b"running":
            return _running(job, seen_last, now_ms, rest)
        if why != b"ready":
            return _skipped(job, why.decode(), seen_last, now_ms)
        number, last = str(rest), seen_last


async def _acquire(session: Session, lock: LockSpec, ref: LeaseRef) -> None:
    """Acquire the lock. The script never makes a caller wait for another one.

    The timeout is for retries only: with 0, a single lost reply would use up the period.
    """
    try:
        await acquire(session, lock, TRIES * lock.command_timeout, ref)
    except WouldDeadlock:  # the caller runs the job: the script returns that
        await acquire(session, lock, 0, ref)


async def last_run(record: Record) -> LastRun | None:
    """Return the last run that was started; None if no start is recorded.

    Raises:
        NodeUnavailable, WrongValue, ConfigurationError: as `Record.read`.
    """
    return _last_run(await record.read() or b"")


def _last_run(last: bytes) -> LastRun | None:
    if not last:
        return None
    start = read_start(last)
    return LastRun(start.at_ms / 1000, start.by)


def _running(job: Job, by: bytes, now_ms: int, left_ms: int) -> Skipped:
    fence, token = by.split(b" ", 1)
    holder, started_ms = read_holder(token, left_ms, fence), int(fence) // 1000
    wait_ms = _ms_to_next_period(job, now_ms)
    if left_ms >= 0 and started_ms < now_ms + wait_ms - job.every_ms:
        # The run began in an earlier period. The present one begins a run when that run has ended.
        wait_ms = min(wait_ms, left_ms + 1)
    return Skipped("running", holder, started_ms / 1000, wait_ms / 1000)


def _skipped(job: Job, why: Why, last: bytes, now_ms: int) -> Skipped:
    start = read_start(last)
    next_ms = start.at_ms + job.at_least_ms
    if why == "done":
        latest = max(now_ms, start.at_ms)  # the clock may have been set back since the start
        next_ms = max(next_ms, latest + _ms_to_next_period(job, latest))
    return Skipped(why, start.by, start.at_ms / 1000, (next_ms - now_ms) / 1000)


def _ms_to_next_period(job: Job, now_ms: int) -> int:
    return job.every_ms - (now_ms - job.offset_ms) % job.every_ms
