"""Whether the server that a connection leads to still knows what was granted before.

A server that was promoted, or that started anew, may have lost locks whose holders still believe in
them. So each has a mark that is another one after each promotion and each start, and the mark of
the last one is kept with its data. Where the two differ, nobody gets a lock for as long as anybody
may believe in one that was lost (`scripts/guard.lua`, and `_quarantine.lua` in the others).

`watch` is the conversation that sees to this, on each new connection, for either kind of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import NodeUnavailable
from holdfast.scripts import GUARD
from holdfast.wire.packing import opened
from holdfast.wire.refusals import denial, is_denial, refusal

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.wire.target import Greeting

OVERLAP = 11.0
"""Seconds for which a server that was replaced may still take writes: its `min-replicas-max-lag`,
which is 10 unless it was told otherwise, and one. It counts on its `min-replicas-to-write` being
the number of its replicas."""

HOME, QUARANTINE = "holdfast:home", "holdfast:quarantine"
_NEVER = "0" * 40
_SERIAL = b"000"


class Watched(NamedTuple):
    """What was found out about a server."""

    left: float
    """Seconds of a quarantine; 0.0 if there is none."""
    process: str
    """Another one for each server, and after each of its starts."""


def watch(
    node: str, user: str, longest_ttl: float, overlap: float | None = None
) -> Greeting[Watched]:
    """Find out whether the server has taken another's place, and have nobody get a lock then.

    It lasts for `longest_ttl`, and `overlap` more, for which another may still take writes.

    Raises:
        NodeUnavailable: it is not, or not yet, a primary; or does not answer as it should.
        ConfigurationError: it does not let us find out.
    """
    facts = _facts((yield ("INFO", "server")), node, user)
    facts |= _facts((yield ("INFO", "replication")), node, user)
    if facts.get("role") != "master":
        raise NodeUnavailable(f"{node} is not a primary: the failover is under way", node=node)
    durable = _says((yield ("CONFIG", "GET", "appendonly")), b"yes")
    durable = durable and _says((yield ("CONFIG", "GET", "appendfsync")), b"always")
    was_replica_of = facts.get("master_replid2", _NEVER)
    arguments = (
        # Another one after each start; and the second part, where it was a replica, after each
        # promotion. The id of its replication alone would do, but changes without need as well.
        f"{facts['run_id']}:{was_replica_of}",
        str(round(longest_ttl * 1000)),
        str(round((OVERLAP if overlap is None else overlap) * 1000)),
        str(max(0, int(facts["uptime_in_seconds"]) - 1) * 1000),  # it counts whole seconds begun
        str(int(durable)),
        str(int(was_replica_of != _NEVER)),
        _SERIAL,
    )
    answer = yield ("EVAL", GUARD.text, "2", HOME, QUARANTINE, *arguments)
    if isinstance(answer, Exception):
        raise _refused(str(answer), node, user)
    return Watched(int(opened(answer, _SERIAL)) / 1000, facts["run_id"])


def _facts(answer: object, node: str, user: str) -> dict[str, str]:
    if not isinstance(answer, bytes):
        raise _refused(str(answer), node, user)
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {name: value for name, _, value in lines if value}


def _refused(text: str, node: str, user: str) -> HoldfastError:
    keys = [HOME.encode(), QUARANTINE.encode()]
    return (
        denial(text, (), keys, node, user) if is_denial(text) else refusal(text, node, moves=True)
    )


def _says(answer: object, value: bytes) -> bool:
    """Whether a setting has this value; not, if that is not to be had."""
    return isinstance(answer, list) and answer[1:] == [value]
