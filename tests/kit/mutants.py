"""Mutants: the shipped code with one safeguard removed. The simulator must catch each.

A mutant is a small change of one file. Its old text must occur exactly once in that file. A
separate process (`kit/mutant_run.py`) loads the package with the change, simulates runs with seeds
from 0 on, and reports the first check that fails.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from kit.mutant_run import run

SOURCE = Path(__file__).parents[2] / "src"

_PROCESSES = get_context("forkserver")
_PROCESSES.set_forkserver_preload(["kit.mutant_run", "redis", "redis.asyncio", "lupa.lua51"])
"""Each process is forked from one that has imported what the package needs, but not the package."""

SettingChanges = dict[str, Any]
"""Changes to the simulator's `STORMY` settings; with `calm`, to its `CALM` settings. With `drawn`,
the settings are drawn as in the default sweep, except for those that are given."""


class Mutant(NamedTuple):
    """One change, the promise that it breaks, and the checks that catch it."""

    name: str
    """The promise that the removed safeguard keeps."""
    file: str
    old: str
    new: str
    settings: SettingChanges
    by: str
    """The checks that may fail first."""


class Found(NamedTuple):
    """The result of a hunt: the check that failed first, or '', and the number of runs."""

    check: str
    seed: int
    runs: int
    detail: str


NO_CHANGE = Mutant("nothing", "core/__init__.py", "", "", {}, "")


def hunt(mutant: Mutant, settings: SettingChanges, seeds: int) -> Found:
    """Simulate runs with seeds from 0 on until a check fails."""
    return _run_child({**mutant._asdict(), "settings": settings, "seeds": seeds})


def replay(mutant: Mutant, saved: str) -> Found:
    """Replay a saved run."""
    return _run_child({**mutant._asdict(), "saved": saved})


def _run_child(work: dict[str, Any]) -> Found:
    with ProcessPoolExecutor(1, _PROCESSES) as pool:
        found = pool.submit(run, {**work, "source": str(SOURCE)}).result(300)
    return Found(**found)


def places(mutant: Mutant) -> int:
    """Count the occurrences of the mutant's old text in its file."""
    return (SOURCE / "holdfast" / mutant.file).read_text().count(mutant.old)


SEEDS, CONTROL = 2000, 150
"""The number of runs within which a mutant must be caught, and of control runs without a mutant."""

UNCHANGED: SettingChanges = {}
TWO_TASKS: SettingChanges = {"tasks": 2, "clients": 2, "slow": 0.2, "restart": 0.3, "cancel": 0.05}
PAUSES: SettingChanges = {"pause": 0.1, "slow": 0.1, "crash": 0.0, "full": 0.0}
CANCELS: SettingChanges = {"cancel": 0.08, "freeze": 0.3, "restart": 0.2, "doubled": 0.0}
SLOW: SettingChanges = {"slow": 0.2, "pause": 0.05, "hold": 1.0}
SLOW_LONG: SettingChanges = {"slow": 0.1, "ttl": 20.0, "hold": 0.5, "clients": 4}
GIVING_UP: SettingChanges = {"cancel": 0.08}
LATE: SettingChanges = {"cancel": 0.08, "slow": 0.2, "doubled": 0.0}
CRASHES: SettingChanges = {"crash": 0.02, "clients": 5}
LONG: SettingChanges = {"ttl": 6.0, "pause": 0.03}
SHARED: SettingChanges = {"owner": True}
SHORT_TIMEOUT: SettingChanges = {"timeout": 1.0}
SHORT_TIMEOUT_CALM: SettingChanges = {"calm": True, "timeout": 1.0, "clients": 5, "ttl": 5.0}
MANY_CLIENTS: SettingChanges = {"cancel": 0.1, "clients": 5}
NESTED: SettingChanges = {"reentrant": True, "tasks": 2, "clients": 2}
FULL_SERVER: SettingChanges = {"full": 0.3}
DATA_LOSS: SettingChanges = {"wipe": 0.2}
CLOCK_JUMPS: SettingChanges = {"clock_jump": 0.2}
LOCK_DELAY: SettingChanges = {"lock_delay": 1.0}
CANCELLED_ACQUIRES: SettingChanges = {
    "calm": True,
    "clients": 1,
    "tasks": 3,
    "cancel": 0.1,
    "ttl": 10.0,
}
HANGING: SettingChanges = {"freeze": 0.4, "restart": 0.2, "cancel": 0.05}

NODES: SettingChanges = {"nodes": 3, "skew": 2.0}
NODES_LATE: SettingChanges = {**NODES, "ttl": 30.0, "cancel": 0.06, "slow": 0.2, "doubled": 0.0}
NODES_UNSTABLE: SettingChanges = {**NODES_LATE, "calm": True, "reset": 0.05, "slow": 0.3}
NODES_RESET: SettingChanges = {**NODES_UNSTABLE, "cancel": 0.0}
NODES_PAUSED: SettingChanges = {**NODES, "pause": 0.1, "slow": 0.1, "crash": 0.0, "hold": 1.0}
NODES_DATA_LOSS: SettingChanges = {**NODES, "wipe": 0.3, "freeze": 0.3, "hold": 1.0}
NODES_SCRIPT_FLUSH: SettingChanges = {
    **NODES,
    "calm": True,
    "loop": True,
    "clients": 4,
    "ttl": 30.0,
    "slow": 0.1,
    "script_flush": 0.9,
}
NODES_RESTARTING: SettingChanges = {**NODES, "calm": True, "ttl": 0.9, "hold": 0.2, "restart": 0.9}
NODES_SHORT_TIMEOUT: SettingChanges = {**NODES, "timeout": 1.0}
NODES_CALM: SettingChanges = {**NODES, "calm": True, "ttl": 30.0}
NODES_LONG_HOLD: SettingChanges = {
    **NODES,
    "calm": True,
    "ttl": 15.0,
    "hold": 6.0,
    "slow": 0.2,
    "reset": 0.05,
}
NODES_EXTENDED: SettingChanges = {**NODES, "calm": True, "ttl": 10.0, "extend": 1.0, "doubled": 0.1}
NODES_SHORT_TTL: SettingChanges = {
    **NODES,
    "calm": True,
    "ttl": 0.5,
    "hold": 0.5,
    "tasks": 2,
    "cancel": 0.02,
}
NODES_MIN_VALIDITY: SettingChanges = {**NODES, "ttl": 30.0, "min_validity": 29.6, "slow": 0.2}
NODES_EVICTIONS: SettingChanges = {**NODES, "calm": True, "evict": 0.6, "hold": 1.0, "ttl": 5.0}

