"""Connections for threads: each thread holds one of its own, for as long as it lives.

A request goes out and its answer is awaited on the same connection. A connection that failed, or
whose caller was interrupted between the two, is thrown away: the next answer on it would be the
wrong one. A forked child makes its own.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING, cast

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.copies import confirmed, most_needed, needed, wait_for
from holdfast.wire.diagnosis import unanswered
from holdfast.wire.link import Link, Opening, Packer
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, opened, pack
from holdfast.wire.process import reset_after_fork
from holdfast.wire.refusals import denial, is_denial, is_doubtful, probes, probes_of_step
from holdfast.wire.sealed import run_script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.sealed import Step
    from holdfast.wire.target import Endpoint, Target


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
