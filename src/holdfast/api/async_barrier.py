"""Barriers, for asyncio. `api.barrier` has the same API for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.api.barrier import BarrierView
from holdfast.core.barrier import end, state, wait

if TYPE_CHECKING:
    from holdfast.core.duration import Duration


class AsyncBarrier(BarrierView):
    """A number of parties wait for one another, and continue together: `client.barrier(...)`.

    Example:
        barrier = client.barrier("phase-1", parties=8)
        await load(shard)
        if await barrier.wait(timeout=60) == 0:  # all eight have loaded
            report()

    As `threading.Barrier`, for processes on any machine. Immutable; tasks may share it, and each
    call of `wait` is a party. When all have passed, the barrier can be used again.

    A party that gives up breaks the barrier for all of them: by its timeout, an interrupt, an
    error, or because its process died or hung for longer than the ttl. Then all that wait, and all
    that come later, get `BrokenBarrier`, until `reset` is called, or no client has used the
    barrier for a day.
    """

    __slots__ = ()

    async def wait(self, *, timeout: Duration | None = None) -> int:
        """Wait until all parties have arrived.

        The server notifies this client; it does not poll. If the call is cancelled, the barrier
        breaks.

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
        return self._index(await wait(self._session, self._spec, timeout))

    async def abort(self) -> None:
        """Break the barrier: all that wait, and all that come later, get `BrokenBarrier`.

        If the call is cancelled, the barrier may or may not be broken.

        Raises:
            OutcomeUnknown: the server did not reply; the barrier may or may not be broken.
            NodeUnavailable: the server cannot be reached, or refuses; nothing was changed.
            ConfigurationError: the server will never accept the request.
            NotHeld: this process was forked during the call.
        """
        await end(self._session, self._spec, "aborted")

    async def reset(self) -> None:
        """Make the barrier usable again. Parties that wait get `BrokenBarrier`.

        If the call is cancelled, the barrier may or may not be reset.

        Raises:
            OutcomeUnknown: the server did not reply; the barrier may or may not be reset.
            NodeUnavailable: the server cannot be reached, or refuses; nothing was changed.
            ConfigurationError: the server will never accept the request.
            NotHeld: this process was forked during the call.
        """
        await end(self._session, self._spec, "reset")

    async def broken(self) -> bool:
        """Return whether the barrier is broken.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request.
        """
        return (await state(self._session, self._spec)).broken is not None

    async def n_waiting(self) -> int:
        """Return how many parties wait now.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request.
        """
        return (await state(self._session, self._spec)).waiting
