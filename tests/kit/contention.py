"""Waiters for the lock "a": starting them, and inspecting the queue on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kit.apis import Api, BackgroundScenario
    from kit.servers import Server

KEY = "holdfast:{a}"
QUEUE = f"{KEY}:queue"


def waiters(server: Server, queue: str = QUEUE) -> int:
    """Return the number of waiters in the queue."""
    return int(server.command("ZCOUNT", queue, "-inf", "(1e16"))


def tombstones(server: Server, queue: str = QUEUE) -> int:
    """Return the number of tombstones in the queue's sorted set."""
    return int(server.command("ZCOUNT", queue, "1e16", "+inf"))


async def wait_until_queued(api: Api, server: Server, count: int) -> None:
    """Wait until `count` waiters are queued and their replies were sent."""

    async def queued() -> bool:
        return waiters(server) == count

    await api.eventually(queued)
    # In one event loop cycle a server writes replies to clients in any order. A second cycle
    # makes sure that the waiters' replies are written.
    server.command("PING")


async def enqueue(
    api: Api, server: Server, *scenarios: Coroutine[Any, Any, Any], already: int = 0
) -> list[BackgroundScenario]:
    """Start the scenarios one after the other, each once its predecessor is queued."""
    started = []
    for number, scenario in enumerate(scenarios, already + 1):
        started.append(api.start(scenario))
        await wait_until_queued(api, server, number)
    return started


async def acquire_and_release(lock: Any, order: list[object], name: object, **settings: Any) -> int:
    """Acquire the lock, append `name` to `order`, and release it; return the fence."""
    lease = await lock.acquire(**settings)
    order.append(name)
    lease.check()
    await lease.release()
    return int(lease.fence)


def assert_clean(server: Server) -> None:
    """Wait until the server has neither the lock's key nor waiters. Tombstones may remain."""
    eventually(
        lambda: not server.command("EXISTS", KEY) and not waiters(server),
        what="no lock key and no waiters",
    )
