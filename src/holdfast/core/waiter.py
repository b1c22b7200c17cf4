"""One waiter, and the grant that it waits for. `core.waiter_channel` handles the messages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from holdfast.core.waiter_channel import WaiterChannel
    from holdfast.port import Signal

NEVER = math.inf

QUEUED, LEFT = "queued", "left"
"""What a waiter submits to its channel."""


class Grant(NamedTuple):
    """A grant of the lock for `seconds`, which begin at some moment after `since`."""

    fence: int
    seconds: float
    since: float


class Waiter:
    """An attempt that waits for a lock.

    The channel sets `grant` or `must_request`, and then `signal`, which wakes the attempt. If a
    request is under way at that time, the attempt sends one more after the reply.
    """

    __slots__ = (
        "channel",
        "grant",
        "in_timer",
        "key",
        "must_request",
        "report_at",
        "signal",
        "since",
        "token",
    )

    def __init__(
        self, channel: WaiterChannel, token: str, key: bytes, signal: Signal, since: float
    ) -> None:
        self.channel = channel
        self.since = since
        """No request that could put the token in the queue was sent earlier. So no pushed grant to
        it is older."""
        self.report_at = NEVER
        """When to wake the attempt, so that it reports a long wait."""
        self.token = token
        self.key = key
        self.signal = signal
        self.grant: Grant | None = None
        self.must_request = False
        self.in_timer = False

    def recheck(self) -> None:
        """Have the attempt request again."""
        self.must_request = True
        self.signal.set()

    def enter_timer(self, sent_at: float, left: float) -> None:
        """Note that the token is in the queue, and that the holder's lease has `left` seconds."""
        self.channel.submit(QUEUED, self, sent_at, left)
        # Invariant: `leave_timer` removes the waiter from its timer. Here: submit the waiter, then
        # set `in_timer`. `on_grant`, in another thread: clear `in_timer`, then submit the removal.
        # In the other order a grant between these two lines would clear `in_timer` before the
        # waiter is submitted. Then neither the grant nor `leave_timer` would remove it.
        self.in_timer = True

    def leave_timer(self) -> None:
        """Remove the waiter from its timer.

        The token stays registered: a grant to an unknown token would be released.
        """
        if self.in_timer:
            self.in_timer = False
            self.channel.submit(LEFT, self, NEVER, NEVER)

    def unregister(self, drain_from: float | None = None) -> None:
        """Unregister the token, as `WaiterChannel.unregister`."""
        self.channel.unregister(self.token, drain_from)
