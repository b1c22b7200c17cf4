"""A deterministic scheduler with virtual time: processes, tasks, futures and timers.

True time is an integer number of microseconds. Each process has its own clock, which may run
slightly fast or slow. A paused process runs no callbacks until it resumes, but its clock keeps
running. A crashed process never resumes. Events that are due at the same time run in the order in
which they were scheduled. Every other decision comes from `choices`, so two runs with the same
choices are identical.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from holdfast.sim.choices import Choices

T = TypeVar("T")

SECOND = 1_000_000
"""Microseconds in a second."""


_EVENTS_PER_SECOND = 300_000  # more than this is an endless loop


class Cancelled(BaseException):
    """Raised inside a task that is cancelled."""


class Stuck(Exception):  # noqa: N818 - a state, not an error
    """No event is left, and the run is not done."""


def check_duration(seconds: float) -> None:
    """Reject a negative timeout, as sockets do."""
    if seconds < 0:
        raise ValueError(f"a timeout must not be negative: {seconds} s")


class Future(Generic[T]):
    """A result that is set once, later."""

    __slots__ = ("_error", "_value", "done", "unread", "waiting")

    def __init__(self) -> None:
        self.done = False
        self.unread: BaseException | None = None
        """The exception, until a caller has retrieved it."""
        self._value: Any = None
        self._error: BaseException | None = None
        self.waiting: list[Callable[[], None]] = []

    def set(self, value: T) -> None:
        """Set the result."""
        if not self.done:
            self.done, self._value = True, value
            self._run_callbacks()

    def fail(self, error: BaseException) -> None:
        """Set an exception."""
        if not self.done:
            self.done, self._error, self.unread = True, error, error
            self._run_callbacks()

    def result(self) -> T:
        """Return the result, or raise the exception that was set."""
        self.unread = None
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def _run_callbacks(self) -> None:
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()

    def __await__(self) -> Generator[Future[T], None, T]:
        """Suspend until the result is set."""
        if not self.done:
            yield self
        return self.result()


class Timer:
    """A scheduled callback that can be cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object] | None) -> None:
        self.callback = callback

    def cancel(self) -> None:
        """Cancel the callback."""
        self.callback = None


