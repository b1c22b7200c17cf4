"""Asking servers what they are and how they are set. All questions are in this file.

Rules: nothing is changed. Where ACL DRYRUN is refused, the wire's own probes are sent: on keys that
do not exist, in forms that write nothing. A server that is silent costs `ANSWER` seconds, once, and
one that answers drop by drop `PATIENCE` in all: each is asked in a thread of its own, which is left
behind if need be. What is refused is remembered as refused, and the next question is asked.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import hiredis

from holdfast.doctor.facts import (
    HERE,
    Deployment,
    Kind,
    Member,
    Node,
    Sentinel,
    SlowCommand,
    TimeSample,
)
from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.wire.addresses import Addresses, addresses_in
from holdfast.wire.at_once import at_once_within
from holdfast.wire.clock import now
from holdfast.wire.given import from_url
from holdfast.wire.link import Link
from holdfast.wire.packing import pack
from holdfast.wire.refusals import (
    CHANNEL,
    further_probes,
    is_denial,
    missing_rules,
    probes,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.wire.packing import Command
    from holdfast.wire.target import ServerTarget

ANSWER = 2.0
"""Seconds to wait for one answer."""

PATIENCE = 15.0
"""Seconds for all that is asked of one server."""

SAMPLES, APART = 5, 0.05
"""How often a server's clock is read, and how many seconds apart."""

SETTINGS = (
    "acl-pubsub-default",
    "appendfsync",
    "appendonly",
    "client-output-buffer-limit",
    "maxclients",
    "maxmemory",
    "maxmemory-policy",
    "save",
    "slowlog-log-slower-than",
    "tcp-keepalive",
    "timeout",
)
SETTINGS_OF: dict[Kind, tuple[str, ...]] = {
    "sentinel": ("min-replicas-to-write", "min-replicas-max-lag"),
    "cluster": ("cluster-node-timeout", "cluster-replica-validity-factor"),
}
KEYS = (b"holdfast:{doctor}",)
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_REFUSES_ALL = ("NOAUTH ", "BUSY ", "max number of clients")
"""Signs of refusals after which no other question needs to be asked."""

T = TypeVar("T", Node, Sentinel)


def gather(urls: Sequence[str], *, ttl: float) -> Deployment:
    """Find out all that can be found out about the servers at these URLs.

    Raises:
        ConfigurationError: they are not the URLs of a deployment.
    """
    several = [addresses_in(url) for url in urls]
    here = time.time() - now()
    if not any(several):
        kind: Kind = "single" if len(urls) == 1 else "quorum"
        return Deployment(kind, ttl, _nodes(urls, kind), clock_here=here)
    addresses = several[0]
    if len(urls) > 1 or addresses is None:
        raise ConfigurationError(
            "give one URL of sentinels or of a cluster, or one URL for each node of a quorum"
        )
    if addresses.kind == "cluster":
        return Deployment("cluster", ttl, _cluster(addresses), clock_here=here)
    sentinels = _all_sentinels(addresses)
    nodes = _nodes((addresses.url_of(*at) for at in _served_by(sentinels)), "sentinel")
    return Deployment("sentinel", ttl, nodes, sentinels, addresses.service, here)


# ---- one server


class Refused(NamedTuple):
    """An answer that says no."""

    text: str


class Questions:
    """A conversation with one server, with an end."""

    def __init__(self, target: ServerTarget) -> None:
        self.target = target
        self.refused: dict[str, str] = {}
        """What was asked by `try_asking` in vain, and what the server said."""
        self._end = now() + PATIENCE
        self._link = Link(target, ANSWER, judged=False)

    def close(self) -> None:
        """Hang up."""
        self._link.close()

    def ask(self, *words: bytes | str) -> Any:  # noqa: ANN401 - any answer
        """Return what the server answers, as text where it is text, or that it refused.

        Raises:
            HoldfastError: it does not answer, or refuses to answer anything.
        """
        left = min(ANSWER, self._end - now())
        if left <= 0:
            raise self._silence(f"was asked for {PATIENCE:g} s and still not done answering")
        question = " ".join(str(word) for word in words[:2])
        try:
            answer = self._link.exchange(pack(words), left)
        except (BlockingIOError, TimeoutError):
            raise self._silence(f"did not answer {question} within {left:.1f} s") from None
        except (OSError, hiredis.HiredisError) as error:
            raise self._silence(f"broke off when asked {question}: {error}") from None
        if not isinstance(answer, hiredis.ReplyError):
            return _text(answer)
        if any(sign in str(answer) for sign in _REFUSES_ALL):
            raise refusal(str(answer), self.target.node)
        return Refused(str(answer))

    def try_asking(self, *words: bytes | str) -> Any:  # noqa: ANN401 - any answer
        """As `ask`, but None if it is refused, which is remembered."""
        answer = self.ask(*words)
        if isinstance(answer, Refused):
            self.refused[" ".join(map(str, words[:2]))] = answer.text
            return None
        return answer

    def _silence(self, what: str) -> NodeUnavailable:
        return NodeUnavailable(f"{self.target.node} {what}", node=self.target.node)


