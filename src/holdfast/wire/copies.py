"""Whether enough replicas have what a script wrote, asked by WAIT on the same connection.

WAIT speaks of what its own connection wrote. So it goes out behind the script, in one write, and a
script that is sent again is followed by another one. It is of worth only because every script that
answers "yours" writes, also when it finds that nothing has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.port import Uncopied
from holdfast.scripts import ACQUIRE, ADOPT, RENEW
from holdfast.wire.packing import pack
from holdfast.wire.refusals import denial, is_denial

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.port import Reply, Request

_COPIED = frozenset((ACQUIRE.name, ADOPT.name, RENEW.name))
_LATE = 0.15
"""Seconds of a call's time that are left when WAIT gives up: an idle server looks at its clock ten
times a second, and the answer has to come back."""


def needed(request: Request) -> int:
    """How many replicas must have what the request writes, before its answer counts."""
    script, keys, _ = request
    return keys.replicas if script.name in _COPIED else 0


def most_needed(requests: Iterable[Request]) -> int:
    """How many replicas must have it for all of these to count: what the last WAIT asks for."""
    return max(map(needed, requests), default=0)


def wait_for(replicas: int, timeout: float) -> bytes:
    """Pack the command whose answer, once that is enough or time is up, is how many have it."""
    milliseconds = max(1, int(max(timeout / 2, timeout - _LATE) * 1000))
    return pack(("WAIT", str(replicas), str(milliseconds)))


def confirmed(
    reply: Reply | HoldfastError, copies: object, replicas: int, node: str, user: str
) -> Reply | HoldfastError:
    """Return what the script answered, or why that does not count."""
    if not isinstance(reply, int) or not reply or not replicas:
        return reply  # it gave nothing that could be lost
    if isinstance(copies, int) and copies >= replicas:
        return reply
    if is_denial(str(copies)):
        return denial(str(copies), (), (), node, user)
    if not isinstance(copies, int):
        return OutcomeUnknown(f"{node} does not say how many replicas have it: {copies}", node=node)
    return Uncopied(f"{node} has it, but only {copies} of {replicas} replicas have it", node=node)
