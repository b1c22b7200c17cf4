"""Periodic jobs in coroutines. `api.periodic` has the same API for threads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from holdfast.api.advice import (
    check_coroutine_function,
    check_name_of_decorator,
    check_takes_the_run,
)
from holdfast.api.async_client import AsyncLease
from holdfast.api.periodic_run import PeriodicRun
from holdfast.core.periodic import Skipped, start

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.api.async_client import AsyncClient
    from holdfast.core.periodic import Job

P = ParamSpec("P")
R = TypeVar("R")


def decorator(
    client: AsyncClient, job: Job
) -> Callable[
    [Callable[Concatenate[PeriodicRun[AsyncLease], P], Coroutine[Any, Any, R]]],
    Callable[P, Coroutine[Any, Any, R | Skipped]],
]:
    """Return the decorator that `@client.periodic(...)` applies."""
    session = client._session  # noqa: SLF001 - within the API

    def decorate(
        function: Callable[Concatenate[PeriodicRun[AsyncLease], P], Coroutine[Any, Any, R]],
    ) -> Callable[P, Coroutine[Any, Any, R | Skipped]]:
        check_coroutine_function(function, "use holdfast.Client", job.lock.name)
        check_takes_the_run(function, job.lock.name)
        check_name_of_decorator(job.lock, function, "async with")

        @functools.wraps(function)
        async def periodic(*args: P.args, **kwargs: P.kwargs) -> R | Skipped:
            lease = AsyncLease(client)
            started = await start(session, job, lease)
            if isinstance(started, Skipped):
                return started
            async with lease:
                return await function(PeriodicRun(lease, started), *args, **kwargs)

        del periodic.__wrapped__  # it takes one argument more
        return periodic

    return decorate
