"""Idempotent work. `api.async_once` has the same API for asyncio."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from holdfast.adapters.thread_port import run
from holdfast.api.advice import MissingMethod
from holdfast.api.client import Lease
from holdfast.api.lease_view import require_one_server
from holdfast.api.once_view import OnceView
from holdfast.core.once import begin, finish, peek
from holdfast.core.record import Record
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from holdfast.api.client import Client
    from holdfast.api.codecs import Codec
    from holdfast.core.once import Work


class Once(OnceView[Lease]):
    """Work that is done once per id: what `client.once(...)` returns, for one `with` block.

    Example:
        with client.once("order 17") as run:
            if run.first:
                run.result = charge(order)
        return run.result

    Entering waits while another caller does the work, and raises what `acquire` raises:
    `AcquireTimeout` after the timeout, and `NodeUnavailable` without the server.

    Leaving without an exception stores the result. It raises `LeaseLost` if the lease was lost, and
    nothing was stored; and `OutcomeUnknown` if the server did not reply. If the block raises,
    nothing is stored, and the next caller does the work. A loss does not interrupt a `with` block:
    use `check`, `lost` or `on_lost`. If a call is interrupted by a signal handler, the lock is not
    left held.
    """

    __slots__ = ("_client",)

    def __init__(self, client: Client, work: Work, codec: Codec) -> None:
        super().__init__(work, codec)
        self._client = client

    def __enter__(self) -> Self:
        lease = Lease(self._client)
        self._enter(lease)
        try:
            self._read(run(begin(self._client._session, self._work, lease)))  # noqa: SLF001 - within the API
            return self  # noqa: TRY300 - an interrupt here must be caught too
        except BaseException:
            lease._abandon()  # noqa: SLF001 - within the API
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # No statement before the try: an interrupt there would leave the lock held.
        try:
            lease = self._entered()
            if error is None and self._stored is None:
                session = self._client._session  # noqa: SLF001 - within the API
                run(finish(session, self._work, lease, self._to_store))
            else:
                lease.__exit__(kind, error, traceback)
        except BaseException as failure:
            if not isinstance(failure, HoldfastError):
                if error is None and self._stored is None:
                    # The interrupt came before `finish`. After it, NotHeld or LeaseLost is raised.
                    with contextlib.suppress(HoldfastError):
                        session = self._client._session  # noqa: SLF001 - within the API
                        run(finish(session, self._work, self._entered(), self._to_store))
                self._entered()._abandon()  # noqa: SLF001 - within the API
            raise

    def peek(self, *, default: object = None) -> Any:  # noqa: ANN401 - any value
        """Return the result without doing the work, or waiting for it.

        Example:
            receipt = client.once(f"charge {order.id}").peek()

        Args:
            default: what to return if no result is stored, to tell that from a result of None.

        Raises:
            WrongValue: the codec cannot decode the result.
            NodeUnavailable: the server does not reply.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        stored = run(peek(self._record))
        return self._decoded(stored, default)

    def forget(self) -> None:
        """Delete the result, so that the next caller does the work again.

        Work in progress is not affected: it stores its result when it is done. If the call is
        interrupted by a signal handler, the result may or may not be deleted. The call can be
        repeated, and never deletes the result of a later run.

        Example:
            client.once(f"charge {order.id}").forget()

        Raises:
            OutcomeUnknown: the server did not reply; the result may or may not be deleted.
            NodeUnavailable: the server does not reply; nothing was deleted.
            ConfigurationError: the server refuses the request: its configuration is wrong.
        """
        run(self._record.forget())

    @property
    def _record(self) -> Record:
        port = require_one_server(self._client._deployment.port)  # noqa: SLF001 - within the API
        return Record(port, self._work.lock)

    if not TYPE_CHECKING:  # type checkers must not see it
        __aenter__ = MissingMethod(
            "write 'with client.once(...) as run:', or use holdfast.AsyncClient in coroutines"
        )
