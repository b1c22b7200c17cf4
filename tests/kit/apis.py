"""Both APIs under one suite: a scenario is written once, in `async def`, and run with each API.

With asyncio a scenario runs on an event loop. With threads the same coroutine runs without a loop:
its client is wrapped so that each blocking method can be awaited, and blocks. A scenario uses the
`Api` for what differs: running other scenarios concurrently, events, waiting.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

_AWAITED_METHODS = {
    "acquire",
    "adopt",
    "downgrade",
    "evict",
    "export",
    "try_acquire",
    "locked",
    "holder",
    "holders",
    "extend",
    "release",
    "close",
    *("incr", "take", "put", "compare_and_set", "compare_and_delete", "update"),
    *("leader", "resign"),
    *("count_down", "left", "wait", "abort", "broken", "n_waiting"),
    *("peek", "reset", "forget"),
}
_WRAPPED = (
    *(holdfast.Client, holdfast.Lock, holdfast.Lease, holdfast.Atomic, holdfast.Rate),
    *(holdfast.MultiLock, holdfast.MultiLease, holdfast.Once),
    *(holdfast.Barrier, holdfast.Latch),
    *(holdfast.Semaphore, holdfast.RWLock, holdfast.ReadLock, holdfast.WriteLock),
    *(holdfast.Election, holdfast.Campaign, holdfast.Term),
)
_DESCRIBING = {"lock", "lock_all", "rate", "once", "semaphore", "rwlock", "read", "write"}
_DESCRIBING |= {"election", "lead"}
_DESCRIBING |= {"barrier", "latch"}


class AsyncWrapper:
    """An object of the threads API whose blocking methods can be awaited."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.inner, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name in _AWAITED_METHODS:

            async def awaited(*args: object, **kwargs: object) -> object:
                return _wrap(value(*args, **kwargs))

            return awaited
        if name in _DESCRIBING:
            return lambda *args, **kwargs: _wrap(value(*map(_unwrapped, args), **kwargs))
        if name in _ADAPTED:
            return _ADAPTED[name](value)
        return _wrap(value)

    async def __aenter__(self) -> object:
        return _wrap(self.inner.__enter__())

    async def __aexit__(self, *error: object) -> object:
        return self.inner.__exit__(*error)

    def __call__(self, function: Any) -> Any:
        def blocking(*args: object) -> object:
            return drive(function(*args))

        locked = self.inner(blocking)

        async def awaited(*args: object) -> object:
            return locked(*args)

        return awaited


class AsyncCachedWrapper:
    """A coroutine function, cached by the threads API, that can be awaited."""

    def __init__(self, decorate: Any, function: Any) -> None:
        @functools.wraps(function)
        def blocking(*args: object, **kwargs: object) -> object:
            return drive(function(*args, **kwargs))

        self.inner = decorate(blocking)

    async def __call__(self, *args: object, **kwargs: object) -> object:
        return self.inner(*args, **kwargs)

    async def invalidate(self, *args: object, **kwargs: object) -> None:
        self.inner.invalidate(*args, **kwargs)

    async def refresh(self, *args: object, **kwargs: object) -> object:
        return self.inner.refresh(*args, **kwargs)


def _periodic(decorate: Any, function: Any) -> Any:
    def blocking(*args: object, **kwargs: object) -> object:
        return drive(function(*args, **kwargs))

    called = decorate(blocking)

    async def awaited(*args: object, **kwargs: object) -> object:
        return called(*args, **kwargs)

    async def last() -> object:
        return called.last()

    async def forget() -> None:
        called.forget()

    made: Any = awaited
    made.last, made.forget = last, forget
    return made


async def _run(run: Any, function: Any) -> object:
    return run(lambda term: drive(function(_wrap(term))))


async def _iterate(values: Iterator[object]) -> AsyncIterator[object]:
    for each in values:
        yield each


def _awaitable(function: Callable[..., object]) -> Callable[..., Awaitable[object]]:
    async def awaited(**kwargs: object) -> object:
        return function(**kwargs)

    return awaited


_ADAPTED: dict[str, Callable[[Any], Any]] = {
    "cached": lambda cached: (
        lambda *args, **kwargs: functools.partial(AsyncCachedWrapper, cached(*args, **kwargs))
    ),
    "periodic": lambda periodic: (
        lambda *args, **kwargs: functools.partial(_periodic, periodic(*args, **kwargs))
    ),
    "run": lambda run: functools.partial(_run, run),
    "script": lambda script: lambda text: _awaitable(script(text)),
    "watch": lambda watch: lambda: _iterate(watch()),
}
"""How the other methods that take or return functions, or iterate, become awaitable."""


def _wrap(value: object) -> object:
    if isinstance(value, MappingProxyType):  # the leases of several locks
        return {name: _wrap(each) for name, each in value.items()}
    return AsyncWrapper(value) if isinstance(value, _WRAPPED) else value


def _unwrapped(locks: Any) -> Any:
    if not isinstance(locks, list):
        return locks
    return [lock.inner if isinstance(lock, AsyncWrapper) else lock for lock in locks]


