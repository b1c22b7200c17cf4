"""Sending a request again that got no reply. It must be one that may be carried out twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import NodeUnavailable, OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.port import Reply

TRIES = 3
"""Requests without a reply after which the server counts as unreachable. A connection that was
closed while idle may cost one, and a lost reply another."""


class Answer(NamedTuple):
    """The reply to a request that may have been sent more than once."""

    reply: Reply
    uncertain: bool
    """An earlier try got no reply, and may have been carried out."""


async def retry(
    send: Callable[[], Awaitable[Reply]],
    on_failure: Callable[[OutcomeUnknown | NodeUnavailable], object] | None = None,
    tries: int = TRIES,
) -> Answer:
    """Call `send` until there is a reply, up to `tries` times.

    `on_failure` is called after each try that failed. What it raises ends the retries.

    Raises:
        OutcomeUnknown: the last try failed, and one of them may have been carried out.
        NodeUnavailable: the last try failed, and none was carried out.
    """
    uncertain = False
    while True:
        tries -= 1
        try:
            return Answer(await send(), uncertain)
        except (OutcomeUnknown, NodeUnavailable) as error:
            uncertain = uncertain or isinstance(error, OutcomeUnknown)
            if on_failure is not None:
                on_failure(error)
            if tries:
                continue
            if uncertain and isinstance(error, NodeUnavailable):
                raise OutcomeUnknown(str(error), lock=error.lock, node=error.node) from None
            raise
