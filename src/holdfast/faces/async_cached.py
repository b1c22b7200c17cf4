"""Cached coroutine functions. `faces.cached` is its twin; a test keeps the two in step."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from holdfast.adapters.tasks import AsideTasks
from holdfast.core.cache import Cache, get, invalidate, refresh
from holdfast.errors import ConfigurationError
from holdfast.faces.codecs import JSON
from holdfast.faces.recipe import Recipe
from holdfast.wire.process import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.core.session import Session
    from holdfast.core.value import CacheSpec, Wanted
    from holdfast.faces.codecs import Codec
    from holdfast.faces.recipe import Key

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)


class AsyncCached(Protocol[P, R_co]):
    """A function whose values are kept: what `client.cached(...)` makes of it."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Return the value, kept or computed.

        Cancelled, it leaves nothing locked, and the next who waits takes over.

        Raises:
            AcquireTimeout: others computed it for longer than `timeout`.
            WouldDeadlock: the function asks for the very value that it is to compute.
            ConfigurationError: the arguments do not name a value, or it cannot be written.
        """

    async def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Forget the value for these arguments, also the one that is being computed just now.

        Nobody who calls after this has returned, in any process, is given an older one.

        Raises:
            OutcomeUnknown: the server did not answer; it may have been forgotten, or not.
            NodeUnavailable: the server cannot be reached.
        """

    @overload
    def __get__(self, instance: None, owner: type, /) -> AsyncCached[P, R_co]: ...

    @overload
    def __get__(
        self: AsyncCached[Concatenate[S, Q], R], instance: S, owner: type, /
    ) -> Callable[Q, Coroutine[Any, Any, R]]: ...

    async def refresh(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute the value for these arguments now, whatever is kept, keep it and return it.

        Cancelled, it leaves nothing locked, and what was kept is kept.

        Raises:
            AcquireTimeout: others computed it for longer than `timeout`.
            OutcomeUnknown: the server did not answer; the new value may be kept, or not.
            NodeUnavailable: the server cannot be reached.
        """


class AsyncCaching:
    """The cached functions of one client, and what runs for them in the background."""

    def __init__(self, session: Session, command_timeout: float) -> None:
        self._command_timeout = command_timeout
        self._aside = AsideTasks()
        self._cache = Cache(session, self._aside.begin)
        reset_after_fork(self._cache.begin)

    def decorator(
        self, spec: CacheSpec, key: Key, codec: Codec | None
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], AsyncCached[P, R]]:
        """Make what `@client.cached(...)` decorates a function with."""

        def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> AsyncCached[P, R]:
            if not inspect.iscoroutinefunction(function):
                raise ConfigurationError(
                    f"{getattr(function, '__name__', function)} is not a coroutine function: let "
                    "a holdfast.Client cache it, or return a list if it is a generator"
                )
            recipe = Recipe(function, spec, key, JSON if codec is None else codec)

            def wanted(*args: P.args, **kwargs: P.kwargs) -> Wanted:
                return recipe.wanted(lambda: function(*args, **kwargs), args, kwargs)

            @functools.wraps(function)
            async def cached(*args: P.args, **kwargs: P.kwargs) -> R:
                return cast("R", await get(self._cache, wanted(*args, **kwargs)))

            async def forget(*args: P.args, **kwargs: P.kwargs) -> None:
                recipe.check_instance(args, kwargs)
                await invalidate(self._cache, wanted(*args, **kwargs))

            async def anew(*args: P.args, **kwargs: P.kwargs) -> R:
                recipe.check_instance(args, kwargs)
                return cast("R", await refresh(self._cache, wanted(*args, **kwargs)))

            made = cast("AsyncCached[P, R]", cached)
            made.invalidate, made.refresh = forget, anew  # type: ignore[method-assign]
            return made

        return decorate

    async def close(self) -> None:
        """End what runs in the background, or wait for it as long as for a command."""
        await self._aside.close(self._command_timeout)
