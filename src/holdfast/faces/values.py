"""Values of the user's, between their codec and the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError, WrongValue
from holdfast.faces.codecs import as_bytes

if TYPE_CHECKING:
    from holdfast.faces.codecs import Codec


def named(key: str | bytes) -> str:
    """A key as text."""
    return key if isinstance(key, str) else key.decode("utf-8", "backslashreplace")


def load(codec: Codec, key: str | bytes, data: bytes | None) -> Any:  # noqa: ANN401 - any value
    """Read what the key holds; nothing is None.

    Raises:
        WrongValue: the codec cannot read it.
    """
    if data is None:
        return None
    try:
        return codec.loads(data)
    except Exception as error:
        name = named(key)
        message = f"{name!r} was left as it is, because it cannot be read: {error}"
        raise WrongValue(message, lock=name) from error


def dump(codec: Codec, key: str | bytes, value: object) -> bytes:
    """Write a value that a function returned.

    Raises:
        ConfigurationError: it returned nothing.
        Exception: whatever the codec raises; TypeError, if that does not make bytes of it.
    """
    if value is None:
        raise ConfigurationError(
            f"the function that updates {named(key)!r} returned None: have it return the new value",
            lock=named(key),
        )
    return as_bytes(codec.dumps(value))
