"""The immutable description of a lock: its settings, checked, and all that follows from them.

What can be computed once a lock is computed here, so that acquiring computes nothing.
"""

from __future__ import annotations

import math
import re
from binascii import crc_hqx
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import TYPE_CHECKING, TypeGuard

from holdfast.core.duration import in_seconds
from holdfast.core.token import encode, suffix_of
from holdfast.errors import ConfigurationError
from holdfast.port import Keys
from holdfast.scripts import ACQUIRE, Script

if TYPE_CHECKING:
    from holdfast.core.duration import Duration

DRIFT = 0.01
"""How far the rates of the holder's and the server's clocks may differ."""

MARGIN = 0.001
"""Seconds by which a deadline is early, for the server's millisecond clock."""

RENEWALS_A_TTL = 3
"""A lease is renewed when one of so many parts of its time has passed; two remain for retries."""

WINDOW_LONGEST = 1.0  # as in the scripts
"""Seconds for which a lock is handed over to a waiter, at most: it has to be heard from by then."""

TOMBSTONE_MS = "60000"
"""How long a given-up token stays refused: longer than a request may be under way."""

LOST_TOMBSTONE = f"{TOMBSTONE_MS} lost"
"""The same for the release of a lost lease, which begins the lock delay."""

TTL_MIN, TTL_MAX = 0.01, 365 * 86_400.0
NAME_MAX_BYTES, NAMESPACE_MAX = 1024, 100
SLOTS = 16_384  # of every cluster
LABEL_MAX = 200
REPLICAS_MAX = 1000
_NAMED, _KEYED, _TAGGED, _ODD = (
    re.compile(form, re.DOTALL)
    for form in (
        rb"(holdfast:(?:in:[^{}:]+:)?\{.*)",
        rb"holdfast:key:\{(.*)\}",
        rb"holdfast:tag:(.*)",
        rb"holdfast:odd:\{\d+\}:(.*)",
    )
)
_NAME = re.compile(rb"holdfast:(?:in:([^{}:]+):)?\{(.+)\}", re.DOTALL)


GRACE = 0.1
"""Seconds after its timeout for which a caller still waits: for a reply that is on its way, or for
leaving the queue. More if the server's replies took longer."""

LEAST_WAIT = 0.25
"""Seconds that a request is given at least, however short the caller's timeout: a server that
works has to be able to answer."""


@dataclass(frozen=True)
class LockSpec:
    """One lock, as its user described it (first block) and as the core needs it (second)."""

    name: str
    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float  # infinite when there is no cap
    reentrant: bool
    owner: str | None
    fair: bool
    lock_delay: float
    replicas: int
    label: str | None

    prefix: bytes  # of its key, from the namespace
    keys: Keys  # of every script: lock, fence, queue, and an owner's holds
    suffix: str  # the end of every token: the label, the lock delay, and the owner
    settings: str  # what few locks have, as the scripts read it
    ttl_ms: str
    validity: float
    usable: float  # of that, how long an answer may take for the lease to be given
    renew_after: float
    first_due: float  # how long after the grant the renewer has something to do
    command_timeout: float
    longest_ttl: float  # that any lock may have here
    taking: Script = ACQUIRE  # or one that takes it only where it is needed
    asked: tuple[str, ...] = ()  # what that one wants to know besides

    def named(self, name: str) -> LockSpec:
        """The lock with another name and the same settings, which are not checked again.

        Raises:
            ConfigurationError: no lock can have this name.
        """
        lock_key = self.prefix + b"{" + _name("name", name) + b"}"
        keys = keys_of(lock_key, holds=self.owner is not None)
        keys.replicas = self.replicas
        fields = self.__dict__.copy()  # far cheaper than setting each of them
        fields.pop("kept_keys", None)
        fields["name"], fields["keys"] = str.__str__(name), keys
        spec = object.__new__(LockSpec)
        object.__setattr__(spec, "__dict__", fields)
        return spec

    def end_of_waiting(self, began_at: float, timeout: float | None) -> float:
        """When a caller that waits for `timeout` has its answer, even if no server replies.

        Until then the reply to a request under way is awaited. With a timeout of 0 the one request
        has a whole command timeout.
        """
        if timeout is None:
            return math.inf
        if not timeout:
            return began_at + self.command_timeout
        grace = max(GRACE, LEAST_WAIT - timeout)
        return began_at + timeout + min(self.command_timeout, grace)

    @cached_property
    def kept_keys(self) -> Keys:
        """The keys of renewing: without an owner, just those that exist while it is held."""
        if self.owner is not None:
            return self.keys
        keys = Keys(self.keys[:2])
        keys.replicas = self.keys.replicas
        return keys


