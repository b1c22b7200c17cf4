"""Connections for threads: each thread holds one of its own, for as long as it lives.

A request goes out and its answer is awaited on the same connection. A connection that failed, or
whose caller was interrupted between the two, is thrown away: the next answer on it would be the
wrong one. A forked child makes its own.

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
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.copies import confirmed, most_needed, needed, wait_for
from holdfast.wire.diagnosis import unanswered
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, opened, pack, serials
from holdfast.wire.process import reset_after_fork
from holdfast.wire.refusals import denial, is_denial, is_doubtful, probes, probes_of_step
from holdfast.wire.sealed import check_seal, run_script, seal
from holdfast.wire.target import endpoint_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.sealed import Dialogue, Step
    from holdfast.wire.target import Endpoint, Target

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


class BlockingWire:
    """The connections of a client's threads to one node.

    While a thread waits for an answer its connection is taken out of its place. A signal handler
    or a finalizer may run in that thread just then, and use the client too: on the same connection
    it would be given the answer that the thread is waiting for.
    """

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._moves = target.longest_ttl < math.inf
        self.closed = False
        target.followed_by(self)
        """Commands for which a connection was ended."""
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._thread = threading.local()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._asking: list[None] = []
        """One entry for each thread that waits for an answer."""

    def _fresh(self, timeout: float, instead_of: Link | None) -> tuple[Link, float]:
        """Open a connection; return it, and when the time of its first request is over.

        Starting the embedded server takes none of that time.
        """
        if instead_of is not None and instead_of.stale:
            instead_of.close()
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=self._target.node)
        if self._target.prepare is not None:
            self._target.prepare()
        end = now() + timeout
        return self._keep(Link(self._target, min(timeout, self._timeout), prepare=False)), end

    def _keep(self, link: Link) -> Link:
        self._links.add(link)
        if self.closed:
            link.stale = True
            link.close()
        return link

    def _taken_out(self) -> Link | None:
        """Take the calling thread's connection out of its place, if it is of any use."""
        link: Link | None = self._thread.__dict__.pop("link", None)
        if link is not None and link.stale:
            link.close()
            return None
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
            link.stale = True
            link.close()

    def moved(self, endpoint: Endpoint) -> None:
        """Use no connection any more that leads elsewhere; what is under way ends as it will."""
        for link in self._all_links():
            link.stale = link.stale or link.endpoint != endpoint

    def _all_links(self) -> list[Link]:
        while True:
            try:
                return list(self._links)
            except RuntimeError:
                continue

    def _unknown(self, error: BaseException | str) -> OutcomeUnknown:
        return unanswered(self._target.node, error)

    def call(self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float) -> Reply:
        """Run a script on the node, once; as `Port.call`, blocking."""
        # The most travelled road of all: written out rather than divided up.
        asking = self._asking
        link: Link | None = self._thread.__dict__.pop("link", None)
        if link is None or link.stale:
            link, end = self._fresh(timeout, link)
            timeout = max(0.0, end - now())
        try:
            if keys.replicas and needed((script, keys, args)):
                reply = self._copied(link, (script, keys, args), now() + timeout, by_sha)
            else:
                serial = next(link.serials)
                packed = by_sha(script, keys, args, serial)
                asking.append(None)
                try:
                    reply = link.exchange(packed, timeout, asking)
                finally:
                    asking.pop()
                if isinstance(reply, hiredis.ReplyError):
                    reply = self._refused(link, str(reply), (script, keys, args), link.end)
                else:
                    reply = opened(reply, serial)
        except (OSError, hiredis.HiredisError, StrayAnswer) as error:
            link.close()
            raise self._unknown(error) from None
        except BaseException:
            link.close()
            raise
        if isinstance(reply, HoldfastError):
            link.stale = link.stale or (self._moves and is_doubtful(reply))
        # A signal handler may have made another meanwhile.
        if link.stale or self._thread.__dict__.setdefault("link", link) is not link:
            link.close()
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Reply:
        """Run a script; as `StepPort.step`, blocking."""
        link: Link | None = self._thread.__dict__.get("link")
        if link is not None and link.has_ended():
            self.drop()
        if not script.serial:
            return self._sealed((script, keys, args), timeout)
        return self.call(script, keys, cast("tuple[str, ...]", args), timeout)

    def _sealed(self, step: Step, timeout: float, before: bytes = b"") -> Reply:
        link, end = self.borrow(), now() + timeout
        if link is None:
            link, end = self._fresh(timeout, None)
        asking = self._asking
        try:
            asking.append(None)
            try:
                reply = link.converse(run_script(step), end, before, asking)
            finally:
                asking.pop()
            if isinstance(reply, hiredis.ReplyError):
                request = cast("Request", step)
                reply = self._refused(link, str(reply), request, end)
        except (OSError, hiredis.HiredisError, StrayAnswer) as error:
            link.close()
            raise self._unknown(error) from None
        except BaseException:
            link.close()
            raise
        if isinstance(reply, HoldfastError):
            link.stale = link.stale or (self._moves and is_doubtful(reply))
        self.give_back(link)
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def borrow(self) -> Link | None:
        """Take the calling thread's connection out of its place, if it has one."""
        return self._taken_out()

    def give_back(self, link: Link) -> None:
        """Put the connection in its place, for the next request of this thread."""
        # A signal handler may have made another meanwhile.
        if link.stale or self._thread.__dict__.setdefault("link", link) is not link:
            link.close()

    def _copied(
        self, link: Link, request: Request, end: float, pack: Packer
    ) -> Reply | HoldfastError:
        """Run a script whose answer counts once enough replicas have what it wrote."""
        replicas, serial, left = needed(request), next(link.serials), max(0.0, end - now())
        answer = link.exchange(pack(*request, serial) + wait_for(replicas, left), left)
        copies = link.next_answer()
        if not isinstance(answer, hiredis.ReplyError):
            node, user = self._target.node, self._target.user
            return confirmed(opened(answer, serial), copies, replicas, node, user)
        if str(answer).startswith("NOSCRIPT") and pack is by_sha:
            return self._copied(link, request, end, by_text)
        return self._refused(link, str(answer), request, end)

    def _refused(
        self, link: Link, text: str, request: Request, end: float
    ) -> Reply | HoldfastError:
        node, user = self._target.node, self._target.user
        if text.startswith("NOSCRIPT"):
            serial = next(link.serials)
            answer = link.exchange(by_text(*request, serial), max(0.0, end - now()))
            if not isinstance(answer, hiredis.ReplyError):
                return opened(answer, serial)
            text = str(answer)
        if not is_denial(text):
            return self._target.refusal(text)
        keys = request[1]
        questions = probes_of_step(keys) if keys.spare else probes(keys)
        first = link.exchange(b"".join(map(pack, questions)), max(0.0, end - now()))
        answers = [first, *(link.next_answer() for _ in questions[1:])]
        return denial(text, answers, keys, node, user)

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
        for index, reply in enumerate(replies):
            if isinstance(reply, hiredis.ReplyError):
                replies[index] = self._target.refusal(str(reply))
        if self._moves and any(map(is_doubtful, replies)):
            self.drop()
        return replies

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
            link = self._taken_out()
            if link is None or self.closed:
                link = self._keep(self._open_meanwhile(timeout, meanwhile))
            replies = link.call_many(requests, timeout, meanwhile, pack)
        except HoldfastError as error:
            failure = error
        except (OSError, hiredis.HiredisError, StrayAnswer) as error:
            failure = self._unknown(error)
        expected = len(requests) + (most_needed(requests) > 0)
        if link is not None and len(replies) == expected:
            self._thread.link = link
        elif link is not None:
            link.close()
        replies += [failure] * (expected - len(replies))
        node, user, copies = self._target.node, self._target.user, replies[-1]
        return [
            confirmed(reply, copies, needed(request), node, user)
            for request, reply in zip(requests, replies, strict=False)
        ]

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
        raise self._target.too_slow()
