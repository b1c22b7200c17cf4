"""What a server's error replies mean to a lock, and who has to act.

An error reply is an answer: the request was not carried out. It becomes `ConfigurationError` when
the same request will never work, `NodeUnavailable` when the server cannot serve it now.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEVER = {
    "WRONGTYPE": "the key is in use for something else: give the lock another name or key=",
    "NOAUTH": "it wants a password: write redis://user:password@host:port",
    "WRONGPASS": "it refuses this user and password: write redis://user:password@host:port",
    "READONLY": "it is a replica: give the address of its primary",
    "MOVED": "it is a node of a cluster: write redis+cluster://host:port",
    "CROSSSLOT": "it is a node of a cluster: write redis+cluster://host:port",
    "unknown command": "it cannot run scripts: connect to the server itself, not to a proxy",
}
_NOT_NOW = {
    "OOM": "it is out of memory: raise maxmemory or remove keys",
    "LOADING": "it is still loading its data",
    "BUSY": "it is busy with somebody's script",
    "MASTERDOWN": "it has lost its primary",
    "NOREPLICAS": "too few of its replicas are connected for it to accept writes",
    "MISCONF": "it cannot save its data and therefore refuses writes",
    "CLUSTERDOWN": "its cluster is down",
}
_DENIED = re.compile(r"^NOPERM|ACL failure in script|user executing the script can't")
_COMMAND = re.compile(r"run the '(\w+)")
_CHANNEL = re.compile(r"\bchannels?\b")
_KEY = re.compile(r"access (?:a|one of the|at least one of the) keys?\b")


def refusal(text: str, node: str) -> HoldfastError:
    """Turn an error reply into the error to raise."""
    for sign, advice in _NEVER.items():
        if sign in text:
            return ConfigurationError(f"{node} refused: {advice} ({text})")
    for sign, advice in _NOT_NOW.items():
        if sign in text:
            return NodeUnavailable(f"{node} refused: {advice} ({text})", node=node)
    return NodeUnavailable(f"{node} refused: {text}", node=node)


def is_denial(text: str) -> bool:
    """Whether the server's access rules are what refused."""
    return _DENIED.search(text) is not None


def probes(keys: Sequence[bytes]) -> list[tuple[bytes | str | int, ...]]:
    """List commands that change nothing, one for each thing holdfast must be allowed to do."""
    absent = keys[0] + b":absent"
    return [
        ("EVALSHA", "0" * 40, 0),
        ("EVAL", "return 0", 0),
        ("TIME",),
        *((verb, key) for key in keys for verb in ("EXISTS", "GET", "PTTL")),
        ("DEL", absent),
        ("PEXPIRE", absent, 1),
        ("SET", absent, "", "XX", "PX", 1, "GET"),
        ("ZADD", absent, "XX", 1, ""),
        ("ZREM", absent, ""),
        ("ZRANGE", absent, 0, 0),
        ("PUBLISH", "holdfast:push:0", ""),
    ]


def denial(
    text: str, answers: Sequence[object], keys: Sequence[bytes], node: str, user: str
) -> HoldfastError:
    """Name the exact access rules that are missing, from the answers to the probes."""
    refused = [answer for answer in (text, *map(str, answers)) if is_denial(answer)]
    commands = {found[1].lower() for answer in refused if (found := _COMMAND.search(answer))}
    rules = [f"+{command}" for command in sorted(commands)]
    if any(_KEY.search(answer) for answer in refused):
        ours = all(key.startswith(b"holdfast:") for key in keys)
        rules += ["~holdfast:*"] if ours else [f"~{keys[0].decode(errors='replace')} ~holdfast:*"]
    if any(_CHANNEL.search(answer) for answer in refused):
        rules.append("&holdfast:*")
    return ConfigurationError(
        f"{node} denies what a lock needs: run ACL SETUSER {user} {' '.join(rules)} ({text})"
    )


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
        return ConfigurationError(f"{node} is a Sentinel: give the address of its primary")
    if facts.get(b"mode") == b"cluster":
        return ConfigurationError(f"{node} refused: {_NEVER['MOVED']}")
    if facts.get(b"role") in (b"replica", b"slave"):
        return ConfigurationError(f"{node} refused: {_NEVER['READONLY']}")
    return None
