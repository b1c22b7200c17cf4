"""What a server's error replies mean to a lock, and who has to act.

An error reply is an answer: the request was not carried out. It becomes `ConfigurationError` when
the same request will never work, `NodeUnavailable` when the server cannot serve it now.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.port import Quarantined
from holdfast.wire.addresses import SENTINEL_FORM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.keys import Keys
    from holdfast.wire.packing import Command

_NEVER = {
    "WRONGTYPE": "the key is in use for something else: give the lock another name or key=",
    "NOAUTH": "it wants a password: write redis://user:password@host:port",
    "WRONGPASS": "it refuses this user and password: write redis://user:password@host:port",
    "READONLY": "it is a replica: give the address of its primary",
    "MOVED": "it is a node of a cluster: write redis+cluster://host:port",
    "CROSSSLOT": "it is a node of a cluster: write redis+cluster://host:port",
    "DENIED": "it is in protected mode, and takes connections from its own host only: set a "
    "password (requirepass), or run CONFIG SET protected-mode no there",
    "unknown command": "it cannot run scripts: connect to the server itself, not to a proxy",
}
_NOT_NOW = {
    "OOM": "it is out of memory: raise maxmemory or remove keys",
    "LOADING": "it is still loading its data: try again when it has",
    "max number of clients": "it has too many connections: raise maxclients, or close some",
    "BUSY": "it is busy with somebody's script",
    "MASTERDOWN": "it has lost its primary",
    "NOREPLICAS": "too few of its replicas are connected for it to accept writes",
    "MISCONF": "it cannot save its data and therefore refuses writes",
    "CLUSTERDOWN": "its cluster is down",
}
_BEFORE_RUNNING = re.compile(
    r"(?:MOVED|ASK) \d+ \S*:\d+$|TRYAGAIN Multiple keys|CROSSSLOT Keys in request|NOAUTH Auth"
    r"|CLUSTERDOWN (?:The cluster|Hash slot)|READONLY You can't|OOM command not allowed|NOPERM"
    r"|(?:BUSY|LOADING) \w+ is (?:busy|loading)|MASTERDOWN Link with|NOREPLICAS Not enough"
    r"|MISCONF "
)
"""How a server begins when it refuses to run a script; the first word alone may be a script's."""
_QUARANTINE = re.compile(r"QUARANTINE (\d+)")
_DENIED = re.compile(
    r"^NOPERM|ACL failure in script|user executing the script can't"
    r"|has no permissions to (?:run|access)"  # what ACL DRYRUN says
)
_COMMAND = re.compile(r"run the '(\w+)")
_CHANNEL = re.compile(r"\bchannels?\b")
_DATABASE = re.compile(r"access database")
_KEY = re.compile(r"access (?:(?:a|one of the|at least one of the) keys?\b|the '.*' key)")

CHANNEL = "holdfast:push:0"
"""A channel such as locks use, that no client has."""


def is_doubtful(reply: object) -> bool:
    """Whether it is an answer that a server may give because another has taken its place."""
    bad = isinstance(reply, (NodeUnavailable, OutcomeUnknown))
    return bad and not isinstance(reply, Quarantined)


def refusal(text: str, node: str, *, moves: bool = False) -> HoldfastError:
    """Turn an error reply into the error to raise.

    `moves`: another server may take this one's place, so that what it says of itself may pass.
    """
    quarantine = _QUARANTINE.search(text)
    if quarantine is not None:
        return quarantined(node, int(quarantine[1]) / 1000)
    if moves and "READONLY" in text:
        return NodeUnavailable(f"{node} refused: it is not the primary now ({text})", node=node)
    said = text.partition(". ")[0]  # the rest is advice, which protected mode gives at length
    for sign, advice in _NEVER.items():
        if sign in text:
            return ConfigurationError(f"{node} refused: {advice} ({said})")
    for sign, advice in _NOT_NOW.items():
        if sign in text:
            return NodeUnavailable(f"{node} refused: {advice} ({said})", node=node)
    return NodeUnavailable(f"{node} refused: {text}", node=node)


def quarantined(node: str, seconds: float) -> Quarantined:
    """Say that a server grants no lock for `seconds` more, and why."""
    message = (
        f"{node} is new, has restarted or was promoted, and may not know all locks that are held: "
        f"it grants none for another {math.ceil(seconds)} s"
    )
    return Quarantined(message, node=node, seconds=seconds)


def is_turned_away(text: str) -> bool:
    """Whether the server refuses the connection, and not only a command on it."""
    return text.startswith("DENIED") or "max number of clients" in text


def is_of_server(text: str) -> bool:
    """Whether an error reply says that a script was not run, rather than how it ended."""
    if "user_script" in text:
        return False
    known = _BEFORE_RUNNING.match(text) is not None
    return known or "unknown command" in text or is_denial(text)


def is_denial(text: str) -> bool:
    """Whether the server's access rules are what refused."""
    return _DENIED.search(text) is not None


