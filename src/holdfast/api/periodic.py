"""Periodic jobs. `api.async_periodic` has the same API for asyncio."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar, cast

from holdfast.adapters.thread_port import run
from holdfast.api.advice import check_name_of_decorator, check_plain_function, check_takes_the_run
from holdfast.api.client import Lease
from holdfast.api.lease_view import require_one_server
from holdfast.api.periodic_run import PeriodicRun
from holdfast.core.periodic import Skipped, last_run, start
from holdfast.core.record import Record
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.api.client import Client
    from holdfast.core.periodic import Job, LastRun

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Periodic(Protocol[P, R_co]):
    """A function that runs at most once per period: what `client.periodic(...)` returns.

    Example:
        @client.periodic("nightly", every=86400)
        def nightly(run):
            ...

        nightly()
        nightly.last()
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co | Skipped:
        """Run the function, or return why not: see `Client.periodic`."""

    def last(self) -> LastRun | None:
        """Return the last run that any client started; None if no start is recorded.

        It may be in progress, or have failed.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """

    def forget(self) -> None:
        """Forget the last start, so that the next call may start a run in this period.

        A run in progress is not affected, and no other run begins until it is over. If the call is
        interrupted by a signal handler, the start may or may not be forgotten. The call can be
        repeated, and never forgets a later start.

        Raises:
            OutcomeUnknown: the server did not reply; the start may or may not be forgotten.
            NodeUnavailable: the server does not reply; nothing was forgotten.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """


def decorator(
    client: Client, job: Job
) -> Callable[[Callable[Concatenate[PeriodicRun[Lease], P], R]], Periodic[P, R]]:
    """Return the decorator that `@client.periodic(...)` applies."""
    session = client._session  # noqa: SLF001 - within the API
    record = Record(require_one_server(client._deployment.port), job.lock)  # noqa: SLF001 - as above

    def decorate(
        function: Callable[Concatenate[PeriodicRun[Lease], P], R],
    ) -> Periodic[P, R]:
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
        made = cast("Periodic[P, R]", periodic)
        made.last = lambda: run(last_run(record))  # type: ignore[method-assign]
        made.forget = lambda: run(record.forget())  # type: ignore[method-assign]
        return made

    return decorate
