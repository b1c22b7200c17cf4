"""Encoding and decoding of users' values, with errors that name the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.api.codecs import as_bytes
from holdfast.errors import ConfigurationError, WrongValue

if TYPE_CHECKING:
    from holdfast.api.codecs import Codec


def named(key: str | bytes) -> str:
    """Return a key as text."""
    return key if isinstance(key, str) else key.decode("utf-8", "backslashreplace")


def load(codec: Codec, key: str | bytes, data: bytes | None) -> Any:  # noqa: ANN401 - any value
    """Decode the value of a key; None if there is none.

    Raises:
        WrongValue: the codec cannot decode it.
    """
    if data is None:
        return None
    try:
        return codec.loads(data)
    except Exception as error:
        name = named(key)
        message = f"the codec cannot decode the value of {name!r}, which was not changed: {error}"
        raise WrongValue(message, lock=name) from error


def dump(codec: Codec, key: str | bytes, value: object) -> bytes:
    """Encode a value that an update function returned.

    Raises:
        ConfigurationError: the function returned None.
        Exception: from the codec; TypeError if the codec returned neither bytes nor text.
    """
    if value is None:
        raise ConfigurationError(
            f"the function that updates {named(key)!r} returned None: return the new value",
            lock=named(key),
        )
    return as_bytes(codec.dumps(value))
