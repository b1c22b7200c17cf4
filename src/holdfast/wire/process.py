"""Forks and threads: what a forked child replaces, and whether a thread is running.

A process is identified by its generation, not by its pid. A grandchild may have the pid of a
process that has ended, and would consider itself the holder of that process's leases.

A forked child replaces everything that belongs to one process (token factories, mutexes, threads,
connections) before the first line of user code runs. At that time the child has one thread. So
no thread can use the parent's token factory, or see a state that is half replaced.

`encodings.idna` is imported here because Python imports it when it first resolves a host name. A
child that is forked while another thread imports it would wait for that import forever.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - see below
import os
import socket
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncio import StreamWriter
    from collections.abc import Callable

_forks: list[None] = []

generation: Callable[[], int] = _forks.__len__
"""Return the number of forks between this process and the one that started Python."""


_resets: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
"""The reset method of each object. A WeakMethod would print a traceback at interpreter exit."""
_connections: weakref.WeakSet[socket.socket | StreamWriter] = weakref.WeakSet()


def reset_after_fork(reset: Callable[[], None]) -> None:
    """Call this bound method in each forked child while its object exists.

    An object can register one method, and must not equal another object. Registering is atomic: a
    fork in another thread sees all of it or nothing.
    """
    _resets[reset.__self__] = reset.__func__  # type: ignore[attr-defined]  # a bound method


def close_after_fork(connection: socket.socket | StreamWriter) -> None:
    """Close a connection in each forked child. The connection of the parent stays open.

    Otherwise the server would count a dead process as a subscriber while one of its children runs.
    """
    _connections.add(connection)


def _close_inherited() -> None:
    """Close the inherited connections in this child, without sending anything to the server.

    Each descriptor is replaced by one of /dev/null, and stays open. A socket, TLS object or event
    loop that still has it can use and close it. That affects neither the parent's connection, nor
    a new file of this process, nor the epoll set of the parent's event loop.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for connection in list(_connections):
        with contextlib.suppress(Exception):  # it may be half opened or half closed
            os.dup2(nowhere, _descriptor(connection), inheritable=False)
    os.close(nowhere)
    _connections.clear()


def _descriptor(connection: socket.socket | StreamWriter) -> int:
    """Return the descriptor of a connection; -1 if it is closed, even if it still sends data."""
    if isinstance(connection, socket.socket):
        return connection.fileno()
    number: int = connection.get_extra_info("socket").fileno()
    return number


def _begin_in_child() -> None:
    _forks.append(None)
    with contextlib.ExitStack() as everything:  # run all resets, even if one fails
        for owner, reset in list(_resets.items()):
            everything.callback(reset, owner)
        # Registered last, runs first. A reset drops connections. A dropped asyncio transport
        # removes its descriptor from the epoll set, which the child shares with its parent.
        everything.callback(_close_inherited)


def unhandled_fork_error() -> ConfigurationError:
    """Return the error for a process that was forked without Python's fork handlers."""
    return ConfigurationError(
        "this process was forked without Python's fork handlers, so its locks would be those of "
        "its parent: with uWSGI, set py-call-osafterfork = true or lazy-apps = true; elsewhere, "
        "make the client after the fork"
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


class _ThreadLifetime:
    """An object that is destroyed when its thread ends."""


class _ThisThread(threading.local):
    """The lifetime of the calling thread."""

    def __init__(self) -> None:
        self._lifetime = _ThreadLifetime()
        self.lifetime = weakref.ref(self._lifetime)


THIS_THREAD = _ThisThread()


class Worker(threading.Thread):
    """A daemon thread with a reliable `is_running` and `start`.

    Up to Python 3.12, `is_alive` returns False for a running thread, permanently, after Ctrl-C has
    interrupted a thread that joins it. `is_running` takes no mutex, so signal handlers can read it,
    and so can threads that hold any mutex.
    """

    _lifetime: weakref.ref[_ThreadLifetime] | None = None

    def __init__(self, work: Callable[..., object], *args: object, name: str) -> None:
        super().__init__(target=work, args=args, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; as `threading.Thread.start`, but an interrupt stays an interrupt.

        `Thread.start` waits in a `Condition`. Ctrl-C there, while the mutex is released, becomes a
        RuntimeError, as if no thread could be started.
        """
        handled = sys.exception()  # by the caller: it is no interrupt of this start
        try:
            super().start()
        except RuntimeError as error:
            cause = error.__context__
            while cause is not None and cause is not handled:
                if not isinstance(cause, Exception):
                    raise cause from None
                cause = cause.__context__
            raise

    def run(self) -> None:
        """Run the target function."""
        self._lifetime = THIS_THREAD.lifetime
        super().run()

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended.

        If its start was interrupted, it may count as not running, and run later.
        """
        return self.ident is not None and (self._lifetime is None or self._lifetime() is not None)