QUORUM = [
    Mutant(
        "a waiter of several nodes is woken when the lock is free",
        "core/quorum_acquire.py",
        "await port.wait(self._notified, pause)",
        "await port.sleep(pause)",
        {"nodes": 3, "calm": True},
        "L3",
    ),
    Mutant(
        "a lost round is released on nodes that did not reply",
        "core/quorum.py",
        "        waits = have_it or wait_if_no_votes\n",
        "        waits = have_it or wait_if_no_votes\n"
        "        if not have_it:\n            return\n",
        NODES_RESET,
        "S10",
    ),
    Mutant(
        "a majority has the fence",
        "core/quorum.py",
        "[(fence, agreed)] = Counter(numbers).most_common(1)",
        "fence, agreed = max(numbers), self.majority",
        NODES,
        "S6 S7",
    ),
    Mutant(
        "a fence needs more than one node",
        "core/quorum.py",
        "[(fence, agreed)] = Counter(numbers).most_common(1)",
        "fence, agreed = numbers[0], self.majority",
        NODES,
        "S6 S7",
    ),
    Mutant(
        "a majority is more than half",
        "core/quorum.py",
        "self.majority = len(self.names) // 2 + 1",
        "self.majority = len(self.names) // 2",
        NODES,
        "S1 S6",
    ),
    Mutant(
        "the deadline of a quorum lease counts from before the round",
        "core/quorum_acquire.py",
        "token, sent_at, actor = attempt.token, attempt.sent_at, attempt.actor",
        "token, sent_at, actor = attempt.token, session.port.now(), attempt.actor",
        NODES_PAUSED,
        "S2 S1",
    ),
    Mutant(
        "a majority that is reached too late does not count",
        "core/quorum_acquire.py",
        "if fence and self._round_time_left() > 0:",
        "if fence:",
        NODES_PAUSED,
        "S2",
    ),
    Mutant(
        "a lease begins when its votes are counted",
        "core/quorum_acquire.py",
        "                return fence\n",
        "                await self.stop_waiting()\n                return fence\n",
        NODES_PAUSED,
        "S2",
    ),
    Mutant(
        "a renewal needs a majority",
        "core/rounds.py",
        "        if self.has_majority():\n            return max(self.yes.values())",
        "        if self.yes:\n            return max(self.yes.values())",
        NODES_DATA_LOSS,
        "S2 S1",
    ),
    Mutant(
        "a lease that a majority rejects is lost",
        "core/rounds.py",
        "            return [] if len(empty) == self._not_there() else 0",
        "            return isinstance(self, Renewal)",
        NODES_EVICTIONS,
        "S5",
    ),
    Mutant(
        "a renewal that fails immediately is retried after a pause",
        "core/renewer.py",
        "return min(EARLY_MAX, item.spec.first_due / 2, item.reply_timeout / 4)",
        "return min(EARLY_MAX, item.spec.first_due / 2)",
        NODES_RESTARTING,
        "BUSY",
    ),
    Mutant(
        "a lost attempt releases its votes",
        "core/quorum_acquire.py",
        "            await self._withdraw(wait_if_no_votes=not votes.agrees_on_holder())\n"
        "            pause",
        "            pause",
        NODES_CALM,
        "L6 S10",
    ),
    Mutant(
        "a token is released on nodes that did not reply",
        "core/token_locations.py",
        "        self._due.append((RELEASE, keys.at(node), (token, ttl, tombstone, settings)))\n",
        "",
        NODES_LATE,
        "S10 S16",
    ),
    Mutant(
        "a release leaves a tombstone for votes that may still arrive",
        "core/rounds.py",
        "with_tombstone = script, keys, (token, ttl, mode, settings)",
        "with_tombstone = request",
        NODES_RESET,
        "S10 S16",
    ),
    Mutant(
        "a token that arrives after its release gets a tombstone",
        "core/token_locations.py",
        "== UNSURE and not tombstone:",
        "== UNSURE and False:",
        NODES_UNSTABLE,
        "S10 S16",
    ),
    Mutant(
        "a waiter that a late vote put back into a queue is removed",
        "core/token_locations.py",
        "if node not in there:  # the token left",
        "if False:  # the token left",
        NODES_SCRIPT_FLUSH,
        "S10 S16",
    ),
    Mutant(
        "a restored token may be overtaken by its release",
        "core/token_locations.py",
        "there.update(dict.fromkeys(nodes, UNSURE))",
        "there.update(dict.fromkeys(new, PRESENT))",
        NODES_LONG_HOLD,
        "S10 S16",
    ),
    Mutant(
        "an old reply does not override a restored token",
        "core/token_locations.py",
        "            elif there.get(node) == REQUESTED:\n",
        "            else:\n",
        NODES_LONG_HOLD,
        "S10",
    ),
    Mutant(
        "an interrupted attempt withdraws its votes",
        "core/quorum_acquire.py",
        "            await session.port.shielded(attempt.undo())\n",
        "            pass\n",
        NODES_LATE,
        "S10 S16 LEAK",
    ),
    Mutant(
        "an interrupted withdrawal is left to the background",
        "core/quorum_acquire.py",
        "        except BaseException:\n            self.undo_in_background()\n            raise\n",
        "        except BaseException:\n            raise\n",
        NODES_LATE,
        "S10 S16 LEAK",
    ),
    Mutant(
        "a waiter that leaves the queue of a node confirms it",
        "core/quorum.py",
        "            await self._release(request, 0.0, Round.is_complete)",
        "            await self._send(Release(self, request, Round.is_complete), 0.0)",
        NODES_LATE,
        "S10 S16 LEAK",
    ),
    Mutant(
        "a token with a tombstone is not queued again",
        "scripts/vote.lua",
        "if waiter ~= '' and not has_tombstone(waiter) then",
        "if waiter ~= '' then",
        NODES_UNSTABLE,
        "S10",
    ),
    Mutant(
        "a fence counter is raised only by the token that holds the lock",
        "scripts/confirm.lua",
        "if call('GET', lock) ~= token or is_over(left) then",
        "if is_over(left) then",
        NODES,
        "S8 S6 S4",
    ),
    Mutant(
        "a node votes only for a free lock",
        "scripts/vote.lua",
        "if not holder then\n  if waiter",
        "if true then\n  if waiter",
        NODES,
        "S4 S1",
    ),
    Mutant(
        "a vote has a number above the last one",
        "scripts/_raise_fence.lua",
        "if last and number <= tonumber(last) then",
        "if false then",
        NODES,
        "S6",
    ),
    Mutant(
        "a node that lost its data does not vote",
        "sim/requests.py",
        "        if left > 0:\n",
        "        if False:\n",
        NODES_DATA_LOSS,
        "S1 S7",
    ),
    Mutant(
        "an attempt on a quorum ends within the timeout",
        "core/quorum_acquire.py",
        "withdraw(request, self._time_left(), wait_if_no_votes=wait_if_no_votes)",
        "withdraw(request, self._spec.command_timeout, wait_if_no_votes=wait_if_no_votes)",
        NODES_SHORT_TIMEOUT,
        "L4",
    ),
    Mutant(
        "a repeated vote does not shorten a lease",
        "scripts/vote.lua",
        "  call('PEXPIRE', lock, math.max(left, ttl + delay))",
        "  call('PEXPIRE', lock, ttl + delay)",
        NODES_EXTENDED,
        "S2",
    ),
    Mutant(
        "a confirmation does not shorten a lease",
        "scripts/confirm.lua",
        "call('PEXPIRE', lock, math.max(left, ttl + delay))",
        "call('PEXPIRE', lock, ttl + delay)",
        NODES_EXTENDED,
        "S2",
    ),
    Mutant(
        "a lease is not restored on a node while it is being released",
        "core/token_locations.py",
        "            if there is None or token in self._releasing:\n",
        "            if there is None:\n",
        NODES_SHORT_TTL,
        "S10 S16",
    ),
    Mutant(
        "a lease is restored on other nodes only after a majority renewed it",
        "core/quorum.py",
        "if isinstance(each, Renewal) and each.has_majority()",
        "if isinstance(each, Renewal) and each.yes",
        NODES,
        "S5",
    ),
    Mutant(
        "a renewal restores the lease on nodes that do not have it",
        "core/rounds.py",
        "[(nodes, vote), (nodes, confirmation)] if nodes else []",
        "[]",
        NODES_EVICTIONS,
        "RESTORE",
    ),
    Mutant(
        "a renewal with replies of a majority counts",
        "core/quorum.py",
        "if isinstance(one_round, Release) and one_round.failed:",
        "if one_round.failed:",
        NODES_RESTARTING,
        "RENEW",
    ),
    Mutant(
        "a round that is won too late is released before the next one",
        "core/quorum_acquire.py",
        "            await self._withdraw(wait_if_no_votes=not votes.agrees_on_holder())\n"
        "            pause",
        "            if not fence:\n"
        "                await self._withdraw(wait_if_no_votes=not votes.agrees_on_holder())\n"
        "            pause",
        NODES_MIN_VALIDITY,
        "S10",
    ),
    Mutant(
        "a refusal from before a node was released does not report a missing lease",
        "core/rounds.py",
        "return [] if len(empty) == self._not_there() else 0",
        "return [] if empty else 0",
        {**NODES, "calm": True, "evict_holder": 0.7, "extend": 1.0, "slow": 0.1, "reset": 0.02},
        "EVICT",
    ),
    Mutant(
        "an attempt in a forked child leaves no waiter behind",
        "core/quorum_acquire.py",
        "            attempt.forget()\n",
        "            pass\n",
        {**NODES_CALM, "fork": 0.02, "clients": 4},
        "LEAK",
    ),
    Mutant(
        "a forked child forgets the token of its parent's waiter",
        "core/quorum_acquire.py",
        "            self._quorum.locations.forget(token)\n",
        "            pass\n",
        {**NODES_CALM, "fork": 0.05, "tasks": 2, "loop": True},
        "LEAK",
    ),
    Mutant(
        "a token that a renewal finds released is forgotten",
        "core/token_locations.py",
        "if token in self._releasing:  # the node ran",
        "if False:  # the node ran",
        {**NODES_CALM, "ttl": 1.0, "hold": 1.0},
        "LEAK",
    ),
    Mutant(
        "a token that is gone from all nodes is forgotten",
        "core/token_locations.py",
        "(node, None)\n            if not there:\n                self.forget(token)\n",
        "(node, None)\n",
        {**NODES_CALM, "slow": 0.2},
        "LEAK",
    ),
]
"""Mutants of locks on several nodes."""

