"""Standing in line for the lock "a": how tests have it done, and see it from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kit.faces import Face, Started
    from kit.servers import Server

KEY = "holdfast:{a}"
QUEUE = f"{KEY}:queue"


def waiters(server: Server, queue: str = QUEUE) -> int:
    """How many stand in line."""
    return int(server.command("ZCOUNT", queue, "-inf", "(1e16"))


def tombstones(server: Server, queue: str = QUEUE) -> int:
    """How many tokens must not come back."""
    return int(server.command("ZCOUNT", queue, "1e16", "+inf"))


async def in_line(face: Face, server: Server, count: int) -> None:
    """Wait until so many stand in line, and were told so."""

    async def stand() -> bool:
        return waiters(server) == count

    await face.eventually(stand)
    server.command("PING")  # what it answers in one go it sends in any order: the last may be first


async def joined(
    face: Face, server: Server, *stories: Coroutine[Any, Any, Any], already: int = 0
) -> list[Started]:
    """Have them stand in line, one after the other."""
    started = []
    for number, story in enumerate(stories, already + 1):
        started.append(face.start(story))
        await in_line(face, server, number)
    return started


async def waited(lock: Any, order: list[object], name: object, **settings: Any) -> int:
    """Wait for the lock, write down that it came, and give it back."""
    lease = await lock.acquire(**settings)
    order.append(name)
    lease.check()
    await lease.release()
    return int(lease.fence)


def assert_clean(server: Server) -> None:
    """Nothing of the lock is on the server, or will be in a moment, but counter and tombstones."""
    eventually(
        lambda: not server.command("EXISTS", KEY) and not waiters(server),
        what="nothing is left of the lock",
    )