class Simulation:
    """Virtual time and the scheduled events of one run."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 0
        self.task: Task | None = None
        """The task that runs now."""
        self.trace: list[tuple[Any, ...]] = []
        """The recorded events: (true time, kind, actor, details)."""
        self.tasks: list[Task] = []
        self.longest_pause = 0
        """The longest pause of a process so far, in microseconds."""
        self.doubled: set[str] = set()
        """The arguments of requests that were delivered twice."""
        self.failure: BaseException | None = None
        """The exception that ends the run."""
        self._heap: list[tuple[int, int, Timer]] = []
        self._order = count()

    def note(self, kind: str, actor: str, *rest: object) -> None:
        """Add an event to the trace."""
        self.trace.append((self.now, kind, actor, *rest))

    def at(self, when: int, callback: Callable[[], object]) -> Timer:
        """Schedule a callback at true time `when`."""
        timer = Timer(callback)
        heappush(self._heap, (max(when, self.now), next(self._order), timer))
        return timer

    def after(self, delay: int, callback: Callable[[], object]) -> Timer:
        """Schedule a callback in `delay` microseconds."""
        return self.at(self.now + delay, callback)

    def end(self, *expected: type[BaseException]) -> None:
        """Close all tasks.

        Raises:
            BaseException: the error of a task, if no caller has retrieved it, unless it is
                `Cancelled` or one of the `expected` types.
        """
        for task in self.tasks:
            task.close()
        for task in self.tasks:
            error = task.result.unread
            if error is not None and not isinstance(error, (Cancelled, *expected)):
                raise error

    def run(self, done: Callable[[], bool], until: int) -> bool:
        """Process events until `done()` is true or true time exceeds `until`.

        Returns:
            Whether `done()` was true.

        Raises:
            Stuck: no event is left.
        """
        events, second = 0, self.now
        while not done():
            if self.failure is not None:
                raise self.failure
            if not self._heap:
                raise Stuck
            when, _, timer = self._heap[0]
            if when > until:
                self.now = until
                return False
            heappop(self._heap)
            events, second = (0, when) if when > second + SECOND else (events + 1, second)
            if events > _EVENTS_PER_SECOND:
                raise RuntimeError(f"more than {_EVENTS_PER_SECOND} events in one second: a loop")
            callback, timer.callback = timer.callback, None
            if callback is not None:
                self.now = when
                callback()
        return True


class Process:
    """One process: its clock, its tasks, and whether it is paused or crashed."""

    def __init__(
        self, sim: Simulation, name: str, *, rate: float = 1.0, offset: float = 0.0
    ) -> None:
        self.sim = sim
        self.name = name
        self.rate = rate
        self._offset = offset
        self.crashed = False
        self.on_crash: Callable[[], object] = lambda: None
        self.paused = False
        self.resumed_at = -1
        """When it last resumed after a pause."""
        self._deferred: list[Callable[[], object]] = []

    def now(self) -> float:
        """Return the seconds on the clock of the process."""
        return self.local_time(self.sim.now)

    def true_time(self, local: float) -> int:
        """Return the true time at which the clock of the process shows `local`."""
        return int((local - self._offset) / self.rate * SECOND)

    def local_time(self, true: int) -> float:
        """Return what the clock of the process shows at this true time."""
        return self._offset + self.rate * true / SECOND

    def call(self, callback: Callable[[], object]) -> None:
        """Run a callback in the process: now, on resume if it is paused, never if it crashed."""
        if self.crashed:
            return
        if self.paused or self._deferred:
            self._deferred.append(callback)
        else:
            callback()

    def soon(self, callback: Callable[[], object]) -> None:
        """Schedule a callback in this process, after the current event."""
        self.sim.after(0, lambda: self.call(callback))

    def after(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Schedule a callback after `seconds` on the clock of the process."""
        delay = max(0, int(seconds / self.rate * SECOND) + 1)
        timer = Timer(callback)

        def fire() -> None:
            due, timer.callback = timer.callback, None
            if due is not None:
                due()

        self.sim.after(delay, lambda: self.call(fire))
        return timer

    def pause(self, microseconds: int) -> None:
        """Pause the process, as a garbage collection or a suspended machine does."""
        self.paused = True
        self.sim.longest_pause = max(self.sim.longest_pause, microseconds)
        self.sim.note("paused", self.name, microseconds)
        self.sim.after(microseconds, self._resume)

    def _resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        self.resumed_at = self.sim.now
        self.sim.note("resumed", self.name)
        self.sim.after(0, self._catch_up)

    def _catch_up(self) -> None:
        """Run the deferred callbacks in order, before any newer one."""
        if self._deferred and not self.paused and not self.crashed:
            self._deferred[0]()
            if self._deferred:
                self._deferred.pop(0)
            self.sim.after(0, self._catch_up)

    def crash(self) -> None:
        """End the process."""
        self.crashed = True
        self._deferred.clear()
        self.sim.note("crashed", self.name)
        self.on_crash()

    def fork(self, task: Task, name: str) -> Process:
        """End this process and return a child process in which only `task` continues.

        The peers of this process are not notified.
        """
        child = Process(self.sim, name, rate=self.rate, offset=self._offset)
        child.on_crash, child.resumed_at = self.on_crash, self.resumed_at
        self.sim.note("forked", self.name, name)
        task.process = child
        self.crashed = True
        self._deferred.clear()
        return child

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> Task:
        """Start a task."""
        return Task(self, work, f"{self.name}.{name}")


class Task:
    """A coroutine of a process, resumed when the future that it awaits is done."""

    def __init__(self, process: Process, work: Coroutine[Any, Any, Any], name: str) -> None:
        self.process = process
        self.name = name
        self.result: Future[Any] = Future()
        self._work = work
        self._awaits: Future[Any] | None = None
        self._cancelled = False
        process.sim.tasks.append(self)
        process.soon(self._step)

    def close(self) -> None:
        """Close the coroutine if it has not finished."""
        if not self.result.done:
            self._work.close()

    def cancel(self) -> None:
        """Raise `Cancelled` at the point where the task waits."""
        if self.result.done or self._cancelled:
            return
        self._cancelled = True
        if self._awaits is not None:
            self._awaits = None
            self.process.soon(self._step)

    def _wake(self, future: Future[Any]) -> None:
        if self._awaits is future:
            self._awaits = None
            self.process.soon(self._step)

    def _step(self) -> None:
        sim = self.process.sim
        sim.task, before = self, sim.task
        try:
            if self._cancelled:
                self._cancelled = False
                awaited = self._work.throw(Cancelled())
            else:
                awaited = self._work.send(None)
        except StopIteration as done:
            self.result.set(done.value)
        except (Exception, Cancelled) as error:  # noqa: BLE001 - the awaiting task receives it
            self.result.fail(error)
        else:
            self._awaits = awaited
            if self._cancelled or awaited.done:
                self._wake(awaited)
            else:
                awaited.waiting.append(lambda: self._wake(awaited))
        finally:
            sim.task = before
