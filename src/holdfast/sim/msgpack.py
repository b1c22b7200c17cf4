"""The subset of MessagePack that scripts use: `cmsgpack.pack` and `unpack` of one value.

Supported are strings, numbers, booleans, nil, lists, and tables with string keys.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import lupa.lua51  # type: ignore[import-untyped]  # no type hints

if TYPE_CHECKING:
    from collections.abc import Callable

_NIL, _FALSE, _TRUE, _DOUBLE, _INT64, _BYTES = 0xC0, 0xC2, 0xC3, 0xCB, 0xD3, 0xDB
_LIST, _TABLE = 0xDD, 0xDF


def pack(value: Any) -> bytes:  # noqa: ANN401 - whatever Lua has
    """Pack a Lua value, always with the longest header of its type."""
    if isinstance(value, bytes):
        return struct.pack(">BI", _BYTES, len(value)) + value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        whole = value == value // 1 and abs(value) < 2**63
        kind, number = ("q", int(value)) if whole else ("d", value)
        return struct.pack(f">B{kind}", _INT64 if whole else _DOUBLE, number)
    if lupa.lua51.lua_type(value) != "table":
        return bytes([{True: _TRUE, False: _FALSE}.get(value, _NIL)])
    items = list(value.items())
    listed = [key for key, _ in items] == list(range(1, len(items) + 1))
    parts = [pack(part) for item in items for part in (item[1:] if listed else item)]
    return struct.pack(">BI", _LIST if listed else _TABLE, len(items)) + b"".join(parts)


def unpack(packed: bytes, make_table: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - of Lua
    """Unpack a value; `make_table` converts a list or a dictionary into a Lua table."""
    return _Reader(packed, make_table).value()


class _Reader:
    def __init__(self, packed: bytes, make_table: Callable[[Any], Any]) -> None:
        self._packed = packed
        self._at = 0
        self._make_table = make_table

    def _take(self, form: str) -> Any:  # noqa: ANN401 - by its form
        (found,) = struct.unpack_from(form, self._packed, self._at)
        self._at += struct.calcsize(form)
        return found

    def value(self) -> Any:  # noqa: ANN401 - of Lua
        kind = self._take(">B")
        if kind in {_NIL, _FALSE, _TRUE}:
            return {_NIL: None, _FALSE: False, _TRUE: True}[kind]
        if kind in {_INT64, _DOUBLE}:
            return self._take(">q" if kind == _INT64 else ">d")
        size = self._take(">I")
        if kind == _BYTES:
            return self._take(f">{size}s")
        if kind == _LIST:
            return self._make_table([self.value() for _ in range(size)])
        return self._make_table({self.value(): self.value() for _ in range(size)})
