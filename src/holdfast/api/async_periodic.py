"""Periodic jobs in coroutines. `api.periodic` has the same API for threads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from holdfast.api.advice import (
    check_coroutine_function,
    check_name_of_decorator,
    check_takes_the_run,
)
from holdfast.api.async_client import AsyncLease
from holdfast.api.lease_view import require_one_server
from holdfast.api.periodic_run import PeriodicRun
from holdfast.core.periodic import Skipped, last_run, start
from holdfast.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.api.async_client import AsyncClient
    from holdfast.core.periodic import Job, LastRun

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class AsyncPeriodic(Protocol[P, R_co]):
    """A function that runs at most once per period: what `client.periodic(...)` returns.

    Example:
        @client.periodic("nightly", every=86400)
        async def nightly(run):
            ...

        await nightly()
        await nightly.last()
    """

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co | Skipped:
        """Run the function, or return why not: see `AsyncClient.periodic`."""

    async def last(self) -> LastRun | None:
        """Return the last run that any client started; None if no start is recorded.

        It may be in progress, or have failed.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """

    async def forget(self) -> None:
        """Forget the last start, so that the next call may start a run in this period.

        A run in progress is not affected, and no other run begins until it is over. If the call is
        cancelled, the start may or may not be forgotten. The call can be repeated, and
        never forgets a later start.

        Raises:
            OutcomeUnknown: the server did not reply; the start may or may not be forgotten.
            NodeUnavailable: the server does not reply; nothing was forgotten.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """


def decorator(
    client: AsyncClient, job: Job
) -> Callable[
    [Callable[Concatenate[PeriodicRun[AsyncLease], P], Coroutine[Any, Any, R]]],
    AsyncPeriodic[P, R],
]:
    """Return the decorator that `@client.periodic(...)` applies."""
    session = client._session  # noqa: SLF001 - within the API
    record = Record(require_one_server(client._deployment.port), job.lock)  # noqa: SLF001 - as above

    def decorate(
        function: Callable[Concatenate[PeriodicRun[AsyncLease], P], Coroutine[Any, Any, R]],
    ) -> AsyncPeriodic[P, R]:
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

        async def last() -> LastRun | None:
            return await last_run(record)

        async def forget() -> None:
            await record.forget()

        made = cast("AsyncPeriodic[P, R]", periodic)
        made.last, made.forget = last, forget  # type: ignore[method-assign]
        return made

    return decorate
