"""All checks of a lock that several nodes keep: at each node, and over all of them.

What a single server promises about order and handing over is not promised here. What a lease is
worth is what a majority of the nodes keeps. What makes fences grow is that each of them stood, at
some moment, at a majority of the nodes, beside the token it was given to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from holdfast.core.hold import HELD
from holdfast.core.messages import read_message
from holdfast.sim.checks.eviction import is_shown
from holdfast.sim.checks.hand_over import RETRIES_WITHIN
from holdfast.sim.checks.record import SLACK
from holdfast.sim.checks.restore import RestoreCheck
from holdfast.sim.checks.server import NOT_SEEN, READING, Checks
from holdfast.sim.script_run import LockState
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.port import Reply, Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import World


class QuorumChecks(Checks):
    """Everything that is checked in one world about one lock on several nodes."""

    def __init__(
        self, world: World, settings: Settings, key: bytes, nodes: Sequence[Server]
    ) -> None:
        super().__init__(world, settings, key)
        self._nodes = nodes
        self._majority = len(nodes) // 2 + 1
        self._stood: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        """At which nodes each token ever stood beside a fence."""
        self._returned: defaultdict[str, set[str]] = defaultdict(set)
        """From which nodes each token was released."""
        self._evicted_from: defaultdict[str, set[str]] = defaultdict(set)
        self._believed_at: list[int] = []
        self._highest_by_then: list[int] = []
        self._through: set[Hold] = set()
        self._denied: defaultdict[str, set[str]] = defaultdict(set)
        """Which nodes said of a token that they do not have it, and were not given it since."""
        self._renewed: set[str] = set()
        self._votes: Counter[str] = Counter()
        """How many nodes voted for each token."""
        self._restores = RestoreCheck(world, key, nodes, self.fail)
        self._rounds: dict[str, Request] = {}
        """The request by which each token was first asked for."""
        self._last_vote: dict[str, tuple[str, int]] = {}
        """By the token of a waiter, the token and the time of the last vote that it requested."""
        self._last_round: dict[str, str] = {}
        """The token of each task's last round."""

    # At each node

    def look(self, server: Server, keys: Sequence[bytes]) -> LockState:
        """Look at the lock, before and after each script; its queue has no order to keep."""
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
            self._denies(server, run.args[0])
        if run.script == "evict":
            self.evictions.ran(run)
            if run.reply:
                self._evicted_from[(run.before.holder or b"").decode()].add(server.name)
        self.ownership.not_in_the_delay(run)
        self.exclusion.keeps_its_time(run)
        if run.changed_holder:
            self.world.note("holder", server.name, holder, fence)
            self._restores.changed(server.name)
            self._gave_up(run)
            if holder is not None:
                self._took(run, holder.decode())
        elif holder is not None and fence != run.before.fence:
            self._renumbered(run, holder)
        if holder is not None:
            self._stood[holder.decode(), int(fence or 0)].add(server.name)
        self._majorities_keep()

    def _gave_up(self, run: ScriptRun) -> None:
        """Only its holder's release takes a node from a token, or an eviction."""
        record, token, earlier = self.record, run.args[0], run.before.holder
        if earlier is None or is_shown(earlier, token):
            return
        node = run.server.name
        if not run.by_holder or run.script != "release":
            self.fail("S4", f"{run.script} of {token.encode()!r} took {node} from {earlier!r}")
        if "lost" not in "".join(run.args[2:3]):
            self._returned[token].add(node)
            if len(self._returned[token]) >= self._majority:
                record.given_back.add(token)

    def _took(self, run: ScriptRun, token: str) -> None:
        """Only a vote takes a node, and it raises the node's number."""
        record, node = self.record, run.server.name
        fence, last = int(run.after.fence or 0), int(run.before.fence or 0)
        if run.script != "vote":
            self.fail("S5", f"{run.script} made a lock that was not there")
        if fence <= last:
            self.fail("S6", f"{node} numbered it {fence} after {last}")
        self._denied[token].discard(node)
        # A node that loses its data loses the tombstones too: a late or doubled vote counts there.
        forgets = record.forgetful or self.settings.wipe
        if node in self._evicted_from[token] and not forgets:
            self.fail("S10", f"{token} took {node} after it was evicted there")
        back = node in self._returned[token]
        doubled = token in self.world.doubled
        if back and not doubled and not record.untrusted and not self.settings.wipe:
            self.fail("S10", f"{token} took {node} after it had given it back")

    def _renumbered(self, run: ScriptRun, holder: bytes) -> None:
        """Only its holder's confirmation changes the number of a lock that stays where it is."""
        script, args, fence = run.script, run.args, int(run.after.fence or 0)
        confirmed = holder == args[0].encode() and str(fence) == args[2]
        if script == "evict" or (script == "confirm" and confirmed):
            return
        if not self.record.untrusted or script == "confirm":
            self.fail("S8", f"{script} changed the fence of a lock that did not change hands")

    def _majorities_keep(self) -> None:
        """For whoever believes a majority of the nodes keeps it, or is silent, and for as long."""
        if self.record.untrusted:
            return
        now = self.world.now
        for client, hold in self.record.holds:
            if not self.alive(client, hold) or hold.token in self.record.evictions:
                continue
            kept = sorted((self._keeps(server, hold) for server in self._nodes), reverse=True)
            until = kept[self._majority - 1]
            if until <= now:
                have = sum(each > now for each in kept)
                self.fail("S1", f"{hold.token} believes, and is kept by {have} of {len(kept)}")
            late = (client.machine.true_time(hold.deadline) - until) / 1000
            if late > SLACK / 1000:
                self.fail("S2", f"{hold.token} would believe {late:.0f} ms longer than a majority")

    def _keeps(self, server: Server, hold: Hold) -> float:
        """Until when nobody else gets it from this node."""
        silent = server.silent_until
        if server.data.string(self.record.key) != hold.token.encode():
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
            releases = again and self.record.kept[token][1].state is not HELD
            reached["restored on a node after its release began"] += releases
        elif run.script == "renew" and mine:
            self._renewed.add(token)
        elif run.script == "confirm":
            repeated = mine and run.before.fence == run.args[2].encode()
            first = token not in self._renewed  # else the lease is being restored
            reached["fences confirmed"] += run.reply != 0 and first
            reached["a confirmation repeated"] += repeated
        elif run.script == "release" and mine:
            unheld = token not in self.record.kept
            won = unheld and self._votes[token] >= self._majority
            reached["votes released"] += unheld
            reached["a majority of votes released"] += won
            reached["released in the background"] += run.keys.node is not None
        super()._note(run)

    # At a client

    def granted(self, client: SimClient, hold: Hold) -> None:
        """A client goes on with the lock."""
        self.world.note("believes", client.machine.name, hold.token, hold.fence)
        given = self.record.fences.setdefault(hold.fence, hold.token)
        if given != hold.token:
            self.fail("S6", f"fence {hold.fence} was given to {given} and to {hold.token}")
        stood = self._stood_at(hold)
        if len(stood) < self._majority:
            self.fail("S6", f"fence {hold.fence} of {hold.token} stood at {len(stood)} nodes only")
        self._in_real_time(client, hold)
        if not self.record.untrusted and self.alive(client, hold):
            for other, held in self.record.holds:
                if held is not hold and self.alive(other, held):
                    self.exclusion.only_if_evicted(held, hold)
            evicted = hold.token in self.record.evictions
            if not self.fences.is_above(hold, self.fences.highest_held) and not evicted:
                self.fail("S7", f"fence {hold.fence} is held after {self.fences.highest_held}")
            self._after_the_delay()
        has_it = [each.data.string(self.record.key) == hold.token.encode() for each in self._nodes]
        self.reached["acquired without all nodes"] += not all(has_it)
        if self.record.last_holder and self.record.last_holder.split(":")[1] in self.record.gone:
            self.reached["granted after a holder that never released"] += 1
        self.record.last_holder = hold.token
        self._remember(client, hold)
        self._believed_at.append(self.world.now)
        self._highest_by_then.append(self.fences.highest_held)

    def _stood_at(self, hold: Hold) -> set[str]:
        """Where it had its fence."""
        return self._stood.get((hold.token, hold.fence), set())

    def _in_real_time(self, client: SimClient, hold: Hold) -> None:
        """Whatever happens: who asked after somebody believed has the greater fence."""
        asked_at = client.machine.true_time(hold.deadline - hold.spec.validity)
        before = bisect_right(self._believed_at, asked_at)
        highest = self._highest_by_then[before - 1] if before else 0
        if not self.fences.is_above(hold, highest):
            self.fail("S7", f"fence {hold.fence} was asked for when {highest} was held")

    def _after_the_delay(self) -> None:
        """Nobody gets it before the delay after a loss is over."""
        delay_us = int(self.settings.lock_delay * SECOND)
        delay = min(server.true_span(delay_us) for server in self._nodes)  # on the nodes' clocks
        for who, hold in self.record.holds:
            until = who.machine.true_time(hold.deadline) + delay
            early = (until - self.world.now) / 1000
            through = hold in self._through or hold.token in self.record.evictions
            if self.settings.lock_delay and not through and early > SLACK / 1000:
                self.fail("DELAY", f"somebody got the lock {early:.0f} ms before the delay is over")

    def releasing(self, client: SimClient, hold: Hold) -> None:
        """A client begins to release."""
        if self.alive(client, hold):
            self._through.add(hold)
        super().releasing(client, hold)

    def ended(self, client: SimClient, hold: Hold, how: str) -> None:
        """A client is through with the lock: if it was released, no majority has it any more."""
        super().ended(client, hold, how)
        # A node from which it was evicted keeps it for the sake of the lock delay.
        nodes = [node for node in self._nodes if node.name not in self._evicted_from[hold.token]]
        have = sum(node.data.string(self.record.key) == hold.token.encode() for node in nodes)
        doubled = hold.token in self.world.doubled
        if how == "release" and have >= self._majority and not doubled:
            self.fail("S10", f"{hold.token} was released, and {have} nodes have it still")

    def told(self, client: SimClient, event: Event) -> None:
        """An event was reported."""
        super().told(client, event)
        if event.kind == "renewal_failed":
            self._restores.failed(client, self.record.fences[event.fence])

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A client sends a request to a node."""
        super().sent(client, request, server)
        script, token = request[0].name, "".join(request[2][:1])
        if script == "vote":
            self._last_vote[request[2][-1]] = token, self.world.now
        if script == "vote" and token not in self._rounds:
            self._begins(client, token)
            self._rounds[token] = request
        elif script == "vote" and self._rounds[token] is not request:
            self._restores.restores(request)

    def _begins(self, client: SimClient, token: str) -> None:
        """A round begins: the votes of the task's last one are given back, if it was not won."""
        task = token.split(":", 3)[3]
        last, self._last_round[task] = self._last_round.get(task, ""), token
        if last not in self.record.kept and client.keeps_votes(last):
            self.fail("S10", f"a round of {task} begins, and the votes for {last} are kept")

    def renews(self, client: SimClient, request: Request) -> None:
        """A client sends a renewal to the nodes."""
        super().renews(client, request)
        self._restores.renews(client, request)

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A node's answer has reached a client."""
        script, _, args = request
        self.abandoned.answered(script.name, args, server)
        if script.name != "renew":
            return
        if reply and self._restores.kept(client, request) and self._is_prompt():
            self._restores.confirmed(args[0], lambda: self._is_held(args[0]))
        self.reached["a renewal that one node did not receive"] += not reply
        self.renewals.note_answer(client, args[0], reply)

    def _is_prompt(self) -> bool:
        """Whether each node that is free takes what it is given, at once."""
        return self.settings.prompt and not self.settings.full and not self.settings.wipe

    def _is_held(self, token: str) -> bool:
        client, hold = self.record.kept[token]
        evicted = token in self.record.evictions
        return self.alive(client, hold) and hold not in self.record.releasing and not evicted

    def _denies(self, server: Server, token: str) -> None:
        self._denied[token].add(server.name)
        if len(self._denied[token]) == self._majority and self.settings.prompt:
            self.world.after(SECOND // 2, lambda: self._believes_them(token))

    def _believes_them(self, token: str) -> None:
        """Who was told by a majority that it is not theirs does not believe any more."""
        # No client receives the reply to a request that was delivered a second time.
        if len(self._denied[token]) < self._majority or self.record.is_doubled(token):
            return
        for client, hold in self.record.holds:
            if hold.token == token and self.alive(client, hold):
                self.fail("S5", f"{token} believes, and a majority said that it is not theirs")

    def pushed(self, client: SimClient, message: bytes) -> None:
        """A client received a message: if the lock is free, it votes again soon (L3).

        A client that got votes in its last round, but too few, pauses whatever it receives.
        """
        waiter, now = read_message(message).token, self.world.now
        if not message.startswith(b"A") or waiter not in client.registered():
            return
        self.reached["notified that the lock is free"] += 1

        def look(since: float) -> None:
            token, voted_at = self._last_vote[waiter]
            over = client.closed or client.machine.crashed or waiter not in client.registered()
            if over or client.was_stopped_since(since) or voted_at >= now or self._votes[token]:
                return
            self.fail("L3", f"{waiter} was notified that the lock is free, and does not vote")

        if self._is_prompt():
            since = client.now()
            self.world.after(int(RETRIES_WITHIN * SECOND), lambda: look(since))

    def too_young(self, client: SimClient) -> None:
        """A node that lost its data was not asked."""
        self.world.note("too young", client.machine.name)
        self.reached["a node that lost its data, not used"] += 1

    # In the end

    def won_by_somebody(self, asking: bool) -> None:  # noqa: FBT001 - whether anybody does
        """Called again and again once all is well: of those who ask somebody wins."""
        if not asking or any(self.alive(*each) for each in self.record.holds):
            self.record.free_since = self.world.now
        elif self.world.now - self.record.free_since > self._patience():
            self.fail("L6", "all is well, some ask, and nobody wins")

    def _patience(self) -> int:
        settings = self.settings
        left_over = 0.0
        # What a crashed holder had, or ran out, for as long as it was extended to.
        runs_out = settings.max_hold or settings.drop or not settings.renew
        if runs_out or not settings.calm:
            left_over = self.record.longest_ttl + settings.lock_delay
        if settings.doubled:  # a vote that arrives again keeps a node, and then another one
            left_over += 2 * self.record.longest_ttl
        if settings.wipe or settings.restart or settings.server_crash:
            left_over += settings.quarantine
        return int((5.0 + left_over) * SECOND)