REPLICATED: SettingChanges = {"replicas": 2, "failover": 0.3, "hold": 1.0}

REPLICAS = [
    Mutant(
        "all replicas have the write",
        "wire/replication.py",
        "if isinstance(acked, int) and acked >= replicas:",
        "if isinstance(acked, int) and acked >= 1:",
        REPLICATED,
        "S1 S2",
    ),
    Mutant(
        "replicas have a renewal",
        "wire/replication.py",
        "frozenset((ACQUIRE.name, ADOPT.name, RENEW.name))",
        "frozenset((ACQUIRE.name, ADOPT.name))",
        REPLICATED,
        "S1 S2",
    ),
    Mutant(
        "replicas have a grant",
        "wire/replication.py",
        "frozenset((ACQUIRE.name, ADOPT.name, RENEW.name))",
        "frozenset((RENEW.name,))",
        REPLICATED,
        "S1 S2",
    ),
    Mutant(
        "a pushed grant is confirmed if replicas must have it",
        "core/attempt.py",
        "if spec.renew and not spec.replicas:",
        "if spec.renew:",
        REPLICATED,
        "S1 S2",
    ),
    Mutant(
        "WAIT covers the writes of this connection",
        "sim/requests.py",
        "link.server.wait(link.offset, replicas, microseconds)",
        "link.server.wait(0, replicas, microseconds)",
        REPLICATED,
        "S1 S2",
    ),
]
"""Mutants of locks on one server with replicas."""

EXPORTS: SettingChanges = {"export": 0.4}
EXPORTS_SLOW: SettingChanges = {**EXPORTS, "slow": 0.2, "pause": 0.05, "hold": 1.0}
EXPORTS_LATE: SettingChanges = {
    **EXPORTS,
    "ttl": 30.0,
    "cancel": 0.04,
    "slow": 0.2,
    "doubled": 0.0,
}
EXPORTS_CALM: SettingChanges = {**EXPORTS, "calm": True, "ttl": 5.0}
EXPORTS_UNRENEWED: SettingChanges = {**EXPORTS, "calm": True, "renew": False, "hold": 1.6}
EXPORTS_UNSTABLE: SettingChanges = {
    "calm": True,
    "clients": 1,
    "turns": 6,
    "ttl": 30.0,
    "export": 0.5,
    "cancel": 0.1,
    "slow": 0.4,
}
EXPORTS_REPLICATED: SettingChanges = {**EXPORTS, "replicas": 2, "failover": 0.3}

EXPORT = [
    Mutant(
        "an exported lease carries its fence",
        "core/export.py",
        '"fence": lease.fence,',
        '"fence": lease.fence - 1,',
        EXPORTS_CALM,
        "S8",
    ),
    Mutant(
        "an export ends the lease of the exporter",
        "core/export.py",
        "        lease.state = RELEASED\n    except BaseException:\n",
        "    except BaseException:\n",
        EXPORTS_CALM,
        "S12",
    ),
    Mutant(
        "an export renews the lease",
        "core/export.py",
        "    sent_at = await renew_now(session, ref, lease, spec.ttl)\n"
        "    lease.apply_renewal(sent_at, spec.ttl, session.port.now())\n",
        "",
        EXPORTS_UNRENEWED,
        "ADOPT",
    ),
    Mutant(
        "a late push does not release an exported lease",
        "core/export.py",
        "lease.unregister_waiter(session.port.now())",
        "lease.unregister_waiter()",
        EXPORTS_SLOW,
        "S4",
    ),
    Mutant(
        "a lease is adopted only once",
        "scripts/adopt.lua",
        "if (holder ~= exported and holder ~= token) or",
        "if not holder or",
        EXPORTS_CALM,
        "S4",
    ),
    Mutant(
        "an adoption never creates a lock",
        "scripts/adopt.lua",
        "if (holder ~= exported and holder ~= token) or is_over(left) or",
        "if (holder and holder ~= exported and holder ~= token) or",
        EXPORTS,
        "S5",
    ),
    Mutant(
        "an adoption does not change the fence counter",
        "scripts/adopt.lua",
        "return (call('GET', KEYS[2]) or new_fence()) .. serial",
        "return new_fence() .. serial",
        EXPORTS_CALM,
        "S8",
    ),
    Mutant(
        "an adoption leaves a tombstone for the exported token",
        "scripts/adopt.lua",
        "add_tombstone(exported, 60000)\n",
        "",
        EXPORTS_LATE,
        "S10",
    ),
    Mutant(
        "an adoption that was abandoned does not get the lock",
        "scripts/adopt.lua",
        "or is_over(left) or has_tombstone then",
        "or is_over(left) then",
        EXPORTS_UNSTABLE,
        "S10",
    ),
    Mutant(
        "an abandoned adoption releases its token",
        "core/export.py",
        "            elif maybe_adopted or not isinstance(error, HoldfastError):\n",
        "            elif False:\n",
        EXPORTS_LATE,
        "S10 S16",
    ),
    Mutant(
        "an adoption that completes too late is released",
        "core/export.py",
        "        maybe_adopted = may_have_run or bool(given)\n",
        "        maybe_adopted = may_have_run\n",
        {"calm": True, "export": 0.5, "ttl": 0.4, "pause": 0.1},
        "S16",
    ),
    Mutant(
        "the deadline of an adopted lease counts from before the request",
        "core/export.py",
        "LeaseState(spec, token, fence, sent_at, actor, process, session, ref)",
        "LeaseState(spec, token, fence, port.now(), actor, process, session, ref)",
        EXPORTS_SLOW,
        "S2 S1",
    ),
    Mutant(
        "an adoption sets at least the adopter's ttl",
        "scripts/adopt.lua",
        "  call('SET', lock, token, 'PX', math.max(left, ttl + delay))",
        "  call('SET', lock, token, 'PX', left)",
        EXPORTS,
        "S2 S1",
    ),
    Mutant(
        "replicas have an adoption",
        "wire/replication.py",
        "frozenset((ACQUIRE.name, ADOPT.name, RENEW.name))",
        "frozenset((ACQUIRE.name, RENEW.name))",
        EXPORTS_REPLICATED,
        "S1 S2 S4",
    ),
]
"""Mutants of leases that one client hands to another."""

