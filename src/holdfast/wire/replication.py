"""Waiting until enough replicas have received what a script wrote, by WAIT.

WAIT counts the replicas that have received the writes of the same connection. So it follows the
script in the same write, and each retry of a script is followed by another WAIT. This relies on one
property of the scripts: every script that reports a held lock writes, even if nothing has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.port import Unreplicated
from holdfast.scripts import (
    ACQUIRE,
    ACQUIRE_SHARED,
    ADOPT,
    CAMPAIGN,
    DOWNGRADE,
    RENEW,
    RENEW_SHARED,
)
from holdfast.wire.error_replies import acl_error, is_acl_denial
from holdfast.wire.packing import pack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.port import Reply, Request

_REPLICATED_SCRIPTS = frozenset((ACQUIRE.name, ADOPT.name, RENEW.name)) | {
    ACQUIRE_SHARED.name,
    CAMPAIGN.name,
    DOWNGRADE.name,
    RENEW_SHARED.name,
}
_REPLY_MARGIN = 0.15
"""Seconds by which WAIT times out before its call. An idle server checks its timers ten times per
second, and the reply must travel back."""


def replicas_needed(request: Request) -> int:
    """Return how many replicas must have received the writes of a request."""
    script, keys, _ = request
    return keys.replicas if script.name in _REPLICATED_SCRIPTS else 0


def max_replicas_needed(requests: Iterable[Request]) -> int:
    """Return how many replicas the WAIT after these requests must ask for."""
    return max(map(replicas_needed, requests), default=0)


def pack_wait(replicas: int, timeout: float) -> bytes:
    """Pack a WAIT. Its reply is the number of replicas, once they are enough or on timeout."""
    milliseconds = max(1, int(max(timeout / 2, timeout - _REPLY_MARGIN) * 1000))
    return pack(("WAIT", str(replicas), str(milliseconds)))


def check_replication(
    reply: Reply | HoldfastError, acked: object, replicas: int, node: str, user: str
) -> Reply | HoldfastError:
    """Return the reply of the script, or an error if too few replicas have its writes.

    `acked` is the reply of WAIT.
    """
    if not isinstance(reply, int) or not reply or not replicas:
        return reply  # the script granted nothing that could be lost
    if isinstance(acked, int) and acked >= replicas:
        return reply
    if is_acl_denial(str(acked)):
        return acl_error(str(acked), (), (), node, user)
    if not isinstance(acked, int):
        return OutcomeUnknown(
            f"{node} did not report how many replicas have it: {acked}", node=node
        )
    return Unreplicated(
        f"{node} executed the request, but only {acked} of {replicas} replicas have it", node=node
    )
