"""How error replies of a server become exceptions with advice.

An error reply means that the request was not executed. It becomes `ConfigurationError` if the same
request can never work, and `NodeUnavailable` if the server cannot serve it now.
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

_WITH_PASSWORD = "redis://user:password@host:port"  # noqa: S105 - not a password
_NEVER = {
    "WRONGTYPE": "the key is in use for something else: give the lock another name or key=",
    "NOAUTH": f"it requires a password: write {_WITH_PASSWORD}",
    "READONLY": "it is a replica: give the address of its primary",
    "MOVED": "it is a node of a cluster: write redis+cluster://host:port",
    "CROSSSLOT": "it is a node of a cluster: write redis+cluster://host:port",
    "DENIED": "it is in protected mode, and accepts connections from its own host only: set a "
    "password (requirepass), or run CONFIG SET protected-mode no there",
    "unknown command": "it cannot run scripts: connect to the server itself, not to a proxy",
}
_NOT_NOW = {
    "OOM": "it is out of memory: raise maxmemory or remove keys",
    "LOADING": "it is still loading its data: try again when it has",
    "max number of clients": "it has too many connections: raise maxclients, or close some",
    "BUSY": "it is busy running a script: try again later, or run SCRIPT KILL there",
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
"""How the reply begins if the server refuses to run a script. The first word alone is not enough:
a script of the user may return it."""
_QUARANTINE = re.compile(r"QUARANTINE (\d+)")
_DENIED = re.compile(
    r"^NOPERM|ACL failure in script|user executing the script can't"
    r"|has no permissions to (?:run|access)"  # from ACL DRYRUN
)
_COMMAND = re.compile(r"run the '(\w+)")
_CHANNEL = re.compile(r"\bchannels?\b")
_DATABASE = re.compile(r"access database")
_KEY = re.compile(r"access (?:(?:a|one of the|at least one of the) keys?\b|the '.*' key)")

CHANNEL = "holdfast:push:0"
"""A channel with the prefix that locks use. No client subscribes to it."""


def suggests_failover(reply: object) -> bool:
    """Whether a server may give this reply because another server has replaced it."""
    bad = isinstance(reply, (NodeUnavailable, OutcomeUnknown))
    return bad and not isinstance(reply, Quarantined)


def error_for_reply(text: str, node: str, *, can_fail_over: bool = False) -> HoldfastError:
    """Convert an error reply to the exception to raise.

    `can_fail_over`: another server may replace this one, so READONLY is temporary.
    """
    quarantine = _QUARANTINE.search(text)
    if quarantine is not None:
        return quarantined(node, int(quarantine[1]) / 1000)
    if can_fail_over and "READONLY" in text:
        return NodeUnavailable(f"{node} refused: it is not the primary now ({text})", node=node)
    summary = text.partition(". ")[0]  # without the long advice of protected mode
    if "WRONGPASS" in text:
        return ConfigurationError(
            f"{node} refuses this user and password: write {_WITH_PASSWORD} ({summary})"
        )
    for sign, advice in _NEVER.items():
        if sign in text:
            return ConfigurationError(f"{node} refused: {advice} ({summary})")
    for sign, advice in _NOT_NOW.items():
        if sign in text:
            return NodeUnavailable(f"{node} refused: {advice} ({summary})", node=node)
    return NodeUnavailable(f"{node} refused: {text}", node=node)


def quarantined(node: str, seconds: float) -> Quarantined:
    """Return the error for a server that grants no lock for `seconds` more."""
    message = (
        f"{node} is new, has restarted or was promoted, and may have lost locks that are still "
        f"held: it grants none for another {math.ceil(seconds)} s"
    )
    return Quarantined(message, node=node, seconds=seconds)


def refuses_connection(text: str) -> bool:
    """Whether the server refuses the connection, rather than a command on it."""
    return text.startswith("DENIED") or "max number of clients" in text


def is_server_error(text: str) -> bool:
    """Whether an error reply means that a script was not run, rather than that it failed."""
    if "user_script" in text:
        return False
    known = _BEFORE_RUNNING.match(text) is not None
    return known or "unknown command" in text or is_acl_denial(text)


def is_acl_denial(text: str) -> bool:
    """Whether the ACL of the server denied the request."""
    return _DENIED.search(text) is not None


def denied_command(text: str) -> str:
    """Return the command that the ACL of the server denied, in lower case; "" if there is none."""
    found = _COMMAND.search(text) if is_acl_denial(text) else None
    return found[1].lower() if found else ""


def lock_probes(keys: Keys | Sequence[bytes]) -> list[Command]:
    """Return commands without effect, one for each permission that a lock needs."""
    absent = keys[0] + b":absent"
    return [
        ("EVALSHA", "0" * 40, "0"),
        ("EVAL", "return 0", "no number"),  # rejected before the server caches the script
        ("TIME",),
        *((verb, key) for key in keys for verb in ("EXISTS", "GET", "PTTL")),
        ("DEL", absent),
        ("PEXPIRE", absent, "1"),
        ("INCRBY", absent, "no number"),
        ("SET", absent, "", "XX", "PX", "1", "GET"),
        ("ZADD", absent, "XX", "1", ""),
        ("ZREM", absent, ""),
        ("ZRANGE", absent, "0", "0"),
        ("PUBLISH", CHANNEL, ""),
    ]


def atomic_probes(keys: Keys) -> list[Command]:
    """Return commands without effect, one for each permission that an atomic operation needs."""
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


def read_probes(keys: Keys) -> list[Command]:
    """Return commands without effect, one for each permission that reading a lock needs."""
    return [
        ("EVALSHA", "0" * 40, "0"),
        ("EVAL", "return 0", "no number"),
        ("TIME",),
        *((verb, key) for key in keys for verb in ("GET", "PTTL")),
        ("ZRANGE", keys[-1], "0", "0"),
    ]


def deployment_probes(deployment: str) -> list[Command]:
    """Return probes for waiting, and for the kind of deployment.

    They can be sent in this order. Nothing else can follow them on the same connection.
    """
    if deployment == "cluster":
        sharded = [("SPUBLISH", CHANNEL, ""), ("SUNSUBSCRIBE", CHANNEL), ("SSUBSCRIBE", CHANNEL)]
        return [("PING",), *sharded]
    replicated: list[Command] = [("INFO", "server"), ("WAIT", "0", "1")]
    alone = deployment != "sentinel"
    return [*([] if alone else replicated), ("PING",), ("SUBSCRIBE", CHANNEL)]


def acl_error(
    text: str, replies: Sequence[object], keys: Keys | Sequence[bytes], node: str, user: str
) -> HoldfastError:
    """Return the error that names the missing permissions, from the replies to the probes."""
    rules = " ".join(missing_rules([text, *map(str, replies)], keys))
    return ConfigurationError(
        f"{node} denies a permission that holdfast needs: run ACL SETUSER {user} {rules} ({text})"
    )


def missing_rules(replies: Sequence[str], keys: Keys | Sequence[bytes]) -> list[str]:
    """Return the missing ACL rules, from replies to the probes or to ACL DRYRUN."""
    refused = [reply for reply in replies if is_acl_denial(reply)]
    commands = {found[1].lower() for reply in refused if (found := _COMMAND.search(reply))}
    rules = [f"+{command}" for command in sorted(commands)]
    if any(_KEY.search(reply) for reply in refused):
        ours = all(key.startswith(b"holdfast:") for key in keys)
        rules += ["~holdfast:*"] if ours else [f"~{keys[0].decode(errors='replace')} ~holdfast:*"]
    if any(_CHANNEL.search(reply) for reply in refused):
        rules.append("&holdfast:*")
    if any(_DATABASE.search(reply) for reply in refused):
        rules.append("db=0")  # without access to another database, SELECT would have failed
    return rules


def subscribe_error(text: str, node: str, user: str, *, sharded: bool = False) -> HoldfastError:
    """Return the error for a server that rejects the subscription of a waiter."""
    if is_acl_denial(text):
        needed = "+subscribe +publish"
        if sharded:
            needed = "+ssubscribe +sunsubscribe +spublish +cluster|myid"
        advice = f"run ACL SETUSER {user} {needed} +ping &holdfast:*"
    elif "unknown command" in text:
        other = "use Redis 7 or later" if sharded else "connect to the server itself"
        advice = f'{other}, or give the client wait="poll"'
    else:
        return error_for_reply(text, node)
    return ConfigurationError(f"{node} refuses the subscription of a waiter: {advice} ({text})")


def wrong_role(hello: object, node: str) -> ConfigurationError | None:
    """Return the error for a server that cannot keep locks, from its reply to HELLO."""
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
