"""What must hold of a lock that several nodes keep: at each node, and over all of them.

What a single server promises about order and handing over is not promised here. What a lease is
worth is what a majority of the nodes keeps. What makes fences grow is that each of them stood, at
some moment, at a majority of the nodes, beside the token it was given to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from holdfast.core.hold import HELD
from holdfast.sim.checks import SLACK, Checks, look
from holdfast.sim.evict_check import is_shown
from holdfast.sim.restore_check import RestoreCheck
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
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
        self._passed_at: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(
            lambda: defaultdict(set)
        )
        """Of what was exported, which nodes each adopter ever had."""
        self._restores = RestoreCheck(world, key, nodes, self.fail)
        self._rounds: dict[str, Request] = {}
        """The request by which each token was first asked for."""
        self._last_round: dict[str, str] = {}
        """The token of each task's last round."""

    # At each node

    def before(self, server: Server, keys: Sequence[bytes]) -> None:
        """Look at lock and fence."""
        if keys[0] == self._key:
            self._before = look(server, keys)
            self._left = server.data.left(keys[0])

    def after(
        self,
        server: Server,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[str],
        reply: Any,  # noqa: ANN401 - any answer
    ) -> None:
        """Compare."""
        if keys[0] != self._key or script.name in {"inspect", "position", "probe"}:
            return
        holder, fence = look(server, keys)
        earlier, earlier_fence = self._before
        self._abandoned.executed(script.name, args, server.name, reply)
        self._note(script, keys, args, reply, earlier)
        if script.name == "renew" and not reply:
            self._denies(server, args[0])
        if script.name == "evict":
            self._evicts(server, args, reply)
        kept = earlier == args[0].encode() and isinstance(reply, int) and reply > 0
        if kept and script.name != "release":
            self._not_in_the_delay(script.name)
        self._keeps_its_time(server, script, holder)
        if holder != earlier:
            self.world.note("holder", server.name, holder, fence)
            self._restores.changed(server.name)
            self._gave_up(server, script, args, earlier)
            if holder is not None:
                self._took(server, script, args, holder, int(fence or 0), int(earlier_fence or 0))
        elif holder is not None and fence != earlier_fence:
            self._renumbered(script, args, holder, int(fence or 0))
        if holder is not None:
            self._stood[holder.decode(), int(fence or 0)].add(server.name)
        self._majorities_keep()

    def _gave_up(
        self, server: Server, script: Script, args: Sequence[str], earlier: bytes | None
    ) -> None:
        """Only its own holder's release takes a node from somebody."""
        token = args[0].encode()
        if earlier is None:
            return
        if self._may_adopt(script, args, earlier) or is_shown(earlier, args[0]):
            return
        if earlier != token or script.name != "release":
            self.fail("S4", f"{script.name} of {token!r} took {server.name} from {earlier!r}")
        if args[0] in self._exported and not self.untrusted:
            most = max(map(len, self._passed_at[args[0]].values()), default=0)
            if most < self._majority:
                self.fail("S4", f"{earlier!r} was exported, and {server.name} gave it up")
        if "lost" not in "".join(args[2:3]):
            self._returned[args[0]].add(server.name)
            if len(self._returned[args[0]]) >= self._majority:
                self._given_back.add(args[0])

    def _took(  # noqa: PLR0913, PLR0917 - what was asked, and what came of it
        self,
        server: Server,
        script: Script,
        args: Sequence[str],
        holder: bytes,
        fence: int,
        last: int,
    ) -> None:
        """Only a vote takes a node, and it raises the node's number; an adoption keeps it."""
        name, adopts = holder.decode(), script.name == "adopt"
        if (script.name != "vote" and not adopts) or (adopts and self._before[0] is None):
            self.fail("S5", f"{script.name} made a lock that was not there")
        if adopts:
            if fence != last and not self.untrusted:
                self.fail("S8", f"{server.name} numbered {fence} what was adopted as {last}")
            self._passed[args[2]].add(name)
            self._passed_at[args[2]][name].add(server.name)
            self._through.add(self._exported[args[2]].hold)
        elif fence <= last:
            self.fail("S6", f"{server.name} numbered it {fence} after {last}")
        self._denied[name].discard(server.name)
        if server.name in self._evicted_from[name] and not self._forgetful:
            self.fail("S10", f"{name} took {server.name} after it was evicted there")
        back = server.name in self._returned[name]
        if back and not self.world.doubled and not self.untrusted and not self.settings.wipe:
            self.fail("S10", f"{name} took {server.name} after it had given it back")

    def _evicts(
        self,
        server: Server,
        args: Sequence[str],
        reply: Any,  # noqa: ANN401 - any answer
    ) -> None:
        """An eviction is of the holder that was shown, on each node."""
        super()._evicts(server, args, reply)
        if reply:
            self._evicted_from[(self._before[0] or b"").decode()].add(server.name)

    def _renumbered(self, script: Script, args: Sequence[str], holder: bytes, fence: int) -> None:
        """Only its holder's confirmation changes the number of a lock that stays where it is."""
        confirmed = holder == args[0].encode() and str(fence) == args[2]
        if script.name == "evict" or (script.name == "confirm" and confirmed):
            return
        if not self.untrusted or script.name == "confirm":
            self.fail("S8", f"{script.name} changed the fence of a lock that did not change hands")

    def _majorities_keep(self) -> None:
        """For whoever believes a majority of the nodes keeps it, or is silent, and for as long."""
        if self.untrusted:
            return
        now = self.world.now
        for client, hold in self._holds:
            if not self.alive(client, hold) or hold.token in self._evictions:
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
        if server.data.string(self._key) != hold.token.encode():
            return silent
        expiry = server.true_expiry(self._key, int(self.settings.lock_delay * 1000))
        return float("inf") if expiry is None else max(expiry, silent)

    def _note(
        self,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[str],
        reply: Any,  # noqa: ANN401 - any answer
        earlier: bytes | None,
    ) -> None:
        reached, mine, token = self.reached, earlier == args[0].encode(), args[0]
        if script.name == "vote":
            reached["a request that found its tombstone"] += reply == 0
            reached["a vote repeated"] += mine
            given = isinstance(reply, int) and reply > 0 and not mine
            self._votes[token] += given
            again = given and token in self._renewed
            reached["given again to a node"] += again
            releases = again and self._kept[token][1].state is not HELD
            reached["given again to a node after its release began"] += releases
        elif script.name == "renew" and mine:
            self._renewed.add(token)
        elif script.name == "confirm":
            reached["numbers brought into agreement"] += reply != 0
            reached["a confirmation repeated"] += mine and self._before[1] == args[2].encode()
        elif script.name == "release" and mine:
            unheld = token not in self._kept
            reached["votes given back"] += unheld
            reached["a majority of votes given back"] += (
                unheld and self._votes[token] >= self._majority
            )
            reached["taken back in the background"] += _node_of(keys) is not None
        self._note_loss(script, args, earlier)
        self._note_adoption(script, args, reply, earlier)

    # At a client

    def granted(self, client: SimClient, hold: Hold) -> None:
        """A client goes on with the lock."""
        self.world.note("believes", client.machine.name, hold.token, hold.fence)
        given = self._fences.setdefault(hold.fence, hold.token)
        if given != hold.token:
            self.fail("S6", f"fence {hold.fence} was given to {given} and to {hold.token}")
        stood = self._stood_at(hold)
        if len(stood) < self._majority:
            self.fail("S6", f"fence {hold.fence} of {hold.token} stood at {len(stood)} nodes only")
        self._in_real_time(client, hold)
        if not self.untrusted and self.alive(client, hold):
            for other, held in self._holds:
                if held is not hold and self.alive(other, held):
                    self._only_if_evicted(held, hold)
            evicted = hold.token in self._evictions
            if not self._is_above(hold, self._highest_believed) and not evicted:
                self.fail("S7", f"fence {hold.fence} is held after {self._highest_believed}")
            self._after_the_delay()
        has_it = [each.data.string(self._key) == hold.token.encode() for each in self._nodes]
        self.reached["won without a node"] += not all(has_it)
        if self._last_name and self._last_name.split(":")[1] in self._gone:
            self.reached["a holder that never released, followed"] += 1
        self._last_name = hold.token
        self._free_since = self.world.now  # it may be released before the next look
        self._remember(client, hold)
        self._believed_at.append(self.world.now)
        self._highest_by_then.append(self._highest_believed)

    def _stood_at(self, hold: Hold) -> set[str]:
        """Where it had its fence; what was adopted had it before, and need only be there."""
        exported = self._adopted.get(hold.token)
        if exported is None:
            return self._stood.get((hold.token, hold.fence), set())
        return self._passed_at[exported][hold.token]

    def _in_real_time(self, client: SimClient, hold: Hold) -> None:
        """Whatever happens: who asked after somebody believed has the greater fence."""
        asked_at = client.machine.true_time(hold.deadline - hold.spec.validity)
        before = bisect_right(self._believed_at, asked_at)
        highest = self._highest_by_then[before - 1] if before else 0
        if not self._is_above(hold, highest):
            self.fail("S7", f"fence {hold.fence} was asked for when {highest} was held")

    def _after_the_delay(self) -> None:
        """Nobody gets it before the delay after a loss is over."""
        delay_us = int(self.settings.lock_delay * SECOND)
        delay = min(server.true_span(delay_us) for server in self._nodes)  # on the nodes' clocks
        for who, hold in self._holds:
            until = who.machine.true_time(hold.deadline) + delay
            early = (until - self.world.now) / 1000
            through = hold in self._through or hold.token in self._evictions
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
        token = hold.token.encode()
        have = sum(look(node, [self._key, self._key])[0] == token for node in self._nodes)
        if how == "release" and have >= self._majority and not self.world.doubled:
            self.fail("S10", f"{hold.token} was released, and {have} nodes have it still")

    def told(self, client: SimClient, event: Event) -> None:
        """An event was reported."""
        super().told(client, event)
        if event.kind == "renewal_failed":
            self._restores.failed(client, self._fences[event.fence])

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A client sends a request to a node."""
        super().sent(client, request, server)
        script, token = request[0].name, "".join(request[2][:1])
        if script == "vote" and token not in self._rounds:
            self._begins(client, token)
            self._rounds[token] = request
        elif script == "vote" and self._rounds[token] is not request:
            self._restores.restores(request)

    def _begins(self, client: SimClient, token: str) -> None:
        """A round begins: the votes of the task's last one are given back, if it was not won."""
        task = token.split(":", 3)[3]
        last, self._last_round[task] = self._last_round.get(task, ""), token
        if last not in self._kept and client.keeps_votes(last):
            self.fail("S10", f"a round of {task} begins, and the votes for {last} are kept")

    def renews(self, client: SimClient, request: Request) -> None:
        """A client sends a renewal to the nodes."""
        super().renews(client, request)
        self._restores.renews(client, request)

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A node's answer has reached a client."""
        script, _, args = request
        self._abandoned.answered(script.name, args, server)
        if script.name != "renew":
            return
        if reply and self._restores.kept(client, request) and self._is_prompt():
            self._restores.confirmed(args[0], lambda: self._is_held(args[0]))
        self.reached["a renewal that a node did not get"] += not reply
        self._note_renewal(client, args[0], reply)

    def _is_prompt(self) -> bool:
        """Whether each node that is free takes what it is given, at once."""
        return self.settings.prompt and not self.settings.full and not self.settings.wipe

    def _is_held(self, token: str) -> bool:
        client, hold = self._kept[token]
        evicted = token in self._evictions
        return self.alive(client, hold) and hold not in self._releasing and not evicted

    def _denies(self, server: Server, token: str) -> None:
        self._denied[token].add(server.name)
        if len(self._denied[token]) == self._majority and self.settings.prompt:
            self.world.after(SECOND // 2, lambda: self._believes_them(token))

    def _believes_them(self, token: str) -> None:
        """Who was told by a majority that it is not theirs does not believe any more."""
        if len(self._denied[token]) < self._majority:
            return
        for client, hold in self._holds:
            if hold.token == token and self.alive(client, hold):
                self.fail("S5", f"{token} believes, and a majority said that it is not theirs")

    def pushed(self, client: SimClient, message: bytes) -> None:  # noqa: ARG002 - it does not matter
        """A node spoke to a client."""
        self.reached["told that it is free"] += message.startswith(b"A")

    def too_young(self, client: SimClient) -> None:
        """A node that lost its data was not asked."""
        self.world.note("too young", client.machine.name)
        self.reached["a node that lost its data, not asked"] += 1

    # In the end

    def won_by_somebody(self, asking: bool) -> None:  # noqa: FBT001 - whether anybody does
        """Called again and again once all is well: of those who ask somebody wins."""
        if not asking or any(self.alive(*each) for each in self._holds):
            self._free_since = self.world.now
        elif self.world.now - self._free_since > self._patience():
            self.fail("L6", "all is well, some ask, and nobody wins")

    def _patience(self) -> int:
        settings = self.settings
        left_over = 0.0
        # What a crashed holder had, nobody adopts or ran out, for as long as it was extended to.
        runs_out = settings.max_hold or settings.drop or not settings.renew
        if settings.hand_off or runs_out or not settings.calm:
            left_over = 3 * settings.ttl + settings.lock_delay + settings.quarantine
        return int((5.0 + left_over) * SECOND)

    def _excused(self, waiter: bytes) -> bool:
        """Whether its client is no more, or a request that puts it there came by itself."""
        client = waiter.decode().split(":")[1]
        return self.is_left(client) or any(
            note[1] == "doubled" and note[2] == client and note[3].startswith("vote")
            for note in self.world.trace
        )


def _node_of(keys: Any) -> int | None:  # noqa: ANN401 - keys, or names of keys
    node: int | None = getattr(keys, "node", None)
    return node