def describe(  # noqa: PLR0913 - the settings of a lock, as the user gives them
    name: str,
    *,
    ttl: Duration,
    timeout: Duration | None,
    renew: bool,
    max_hold: Duration | None,
    reentrant: bool,
    owner: str | None,
    fair: bool,
    lock_delay: Duration,
    key: str | None,
    label: str | None,
    command_timeout: float,
    replicas: int = 0,
    longest_ttl: float = math.inf,
    min_validity: float = 0.0,
    quorum: bool = False,
    namespace: str = "",
) -> LockSpec:
    """Check a lock's settings and work out what follows from them.

    Raises:
        ConfigurationError: at the first setting that cannot work, saying what to write instead.
    """
    lock_key = lock_key_of(name, key, namespace)
    ttl, timeout = in_seconds(ttl), in_seconds(timeout)
    max_hold, lock_delay = in_seconds(max_hold), in_seconds(lock_delay)
    check_ttl(ttl, lock=name, longest=longest_ttl)
    check_timeout(timeout, lock=name)
    if max_hold is not None:
        if not is_number(max_hold) or not 0 < max_hold < math.inf:
            raise _wrong(f"max_hold={max_hold!r}: give seconds above 0, or None for no cap", name)
        if not renew:
            raise _wrong("max_hold caps renewal and means nothing with renew=False: drop it", name)
    if not is_number(lock_delay) or not 0 <= lock_delay <= TTL_MAX:
        raise _wrong(f"lock_delay={lock_delay!r}: give seconds, 0 for none", name)
    if type(replicas) is not int or not 0 <= replicas <= REPLICAS_MAX:
        raise _wrong(f"replicas={replicas!r}: give how many replicas there are, 0 for none", name)
    _check_text("label", label, name)
    _check_text("owner", owner, name)
    if owner is not None and reentrant:
        raise _wrong("an owner may take it again in any thread or task: drop reentrant=True", name)
    if quorum and owner is not None:
        raise _wrong("an owner's holds are kept by one server: drop owner=, or give one", name)
    if quorum and replicas:
        raise _wrong("a majority of servers needs no replicas: drop replicas=", name)
    keys = keys_of(lock_key, holds=owner is not None)
    keys.replicas = replicas
    group = "" if owner is None else f"&{encode(owner)}"
    delay_ms = int(to_ms(lock_delay))
    validity = validity_of(ttl)
    if not is_number(min_validity) or not 0 <= min_validity < validity:
        raise _wrong(f"min_validity={min_validity!r}: give seconds below the ttl of {ttl}", name)
    return LockSpec(
        name=str.__str__(name),
        ttl=float(ttl),
        timeout=timeout,
        renew=bool(renew),
        max_hold=math.inf if max_hold is None else float(max_hold),
        reentrant=bool(reentrant),
        owner=owner,
        fair=bool(fair),
        lock_delay=float(lock_delay),
        replicas=replicas,
        label=label,
        prefix=prefix_of(namespace),
        keys=keys,
        suffix=suffix_of(label, delay_ms, group),
        settings=settings_of(
            delay_ms,
            group,
            fair=fair and not quorum,
            guarded=longest_ttl < math.inf and not quorum,
        ),
        ttl_ms=to_ms(ttl),
        validity=validity,
        usable=validity - min_validity,
        renew_after=validity / RENEWALS_A_TTL,
        first_due=min(validity / RENEWALS_A_TTL, max_hold or math.inf) if renew else validity,
        command_timeout=min(command_timeout, ttl / (10 if quorum else 4)),
        longest_ttl=longest_ttl,
    )


