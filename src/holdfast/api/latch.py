"""Latches, for threads. `api.async_latch` has the same API for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.adapters.thread_port import run
from holdfast.core.latch import count_down, left, open_latch, wait

if TYPE_CHECKING:
    from holdfast.core.duration import Duration
    from holdfast.core.latch import LatchSpec
    from holdfast.core.session import Session


class LatchView:
    """The settings of a latch, which need no request to the server."""

    __slots__ = ("_latch", "_session")

    def __init__(self, session: Session, latch: LatchSpec) -> None:
        self._session = session
        self._latch = latch

    @property
    def name(self) -> str:
        """The name of the latch."""
        return self._latch.lock.name

    @property
    def count(self) -> int:
        """How many ids are counted until the latch opens."""
        return self._latch.size

    @property
    def keep(self) -> float:
        """Seconds for which the latch is kept after its last use."""
        return int(self._latch.keep_ms) / 1000

    @property
    def key(self) -> str:
        """The key on the server."""
        return self._latch.lock.keys.lock.decode("utf-8", "surrogateescape")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, count={self.count}, keep={self.keep}>"


class Latch(LatchView):
    """Callers wait until a number of ids is counted down: what `client.latch(...)` returns.

    Example:
        imports = client.latch("imports 2026-11-19", count=3)
        imports.count_down(once=job.id)  # in each of three jobs
        imports.wait(timeout=3600)  # in the process that continues after them

    Immutable; threads may share it. A latch opens once. So each use has a name, which contains the
    number of the build, the day, or an id.
    """

    __slots__ = ()

    def count_down(self, *, once: str | int | None = None) -> int:
        """Count one down. The last one opens the latch, and all callers of `wait` return.

        A latch that is open stays open, and nothing more is counted.

        If the call is interrupted by a signal handler, it may or may not have been counted. With
        `once=` it can be repeated.

        Args:
            once: the id of what is done, as the number of a job. It counts once, even if a job is
                repeated. By default, each call counts.

        Returns:
            How many are left; 0 if the latch is open.

        Raises:
            OutcomeUnknown: the server did not reply; it may or may not have been counted.
            NodeUnavailable: the server cannot be reached, or refuses; nothing was counted.
            ConfigurationError: the latch was made with another count, the id is invalid, or the
                server will never accept the request.
            NotHeld: this process was forked during the call.
        """
        return run(count_down(self._session, self._latch, once))

    def wait(self, *, timeout: Duration | None = None) -> None:
        """Wait until the latch is open. Return at once if it is.

        The server notifies this client when the latch opens; the client does not poll. If the call
        is interrupted by a signal handler, it no longer waits.

        Args:
            timeout: seconds to wait: None waits as long as it takes, 0 does not wait.

        Raises:
            AcquireTimeout: the latch did not open within the timeout.
            NodeUnavailable: the server does not reply.
            ConfigurationError: the latch was made with another count, the timeout is invalid, or
                the server will never accept the request.
            NotHeld: this process was forked during the call.
        """
        run(wait(self._session, self._latch, timeout))

    def left(self) -> int:
        """Return how many are left until the latch opens; 0 if it is open.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the latch was made with another count, or the server refuses the
                request.
        """
        return run(left(self._session, self._latch))

    def open(self) -> bool:
        """Open the latch, whatever is left: for operators. All callers of `wait` return.

        If the call is interrupted by a signal handler, the latch may or may not be open. It can be
        repeated.

        Returns:
            False if the latch does not exist: no client has counted it down, or waits for it.

        Raises:
            OutcomeUnknown: the server did not reply; the latch may or may not be open.
            NodeUnavailable: the server cannot be reached, or refuses; nothing was changed.
            ConfigurationError: the server will never accept the request.
            NotHeld: this process was forked during the call.
        """
        return run(open_latch(self._session, self._latch))
