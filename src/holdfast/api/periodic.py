"""Periodic jobs. `api.async_periodic` has the same API for asyncio."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from holdfast.adapters.thread_port import run
from holdfast.api.advice import check_name_of_decorator, check_plain_function, check_takes_the_run
from holdfast.api.client import Lease
from holdfast.api.periodic_run import PeriodicRun
from holdfast.core.periodic import Skipped, start
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.api.client import Client
    from holdfast.core.periodic import Job

P = ParamSpec("P")
R = TypeVar("R")


def decorator(
    client: Client, job: Job
) -> Callable[[Callable[Concatenate[PeriodicRun[Lease], P], R]], Callable[P, R | Skipped]]:
    """Return the decorator that `@client.periodic(...)` applies."""
    session = client._session  # noqa: SLF001 - within the API

    def decorate(
        function: Callable[Concatenate[PeriodicRun[Lease], P], R],
    ) -> Callable[P, R | Skipped]:
        check_plain_function(function, "use holdfast.AsyncClient", job.lock.name)
        check_takes_the_run(function, job.lock.name)
        check_name_of_decorator(job.lock, function, "with")

        @functools.wraps(function)
        def periodic(*args: P.args, **kwargs: P.kwargs) -> R | Skipped:
            lease = Lease(client)
            try:
                started = run(start(session, job, lease))
                if isinstance(started, Skipped):
                    return started
                with lease:
                    return function(PeriodicRun(lease, started), *args, **kwargs)
            except BaseException as error:
                if not isinstance(error, HoldfastError):
                    lease._abandon()  # noqa: SLF001 - within the API
                raise

        del periodic.__wrapped__  # it takes one argument more
        return periodic

    return decorate