def _learn_node(node: Node, questions: Questions, kind: Kind) -> Node:
    node = replace(
        node,
        hello=_pairs(questions.ask("HELLO")),
        info=_fields(questions.try_asking("INFO")),
        refused=questions.refused,
    )
    if node.mode == "sentinel":
        return node
    node = replace(
        node,
        config=_settings(questions, kind),
        times=_read_clock(questions),
        slow=_slow_log(questions),
        engines=_engines(questions),
    )
    if kind == "cluster" and node.mode == "cluster":
        node = replace(
            node,
            cluster=_fields(questions.try_asking("CLUSTER", "INFO")),
            members=_members(questions.try_asking("CLUSTER", "NODES")),
        )
    unknown_commands, rules = _access(questions, kind, all_channels=_gives_all_channels(node))
    return replace(node, unknown_commands=unknown_commands, missing_rules=rules)


def _learn_sentinel(sentinel: Sentinel, questions: Questions, service: str) -> Sentinel:
    sentinel = replace(sentinel, mode=_pairs(questions.ask("HELLO")).get("mode", ""))
    primary = questions.ask("SENTINEL", "MASTER", service)
    if isinstance(primary, Refused):
        return replace(sentinel, refusal=primary.text)
    check = questions.ask("SENTINEL", "CKQUORUM", service)
    replicas = questions.try_asking("SENTINEL", "REPLICAS", service) or []
    others = questions.try_asking("SENTINEL", "SENTINELS", service) or []
    return replace(
        sentinel,
        id=questions.try_asking("SENTINEL", "MYID") or "",
        primary=_pairs(primary),
        replicas=tuple(_address(_pairs(each)) for each in replicas),
        others=tuple((_pairs(each).get("runid", ""), *_address(_pairs(each))) for each in others),
        no_quorum=check.text if isinstance(check, Refused) else "",
    )


def _settings(questions: Questions, kind: Kind) -> dict[str, str]:
    names = (*SETTINGS, *SETTINGS_OF.get(kind, ()))
    found = _pairs(questions.try_asking("CONFIG", "GET", *names))
    if "wrong number of arguments" in questions.refused.get("CONFIG GET", ""):
        # Before 7.0 they have to be asked for one by one.
        del questions.refused["CONFIG GET"]
        for name in names:
            found |= _pairs(questions.try_asking("CONFIG", "GET", name))
    if "CONFIG GET" not in questions.refused and not found.keys() >= set(names):
        absent = ", ".join(name for name in names if name not in found)
        questions.refused["CONFIG GET"] = f"it does not tell {absent}"
    return found


def _read_clock(questions: Questions) -> tuple[TimeSample, ...]:
    samples = []
    for index in range(SAMPLES):
        if index:
            time.sleep(APART)
        sent = now()
        told = questions.ask("TIME")
        if isinstance(told, Refused):  # it is among the rights that are looked at below
            break
        samples.append(TimeSample(sent, now(), int(told[0]) + int(told[1]) / 1_000_000))
    return tuple(samples)


def _slow_log(questions: Questions) -> tuple[SlowCommand, ...]:
    entries = questions.try_asking("SLOWLOG", "GET", "128")
    return tuple(SlowCommand(each[3][0], each[2] / 1_000_000) for each in entries or ())


def _engines(questions: Questions) -> frozenset[str] | None:
    answer = questions.ask("FUNCTION", "STATS")
    if isinstance(answer, Refused):
        # Servers without functions have Lua built in; where it is denied, nobody misses much.
        return None
    found = dict(zip(answer[::2], answer[1::2], strict=False)).get("engines") or []
    return frozenset(name.upper() for name in found[::2])


def _gives_all_channels(node: Node) -> bool:
    """Whether a new user may use every channel: always in Redis 6, later by a setting."""
    said = node.config.get("acl-pubsub-default")
    return said == "allchannels" if said else node.version.startswith("redis 6.")


