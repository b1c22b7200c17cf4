"""Idempotent work in coroutines. `api.once` has the same API for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.api.advice import MissingMethod
from holdfast.api.async_client import AsyncLease
from holdfast.api.lease_view import require_one_server
from holdfast.api.once_view import OnceView
from holdfast.core.once import begin, finish, peek
from holdfast.core.record import Record

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from holdfast.api.async_client import AsyncClient
    from holdfast.api.codecs import Codec
    from holdfast.core.once import Work


class AsyncOnce(OnceView[AsyncLease]):
    """Work that is done once per id: what `client.once(...)` returns, for one `async with` block.

    Example:
        async with client.once("order 17") as run:
            if run.first:
                run.result = await charge(order)
        return run.result

    Entering waits while another caller does the work, and raises what `acquire` raises:
    `AcquireTimeout` after the timeout, and `NodeUnavailable` without the server.

    Leaving without an exception stores the result. It raises `LeaseLost` if the lease was lost, and
    nothing was stored; and `OutcomeUnknown` if the server did not reply. If the block raises,
    nothing is stored, and the next caller does the work. A loss cancels the `async with` block,
    which then raises `LeaseLost`.
    If a call is cancelled, the lock is not left held.
    """

    __slots__ = ("_client",)

    _wait = "await "

    def __init__(self, client: AsyncClient, work: Work, codec: Codec) -> None:
        super().__init__(work, codec)
        self._client = client

    async def __aenter__(self) -> Self:
        lease = AsyncLease(self._client)
        self._enter(lease)
        stored = await begin(self._client._session, self._work, lease)  # noqa: SLF001 - within the API
        self._read(stored)
        if stored is None:
            lease._enter(lease._state.actor)  # noqa: SLF001 - within the API
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._stored is not None:
            return
        lease = self._entered()
        if error is None and not lease._cancelled:  # noqa: SLF001 - within the API
            lease._body = None  # noqa: SLF001 - a loss no longer cancels the task
            session = self._client._session  # noqa: SLF001 - within the API
            await finish(session, self._work, lease, self._to_store)
        else:
            await lease.__aexit__(kind, error, traceback)

    async def peek(self, *, default: object = None) -> Any:  # noqa: ANN401 - any value
        """Return the result without doing the work, or waiting for it.

        Example:
            receipt = await client.once(f"charge {order.id}").peek()

        Args:
            default: what to return if no result is stored, to tell that from a result of None.

        Raises:
            WrongValue: the codec cannot decode the result.
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        stored = await peek(self._record)
        return self._decoded(stored, default)

    async def forget(self) -> None:
        """Delete the result, so that the next caller does the work again.

        Work in progress is not affected: it stores its result when it is done. If the call is
        cancelled, the result may or may not be deleted. The call can be repeated, and
        never deletes the result of a later run.

        Example:
            await client.once(f"charge {order.id}").forget()

        Raises:
            OutcomeUnknown: the server did not reply; the result may or may not be deleted.
            NodeUnavailable: the server does not reply; nothing was deleted.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        await self._record.forget()

    @property
    def _record(self) -> Record:
        port = require_one_server(self._client._deployment.port)  # noqa: SLF001 - within the API
        return Record(port, self._work.lock)

    if not TYPE_CHECKING:  # type checkers must not see it
        __enter__ = MissingMethod(
            "write 'async with client.once(...) as run:', or use holdfast.Client"
        )
