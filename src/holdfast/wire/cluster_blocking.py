"""The connections of a client's threads to a cluster: those of `wire.blocking`, per node.

A request goes to the node that owns the slot of its keys. A node that replies with a redirect has
executed nothing. So the request follows the redirect, while its caller has time:

- MOVED: another node owns the slot. The slot map is updated.
- ASK: the slot is moving, and these keys have already moved. Only this request follows, after
  ASKING.
- TRYAGAIN: the slot is moving, and some of these keys have moved. The request is retried after a
  pause.

A node that does not reply becomes suspect. The next request to it queries the slot map first,
within its own timeout. The renewer does not wait for that query: a separate thread makes it.
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
    MAP_REFRESH_INTERVAL,
    Address,
    ClusterNode,
    Redirected,
    common_slot,
)
from holdfast.wire.cluster_node_wire import ASKING, EVAL, EVALSHA, Batch, NodeWire, run_batches
from holdfast.wire.process import Worker, reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.cluster import Cluster

R = TypeVar("R", bound="tuple[Any, ...]")

PAUSE_FIRST, PAUSE_LONGEST = 0.002, 0.05
"""Seconds of the first and the longest pause before a redirected request is sent again. The pause
doubles each time."""

IMMEDIATE_REDIRECTS, MAX_BATCH_REDIRECTS = 2, 8
"""The number of redirects that a request follows without a pause; and the number that a request of
a batch follows at all, because the other requests wait for it."""


class ClusterWire:
    """The connections of a client's threads to the nodes of a cluster; as `BlockingWire`."""

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self.cluster = cluster
        self._timeout = timeout
        self.closed = False
        self._nodes: dict[Address, NodeWire] = {}
        self._reset()
        reset_after_fork(self._reset)

    def _reset(self) -> None:
        self._map_query: Worker | None = None
        self._mutex = threading.RLock()

    def _wire(self, address: Address) -> NodeWire:
        wire = self._nodes.get(address)
        if wire is None:
            for gone in set(self._nodes) - self.cluster.nodes:
                self._nodes.pop(gone, None)  # its connections are closed when no request uses them
            made = NodeWire(self.cluster.node(address), self._timeout)
            made.closed = self.closed
            wire = self._nodes.setdefault(address, made)
        return wire

    def drop(self) -> None:
        """Close the calling thread's connections."""
        for wire in list(self._nodes.values()):
            wire.drop()

    def close(self) -> None:
        """Close the connections of all threads. Pending requests fail."""
        self.closed = True
        for wire in list(self._nodes.values()):
            wire.close()

    # The slot map

    def locate(self, slot: int, timeout: float) -> Address:
        """Return the owner of the slot. Query the cluster if it is unknown or suspect.

        Raises:
            NodeUnavailable: the slot has no owner, or no node replied in time.
            ConfigurationError: this is no cluster, or it denies the query.
        """
        cluster = self.cluster
        owner = cluster.owner(slot)
        if owner is None or cluster.needs_refresh(slot):
            # A caller that knows an owner does not wait for the query of another thread.
            if self._mutex.acquire(timeout=timeout if owner is None else 0):
                try:
                    if cluster.needs_refresh(slot):
                        self._query_map(timeout)
                except NodeUnavailable:
                    if owner is None:
                        raise
                finally:
                    self._mutex.release()
            owner = cluster.owner(slot)
        if owner is None:
            raise cluster.slot_unassigned(slot)
        return owner

    def _query_map(self, timeout: float) -> None:
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=self.cluster.name)
        end, failures = now() + timeout, []
        for node in self.cluster.nodes_to_query():
            left = end - now()
            if left <= 0:
                break
            try:
                # Half of the time: a node that hangs leaves time for the others.
                reply = _fetch_slots(self.cluster, node, left / 2)
            except NodeUnavailable as error:
                failures.append(error)
            else:
                self.cluster.update_map(reply, node)
                return
        raise self.cluster.unreachable(failures)

    def _refresh_map_in_background(self, slots: Sequence[int]) -> None:
        """Start a thread that queries the map, if an owner of these slots is suspect."""
        query = self._map_query
        if (query is None or not query.is_running) and any(map(self.cluster.needs_refresh, slots)):
            self._map_query = Worker(self._locate_quietly, slots, name="holdfast-connect")
            self._map_query.start()

    def _locate_quietly(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self.cluster.needs_refresh(slot):
                try:
                    self.locate(slot, self._timeout)
                except HoldfastError:
                    return

    # Requests

    def call(self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float) -> Reply:
        """Run a script on the node that owns the lock; as `holdfast.port.Call`, blocking."""
        return self._route(
            (script, keys, args), timeout, NodeWire.call, NodeWire.call_asking, keys.slot
        )

    def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Reply:
        """Run a script; as `AtomicPort.step`, blocking."""
        return self._route(
            (script, keys, args), timeout, NodeWire.step, NodeWire.step_asking, common_slot(keys)
        )

    def _route(
        self,
        request: R,
        timeout: float,
        call: Callable[..., Reply],
        call_asking: Callable[[NodeWire, R, float], Reply],
        slot: int,
    ) -> Reply:
        end, redirects, asking = now() + timeout, Redirects(), None
        while True:
            address = asking or self.locate(slot, max(0.0, end - now()))
            wire, left = self._wire(address), max(0.0, end - now())
            try:
                if asking is None:
                    return call(wire, *request, left)
                return call_asking(wire, request, left)
            except Redirected as redirected:
                asking = redirects.follow(redirected, slot, self.cluster)
                if now() + redirects.pause >= end:
                    raise redirected.unavailable() from None
                if redirects.pause:
                    time.sleep(redirects.pause)
            except OutcomeUnknown:
                self.cluster.suspect(address)
                raise
            except NodeUnavailable:
                self.cluster.suspect(address)
                if self.closed or not redirects.may_retry(end):
                    raise
                asking = None
                time.sleep(redirects.pause)

    def call_many(
        self, requests: Sequence[Request], timeout: float, on_tick: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Run scripts on several nodes in parallel; as `Background.call_many`, blocking."""
        end = now() + timeout
        all_routed = [_RoutedRequest(request) for request in requests]
        slots = [keys.slot for _, keys, _ in requests]
        self._refresh_map_in_background(slots)
        while True:
            unfinished = [routed for routed in all_routed if not routed.over]
            at = now()
            if not unfinished:
                break
            if at >= end:
                for routed in unfinished:
                    routed.give_up(self.cluster)
                break
            ready = [each for each in unfinished if each.ready(at) and each.locate(self.cluster)]
            if ready:
                self._send(ready, end, on_tick)
            else:
                pauses = [each.not_before for each in unfinished if each.not_before > at]
                until = min([end, at + PAUSE_FIRST if not pauses else min(pauses)])
                time.sleep(max(0.0, min(until, on_tick()) - now()))
        return [routed.reply for routed in all_routed]

    def _send(
        self, all_routed: Sequence[_RoutedRequest], end: float, on_tick: Callable[[], float]
    ) -> None:
        by_address: defaultdict[Address, list[_RoutedRequest]] = defaultdict(list)
        for routed in all_routed:
            by_address[routed.address].append(routed)
        batches: dict[Address, Batch] = {}
        for address, group in by_address.items():
            batch = batches[address] = Batch(self._wire(address), max(0.0, end - now()))
            for routed in group:
                batch.add(routed.request, routed.mode)
        run_batches(list(batches.values()), end, on_tick)
        for address, batch in batches.items():
            replies = batch.finish()
            if batch.error is not None:
                self.cluster.suspect(address)
            for routed, reply in zip(by_address[address], replies, strict=True):
                if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT"):
                    routed.mode = EVAL
                elif isinstance(reply, hiredis.ReplyError):
                    routed.handle_reply(batch.wire.error_for_reply(str(reply)), self.cluster)
                else:
                    routed.handle_reply(reply, self.cluster)


class Redirects:
    """The redirects of one request, and the pause before its next attempt."""

    def __init__(self) -> None:
        self.pause = 0.0
        self.count = 0
        self._missed = False

    def may_retry(self, end: float) -> bool:
        """Whether to retry once after an unavailable node: a replica may have taken over."""
        missed, self._missed = self._missed, True
        self.pause = max(self.pause, MAP_REFRESH_INTERVAL)
        return not missed and now() + self.pause < end

    def follow(self, redirected: Redirected, slot: int, cluster: Cluster) -> Address | None:
        """Update the map from a redirect. For ASK, return the node to send this request to."""
        self.count += 1
        if self.count > IMMEDIATE_REDIRECTS or redirected.address is None:
            self.pause = min(2 * self.pause or PAUSE_FIRST, PAUSE_LONGEST)
        if redirected.kind == "MOVED" and redirected.address is not None:
            cluster.set_owner(slot, redirected.address)
        if redirected.kind == "ASK" and redirected.address is not None:
            return cluster.address(*redirected.address)
        return None


class _RoutedRequest:
    """One request of a batch, until its reply has arrived."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.slot = request[1].slot
        self.mode = EVALSHA
        self.address: Address = ("", 0)
        self.not_before = 0.0
        self.over = False
        self.reply: Reply | HoldfastError = None
        self._redirects = Redirects()
        self._asking: Address | None = None
        self._redirected: Redirected | None = None

    def ready(self, at: float) -> bool:
        """Whether its pause is over."""
        return at >= self.not_before

    def locate(self, cluster: Cluster) -> bool:
        """Set `address` to the node to send it to. Return False if that node is unknown."""
        owner = self._asking or cluster.owner(self.slot)
        if owner is not None:
            self.address = owner
        return owner is not None

    def handle_reply(self, reply: Reply | HoldfastError, cluster: Cluster) -> None:
        """Store the reply, or follow a redirect."""
        if isinstance(reply, Redirected):
            self._redirected = reply
            self._asking = self._redirects.follow(reply, self.slot, cluster)
            self.mode = EVALSHA if self._asking is None else ASKING
            self.not_before = now() + self._redirects.pause if self._redirects.pause else 0.0
            if self._redirects.count > MAX_BATCH_REDIRECTS:
                self.give_up(cluster)
        else:
            self.reply, self.over = reply, True

    def give_up(self, cluster: Cluster) -> None:
        """End it with an error: there is no time left."""
        redirected = self._redirected
        unavailable = redirected.unavailable() if redirected else cluster.slot_unassigned(self.slot)
        self.reply, self.over = unavailable, True


def _fetch_slots(cluster: Cluster, node: ClusterNode, timeout: float) -> object:
    connection, reply = node.open(timeout, cluster.query_map(node))
    connection.disconnect()
    return reply
