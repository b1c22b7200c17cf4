"""A world of processes under virtual time, in which everything happens one step at a time.

True time is a whole number of microseconds. Each process reads it off a clock of its own, which may
run a little fast or slow. A process that is paused does nothing and hears of nothing until it goes
on, while its clock runs; one that crashed never goes on. Of things due at the same moment the one
that was arranged first comes first; all else that could come out one way or another is asked of
`choices`. So a world is the same each time it is run with the same choices.
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


_A_SECOND = 300_000  # things that may happen in one


class Cancelled(BaseException):
    """What a task is woken with when it is cancelled."""


class Stuck(Exception):  # noqa: N818 - it is
    """Nothing can happen any more, and somebody waits."""


def check_duration(seconds: float) -> None:
    """Refuse to wait for less than no time, as sockets and clocks do."""
    if seconds < 0:
        raise ValueError(f"a timeout of {seconds} s")


class Future(Generic[T]):
    """Something that will be known later, once."""

    __slots__ = ("_error", "_value", "done", "unread", "waiting")

    def __init__(self) -> None:
        self.done = False
        self.unread: BaseException | None = None
        """How it failed, while nobody has been told."""
        self._value: Any = None
        self._error: BaseException | None = None
        self.waiting: list[Callable[[], None]] = []

    def set(self, value: T) -> None:
        """Know it."""
        if not self.done:
            self.done, self._value = True, value
            self._tell()

    def fail(self, error: BaseException) -> None:
        """Know that it failed."""
        if not self.done:
            self.done, self._error, self.unread = True, error, error
            self._tell()

    def result(self) -> T:
        """What is known; raises how it failed."""
        self.unread = None
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def _tell(self) -> None:
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()

    def __await__(self) -> Generator[Future[T], None, T]:
        """Suspend until it is known."""
        if not self.done:
            yield self
        return self.result()


class Timer:
    """A call that was arranged for later, and can be called off."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object] | None) -> None:
        self.callback = callback

    def cancel(self) -> None:
        """Call it off."""
        self.callback = None


class World:
    """Virtual time, and what is to happen when."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 0
        self.task: Task | None = None
        """The task whose step this is."""
        self.trace: list[tuple[Any, ...]] = []
        """What happened: (true time, kind, who, and what else there is to say)."""
        self.tasks: list[Task] = []
        self.doubled: set[str] = set()
        """The arguments of requests that were delivered twice."""
        """Some request was carried out a second time by itself."""
        self.failure: BaseException | None = None
        """What went wrong, if something did: then nothing more happens."""
        self._heap: list[tuple[int, int, Timer]] = []
        self._order = count()

    def note(self, kind: str, who: str, *rest: object) -> None:
        """Write down what happens now."""
        self.trace.append((self.now, kind, who, *rest))

    def at(self, when: int, callback: Callable[[], object]) -> Timer:
        """Have it called at true time `when`."""
        timer = Timer(callback)
        heappush(self._heap, (max(when, self.now), next(self._order), timer))
        return timer

    def after(self, delay: int, callback: Callable[[], object]) -> Timer:
        """Have it called in so many microseconds."""
        return self.at(self.now + delay, callback)

    def end(self, *expected: type[BaseException]) -> None:
        """Let nothing be left: nobody steps the tasks any more.

        An error of another kind that ended a task, and that nobody was told of, is raised here.
        """
        for task in self.tasks:
            task.close()
        for task in self.tasks:
            error = task.result.unread
            if error is not None and not isinstance(error, (Cancelled, *expected)):
                raise error

    def run(self, done: Callable[[], bool], until: int) -> bool:
        """Let things happen until `done` says so, or it is later than `until`.

        Returns whether it was done.

        Raises:
            Stuck: there is nothing left that could happen.
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
            if events > _A_SECOND:
                raise RuntimeError("something happens again and again, without end")
            callback, timer.callback = timer.callback, None
            if callback is not None:
                self.now = when
                callback()
        return True


