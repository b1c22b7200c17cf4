"""All checks of a lock on a quorum: for each node, and for all nodes together.

The order of grants and hand-overs are not promised here. A lease is valid while a majority of the
nodes has its token. Fences grow because a majority of the nodes had each fence, together with the
token to which it was granted, at some time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from holdfast.core.lease_state import HELD
from holdfast.core.messages import read_message
from holdfast.sim.checks.after_loss import QuorumLossCheck
from holdfast.sim.checks.eviction import is_shown
from holdfast.sim.checks.hand_over import RETRIES_WITHIN
from holdfast.sim.checks.record import SLACK
from holdfast.sim.checks.restore import RestoreCheck
from holdfast.sim.checks.server import NOT_SEEN, READING, Checks
from holdfast.sim.script_run import LockState
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.events import Event
    from holdfast.core.lease_state import LeaseState
    from holdfast.port import Reply, Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Simulation


class QuorumChecks(Checks):
    """The checks of one run for one lock on a quorum."""

    def __init__(
        self, sim: Simulation, settings: Settings, key: bytes, nodes: Sequence[Server]
    ) -> None:
        super().__init__(sim, settings, key)
        self._nodes = nodes
        self._majority = len(nodes) // 2 + 1
        self._seen_at: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        """By token and fence, the nodes that ever had both."""
        self._released_from: defaultdict[str, set[str]] = defaultdict(set)
        """By token, the nodes from which it was released."""
        self._evicted_from: defaultdict[str, set[str]] = defaultdict(set)
        self._held_at: list[int] = []
        self._highest_by_then: list[int] = []
        self._released_in_time: set[LeaseState] = set()
        self._denied: defaultdict[str, set[str]] = defaultdict(set)
        """By token, the nodes that refused its renewal, and were not restored since."""
        self._renewed: set[str] = set()
        self._votes: Counter[str] = Counter()
        """By token, the number of nodes that voted for it."""
        self._losses = QuorumLossCheck(self.record)
        self._restores = RestoreCheck(sim, key, nodes, self.fail)
        self._rounds: dict[str, Request] = {}
        """By token, its first vote request."""
        self._last_vote: dict[str, tuple[str, int]] = {}
        """By the token of a waiter, the token and time of its last vote request."""
        self._last_round: dict[str, str] = {}
        """By task, the token of its last round."""

    # On each node

    def look(self, server: Server, keys: Sequence[bytes]) -> LockState:
        """Return the state of the lock, without its queue, whose order is not checked."""
        if keys[0] != self.record.key:
            return NOT_SEEN
        data = server.data
        return LockState(data.string(keys[0]), data.string(keys[1]), data.left(keys[0]))

    def ran(self, run: ScriptRun) -> None:
        """A node ran a script."""
        if run.keys[0] != self.record.key or run.script in READING:
            return
        server, holder, fence = run.server, run.after.holder, run.after.fence
        self.abandoned.ran(run)
        self._note(run)
        if run.script == "renew" and not run.reply:
            self._denied_by(server, run.args[0])
        if run.script == "evict":
            self.evictions.ran(run)
            if run.reply:
                self._evicted_from[(run.before.holder or b"").decode()].add(server.name)
        self.ownership.check_not_in_delay(run)
        self.exclusion.check_not_shortened(run)
        if run.changed_holder:
            self.sim.note("holder", server.name, holder, fence)
            self._restores.changed(server.name)
            self._check_released(run)
            if holder is not None:
                self._check_taken(run, holder.decode())
        elif holder is not None and fence != run.before.fence:
            self._check_fence_change(run, holder)
        if holder is not None:
            self._seen_at[holder.decode(), int(fence or 0)].add(server.name)
        self._check_majorities()

    def _check_released(self, run: ScriptRun) -> None:
        """Check that only a release by the holder, or an eviction, frees a node (S4)."""
        record, token, earlier = self.record, run.args[0], run.before.holder
        if earlier is None or is_shown(earlier, token):
            return
        node = run.server.name
        if not run.by_holder or run.script != "release":
            self.fail("S4", f"{run.script} of {token.encode()!r} took {node} from {earlier!r}")
        if "lost" not in "".join(run.args[2:3]):
            self._released_from[token].add(node)
            if len(self._released_from[token]) >= self._majority:
                record.released.add(token)

    def _check_taken(self, run: ScriptRun, token: str) -> None:
        """Check that only a vote takes a node, and that it increases the node's fence (S5, S6)."""
        record, node = self.record, run.server.name
        fence, last = int(run.after.fence or 0), int(run.before.fence or 0)
        if run.script != "vote":
            self.fail("S5", f"{run.script} created a lock that did not exist")
        if fence <= last:
            self.fail("S6", f"{node} granted fence {fence} after {last}")
        self._denied[token].discard(node)
        # A node that loses its data also loses its tombstones, so it accepts a late vote.
        forgets = record.may_have_lost_writes or self.settings.wipe
        if node in self._evicted_from[token] and not forgets:
            self.fail("S10", f"{token} took {node} after it was evicted there")
        back = node in self._released_from[token]
        doubled = token in self.sim.doubled
        if back and not doubled and not record.untrusted and not self.settings.wipe:
            self.fail("S10", f"{token} took {node} after its release there")

    def _check_fence_change(self, run: ScriptRun, holder: bytes) -> None:
        """Check that only a confirmation by the holder changes the fence of a lock (S8)."""
        script, args, fence = run.script, run.args, int(run.after.fence or 0)
        confirmed = holder == args[0].encode() and str(fence) == args[2]
        if script == "evict" or (script == "confirm" and confirmed):
            return
        if not self.record.untrusted or script == "confirm":
            self.fail("S8", f"{script} changed the fence of a lock without a new grant")

    def _check_majorities(self) -> None:
        """Check that a majority of the nodes keeps each lease (S1), until its deadline (S2).

        A node that grants no lock counts as one that keeps the lease.
        """
        if self.record.untrusted:
            return
        now = self.sim.now
        for client, lease in self.record.leases:
            if not self.considers_held(client, lease) or lease.token in self.record.evictions:
                continue
            kept = sorted((self._kept_until(server, lease) for server in self._nodes), reverse=True)
            until = kept[self._majority - 1]
            if until <= now:
                have = sum(each > now for each in kept)
                self.fail("S1", f"{lease.token} is valid, and {have} of {len(kept)} nodes keep it")
            late = (client.machine.true_time(lease.deadline) - until) / 1000
            if late > SLACK / 1000:
                self.fail("S2", f"the deadline of {lease.token} is {late:.0f} ms late")

    def _kept_until(self, server: Server, lease: LeaseState) -> float:
        """Return until when this node grants the lock to no other token."""
        silent = server.grants_nothing_until
        if server.data.string(self.record.key) != lease.token.encode():
            return silent
        expiry = server.true_expiry(self.record.key, int(self.settings.lock_delay * 1000))
        return float("inf") if expiry is None else max(expiry, silent)

    def _note(self, run: ScriptRun) -> None:
        reached, mine, token = self.reached, run.by_holder, run.args[0]
        if run.script == "vote":
            reached["a request that found its tombstone"] += run.reply == 0
            reached["a vote repeated"] += mine
            given = isinstance(run.reply, int) and run.reply > 0 and not mine
            self._votes[token] += given
            again = given and token in self._renewed
            reached["restored on a node"] += again
            releases = again and self.record.last_leases[token][1].state is not HELD
            reached["restored on a node after its release began"] += releases
        elif run.script == "renew" and mine:
            self._renewed.add(token)
        elif run.script == "confirm":
            repeated = mine and run.before.fence == run.args[2].encode()
            first = token not in self._renewed  # else the lease is being restored
            reached["fences confirmed"] += run.reply != 0 and first
            reached["a confirmation repeated"] += repeated
        elif run.script == "release" and mine:
            unheld = token not in self.record.last_leases
            had_majority = unheld and self._votes[token] >= self._majority
            reached["votes released"] += unheld
            reached["a majority of votes released"] += had_majority
            reached["released in the background"] += run.keys.node is not None
        super()._note(run)

    # In a client

    def granted(self, client: SimClient, lease: LeaseState) -> None:
        """A lease begins."""
        self.sim.note("holds", client.machine.name, lease.token, lease.fence)
        given = self.record.fences.setdefault(lease.fence, lease.token)
        if given != lease.token:
            self.fail("S6", f"fence {lease.fence} was granted to {given} and {lease.token}")
        nodes = self._nodes_with_fence(lease)
        if len(nodes) < self._majority:
            self.fail("S6", f"only {len(nodes)} nodes had fence {lease.fence} of {lease.token}")
        self._check_real_time_order(client, lease)
        self._losses.granted(lease)
        if not self.record.untrusted and self.considers_held(client, lease):
            for other, held in self.record.leases:
                if held is not lease and self.considers_held(other, held):
                    self.exclusion.check_evicted(held, lease)
            evicted = lease.token in self.record.evictions
            if not self.fences.is_above(lease, self.fences.highest_held) and not evicted:
                self.fail("S7", f"fence {lease.fence} is held after {self.fences.highest_held}")
            self._check_delay()
        has_it = [each.data.string(self.record.key) == lease.token.encode() for each in self._nodes]
        self.reached["acquired without all nodes"] += not all(has_it)
        if (
            self.record.last_holder
            and self.record.last_holder.split(":")[1] in self.record.gone_clients
        ):
            self.reached["granted after a holder that never released"] += 1
        self.record.last_holder = lease.token
        self._remember(client, lease)
        self._held_at.append(self.sim.now)
        self._highest_by_then.append(self.fences.highest_held)

    def _nodes_with_fence(self, lease: LeaseState) -> set[str]:
        """Return the nodes that had the token with its fence."""
        return self._seen_at.get((lease.token, lease.fence), set())

    def _check_real_time_order(self, client: SimClient, lease: LeaseState) -> None:
        """Check that a lease requested after another one had begun has the higher fence (S7)."""
        asked_at = client.machine.true_time(lease.deadline - lease.spec.validity)
        before = bisect_right(self._held_at, asked_at)
        highest = self._highest_by_then[before - 1] if before else 0
        if not self.fences.is_above(lease, highest):
            self.fail("S7", f"fence {lease.fence} was requested after {highest} was held")

    def _check_delay(self) -> None:
        """Check that after a loss the lock is granted only after the lock delay (DELAY)."""
        delay_us = int(self.settings.lock_delay * SECOND)
        delay = min(
            server.true_span(delay_us) for server in self._nodes
        )  # on the clocks of the nodes
        for client, lease in self.record.leases:
            until = client.machine.true_time(lease.deadline) + delay
            early = (until - self.sim.now) / 1000
            released = lease in self._released_in_time or lease.token in self.record.evictions
            if self.settings.lock_delay and not released and early > SLACK / 1000:
                self.fail("DELAY", f"the lock was granted {early:.0f} ms before the delay is over")

    def releasing(self, client: SimClient, lease: LeaseState) -> None:
        """A client begins to release."""
        if self.considers_held(client, lease):
            self._released_in_time.add(lease)
        super().releasing(client, lease)

    def given_up(self, client: SimClient, lease: LeaseState) -> None:
        """A client ends a lease, because it was not granted another lock."""
        super().given_up(client, lease)
        if lease in self.record.released_in_time:
            self._released_in_time.add(lease)

    def ended(self, client: SimClient, lease: LeaseState, how: str) -> None:
        """A client ended a lease. Check that no majority has its token after a release (S10)."""
        super().ended(client, lease, how)
        # A node on which the lease expired or was evicted has the lock delay only.
        delay_ms = int(self.settings.lock_delay * 1000)
        have = sum(
            node.data.string(self.record.key) == lease.token.encode()
            and node.data.left(self.record.key) > delay_ms
            for node in self._nodes
        )
        doubled = lease.token in self.sim.doubled
        if how == "release" and have >= self._majority and not doubled:
            self.fail("S10", f"{lease.token} was released, and {have} nodes still have it")

    def event_reported(self, client: SimClient, event: Event) -> None:
        """A client reported an event."""
        super().event_reported(client, event)
        token = self.record.fences.get(event.fence)  # none before acquire() has returned
        if event.kind == "renewal_failed" and token is not None:
            self._restores.failed(client, token)

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A client sends a request to a node."""
        super().sent(client, request, server)
        script, token = request[0].name, "".join(request[2][:1])
        if script == "vote":
            self._last_vote[request[2][-1]] = token, self.sim.now
        if script == "vote" and token not in self._rounds:
            self._round_started(client, token)
            self._rounds[token] = request
        elif script == "vote" and self._rounds[token] is not request:
            self._restores.restores(request)

    def _round_started(self, client: SimClient, token: str) -> None:
        """A round begins. Check that the votes of the task's last round were released (S10)."""
        task = token.split(":", 3)[3]
        last, self._last_round[task] = self._last_round.get(task, ""), token
        if last not in self.record.last_leases and client.keeps_votes(last):
            self.fail("S10", f"a round of {task} begins, and the votes for {last} are not released")

    def renews(self, client: SimClient, request: Request) -> None:
        """A client sends a renewal to the nodes."""
        super().renews(client, request)
        self._restores.renews(client, request)

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A client received the reply of a node."""
        script, _, args = request
        self.abandoned.answered(script.name, args, server)
        if script.name != "renew":
            return
        if reply and self._restores.kept(client, request) and self._is_prompt():
            self._restores.confirmed(args[0], lambda: self._is_held(args[0]))
        self.reached["a renewal that one node did not receive"] += not reply
        self.renewals.note_answer(client, args[0], reply)

    def _is_prompt(self) -> bool:
        """Whether each free node accepts a vote at once."""
        return self.settings.prompt and not self.settings.full and not self.settings.wipe

    def _is_held(self, token: str) -> bool:
        client, lease = self.record.last_leases[token]
        evicted = token in self.record.evictions
        return (
            self.considers_held(client, lease)
            and lease not in self.record.releasing
            and not evicted
        )

    def _denied_by(self, server: Server, token: str) -> None:
        self._denied[token].add(server.name)
        if len(self._denied[token]) == self._majority and self.settings.prompt:
            self.sim.after(SECOND // 2, lambda: self._check_denied(token))

    def _check_denied(self, token: str) -> None:
        """Check that a lease is over after a majority has refused its renewal (S5)."""
        # No client receives the reply to a request that was delivered a second time.
        if len(self._denied[token]) < self._majority or self.record.is_doubled(token):
            return
        for client, lease in self.record.leases:
            if lease.token == token and self.considers_held(client, lease):
                self.fail("S5", f"{token} is valid, and a majority refused its renewal")

    def message_received(self, client: SimClient, message: bytes) -> None:
        """A client received a message. Check that it requests votes soon if the lock is free (L3).

        A client that got too few votes in its last round pauses in any case.
        """
        waiter, now = read_message(message).token, self.sim.now
        if not message.startswith(b"A") or waiter not in client.registered():
            return
        self.reached["notified that the lock is free"] += 1

        def look(since: float) -> None:
            token, voted_at = self._last_vote[waiter]
            over = client.closed or client.machine.crashed or waiter not in client.registered()
            if over or client.was_stopped_since(since) or voted_at >= now or self._votes[token]:
                return
            self.fail("L3", f"{waiter} was notified that the lock is free, and requests no votes")

        if self._is_prompt():
            since = client.now()
            self.sim.after(int(RETRIES_WITHIN * SECOND), lambda: look(since))

    def node_in_quarantine(self, client: SimClient) -> None:
        """A client did not use a node because the node is in quarantine."""
        self.sim.note("node in quarantine", client.machine.name)
        self.reached["a node that lost its data, not used"] += 1

    # After the faults

    def check_granted_eventually(self, clients_request: bool) -> None:  # noqa: FBT001 - one fact
        """Check that one of the acquiring clients is granted the lock (L6).

        Called repeatedly after the faults have ended.
        """
        if not clients_request or any(self.considers_held(*each) for each in self.record.leases):
            self.record.free_since = self.sim.now
        elif self.sim.now - self.record.free_since > self._time_limit():
            self.fail("L6", "clients acquire the lock without faults, and it is not granted")

    def _time_limit(self) -> int:
        settings = self.settings
        left_over = 0.0
        # A lease that was not released stays until its ttl, which may have been extended.
        runs_out = settings.max_hold or settings.drop or not settings.renew
        if runs_out or not settings.calm:
            left_over = self.record.longest_ttl + settings.lock_delay
        if settings.doubled:  # a second delivery may take one node, and then another
            left_over += 2 * self.record.longest_ttl
        if settings.wipe or settings.restart or settings.server_crash:
            left_over += settings.quarantine
        return int((5.0 + left_over) * SECOND)
