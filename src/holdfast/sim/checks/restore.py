"""RENEW and RESTORE on several nodes: which renewals count, and which nodes get the lease then.

A renewal that a majority of the nodes answers counts (RENEW). After such a renewal, and only then,
the lease is given to the nodes that do not have it (RESTORE). A lease that no majority confirmed is
not given to any node: it may be over, and another client may have held the lock since (S5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.world import World

RESTORED_WITHIN = SECOND // 2
"""Microseconds after a renewal by which the nodes that do not have the lease have it."""

IN_TIME = 0.8
"""Seconds within which an answer to a renewal is certainly not too late."""


class _Renewal(NamedTuple):
    request: Request
    sent_at: float
    """On the clock of the client."""
    answers: list[float]
    """When each node that kept it answered."""


class RestoreCheck:
    """The last renewal of each token, and the nodes that did not have the lease then."""

    def __init__(
        self,
        world: World,
        key: bytes,
        nodes: Sequence[Server],
        fail: Callable[[str, str], None],
    ) -> None:
        self._world = world
        self._key = key
        self._nodes = nodes
        self._majority = len(nodes) // 2 + 1
        self._fail = fail
        self._renewals: dict[str, _Renewal] = {}
        self._restoring: dict[str, Request] = {}
        """The last vote that gives each token to nodes which do not have it."""
        self._changes = dict.fromkeys([node.name for node in nodes], 0)
        """How often each node was taken or released."""
        self._free: dict[str, dict[str, int]] = {}
        """Of each token, the nodes that were free at its last renewal."""

    def renews(self, client: SimClient, request: Request) -> None:
        """A client sends a renewal to the nodes."""
        self._renewals[request[2][0]] = _Renewal(request, client.now(), [])

    def kept(self, client: SimClient, request: Request) -> bool:
        """A node's answer arrived: it keeps the lease. Say whether a majority does from now on."""
        renewal = self._renewals.get(request[2][0])
        if renewal is None or renewal.request is not request:
            return False
        renewal.answers.append(client.now())
        return len(renewal.answers) == self._majority

    def failed(self, client: SimClient, token: str) -> None:
        """A client considers its last renewal of a token failed."""
        _, sent_at, answers = self._renewals[token]
        in_time = sum(each < sent_at + IN_TIME for each in answers)
        if in_time >= self._majority and not client.was_stopped_since(sent_at):
            self._fail("RENEW", f"{in_time} nodes renewed {token}, and that did not count")

    def restores(self, request: Request) -> None:
        """A client that holds the lock sends its token to a node that does not have it."""
        token = request[2][0]
        if self._restoring.get(token) is request:  # to one more node, or in full
            return
        self._restoring[token] = request
        renewal = self._renewals.get(token)
        have = 0 if renewal is None else len(renewal.answers)
        if have < self._majority:
            self._fail("S5", f"{token} is given to more nodes, and {have} have confirmed it")

    def changed(self, node: str) -> None:
        """A node was taken, or released."""
        self._changes[node] += 1

    def confirmed(self, token: str, is_held: Callable[[], bool]) -> None:
        """A majority renewed a token: soon no node is free that was free at two renewals."""
        before, now = self._free.get(token, {}), self._free_nodes()
        self._free[token] = now
        if any(before.get(node) == changes for node, changes in now.items()):
            still = {node: changes for node, changes in now.items() if before.get(node) == changes}
            self._world.after(RESTORED_WITHIN, lambda: self._is_restored(token, still, is_held))

    def _free_nodes(self) -> dict[str, int]:
        return {
            node.name: self._changes[node.name]
            for node in self._nodes
            if node.data.string(self._key) is None
        }

    def _is_restored(self, token: str, free: dict[str, int], is_held: Callable[[], bool]) -> None:
        now = self._free_nodes()
        left = [node for node, changes in free.items() if now.get(node) == changes]
        if left and is_held():
            self._fail("RESTORE", f"{token} was renewed twice, and {', '.join(left)} is free")