def _access(
    questions: Questions, kind: Kind, *, all_channels: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Find out which commands the server does not know, and which rules the user lacks.

    A user with `all_channels` cannot be given a single channel: the server refuses the whole rule.
    """
    needed: list[Command] = [*probes(KEYS), *further_probes(kind)]
    user = questions.target.user
    first = questions.ask("ACL", "DRYRUN", user, *needed[0])
    dry = not isinstance(first, Refused) or first.text.startswith("ERR Command ")  # it is unknown
    unknown: list[str] = []
    answers: list[str] = []
    allowed: list[bytes | str | int] = []
    for words in needed:
        answer = questions.ask("ACL", "DRYRUN", user, *words) if dry else questions.ask(*words)
        said = answer.text if isinstance(answer, Refused) else str(answer) if dry else "OK"
        if "unknown command" in said or "not found" in said:
            unknown.append(str(words[0]))
        elif not is_denial(said):
            allowed += words
        answers.append(said)
    rules = missing_rules(answers, KEYS)
    # Keys and channels are judged after the command: where none was allowed, they were not judged.
    if rules and not {*KEYS} & {*allowed}:
        rules.append("~holdfast:*")
    if rules and CHANNEL not in allowed and not all_channels:
        rules.append("&holdfast:*")
    return tuple(dict.fromkeys(unknown)), tuple(dict.fromkeys(rules))


# ---- several servers


def _nodes(urls: Iterable[str], kind: Kind) -> tuple[Node, ...]:
    targets = [from_url(url) for url in urls]
    blanks = [Node(each.node, each.user, _host(each)) for each in targets]
    return _all_at_once(targets, blanks, partial(_learn_node, kind=kind))


def _sentinels(urls: Iterable[str], service: str) -> tuple[Sentinel, ...]:
    targets = [from_url(url) for url in urls]
    blanks = [Sentinel(each.node, _host(each)) for each in targets]
    return _all_at_once(targets, blanks, partial(_learn_sentinel, service=service))


def _all_at_once(
    targets: Sequence[ServerTarget], blanks: Sequence[T], learn: Callable[[T, Questions], T]
) -> tuple[T, ...]:
    """Fill in the blanks, each in a thread; one that takes too long is left behind."""
    late = f"took more than {PATIENCE:g} s"
    works = [
        partial(_converse, target, blank, learn)
        for target, blank in zip(targets, blanks, strict=True)
    ]
    return tuple(
        each or replace(blank, failure=f"{target.node} {late}")
        for each, target, blank in zip(
            at_once_within(works, PATIENCE + ANSWER), targets, blanks, strict=True
        )
    )


def _converse(target: ServerTarget, blank: T, learn: Callable[[T, Questions], T]) -> T:
    try:
        questions = Questions(target)
        try:
            return learn(blank, questions)
        finally:
            questions.close()
    except HoldfastError as error:
        return replace(blank, failure=str(error))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return replace(blank, failure=f"{target.node} answers as no server does: {error!r}")


def _cluster(addresses: Addresses) -> tuple[Node, ...]:
    """Examine the nodes that were given, and all that these know."""
    first = _nodes((addresses.url_of(*seed) for seed in addresses.seeds), "cluster")
    found: dict[str, tuple[str, int]] = {}
    for node in first:
        found |= {each.id: each.address for each in node.members if each.runs and each.address[0]}
    for node in first:
        found.pop(_own_id(node), None)
    nodes = (*first, *_nodes((addresses.url_of(*each) for each in found.values()), "cluster"))
    # One of them may have been given under two names.
    return tuple({_own_id(node) or node.name: node for node in nodes}.values())


def _own_id(node: Node) -> str:
    return next((each.id for each in node.members if "myself" in each.flags), "")


def _all_sentinels(addresses: Addresses) -> tuple[Sentinel, ...]:
    """Ask the sentinels that were given, and all that these know."""
    service = addresses.service
    first = _sentinels((addresses.sentinel_url_of(*seed) for seed in addresses.seeds), service)
    found = {id_: (host, port) for each in first for id_, host, port in each.others}
    for each in first:
        found.pop(each.id, None)
    return (*first, *_sentinels((addresses.sentinel_url_of(*at) for at in found.values()), service))


def _served_by(sentinels: Sequence[Sentinel]) -> list[tuple[str, int]]:
    """The primary that most of them name, and its replicas."""
    named = Counter(each.address for each in sentinels if each.address)
    if not named:
        return []
    primary = named.most_common(1)[0][0]
    replicas = [at for each in sentinels if each.address == primary for at in each.replicas]
    return [each for each in dict.fromkeys([primary, *replicas]) if each]


# ---- reading answers


def _host(target: ServerTarget) -> str:
    host = str(target.settings.get("host", "localhost" if "path" not in target.settings else HERE))
    return HERE if host in _LOOPBACK else host


def _text(answer: object) -> Any:  # noqa: ANN401 - any answer
    if isinstance(answer, bytes):
        return answer.decode(errors="replace")
    return [_text(each) for each in answer] if isinstance(answer, list) else answer


def _pairs(answer: object) -> dict[str, str]:
    """Read a list of names and values."""
    if not isinstance(answer, list):
        return {}
    pairs = zip(answer[::2], answer[1::2], strict=False)
    return {str(name): str(value) for name, value in pairs}


def _fields(text: str | None) -> dict[str, str]:
    """Read lines of `name:value`."""
    lines = (line.partition(":") for line in (text or "").splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in lines if colon}


def _address(told: dict[str, str]) -> tuple[str, int]:
    return told["ip"], int(told["port"])


def _members(text: str | None) -> tuple[Member, ...]:
    """Read what CLUSTER NODES answers."""
    members = []
    for line in (text or "").splitlines():
        id_, address, flags, primary, _, _, _, _, *slots = line.split()
        host, _, port = address.partition("@")[0].rpartition(":")
        whose = "" if primary == "-" else primary
        kept = tuple(each for each in slots if not each.startswith("["))
        members.append(
            Member(id_, (host, int(port or 0)), frozenset(flags.split(",")), whose, kept)
        )
    return tuple(members)
