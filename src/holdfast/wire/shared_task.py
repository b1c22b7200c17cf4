"""Tasks that several callers share, such as the opening of a connection."""

from __future__ import annotations

import asyncio

from holdfast.errors import NodeUnavailable


async def wait_for_shared(task: asyncio.Task[None], timeout: float, node: str) -> None:
    """Wait for a task that several callers share. A cancelled caller does not cancel it.

    If the client cancels the task because it is closed, its callers are not cancelled: they get an
    error. With `asyncio.shield` they would seem to be cancelled.

    Raises:
        NodeUnavailable: the task was cancelled.
        TimeoutError: it is not done after `timeout`. Otherwise as the task.
    """
    await asyncio.wait([task], timeout=timeout)
    if not task.done():
        raise TimeoutError
    if task.cancelled():
        raise NodeUnavailable("this client is closed: make a new one", node=node)
    task.result()


def ignore_failure(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a task, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
