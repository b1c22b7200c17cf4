"""The immutable description of a lock: its settings, checked, and all that follows from them.

What can be computed once a lock is computed here, so that acquiring computes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

from holdfast.core.token import encode
from holdfast.errors import ConfigurationError

DRIFT = 0.01
"""How far the rates of the holder's and the server's clocks may differ."""

MARGIN = 0.001
"""Seconds by which a deadline is early, for the server's millisecond clock."""

RENEWALS_A_TTL = 3
"""A lease is renewed when one of so many parts of its time has passed; two remain for retries."""

FENCE_LIFE = 3600.0
"""Seconds an unused fence counter is kept, at least. The server's clock floors the next fence, so
this is how far that clock may be set back before fences could repeat."""

TOMBSTONE_MS = "60000"
"""How long a given-up token stays refused: longer than a request may be under way."""

TTL_MIN, TTL_MAX = 0.01, 365 * 86_400.0
NAME_MAX_BYTES = 1024
LABEL_MAX = 200


@dataclass(frozen=True)
class LockSpec:
    """One lock, as its user described it (first block) and as the core needs it (second)."""

    name: str
    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float  # infinite when there is no cap
    reentrant: bool
    label: str | None

    key: bytes
    fence_key: bytes
    tombstone_prefix: bytes
    encoded_label: str
    ttl_ms: str
    fence_life_ms: str
    validity: float
    first_due: float  # how long after the grant the renewer has something to do
    command_timeout: float


def describe(  # noqa: PLR0913 - the settings of a lock, as the user gives them
    name: str,
    *,
    ttl: float,
    timeout: float | None,
    renew: bool,
    max_hold: float | None,
    reentrant: bool,
    key: str | None,
    label: str | None,
    command_timeout: float,
) -> LockSpec:
    """Check a lock's settings and work out what follows from them.

    Raises:
        ConfigurationError: at the first setting that cannot work, saying what to write instead.
    """
    name_bytes = _name("name", name)
    check_ttl(ttl, lock=name)
    check_timeout(timeout, lock=name)
    if max_hold is not None:
        if not _is_number(max_hold) or not 0 < max_hold < math.inf:
            raise _wrong(f"max_hold={max_hold!r}: give seconds above 0, or None for no cap", name)
        if not renew:
            raise _wrong("max_hold caps renewal and means nothing with renew=False: drop it", name)
    if label is not None and (not isinstance(label, str) or len(label) > LABEL_MAX):
        raise _wrong(f"label: give a string of at most {LABEL_MAX} characters, or None", name)
    if label is not None:
        _encoded("label", label)
    if key is None:
        lock_key = siblings = b"holdfast:{%b}" % name_bytes
    else:
        lock_key = _name("key", key)
        siblings = b"holdfast:key:" + (lock_key if _has_tag(lock_key) else b"{%b}" % lock_key)
    validity = validity_of(ttl)
    return LockSpec(
        name=name,
        ttl=float(ttl),
        timeout=timeout,
        renew=bool(renew),
        max_hold=math.inf if max_hold is None else float(max_hold),
        reentrant=bool(reentrant),
        label=label,
        key=lock_key,
        fence_key=siblings + b":fence",
        tombstone_prefix=siblings + b":gone:",
        encoded_label=encode(label or ""),
        ttl_ms=to_ms(ttl),
        fence_life_ms=fence_life_ms(ttl),
        validity=validity,
        first_due=min(validity / RENEWALS_A_TTL, max_hold or math.inf) if renew else validity,
        command_timeout=min(command_timeout, ttl / 4),
    )


def validity_of(ttl: float) -> float:
    """How long after the sending of a request for `ttl` its sender may believe in it."""
    return ttl * (1 - DRIFT) - MARGIN


def fence_life_ms(ttl: float) -> str:
    """How long the fence counter of a lease is kept: as long as the lease, and then some."""
    return to_ms(max(FENCE_LIFE, 2 * ttl))


def to_ms(seconds: float) -> str:
    """Whole milliseconds, rounded up: the server never forgets sooner than the holder."""
    return str(math.ceil(seconds * 1000))


def check_ttl(ttl: object, *, lock: str) -> None:
    """Refuse a ttl that a server could not keep."""
    if not _is_number(ttl) or not TTL_MIN <= ttl <= TTL_MAX:
        raise _wrong(f"ttl={ttl!r}: give seconds from {TTL_MIN} to {TTL_MAX:.0f}, e.g. 30", lock)


def check_timeout(timeout: object, *, lock: str) -> None:
    """Refuse a timeout that is no length of time."""
    if timeout is None:
        return
    if not _is_number(timeout) or not 0 <= timeout < math.inf:
        raise _wrong(f"timeout={timeout!r}: give seconds, 0 not to wait, or None for ever", lock)


def _name(what: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise _wrong(f"{what}={value!r}: give a string; for bytes, .decode() them", "")
    encoded = _encoded(what, value)
    if not encoded:
        raise _wrong(f"the {what} is empty: give the thing that is locked a name", "")
    if len(encoded) > NAME_MAX_BYTES:
        raise _wrong(
            f"the {what} has {len(encoded)} bytes and may have {NAME_MAX_BYTES}: "
            "use a shorter one, for example a digest of it",
            value[:40],
        )
    return encoded


def _encoded(what: str, value: str) -> bytes:
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _wrong(f"the {what} is not text: {error}", "") from None


def _has_tag(key: bytes) -> bool:
    """Whether the key names its own hash slot: some {tag}, not empty."""
    return key.partition(b"{")[2].find(b"}") > 0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(message: str, lock: str) -> ConfigurationError:
    return ConfigurationError(message if not lock else f"lock {lock!r}: {message}", lock=lock)
