"""Barriers, for threads. `api.async_barrier` has the same API for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.adapters.thread_port import run
from holdfast.api.broken_barrier import BrokenBarrier
from holdfast.core.barrier import Break, end, state, wait

if TYPE_CHECKING:
    from holdfast.core.duration import Duration
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec


class BarrierView:
    """The settings of a barrier, which need no request to the server."""

    __slots__ = ("_session", "_spec")

    def __init__(self, session: Session, spec: LockSpec) -> None:
        self._session = session
        self._spec = spec

    @property
    def name(self) -> str:
        """The name of the barrier."""
        return self._spec.name

    @property
    def parties(self) -> int:
        """How many parties wait for one another."""
        return int(self._spec.extra_args[0])

    @property
    def ttl(self) -> float:
        """Seconds after which a party that no longer renews its lease is lost."""
        return self._spec.ttl

    @property
    def key(self) -> str:
        """The key on the server."""
        return self._spec.keys.lock.decode("utf-8", "surrogateescape")

    def _index(self, outcome: int | Break) -> int:
        """Return the index of a party, or raise why the barrier broke."""
        if isinstance(outcome, Break):
            message = outcome.describe(self.name)
            raise BrokenBarrier(message, lock=self.name, reason=outcome.reason, by=outcome.by)
        return outcome

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, parties={self.parties}, ttl={self.ttl}>"


class Barrier(BarrierView):
    """A number of parties wait for one another, and continue together: `client.barrier(...)`.

    Example:
        barrier = client.barrier("phase-1", parties=8)
        load(shard)
        if barrier.wait(timeout=60) == 0:  # all eight have loaded
            report()

    As `threading.Barrier`, for processes on any machine. Immutable; threads may share it, and each
    call of `wait` is a party. When all have passed, the barrier can be used again.

    A party that gives up breaks the barrier for all of them: by its timeout, an interrupt, an
    error, or because its process died or hung for longer than the ttl. Then all that wait, and all
    that come later, get `BrokenBarrier`, until `reset` is called, or no client has used the
    barrier for a day.
    """

    __slots__ = ()

    def wait(self, *, timeout: Duration | None = None) -> int:
        """Wait until all parties have arrived.

        The server notifies this client; it does not poll. If the call is interrupted by a signal
        handler, the barrier breaks.

        Args:
            timeout: seconds to wait: None waits as long as it takes, 0 does not wait.

        Returns:
            A number from 0 to `parties` - 1, different for each party of this generation. The last
            one to arrive has the greatest.

        Raises:
            BrokenBarrier: the timeout is over, or the barrier is or was broken. The error has the
                reason, and the party that caused it.
            OutcomeUnknown: the timeout is over, and the server did not reply; or this process was
                stopped for more than a minute (a ttl, if that is longer). The other parties may
                have passed, or the barrier is broken.
            NodeUnavailable: the server does not reply; likewise.
            ConfigurationError: those that wait have another number of parties, the timeout is
                invalid, or the server will never accept the request.
            NotHeld: this process was forked during the call.
        """
        return self._index(run(wait(self._session, self._spec, timeout)))

    def abort(self) -> None:
        """Break the barrier: all that wait, and all that come later, get `BrokenBarrier`.

        If the call is interrupted by a signal handler, the barrier may or may not be broken.

        Raises:
            OutcomeUnknown: the server did not reply; the barrier may or may not be broken.
            NodeUnavailable: the server cannot be reached, or refuses; nothing was changed.
            ConfigurationError: the server will never accept the request.
            NotHeld: this process was forked during the call.
        """
        run(end(self._session, self._spec, "aborted"))

    def reset(self) -> None:
        """Make the barrier usable again. Parties that wait get `BrokenBarrier`.

        If the call is interrupted by a signal handler, the barrier may or may not be reset.

        Raises:
            OutcomeUnknown: the server did not reply; the barrier may or may not be reset.
            NodeUnavailable: the server cannot be reached, or refuses; nothing was changed.
            ConfigurationError: the server will never accept the request.
            NotHeld: this process was forked during the call.
        """
        run(end(self._session, self._spec, "reset"))

    def broken(self) -> bool:
        """Return whether the barrier is broken.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request.
        """
        return run(state(self._session, self._spec)).broken is not None

    def n_waiting(self) -> int:
        """Return how many parties wait now.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request.
        """
        return run(state(self._session, self._spec)).waiting
