"""Run an action in another thread between the lines of an operation."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType

T = TypeVar("T")


def interleaved(
    operation: Callable[[], T], action: Callable[[], object], *, within: ModuleType
) -> T:
    """Run `operation`; another thread runs `action` before each executed line of `within`.

    `within` may also be a standard library module that the operation calls, such as `weakref`.
    """

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != within.__file__:
            return trace if event == "call" else None
        if event == "line":
            other = threading.Thread(target=action, daemon=True)
            other.start()
            other.join(PATIENCE)
            assert not other.is_alive(), "deadlock: the other thread waits for this one"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return operation()
    finally:
        sys.settrace(before)