def settings_of(delay_ms: int, group: str, *, fair: bool = True, guarded: bool = False) -> str:
    """Write what few locks have as the scripts read it; `group` is the end of an owner's tokens.

    `guarded`: the server may be replaced by another.
    """
    if fair and not delay_ms and not group and not guarded:
        return ""
    return f"{delay_ms} {'fair' if fair else 'barge'}{'+guard' if guarded else ''} {group}"


def delay_in(settings: str) -> int:
    """The delay (ms) that `settings_of` wrote."""
    return int(settings.partition(" ")[0] or 0)


def prefix_of(namespace: str) -> bytes:
    """How the keys of locks in a namespace begin, up to the {tag}.

    A namespace has no colon and no braces. So no two of them, nor a lock without one, share a key.
    """
    return b"holdfast:in:%b:" % namespace.encode() if namespace else b"holdfast:"


def checked_namespace(namespace: object) -> str:
    """Return a namespace, "" for none.

    Raises:
        ConfigurationError: it cannot be a namespace; the message says what to give instead.
    """
    if namespace is None:
        return ""
    if (
        isinstance(namespace, str)
        and 0 < len(namespace) <= NAMESPACE_MAX
        and namespace.isprintable()
        and not any(mark in namespace for mark in ":{}")
    ):
        return str.__str__(namespace)
    raise _wrong(
        f"namespace={namespace!r}: give 1 to {NAMESPACE_MAX} printable characters other than : {{ "
        "and }, e.g. 'shop.production'",
        "",
    )


def checked_longest_ttl(given: Duration) -> float:
    """Return a client's `longest_ttl` in seconds.

    Raises:
        ConfigurationError: no lock can have such a ttl.
    """
    seconds = in_seconds(given)
    if is_number(seconds) and 0 < seconds <= TTL_MAX:
        return float(seconds)
    raise ConfigurationError(
        f"longest_ttl={seconds!r}: give seconds above 0, up to {TTL_MAX:.0f}, e.g. 60.0"
    )


def lock_key_of(name: str, key: str | None = None, namespace: str = "") -> bytes:
    """The key of the lock with this name in its namespace, unless it is given its `key`.

    Raises:
        ConfigurationError: it is no name, or no key, saying what to give instead.
    """
    encoded = _name("name", name)
    return prefix_of(namespace) + b"{" + encoded + b"}" if key is None else _name("key", key)


def keys_of(lock_key: bytes, *, holds: bool = False) -> Keys:
    """The keys of the lock with this key, which share its hash slot; with its owner's holds."""
    siblings = siblings_of(lock_key)
    if holds:
        return Keys((lock_key, siblings + b":fence", siblings + b":queue", siblings + b":holds"))
    return Keys((lock_key, siblings + b":fence", siblings + b":queue"))


def siblings_of(key: bytes) -> bytes:
    """How keys begin that belong to this one, and share its hash slot."""
    if key.startswith(b"holdfast:{") and key.find(b"}") > len(b"holdfast:{"):
        return key  # made from a name, and with a tag
    if tag_of(key):
        return key if is_named(key) else b"holdfast:tag:" + key
    if b"}" in key:  # which would end the tag too soon
        return b"holdfast:odd:{%b}:%b" % (_tag_like(_hash(key)), key)
    return b"holdfast:key:{%b}" % key


def lock_key_in(key: bytes) -> bytes | None:
    """The lock that a key under `holdfast:` belongs to, by the lock's key; None if it is of none.

    `keys_of` the other way round: from the lock's own key, its counter, its queue or its holds.
    """
    siblings, colon, kind = key.rpartition(b":")
    if colon and kind in (b"fence", b"queue", b"holds"):
        for form in (_NAMED, _KEYED, _TAGGED, _ODD):
            found = form.fullmatch(siblings)
            if found and keys_of(found[1])[1] == siblings + b":fence":
                return found[1]
    return key if is_named(key) else None


