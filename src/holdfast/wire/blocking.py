"""Connections for threads: each thread holds one of its own, for as long as it lives.

A request goes out and its answer is awaited on the same connection. A connection that failed, or
whose caller was interrupted between the two, is thrown away: the next answer on it would be the
wrong one. After a fork the child makes its own; the parent's socket is closed there unused.

Two ways of waiting for an answer. A server on this machine answers sooner than a sleeping thread
can be woken, so after a quick answer the next one is first looked for without going to sleep, for
at most `SPIN` seconds. A server far away is never quick, and is never waited for like that.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import struct
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, opened, pack, serials
from holdfast.wire.process import generation
from holdfast.wire.refusals import denial, is_denial, probes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.port import Keys, Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.target import Target

SPIN = 0.0001
QUICK = 0.0002
"""An answer within this time, seconds, makes the next one worth looking for without sleeping."""

CAN_SPIN = hasattr(select, "poll") and hasattr(os, "sched_yield") and (os.cpu_count() or 1) > 1
_KERNEL_WAITS = sys.platform == "linux"
_BUFFER = 16_384
_HUNG_UP = "the server closed the connection"
Packer: TypeAlias = "Callable[[Script, Keys, tuple[str, ...], bytes], bytes]"
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Link:
    """One connection of one thread."""

    def __init__(self, target: Target, timeout: float, *, prepare: bool = True) -> None:
        self.generation = generation()
        self._connection = target.connect(timeout, prepare=prepare)
        # redis-py has no public name for it; the oldest and newest supported both have this one.
        self._sock: socket.socket = self._connection._sock  # noqa: SLF001
        self._timeout = math.nan
        self._reader = hiredis.Reader()
        self.serials = serials()
        self._buffer = bytearray(_BUFFER)
        self._quick = False
        if CAN_SPIN:
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
        if timeout != self._timeout:
            self._limit(timeout)
        sent_at = clock()
        sock.sendall(packed)
        if self._quick:
            poll, spin_until = self._poll.poll, sent_at + SPIN
            while len(asking) == 1 and not poll(0) and clock() < spin_until:
                os.sched_yield()  # the server may be waiting for this very core
        while (answer := gets()) is False:
            size = sock.recv_into(self._buffer)
            if size == 0:
                raise ConnectionResetError(_HUNG_UP)
            self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # any buffer
        self._quick = CAN_SPIN and clock() - sent_at < QUICK
        return answer

    def _limit(self, timeout: float) -> None:
        """Have sending and receiving give up after so many seconds."""
        self._timeout = timeout
        if not (_KERNEL_WAITS and type(self._sock) is socket.socket):
            self._sock.settimeout(timeout)
            return
        # Python would ask before each whether it can be done; the kernel needs no asking.
        limit = struct.pack("ll", int(timeout), max(1, int(timeout % 1 * 1_000_000)))
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _receive(self) -> None:
        size = self._sock.recv_into(self._buffer)
        if size == 0:
            raise ConnectionResetError(_HUNG_UP)
        self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # takes any buffer

    def fileno(self) -> int:
        """What to poll."""
        return self._sock.fileno()

    def send_some(self, unsent: memoryview) -> memoryview:
        """Send what can be sent without waiting; return the rest."""
        self._sock.settimeout(0)
        self._timeout = math.nan
        with contextlib.suppress(*_NOT_NOW):
            while unsent:
                unsent = unsent[self._sock.send(unsent) :]
        return unsent

    def received(self) -> Iterator[Any]:
        """Yield the answers that have come, without waiting; after `send_some`."""
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

        `meanwhile` is called as the port says; its times are on the port's clock.
        """
        numbers = [next(self.serials) for _ in requests]
        packed = (pack(*request, serial) for request, serial in zip(requests, numbers, strict=True))
        unsent = memoryview(b"".join(packed))
        replies: list[Reply] = []
        end = now() + timeout
        self._sock.settimeout(0)
        self._timeout = math.nan
        while len(replies) < len(requests):
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
                serial = numbers[len(replies)]
                refused = isinstance(answer, hiredis.ReplyError)
                replies.append(answer if refused else opened(answer, serial))
        return replies


def _wait(sock: socket.socket, seconds: float, *, writing: bool) -> None:
    """Return when the socket can be read, or written if that is wanted, or time is up."""
    if not hasattr(select, "poll"):
        select.select([sock], [sock] if writing else [], [], seconds)
        return
    poll = select.poll()
    poll.register(sock, select.POLLIN | (select.POLLOUT if writing else 0))
    poll.poll(math.ceil(seconds * 1000))


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


