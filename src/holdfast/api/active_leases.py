"""The leases that are inside a `with lock` block, for locks that threads or tasks share.

A lock has a list of these leases. Threads share the list, so every change is one atomic list
operation. It is a plain list because a lock is often created for one block, and a list is cheap to
create.

Python calls `__exit__` without a reference to its block, so the block has to be found:

- By its frame. A generator may begin a block on one thread and end it on another, as FastAPI does
  with a sync dependency. Its frame stays the same, whatever thread runs it, and however many others
  are inside a block of the same lock.
- By its thread or task, if `__enter__` and `__exit__` were called in different frames.

A wrong lease must never be released: its holder would work without the lock. If several blocks are
possible, nothing is released, and NotHeld is raised. A thread alone does not identify a block if
other threads are inside one too. The threads of a pool run parts of several requests: a block that
was entered on another thread may end on the thread that entered this one.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Protocol, TypeVar

from holdfast.errors import HoldfastError, NotHeld

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class EnteredLease(Protocol):
    """A lease of one lock, or of several."""

    _entered_by: object
    _entered_in: FrameType | None
    _exiting: bool

    @property
    def _is_unreleased(self) -> bool: ...


L = TypeVar("L", bound=EnteredLease)

_ENTER_OR_EXIT = {"__enter__", "__exit__", "__aenter__", "__aexit__"}
"""Functions that pass the call on: those of the lock, and of classes that contain one."""
_CONTEXTLIB = vars(contextlib)
"""The globals of its functions, which pass the call on: a method of an ExitStack."""
_RUNNERS = {"anyio", "asyncio", "concurrent", "gevent", "multiprocessing", "threading", "trio"}
"""Packages that run the functions of others, many in one frame."""
_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _calling_block() -> FrameType | None:
    """Return the frame of the `with` statement that called the `__enter__` or `__exit__` above."""
    frame = sys._getframe(2).f_back  # noqa: SLF001 - documented
    while frame is not None and (
        frame.f_code.co_name in _ENTER_OR_EXIT or frame.f_globals is _CONTEXTLIB
    ):
        frame = frame.f_back
    return frame


def enter(entered: list[L], lease: L, block_owner: object) -> None:
    """Add a lease whose block begins. `block_owner` is the calling thread or task.

    Only `__enter__` and `__aenter__` call this, because of `_calling_block`.
    """
    lease._entered_by = block_owner  # noqa: SLF001 - within the API
    lease._entered_in = _calling_block()  # noqa: SLF001 - within the API
    entered.append(lease)


def exiting_lease(entered: list[L], block_owner: Callable[[], object]) -> L | None:
    """Return the lease of the block that ends; None if there is none, or several are possible.

    Only `__exit__` and `__aexit__` call this, as `enter`.
    """
    leases = list(entered)
    if len(leases) == 1:  # the usual case, which needs no frame
        return leases[0]
    here, frame = block_owner(), _calling_block()
    for lease in reversed(leases):
        if frame is None or lease._entered_in is not frame or _is_runner(frame):  # noqa: SLF001 - within the API
            continue
        # Without this check, a function that runs many tasks of compiled code would match.
        if lease._entered_by is here or frame.f_code.co_flags & _RESUMABLE:  # noqa: SLF001 - within the API
            return lease
    mine = [lease for lease in leases if lease._entered_by is here]  # noqa: SLF001 - within the API
    # A task is never reused. So its blocks are nested, and the last one ends first.
    if mine and (len(mine) == len(leases) or not isinstance(here, threading.Thread)):
        return mine[-1]
    return None


def _is_runner(frame: FrameType) -> bool:
    """Whether a thread pool or an event loop runs the frame, so that it is not that of a block."""
    module = frame.f_globals.get("__name__") or ""
    return module.partition(".")[0] in _RUNNERS


def unknown_block(entered: list[L], name: str, call: str) -> NotHeld:
    """Return the error for a block whose lease was not found."""
    why = "no such block was entered"
    if entered:
        why = "several are open and may end on this thread or task, so no lease was released"
    return NotHeld(
        f"cannot tell which 'with lock' block of {name!r} ends here: {why}; write {call} as "
        "lease', which works on any thread",
        lock=name,
    )


def note_failure(error: BaseException, failure: HoldfastError) -> None:
    """Add to the error of a block that its lease could not be released."""
    error.add_note(f"When the lock was released: {type(failure).__name__}: {failure}")


def remove_exited(entered: list[L], lease: L, block_owner: Callable[[], object]) -> None:
    """Remove a lease whose block ended, and those that an interrupt left in the list."""
    remove(entered, lease)
    for other in list(entered) if entered else ():
        ended = other._exiting and not other._is_unreleased  # noqa: SLF001 - within the API
        if ended and other._entered_by is block_owner():  # noqa: SLF001 - within the API
            remove(entered, other)


def remove(entered: list[L], lease: L) -> None:
    """Remove a lease from the list, if it is there."""
    try:  # noqa: SIM105 - faster, and every block runs it
        entered.remove(lease)
    except ValueError:
        pass
    lease._entered_in = None  # noqa: SLF001 - the frame refers to the lease
