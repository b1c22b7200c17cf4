"""Leader election in coroutines. `api.election` has the same API for threads."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.api.advice import MissingMethod
from holdfast.api.async_acquirable import AsyncAcquirable
from holdfast.api.async_client import AsyncLease
from holdfast.api.lease_view import AnyLockSettings
from holdfast.core.duration import in_seconds
from holdfast.core.election import NOTHING, campaign, ended_by_loss, is_leading, observe
from holdfast.core.inspect import holder
from holdfast.core.spec import check_timeout
from holdfast.errors import ConfigurationError, LeaseLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

    from holdfast.api.async_client import AsyncClient
    from holdfast.core.duration import Duration
    from holdfast.core.election import ElectionSpec
    from holdfast.holder import Holder

R = TypeVar("R")


class AsyncTerm(AsyncLease):
    """The time for which this client leads: a lease of the election's lock.

    A term ends when it is resigned, or when it is lost. At its deadline it is lost without any
    reply from the server, and before the server can make another client the leader. Leaving `async
    with term` resigns. A loss cancels the `async with` block, which then raises `LeaseLost`.
    """

    __slots__ = ()

    @property
    def number(self) -> int:
        """The number of the term, which is its fence: greater than that of every earlier term."""
        return self.fence

    @property
    def is_leader(self) -> bool:
        """Whether this client certainly leads now, in this term. Becomes False at the deadline."""
        return self.held

    async def resign(self) -> None:
        """End the term, so that the next candidate leads: the same as `release`.

        If the call is cancelled, it still ends the term before it passes on the cancellation.

        Raises:
            LeaseLost: the term had been lost: another client may have led.
            NotHeld: the term belongs to the process that forked this one.
            OutcomeUnknown: the server did not reply. The client retries in the background, and you
                may call `resign` again.
            NodeUnavailable: the server cannot be reached; as above.
        """
        await self.release()


class AsyncCampaign(AsyncAcquirable[AsyncTerm]):
    """The wait to become the leader: what `election.lead()` returns.

    Immutable; tasks may share it.

    Use it as a `Lock`: as a context manager or as a decorator, or call `acquire`, which returns a
    `Term`. Candidates lead in the order in which they began to wait.

    Example:
        async with election.lead() as term:
            while term.is_leader:
                await schedule(fence=term.number)
    """

    __slots__ = ()

    _MADE_BY = "election(name).lead()"

    def _new_lease(self) -> AsyncTerm:
        return AsyncTerm(self._client)


class AsyncElection(AnyLockSettings):
    """An election: its name and its settings. Immutable; tasks may share it.

    Example:
        election = client.election("scheduler", label="http://10.0.0.7:8080")
        async with election.lead() as term:
            ...

        leader = await election.leader()  # in any process
    """

    __slots__ = ("_client", "_election", "_session")

    _MADE_BY = "election(name)"
    _SHOWN: Mapping[str, object] = {
        name: usual
        for name, usual in AnyLockSettings._SHOWN.items()  # noqa: SLF001 - within the API
        if name in {"ttl", "replicas", "label"}
    }

    def __init__(self, client: AsyncClient, election: ElectionSpec) -> None:
        self._client = client
        self._session = client._session  # noqa: SLF001 - within the API
        self._election = election
        self._spec = election.lock

    @property
    def is_leader(self) -> bool:
        """Whether this client certainly leads now, in this process. Sends nothing to the server.

        It becomes False at the deadline of the term, before another client can become the leader.
        """
        return is_leading(self._session, self._election)

    def lead(self, *, timeout: Duration | None = None) -> AsyncCampaign:
        """Describe the wait to become the leader. This sends nothing to the server.

        Example:
            async with election.lead() as term:  # waits, and resigns at the end
                ...

            term = await election.lead(timeout=5).acquire()

        Args:
            timeout: seconds to wait: None waits for ever, 0 does not wait.

        Raises:
            ConfigurationError: the timeout is invalid.
        """
        timeout = in_seconds(timeout)
        check_timeout(timeout, lock=self.name)
        return AsyncCampaign(self._client, replace(self._spec, timeout=timeout))

    async def run(self, function: Callable[[AsyncTerm], Coroutine[Any, Any, R]]) -> R:
        """Call `function(term)` whenever this client leads, until a call returns in its term.

        It waits to become the leader, and calls the function. If the term is lost, it waits again,
        and calls the function again in the next term. This includes a function that returns, or
        raises the `LeaseLost` of its term (from `term.check()`), after the loss. While the servers
        are unavailable it keeps trying.

        The call ends when the function returns while it leads: the client resigns, and the result
        is returned. It also ends when the function raises another exception: the client resigns,
        and the exception is passed on.

        A loss cancels the function. Until it has ended, two functions may run, so let resources
        check the fence. To end the call from outside, cancel it: the client then does not stay the
        leader.

        Example:
            async def schedule(term):
                while True:
                    await start_due_jobs(fence=term.number)
                    await asyncio.sleep(1)

            await client.election("scheduler").run(schedule)

        Args:
            function: a coroutine function that takes the `AsyncTerm`.

        Returns:
            What the function returned.

        Raises:
            NodeUnavailable: the client is closed; or the server did not reply to the resignation,
                which is retried in the background.
            OutcomeUnknown: the same, of the resignation.
            WouldDeadlock: the caller leads already.
            ConfigurationError: `function` is not a coroutine function; or the server will never
                grant the lock of the election.
            NotHeld: this process was forked during the call.
        """
        if not inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"{getattr(function, '__name__', function)} is not a coroutine function: use "
                "holdfast.Client",
                lock=self.name,
            )
        while True:
            term = AsyncTerm(self._client)
            try:
                await campaign(self._session, self._election, term)
                async with term:
                    return await function(term)
            except LeaseLost as error:
                if not ended_by_loss(term, error):
                    raise

    async def leader(self) -> Holder | None:
        """Return the current leader, with its label and its fence; None if there is none.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        return await holder(self._session, self._spec)

    async def watch(self) -> AsyncIterator[Holder | None]:
        """Iterate over the leaders: the current one first, and then each new one.

        It is None while there is no leader. A leader that resigns, and one that is elected, are
        pushed to this client. If a leader dies or is evicted, or if a message was lost, this client
        detects that when the lease which it has seen should be over: it sends a request then, about
        once per ttl. A leader that is replaced before this client has read it is skipped.

        On several servers, and where the server cannot notify its clients, this client polls: once
        per second on several servers.

        It is for one task. It ends with `NodeUnavailable` when the client is closed.

        Example:
            async for leader in election.watch():
                await connect(leader.label if leader else None)

        Raises:
            NodeUnavailable: the server does not reply. Call this again to continue.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        known = NOTHING
        while True:
            seen = await observe(self._session, self._election, known)
            known = seen.known
            yield seen.leader

    if not TYPE_CHECKING:  # type checkers must not see these
        acquire = MissingMethod("write {wait}election.lead().acquire()")
        try_acquire = MissingMethod("write {wait}election.lead().try_acquire()")
        resign = MissingMethod("resign the term: '{with_} election.lead() as term:'")
        holder = MissingMethod("write {wait}election.leader()")
        __enter__ = MissingMethod("write '{with_} election.lead() as term:'")
        __aenter__ = MissingMethod("write '{with_} election.lead() as term:'")