class BlockingWire:
    """The connections of a client's threads to one node.

    While a thread waits for an answer its connection is taken out of its place. A signal handler
    or a finalizer may run in that thread just then, and use the client too: on the same connection
    it would be given the answer that the thread is waiting for.
    """

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._thread = threading.local()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self.closed = False
        self._asking: list[None] = []
        """One entry for each thread that waits for an answer."""

    def _fresh(self, timeout: float) -> Link:
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=self._target.node)
        return self._keep(Link(self._target, min(timeout, self._timeout)))

    def _keep(self, link: Link) -> Link:
        self._links.add(link)
        if self.closed:
            link.close()
        return link

    def drop(self) -> None:
        """Throw away the calling thread's connection."""
        link: Link | None = self._thread.__dict__.pop("link", None)
        if link is not None:
            link.close()

    def close(self) -> None:
        """Close every thread's connection; a request under way ends with an error."""
        self.closed = True
        for link in self._all_links():
            if link.generation == generation():
                link.close()

    def _all_links(self) -> list[Link]:
        while True:
            try:
                return list(self._links)
            except RuntimeError:  # noqa: PERF203 - a thread connected just now
                continue

    def _unknown(self, error: BaseException | str) -> OutcomeUnknown:
        node = self._target.node
        if isinstance(error, (BlockingIOError, TimeoutError)):
            error = "no answer in time"
        return OutcomeUnknown(f"{node} did not answer: {error}", node=node)

    def call(self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float) -> Reply:
        """Run a script on the node, once; as `Port.call`, blocking."""
        # The most travelled road of all: written out rather than divided up.
        asking = self._asking
        link: Link | None = self._thread.__dict__.pop("link", None)
        if link is None or self.closed or link.generation != generation():
            end = now() + timeout
            link = self._fresh(timeout)
            timeout = max(0.0, end - now())
        try:
            serial = next(link.serials)
            packed = by_sha(script, keys, args, serial)
            asking.append(None)
            try:
                reply = link.exchange(packed, timeout, asking)
            finally:
                asking.pop()
            if isinstance(reply, hiredis.ReplyError):
                reply = self._refused(link, str(reply), (script, keys, args), timeout)
            else:
                reply = opened(reply, serial)
        except (OSError, hiredis.HiredisError, StrayAnswer) as error:
            link.close()
            raise self._unknown(error) from error
        except BaseException:
            link.close()
            raise
        if self._thread.__dict__.setdefault("link", link) is not link:
            link.close()  # a signal handler made another meanwhile
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def _refused(
        self, link: Link, text: str, request: Request, timeout: float
    ) -> Reply | HoldfastError:
        if text.startswith("NOSCRIPT"):
            serial = next(link.serials)
            answer = link.exchange(by_text(*request, serial), timeout)
            if not isinstance(answer, hiredis.ReplyError):
                return opened(answer, serial)
            text = str(answer)
        if not is_denial(text):
            return self._target.refusal(text)
        keys = request[1]
        answers = [link.exchange(pack(probe), timeout) for probe in probes(keys)]
        return denial(text, answers, keys, self._target.node, self._target.user)

    def call_many(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Run scripts in one pipeline; as `Background.call_many`, blocking."""
        replies = self._call_many(requests, timeout, meanwhile, by_sha)
        unknown = [
            index
            for index, reply in enumerate(replies)
            if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")
        ]
        if unknown:
            again = [requests[index] for index in unknown]
            answers = self._call_many(again, timeout, meanwhile, by_text)
            for index, reply in zip(unknown, answers, strict=True):
                replies[index] = reply
        return [
            self._target.refusal(str(reply)) if isinstance(reply, hiredis.ReplyError) else reply
            for reply in replies
        ]

    def _call_many(
        self,
        requests: Sequence[Request],
        timeout: float,
        meanwhile: Callable[[], float],
        pack: Packer,
    ) -> list[Reply | HoldfastError]:
        replies: list[Reply | HoldfastError] = []
        failure: HoldfastError = self._unknown(f"no answer within {timeout} s")
        link: Link | None = None
        try:
            link = self._thread.__dict__.pop("link", None)
            if link is None or self.closed:
                link = self._keep(self._open_meanwhile(timeout, meanwhile))
            replies = link.call_many(requests, timeout, meanwhile, pack)
        except HoldfastError as error:
            failure = error
        except (OSError, hiredis.HiredisError, StrayAnswer) as error:
            failure = self._unknown(error)
        if link is not None and len(replies) == len(requests):
            self._thread.link = link
        elif link is not None:
            link.close()
        return replies + [failure] * (len(requests) - len(replies))

    def _open_meanwhile(self, timeout: float, meanwhile: Callable[[], float]) -> Link:
        if self.closed:
            raise NodeUnavailable("this client is closed", node=self._target.node)
        opening = Opening(self._target, timeout)
        end = now() + timeout
        while now() < end:
            due = meanwhile()
            if opening.done.wait(max(0.0, min(end, due) - now())):
                return opening.link()
        if opening.done.is_set():
            return opening.link()
        opening.abandon()
        node = self._target.node
        raise NodeUnavailable(f"cannot reach {node} within {timeout} s", node=node)
