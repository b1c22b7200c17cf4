"""redis-py's locks with its blocking and its asyncio client, under one suite."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio

import holdfast

if TYPE_CHECKING:
    from typing import Self

    from kit.apis import Api


class Blocking:
    """A lock of redis-py's blocking client whose methods can be awaited."""

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
    """A blocking or asyncio client of redis-py or valkey-py."""

    def __init__(self, api: Api, url: str, library: Any = redis, **settings: Any) -> None:
        self._blocks = api.name == "threads"
        module = library if self._blocks else library.asyncio
        self.client = module.from_url(url, **settings)
        api._clients.append(self)

    def lock(self, name: str | bytes = "foo", **settings: Any) -> Any:
        """Make a lock of holdfast."""
        kind = holdfast.RedisLock if self._blocks else holdfast.AsyncRedisLock
        return self._wrap(self.client.lock(name, lock_class=kind, **settings))

    def plain(self, name: str = "foo", **settings: Any) -> Any:
        """Make a lock of redis-py."""
        return self._wrap(self.client.lock(name, **settings))

    def _wrap(self, lock: Any) -> Any:
        return Blocking(lock) if self._blocks else lock

    async def close(self) -> None:
        if self._blocks:
            self.client.close()
        else:
            await self.client.aclose()
