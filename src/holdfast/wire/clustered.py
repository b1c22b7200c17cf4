"""The connections of a client's threads to a cluster: those of `wire.blocking`, to each node.

A request goes to the node that serves its lock's slot. One that answers with a redirection has
carried nothing out, so the request may follow at once, for as long as its caller has time:

- MOVED: the slot is another node's. The map is put right.
- ASK: the slot is moving, and these keys have moved already. This one request follows.
- TRYAGAIN: the slot is moving, and these keys are in both places, or some of them in none. The
  request waits a moment.

A node that does not answer makes the map doubtful. It is asked for again by whoever comes next,
within their own time, and in the background by a thread of its own.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar, cast

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.blocking import BlockingWire, Link, Opening
from holdfast.wire.clock import now
from holdfast.wire.cluster import (
    ASK_AGAIN,
    Address,
    ClusterNode,
    Redirected,
    shared_slot,
)
from holdfast.wire.copies import confirmed, most_needed, needed, wait_for
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, opened, pack
from holdfast.wire.process import Worker, reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.cluster import Cluster
    from holdfast.wire.sealed import Step

R = TypeVar("R", bound="tuple[Any, ...]")

PAUSE_FIRST, PAUSE_LONGEST = 0.002, 0.05
"""Seconds before a request is tried again that is redirected here and there: doubled each time."""

DETOURS, DETOURS_AMONG_MANY = 2, 8
"""Redirections that are followed without a pause; and at all, where others wait for the end."""

SHORT = 0.02
"""Seconds to wait for the connection to a node that did not answer before."""

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


class _Batch:
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


def _run(batches: Sequence[_Batch], end: float, meanwhile: Callable[[], float]) -> None:
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


def _wait(batches: Sequence[_Batch], seconds: float) -> None:
    links = [(batch.link, batch.wants_to_write) for batch in batches if batch.link is not None]
    if len(links) < len(batches):
        seconds = min(seconds, PAUSE_FIRST)  # nothing tells when a connection is open
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


class ClusterWire:
    """The connections of a client's threads to the nodes of a cluster; as `BlockingWire`."""

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self.cluster = cluster
        self._timeout = timeout
        self.closed = False
        self._nodes: dict[Address, NodeWire] = {}
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._asking: Worker | None = None
        self._mutex = threading.RLock()

    def _wire(self, address: Address) -> NodeWire:
        wire = self._nodes.get(address)
        if wire is None:
            for gone in set(self._nodes) - self.cluster.nodes:
                self._nodes.pop(gone, None)  # and its connections with it, when none is in use
            made = NodeWire(self.cluster.node(address), self._timeout)
            made.closed = self.closed
            wire = self._nodes.setdefault(address, made)
        return wire

    def drop(self) -> None:
        """Throw away the calling thread's connections."""
        for wire in list(self._nodes.values()):
            wire.drop()

    def close(self) -> None:
        """Close every thread's connections; requests under way end with an error."""
        self.closed = True
        for wire in list(self._nodes.values()):
            wire.close()

    # The map

    def locate(self, slot: int, timeout: float) -> Address:
        """Find out who serves the slot, asking the cluster if that is not known, or doubtful.

        Raises:
            NodeUnavailable: nobody does, or nobody says so in time.
            ConfigurationError: this is no cluster, or does not let us ask.
        """
        cluster = self.cluster
        owner = cluster.owner(slot)
        if owner is None or cluster.doubtful(slot):
            # Whoever knows somebody to ask does not wait for another's asking.
            if self._mutex.acquire(timeout=timeout if owner is None else 0):
                try:
                    if cluster.doubtful(slot):
                        self._ask_for_map(timeout)
                except NodeUnavailable:
                    if owner is None:
                        raise
                finally:
                    self._mutex.release()
            owner = cluster.owner(slot)
        if owner is None:
            raise cluster.unserved(slot)
        return owner

    def _ask_for_map(self, timeout: float) -> None:
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=self.cluster.name)
        end, failures = now() + timeout, []
        for node in self.cluster.to_ask():
            left = end - now()
            if left <= 0:
                break
            try:
                # One that hangs leaves time for the others.
                answer = _slots(self.cluster, node, left / 2)
            except NodeUnavailable as error:
                failures.append(error)
            else:
                self.cluster.learn(answer, node)
                return
        raise self.cluster.unreachable(failures)

    def _ask_for_map_meanwhile(self, slots: Sequence[int]) -> None:
        """See that the map is asked for if it is doubtful, without waiting for it."""
        asking = self._asking
        if (asking is None or not asking.lives) and any(map(self.cluster.doubtful, slots)):
            self._asking = Worker(self._locate_quietly, slots, name="holdfast-connect")
            self._asking.start()

    def _locate_quietly(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self.cluster.doubtful(slot):
                try:
                    self.locate(slot, self._timeout)
                except HoldfastError:
                    return

    # Requests

    def call(self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float) -> Reply:
        """Run a script on the node that serves the lock, once; as `Port.call`, blocking."""
        return self._routed(
            (script, keys, args), timeout, NodeWire.call, NodeWire.call_asking, keys.slot
        )

    def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Reply:
        """Run a script, or the server's own command for it; as `StepPort.step`, blocking."""
        return self._routed(
            (script, keys, args), timeout, NodeWire.step, NodeWire.step_asking, shared_slot(keys)
        )

    def _routed(
        self,
        request: R,
        timeout: float,
        call: Callable[..., Reply],
        call_asking: Callable[[NodeWire, R, float], Reply],
        slot: int,
    ) -> Reply:
        end, detours, asking = now() + timeout, Detours(), None
        while True:
            address = asking or self.locate(slot, max(0.0, end - now()))
            wire, left = self._wire(address), max(0.0, end - now())
            try:
                if asking is None:
                    return call(wire, *request, left)
                return call_asking(wire, request, left)
            except Redirected as redirected:
                asking = detours.follow(redirected, slot, self.cluster)
                if now() + detours.pause >= end:
                    raise redirected.unavailable() from None
                if detours.pause:
                    time.sleep(detours.pause)
            except OutcomeUnknown:
                self.cluster.suspect(address)
                raise
            except NodeUnavailable:
                self.cluster.suspect(address)
                if self.closed or not detours.once_more(end):
                    raise
                asking = None
                time.sleep(detours.pause)

    def call_many(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Run scripts on all nodes at once; as `Background.call_many`, blocking."""
        end = now() + timeout
        journeys = [_Journey(request) for request in requests]
        slots = [keys.slot for _, keys, _ in requests]
        self._ask_for_map_meanwhile(slots)
        while True:
            on_the_way = [journey for journey in journeys if not journey.over]
            at = now()
            if not on_the_way:
                break
            if at >= end:
                for journey in on_the_way:
                    journey.give_up(self.cluster)
                break
            ready = [each for each in on_the_way if each.ready(at) and each.find(self.cluster)]
            if ready:
                self._send(ready, end, meanwhile)
            else:
                pauses = [each.not_before for each in on_the_way if each.not_before > at]
                until = min([end, at + PAUSE_FIRST if not pauses else min(pauses)])
                time.sleep(max(0.0, min(until, meanwhile()) - now()))
        return [journey.reply for journey in journeys]

    def _send(
        self, journeys: Sequence[_Journey], end: float, meanwhile: Callable[[], float]
    ) -> None:
        by_address: defaultdict[Address, list[_Journey]] = defaultdict(list)
        for journey in journeys:
            by_address[journey.address].append(journey)
        batches: dict[Address, _Batch] = {}
        for address, travelling in by_address.items():
            batch = batches[address] = _Batch(self._wire(address), max(0.0, end - now()))
            for journey in travelling:
                batch.add(journey.request, journey.how)
        _run(list(batches.values()), end, meanwhile)
        for address, batch in batches.items():
            replies = batch.finish()
            if batch.error is not None:
                self.cluster.suspect(address)
            for journey, reply in zip(by_address[address], replies, strict=True):
                if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT"):
                    journey.how = BY_TEXT
                elif isinstance(reply, hiredis.ReplyError):
                    journey.arrived(batch.wire.refused(str(reply)), self.cluster)
                else:
                    journey.arrived(reply, self.cluster)


class Detours:
    """Where a request is sent that was not carried out, and how long it rests before."""

    def __init__(self) -> None:
        self.pause = 0.0
        self.count = 0
        self._missed = False

    def once_more(self, end: float) -> bool:
        """Say whether it is worth looking who has taken over from a node that is away."""
        missed, self._missed = self._missed, True
        self.pause = max(self.pause, ASK_AGAIN)
        return not missed and now() + self.pause < end

    def follow(self, redirected: Redirected, slot: int, cluster: Cluster) -> Address | None:
        """Learn from a redirection; return whom to ask just this once, if that is what it says."""
        self.count += 1
        if self.count > DETOURS or redirected.address is None:
            self.pause = min(2 * self.pause or PAUSE_FIRST, PAUSE_LONGEST)
        if redirected.kind == "MOVED" and redirected.address is not None:
            cluster.moved(slot, redirected.address)
        if redirected.kind == "ASK" and redirected.address is not None:
            return cluster.address(*redirected.address)
        return None


class _Journey:
    """One of many requests, until its answer has come."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.slot = request[1].slot
        self.how = BY_SHA
        self.address: Address = ("", 0)
        self.not_before = 0.0
        self.over = False
        self.reply: Reply | HoldfastError = None
        self._detours = Detours()
        self._asking: Address | None = None
        self._redirected: Redirected | None = None

    def ready(self, at: float) -> bool:
        """Whether it may be sent now."""
        return at >= self.not_before

    def find(self, cluster: Cluster) -> bool:
        """Say whether it is known where to send it, and remember that."""
        owner = self._asking or cluster.owner(self.slot)
        if owner is not None:
            self.address = owner
        return owner is not None

    def arrived(self, reply: Reply | HoldfastError, cluster: Cluster) -> None:
        """Take in what became of it."""
        if isinstance(reply, Redirected):
            self._redirected = reply
            self._asking = self._detours.follow(reply, self.slot, cluster)
            self.how = BY_SHA if self._asking is None else ASKING
            self.not_before = now() + self._detours.pause if self._detours.pause else 0.0
            if self._detours.count > DETOURS_AMONG_MANY:
                self.give_up(cluster)
        else:
            self.reply, self.over = reply, True

    def give_up(self, cluster: Cluster) -> None:
        """There is no time left for it."""
        redirected = self._redirected
        unavailable = redirected.unavailable() if redirected else cluster.unserved(self.slot)
        self.reply, self.over = unavailable, True


def _slots(cluster: Cluster, node: ClusterNode, timeout: float) -> object:
    connection, answer = node.open(timeout, cluster.ask_for_map(node))
    connection.disconnect()
    return answer
