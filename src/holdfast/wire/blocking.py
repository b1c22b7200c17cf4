"""Connections for threads: each thread holds one of its own, for as long as it lives.

A request goes out and its answer is awaited on the same connection. A connection that failed, or
whose caller was interrupted between the two, is thrown away: the next answer on it would be the
wrong one. After a fork the child makes its own; the parent's socket is closed there unused.

Two ways of waiting for an answer. A server on this machine answers sooner than a sleeping thread
can be woken, so after a quick answer the next one is first looked for without going to sleep, for
at most `SPIN` seconds. A server far away is never quick, and is never waited for like that.
"""

from __future__ import annotations

import math
import os
import select
import ssl
import threading
import time
import weakref
from typing import TYPE_CHECKING

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.packing import by_sha, by_text, pack
from holdfast.wire.process import pid
from holdfast.wire.refusals import denial, is_denial, probes, refusal

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.target import Target

SPIN = 0.0001
QUICK = 0.0002
"""An answer within this time, seconds, makes the next one worth looking for without sleeping."""

CAN_SPIN = hasattr(select, "poll") and hasattr(os, "sched_yield") and (os.cpu_count() or 1) > 1
LEAST_CONNECT = 0.05
"""Seconds a connect is given in the background even when a deadline is nearer."""

_BUFFER = 16_384
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Link:
    """One connection of one thread."""

    def __init__(self, target: Target, timeout: float, *, prepare: bool = True) -> None:
        self.pid = pid()
        self._connection = target.connect(timeout, prepare=prepare)
        # redis-py has no public name for it; the oldest and newest supported both have this one.
        self._sock: socket.socket = self._connection._sock  # noqa: SLF001
        self._timeout = timeout
        self._reader = hiredis.Reader()
        self._buffer = bytearray(_BUFFER)
        self._quick = False
        if CAN_SPIN:
            self._poll = select.poll()
            self._poll.register(self._sock, select.POLLIN)

    def close(self) -> None:
        """Throw the connection away."""
        self._connection.disconnect()

    def exchange(self, packed: bytes, timeout: float) -> Reply:
        """Send one request and return its answer, which may be a `hiredis.ReplyError`."""
        sock = self._sock
        if timeout != self._timeout:
            sock.settimeout(timeout)
            self._timeout = timeout
        sent_at = time.perf_counter()
        sock.sendall(packed)
        if self._quick:
            spin_until = sent_at + SPIN
            while not self._poll.poll(0) and time.perf_counter() < spin_until:
                os.sched_yield()  # the server may be waiting for this very core
        while (reply := self._reader.gets()) is False:
            self._receive()
        self._quick = CAN_SPIN and time.perf_counter() - sent_at < QUICK
        return reply

    def _receive(self) -> None:
        size = self._sock.recv_into(self._buffer)
        if size == 0:
            raise ConnectionResetError("the server closed the connection")
        self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # takes any buffer

    def exchange_many(
        self, packed: Sequence[bytes], timeout: float, meanwhile: Callable[[], float | None]
    ) -> list[Reply]:
        """Send requests in one go and return as many answers as came within `timeout`.

        `meanwhile` is called as the port says; its times are on the port's clock.
        """
        replies: list[Reply] = []
        unsent = memoryview(b"".join(packed))
        end = now() + timeout
        self._sock.settimeout(0)
        self._timeout = 0
        while len(replies) < len(packed):
            due = meanwhile()
            left = end - now()
            if left <= 0:
                break
            try:
                while unsent:
                    unsent = unsent[self._sock.send(unsent) :]
                self._receive()
            except _NOT_NOW:
                wait = left if due is None else min(left, due - now())
                _wait(self._sock, max(0.0, wait), writing=bool(unsent))
            while (reply := self._reader.gets()) is not False:
                replies.append(reply)
        return replies


