"""Leader election for threads. `api.async_election` has the same API for asyncio."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from holdfast.adapters.thread_port import run
from holdfast.api.acquirable import Acquirable
from holdfast.api.advice import MissingMethod
from holdfast.api.client import Lease
from holdfast.api.lease_view import AnyLockSettings
from holdfast.core.duration import in_seconds
from holdfast.core.election import NOTHING, campaign, ended_by_loss, is_leading, observe
from holdfast.core.inspect import holder
from holdfast.core.spec import check_timeout
from holdfast.errors import ConfigurationError, HoldfastError, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from holdfast.api.client import Client
    from holdfast.core.duration import Duration
    from holdfast.core.election import ElectionSpec
    from holdfast.holder import Holder

R = TypeVar("R")


class Term(Lease):
    """The time for which this client leads: a lease of the election's lock.

    A term ends when it is resigned, or when it is lost. At its deadline it is lost without any
    reply from the server, and before the server can make another client the leader. Leaving `with
    term` resigns. A loss does not interrupt a `with` block: use `check`, `lost` or `on_lost`.
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

    def resign(self) -> None:
        """End the term, so that the next candidate leads: the same as `release`.

        If the call is interrupted by a signal handler, it still ends the term before it passes on
        the interruption.

        Raises:
            LeaseLost: the term had been lost: another client may have led.
            NotHeld: the term belongs to the process that forked this one.
            OutcomeUnknown: the server did not reply. The client retries in the background, and you
                may call `resign` again.
            NodeUnavailable: the server cannot be reached; as above.
        """
        self.release()


class Campaign(Acquirable[Term]):
    """The wait to become the leader: what `election.lead()` returns.

    Immutable; threads may share it.

    Use it as a `Lock`: as a context manager or as a decorator, or call `acquire`, which returns a
    `Term`. Candidates lead in the order in which they began to wait.

    Example:
        with election.lead() as term:
            while term.is_leader:
                schedule(fence=term.number)
    """

    __slots__ = ()

    _MADE_BY = "election(name).lead()"

    def _new_lease(self) -> Term:
        return Term(self._client)


class Election(AnyLockSettings):
    """An election: its name and its settings. Immutable; threads may share it.

    Example:
        election = client.election("scheduler", label="http://10.0.0.7:8080")
        with election.lead() as term:
            ...

        leader = election.leader()  # in any process
    """

    __slots__ = ("_client", "_election", "_session")

    _MADE_BY = "election(name)"
    _SHOWN: Mapping[str, object] = {
        name: usual
        for name, usual in AnyLockSettings._SHOWN.items()  # noqa: SLF001 - within the API
        if name in {"ttl", "replicas", "label"}
    }

    def __init__(self, client: Client, election: ElectionSpec) -> None:
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

    def lead(self, *, timeout: Duration | None = None) -> Campaign:
        """Describe the wait to become the leader. This sends nothing to the server.

        Example:
            with election.lead() as term:  # waits, and resigns at the end
                ...

            term = election.lead(timeout=5).acquire()

        Args:
            timeout: seconds to wait: None waits for ever, 0 does not wait.

        Raises:
            ConfigurationError: the timeout is invalid.
        """
        timeout = in_seconds(timeout)
        check_timeout(timeout, lock=self.name)
        return Campaign(self._client, replace(self._spec, timeout=timeout))

    def run(self, function: Callable[[Term], R]) -> R:
        """Call `function(term)` whenever this client leads, until a call returns in its term.

        It waits to become the leader, and calls the function. If the term is lost, it waits again,
        and calls the function again in the next term. This includes a function that returns, or
        raises the `LeaseLost` of its term (from `term.check()`), after the loss. While the servers
        are unavailable it keeps trying.

        The call ends when the function returns while it leads: the client resigns, and the result
        is returned. It also ends when the function raises another exception: the client resigns,
        and the exception is passed on.

        A loss does not interrupt the function: let it read `term.is_leader`, or wait for
        `term.lost`. Until it returns, two functions may run, so let resources check the fence. To
        end the call from outside, let the function return, and close the client. A waiting call
        then raises `NodeUnavailable`. If the call is interrupted by a signal handler, the client
        does not stay the leader.

        Example:
            def schedule(term):
                while not term.lost.wait(1):
                    start_due_jobs(fence=term.number)

            client.election("scheduler").run(schedule)

        Args:
            function: takes the `Term`. It must not be a coroutine function.

        Returns:
            What the function returned.

        Raises:
            NodeUnavailable: the client is closed; or the server did not reply to the resignation,
                which is retried in the background.
            OutcomeUnknown: the same, of the resignation.
            WouldDeadlock: the caller leads already.
            ConfigurationError: `function` is a coroutine function; or the server will never grant
                the lock of the election.
            NotHeld: this process was forked during the call.
        """
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"{function.__name__} is a coroutine function: use holdfast.AsyncClient",
                lock=self.name,
            )
        while True:
            term = Term(self._client)
            try:
                run(campaign(self._session, self._election, term))
                with term:
                    return function(term)
            except BaseException as error:
                if not isinstance(error, HoldfastError):
                    term._abandon()  # noqa: SLF001 - within the API
                if not isinstance(error, LeaseLost) or not ended_by_loss(term, error):
                    raise

    def leader(self) -> Holder | None:
        """Return the current leader, with its label and its fence; None if there is none.

        Raises:
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        return run(holder(self._session, self._spec))

    def watch(self) -> Iterator[Holder | None]:
        """Iterate over the leaders: the current one first, and then each new one.

        It is None while there is no leader. A leader that resigns, and one that is elected, are
        pushed to this client. If a leader dies or is evicted, or if a message was lost, this client
        detects that when the lease which it has seen should be over: it sends a request then, about
        once per ttl. A leader that is replaced before this client has read it is skipped.

        On several servers, and where the server cannot notify its clients, this client polls: once
        per second on several servers.

        It is for one thread. It ends with `NodeUnavailable` when the client is closed.

        Example:
            for leader in election.watch():
                connect(leader.label if leader else None)

        Raises:
            NodeUnavailable: the server does not reply. Call this again to continue.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        known = NOTHING
        while True:
            seen = run(observe(self._session, self._election, known))
            known = seen.known
            yield seen.leader

    if not TYPE_CHECKING:  # type checkers must not see these
        acquire = MissingMethod("write {wait}election.lead().acquire()")
        try_acquire = MissingMethod("write {wait}election.lead().try_acquire()")
        resign = MissingMethod("resign the term: '{with_} election.lead() as term:'")
        holder = MissingMethod("write {wait}election.leader()")
        __enter__ = MissingMethod("write '{with_} election.lead() as term:'")
        __aenter__ = MissingMethod("write '{with_} election.lead() as term:'")
