"""Cached coroutine functions. `api.cached` has the same API for threads."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from holdfast.adapters.asyncio_port import BackgroundTasks
from holdfast.api.cache_key import CacheKey
from holdfast.api.codecs import JSON
from holdfast.core.cache import Cache, get, invalidate, refresh
from holdfast.errors import ConfigurationError
from holdfast.wire.process import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.api.cache_key import Key
    from holdfast.api.codecs import Codec
    from holdfast.core.session import Session
    from holdfast.core.value import CacheEntry, CacheSpec

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)


class AsyncCached(Protocol[P, R_co]):
    """A function whose results are cached: what `client.cached(...)` returns.

    Example:
        @client.cached(ttl=60)
        async def price(product_id):
            ...

        await price(42)
        await price.invalidate(42)
    """

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Return the cached value, or compute it. Exceptions of the function are passed on.

        If the call is cancelled, it leaves no lock held, and the next waiting caller computes the
        value.

        Raises:
            AcquireTimeout: other clients computed the value for longer than `timeout`.
            WouldDeadlock: the function calls itself for the value that it is computing.
            ConfigurationError: the arguments do not name a value, or the codec cannot encode the
                value.
        """

    async def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Delete the value for these arguments, and discard one that is being computed now.

        After this returns, no caller in any process receives an older value. If the call is
        cancelled, the value may or may not be deleted. On a method, pass the instance as the first
        argument.

        Raises:
            OutcomeUnknown: the server did not reply; the value may or may not be deleted.
            NodeUnavailable: the server cannot be reached.
            ConfigurationError: the arguments do not name a value.
        """

    @overload
    def __get__(self, instance: None, owner: type, /) -> AsyncCached[P, R_co]: ...

    @overload
    def __get__(
        self: AsyncCached[Concatenate[S, Q], R], instance: S, owner: type, /
    ) -> Callable[Q, Coroutine[Any, Any, R]]: ...

    async def refresh(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute the value for these arguments now, even if one is cached; store and return it.

        Exceptions of the function are passed on.

        If the call is cancelled, it leaves no lock held, and the cached value stays as it was. On a
        method, pass the instance as the first argument.

        Raises:
            AcquireTimeout: other clients computed the value for longer than `timeout`.
            OutcomeUnknown: the server did not reply; the new value may or may not be stored.
            NodeUnavailable: the server cannot be reached.
            ConfigurationError: the arguments do not name a value, or the codec cannot encode the
                value.
        """


class AsyncCaching:
    """The cached functions of one client, and their background computations."""

    def __init__(self, session: Session, command_timeout: float) -> None:
        self._command_timeout = command_timeout
        self._background = BackgroundTasks()
        self._cache = Cache(session, self._background.begin)
        reset_after_fork(self._cache.begin)

    def decorator(
        self, spec: CacheSpec, key: Key, codec: Codec | None
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], AsyncCached[P, R]]:
        """Return the decorator that `@client.cached(...)` applies."""

        def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> AsyncCached[P, R]:
            if not inspect.iscoroutinefunction(function):
                raise ConfigurationError(
                    f"{getattr(function, '__name__', function)} is not a coroutine function: "
                    "cache it with a holdfast.Client, or return a list if it is a generator"
                )
            cache_key = CacheKey(function, spec, key, JSON if codec is None else codec)

            def entry_for(*args: P.args, **kwargs: P.kwargs) -> CacheEntry:
                return cache_key.entry_for(lambda: function(*args, **kwargs), args, kwargs)

            @functools.wraps(function)
            async def cached(*args: P.args, **kwargs: P.kwargs) -> R:
                return cast("R", await get(self._cache, entry_for(*args, **kwargs)))

            async def forget(*args: P.args, **kwargs: P.kwargs) -> None:
                cache_key.check_instance(args, kwargs)
                await invalidate(self._cache, entry_for(*args, **kwargs))

            async def recompute(*args: P.args, **kwargs: P.kwargs) -> R:
                cache_key.check_instance(args, kwargs)
                return cast("R", await refresh(self._cache, entry_for(*args, **kwargs)))

            made = cast("AsyncCached[P, R]", cached)
            made.invalidate, made.refresh = forget, recompute  # type: ignore[method-assign]
            return made

        return decorate

    async def close(self) -> None:
        """Cancel background computations, and wait up to one command timeout for them."""
        await self._background.close(self._command_timeout)
