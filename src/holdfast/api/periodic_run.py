"""What the function of a periodic job receives, with both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from holdfast.api.lease_view import LeaseView

if TYPE_CHECKING:
    from holdfast.core.periodic import LastRun, Started

L = TypeVar("L", bound=LeaseView)


class PeriodicRun(Generic[L]):
    """The run of a periodic job: the first argument of its function.

    Example:
        @client.periodic("nightly", every=86400)
        def nightly(run):
            for page in pages:
                run.check()  # raises LeaseLost
                write(page, fence=run.fence)
    """

    __slots__ = ("_lease", "_started")

    def __init__(self, lease: L, started: Started) -> None:
        self._lease = lease
        self._started = started

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._lease.name

    @property
    def lease(self) -> L:
        """The lease under which the job runs. It is renewed in the background."""
        return self._lease

    @property
    def fence(self) -> int:
        """The fencing number of the run: greater than that of every earlier run."""
        return self._lease.fence

    @property
    def number(self) -> int:
        """The number of the period: the periods since the epoch, by the server's clock."""
        return self._started.number

    @property
    def last(self) -> LastRun | None:
        """When and by which process the run before this one was started; None for the first."""
        return self._started.last

    def check(self) -> None:
        """Raise an error if the lease is no longer held. Sends nothing to the server.

        Raises:
            LeaseLost: the lease was lost.
            NotHeld: the lease was released, or belongs to the process that forked this one.
        """
        self._lease.check()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name!r}, period {self.number}, {self._lease!r}>"