def _wait(sock: socket.socket, seconds: float, *, writing: bool) -> None:
    """Return when the socket can be read, or written if that is wanted, or time is up."""
    if not hasattr(select, "poll"):
        select.select([sock], [sock] if writing else [], [], seconds)
        return
    poll = select.poll()
    poll.register(sock, select.POLLIN | (select.POLLOUT if writing else 0))
    poll.poll(math.ceil(seconds * 1000))


class BlockingWire:
    """The connections of a client's threads to one node."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._thread = threading.local()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self.closed = False

    def _link(self) -> Link:
        link: Link | None = getattr(self._thread, "link", None)
        if link is not None and link.pid == pid():
            return link
        return self._open(self._timeout, prepare=True)

    def _open(self, timeout: float, *, prepare: bool) -> Link:
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=self._target.node)
        link = self._thread.link = Link(self._target, timeout, prepare=prepare)
        self._links.add(link)
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
            if link.pid == pid():
                link.close()

    def _all_links(self) -> list[Link]:
        while True:
            try:
                return list(self._links)
            except RuntimeError:  # noqa: PERF203 - a thread connected just now
                continue

    def _unknown(self, error: BaseException | str) -> OutcomeUnknown:
        node = self._target.node
        return OutcomeUnknown(f"{node} did not answer: {error}", node=node)

    def _exchange(self, packed: bytes, timeout: float) -> Reply:
        link = self._link()
        try:
            return link.exchange(packed, timeout)
        except (OSError, hiredis.HiredisError) as error:
            self.drop()
            raise self._unknown(error) from error
        except BaseException:
            self.drop()
            raise

    def call(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        args: tuple[str, ...],
        timeout: float,
    ) -> Reply:
        """Run a script on the node, once; as `Port.call`, blocking."""
        reply = self._exchange(by_sha(script, keys, args), timeout)
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith("NOSCRIPT"):
                reply = self._exchange(by_text(script, keys, args), timeout)
            if isinstance(reply, hiredis.ReplyError):
                raise self._refusal(str(reply), keys, timeout)
        return reply

    def _refusal(self, text: str, keys: tuple[bytes, ...], timeout: float) -> HoldfastError:
        if not is_denial(text):
            return refusal(text, self._target.node)
        answers = [self._exchange(pack(probe), timeout) for probe in probes(keys)]
        return denial(text, answers, keys, self._target.node, self._target.user)

    def call_many(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], float | None]
    ) -> list[Reply | HoldfastError]:
        """Run scripts in one pipeline; as `Background.call_many`, blocking."""
        packed = [by_sha(*request) for request in requests]
        replies = self._exchange_many(packed, timeout, meanwhile)
        unknown = [
            index
            for index, reply in enumerate(replies)
            if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")
        ]
        if unknown:
            texts = [by_text(*requests[index]) for index in unknown]
            again = self._exchange_many(texts, timeout, meanwhile)
            for index, reply in zip(unknown, again, strict=True):
                replies[index] = reply
        node = self._target.node
        return [
            refusal(str(reply), node) if isinstance(reply, hiredis.ReplyError) else reply
            for reply in replies
        ]

    def _exchange_many(
        self, packed: Sequence[bytes], timeout: float, meanwhile: Callable[[], float | None]
    ) -> list[Reply | HoldfastError]:
        replies: list[Reply | HoldfastError] = []
        failure: HoldfastError = self._unknown(f"no answer within {timeout} s")
        try:
            link: Link | None = getattr(self._thread, "link", None)
            if link is None:
                # Connecting cannot be watched over, so it must not outlast the next deadline.
                due = meanwhile()
                left = timeout if due is None else min(timeout, due - now())
                link = self._open(max(LEAST_CONNECT, left), prepare=False)
            replies = link.exchange_many(packed, timeout, meanwhile)
        except HoldfastError as error:
            failure = error
        except (OSError, hiredis.HiredisError) as error:
            failure = self._unknown(error)
        if len(replies) < len(packed):
            self.drop()
        return replies + [failure] * (len(packed) - len(replies))
