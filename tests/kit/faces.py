"""Both faces under one suite: a story is written once, in `async def`, and told twice.

For asyncio a story is run as it is. For threads the same story is driven without a loop, its
client wrapped so that every method the async face awaits can be awaited here too, and blocks. What
a story must do on its own (run beside others, wait for a loss) goes through the face.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

_AWAITED = {
    "acquire",
    "adopt",
    "evict",
    "export",
    "try_acquire",
    "locked",
    "holder",
    "extend",
    "release",
    "close",
    *("incr", "take", "put", "compare_and_set", "compare_and_delete", "update"),
}
_LIFTED = (holdfast.Client, holdfast.Lock, holdfast.Lease, holdfast.Atomic)


class Lifted:
    """An object of the threads face, with its blocking methods awaitable."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name in _AWAITED:

            async def awaited(*args: object, **kwargs: object) -> object:
                return _lift(value(*args, **kwargs))

            return awaited
        if name == "lock":
            return lambda *args, **kwargs: _lift(value(*args, **kwargs))
        if name == "cached":
            return lambda *args, **kwargs: functools.partial(LiftedCached, value(*args, **kwargs))
        if name == "script":
            return lambda text: _awaitable(value(text))
        return _lift(value)

    async def __aenter__(self) -> object:
        return _lift(self.inner.__enter__())

    async def __aexit__(self, *error: object) -> object:
        return self.inner.__exit__(*error)

    def __call__(self, function: Any) -> Any:
        def blocking(*args: object) -> object:
            return drive(function(*args))

        locked = self.inner(blocking)

        async def awaited(*args: object) -> object:
            return locked(*args)

        return awaited


class LiftedCached:
    """A coroutine function, cached by the threads face, that can be awaited all the same."""

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


def _awaitable(function: Callable[..., object]) -> Callable[..., Awaitable[object]]:
    async def awaited(**kwargs: object) -> object:
        return function(**kwargs)

    return awaited


def _lift(value: object) -> object:
    return Lifted(value) if isinstance(value, _LIFTED) else value


def drive(story: Coroutine[Any, Any, Any]) -> Any:
    """Run a story that never suspends."""
    try:
        story.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a story over threads must not suspend")


class Started(ABC):
    """A story that is told beside the one who started it."""

    @abstractmethod
    async def result(self, within: float = PATIENCE) -> Any:
        """Wait for its end; return what it returned, or raise what it raised."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended."""


class _InAThread(Started):
    def __init__(self, story: Coroutine[Any, Any, Any]) -> None:
        self._story = story
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def _tell(self) -> None:
        try:
            self._outcome = drive(self._story)
        except BaseException as error:  # noqa: BLE001 - raised by the one who asks for the result
            self._error = error

    async def result(self, within: float = PATIENCE) -> Any:
        self._thread.join(within)
        assert self.done, "it did not end in time"
        if self._error is not None:
            raise self._error
        return self._outcome

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()


class _InATask(Started):
    def __init__(self, story: Coroutine[Any, Any, Any]) -> None:
        self._task = asyncio.get_running_loop().create_task(story)

    async def result(self, within: float = PATIENCE) -> Any:
        await asyncio.wait([self._task], timeout=within)
        assert self.done, "it did not end in time"
        return self._task.result()

    @property
    def done(self) -> bool:
        return self._task.done()


class Face(ABC):
    """One of the two ways to use holdfast, and to tell a story about it."""

    name: str
    error: type[BaseException]
    """What interrupts an operation of this face from outside."""

    def __init__(self) -> None:
        self._clients: list[Any] = []

    def connect(self, target: object, **settings: Any) -> Any:
        """Make a client that is closed when the story ends."""
        client = self._make(target, **settings)
        self._clients.append(client)
        return client

    async def told(self, story: Coroutine[Any, Any, None]) -> None:
        """Tell the story and close what it opened."""
        try:
            await story
        finally:
            for client in self._clients:
                await client.close()

    @abstractmethod
    def _make(self, target: Any, **settings: Any) -> Any:
        """Make a client of this face."""

    @abstractmethod
    def run(self, story: Coroutine[Any, Any, None]) -> None:
        """Tell a story from beginning to end."""

    @abstractmethod
    async def together(self, *stories: Coroutine[Any, Any, Any]) -> list[Any]:
        """Tell stories at once, each in a thread or task of its own; the first error is raised."""

    @abstractmethod
    def start(self, story: Coroutine[Any, Any, Any]) -> Started:
        """Tell a story in a thread or task of its own, and go on."""

    @abstractmethod
    def event(self) -> Any:
        """Make an event of this face."""

    @abstractmethod
    async def wait(self, event: Any, seconds: float) -> bool:
        """Wait for an event of this face; say whether it came."""

    @abstractmethod
    async def eventually(
        self, check: Callable[[], Awaitable[bool]], *, within: float = PATIENCE
    ) -> None:
        """Wait until the awaited `check()` is true."""


async def fails_because(
    face: Face, operation: Callable[[], Awaitable[object]], reason: str
) -> None:
    """Repeat an operation that fails until its error gives this reason.

    On a busy machine a reply that gives the reason may come after the timeout.
    """

    async def says_so() -> bool:
        with pytest.raises(holdfast.NodeUnavailable) as caught:
            await operation()
        return reason in str(caught.value)

    await face.eventually(says_so)


class Threads(Face):
    """`holdfast.Client`."""

    name = "threads"
    error = KeyboardInterrupt

    def _make(self, target: Any, **settings: Any) -> Any:
        return Lifted(holdfast.Client(target, **settings))

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        drive(self.told(story))

    async def together(self, *stories: Coroutine[Any, Any, Any]) -> list[Any]:
        results: list[Any] = [None] * len(stories)

        def tell(number: int, story: Coroutine[Any, Any, Any]) -> None:
            try:
                results[number] = drive(story)
            except BaseException as error:  # noqa: BLE001 - raised by the one who asked
                results[number] = error

        threads = [
            threading.Thread(target=tell, args=(number, story))
            for number, story in enumerate(stories)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def start(self, story: Coroutine[Any, Any, Any]) -> Started:
        return _InAThread(story)

    def event(self) -> threading.Event:
        return threading.Event()

    async def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)

    async def eventually(
        self, check: Callable[[], Awaitable[bool]], *, within: float = PATIENCE
    ) -> None:
        end = time.monotonic() + within
        while not await check():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.005)


class AnotherThread(Threads):
    """`holdfast.Client`, and nothing is done by the main thread."""

    name = "a thread"

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        drive(self.together(self.told(story)))


class Tasks(Face):
    """`holdfast.AsyncClient`."""

    name = "asyncio"
    error = asyncio.CancelledError

    def _make(self, target: Any, **settings: Any) -> Any:
        return holdfast.AsyncClient(target, **settings)

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        asyncio.run(self.told(story))

    async def together(self, *stories: Coroutine[Any, Any, Any]) -> list[Any]:
        return await asyncio.gather(*stories)

    def start(self, story: Coroutine[Any, Any, Any]) -> Started:
        return _InATask(story)

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
            assert time.monotonic() < end, "it did not happen in time"
            await asyncio.sleep(0.005)