MUTANTS = [
    # Deadlines
    Mutant(
        "a deadline counts from before the request",
        "core/server_acquire.py",
        "spec, token, reply, sent_at, actor, process, session, ref\n",
        "spec, token, reply, port.now(), actor, process, session, ref\n",
        SLOW,
        "S2 S1",
    ),
    Mutant(
        "a renewal counts from before its request",
        "core/lease_state.py",
        "else max(sent_at + validity, self.deadline)",
        "else max(now + validity, self.deadline)",
        SLOW,
        "S2 S1",
    ),
    Mutant(
        "a pushed grant counts from the last answered PING",
        "core/waiter_channel.py",
        "since = max(self._synced_at, waiter.since)",
        "since = now",
        PAUSES,
        "S1 S2 S7",
    ),
    Mutant(
        "a grant in a reply counts from its request",
        "core/waiters.py",
        "channel.on_grant(grant, sent_at, self._port.now())",
        "channel.on_grant(grant, self._port.now(), self._port.now())",
        TWO_TASKS,
        "S2 S1",
    ),
    Mutant(
        "a confirmed grant counts from before its request",
        "core/attempt.py",
        "spec.ttl, sent_at), is_unconfirmed=False)\n\n\ndef on_holder",
        "spec.ttl, moment.now), is_unconfirmed=False)\n\n\ndef on_holder",
        PAUSES,
        "S2 S1",
    ),
    Mutant(
        "a grant is valid for its window",
        "core/lease_state.py",
        "self.deadline = grant.since + validity_of(grant.seconds)",
        "self.deadline = grant.since + validity_of(self.spec.ttl)",
        LONG,
        "S2 S1",
    ),
    Mutant(
        "a deadline allows for drift",
        "core/spec.py",
        "return ttl * (1 - DRIFT) - MARGIN",
        "return ttl",
        UNCHANGED,
        "S2 S1",
    ),
    Mutant(
        "a release ends the lease",
        "core/lease_state.py",
        "return self.state is HELD and now",
        "return now",
        UNCHANGED,
        "S12 S1",
    ),
    Mutant(
        "a loss is reported while the server hangs",
        "core/renewer.py",
        "due, soon = self._advance(), self",
        "due, soon = None, self",
        HANGING,
        "S3",
    ),
    Mutant(
        "a loss is reported",
        "core/renewer.py",
        "            item.lose(item.expiry_reason())\n            return",
        "            return",
        HANGING,
        "S3",
    ),
    # Tokens
    Mutant(
        "a release compares the token",
        "scripts/release.lua",
        "has_hold(holder, token)\n",
        "holder\n",
        GIVING_UP,
        "S4 S1",
    ),
    Mutant(
        "a renewal compares the token",
        "scripts/renew.lua",
        "if is_over(left) or not has_hold(holder, token) then",
        "if not holder then",
        PAUSES,
        "S1 S2 S9",
    ),
    Mutant(
        "a renewal never creates a lock",
        "scripts/renew.lua",
        "if is_over(left) or",
        "if not holder then\n  call('SET', lock, token, 'PX', ttl)\n"
        "  holder, left = token, ttl\nend\nif is_over(left) or",
        PAUSES,
        "S5",
    ),
    Mutant(
        "an attempt uses one token",
        "core/server_acquire.py",
        "        args = _acquire_args(spec, self.token, place)\n",
        "        self.token = port.new_token(port.actor(), spec.suffix)\n"
        "        args = _acquire_args(spec, self.token, place)\n",
        UNCHANGED,
        "S9 S1 S10 S4 S16",
    ),
    Mutant(
        "a retry finds the lock that the first request was granted",
        "scripts/acquire.lua",
        "(has_hold(holder, token) or is_same_owner(holder))",
        "is_same_owner(holder)",
        {"drawn": True},
        "S10",
    ),
    # Fences
    Mutant(
        "a grant raises the fence",
        "scripts/_hand_over.lua",
        "fence = fence or new_fence()",
        "fence = fence or call('GET', KEYS[2])",
        UNCHANGED,
        "S6",
    ),
    Mutant(
        "a renewal keeps the fence",
        "scripts/renew.lua",
        "return (call('GET', KEYS[2]) or new_fence()) .. serial",
        "return new_fence() .. serial",
        UNCHANGED,
        "S8",
    ),
    Mutant(
        "a retry keeps the fence",
        "scripts/acquire.lua",
        "  local fence = call('GET', KEYS[2]) or new_fence()\n  if order",
        "  local fence = new_fence()\n  if order",
        UNCHANGED,
        "S8",
    ),
    Mutant(
        "a fence is not below the clock",
        "scripts/_next_fence.lua",
        "fence = time[1] .. string.sub('00000' .. time[2], -6, -2) .. '0'",
        "fence = '10'",
        DATA_LOSS,
        "S6",
    ),
    Mutant(
        "a fence is above the last one",
        "scripts/_raise_fence.lua",
        "if last and number <= tonumber(last) then",
        "if false then",
        CLOCK_JUMPS,
        "S6",
    ),
    # Abandoned requests
    Mutant(
        "an abandoned token gets a tombstone",
        "scripts/release.lua",
        "if tombstone_ms ~= '0' then",
        "if false then",
        LATE,
        "S10",
    ),
    Mutant(
        "a token with a tombstone is not granted the lock",
        "scripts/acquire.lua",
        "if score('+' .. token) then",
        "if false then",
        LATE,
        "S10",
    ),
    Mutant(
        "an abandoned attempt releases its token",
        "core/server_acquire.py",
        "session, spec, tombstone = self._session, self._spec, self.attempt.tombstone",
        'session, spec, tombstone = self._session, self._spec, ""',
        GIVING_UP,
        "S10 S16",
    ),
    Mutant(
        "an abandoned attempt leaves the queue",
        "core/server_acquire.py",
        "        elif tombstone:\n",
        '        elif tombstone and tombstone != "0":\n',
        GIVING_UP,
        "S10",
    ),
    Mutant(
        "an attempt that is abandoned without a reply is cleaned up later",
        "core/server_acquire.py",
        "            session.cleanups.schedule(spec, self.token)\n",
        "",
        UNCHANGED,
        "S10 S16",
    ),
    Mutant(
        "a token that could not be released is cleaned up later",
        "core/cleanup.py",
        "        session.cleanups.schedule(spec, token, mode, longest=longest)\n",
        "        pass\n",
        CANCELS,
        "S10 S16",
    ),
    Mutant(
        "a failed cleanup is retried",
        "core/renewer.py",
        "self._set_due(item, min(now + item.reply_timeout / 2, item.deadline))",
        "self._set_due(item, item.deadline)",
        UNCHANGED,
        "S10 S16",
    ),
    # Waiting
    Mutant(
        "a grant with a waiter is not returned",
        "core/waiter_channel.py",
        "if waiter is None or waiter.key != message.key:",
        "if waiter is None or not waiter.in_timer:",
        SLOW,
        "S1 S4",
    ),
    Mutant(
        "all waiters recheck when the connection is lost",
        "core/waiter_channel.py",
        "            lost.on_echo()\n        self.recheck_all()\n\n    def on_message",
        "            lost.on_echo()\n\n    def on_message",
        UNCHANGED,
        "L2 L1",
    ),
    Mutant(
        "a reply that a push overtook changes nothing",
        "core/waiter_channel.py",
        "if what is QUEUED and at <= timer.notified_at:",
        "if False:",
        SLOW_LONG,
        "L3",
    ),
    Mutant(
        "a waiter rechecks when the holder's ttl ends",
        "core/waiter_channel.py",
        "            self._request_at(waiter.key, timer, at + min(",
        "            what is QUEUED or self._request_at(waiter.key, timer, at + min(",
        CRASHES,
        "L2 L1",
    ),
    Mutant(
        "a lock that is found free goes to the first waiter",
        "scripts/acquire.lua",
        "local grantee, fence = hand_over()",
        "local grantee, fence",
        UNCHANGED,
        "L2 L1",
    ),
    Mutant(
        "a granted waiter leaves the queue",
        "scripts/_hand_over.lua",
        "      grant(grantee, window)\n",
        "      grant(grantee, window)\n      call('ZADD', queue, ticket, waiter)\n"
        "      call('PEXPIRE', queue, 3600000)\n",
        CRASHES,
        "L1",
    ),
    Mutant(
        "a token that is not queued has no ticket",
        "scripts/acquire.lua",
        "ticket, place_lost = '0', 0",
        "ticket, place_lost = ticket or '0', 0",
        TWO_TASKS,
        "FIFO L2 REPLY",
    ),
    Mutant(
        "a release grants the lock to the next waiter",
        "scripts/release.lua",
        "  if not hand_over() then\n    call('DEL', lock)\n  end",
        "  call('DEL', lock)",
        {"calm": True, "ttl": 5.0},
        "L2 L3",
    ),
    Mutant(
        "a release that finds the lock free grants it to the next waiter",
        "scripts/release.lua",
        "elseif was_held or not holder or (over and holder == token and mode ~= 'leave') then",
        "elseif was_held then",
        LATE,
        "L2 L3",
    ),
    Mutant(
        "a second waiter watches in case the first one is dead or stopped",
        "scripts/_hand_over.lua",
        "      if second and (left < 0 or left > window + delay) then",
        "      if false then",
        MANY_CLIENTS,
        "L3",
    ),
    Mutant(
        "a waiter that leaves passes on its duty to watch",
        "scripts/release.lua",
        "    if was_first then",
        "    if false then",
        SHORT_TIMEOUT_CALM,
        "L3",
    ),
    Mutant(
        "a late request without a place leaves its token in the queue",
        "scripts/acquire.lua",
        "  if added then\n    call('ZREM', queue, token)\n  end",
        "  leave_queue()",
        {"drawn": True, "nodes": 1, "slow": 0.3},
        "REPLY",
    ),
    Mutant(
        "a waiter whose request got no reply sends it again",
        "core/attempt.py",
        "min(give_up, attempt.replied_at + RECHECK) if attempt.needs_tombstone else give_up",
        "give_up",
        {
            "drawn": True,
            "nodes": 1,
            "slow": 0.3,
            "fair": False,
            "ttl": 15.0,
            "hold": 0.3,
            "clients": 3,
            "tasks": 2,
        },
        "S10 L3 L1",
    ),
    Mutant(
        "a late push for a lost lease does not end its lock delay",
        "core/session.py",
        "lease.unregister_waiter(self.port.now())",
        "lease.unregister_waiter()",
        {"drawn": True, "nodes": 1, "slow": 0.3, "renew": False, "lock_delay": 1.3, "ttl": 0.4},
        "DELAY",
    ),
    Mutant(
        "an owner is compared with the end of a token",
        "scripts/_owner.lua",
        "string.sub(holder, -#owner - 1) == ':' .. owner",
        "string.find(holder, owner, 1, true)",
        {"owner": True},
        "S1 S9 S4",
    ),
    Mutant(
        "a grant that is pushed during a request counts",
        "core/server_acquire.py",
        "        self.handle(reply)\n        del reply",
        "        if self.waiter is not None:\n"
        "            self.waiter.grant = None\n"
        "        self.handle(reply)\n        del reply",
        {"calm": True, "clients": 5, "tasks": 2, "hold": 0.01, "turns": 5},
        "L3 L1 L2",
    ),
    Mutant(
        "without a timeout a caller waits without limit",
        "core/time_budget.py",
        "give_up = math.inf if timeout is None else now + timeout",
        "give_up = now + (timeout or 0.0)",
        {"calm": True},
        "L4",
    ),
    Mutant(
        "an inner level reports the loss of the lease",
        "core/release.py",
        "    if lease.state is LOST or not in_time:\n        check_valid(session, ref)  #",
        "    if len(lease.refs) == 1 and (lease.state is LOST or not in_time):\n"
        "        check_valid(session, ref)  #",
        {"drawn": True, "reentrant": True, "renew": False, "stall": 0.3},
        "S12",
    ),
    Mutant(
        "a lease is renewed repeatedly",
        "core/lease_state.py",
        "        self.renew_at = sent_at + validity / RENEWALS_PER_TTL\n",
        "        self.renew_at = sent_at + validity\n",
        {"calm": True, "hold": 5.0, "ttl": 1.0},
        "RENEW",
    ),
    Mutant(
        "waiters are granted in fifo order",
        "scripts/acquire.lua",
        "  if order == 'barge' then\n    leave_queue()",
        "  if place ~= '' then\n    leave_queue()",
        UNCHANGED,
        "FIFO",
    ),
    Mutant(
        "a waiter waits in the queue and does not poll",
        "core/server_acquire.py",
        "        if channel is not None:\n            subscription = channel.subscription\n",
        "        if False:\n            subscription = channel.subscription\n",
        {"calm": True, "ttl": 5.0},
        "POLL",
    ),
    Mutant(
        "a waiter that was granted the lock is forgotten with its lease",
        "core/server_acquire.py",
        "            lease.waiter = self.waiter\n            self.waiter.leave_timer()",
        "            self.waiter.leave_timer()",
        {"calm": True, "ttl": 5.0},
        "LEAK",
    ),
    Mutant(
        "a waiter that gives up is not woken again",
        "core/server_acquire.py",
        "        if self.waiter is not None:\n"
        "            self.waiter.leave_timer()\n"
        "        session, spec, tombstone",
        "        session, spec, tombstone",
        {"drawn": True},
        "LEAK L3",
    ),
    Mutant(
        "a waiter is forgotten even if leaving the queue is interrupted",
        "core/server_acquire.py",
        "        finally:\n            self._unregister_waiter()\n",
        "        except HoldfastError:\n            self._unregister_waiter()\n",
        CANCELLED_ACQUIRES,
        "LEAK",
    ),
    # Timeouts
    Mutant(
        "waiting ends at the timeout",
        "core/time_budget.py",
        "give_up = math.inf if timeout is None else now + timeout",
        "give_up = math.inf",
        SHORT_TIMEOUT,
        "L4",
    ),
    # Owners
    Mutant(
        "the release of one co-holder keeps the holds of the others",
        "scripts/_owner.lua",
        "if latest then",
        "if false then",
        SHARED,
        "S1",
    ),
    Mutant(
        "the hold of a co-holder is recorded",
        "scripts/_owner.lua",
        "if not holds and holder ~= token then",
        "if false then",
        SHARED,
        "S1",
    ),
    Mutant(
        "the holds of an earlier grant do not count",
        "scripts/_owner.lua",
        "return '=' .. (call('GET', KEYS[2]) or '')",
        "return '=' .. (call('GET', lock) or '')",
        {
            "drawn": True,
            "owner": True,
            "slow": 0.3,
            "tasks": 2,
            "clients": 5,
            "ttl": 10.0,
            "turns": 1,
        },
        "S10 EXPIRY S2 S1",
    ),
    Mutant(
        "the hold with the longest ttl counts",
        "scripts/_owner.lua",
        "latest = holds[found[index]]",
        "latest = now + 1",
        SHARED,
        "S2 S1",
    ),
    Mutant(
        "only the same task re-enters a lock",
        "core/held.py",
        "            if lease.actor is not actor:\n                continue\n",
        "",
        NESTED,
        "S7 S1 S12",
    ),
    # Lock delays, re-entry levels, late requests
    Mutant(
        "a co-holder does not shorten the ttl",
        "scripts/_owner.lua",
        "call('PEXPIRE', lock, math.max(left, ttl) + delay)",
        "call('PEXPIRE', lock, ttl + delay)",
        SLOW,
        "S2",
    ),
    Mutant(
        "an abandoned request leaves a tombstone",
        "core/server_acquire.py",
        "self._remove(tombstone)",
        'self._remove("0")',
        LATE,
        "S10 S16",
    ),
    Mutant(
        "a lease knows of its abandoned requests",
        "core/server_acquire.py",
        "lease.needs_tombstone = self.attempt.needs_tombstone",
        "lease.needs_tombstone = False",
        LATE,
        "S10 S16",
    ),
    Mutant(
        "a release without a reply is cleaned up later",
        "core/release.py",
        "    session.cleanups.schedule_lease(lease)\n    lease.release_may_have_run = True",
        "    lease.release_may_have_run = True",
        {"ttl": 30.0, "freeze": 0.3, "restart": 0.2, "doubled": 0.0, "hold": 1.0},
        "S10",
    ),
    Mutant(
        "a release whose reply was lost is not a loss",
        "core/release.py",
        "        lease.release_may_have_run = True\n"
        "        session.waiters.recheck_all(lease.spec)",
        "        session.waiters.recheck_all(lease.spec)",
        LATE,
        "S9",
    ),
    Mutant(
        "a waiter whose client is gone is skipped",
        "scripts/_notify.lua",
        "return receivers > 0",
        "return true",
        CRASHES,
        "L3",
    ),
    Mutant(
        "a grant in a reply is handled",
        "core/waiters.py",
        "        self.on_grant(message, sent_at)\n        return bool(was_held)",
        "        return bool(was_held)",
        {"calm": True, "tasks": 4, "ttl": 5.0},
        "L2 L3",
    ),
    Mutant(
        "the lock delay has no holder",
        "scripts/_settings.lua",
        "return left ~= -1 and left <= delay",
        "return false",
        LOCK_DELAY,
        "S5 DELAY S2",
    ),
    Mutant(
        "the lock delay is added to the ttl",
        "scripts/_hand_over.lua",
        "call('SET', lock, grantee, 'PX', px + delay_of(grantee))",
        "call('SET', lock, grantee, 'PX', px)",
        LOCK_DELAY,
        "S1 S2",
    ),
    Mutant(
        "leaving the queue ends within the timeout",
        "core/server_acquire.py",
        "tombstone, self._time_left()\n",
        "tombstone\n",
        SHORT_TIMEOUT,
        "L4",
    ),
    Mutant(
        "a loss begins the lock delay",
        "scripts/release.lua",
        "elseif mode == 'lost' and holder and delay > 0 then",
        "elseif false then",
        LOCK_DELAY,
        "DELAY",
    ),
    Mutant(
        "each re-entry level is released separately",
        "core/release.py",
        "    if lease.refs or not lease.claim_release():\n",
        "    if not lease.claim_release():\n",
        NESTED,
        "S12",
    ),
    Mutant(
        "a check of a released level does not end the lease",
        "core/release.py",
        "if lease.state is HELD and not in_time:",
        "if lease.state is HELD:",
        NESTED,
        "S12",
    ),
    Mutant(
        "acquiring a held lock again fails immediately",
        "core/held.py",
        "            if lease.is_valid(self._port.now(), self._port.process()):\n"
        "                return lease\n",
        "",
        UNCHANGED,
        "L5",
    ),
    Mutant(
        "an unfair acquire notifies the first waiter",
        "scripts/_hand_over.lua",
        "    notify_two('A', 0)\n",
        "",
        {"calm": True, "fair": False, "ttl": 5.0},
        "L1",
    ),
    Mutant(
        "a renewal works on a full server",
        "scripts/renew.lua",
        "  keep_hold(holder, token, left, ttl)",
        "  call('SET', lock, holder, 'PX', math.max(left, ttl + delay))",
        {"full": 0.4, "hold": 1.0},
        "L8",
    ),
    # A full server
    Mutant(
        "a release works on a full server",
        "scripts/release.lua",
        "  call('DEL', lock)\n  if #ARGV > 3 then",
        "  call('SET', KEYS[2] .. 's', token, 'PX', 1000)\n"
        "  call('DEL', lock)\n  if #ARGV > 3 then",
        FULL_SERVER,
        "L8",
    ),
]

