"""Which process this is, what a forked child must not keep of its parent, and which threads live.

A process is known by a generation and not by its pid: a grandchild may have the same pid as a
process that has ended, and would then consider itself the holder of its leases.

All that belongs to one process (token factories, locks, threads, connections) is replaced in a
forked child before the first line of the child's code runs. The child has one thread at that time,
so no thread can draw a token from the parent's factory, or see anything half replaced.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncio import StreamWriter
    from collections.abc import Callable

_forks: list[None] = []

generation: Callable[[], int] = _forks.__len__
"""How many forks lie between this process and the one that began Python."""


_resets: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
"""Per object its method. A WeakMethod would print a traceback at the end of the interpreter."""
_connections: weakref.WeakSet[socket.socket | StreamWriter] = weakref.WeakSet()


def reset_after_fork(reset: Callable[[], None]) -> None:
    """Have a method called in each forked child, for as long as its object lives.

    One method per object, which must be equal to no other object. The entry is made in one step: a
    fork in another thread finds all of it or nothing.
    """
    _resets[reset.__self__] = reset.__func__  # type: ignore[attr-defined]  # a bound method


def close_after_fork(connection: socket.socket | StreamWriter) -> None:
    """Have a connection closed in each forked child; the parent's stays as it is.

    Otherwise the server would count a dead process as a subscriber while a child of it lives.
    """
    _connections.add(connection)


def _close_inherited() -> None:
    """Close the parent's connections here, without sending anything to the server.

    Each descriptor is replaced by one of /dev/null, and stays in use: whatever still has it (a
    socket, TLS, an event loop) may use and close it without touching the parent's connection, a
    later file of this process, or what the parent's event loop watches.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for connection in list(_connections):
        with contextlib.suppress(Exception):  # one that is half made or half closed
            os.dup2(nowhere, _descriptor(connection), inheritable=False)
    os.close(nowhere)
    _connections.clear()


def _descriptor(connection: socket.socket | StreamWriter) -> int:
    """The descriptor of a connection; -1 if it is closed, even if it still sends what is left."""
    if isinstance(connection, socket.socket):
        return connection.fileno()
    number: int = connection.get_extra_info("socket").fileno()
    return number


def _begin_in_child() -> None:
    _forks.append(None)
    with contextlib.ExitStack() as everything:  # all of it, even if some of it fails
        for owner, reset in list(_resets.items()):
            everything.callback(reset, owner)
        # Pushed last, done first: a reset drops connections, and an asyncio transport that is
        # dropped stops watching its descriptor, in the epoll instance that the parent uses too.
        everything.callback(_close_inherited)


def unnoticed_fork() -> ConfigurationError:
    """Make the error for a process that was forked without Python's fork handlers."""
    return ConfigurationError(
        "this process was forked without Python's fork handlers, so its locks would be those of "
        "its parent: with uWSGI, set py-call-osafterfork = true or lazy-apps = true; elsewhere, "
        "make the client after the fork"
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


class _Life:
    """What ends with a thread."""


class _ThisThread(threading.local):
    """The calling thread, whoever began it."""

    def __init__(self) -> None:
        self._life = _Life()
        self.life = weakref.ref(self._life)


THIS_THREAD = _ThisThread()


class Worker(threading.Thread):
    """A thread beside those of the user, of which is known whether it lives.

    `is_alive` will not do: up to Python 3.12 it says no for ever once Ctrl-C has struck whoever
    joins the thread, although that goes on. Asking takes no lock: it is done in signal handlers,
    and with the locks of others held.
    """

    _life: weakref.ref[_Life] | None = None

    def __init__(self, work: Callable[..., object], *args: object, name: str) -> None:
        super().__init__(target=work, args=args, name=name, daemon=True)

    def run(self) -> None:
        """Work."""
        self._life = THIS_THREAD.life
        super().run()

    @property
    def lives(self) -> bool:
        """Whether it has begun and is not over; one whose start was interrupted may never begin."""
        return self.ident is not None and (self._life is None or self._life() is not None)
