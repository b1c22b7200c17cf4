"""How values of the user become bytes on the server, and come back.

A codec is anything with these two functions; `JSON`, `PICKLE` and `RAW` are at hand.
"""

from __future__ import annotations

import json
import pickle
from typing import Any, Protocol


class Codec(Protocol):
    """Makes bytes of a value, and the value of the bytes."""

    def dumps(self, value: Any, /) -> bytes:  # noqa: ANN401 - whatever it can write
        """Write a value as bytes."""

    def loads(self, data: bytes, /) -> Any:  # noqa: ANN401 - whatever it has written
        """Read a value that `dumps` has written; any exception says that it is none."""


def as_bytes(written: object) -> bytes:
    """Take what a codec has written: bytes, or text, as the `json` module itself writes.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(written, str):
        return written.encode()
    if isinstance(written, (bytes, bytearray, memoryview)):
        return bytes(written)
    raise TypeError(f"its codec wrote {type(written).__name__} instead of bytes")


class JSON:
    """What JSON can say, as UTF-8: tuples come back as lists, keys of dictionaries as text."""

    @staticmethod
    def dumps(value: Any, /) -> bytes:  # noqa: ANN401 - what JSON can say is found out by trying
        """Write a value as bytes."""
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()

    @staticmethod
    def loads(data: bytes, /) -> Any:  # noqa: ANN401 - any JSON
        """Read a value that `dumps` has written."""
        return json.loads(data)


class PICKLE:
    """Any Python object. Whoever can write to the server can then run code here: mind who can."""

    @staticmethod
    def dumps(value: Any, /) -> bytes:  # noqa: ANN401 - any object
        """Write a value as bytes."""
        return pickle.dumps(value)

    @staticmethod
    def loads(data: bytes, /) -> Any:  # noqa: ANN401 - any object
        """Read a value that `dumps` has written."""
        return pickle.loads(data)  # noqa: S301 - chosen by the user, who is told what it means


class RAW:
    """Bytes as they are; text becomes UTF-8, and comes back as bytes."""

    @staticmethod
    def dumps(value: bytes | str, /) -> bytes:
        """Write a value as bytes."""
        if not isinstance(value, (bytes, str)):
            raise TypeError(
                f"{type(value).__name__} is neither bytes nor text: give a codec for it"
            )
        return value.encode() if isinstance(value, str) else value

    @staticmethod
    def loads(data: bytes, /) -> bytes:
        """Return the bytes."""
        return data
