"""Cached functions, for threads. `api.async_cached` has the same API for asyncio."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from holdfast.adapters.background import BackgroundThreads
from holdfast.adapters.thread_port import run
from holdfast.api.advice import check_plain_function
from holdfast.api.cache_key import CacheKey
from holdfast.api.codecs import JSON
from holdfast.core.cache import Cache, get, invalidate, refresh
from holdfast.errors import ConfigurationError
from holdfast.wire.process import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.api.cache_key import Key
    from holdfast.api.codecs import Codec
    from holdfast.core.session import Session
    from holdfast.core.value import CacheEntry, CacheSpec

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)


class Cached(Protocol[P, R_co]):
    """A function whose results are cached: what `client.cached(...)` returns.

    Example:
        @client.cached(ttl=60)
        def price(product_id):
            ...

        price(42)
        price.invalidate(42)
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Return the cached value, or compute it. Exceptions of the function are passed on.

        If the call is interrupted by a signal handler, it leaves no lock held, and the next waiting
        caller computes the value.

        Raises:
            AcquireTimeout: other clients computed the value for longer than `timeout`.
            WouldDeadlock: the function calls itself for the value that it is computing.
            ConfigurationError: the arguments do not name a value, or the codec cannot encode the
                value.
        """

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Delete the value for these arguments, and discard one that is being computed now.

        After this returns, no caller in any process receives an older value. If the call is
        interrupted by a signal handler, the value may or may not be deleted. On a method, pass the
        instance as the first argument.

        Raises:
            OutcomeUnknown: the server did not reply; the value may or may not be deleted.
            NodeUnavailable: the server cannot be reached.
            ConfigurationError: the arguments do not name a value.
        """

    @overload
    def __get__(self, instance: None, owner: type, /) -> Cached[P, R_co]: ...

    @overload
    def __get__(
        self: Cached[Concatenate[S, Q], R], instance: S, owner: type, /
    ) -> Callable[Q, R]: ...

    def refresh(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute the value for these arguments now, even if one is cached; store and return it.

        Exceptions of the function are passed on.

        If the call is interrupted by a signal handler, it leaves no lock held, and the cached value
        stays as it was. On a method, pass the instance as the first argument.

        Raises:
            AcquireTimeout: other clients computed the value for longer than `timeout`.
            OutcomeUnknown: the server did not reply; the new value may or may not be stored.
            NodeUnavailable: the server cannot be reached.
            ConfigurationError: the arguments do not name a value, or the codec cannot encode the
                value.
        """


class Caching:
    """The cached functions of one client, and their background computations."""

    def __init__(self, session: Session, command_timeout: float) -> None:
        self._command_timeout = command_timeout
        self._background = BackgroundThreads()
        self._cache = Cache(session, self._background.begin)
        reset_after_fork(self._cache.begin)

    def decorator(
        self, spec: CacheSpec, key: Key, codec: Codec | None
    ) -> Callable[[Callable[P, R]], Cached[P, R]]:
        """Return the decorator that `@client.cached(...)` applies."""

        def decorate(function: Callable[P, R]) -> Cached[P, R]:
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise ConfigurationError(
                    f"{function.__name__} is a generator function: return a list instead"
                )
            check_plain_function(function, "cache it with a holdfast.AsyncClient")
            cache_key = CacheKey(function, spec, key, JSON if codec is None else codec)

            def entry_for(*args: P.args, **kwargs: P.kwargs) -> CacheEntry:
                async def compute() -> R:
                    return function(*args, **kwargs)

                return cache_key.entry_for(compute, args, kwargs)

            @functools.wraps(function)
            def cached(*args: P.args, **kwargs: P.kwargs) -> R:
                return cast("R", run(get(self._cache, entry_for(*args, **kwargs))))

            def forget(*args: P.args, **kwargs: P.kwargs) -> None:
                cache_key.check_instance(args, kwargs)
                run(invalidate(self._cache, entry_for(*args, **kwargs)))

            def recompute(*args: P.args, **kwargs: P.kwargs) -> R:
                cache_key.check_instance(args, kwargs)
                return cast("R", run(refresh(self._cache, entry_for(*args, **kwargs))))

            made = cast("Cached[P, R]", cached)
            made.invalidate, made.refresh = forget, recompute  # type: ignore[method-assign]
            return made

        return decorate

    def close(self) -> None:
        """Stop accepting background computations, and wait up to one command timeout for them."""
        self._background.close(self._command_timeout)
