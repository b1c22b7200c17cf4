"""The connections of a client's threads to one node of a cluster, and requests to many at once."""

from __future__ import annotations

import math
import select
import time
from typing import TYPE_CHECKING, Any, cast

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable
from holdfast.wire.blocking import BlockingWire
from holdfast.wire.clock import now
from holdfast.wire.copies import confirmed, most_needed, needed, wait_for
from holdfast.wire.link import Link, Opening
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, opened, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Reply, Request
    from holdfast.wire.cluster import ClusterNode
    from holdfast.wire.sealed import Step

SHORT = 0.02
"""Seconds to wait for the connection to a node that did not answer before."""

LOOK_EVERY = 0.002
"""Seconds between two looks at connections that are being opened."""

BY_SHA, BY_TEXT, ASKING = "by its sha", "by its text", "by its text, after ASKING"

ASKS = pack(("ASKING",))


class NodeWire(BlockingWire):
    """The connections of a client's threads to one node of a cluster."""

    def __init__(self, target: ClusterNode, timeout: float) -> None:
        super().__init__(target, timeout)
        self.silent = False
        """It did not answer what it was sent last in the background."""

    def _begin(self) -> None:
        super()._begin()
        self._opening: Opening | None = None

    def drop(self) -> None:
        """Throw away the calling thread's connection, and one that is being opened."""
        super().drop()
        self._abandon_opening()

    def close(self) -> None:
        """Close every thread's connection; a request under way ends with an error."""
        super().close()
        self._abandon_opening()

    def _abandon_opening(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.abandon()

    def call_asking(self, request: Request, timeout: float) -> Reply:
        """Run a script whose keys have moved here ahead of their slot; otherwise as `call`."""
        link, end = self.borrow(), now() + timeout
        if link is None:
            link, end = self._fresh(timeout, None)
        replicas = needed(request)
        try:
            link.exchange(ASKS, max(0.0, end - now()))
            serial = next(link.serials)
            reply = link.exchange(by_text(*request, serial), max(0.0, end - now()))
            refused = isinstance(reply, hiredis.ReplyError)
            reply = self._target.refusal(str(reply)) if refused else opened(reply, serial)
            if replicas and not refused:
                left = max(0.0, end - now())
                reply = self.confirmed(
                    request, reply, link.exchange(wait_for(replicas, left), left)
                )
        except (OSError, hiredis.HiredisError, StrayAnswer) as error:
            link.close()
            raise self._unknown(error) from None
        except BaseException:
            link.close()
            raise
        self.give_back(link)
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def step_asking(self, step: Step, timeout: float) -> Reply:
        """Do what `step` does with keys that have moved here ahead of their slot."""
        if not step[0].serial:
            return self._sealed(step, timeout, before=ASKS)
        return self.call_asking(cast("Request", step), timeout)

    def confirmed(self, request: Request, reply: Reply, copies: object) -> Reply | HoldfastError:
        """Return the answer to a request, or why it does not count: too few replicas have it."""
        target = self._target
        return confirmed(reply, copies, needed(request), target.node, target.user)

    def look_for_link(self, timeout: float) -> Link | None:
        """The connection that is being opened in the background, once it is; None until then.

        For the one thread that may not wait for it. It is opened also if nobody asks for a while.

        Raises:
            NodeUnavailable: it could not be opened.
        """
        if self.closed:
            raise NodeUnavailable("this client is closed", node=self._target.node)
        if self._opening is None:
            self._opening = Opening(self._target, timeout)
        if not self._opening.done.is_set():
            return None
        opening, self._opening = self._opening, None
        return self._keep(opening.link())

    def unanswered(self, why: object) -> HoldfastError:
        """Say that a request was sent and not answered."""
        return self._unknown(why if isinstance(why, Exception) else str(why))

    def unreached(self) -> HoldfastError:
        """Say that there is no connection."""
        return self._target.too_slow()

    def refused(self, text: str) -> HoldfastError:
        """Say what an error reply means."""
        return self._target.refusal(text)


class Batch:
    """Requests on their way to one node, and the answers that came."""

    def __init__(self, wire: NodeWire, timeout: float) -> None:
        self.wire = wire
        self.error: HoldfastError | None = None
        self.answers: list[Any] = []
        self._timeout = timeout
        self._requests: list[tuple[Request, str]] = []
        self._due: list[bytes] = []  # the serials of answers that have not come; of others, none
        self._replicas = 0
        self._bare: object = None
        """The last answer without a serial: in the end, of WAIT."""
        self._unsent = memoryview(b"")
        self._sent = False
        self.link = wire.borrow()

    def add(self, request: Request, how: str) -> None:
        """Have one more request sent."""
        self._requests.append((request, how))

    @property
    def done(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.error is not None or (self._sent and not self._due)

    def step(self) -> None:
        """Do what can be done without waiting."""
        try:
            if self.link is None:
                self.link = self.wire.look_for_link(self._timeout)
                if self.link is None:
                    return
            if not self._sent:
                self._pack(self.link)
            self._unsent = self.link.send_some(self._unsent)
            for answer in self.link.received():
                self._take_in(answer)
        except HoldfastError as error:
            self.error = error
        except (OSError, hiredis.HiredisError, StrayAnswer) as error:
            self.error = self.wire.unanswered(error)

    def _pack(self, link: Link) -> None:
        packed, self._sent = [], True
        for request, how in self._requests:
            serial = next(link.serials)
            if how is ASKING:
                packed.append(ASKS)
                self._due.append(b"")
            pack_ = by_sha if how is BY_SHA else by_text
            packed.append(pack_(*request, serial))
            self._due.append(serial)
        self._replicas = most_needed(request for request, _ in self._requests)
        if self._replicas:
            packed.append(wait_for(self._replicas, self._timeout))
            self._due.append(b"")
        self._due.reverse()
        self._unsent = memoryview(b"".join(packed))

    def _take_in(self, answer: object) -> None:
        if not self._due:
            raise StrayAnswer
        serial = self._due.pop()
        if not serial:
            self._bare = answer
            return
        refused = isinstance(answer, hiredis.ReplyError)
        self.answers.append(answer if refused else opened(answer, serial))

    def finish(self) -> list[Any]:
        """Return an answer, or an error, for each request; give the connection back."""
        self.wire.silent = not self.done or self.error is not None
        if self.error is None and not self.done:
            self.error = self.wire.unreached()
            if self.link is not None:
                self.error = self.wire.unanswered(f"no answer within {self._timeout} s")
        if self.link is not None and self.error is None:
            self.wire.give_back(self.link)
        elif self.link is not None:
            self.link.close()
        replies = self.answers + [self.error] * (len(self._requests) - len(self.answers))
        if not self._replicas:
            return replies
        copies = self._bare if self.error is None else self.error
        return [
            self.wire.confirmed(request, reply, copies)
            for (request, _), reply in zip(self._requests, replies, strict=True)
        ]

    @property
    def wants_to_write(self) -> bool:
        """Whether something is not sent yet."""
        return bool(self._unsent)


def run(batches: Sequence[Batch], end: float, meanwhile: Callable[[], float]) -> None:
    """Carry all of them out at once, for as long as there is time."""
    short = now() + SHORT
    while True:
        due = meanwhile()
        for batch in batches:
            if not batch.done:
                batch.step()
        left = [batch for batch in batches if not batch.done]
        # Others must not be kept waiting again and again for a node that has hung.
        worth_it = [batch for batch in left if batch.link is not None or not batch.wire.silent]
        until = end if worth_it else min(end, short)
        if not left or now() >= until:
            return
        _wait(left, min(until, due) - now())


def _wait(batches: Sequence[Batch], seconds: float) -> None:
    links = [(batch.link, batch.wants_to_write) for batch in batches if batch.link is not None]
    if len(links) < len(batches):
        seconds = min(seconds, LOOK_EVERY)  # nothing tells when a connection is open
    if not links:
        time.sleep(max(0.0, seconds))
        return
    if not hasattr(select, "poll"):
        writing = [link for link, writes in links if writes]
        select.select([link for link, _ in links], writing, [], max(0.0, seconds))
        return
    poll = select.poll()
    for link, writes in links:
        poll.register(link, select.POLLIN | (select.POLLOUT if writes else 0))
    poll.poll(max(0, math.ceil(seconds * 1000)))
