"""The error of a broken barrier. It is here because the core and its errors import no threading."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.core.barrier import BreakReason
    from holdfast.holder import Holder


class BrokenBarrier(HoldfastError, threading.BrokenBarrierError):  # noqa: N818 - as our other errors
    """The barrier is broken, or was broken while this party waited. It did not pass.

    `reason` is "timeout", "interrupted", "lost", "aborted" or "reset": `BreakReason` explains each.
    `by` is the party that left or was lost, or the caller that aborted. It is None after a reset,
    and if the timeout of this party was over.
    """

    def __init__(
        self,
        message: str,
        *,
        lock: str = "",
        reason: BreakReason = "aborted",
        by: Holder | None = None,
    ) -> None:
        super().__init__(message, lock=lock)
        self.reason = reason
        self.by = by