RARE = [
    Mutant(
        "a task of a process that forked and died acquires nothing",
        "sim/run.py",
        "task in self.turns.acquiring and not task.process.crashed",
        "task in self.turns.acquiring",
        {},
        "L6",
    ),
    Mutant(
        "an older lease that comes late does not replace a newer one",
        "core/held.py",
        "if newest is None or newest.fence <= lease.fence:",
        "if True:",
        {},
        "L5",
    ),
    Mutant(
        "a client that is stopped after the faults acquires nothing",
        "sim/run.py",
        "client.closed or client.machine.crashed or client.machine.paused",
        "client.closed or client.machine.crashed",
        NODES,
        "L6",
    ),
    Mutant(
        "a renewal may fail before acquire() has returned",
        "sim/checks/quorum.py",
        "        token = self.record.fences.get(event.fence)  #",
        "        token = self.record.fences[event.fence]  #",
        NODES,
        "ERROR",
    ),
    Mutant(
        "a lease is not restored on a node while it is being cleaned up",
        "core/token_locations.py",
        "        self._releasing.add(token)  # a late",
        "        # a late",
        NODES,
        "S10",
    ),
    Mutant(
        "a node on which a lease is restored stays uncertain",
        "core/token_locations.py",
        "            there.update(dict.fromkeys(nodes, UNSURE))\n",
        "            there.update(dict.fromkeys(nodes, PRESENT))\n",
        {},
        "S10",
    ),
    Mutant(
        "a waiter may have to wait for replicas before it rechecks",
        "sim/checks/free_lock.py",
        "        if settings.calm and not settings.drop and not settings.replicas:",
        "        if settings.calm and not settings.drop:",
        {},
        "L1",
    ),
    Mutant(
        "a lock that is acquired and released between two observations is not free all the time",
        "sim/checks/server.py",
        "self.record.free_since = self.sim.now  # it may be released",
        "# it may be released",
        {},
        "L1",
    ),
    Mutant(
        "a waiter may await the reply to a probe before it requests again",
        "sim/checks/hand_over.py",
        "            busy = busy or any(name == of and limit < at for _, of, at in self._probes)\n",
        "",
        {},
        "L3",
    ),
    Mutant(
        "a late cleanup on one of several nodes does not end the lock delay",
        "core/token_locations.py",
        "LOST_TOMBSTONE if there.is_lost else TOMBSTONE_MS",
        "TOMBSTONE_MS",
        {},
        "DELAY",
    ),
    Mutant(
        "a client that was stopped may have left the lock",
        "sim/checks/leftovers.py",
        " or not stopped.isdisjoint(self._clients_on(server))",
        "",
        {},
        "S10",
    ),
    Mutant(
        "a client that was stopped may have left a hold of an owner",
        "sim/checks/leftovers.py",
        "[holder, *data.members(keys_of(key, holds=True)[3], inf)]",
        "[holder]",
        {},
        "S10",
    ),
    Mutant(
        "a client that was paused receives messages later",
        "sim/checks/free_lock.py",
        "FREE_AT_MOST + late +",
        "FREE_AT_MOST +",
        {},
        "L1",
    ),
    Mutant(
        "two waiters are notified of the lock delay after an eviction",
        "scripts/evict.lua",
        "  notify_two('W', delay)",
        "  notify_first('W', delay)",
        {},
        "L1",
    ),
    Mutant(
        "a node that missed a release may report a loss again",
        "sim/checks/after_loss.py",
        " and not self._any_lost\n",
        "\n",
        {},
        "LOSS",
    ),
    Mutant(
        "the release of a writer's token during a downgrade ends the loss too",
        "core/session.py",
        "schedule(lease.spec, writer, mode, longest",
        "schedule(lease.spec, writer, longest",
        {},
        "LOSS",
    ),
    Mutant(
        "a call that began before a fork may compute in the child",
        "sim/checks/cached.py",
        "            if other.machine is made.machine and in_process and other.lease is None:",
        "            if other.machine is made.machine and other.lease is None:",
        {},
        "FLIGHT",
    ),
    Mutant(
        "a promoted replica may have a lock that another script granted",
        "sim/checks/cached.py",
        " and holder == run.args[0].encode()\n",
        "\n",
        {},
        "STORE",
    ),
    Mutant(
        "a node on which a lease expired may be in its lock delay",
        "sim/checks/quorum.py",
        "            and node.data.left(self.record.key) > delay_ms\n",
        "",
        {},
        "S10",
    ),
    Mutant(
        "the holds of an owner are marked with the fence of their grant",
        "scripts/acquire.lua",
        "  local fence = call('GET', KEYS[2]) or new_fence()\n"
        "  if order == 'forever' then\n"
        "    call('SET', lock, holder)\n"
        "  elseif left >= 0 then\n"
        "    keep_hold(holder, token, left, ttl)\n"
        "  end\n",
        "  if order == 'forever' then\n"
        "    call('SET', lock, holder)\n"
        "  elseif left >= 0 then\n"
        "    keep_hold(holder, token, left, ttl)\n"
        "  end\n"
        "  local fence = call('GET', KEYS[2]) or new_fence()\n",
        {},
        "EXPIRY",
    ),
    Mutant(
        "two waiters are notified of the lock delay after a lost lease",
        "scripts/release.lua",
        "      notify_two('W', delay)",
        "      notify_first('W', delay)",
        {},
        "L1",
    ),
    Mutant(
        "a waiter that polls may pause after a reply",
        "sim/checks/hand_over.py",
        "            busy = busy or sim.now < answered_at + pause\n",
        "",
        {},
        "L3",
    ),
    Mutant(
        "a lease is restored on a node that always replies last",
        "core/token_locations.py",
        "            self._missing.add((token, node))\n",
        "",
        {},
        "RESTORE",
    ),
    Mutant(
        "a free lock without order is watched by another client",
        "scripts/_notify_backup.lua",
        "    notify_backup(client, client, px + window)",
        "    local second = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 1, 1)[1]\n"
        "    if second then notify(second, 'W', 0, px + window) end",
        {},
        "L1",
    ),
    Mutant(
        "a computation in the background may keep its waiter",
        "sim/checks/leftovers.py",
        " if not _belongs_to_one(token, running)]",
        "]",
        {},
        "LEAK",
    ),
    Mutant(
        "min_validity is compared with what is left of the ttl, not of a longer window",
        "core/attempt.py",
        "if now + least < grant.since + validity_of(grant.seconds):",
        "if now + least < grant.since + validity_of(1.0):",
        {},
        "S2",
    ),
    Mutant(
        "no lease lasts longer than its ttl",
        "core/attempt.py",
        "        if grant.seconds > spec.ttl:",
        "        if False:",
        {},
        "MAX_HOLD",
    ),
    Mutant(
        "an exported token is remembered for a connection that is being opened",
        "core/waiter_channel.py",
        "        self._draining.append((token, drain_from))\n        if drain_from",
        "        self._draining.append((token, drain_from))\n"
        "        if self.subscription is None:\n            self.unregister(token)\n"
        "        if drain_from",
        {},
        "S4",
    ),
    Mutant(
        "an attempt waits for votes even if no time is left",
        "core/quorum.py",
        "self._send(votes, max(timeout, SHORTEST_ROUND))",
        "self._send(votes, timeout)",
        {},
        "S16",
    ),
    Mutant(
        "a lock that its owner acquires may be kept under another token",
        "sim/checks/leftovers.py",
        "if name == token or is_joined(name.encode(), token.encode()):",
        "if name == token:",
        {},
        "S10",
    ),
    Mutant(
        "a holder that is also in the queue leaves it when it releases",
        "scripts/release.lua",
        "  call('ZREM', queue, token, '!' .. token)\n  mark_released(seen)\n",
        "  mark_released(seen)\n",
        {},
        "S8 L8 LOSS",
    ),
    Mutant(
        "a waiter that leaves in the last millisecond passes on its duty to watch",
        "scripts/release.lua",
        "  elseif remaining >= 0 and order ~= 'barge' then",
        "  elseif remaining > 0 and order ~= 'barge' then",
        {},
        "L3",
    ),
    Mutant(
        "an extension counts from the request that got the reply",
        "core/extend.py",
        "        sent_at = port.now()\n        return session",
        "        sent_at = sent_at or port.now()\n        return session",
        {},
        "S3",
    ),
    Mutant(
        "a waiter that requests its place does not ignore messages for long",
        "core/server_acquire.py",
        "            limit = min(self._time_left(), POSITION_TIMEOUT)\n",
        "            limit = self._time_left()\n",
        {"drawn": True},
        "L3",
    ),
    # Wrong reports of checks
    Mutant(
        "cleanups have more time on a node that resets connections",
        "sim/settings.py",
        '        if self.nodes == 1:\n            detected.add("reset")\n',
        '        detected.add("reset")\n',
        {"drawn": True},
        "S10",
    ),
    Mutant(
        "a node that lost its data may not know of an eviction",
        "sim/checks/quorum.py",
        "forgets = record.may_have_lost_writes or self.settings.wipe",
        "forgets = record.may_have_lost_writes",
        {"drawn": True},
        "S10",
    ),
]
"""Mutants that few runs catch. One such run is saved for each and replayed."""

