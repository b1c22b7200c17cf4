"""Encoding of users' values as bytes.

A codec is any object with `dumps` and `loads`. `JSON`, `PICKLE` and `RAW` are included.
"""

from __future__ import annotations

import json
import pickle
from typing import Any, Protocol


class Codec(Protocol):
    """Encodes a value as bytes, and decodes it."""

    def dumps(self, value: Any, /) -> bytes:  # noqa: ANN401 - any value
        """Encode a value."""

    def loads(self, data: bytes, /) -> Any:  # noqa: ANN401 - any value
        """Decode bytes that `dumps` returned. Any exception means that they are invalid."""


def as_bytes(written: object) -> bytes:
    """Return what a codec wrote as bytes. Text is allowed, because the `json` module writes text.

    Raises:
        TypeError: it is neither bytes nor text.
    """
    if isinstance(written, str):
        return written.encode()
    if isinstance(written, (bytes, bytearray, memoryview)):
        return bytes(written)
    raise TypeError(f"the codec returned {type(written).__name__} instead of bytes")


class JSON:
    """JSON, encoded as UTF-8. Tuples are decoded as lists, and dictionary keys as text."""

    @staticmethod
    def dumps(value: Any, /) -> bytes:  # noqa: ANN401 - any value that JSON can represent
        """Encode a value."""
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()

    @staticmethod
    def loads(data: bytes, /) -> Any:  # noqa: ANN401 - any JSON
        """Decode bytes that `dumps` returned."""
        return json.loads(data)


class PICKLE:
    """Any Python object.

    A client that can write to the server can then run code in this process.
    """

    @staticmethod
    def dumps(value: Any, /) -> bytes:  # noqa: ANN401 - any object
        """Encode a value."""
        return pickle.dumps(value)

    @staticmethod
    def loads(data: bytes, /) -> Any:  # noqa: ANN401 - any object
        """Decode bytes that `dumps` returned."""
        return pickle.loads(data)  # noqa: S301 - the user chose it, and the docstring warns


class RAW:
    """Bytes unchanged. Text is encoded as UTF-8, and decoded as bytes."""

    @staticmethod
    def dumps(value: bytes | str, /) -> bytes:
        """Encode bytes or text.

        Raises:
            TypeError: it is neither.
        """
        if not isinstance(value, (bytes, str)):
            raise TypeError(
                f"RAW encodes bytes and text, not {type(value).__name__}: use another codec"
            )
        return value.encode() if isinstance(value, str) else value

    @staticmethod
    def loads(data: bytes, /) -> bytes:
        """Return the bytes unchanged."""
        return data
