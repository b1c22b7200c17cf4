"""One connection of one thread.

Two ways of waiting for an answer. A server on this machine answers sooner than a sleeping thread
can be woken, so after a quick answer the next one is first looked for without going to sleep, for
at most `SPIN` seconds. A server far away is never quick, and is never waited for like that.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable
from holdfast.wire.clock import now
from holdfast.wire.copies import most_needed, wait_for
from holdfast.wire.packing import by_sha, opened, pack, serials
from holdfast.wire.sealed import check_seal, seal
from holdfast.wire.target import endpoint_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.sealed import Dialogue
    from holdfast.wire.target import Target

SPIN = 0.0001
QUICK = 0.0002
"""An answer within this time, seconds, makes the next one worth looking for without sleeping."""

HAS_POLL = hasattr(select, "poll")
CAN_SPIN = HAS_POLL and hasattr(os, "sched_yield") and (os.cpu_count() or 1) > 1
_BUFFER = 16_384
_HUNG_UP = "the server closed the connection"
Packer: TypeAlias = "Callable[[Script, Keys, tuple[str, ...], bytes], bytes]"
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Link:
    """One connection of one thread.

    Its socket never blocks: a thread waits in `poll`, whose deadline Python keeps when signal
    handlers run meanwhile. The kernel's timeout of a socket would begin again after each of them.
    """

    def __init__(
        self, target: Target, timeout: float, *, prepare: bool = True, judged: bool = True
    ) -> None:
        self._connection = target.connect(timeout, prepare=prepare, judged=judged)
        self.endpoint = endpoint_of(self._connection)
        self.stale = False
        """Not to be used any more: it leads to the wrong server, or the client is closed."""
        # redis-py has no public name for it; the oldest and newest supported both have this one.
        self._sock: socket.socket = self._connection._sock  # noqa: SLF001
        self._sock.settimeout(0)
        self._end = 0.0
        """When the request under way is given up, by `time.perf_counter`."""
        self._reader = hiredis.Reader()
        self.serials = serials()
        self._buffer = bytearray(_BUFFER)
        self._quick = False
        if HAS_POLL:
            self._poll = select.poll()
            self._poll.register(self._sock, select.POLLIN)

    def close(self) -> None:
        """Throw the connection away."""
        self._connection.disconnect()

    def exchange(self, packed: bytes, timeout: float, asking: Sequence[None] = ()) -> Any:  # noqa: ANN401 - any answer
        """Send one request and return its answer as it came.

        `asking` has an entry for each thread that waits for an answer: only a lone one spins.
        """
        # Much of a cycle's time is spent here with cold caches: one function, few names.
        sock, gets, clock = self._sock, self._reader.gets, time.perf_counter
        sent_at = clock()
        self._end = sent_at + timeout
        try:
            sent = sock.send(packed)
        except _NOT_NOW:
            sent = 0
        if sent != len(packed):
            self._send(memoryview(packed)[sent:])
        ready: object = None
        if self._quick:
            poll, spin_until = self._poll.poll, sent_at + SPIN
            while len(asking) == 1 and not (ready := poll(0)) and clock() < spin_until:
                os.sched_yield()  # the server may be waiting for this very core
        while (answer := gets()) is False:
            if not ready:
                self._wait()
            ready = None
            try:
                size = sock.recv_into(self._buffer)
            except _NOT_NOW:  # TLS received something other than data
                continue
            if size == 0:
                raise ConnectionResetError(_HUNG_UP)
            self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # any buffer
        self._quick = CAN_SPIN and clock() - sent_at < QUICK
        return answer

    @property
    def end(self) -> float:
        """When the time of the request that was sent last is over, on the port's clock."""
        return now() + self._end - time.perf_counter()

    def next_answer(self) -> Any:  # noqa: ANN401 - any answer
        """Return one more answer to what was sent last."""
        while (answer := self._reader.gets()) is False:
            self._wait()
            with contextlib.suppress(*_NOT_NOW):
                self._receive()
        return answer

    def _send(self, unsent: memoryview) -> None:
        """Send all of it, waiting for room."""
        while unsent:
            left = max(0.0, self._end - time.perf_counter())
            if not _wait(self._sock, left, reading=False, writing=True):
                raise TimeoutError
            unsent = self.send_some(unsent)

    def _wait(self) -> None:
        """Return when the socket can be read; raise when the request's time is over."""
        left = max(0.0, self._end - time.perf_counter())
        readable = self._poll.poll(math.ceil(left * 1000)) if HAS_POLL else _wait(self._sock, left)
        if not readable:
            raise TimeoutError

    def _receive(self) -> None:
        size = self._sock.recv_into(self._buffer)
        if size == 0:
            raise ConnectionResetError(_HUNG_UP)
        self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # takes any buffer

    def has_ended(self) -> bool:
        """Whether there is something to read although nothing was asked: mostly, the end."""
        return bool(self._poll.poll(0)) if HAS_POLL else _wait(self._sock, 0.0)

    def converse(self, said: Dialogue, end: float, before: bytes, asking: Sequence[None]) -> Any:  # noqa: ANN401 - any answer
        """Carry out a dialogue, each command with a seal behind it; return its result.

        `before` is sent before each, and its answer passed over.
        """
        command = next(said)
        while True:
            serial = next(self.serials)
            packed = before + pack(command) + seal(serial)
            answer = self.exchange(packed, max(0.0, end - now()), asking)
            if before:
                answer = self.next_answer()
            check_seal(self.next_answer(), serial)
            try:
                command = said.send(answer)
            except StopIteration as done:
                return done.value

    def fileno(self) -> int:
        """What to poll."""
        return self._sock.fileno()

    def send_some(self, unsent: memoryview) -> memoryview:
        """Send what can be sent without waiting; return the rest."""
        with contextlib.suppress(*_NOT_NOW):
            while unsent:
                unsent = unsent[self._sock.send(unsent) :]
        return unsent

    def received(self) -> Iterator[Any]:
        """Yield the answers that have come, without waiting."""
        with contextlib.suppress(*_NOT_NOW):
            while True:
                while (answer := self._reader.gets()) is not False:
                    yield answer
                self._receive()

    def call_many(
        self,
        requests: Sequence[Request],
        timeout: float,
        meanwhile: Callable[[], float],
        pack: Packer = by_sha,
    ) -> list[Reply]:
        """Run scripts in one go and return as many answers as came within `timeout`.

        If some need replicas, one more answer says how many have it. `meanwhile` is called as the
        port says; its times are on the port's clock.
        """
        numbers = [next(self.serials) for _ in requests]
        packed = [pack(*request, serial) for request, serial in zip(requests, numbers, strict=True)]
        replicas = most_needed(requests)
        if replicas:
            packed.append(wait_for(replicas, timeout))
        unsent = memoryview(b"".join(packed))
        replies: list[Reply] = []
        end = now() + timeout
        while len(replies) < len(packed):
            due = meanwhile()
            left = end - now()
            if left <= 0:
                break
            with contextlib.suppress(*_NOT_NOW):
                unsent = unsent[self._sock.send(unsent) :] if unsent else unsent
            try:
                self._receive()
            except _NOT_NOW:
                wait = min(left, due - now())
                _wait(self._sock, max(0.0, wait), writing=bool(unsent))
            while (answer := self._reader.gets()) is not False:
                bare = isinstance(answer, hiredis.ReplyError) or len(replies) == len(requests)
                replies.append(answer if bare else opened(answer, numbers[len(replies)]))
        return replies


