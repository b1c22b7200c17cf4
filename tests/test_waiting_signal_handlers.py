"""A signal handler that waits for a lock, while the thread that it interrupts waits for another.

A trace function runs the handler at each line in turn. So the handler runs in the thread that it
interrupts, which may hold a mutex at that line, as after a signal.
"""

from __future__ import annotations

import linecache
import os
import threading
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

import holdfast
from kit.contention import waiters
from kit.interrupts import AtLine
from kit.servers import ONE_KIND
from kit.waiting import PATIENCE, POLL_INTERVAL

if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from kit.servers import Server

MINE, HANDLERS = "{tag}mine", "{tag}handlers"
"""Locks with one hash tag: also in a cluster they have one channel."""

CHANNELS = f"adapters{os.sep}waiter_channels.py", f"core{os.sep}waiters.py"


class _HandlerAt(AtLine):
    """Runs a signal handler at the n-th line."""

    def _is_safe(self, frame: FrameType) -> bool:
        """Whether to skip this line.

        CPython up to 3.13 runs no handler where `Thread.start` holds this mutex. A thread that a
        handler starts there could not begin.
        """
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return line in {"with _active_limbo_lock:", "_limbo[self] = self"}


class FirstWait:
    """The first wait of a client, for the lock MINE, at a server or the node of a cluster.

    A handler that waits for the lock HANDLERS interrupts it. Each lock is released as soon as its
    waiter is in the queue. A client that polls because it has not subscribed is in no queue.
    """

    def __init__(self, url: str, server: Server) -> None:
        self._server = server
        self._holder = holdfast.Client(url)
        self.client = holdfast.Client(url)
        self._granted: list[str] = []
        self._held = {
            name: self._holder.lock(name, key=name).acquire() for name in (MINE, HANDLERS)
        }

    def _release_when_awaited(self, over: threading.Event) -> None:
        while not over.wait(POLL_INTERVAL):
            for name in list(self._held):
                if waiters(self._server, f"holdfast:tag:{name}:queue"):
                    self._held.pop(name).release()

    def _wait_for(self, name: str) -> None:
        self.client.lock(name, key=name, timeout=PATIENCE).acquire().release()
        self._granted.append(name)

    def interrupted_at(self, at: int, within: tuple[str, ...]) -> str | None:
        """Wait, interrupted at this line. Return the line, or None if there are fewer lines."""
        line = _HandlerAt(at, within, partial(self._wait_for, HANDLERS))

        def wait() -> None:
            with line:
                self._wait_for(MINE)

        over = threading.Event()
        releasing = threading.Thread(target=self._release_when_awaited, args=(over,))
        waiting = threading.Thread(target=wait, daemon=True)
        releasing.start()
        waiting.start()
        waiting.join(2 * PATIENCE)
        over.set()
        releasing.join()
        assert self._granted == ([MINE] if line.position is None else [HANDLERS, MINE]), (
            line.position
        )
        return line.position

    def subscriptions(self) -> int:
        """Return how often the client is subscribed to its channel."""
        port: Any = self.client._session.port
        ((channel, _),) = port._channels._channels
        commands = "NUMSUB", "SHARDNUMSUB"
        return sum(self._server.command("PUBSUB", each, channel)[1] for each in commands)

    def close(self) -> None:
        """Release what is held, and close the clients."""
        for lease in self._held.values():
            lease.release()
        self._holder.close()
        self.client.close()


def check_every_line(url: str, server: Server, within: tuple[str, ...]) -> None:
    """Check that a handler may wait at each line of `within` that a first wait executes."""
    position: str | None = ""
    at = 0
    while position is not None:
        at += 1
        with closing(FirstWait(url, server)) as wait:
            position = wait.interrupted_at(at, within)
            assert wait.subscriptions() == 1, position
    assert at > 1


@pytest.mark.parametrize(
    "within",
    [
        pytest.param(CHANNELS, id="channels"),
        pytest.param((f"wire{os.sep}pubsub_thread.py",), id="subscribing"),
        pytest.param((threading.__file__,), id="threading"),
    ],
)
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_signal_handler_may_wait_at_any_line_of_a_first_wait(
    server: Server, within: tuple[str, ...]
) -> None:
    check_every_line(server.url, server, within)
