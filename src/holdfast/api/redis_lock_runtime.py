"""The holdfast client behind the locks of a redis-py client, and its lifetime.

It lives as long as the connection pool that it was created for, and under asyncio no longer than
its event loop. Several redis-py clients may share a pool, and so a runtime.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, cast

from holdfast.api.async_client import AsyncClient
from holdfast.api.client import Client
from holdfast.core.token_lock import TokenLocks
from holdfast.errors import ConfigurationError
from holdfast.wire.process import generation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import AsyncGeneratorType

C = TypeVar("C", Client, AsyncClient)

COMMAND_TIMEOUT = 1.0
"""Seconds to wait for one reply. It does not depend on the lock's `timeout`: nothing is renewed."""


class Runtime:
    """What all locks of one redis-py client share."""

    def __init__(self, client: Client | AsyncClient) -> None:
        session = client._session  # noqa: SLF001 - within the API
        self.client = client
        self.port = session.port
        self.locks = TokenLocks(session)
        self.closing: AsyncGeneratorType[None, None] | None = None
        """Closes the client when the event loop is shut down."""


_runtimes: weakref.WeakKeyDictionary[object, Runtime] = weakref.WeakKeyDictionary()
"""The runtimes for threads, by connection pool."""

runtimes_by_loop: weakref.WeakKeyDictionary[object, dict[asyncio.AbstractEventLoop, Runtime]]
runtimes_by_loop = weakref.WeakKeyDictionary()


def client_of(kind: type[C], pool: Any) -> C:  # noqa: ANN401 - a class of redis-py
    """Return a holdfast client with the settings of this pool.

    Raises:
        ConfigurationError: the pool does not belong to a client of a single server.
    """
    try:
        client = kind(pool, command_timeout=COMMAND_TIMEOUT)
        if client._session.deployment.longest_ttl < math.inf:  # noqa: SLF001 - within the API
            advice = "its primary may change: use a lock of holdfast.Client(...), with a ttl"
            raise ConfigurationError(advice)  # noqa: TRY301 - the handler below adds to it
        return client  # noqa: TRY300 - the only return
    except ConfigurationError as error:
        raise ConfigurationError(
            f"holdfast's lock_class cannot serve this client: {error}"
        ) from None


def runtime_of(pool: object) -> Runtime:
    """Return the runtime for redis-py clients with this pool. It ends with the pool."""
    runtime = _runtimes.get(pool)
    if runtime is None:
        client = client_of(Client, pool)
        made = Runtime(client)
        runtime = _runtimes.setdefault(pool, made)
        if runtime is made:
            end = weakref.finalize(pool, _close, client, generation())
            end.atexit = False  # connections end with the process
    return runtime


def _close(client: Client, made_in: int) -> None:
    if made_in == generation():  # a forked child does not close its parent's client
        client.close()


async def runtime_on_this_loop(pool: object) -> Runtime:
    """Return the runtime for asyncio clients with this pool. It ends with the loop or the pool.

    An asynchronous generator closes it: an event loop closes its generators when it is shut down,
    and when a generator is garbage-collected.
    """
    loop = asyncio.get_running_loop()
    runtimes = runtimes_by_loop.setdefault(pool, {})
    runtime = runtimes.get(loop)
    if runtime is None or runtime.closing is None or runtime.closing.ag_frame is None:
        for known in list(runtimes):  # a copy: other threads add and remove loops concurrently
            if known.is_closed():
                runtimes.pop(known, None)
        client = client_of(AsyncClient, pool)
        runtime = runtimes[loop] = Runtime(client)
        runtime.closing = cast("AsyncGeneratorType[None, None]", _close_at_the_end(client))
        await runtime.closing.__anext__()
    return runtime


async def _close_at_the_end(client: AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.close()
