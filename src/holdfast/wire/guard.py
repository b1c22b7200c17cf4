"""Detection of servers that may have lost granted locks, and their quarantine.

A server that restarted or was promoted may have lost locks whose holders still consider them valid.
So each server has a mark that changes with each start and each promotion. Its last mark is stored
with its data, in the key `holdfast:restart-marker`. If the two differ, a quarantine begins: the
server grants no lock until every lost lock would have expired (`scripts/guard.lua`, and
`_quarantine.lua` in the other scripts).

`check_restart` does this on each new connection. `read_status` only reads. `end_quarantine` is for
operators who know that a new server has lost nothing.

All three are handshakes: generators of commands that run on blocking and asyncio connections.

Not covered: a promotion by hand, without Sentinels, if no CLIENT KILL closes the connections to the
replaced server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import NodeUnavailable
from holdfast.scripts import END_QUARANTINE, GUARD
from holdfast.wire.error_replies import acl_error, error_for_reply, is_acl_denial, wrong_role
from holdfast.wire.packing import decode_reply

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.wire.target import Handshake

OVERLAP = 11.0
"""Seconds for which a replaced primary may still accept writes: `min-replicas-max-lag`, 10 by
default, plus one. This requires that its `min-replicas-to-write` is the number of its replicas."""

RESTART_MARKER, QUARANTINE = "holdfast:restart-marker", "holdfast:quarantine"
_NEVER = "0" * 40
_SERIAL = b"000"


class GuardResult(NamedTuple):
    """The result of `check_restart`."""

    quarantine_left: float
    """Seconds until the quarantine ends; 0.0 if there is none."""
    run_id: str
    """The `run_id` from INFO: unique per server and start."""


def check_restart(
    node: str, user: str, longest_ttl: float, *, in_quorum: bool = False
) -> Handshake[GuardResult]:
    """Begin a quarantine if the server has restarted, was promoted, or replaced another server.

    The quarantine lasts for `longest_ttl`. Behind Sentinels it lasts for `OVERLAP` more, because
    the replaced primary may still accept writes. A server behind Sentinels that has no restart
    marker, was never a replica, and has run for longer than the quarantine, has lost nothing. A
    server of a quorum (`in_quorum`) may have replaced another server at the same address, so its
    uptime does not count.

    Raises:
        NodeUnavailable: it is not, or not yet, a primary, or sends an invalid reply.
        ConfigurationError: it denies a command.
    """
    info = yield from _read_info(node, user)
    durable = _has_value((yield ("CONFIG", "GET", "appendonly")), b"yes")
    durable = durable and _has_value((yield ("CONFIG", "GET", "appendfsync")), b"always")
    overlap = 0.0 if in_quorum else OVERLAP
    uptime = 0 if in_quorum else max(0, int(info["uptime_in_seconds"]) - 1)  # may be 1 s too high
    arguments = (
        _mark(info),
        str(round(longest_ttl * 1000)),
        str(round(overlap * 1000)),
        str(uptime * 1000),
        str(int(durable)),
        str(int(info.get("master_replid2", _NEVER) != _NEVER)),
        _SERIAL,
    )
    reply = yield ("EVAL", GUARD.text, "2", RESTART_MARKER, QUARANTINE, *arguments)
    if isinstance(reply, Exception):
        raise _error_for(str(reply), node, user)
    return GuardResult(int(decode_reply(reply, _SERIAL)) / 1000, info["run_id"])


class ServerStatus(NamedTuple):
    """The result of `read_status`, for operators."""

    run_id: str
    """The `run_id` from INFO: unique per server and start."""
    mark: str
    """Identifies the server since its last start or promotion; see `_mark`."""
    restart_marker: str
    """The mark in the key `holdfast:restart-marker`; "" if the server is new. It differs from
    `mark` if the server has restarted or was promoted since."""
    longest_ttl: float
    """The greatest `longest_ttl` of the clients that used the server, in seconds."""
    quarantine_left: float
    """Seconds until the current quarantine ends; 0.0 if there is none."""
    keys: int
    """The number of keys of locks, including counters, which outlive their lock by an hour."""
    settings: dict[str, str]
    """The values of `SETTINGS`, without those that the server does not report."""


SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy")
"""Settings that are expected to be equal on all servers of a deployment."""

_PAGE = "1000"


def read_status(node: str, user: str) -> Handshake[ServerStatus]:
    """Read what a server reports about itself and its locks. Changes nothing.

    Raises:
        NodeUnavailable: it is not a primary, or sends an invalid reply.
        ConfigurationError: it cannot keep locks, or denies a command.
    """
    judge = wrong_role((yield ("HELLO",)), node)
    if judge is not None:
        raise judge
    info = yield from _read_info(node, user)
    marker = yield ("GET", RESTART_MARKER)
    left = yield ("PTTL", QUARANTINE)
    if isinstance(marker, Exception) or isinstance(left, Exception):
        raise _error_for(str(marker if isinstance(marker, Exception) else left), node, user)
    keys, cursor = 0, b"0"
    while True:
        page = yield ("SCAN", cursor, "MATCH", "holdfast:*", "COUNT", _PAGE)
        if isinstance(page, Exception):
            raise _error_for(str(page), node, user)
        cursor, found = page
        keys += sum(
            key.decode(errors="replace") not in {RESTART_MARKER, QUARANTINE} for key in found
        )
        if cursor == b"0":
            break
    settings = {}
    for name in SETTINGS:
        reply = yield ("CONFIG", "GET", name)
        if isinstance(reply, list) and reply[1:]:
            settings[name] = reply[1].decode(errors="replace")
    mark, _, longest = (marker or b"").decode(errors="replace").partition(" ")
    return ServerStatus(
        run_id=info["run_id"],
        mark=_mark(info),
        restart_marker=mark,
        longest_ttl=int(longest or 0) / 1000,
        quarantine_left=max(0, left) / 1000,
        keys=keys,
        settings=settings,
    )


def end_quarantine(node: str, user: str, mark: str, longest_ttl: float) -> Handshake[None]:
    """End the quarantine of the server that has this `mark`, and store the mark on it.

    Raises:
        NodeUnavailable: the server has another mark, or refuses.
        ConfigurationError: it denies a command.
    """
    if _mark((yield from _read_info(node, user))) != mark:
        raise NodeUnavailable(
            f"{node} was restarted or replaced during the check: try again", node=node
        )
    arguments = mark, str(round(longest_ttl * 1000)), _SERIAL
    reply = yield ("EVAL", END_QUARANTINE.text, "2", RESTART_MARKER, QUARANTINE, *arguments)
    if isinstance(reply, Exception):
        raise _error_for(str(reply), node, user)
    decode_reply(reply, _SERIAL)


def _read_info(node: str, user: str) -> Handshake[dict[str, str]]:
    info = _parse_info((yield ("INFO", "server")), node, user)
    info |= _parse_info((yield ("INFO", "replication")), node, user)
    if info.get("role") != "master":
        raise NodeUnavailable(f"{node} is not a primary: the failover is under way", node=node)
    return info


def _mark(info: dict[str, str]) -> str:
    """Return the mark of a server: its `run_id` and its `master_replid2`.

    The first changes with each start, the second with each promotion of a replica: a server that is
    replaced and promoted again is still the same process. `master_replid` alone would be enough,
    but it also changes at other times.
    """
    return f"{info['run_id']}:{info.get('master_replid2', _NEVER)}"


def _parse_info(reply: object, node: str, user: str) -> dict[str, str]:
    if not isinstance(reply, bytes):
        raise _error_for(str(reply), node, user)
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, _, value in lines if value}


def _error_for(text: str, node: str, user: str) -> HoldfastError:
    keys = [RESTART_MARKER.encode(), QUARANTINE.encode()]
    return (
        acl_error(text, (), keys, node, user)
        if is_acl_denial(text)
        else error_for_reply(text, node, can_fail_over=True)
    )


def _has_value(reply: object, value: bytes) -> bool:
    """Whether CONFIG GET returned this value. False if the server denies CONFIG."""
    return isinstance(reply, list) and reply[1:] == [value]
