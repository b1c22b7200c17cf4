"""Requests as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hiredis

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.scripts import Script

pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command
"""Pack one command, given as a tuple of bytes, strings and numbers."""


def by_sha(script: Script, keys: tuple[bytes, ...], args: tuple[str, ...]) -> bytes:
    """Pack the call of a script that the server should know."""
    return pack(("EVALSHA", script.sha, len(keys), *keys, *args))


def by_text(script: Script, keys: tuple[bytes, ...], args: tuple[str, ...]) -> bytes:
    """Pack the call of a script that the server did not know."""
    return pack(("EVAL", script.text, len(keys), *keys, *args))
