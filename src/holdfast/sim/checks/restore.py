"""RENEW and RESTORE in a quorum: which renewals count, and on which nodes a lease is restored.

A renewal counts if a majority of the nodes accepts it (RENEW). After such a renewal, and only then,
the client restores the lease on the nodes that do not have it (RESTORE). A lease without a majority
may be over, and another client may have held the lock since, so it is not restored (S5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.simulation import Simulation

RESTORED_WITHIN = SECOND // 2
"""Microseconds after a renewal within which the lease is restored."""

IN_TIME = 0.8
"""Seconds within which a reply to a renewal is certainly not too late."""


class _Renewal(NamedTuple):
    request: Request
    sent_at: float
    """On the clock of the client."""
    replies: list[float]
    """When the reply of each node that renewed it arrived."""


class RestoreCheck:
    """The last renewal of each token, and the nodes that were free then."""

    def __init__(
        self,
        sim: Simulation,
        key: bytes,
        nodes: Sequence[Server],
        fail: Callable[[str, str], None],
    ) -> None:
        self._sim = sim
        self._key = key
        self._nodes = nodes
        self._majority = len(nodes) // 2 + 1
        self._fail = fail
        self._renewals: dict[str, _Renewal] = {}
        self._restoring: dict[str, Request] = {}
        """By token, the last vote request that restores it."""
        self._changes = dict.fromkeys([node.name for node in nodes], 0)
        """By node, how often its holder changed."""
        self._free: dict[str, dict[str, int]] = {}
        """By token, the nodes that were free at its last renewal."""

    def renews(self, client: SimClient, request: Request) -> None:
        """A client sends a renewal to the nodes."""
        self._renewals[request[2][0]] = _Renewal(request, client.now(), [])

    def kept(self, client: SimClient, request: Request) -> bool:
        """A node renewed a lease. Return whether this reply completes a majority."""
        renewal = self._renewals.get(request[2][0])
        if renewal is None or renewal.request is not request:
            return False
        renewal.replies.append(client.now())
        return len(renewal.replies) == self._majority

    def failed(self, client: SimClient, token: str) -> None:
        """A client reported a failed renewal. Check that no majority had renewed in time."""
        _, sent_at, replies = self._renewals[token]
        in_time = sum(each < sent_at + IN_TIME for each in replies)
        if in_time >= self._majority and not client.was_stopped_since(sent_at):
            self._fail("RENEW", f"{in_time} nodes renewed {token}, and the renewal failed")

    def restores(self, request: Request) -> None:
        """A holder sends a vote for its token. Check that a majority confirmed its lease."""
        token = request[2][0]
        if self._restoring.get(token) is request:  # to another node, or with EVAL
            return
        self._restoring[token] = request
        renewal = self._renewals.get(token)
        have = 0 if renewal is None else len(renewal.replies)
        if have < self._majority:
            self._fail("S5", f"{token} is restored on a node, and only {have} nodes confirmed it")

    def changed(self, node: str) -> None:
        """The holder of a node changed."""
        self._changes[node] += 1

    def confirmed(self, token: str, is_held: Callable[[], bool]) -> None:
        """A majority renewed a token. Nodes that were free at two renewals must have it soon."""
        before, now = self._free.get(token, {}), self._free_nodes()
        self._free[token] = now
        if any(before.get(node) == changes for node, changes in now.items()):
            still = {node: changes for node, changes in now.items() if before.get(node) == changes}
            self._sim.after(RESTORED_WITHIN, lambda: self._is_restored(token, still, is_held))

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
            self._fail(
                "RESTORE", f"{token} was renewed twice, and is not restored on {', '.join(left)}"
            )
