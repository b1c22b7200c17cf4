"""The body of an `async with` under a lease, which is cancelled when the lease is lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from holdfast.adapters.asyncio_port import call_on_loop
from holdfast.api.active_leases import note_failure
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Coroutine


class LeaseBody:
    """What the leases of one lock and of several locks share."""

    __slots__ = ()

    _body: asyncio.Task[Any] | None
    """The task that runs the `async with` block of this lease."""
    _cancelled: bool
    _cancelling: int

    if TYPE_CHECKING:

        @property
        def _is_lost(self) -> bool: ...

        def release(self) -> Coroutine[Any, Any, None]:
            """Release the lease."""

    def _enter(self, task: Any) -> None:  # noqa: ANN401 - the core knows no tasks
        """Record `task` as the body of an `async with`, to cancel it if the lease is lost."""
        if task is None:
            raise RuntimeError("use 'async with' on a lease inside an asyncio task")
        self._cancelling = task.cancelling()  # type: ignore[misc]  # a slot of the subclasses
        self._cancelled = False  # type: ignore[misc]  # a slot of the subclasses
        self._body = task  # type: ignore[misc]  # a slot of the subclasses
        # A loss sets the state first and then reads `_body`. This sets `_body` first and then reads
        # the state, so one of the two cancels the task.
        if self._is_lost:
            self._cancel_body()

    def _cancel_body(self) -> None:
        """Cancel the `async with` block of this lease, if there is one. Called from any thread."""
        task = getattr(self, "_body", None)
        if task is not None:
            call_on_loop(task.get_loop(), self._cancel)

    def _cancel(self) -> None:
        if self._body is not None and not self._cancelled:
            self._cancelled = True  # type: ignore[misc]  # a slot of the subclasses
            self._body.cancel()

    async def _exit_after(
        self, error: BaseException | None, task: asyncio.Task[Any] | None
    ) -> None:
        """Release the lease after a block that raised `error`, or was cancelled by a loss."""
        own = task is not None and self._cancelled and await self._is_own_cancellation(error, task)
        try:
            await self.release()
        except HoldfastError as failure:
            if own:
                raise failure from error
            if error is None:
                raise
            note_failure(error, failure)

    async def _is_own_cancellation(
        self, error: BaseException | None, task: asyncio.Task[Any]
    ) -> bool:
        """Return whether `error` is only the cancellation that the lost lease caused."""
        if not isinstance(error, asyncio.CancelledError):
            # The cancellation was not delivered yet. It must not be raised after the block.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        requests = task.uncancel()
        if requests > self._cancelling and error is None:
            raise asyncio.CancelledError
        return isinstance(error, asyncio.CancelledError) and requests <= self._cancelling