EVICTIONS: SettingChanges = {"evict_holder": 0.3}
EVICTIONS_LATE: SettingChanges = {**EVICTIONS, "slow": 0.2, "ttl": 6.0}
EVICTIONS_CALM: SettingChanges = {"calm": True, "evict_holder": 0.7, "hold": 1.0, "ttl": 5.0}
EVICTIONS_LOCK_DELAY: SettingChanges = {**EVICTIONS, "lock_delay": 1.0}
STALLS: SettingChanges = {"stall": 0.2, "hold": 1.0}
MIN_VALIDITY_SLOW: SettingChanges = {"ttl": 30.0, "min_validity": 29.6, "slow": 0.3, "polls": True}
MIN_VALIDITY_CALM: SettingChanges = {"calm": True, "ttl": 10.0, "min_validity": 5.0}
FAILOVERS: SettingChanges = {"calm": True, "sentinel": True, "failover": 0.2, "hold": 0.5}
FAILOVERS_UNFAIR: SettingChanges = {**FAILOVERS, "fair": False}
LOST_REPLIES: SettingChanges = {"calm": True, "clients": 1, "tasks": 3, "reset": 0.05, "ttl": 10.0}
RESET_LONG: SettingChanges = {"ttl": 10.0, "hold": 3.0, "reset": 0.05}
DROPPED_LEASES: SettingChanges = {"calm": True, "drop": 0.2}
FORKED: SettingChanges = {"fork": 0.02}
FORKED_CALM: SettingChanges = {"calm": True, "fork": 0.05, "tasks": 2}
CLOSED: SettingChanges = {"close": 0.2, "half_open": 0.03, "tasks": 2, "ttl": 0.5}
CLOSED_CALM: SettingChanges = {"calm": True, "close": 0.5, "tasks": 2}
MAX_HOLD: SettingChanges = {"calm": True, "max_hold": 0.5, "ttl": 1.0, "hold": 1.0}
OPERATED = [
    Mutant(
        "an eviction compares the token",
        "scripts/evict.lua",
        "if not token or redis.sha1hex(token) ~= ARGV[1] then",
        "if not token then",
        EVICTIONS,
        "S4",
    ),
    Mutant(
        "an evicted token never gets the lock again",
        "scripts/evict.lua",
        "add_tombstone(token, 60000)\n",
        "",
        EVICTIONS_LATE,
        "S10 EVICT",
    ),
    Mutant(
        "an eviction grants the lock to the next waiter",
        "scripts/evict.lua",
        "elseif not hand_over() then",
        "else",
        EVICTIONS_CALM,
        "L2",
    ),
    Mutant(
        "an eviction begins the lock delay",
        "scripts/evict.lua",
        "if delay > 0 and not is_over(left) then",
        "if false then",
        EVICTIONS_LOCK_DELAY,
        "DELAY",
    ),
    Mutant(
        "an eviction raises the fence counter in the delay too",
        "scripts/evict.lua",
        "new_fence()\nif delay > 0 and not is_over(left) then",
        "if delay > 0 and not is_over(left) then",
        EVICTIONS_LOCK_DELAY,
        "EVICT",
    ),
    Mutant(
        "a lease whose renewal is refused is lost",
        "core/renewer.py",
        "            item.lose(item.refusal_reason(reply, now))\n",
        "            self._set_due(item, item.deadline)\n",
        EVICTIONS_CALM,
        "S5 EVICT",
    ),
    Mutant(
        "a lease whose extension is refused is lost",
        "core/extend.py",
        "    if not reply:\n"
        "        lease.lose(lease.refusal_reason(reply, session.port.now()))\n"
        "        raise lease.loss()\n",
        "",
        EVICTIONS_CALM,
        "S5",
    ),
    Mutant(
        "renewal ends with max_hold",
        "core/renewer.py",
        "if lease.renewing and now + _early(lease, lease.renew_until) >= lease.renew_until:",
        "if False:",
        MAX_HOLD,
        "MAX_HOLD",
    ),
    Mutant(
        "a renewal that is late is not sent after max_hold",
        "core/renewer.py",
        "now + _early(lease, lease.renew_until) >= lease.renew_until",
        "lease.renew_at >= lease.renew_until",
        {**MAX_HOLD, "stop": 0.5},
        "MAX_HOLD",
    ),
    Mutant(
        "the end of renewal by max_hold is reported",
        "core/renewer.py",
        '            self._report(Event("max_hold", lease.spec.name, lease.fence, detail))\n',
        "",
        MAX_HOLD,
        "MAX_HOLD",
    ),
    Mutant(
        "a renewal whose reply arrives after the deadline does not count",
        "core/lease_state.py",
        "        if now >= self.deadline:\n            return False\n",
        "",
        STALLS,
        "S5",
    ),
    Mutant(
        "a renewal whose reply arrives after the loss does not count",
        "core/renewer.py",
        "            if item.is_scheduled:\n                self._handle_reply",
        "            if reply and isinstance(item, LeaseState):\n"
        "                item.__dict__.pop('state', None)\n"
        "            if True:\n                self._handle_reply",
        SLOW,
        "S5 S1",
    ),
    Mutant(
        "a renewal that fails after the loss is not reported",
        "core/renewer.py",
        "            if item.is_scheduled:\n                self._handle_reply",
        "            if True:\n                self._handle_reply",
        {**SLOW, "stall": 0.1, "ttl": 1.0},
        "S5 S9",
    ),
    Mutant(
        "a grant that arrives too late is released",
        "core/attempt.py",
        "failures=0, late_grants=late, on_server=True, state=Ready()",
        "failures=0, late_grants=late, state=Ready()",
        MIN_VALIDITY_SLOW,
        "S10 S16",
    ),
    Mutant(
        "a deadline counts from the first request without a reply",
        "core/attempt.py",
        "sent_at = self.sent_at if self.failures else now",
        "sent_at = now",
        SLOW,
        "S2",
    ),
    Mutant(
        "a confirmed grant has the fence in the reply of the renewal",
        "core/server_acquire.py",
        "self.attempt = on_confirmation(",
        "if isinstance(reply, int) and reply:\n"
        '            reply = cast("Waiter", self.waiter).grant.fence\n'
        "        self.attempt = on_confirmation(",
        PAUSES,
        "S9",
    ),
    Mutant(
        "a waiter that comes back sends its ticket",
        "core/attempt.py",
        "    attempt = attempt._replace(ticket=ticket, ",
        '    attempt = attempt._replace(ticket="0", ',
        UNCHANGED,
        "FIFO",
    ),
    Mutant(
        "the end of a lost lease begins the lock delay",
        "core/session.py",
        "self.cleanups.schedule_lease(lease, LOST_TOMBSTONE)",
        "self.cleanups.schedule_lease(lease)",
        LOCK_DELAY,
        "DELAY",
    ),
    Mutant(
        "a handed-over lease has min_validity left",
        "core/attempt.py",
        "least = max(grant.seconds / 2, min_validity)",
        "least = grant.seconds / 2",
        MIN_VALIDITY_CALM,
        "S2",
    ),
    Mutant(
        "a server in quarantine grants no lock",
        "scripts/acquire.lua",
        "if quarantined then",
        "if false then",
        FAILOVERS_UNFAIR,
        "S1",
    ),
    Mutant(
        "a quarantine outlasts the longest lease",
        "scripts/guard.lua",
        "local quarantine_ms = longest + overlap",
        "local quarantine_ms = overlap",
        FAILOVERS,
        "S1",
    ),
    Mutant(
        "a quarantine outlasts the grants of a replaced server",
        "scripts/guard.lua",
        "local quarantine_ms = longest + overlap",
        "local quarantine_ms = longest",
        FAILOVERS,
        "S1",
    ),
    Mutant(
        "a lease is not renewed while a replaced server may take writes",
        "scripts/renew.lua",
        "if quarantined and quarantined > longest then",
        "if false then",
        FAILOVERS,
        "S1",
    ),
    Mutant(
        "waiters recheck after a release without a reply",
        "core/release.py",
        "        lease.release_may_have_run = True\n"
        "        session.waiters.recheck_all(lease.spec)\n"
        "    if session.closed",
        "        lease.release_may_have_run = True\n    if session.closed",
        LOST_REPLIES,
        "L1 L3",
    ),
    Mutant(
        "waiters recheck after an acquire without a reply",
        "core/server_acquire.py",
        "            if isinstance(reply, OutcomeUnknown):\n                # The lost reply",
        "            if False:\n                # The lost reply",
        LOST_REPLIES,
        "L1 L3",
    ),
    Mutant(
        "waiters recheck after an interrupted acquire",
        "core/server_acquire.py",
        "        if may_arrive:  # its reply may have contained a grant to another waiter\n"
        "            session.waiters.recheck_all(spec)\n",
        "",
        CANCELLED_ACQUIRES,
        "L1 L3",
    ),
    Mutant(
        "waiters recheck after an interrupted release",
        "core/release.py",
        "    else:\n"
        "        session.waiters.recheck_all(lease.spec)\n"
        "        await session.port.shielded",
        "    else:\n        await session.port.shielded",
        CANCELLED_ACQUIRES,
        "L1 L3",
    ),
    Mutant(
        "a failed renewal is retried before the deadline",
        "core/renewer.py",
        "                self._set_due(item, min(now + item.reply_timeout / 2, item.deadline))",
        "                renews = isinstance(item, LeaseState)\n"
        "                wait = math.inf if renews else item.reply_timeout / 2\n"
        "                self._set_due(item, min(now + wait, item.deadline))",
        RESET_LONG,
        "RENEW",
    ),
    Mutant(
        "a dropped lease is reported",
        "core/renewer.py",
        "if lease.is_dropped and not lease.reported_dropped:",
        "if False:",
        DROPPED_LEASES,
        "DROP",
    ),
    Mutant(
        "a release needs a majority",
        "core/rounds.py",
        "        if self.has_majority():\n            return max(self.yes.values())",
        "        if self.has_majority() or (self.yes and isinstance(self, Release)):\n"
        "            return max(self.yes.values())",
        {**NODES, "calm": True, "freeze": 0.4, "restart": 0.2, "ttl": 10.0},
        "S10",
    ),
    Mutant(
        "a forked child does not hold its parent's lease",
        "core/lease_state.py",
        "return self.state is HELD and now < self.deadline and self.process == process",
        "return self.state is HELD and now < self.deadline",
        FORKED,
        "S13",
    ),
    Mutant(
        "a forked child cannot release or extend its parent's lease",
        "core/release.py",
        " and lease.process == port.process()\n"
        "    if in_time and lease.state is HELD and weak_ref(",
        "\n    if in_time and lease.state is HELD and weak_ref(",
        FORKED,
        "S13",
    ),
    Mutant(
        "a forked child does not continue its parent's attempt",
        "core/server_acquire.py",
        'another state")\n            self._check_process()\n',
        'another state")\n',
        FORKED_CALM,
        "S13",
    ),
    Mutant(
        "a forked child does not retry after a failed confirmation",
        "core/server_acquire.py",
        'another state")\n            self._check_process()\n',
        'another state")\n'
        "            if not isinstance(self.attempt.state, Ready):\n"
        "                self._check_process()\n",
        FORKED_CALM,
        "S13",
    ),
    Mutant(
        "a forked child does not continue its parent's release",
        "core/release.py",
        "    check_process(session, lease)\n    if isinstance(error, OutcomeUnknown):",
        "    if isinstance(error, OutcomeUnknown):",
        FORKED,
        "S13",
    ),
    Mutant(
        "a forked child does not clean up its parent's attempt",
        "core/server_acquire.py",
        "            if self._session.port.process() == self._process:  # not",
        "            if True:  # not",
        FORKED_CALM,
        "S13",
    ),
    Mutant(
        "a queued renewal is not sent after the client is closed",
        "core/renewer.py",
        "[item for item in self._next_batch() if self._is_to_be_sent(item, sent_at)]",
        "[item for item in self._next_batch() if item.is_scheduled]",
        CLOSED,
        "CLOSE",
    ),
    Mutant(
        "closing a client ends its waiters",
        "core/attempt.py",
        "if moment.closed or now >= budget.end:",
        "if now >= budget.end:",
        CLOSED_CALM,
        "CLOSE L2",
    ),
    Mutant(
        "a closed client still reports a loss",
        "core/renewer.py",
        "            elif self._closed or now >= idle_since + IDLE_TIMEOUT:\n",
        "            if self._closed or now >= (idle_since or now) + IDLE_TIMEOUT:\n",
        CLOSED_CALM,
        "S3",
    ),
]
"""Mutants of evictions, `max_hold`, forks, closed clients, quarantine, and other rare events."""

MUTANTS += QUORUM + REPLICAS + EXPORT + OPERATED