def _wait(
    sock: socket.socket, seconds: float, *, reading: bool = True, writing: bool = False
) -> bool:
    """Return True when the socket can be read or written, as wanted, and False when time is up."""
    if not HAS_POLL:
        return any(select.select([sock] * reading, [sock] * writing, [], seconds))
    poll = select.poll()
    poll.register(sock, select.POLLIN * reading | select.POLLOUT * writing)
    return bool(poll.poll(math.ceil(seconds * 1000)))


class Opening:
    """A connection being opened in a thread of its own, so that nobody else has to wait for it.

    Connecting cannot be interrupted: looking up a name alone may take many seconds.
    """

    def __init__(self, target: Target, timeout: float) -> None:
        self.done = threading.Event()
        self.abandoned = False
        self._result: Link | HoldfastError | None = None
        arguments = (target, timeout)
        threading.Thread(
            target=self._open, args=arguments, name="holdfast-connect", daemon=True
        ).start()

    def _open(self, target: Target, timeout: float) -> None:
        try:
            self._result = Link(target, timeout, prepare=False)
        except HoldfastError as error:
            self._result = error
        self.done.set()
        if self.abandoned and isinstance(self._result, Link):
            self._result.close()

    def abandon(self) -> None:
        """Have it closed, now or as soon as it is open."""
        self.abandoned = True
        if self.done.is_set() and isinstance(self._result, Link):
            self._result.close()

    def link(self) -> Link:
        """Return the connection, or raise why there is none; only when `done`."""
        if isinstance(self._result, Link):
            return self._result
        raise self._result or NodeUnavailable("no connection could be opened")
