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

import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.cluster import (
    ASK_AGAIN,
    Address,
    ClusterNode,
    Redirected,
    shared_slot,
)
from holdfast.wire.cluster_node_wire import ASKING, BY_SHA, BY_TEXT, Batch, NodeWire, run
from holdfast.wire.process import Worker, reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.cluster import Cluster

R = TypeVar("R", bound="tuple[Any, ...]")

PAUSE_FIRST, PAUSE_LONGEST = 0.002, 0.05
"""Seconds before a request is tried again that is redirected here and there: doubled each time."""

DETOURS, DETOURS_AMONG_MANY = 2, 8
"""Redirections that are followed without a pause; and at all, where others wait for the end."""


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
        """Run a script; as `StepPort.step`, blocking."""
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
        batches: dict[Address, Batch] = {}
        for address, travelling in by_address.items():
            batch = batches[address] = Batch(self._wire(address), max(0.0, end - now()))
            for journey in travelling:
                batch.add(journey.request, journey.how)
        run(list(batches.values()), end, meanwhile)
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