def is_named(key: bytes) -> bool:
    """Whether a key begins as those that are made from the name of a lock."""
    return _NAMED.fullmatch(key) is not None


def name_in(lock_key: bytes) -> str | None:
    """The name of the lock with this key; None if it was given the key itself."""
    found = _NAME.fullmatch(lock_key)
    return found[2].decode("utf-8", "surrogateescape") if found else None


def namespace_in(lock_key: bytes) -> str:
    """The namespace of the lock with this key; "" for none."""
    found = _NAME.fullmatch(lock_key)
    return found[1].decode("utf-8", "surrogateescape") if found and found[1] else ""


def validity_of(ttl: float) -> float:
    """How long after the sending of a request for `ttl` its sender may believe in it."""
    return ttl * (1 - DRIFT) - MARGIN


def ttl_of(validity: float) -> float:
    """The ttl that is to be asked for by a sender who believes in it for so long."""
    return (validity + MARGIN) / (1 - DRIFT)


def to_ms(seconds: float) -> str:
    """Whole milliseconds, rounded up: the server never forgets sooner than the holder."""
    return str(math.ceil(seconds * 1000))


def check_ttl(
    ttl: object, *, lock: str, longest: float = math.inf, least: float = TTL_MIN, name: str = "ttl"
) -> None:
    """Refuse a ttl that a server could not keep, or longer than others count on."""
    if not is_number(ttl) or not least <= ttl <= TTL_MAX:
        raise _wrong(f"{name}={ttl!r}: give seconds from {least} to {TTL_MAX:.0f}, e.g. 30", lock)
    if ttl > longest:
        raise _wrong(
            f"{name}={ttl!r}: this client says that no lock has more than "
            f"longest_ttl={longest:.12g} s, and who takes a server's place counts on that: give "
            f"all clients longest_ttl={ttl!r}",
            lock,
        )


def check_timeout(timeout: object, *, lock: str) -> None:
    """Refuse a timeout that is no length of time."""
    if timeout is None:
        return
    if not is_number(timeout) or not 0 <= timeout < math.inf:
        raise _wrong(f"timeout={timeout!r}: give seconds, 0 not to wait, or None for ever", lock)


def _name(what: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise _wrong(f"{what}={value!r}: give a string; for bytes, .decode() them", "")
    encoded = _encoded(what, value)
    if 0 < len(encoded) <= NAME_MAX_BYTES:
        return encoded
    if not encoded:
        raise _wrong(f"the {what} is empty: give the thing that is locked a name", "")
    raise _wrong(
        f"the {what} has {len(encoded)} bytes and may have {NAME_MAX_BYTES}: "
        "use a shorter one, for example a digest of it",
        value[:40],
    )


def _check_text(what: str, text: object, lock: str) -> None:
    if text is None:
        return
    if not isinstance(text, str) or len(text) > LABEL_MAX:
        raise _wrong(f"{what}: give a string of at most {LABEL_MAX} characters, or None", lock)
    _encoded(what, text)


def _encoded(what: str, value: str) -> bytes:
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _wrong(f"the {what} is not text: {error}", "") from None


def tag_of(key: bytes) -> bytes:
    """The {tag} by which a key names its own hash slot; empty if it has none."""
    start = key.find(b"{") + 1
    end = key.find(b"}", start)
    return key[start:end] if start and end > start else b""


def _hash(key: bytes) -> int:
    """The slot of a key without a tag, in a cluster."""
    return crc_hqx(key, 0) % SLOTS


@lru_cache(maxsize=1024)
def _tag_like(slot: int) -> bytes:
    """Find a tag for this slot: the least number that is one."""
    return next(tag for tag in (b"%d" % number for number in count()) if _hash(tag) == slot)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(message: str, lock: str) -> ConfigurationError:
    return ConfigurationError(message if not lock else f"lock {lock!r}: {message}", lock=lock)