class Process:
    """One process: a clock, tasks, and whether it runs."""

    def __init__(self, world: World, name: str, *, rate: float = 1.0, offset: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.rate = rate
        self._offset = offset
        self.crashed = False
        self.on_crash: Callable[[], object] = lambda: None
        self.paused = False
        self.went_on = -1
        """When it last went on after a pause."""
        self._put_off: list[Callable[[], object]] = []

    def now(self) -> float:
        """Seconds on the process's own clock."""
        return self.local_time(self.world.now)

    def true_time(self, local: float) -> int:
        """When the process's own clock shows this."""
        return int((local - self._offset) / self.rate * SECOND)

    def local_time(self, true: int) -> float:
        """What the process's own clock shows at this true time."""
        return self._offset + self.rate * true / SECOND

    def call(self, callback: Callable[[], object]) -> None:
        """Call it if the process runs, when it goes on if it is paused, never if it crashed."""
        if self.crashed:
            return
        if self.paused or self._put_off:
            self._put_off.append(callback)
        else:
            callback()

    def soon(self, callback: Callable[[], object]) -> None:
        """Have it called in this process, after what is happening now."""
        self.world.after(0, lambda: self.call(callback))

    def after(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Have it called when so much has passed on the process's own clock."""
        delay = max(0, int(seconds / self.rate * SECOND) + 1)
        timer = Timer(callback)

        def fire() -> None:
            due, timer.callback = timer.callback, None
            if due is not None:
                due()

        self.world.after(delay, lambda: self.call(fire))
        return timer

    def pause(self, microseconds: int) -> None:
        """Stop here, as for a collection of garbage or a suspended machine."""
        self.paused = True
        self.world.note("paused", self.name, microseconds)
        self.world.after(microseconds, self._go_on)

    def _go_on(self) -> None:
        if not self.paused:
            return
        self.paused = False
        self.went_on = self.world.now
        self.world.note("goes on", self.name)
        self.world.after(0, self._catch_up)

    def _catch_up(self) -> None:
        """Do what was put off, in order; what comes meanwhile stands behind it."""
        if self._put_off and not self.paused and not self.crashed:
            self._put_off[0]()
            if self._put_off:
                self._put_off.pop(0)
            self.world.after(0, self._catch_up)

    def crash(self) -> None:
        """Do nothing any more."""
        self.crashed = True
        self._put_off.clear()
        self.world.note("crashed", self.name)
        self.on_crash()

    def fork(self, task: Task, name: str) -> Process:
        """End, without a word to anybody, and return the child, in which only this task goes on."""
        child = Process(self.world, name, rate=self.rate, offset=self._offset)
        child.on_crash, child.went_on = self.on_crash, self.went_on
        self.world.note("forked", self.name, name)
        task.process = child
        self.crashed = True
        self._put_off.clear()
        return child

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> Task:
        """Start a task."""
        return Task(self, work, f"{self.name}.{name}")


class Task:
    """A coroutine of a process, stepped when what it awaits is known."""

    def __init__(self, process: Process, work: Coroutine[Any, Any, Any], name: str) -> None:
        self.process = process
        self.name = name
        self.result: Future[Any] = Future()
        self._work = work
        self._awaits: Future[Any] | None = None
        self._cancelled = False
        process.world.tasks.append(self)
        process.soon(self._step)

    def close(self) -> None:
        """Let go of the coroutine, wherever it is."""
        if not self.result.done:
            self._work.close()

    def cancel(self) -> None:
        """Wake it with `Cancelled`, wherever it waits."""
        if self.result.done or self._cancelled:
            return
        self._cancelled = True
        if self._awaits is not None:
            self._awaits = None
            self.process.soon(self._step)

    def _wake(self, known: Future[Any]) -> None:
        if self._awaits is known:
            self._awaits = None
            self.process.soon(self._step)

    def _step(self) -> None:
        world = self.process.world
        world.task, before = self, world.task
        try:
            if self._cancelled:
                self._cancelled = False
                awaited = self._work.throw(Cancelled())
            else:
                awaited = self._work.send(None)
        except StopIteration as done:
            self.result.set(done.value)
        except (Exception, Cancelled) as error:  # noqa: BLE001 - whoever awaits it gets it
            self.result.fail(error)
        else:
            self._awaits = awaited
            if self._cancelled or awaited.done:
                self._wake(awaited)
            else:
                awaited.waiting.append(lambda: self._wake(awaited))
        finally:
            world.task = before