def drive(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends; return its result."""
    try:
        scenario.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a scenario with the threads API must not suspend")


class BackgroundScenario(ABC):
    """A scenario that runs concurrently with its caller, in a thread or task."""

    @abstractmethod
    async def result(self, within: float = PATIENCE) -> Any:
        """Wait for its end; return its result or raise its error."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended."""


class _InAThread(BackgroundScenario):
    def __init__(self, scenario: Coroutine[Any, Any, Any]) -> None:
        self._scenario = scenario
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = drive(self._scenario)
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error

    async def result(self, within: float = PATIENCE) -> Any:
        self._thread.join(within)
        assert self.done, "the scenario did not end in time"
        if self._error is not None:
            raise self._error
        return self._outcome

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()


class _InATask(BackgroundScenario):
    def __init__(self, scenario: Coroutine[Any, Any, Any]) -> None:
        self._task = asyncio.get_running_loop().create_task(scenario)

    async def result(self, within: float = PATIENCE) -> Any:
        await asyncio.wait([self._task], timeout=within)
        assert self.done, "the scenario did not end in time"
        return self._task.result()

    @property
    def done(self) -> bool:
        return self._task.done()


class Api(ABC):
    """One of the two APIs of holdfast, and how a scenario runs with it."""

    name: str
    error: type[BaseException]
    """The exception that interrupts an operation from outside."""

    def __init__(self) -> None:
        self._clients: list[Any] = []

    def connect(self, target: object, **settings: Any) -> Any:
        """Make a client that is closed when the scenario ends."""
        client = self._make(target, **settings)
        self._clients.append(client)
        return client

    async def run_and_close(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run the scenario, then close its clients."""
        try:
            await scenario
        finally:
            for client in self._clients:
                await client.close()

    @abstractmethod
    def _make(self, target: Any, **settings: Any) -> Any:
        """Make a client of this API."""

    @abstractmethod
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run a scenario to its end."""

    @abstractmethod
    async def gather(self, *scenarios: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run scenarios concurrently, one per thread or task; raise the first error."""

    @abstractmethod
    def start(self, scenario: Coroutine[Any, Any, Any]) -> BackgroundScenario:
        """Start a scenario in a new thread or task."""

    @abstractmethod
    def event(self) -> Any:
        """Make a `threading.Event` or `asyncio.Event`."""

    @abstractmethod
    async def wait(self, event: Any, seconds: float) -> bool:
        """Wait for an event; return whether it was set in time."""

    @abstractmethod
    async def eventually(
        self, check: Callable[[], Awaitable[bool]], *, within: float = PATIENCE
    ) -> None:
        """Wait until the awaited `check()` is true."""


async def fails_because(api: Api, operation: Callable[[], Awaitable[object]], reason: str) -> None:
    """Repeat a failing operation until its error contains `reason`.

    On a busy machine the reply with the reason may arrive after the timeout. Then the next attempt
    may find the lock still held by the one before.
    """

    async def has_reason() -> bool:
        with pytest.raises((holdfast.NodeUnavailable, holdfast.AcquireTimeout)) as caught:
            await operation()
        return reason in str(caught.value)

    await api.eventually(has_reason)


class Threads(Api):
    """`holdfast.Client`."""

    name = "threads"
    error = KeyboardInterrupt

    def _make(self, target: Any, **settings: Any) -> Any:
        return AsyncWrapper(holdfast.Client(target, **settings))

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        drive(self.run_and_close(scenario))

    async def gather(self, *scenarios: Coroutine[Any, Any, Any]) -> list[Any]:
        results: list[Any] = [None] * len(scenarios)

        def run(number: int, scenario: Coroutine[Any, Any, Any]) -> None:
            try:
                results[number] = drive(scenario)
            except BaseException as error:  # noqa: BLE001 - raised below
                results[number] = error

        threads = [
            threading.Thread(target=run, args=(number, scenario))
            for number, scenario in enumerate(scenarios)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def start(self, scenario: Coroutine[Any, Any, Any]) -> BackgroundScenario:
        return _InAThread(scenario)

    def event(self) -> threading.Event:
        return threading.Event()

    async def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)

    async def eventually(
        self, check: Callable[[], Awaitable[bool]], *, within: float = PATIENCE
    ) -> None:
        end = time.monotonic() + within
        while not await check():
            assert time.monotonic() < end, "the condition did not become true in time"
            time.sleep(0.005)


class AnotherThread(Threads):
    """`holdfast.Client`, used in a thread that is not the main thread."""

    name = "a thread"

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        drive(self.gather(self.run_and_close(scenario)))


class Tasks(Api):
    """`holdfast.AsyncClient`."""

    name = "asyncio"
    error = asyncio.CancelledError

    def _make(self, target: Any, **settings: Any) -> Any:
        return holdfast.AsyncClient(target, **settings)

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        asyncio.run(self.run_and_close(scenario))

    async def gather(self, *scenarios: Coroutine[Any, Any, Any]) -> list[Any]:
        return await asyncio.gather(*scenarios)

    def start(self, scenario: Coroutine[Any, Any, Any]) -> BackgroundScenario:
        return _InATask(scenario)

    def event(self) -> asyncio.Event:
        return asyncio.Event()

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def eventually(
        self, check: Callable[[], Awaitable[bool]], *, within: float = PATIENCE
    ) -> None:
        end = time.monotonic() + within
        while not await check():
            assert time.monotonic() < end, "the condition did not become true in time"
            await asyncio.sleep(0.005)
