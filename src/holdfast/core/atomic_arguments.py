"""The arguments of atomic operations: checked, and encoded for the scripts.

Each function raises ConfigurationError for an invalid argument, which shows what to give instead.
"""

from __future__ import annotations

import math
from hashlib import sha1
from typing import TYPE_CHECKING

from holdfast.core.duration import in_seconds
from holdfast.core.spec import TTL_MAX, TTL_MIN, is_number, to_ms
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.duration import Duration
    from holdfast.scripts import Script

ID_MAX = 200
"""The longest id, in characters."""


def encode_id(once: str | int) -> bytes:
    """Encode an id. A number is the same id as its digits."""
    if isinstance(once, int) and not isinstance(once, bool):
        once = int.__repr__(once)
    if not isinstance(once, str) or not 0 < len(once) <= ID_MAX:
        raise ConfigurationError(
            f"once={once!r}: give a number, or a string of 1 to {ID_MAX} characters, that is the "
            "same for each retry and different for every other operation, e.g. an order number"
        )
    return encode_name("once", once)


def digest_of(script: Script, args: tuple[str | bytes, ...]) -> str:
    """Return a digest of an operation: 40 characters that identify what its id is used for."""
    parts = [part.encode() if isinstance(part, str) else part for part in (script.name, *args)]
    lengths = b" ".join(b"%d" % len(part) for part in parts)
    return sha1(b"\n".join((lengths, *parts)), usedforsecurity=False).hexdigest()


def encode_name(what: str, value: object, *, empty: bool = False) -> bytes:
    """Encode a string or bytes. `empty` allows an empty one."""
    if isinstance(value, str):
        try:
            value = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"{what} is not text: {error}") from None
    if not isinstance(value, bytes):
        raise ConfigurationError(f"{what}={value!r}: give a string or bytes")
    if not value and not empty:
        raise ConfigurationError(f"{what} is empty: give a name")
    return value


def encode_argument(value: object) -> bytes:
    """Encode an argument of a script of the user: a number, a string or bytes."""
    if is_number(value):
        # The plain number: the `repr` of a subclass, such as an IntEnum, is different.
        plain = int if isinstance(value, int) else float
        return plain.__repr__(value).encode()
    return encode_name("args", value, empty=True)


def check_list(what: str, values: object) -> Sequence[object]:
    """Return the values if they are a list or a tuple."""
    if not isinstance(values, (list, tuple)):
        raise ConfigurationError(f"{what}={values!r}: give a list")
    return values


def check_integer(what: str, value: object, least: int, most: int) -> None:
    """Check that a value is an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigurationError(f"{what}={value!r}: give a whole number from {least} to {most}")


def ms_of(what: str, seconds: object) -> str:
    """Return a duration in milliseconds."""
    if not is_number(seconds) or not TTL_MIN <= seconds <= TTL_MAX:
        raise ConfigurationError(
            f"{what}={seconds!r}: give seconds from {TTL_MIN} to {TTL_MAX:.0f}, e.g. 60"
        )
    return to_ms(seconds)


def expiry_of(ttl: Duration | None) -> str:
    """Return an expiry for the scripts: "" does not change it, "0" means none."""
    ttl = in_seconds(ttl)
    if ttl is None:
        return ""
    return "0" if ttl == math.inf else ms_of("ttl", ttl)