def probes(keys: Keys | Sequence[bytes]) -> list[Command]:
    """List commands that change nothing, one for each thing holdfast must be allowed to do."""
    absent = keys[0] + b":absent"
    return [
        ("EVALSHA", "0" * 40, "0"),
        ("EVAL", "return 0", "no number"),  # refused before the server keeps the script
        ("TIME",),
        *((verb, key) for key in keys for verb in ("EXISTS", "GET", "PTTL")),
        ("DEL", absent),
        ("PEXPIRE", absent, "1"),
        ("SET", absent, "", "XX", "PX", "1", "GET"),
        ("ZADD", absent, "XX", "1", ""),
        ("ZREM", absent, ""),
        ("ZRANGE", absent, "0", "0"),
        ("PUBLISH", CHANNEL, ""),
    ]


def probes_of_step(keys: Keys) -> list[Command]:
    """List the same for what an atomic operation with these keys must be allowed to do."""
    spare = keys.spare
    return [
        ("EVALSHA", "0" * 40, "0"),
        ("EVAL", "return 0", "no number"),
        *((verb, key) for key in keys for verb in ("EXISTS", "GET", "PTTL")),
        ("INCRBY", spare, "no number"),
        ("DECRBY", spare, "no number"),
        ("SET", spare, "", "XX"),
        ("PEXPIRE", spare, "1"),
        ("DEL", spare),
        ("PING",),
    ]


def probes_of_look(keys: Keys) -> list[Command]:
    """List the same for who only looks at a lock with these keys."""
    return [
        ("EVALSHA", "0" * 40, "0"),
        ("EVAL", "return 0", "no number"),
        ("TIME",),
        *((verb, key) for key in keys for verb in ("GET", "PTTL")),
        ("ZRANGE", keys[-1], "0", "0"),
    ]


def further_probes(deployment: str) -> list[Command]:
    """List what is needed besides: to wait, and where another server may take this one's place.

    In an order in which they can be sent: nothing else may follow them on the same connection.
    """
    if deployment == "cluster":
        sharded = [("SPUBLISH", CHANNEL, ""), ("SUNSUBSCRIBE", CHANNEL), ("SSUBSCRIBE", CHANNEL)]
        return [("PING",), *sharded]
    replicated: list[Command] = [("INFO", "server"), ("WAIT", "0", "1")]
    alone = deployment != "sentinel"
    return [*([] if alone else replicated), ("PING",), ("SUBSCRIBE", CHANNEL)]


def denial(
    text: str, answers: Sequence[object], keys: Keys | Sequence[bytes], node: str, user: str
) -> HoldfastError:
    """Say what is missing, from the answers to the probes."""
    rules = " ".join(missing_rules([text, *map(str, answers)], keys))
    return ConfigurationError(
        f"{node} denies what is needed: run ACL SETUSER {user} {rules} ({text})"
    )


def missing_rules(answers: Sequence[str], keys: Keys | Sequence[bytes]) -> list[str]:
    """Name the exact access rules that are missing, from answers to commands or to ACL DRYRUN."""
    refused = [answer for answer in answers if is_denial(answer)]
    commands = {found[1].lower() for answer in refused if (found := _COMMAND.search(answer))}
    rules = [f"+{command}" for command in sorted(commands)]
    if any(_KEY.search(answer) for answer in refused):
        ours = all(key.startswith(b"holdfast:") for key in keys)
        rules += ["~holdfast:*"] if ours else [f"~{keys[0].decode(errors='replace')} ~holdfast:*"]
    if any(_CHANNEL.search(answer) for answer in refused):
        rules.append("&holdfast:*")
    if any(_DATABASE.search(answer) for answer in refused):
        rules.append("db=0")  # to any other one there would be no connection at all
    return rules


def unheard(text: str, node: str, user: str, *, sharded: bool = False) -> HoldfastError:
    """Say why the server does not let us listen: for good, or just now."""
    if is_denial(text):
        needed = "+subscribe +publish"
        if sharded:
            needed = "+ssubscribe +sunsubscribe +spublish +cluster|myid"
        advice = f"run ACL SETUSER {user} {needed} +ping &holdfast:*"
    elif "unknown command" in text:
        other = "use Redis 7 or later" if sharded else "connect to the server itself"
        advice = f'{other}, or give the client wait="poll"'
    else:
        return refusal(text, node)
    return ConfigurationError(f"{node} does not let us listen for our turn: {advice} ({text})")


def misplaced(hello: object, node: str) -> ConfigurationError | None:
    """Judge from the answer to HELLO whether a lock may live on this server."""
    if not isinstance(hello, list):
        return None
    facts = dict(zip(hello[::2], hello[1::2], strict=False))
    if facts.get(b"mode") == b"sentinel":
        return ConfigurationError(f"{node} is a Sentinel: write {SENTINEL_FORM}")
    if facts.get(b"mode") == b"cluster":
        return ConfigurationError(f"{node} refused: {_NEVER['MOVED']}")
    if facts.get(b"role") in (b"replica", b"slave"):
        return ConfigurationError(f"{node} refused: {_NEVER['READONLY']}")
    return None
