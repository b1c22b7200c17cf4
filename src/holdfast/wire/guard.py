"""Whether the server that a connection leads to still knows what was granted before.

A server that was promoted, or that started anew, may have lost locks whose holders still believe in
them. So each has a mark that is another one after each promotion and each start, and the mark of
the last one is kept with its data. Where the two differ, nobody gets a lock for as long as anybody
may believe in one that was lost (`scripts/guard.lua`, and `_quarantine.lua` in the others).

`watch` is the conversation that sees to this, on each new connection, for either kind of it.
`inspect` only looks, and `declare_fit` ends a quarantine, for operators of new servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import NodeUnavailable
from holdfast.scripts import DECLARE_FIT, GUARD
from holdfast.wire.packing import opened
from holdfast.wire.refusals import denial, is_denial, misplaced, refusal

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
    node: str, user: str, longest_ttl: float, *, of_several: bool = False
) -> Greeting[Watched]:
    """Find out whether the server has replaced another one; if so, begin a quarantine.

    It lasts for `longest_ttl`. Behind Sentinels it lasts for `OVERLAP` more, in which another
    server may still take writes. There a server without a mark that was never a replica, and has
    run for longer than that, is new and has lost nothing. One `of_several` may have replaced
    another server at the same address, however long it has run.

    Raises:
        NodeUnavailable: it is not, or not yet, a primary; or does not answer as it should.
        ConfigurationError: it does not let us find out.
    """
    facts = yield from _ask_facts(node, user)
    durable = _says((yield ("CONFIG", "GET", "appendonly")), b"yes")
    durable = durable and _says((yield ("CONFIG", "GET", "appendfsync")), b"always")
    overlap = 0.0 if of_several else OVERLAP
    uptime = 0 if of_several else max(0, int(facts["uptime_in_seconds"]) - 1)  # whole seconds begun
    arguments = (
        _mark(facts),
        str(round(longest_ttl * 1000)),
        str(round(overlap * 1000)),
        str(uptime * 1000),
        str(int(durable)),
        str(int(facts.get("master_replid2", _NEVER) != _NEVER)),
        _SERIAL,
    )
    answer = yield ("EVAL", GUARD.text, "2", HOME, QUARANTINE, *arguments)
    if isinstance(answer, Exception):
        raise _refused(str(answer), node, user)
    return Watched(int(opened(answer, _SERIAL)) / 1000, facts["run_id"])


class Inspected(NamedTuple):
    """What a server reports about itself to an operator."""

    process: str
    """Different for each server, and after each of its starts."""
    mark: str
    """Identifies the server since its last start or promotion; see `_mark`."""
    home: str
    """The mark in its key `holdfast:home`: another one if it restarted since; "" if it is new."""
    longest_ttl: float
    """The greatest `longest_ttl` of the clients that used it, in seconds."""
    left: float
    """Seconds that are left of a quarantine that has begun."""
    keys: int
    """How many keys of locks it has, counting those that outlive their lock by an hour."""
    settings: dict[str, str]
    """Those of `SETTINGS` that it reports."""


SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy")
"""What the servers of one deployment are expected to have in common."""

_PAGE = "1000"


def inspect(node: str, user: str) -> Greeting[Inspected]:
    """Find out what a server knows of its locks and of itself; change nothing.

    Raises:
        NodeUnavailable: it is not a primary; or does not answer as it should.
        ConfigurationError: no lock can be kept there, or it denies a command.
    """
    judge = misplaced((yield ("HELLO",)), node)
    if judge is not None:
        raise judge
    facts = yield from _ask_facts(node, user)
    home = yield ("GET", HOME)
    left = yield ("PTTL", QUARANTINE)
    if isinstance(home, Exception) or isinstance(left, Exception):
        raise _refused(str(home if isinstance(home, Exception) else left), node, user)
    keys, cursor = 0, b"0"
    while True:
        page = yield ("SCAN", cursor, "MATCH", "holdfast:*", "COUNT", _PAGE)
        if isinstance(page, Exception):
            raise _refused(str(page), node, user)
        cursor, found = page
        keys += sum(key.decode(errors="replace") not in {HOME, QUARANTINE} for key in found)
        if cursor == b"0":
            break
    settings = {}
    for name in SETTINGS:
        answer = yield ("CONFIG", "GET", name)
        if isinstance(answer, list) and answer[1:]:
            settings[name] = answer[1].decode(errors="replace")
    mark, _, longest = (home or b"").decode(errors="replace").partition(" ")
    return Inspected(
        process=facts["run_id"],
        mark=_mark(facts),
        home=mark,
        longest_ttl=int(longest or 0) / 1000,
        left=max(0, left) / 1000,
        keys=keys,
        settings=settings,
    )


def declare_fit(node: str, user: str, mark: str, longest_ttl: float) -> Greeting[None]:
    """End the quarantine of the server that has this `mark`, and have none begin now.

    Raises:
        NodeUnavailable, ConfigurationError: the server refuses.
    """
    if _mark((yield from _ask_facts(node, user))) != mark:
        raise NodeUnavailable(f"{node} was restarted or replaced meanwhile: try again", node=node)
    arguments = mark, str(round(longest_ttl * 1000)), _SERIAL
    answer = yield ("EVAL", DECLARE_FIT.text, "2", HOME, QUARANTINE, *arguments)
    if isinstance(answer, Exception):
        raise _refused(str(answer), node, user)
    opened(answer, _SERIAL)


def _ask_facts(node: str, user: str) -> Greeting[dict[str, str]]:
    facts = _facts((yield ("INFO", "server")), node, user)
    facts |= _facts((yield ("INFO", "replication")), node, user)
    if facts.get("role") != "master":
        raise NodeUnavailable(f"{node} is not a primary: the failover is under way", node=node)
    return facts


def _mark(facts: dict[str, str]) -> str:
    """Make the mark of a server.

    The first part changes with each start; the second part, if it was a replica, with each
    promotion. The replication id alone would do, but it also changes without need.
    """
    return f"{facts['run_id']}:{facts.get('master_replid2', _NEVER)}"


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
