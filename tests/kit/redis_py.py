"""Users of redis-py's locks: of its blocking client and of its asyncio client, under one suite."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio

import holdfast

if TYPE_CHECKING:
    from typing import Self

    from kit.faces import Face


class Blocking:
    """A lock of redis-py's blocking face, with its methods awaitable."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not inspect.ismethod(value):
            return value

        async def awaited(*args: object, **kwargs: object) -> object:
            return value(*args, **kwargs)

        return awaited

    async def __aenter__(self) -> Self:
        assert self.inner.__enter__() is self.inner
        return self

    async def __aexit__(self, *error: object) -> object:
        return self.inner.__exit__(*error)


class User:
    """A user of redis-py, blocking or asyncio, or of valkey-py."""

    def __init__(self, face: Face, url: str, library: Any = redis, **settings: Any) -> None:
        self._blocks = face.name == "threads"
        home = library if self._blocks else library.asyncio
        self.client = home.from_url(url, **settings)
        face._clients.append(self)

    def lock(self, name: str | bytes = "foo", **settings: Any) -> Any:
        """One of ours."""
        kind = holdfast.RedisLock if self._blocks else holdfast.AsyncRedisLock
        return self._lift(self.client.lock(name, lock_class=kind, **settings))

    def plain(self, name: str = "foo", **settings: Any) -> Any:
        """One of redis-py's own."""
        return self._lift(self.client.lock(name, **settings))

    def _lift(self, lock: Any) -> Any:
        return Blocking(lock) if self._blocks else lock

    async def close(self) -> None:
        if self._blocks:
            self.client.close()
        else:
            await self.client.aclose()
