"""Retrying requests that got no reply. Only for requests that may be carried out twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVarTuple

from holdfast.errors import NodeUnavailable, OutcomeUnknown
from holdfast.port import Reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Args = TypeVarTuple("Args")

TRIES = 3
"""After this many requests without a reply the server counts as unreachable. A connection that was
closed while idle may cost one, and a lost reply another."""


RetryResult: TypeAlias = tuple[Reply, bool]
"""A reply, and whether an earlier try got none, and may have been executed."""


async def retry(
    send: Callable[[*Args], Awaitable[Reply]],
    args: tuple[*Args],
    on_failure: Callable[[OutcomeUnknown | NodeUnavailable], object] | None = None,
    tries: int = TRIES,
) -> RetryResult:
    """Call `send(*args)` until there is a reply, up to `tries` times.

    `on_failure` is called after each try that failed. What it raises ends the retries.

    Raises:
        OutcomeUnknown: the last try failed, and one of them may have been carried out.
        NodeUnavailable: the last try failed, and none was carried out.
    """
    may_have_run = False
    while True:
        tries -= 1
        try:
            return await send(*args), may_have_run
        except (OutcomeUnknown, NodeUnavailable) as error:
            may_have_run = may_have_run or isinstance(error, OutcomeUnknown)
            if on_failure is not None:
                on_failure(error)
            if tries:
                continue
            if may_have_run and isinstance(error, NodeUnavailable):
                raise OutcomeUnknown(str(error), lock=error.lock, node=error.node) from None
            raise
