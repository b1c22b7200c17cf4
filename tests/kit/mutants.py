"""Mutants: the shipped code with one safeguard taken out, each hunted for in simulated worlds.

A mutant is a small change of one file. Its old text has to be there exactly once, so that the list
stays true to the code. A process of its own loads the package with that change, plays worlds by
seed, one after the other, and says which check was the first to fail.

This file is also what that process runs, so at the top it imports nothing of the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from importlib.abc import FileLoader

SOURCE = Path(__file__).parents[2] / "src"

Worlds = dict[str, Any]
"""How the worlds differ from stormy ones; with `calm` they differ from calm ones. With `drawn` they
are those of the default sweep, and what else is given is fixed."""


class Mutant(NamedTuple):
    """One change, what it takes away, and who is to notice."""

    name: str
    """What is taken away."""
    file: str
    old: str
    new: str
    worlds: Worlds
    by: str
    """The checks that may notice first."""


class Found(NamedTuple):
    """What a hunt brought: the check that failed first, or '', and how many worlds it took."""

    check: str
    seed: int
    worlds: int
    detail: str


NO_CHANGE = Mutant("nothing", "core/__init__.py", "", "", {}, "")


def hunt(mutant: Mutant, worlds: Worlds, seeds: int) -> Found:
    """Play worlds with seeds from 0 on until a check fails."""
    return _ask({**mutant._asdict(), "worlds": worlds, "seeds": seeds})


def replay(mutant: Mutant, kept: str) -> Found:
    """Play the world that was kept."""
    return _ask({**mutant._asdict(), "kept": kept})


def _ask(work: dict[str, Any]) -> Found:
    work["source"] = str(SOURCE)
    child = subprocess.run(
        [sys.executable, "-I", __file__],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    return Found(**json.loads(child.stdout))


def places(mutant: Mutant) -> int:
    """Count the places in the shipped code that the mutant would change."""
    return (SOURCE / "holdfast" / mutant.file).read_text().count(mutant.old)


def mutate(path: Path, old: bytes, new: bytes) -> None:
    """Replace a text in a file of the package, as this process reads it when it is imported."""
    compiled = cache_from_source(str(path)) if path.suffix == ".py" else None
    read = SourceFileLoader.get_data

    def get_data(loader: FileLoader, name: str) -> bytes:
        if name == compiled:
            raise FileNotFoundError(name)
        text = read(loader, name)
        return text.replace(old, new) if Path(name) == path else text

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign, assignment]  # so be it
    sys.dont_write_bytecode = True


def _main() -> None:
    work = json.load(sys.stdin)
    sys.path.insert(0, work["source"])
    if work["old"]:
        path = Path(work["source"], "holdfast", work["file"])
        mutate(path, work["old"].encode(), work["new"].encode())

    from dataclasses import replace  # noqa: PLC0415 - after the change

    from holdfast.sim.choices import RandomChoices  # noqa: PLC0415 - the same
    from holdfast.sim.play import play  # noqa: PLC0415 - the same
    from holdfast.sim.settings import CALM, STORMY  # noqa: PLC0415 - the same

    if "kept" in work:
        from holdfast.sim import sweep  # noqa: PLC0415 - the same

        outcome = sweep.Found.load(work["kept"]).run()
        json.dump(Found(outcome.check, -1, 1, outcome.detail)._asdict(), sys.stdout)
        return
    from holdfast.sim.swarm import draw  # noqa: PLC0415 - the same

    worlds = dict(work["worlds"])
    drawn = worlds.pop("drawn", False)
    usual = CALM if worlds.pop("calm", False) else STORMY
    for seed in range(work["seeds"]):
        settings = draw(seed, worlds) if drawn else replace(usual, **worlds)
        outcome = play(settings, RandomChoices(seed))
        if outcome.check:
            found = Found(outcome.check, seed, seed + 1, outcome.detail)
            break
    else:
        found = Found("", -1, work["seeds"], "")
    json.dump(found._asdict(), sys.stdout)


SEEDS, CONTROL = 2000, 150
"""Worlds in which a mutant has to be caught, and in which the code as it is must not be."""

STORM: Worlds = {}
PAIRS: Worlds = {"tasks": 2, "clients": 2, "slow": 0.2, "restart": 0.3, "cancel": 0.05}
PAUSES: Worlds = {"pause": 0.1, "slow": 0.1, "crash": 0.0, "full": 0.0}
CANCELS: Worlds = {"cancel": 0.08, "freeze": 0.3, "restart": 0.2, "doubled": 0.0}
SLOW: Worlds = {"slow": 0.2, "pause": 0.05, "hold": 1.0}
SLOW_LONG: Worlds = {"slow": 0.1, "ttl": 20.0, "hold": 0.5, "clients": 4}
GIVING_UP: Worlds = {"cancel": 0.08}
LATE: Worlds = {"cancel": 0.08, "slow": 0.2, "doubled": 0.0}
CRASHES: Worlds = {"crash": 0.02, "clients": 5}
LONG: Worlds = {"ttl": 6.0, "pause": 0.03}
SHARED: Worlds = {"owner": True}
IN_TIME: Worlds = {"timeout": 1.0}
LEAVING: Worlds = {"calm": True, "timeout": 1.0, "clients": 5, "ttl": 5.0}
CROWDED: Worlds = {"cancel": 0.1, "clients": 5}
NESTED: Worlds = {"reentrant": True, "tasks": 2, "clients": 2}
FULL: Worlds = {"full": 0.3}
WIPED: Worlds = {"wipe": 0.2}
JUMPING: Worlds = {"clock_jump": 0.2}
DELAYED: Worlds = {"lock_delay": 1.0}
CUT_SHORT: Worlds = {"calm": True, "clients": 1, "tasks": 3, "cancel": 0.1, "ttl": 10.0}
HANGING: Worlds = {"freeze": 0.4, "restart": 0.2, "cancel": 0.05}

MANY: Worlds = {"nodes": 3, "skew": 2.0}
MANY_LATE: Worlds = {**MANY, "ttl": 30.0, "cancel": 0.06, "slow": 0.2, "doubled": 0.0}
MANY_TORN: Worlds = {**MANY_LATE, "calm": True, "reset": 0.05, "slow": 0.3}
MANY_RESET: Worlds = {**MANY_TORN, "cancel": 0.0}
MANY_PAUSED: Worlds = {**MANY, "pause": 0.1, "slow": 0.1, "crash": 0.0, "hold": 1.0}
MANY_WIPED: Worlds = {**MANY, "wipe": 0.3, "freeze": 0.3, "hold": 1.0}
MANY_FLUSHED: Worlds = {
    **MANY,
    "calm": True,
    "loop": True,
    "clients": 4,
    "ttl": 30.0,
    "slow": 0.1,
    "script_flush": 0.9,
}
MANY_AWAY: Worlds = {**MANY, "calm": True, "ttl": 0.9, "hold": 0.2, "restart": 0.9}
MANY_HURRIED: Worlds = {**MANY, "timeout": 1.0}
MANY_CALM: Worlds = {**MANY, "calm": True, "ttl": 30.0}
MANY_LONG: Worlds = {**MANY, "calm": True, "ttl": 15.0, "hold": 6.0, "slow": 0.2, "reset": 0.05}
MANY_EXTENDED: Worlds = {**MANY, "calm": True, "ttl": 10.0, "extend": 1.0, "doubled": 0.1}
MANY_RENEWED: Worlds = {**MANY, "calm": True, "ttl": 0.5, "hold": 0.5, "tasks": 2, "cancel": 0.02}
MANY_HURRIED_LATE: Worlds = {**MANY, "ttl": 30.0, "min_validity": 29.6, "slow": 0.2}
MANY_EVICTED: Worlds = {**MANY, "calm": True, "evict": 0.6, "hold": 1.0, "ttl": 5.0}

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
        "a lost round is released on nodes that did not answer",
        "core/quorum.py",
        "        waits = have_it or not hurry\n",
        "        waits = have_it or not hurry\n        if not have_it:\n            return\n",
        MANY_RESET,
        "S10",
    ),
    Mutant(
        "a majority stands at the fence",
        "core/quorum.py",
        "[(fence, agreed)] = Counter(numbers).most_common(1)",
        "fence, agreed = max(numbers), self.majority",
        MANY,
        "S6 S7",
    ),
    Mutant(
        "a fence is not that of one node",
        "core/quorum.py",
        "[(fence, agreed)] = Counter(numbers).most_common(1)",
        "fence, agreed = numbers[0], self.majority",
        MANY,
        "S6 S7",
    ),
    Mutant(
        "a majority is more than half",
        "core/quorum.py",
        "self.majority = len(self.names) // 2 + 1",
        "self.majority = len(self.names) // 2",
        MANY,
        "S1 S6",
    ),
    Mutant(
        "an elected lease counts from before the round",
        "core/quorum_acquire.py",
        "token, sent_at, actor = attempt.token, attempt.sent_at, attempt.actor",
        "token, sent_at, actor = attempt.token, session.port.now(), attempt.actor",
        MANY_PAUSED,
        "S2 S1",
    ),
    Mutant(
        "a majority that was reached too late is none",
        "core/quorum_acquire.py",
        "if fence and self._left_to_win() > 0:",
        "if fence:",
        MANY_PAUSED,
        "S2",
    ),
    Mutant(
        "a lease begins when its votes are counted",
        "core/quorum_acquire.py",
        "                return fence\n",
        "                await self.stop_waiting()\n                return fence\n",
        MANY_PAUSED,
        "S2",
    ),
    Mutant(
        "a renewal takes a majority",
        "core/rounds.py",
        "        if self.has_majority():\n            return max(self.yes.values())",
        "        if self.yes:\n            return max(self.yes.values())",
        MANY_WIPED,
        "S2 S1",
    ),
    Mutant(
        "what a majority says is not ours is lost",
        "core/rounds.py",
        "            return [] if len(empty) == self._not_there() else 0",
        "            return isinstance(self, Renewal)",
        MANY_EVICTED,
        "S5",
    ),
    Mutant(
        "a renewal that failed at once is not repeated without a pause",
        "core/renewer.py",
        "return min(EARLY_MOST, item.spec.first_due / 2, item.patience / 4)",
        "return min(EARLY_MOST, item.spec.first_due / 2)",
        MANY_AWAY,
        "BUSY",
    ),
    Mutant(
        "who loses gives its votes back",
        "core/quorum_acquire.py",
        "            await self._withdraw(hurry=votes.agrees_on_holder())\n            pause",
        "            pause",
        MANY_CALM,
        "L6 S10",
    ),
    Mutant(
        "a token is released on nodes that did not answer",
        "core/token_locations.py",
        "        self._due.append((RELEASE, keys.at(node), (token, ttl, tombstone, settings)))\n",
        "",
        MANY_LATE,
        "S10 S16",
    ),
    Mutant(
        "what may yet come is buried",
        "core/rounds.py",
        "buried = script, keys, (token, ttl, TOMBSTONE_MS, settings)",
        "buried = request",
        MANY_RESET,
        "S10 S16",
    ),
    Mutant(
        "what turns out to come after all is buried too",
        "core/token_locations.py",
        "== UNSURE and not tombstone:",
        "== UNSURE and False:",
        MANY_TORN,
        "S10 S16",
    ),
    Mutant(
        "a waiter that a late vote puts back into a queue is removed",
        "core/token_locations.py",
        "if node not in there:  # it has left",
        "if False:  # it has left",
        MANY_FLUSHED,
        "S10 S16",
    ),
    Mutant(
        "what is given again may be overtaken by its release",
        "core/token_locations.py",
        "there.update(dict.fromkeys(nodes, UNSURE))",
        "there.update(dict.fromkeys(new, PRESENT))",
        MANY_LONG,
        "S10 S16",
    ),
    Mutant(
        "an old answer does not undo what was given again",
        "core/token_locations.py",
        "            elif there.get(node) == ASKED:\n",
        "            else:\n",
        MANY_LONG,
        "S10",
    ),
    Mutant(
        "who is interrupted withdraws",
        "core/quorum_acquire.py",
        "            await session.port.shielded(attempt.undo())\n",
        "            pass\n",
        MANY_LATE,
        "S10 S16 LEAK",
    ),
    Mutant(
        "a withdrawal that is interrupted is left to the background",
        "core/quorum_acquire.py",
        "        except BaseException:\n            self.abandon()\n            raise\n",
        "        except BaseException:\n            raise\n",
        MANY_LATE,
        "S10 S16 LEAK",
    ),
    Mutant(
        "who leaves a queue makes sure of it",
        "core/quorum.py",
        "            await self._release(request, 0.0, Round.is_complete)",
        "            await self._ask(Release(self, request, Round.is_complete), 0.0)",
        MANY_LATE,
        "S10 S16 LEAK",
    ),
    Mutant(
        "who was buried is not queued again",
        "scripts/vote.lua",
        "if waiter ~= '' and not is_buried(waiter) then",
        "if waiter ~= '' then",
        MANY_TORN,
        "S10",
    ),
    Mutant(
        "a number is raised by its token only",
        "scripts/confirm.lua",
        "if call('GET', lock) ~= token or is_over(left) then",
        "if is_over(left) then",
        MANY,
        "S8 S6 S4",
    ),
    Mutant(
        "a vote is for what is free",
        "scripts/vote.lua",
        "if not holder then\n  if waiter",
        "if true then\n  if waiter",
        MANY,
        "S4 S1",
    ),
    Mutant(
        "a vote is above the last number",
        "scripts/_number.lua",
        "if last and tonumber(last) >= tonumber(fence) then",
        "if false then",
        MANY,
        "S6",
    ),
    Mutant(
        "a node that lost its data is not asked",
        "sim/requests.py",
        "        if left > 0:\n",
        "        if False:\n",
        MANY_WIPED,
        "S1 S7",
    ),
    Mutant(
        "an election is within the timeout",
        "core/quorum_acquire.py",
        "withdraw(request, self._time_left(), hurry=hurry)",
        "withdraw(request, self._spec.command_timeout, hurry=hurry)",
        MANY_HURRIED,
        "L4",
    ),
    Mutant(
        "a vote that is repeated does not shorten a lease",
        "scripts/vote.lua",
        "  call('PEXPIRE', lock, math.max(left, ttl + delay))",
        "  call('PEXPIRE', lock, ttl + delay)",
        MANY_EXTENDED,
        "S2",
    ),
    Mutant(
        "a confirmation does not shorten a lease",
        "scripts/confirm.lua",
        "call('PEXPIRE', lock, math.max(left, ttl + delay))",
        "call('PEXPIRE', lock, ttl + delay)",
        MANY_EXTENDED,
        "S2",
    ),
    Mutant(
        "a lease that is being released is given to no more nodes",
        "core/token_locations.py",
        "            if there is None or token in self._leaving:\n",
        "            if there is None:\n",
        MANY_RENEWED,
        "S10 S16",
    ),
    Mutant(
        "a lease is given to more nodes only after a majority renewed it",
        "core/quorum.py",
        "if isinstance(each, Renewal) and each.has_majority()",
        "if isinstance(each, Renewal) and each.yes",
        MANY,
        "S5",
    ),
    Mutant(
        "a lease is given to the nodes that do not have it",
        "core/rounds.py",
        "[(nodes, vote), (nodes, confirmation)] if nodes else []",
        "[]",
        MANY_EVICTED,
        "RESTORE",
    ),
    Mutant(
        "a renewal that a majority answers counts",
        "core/quorum.py",
        "if isinstance(one_round, Release) and one_round.failed:",
        "if one_round.failed:",
        MANY_AWAY,
        "RENEW",
    ),
    Mutant(
        "a round that is won too late is given back before the next one",
        "core/quorum_acquire.py",
        "            await self._withdraw(hurry=votes.agrees_on_holder())\n            pause",
        "            if not fence:\n"
        "                await self._withdraw(hurry=votes.agrees_on_holder())\n"
        "            pause",
        MANY_HURRIED_LATE,
        "S10",
    ),
    Mutant(
        "what a node refused before it was asked no more is not said to be missing",
        "core/rounds.py",
        "return [] if len(empty) == self._not_there() else 0",
        "return [] if empty else 0",
        {**MANY, "calm": True, "evict_holder": 0.7, "extend": 1.0, "slow": 0.1, "reset": 0.02},
        "EVICT",
    ),
    Mutant(
        "a vote for a lock without a last number is numbered",
        "scripts/_number.lua",
        "if last and tonumber(last) >= tonumber(fence) then",
        "if true then",
        MANY_CALM,
        "ERROR",
    ),
    Mutant(
        "an election in a forked child leaves no waiter behind",
        "core/quorum_acquire.py",
        "            attempt.forget()\n",
        "            pass\n",
        {**MANY_CALM, "fork": 0.02, "clients": 4},
        "LEAK",
    ),
    Mutant(
        "a forked child forgets the token of its parent's waiter",
        "core/quorum_acquire.py",
        "            self._quorum.locations.forget(token)\n",
        "            pass\n",
        {**MANY_CALM, "fork": 0.05, "tasks": 2, "loop": True},
        "LEAK",
    ),
    Mutant(
        "a token that a renewal finds released is forgotten",
        "core/token_locations.py",
        "if token in self._leaving:  # the release was quicker",
        "if False:  # the release was quicker",
        {**MANY_CALM, "ttl": 1.0, "hold": 1.0},
        "LEAK",
    ),
    Mutant(
        "a token that is gone from all nodes is forgotten",
        "core/token_locations.py",
        "                there.pop(node, None)\n                self.forget_if_nowhere(token)\n",
        "                there.pop(node, None)\n",
        {**MANY_CALM, "slow": 0.2},
        "LEAK",
    ),
]
"""On several nodes."""

COPIES: Worlds = {"replicas": 2, "failover": 0.3, "hold": 1.0}

REPLICAS = [
    Mutant(
        "all replicas have it",
        "wire/copies.py",
        "if isinstance(copies, int) and copies >= replicas:",
        "if isinstance(copies, int) and copies >= 1:",
        COPIES,
        "S1 S2",
    ),
    Mutant(
        "replicas have a renewal too",
        "wire/copies.py",
        "frozenset((ACQUIRE.name, ADOPT.name, RENEW.name))",
        "frozenset((ACQUIRE.name, ADOPT.name))",
        COPIES,
        "S1 S2",
    ),
    Mutant(
        "replicas have what was granted",
        "wire/copies.py",
        "frozenset((ACQUIRE.name, ADOPT.name, RENEW.name))",
        "frozenset((RENEW.name,))",
        COPIES,
        "S1 S2",
    ),
    Mutant(
        "a pushed grant is confirmed where replicas must have it",
        "core/attempt.py",
        "if spec.renew and not spec.replicas:",
        "if spec.renew:",
        COPIES,
        "S1 S2",
    ),
    Mutant(
        "what is waited for is what was written here",
        "sim/requests.py",
        "link.server.wait(link.offset, replicas, microseconds)",
        "link.server.wait(0, replicas, microseconds)",
        COPIES,
        "S1 S2",
    ),
]
"""Of one server with replicas."""

PASSED: Worlds = {"hand_off": 0.4}
PASSED_SLOW: Worlds = {**PASSED, "slow": 0.2, "pause": 0.05, "hold": 1.0}
PASSED_LATE: Worlds = {**PASSED, "ttl": 30.0, "cancel": 0.04, "slow": 0.2, "doubled": 0.0}
PASSED_CALM: Worlds = {**PASSED, "calm": True, "ttl": 5.0}
PASSED_AT_LAST: Worlds = {**PASSED, "calm": True, "renew": False, "hold": 1.6}
PASSED_IN_VAIN: Worlds = {
    "calm": True,
    "clients": 1,
    "turns": 6,
    "ttl": 30.0,
    "hand_off": 0.5,
    "cancel": 0.1,
    "slow": 0.4,
}
PASSED_COPIES: Worlds = {**PASSED, "replicas": 2, "failover": 0.3}

HAND_OFF = [
    Mutant(
        "an adopted lease has the fence it had",
        "core/hand_off.py",
        '"fence": hold.fence,',
        '"fence": hold.fence - 1,',
        PASSED_CALM,
        "S8",
    ),
    Mutant(
        "an export ends the belief",
        "core/hand_off.py",
        "    hold.state = RELEASED\n    return text\n",
        "    return text\n",
        PASSED_CALM,
        "S12",
    ),
    Mutant(
        "what is exported is kept from now on",
        "core/hand_off.py",
        "    await renew_now(session, grip, hold, spec.ttl)\n",
        "",
        PASSED_AT_LAST,
        "ADOPT",
    ),
    Mutant(
        "what was exported is not handed back by a late push",
        "core/hand_off.py",
        "hold.forget_waiter(session.port.now())",
        "hold.forget_waiter()",
        PASSED_SLOW,
        "S4",
    ),
    Mutant(
        "of two who adopt one gets it",
        "scripts/adopt.lua",
        "if (holder ~= exported and holder ~= token) or",
        "if not holder or",
        PASSED_CALM,
        "S4",
    ),
    Mutant(
        "an adoption never creates",
        "scripts/adopt.lua",
        "if (holder ~= exported and holder ~= token) or is_over(left) or",
        "if (holder and holder ~= exported and holder ~= token) or",
        PASSED,
        "S5",
    ),
    Mutant(
        "an adoption keeps the fence",
        "scripts/adopt.lua",
        "return (call('GET', KEYS[2]) or new_fence()) .. serial",
        "return new_fence() .. serial",
        PASSED_CALM,
        "S8",
    ),
    Mutant(
        "what was exported is buried when it is adopted",
        "scripts/adopt.lua",
        "bury(exported, 60000)\n",
        "",
        PASSED_LATE,
        "S10",
    ),
    Mutant(
        "who gave up an adoption does not get it",
        "scripts/adopt.lua",
        "or is_over(left) or buried then",
        "or is_over(left) then",
        PASSED_IN_VAIN,
        "S10",
    ),
    Mutant(
        "who gives up an adoption takes its token back",
        "core/hand_off.py",
        "            elif maybe_adopted or not isinstance(error, HoldfastError):\n",
        "            elif False:\n",
        PASSED_LATE,
        "S10 S16",
    ),
    Mutant(
        "an adoption that came too late is released",
        "core/hand_off.py",
        "        maybe_adopted = uncertain or bool(given)\n",
        "        maybe_adopted = uncertain\n",
        {"calm": True, "hand_off": 0.5, "ttl": 0.4, "pause": 0.1},
        "S16",
    ),
    Mutant(
        "an adopted lease counts from before the sending",
        "core/hand_off.py",
        "Hold(spec, token, fence, asked_at, actor, process, session, grip)",
        "Hold(spec, token, fence, port.now(), actor, process, session, grip)",
        PASSED_SLOW,
        "S2 S1",
    ),
    Mutant(
        "an adopted lease is given for all that is believed",
        "scripts/adopt.lua",
        "  call('SET', lock, token, 'PX', math.max(left, ttl + delay))",
        "  call('SET', lock, token, 'PX', left)",
        PASSED,
        "S2 S1",
    ),
    Mutant(
        "replicas have what was adopted",
        "wire/copies.py",
        "frozenset((ACQUIRE.name, ADOPT.name, RENEW.name))",
        "frozenset((ACQUIRE.name, RENEW.name))",
        PASSED_COPIES,
        "S1 S2 S4",
    ),
]
"""Of leases that are handed from one client to another."""

MUTANTS = [
    # The deadline
    Mutant(
        "a deadline counts from before the sending",
        "core/server_acquire.py",
        "Hold(spec, token, reply, asked_at, actor, process, session, grip)",
        "Hold(spec, token, reply, port.now(), actor, process, session, grip)",
        SLOW,
        "S2 S1",
    ),
    Mutant(
        "a renewal counts from before its sending",
        "core/hold.py",
        "else max(asked_at + validity, self.deadline)",
        "else max(now + validity, self.deadline)",
        SLOW,
        "S2 S1",
    ),
    Mutant(
        "a pushed grant counts from the last answered PING",
        "core/line.py",
        "since = max(self._heard_since, waiter.since)",
        "since = now",
        PAUSES,
        "S1 S2 S7",
    ),
    Mutant(
        "an answered grant counts from the asking",
        "core/waiters.py",
        "line.granted(grant, sent_at, self._port.now())",
        "line.granted(grant, self._port.now(), self._port.now())",
        PAIRS,
        "S2 S1",
    ),
    Mutant(
        "a confirmed grant counts from before the sending",
        "core/attempt.py",
        "spec.ttl, sent_at), is_pushed=False)\n\n\ndef on_holder",
        "spec.ttl, moment.now), is_pushed=False)\n\n\ndef on_holder",
        PAUSES,
        "S2 S1",
    ),
    Mutant(
        "a grant is believed for its window",
        "core/hold.py",
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
        STORM,
        "S2 S1",
    ),
    Mutant(
        "a release ends the belief",
        "core/hold.py",
        "return self.state is HELD and now",
        "return now",
        STORM,
        "S12 S1",
    ),
    Mutant(
        "a loss is told while the server hangs",
        "core/renewer.py",
        "due, soon = self._advance(), self",
        "due, soon = None, self",
        HANGING,
        "S3",
    ),
    Mutant(
        "a loss is told",
        "core/renewer.py",
        "            item.lose(item.overdue())\n            return",
        "            return",
        HANGING,
        "S3",
    ),
    # The token
    Mutant(
        "release is for its own token",
        "scripts/release.lua",
        "has_hold(holder, token)\n",
        "holder\n",
        GIVING_UP,
        "S4 S1",
    ),
    Mutant(
        "renew is for its own token",
        "scripts/renew.lua",
        "if is_over(left) or not has_hold(holder, token) then",
        "if not holder then",
        PAUSES,
        "S1 S2 S9",
    ),
    Mutant(
        "renew never creates",
        "scripts/renew.lua",
        "if is_over(left) or",
        "if not holder then\n  call('SET', lock, token, 'PX', ttl)\n"
        "  holder, left = token, ttl\nend\nif is_over(left) or",
        PAUSES,
        "S5",
    ),
    Mutant(
        "one token for the whole attempt",
        "core/server_acquire.py",
        "        args = self.token, spec.ttl_ms, place, spec.settings, *spec.asked\n        reply",
        "        self.token = port.draw_token(port.actor(), spec.suffix)\n"
        "        args = self.token, spec.ttl_ms, place, spec.settings, *spec.asked\n"
        "        reply",
        STORM,
        "S9 S1 S10 S4 S16",
    ),
    Mutant(
        "a retry gets what the first try got",
        "scripts/acquire.lua",
        "(has_hold(holder, token) or is_owners(holder))",
        "is_owners(holder)",
        {"drawn": True},
        "S10",
    ),
    # The fence
    Mutant(
        "a hand-over raises the fence",
        "scripts/_hand_over.lua",
        "fence = fence or new_fence()",
        "fence = fence or call('GET', KEYS[2])",
        STORM,
        "S6",
    ),
    Mutant(
        "a renewal keeps the fence",
        "scripts/renew.lua",
        "return (call('GET', KEYS[2]) or new_fence()) .. serial",
        "return new_fence() .. serial",
        STORM,
        "S8",
    ),
    Mutant(
        "a retry keeps the fence",
        "scripts/acquire.lua",
        "return (call('GET', KEYS[2]) or new_fence()) .. serial",
        "return new_fence() .. serial",
        STORM,
        "S8",
    ),
    Mutant(
        "a fence is floored by the clock",
        "scripts/_fence.lua",
        "fence = time[1] .. string.sub('00000' .. time[2], -6)",
        "fence = '1'",
        WIPED,
        "S6",
    ),
    Mutant(
        "a fence is above the last",
        "scripts/_fence.lua",
        "if last and tonumber(last) >= tonumber(fence) then",
        "if false then",
        JUMPING,
        "S6",
    ),
    # What was abandoned
    Mutant(
        "what was given up is buried",
        "scripts/release.lua",
        "if life ~= '0' then",
        "if false then",
        LATE,
        "S10",
    ),
    Mutant(
        "what was buried stays so",
        "scripts/acquire.lua",
        "if score('+' .. token) then",
        "if false then",
        LATE,
        "S10",
    ),
    Mutant(
        "who gives up takes its token back",
        "core/server_acquire.py",
        "session, spec, tombstone = self._session, self._spec, self.attempt.tombstone",
        'session, spec, tombstone = self._session, self._spec, ""',
        GIVING_UP,
        "S10 S16",
    ),
    Mutant(
        "who gives up leaves the line",
        "core/server_acquire.py",
        "        elif tombstone:\n",
        '        elif tombstone and tombstone != "0":\n',
        GIVING_UP,
        "S10",
    ),
    Mutant(
        "who gives up a silent server cleans up later",
        "core/server_acquire.py",
        "            session.cleanups.schedule(spec, self.token)\n",
        "",
        STORM,
        "S10 S16",
    ),
    Mutant(
        "what could not be taken back is cleaned up later",
        "core/cleanup.py",
        "        session.cleanups.schedule(spec, token, longest=longest)\n",
        "        pass\n",
        CANCELS,
        "S10 S16",
    ),
    Mutant(
        "a clean-up is tried again",
        "core/renewer.py",
        "self._schedule(item, min(now + item.patience / 2, item.deadline))",
        "self._schedule(item, item.deadline)",
        STORM,
        "S10 S16",
    ),
    # Waiting
    Mutant(
        "a grant for somebody is not handed back",
        "core/line.py",
        "if waiter is None or waiter.key != message.key:",
        "if waiter is None or not waiter.waits:",
        SLOW,
        "S1 S4",
    ),
    Mutant(
        "everybody asks when the connection is lost",
        "core/line.py",
        "        self._rechecked_at = now\n        self.recheck_all()\n\n    def heard",
        "        self._rechecked_at = now\n\n    def heard",
        STORM,
        "L2 L1",
    ),
    Mutant(
        "an answer changes nothing if a push overtook it",
        "core/line.py",
        "elif what is _LEFT or at <= timer.notified_at:",
        "elif what is _LEFT:",
        SLOW_LONG,
        "L3",
    ),
    Mutant(
        "somebody asks when the holder's time is up",
        "core/line.py",
        "            self._request_at(waiter.key, timer, at + min(",
        "            what is _QUEUED or self._request_at(waiter.key, timer, at + min(",
        CRASHES,
        "L2 L1",
    ),
    Mutant(
        "a lock found free goes to the first in line",
        "scripts/acquire.lua",
        "local who, fence = hand_over()",
        "local who, fence",
        STORM,
        "L2 L1",
    ),
    Mutant(
        "a granted waiter is out of the line",
        "scripts/_hand_over.lua",
        "      grant(who, window)\n",
        "      grant(who, window)\n      call('ZADD', queue, ticket, waiter)\n"
        "      call('PEXPIRE', queue, 3600000)\n",
        CRASHES,
        "L1",
    ),
    Mutant(
        "who is not in line has no ticket",
        "scripts/acquire.lua",
        "ticket, put_back = '0', 0",
        "ticket, put_back = ticket or '0', 0",
        PAIRS,
        "FIFO L2 REPLY",
    ),
    Mutant(
        "a release hands over",
        "scripts/release.lua",
        "  if not hand_over() then\n    call('DEL', lock)\n  end",
        "  call('DEL', lock)",
        {"calm": True, "ttl": 5.0},
        "L2 L3",
    ),
    Mutant(
        "a release that finds it free hands over",
        "scripts/release.lua",
        "elseif mine or not holder or (over and holder == token and how ~= 'leave') then",
        "elseif mine then",
        LATE,
        "L2 L3",
    ),
    Mutant(
        "a second waiter watches, in case the first one is dead or stopped",
        "scripts/_hand_over.lua",
        "      if second and (left < 0 or left > window + delay) then",
        "      if false then",
        CROWDED,
        "L3",
    ),
    Mutant(
        "a waiter that leaves passes on its duty to watch",
        "scripts/release.lua",
        "    if was_first then",
        "    if false then",
        LEAVING,
        "L3",
    ),
    Mutant(
        "a late request without a place leaves its token in the queue",
        "scripts/acquire.lua",
        "  if added then\n    call('ZREM', queue, token)\n  end",
        "  leave_line()",
        {"drawn": True, "nodes": 1, "slow": 0.3},
        "REPLY",
    ),
    Mutant(
        "a waiter whose request got no reply asks again",
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
        "hold.forget_waiter(self.port.now())",
        "hold.forget_waiter()",
        {"drawn": True, "nodes": 1, "slow": 0.3, "renew": False, "lock_delay": 1.3, "ttl": 0.4},
        "DELAY",
    ),
    Mutant(
        "an owner is compared with the end of a token",
        "scripts/_owner.lua",
        "string.sub(holder, -#owner) == owner",
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
        "without a timeout a caller waits for ever",
        "core/time_budget.py",
        "give_up = math.inf if timeout is None else now + timeout",
        "give_up = now + (timeout or 0.0)",
        {"calm": True},
        "L4",
    ),
    Mutant(
        "an inner level reports the loss of the lease",
        "core/release.py",
        "    if hold.state is LOST or not current:\n        check(session, grip)\n",
        "    if len(hold.grips) == 1 and (hold.state is LOST or not current):\n"
        "        check(session, grip)\n",
        {"drawn": True, "reentrant": True, "renew": False, "stall": 0.3},
        "S12",
    ),
    Mutant(
        "a lease is renewed again and again",
        "core/hold.py",
        "        self.renew_at = asked_at + validity / RENEWALS_A_TTL\n",
        "        self.renew_at = asked_at + validity\n",
        {"calm": True, "hold": 5.0, "ttl": 1.0},
        "RENEW",
    ),
    Mutant(
        "first come, first served",
        "scripts/acquire.lua",
        "  if order == 'barge' then\n    leave_line()",
        "  if place ~= '' then\n    leave_line()",
        STORM,
        "FIFO",
    ),
    Mutant(
        "a waiter waits in the queue and does not poll",
        "core/server_acquire.py",
        "        if line is not None:\n            subscription = line.subscription\n",
        "        if False:\n            subscription = line.subscription\n",
        {"calm": True, "ttl": 5.0},
        "POLL",
    ),
    Mutant(
        "a waiter that was granted the lock is forgotten with its lease",
        "core/server_acquire.py",
        "            hold.waiter = self.waiter\n            self.waiter.leave()",
        "            self.waiter.leave()",
        {"calm": True, "ttl": 5.0},
        "LEAK",
    ),
    Mutant(
        "a waiter that gives up wakes no more",
        "core/server_acquire.py",
        "        if self.waiter is not None:\n"
        "            self.waiter.leave()\n"
        "        session, spec, tombstone",
        "        session, spec, tombstone",
        {"drawn": True},
        "LEAK L3",
    ),
    Mutant(
        "a waiter is forgotten although leaving the queue was interrupted",
        "core/server_acquire.py",
        "        finally:\n            self._forget_waiter()\n",
        "        except HoldfastError:\n            self._forget_waiter()\n",
        CUT_SHORT,
        "LEAK",
    ),
    # Timeouts
    Mutant(
        "waiting ends with the timeout",
        "core/time_budget.py",
        "give_up = math.inf if timeout is None else now + timeout",
        "give_up = math.inf",
        IN_TIME,
        "L4",
    ),
    # Owners, delays, levels, barging
    Mutant(
        "a co-holder's release leaves the others theirs",
        "scripts/_owner.lua",
        "if latest then",
        "if false then",
        SHARED,
        "S1",
    ),
    Mutant(
        "a co-holder is kept in mind",
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
        "the longest co-holder counts",
        "scripts/_owner.lua",
        "latest = holds[found[index]]",
        "latest = time + 1",
        SHARED,
        "S2 S1",
    ),
    Mutant(
        "re-entry is for the same task",
        "core/held.py",
        "            if hold.actor is not actor:\n                continue\n",
        "",
        NESTED,
        "S7 S1 S12",
    ),
    # Delays, levels, and what a late request may do
    Mutant(
        "expiry only grows",
        "scripts/_owner.lua",
        "call('PEXPIRE', lock, math.max(left, ttl) + delay)",
        "call('PEXPIRE', lock, ttl + delay)",
        SLOW,
        "S2",
    ),
    Mutant(
        "who abandons a request buries its token",
        "core/server_acquire.py",
        "self._remove(tombstone)",
        'self._remove("0")',
        LATE,
        "S10 S16",
    ),
    Mutant(
        "a hold knows what it abandoned",
        "core/server_acquire.py",
        "hold.needs_tombstone = self.attempt.needs_tombstone",
        "hold.needs_tombstone = False",
        LATE,
        "S10 S16",
    ),
    Mutant(
        "a release without an answer is cleaned up later",
        "core/release.py",
        "    session.cleanups.schedule_lease(hold)\n    hold.unsure = True",
        "    hold.unsure = True",
        {"ttl": 30.0, "freeze": 0.3, "restart": 0.2, "doubled": 0.0, "hold": 1.0},
        "S10",
    ),
    Mutant(
        "a release whose answer was lost is no loss",
        "core/release.py",
        "        hold.unsure = True\n        session.waiters.recheck_all(hold.spec)",
        "        session.waiters.recheck_all(hold.spec)",
        LATE,
        "S9",
    ),
    Mutant(
        "a waiter whose client is gone is passed over",
        "scripts/_tell.lua",
        "return heard > 0",
        "return true",
        CRASHES,
        "L3",
    ),
    Mutant(
        "a grant in an answer is taken in",
        "core/waiters.py",
        "        self.on_grant(message, sent_at)\n        return bool(was_held)",
        "        return bool(was_held)",
        {"calm": True, "tasks": 4, "ttl": 5.0},
        "L2 L3",
    ),
    Mutant(
        "the delay is nobody's",
        "scripts/_settings.lua",
        "return left ~= -1 and left <= delay",
        "return false",
        DELAYED,
        "S5 DELAY S2",
    ),
    Mutant(
        "the delay comes on top of the time",
        "scripts/_hand_over.lua",
        "call('SET', lock, who, 'PX', px + delay)",
        "call('SET', lock, who, 'PX', px)",
        DELAYED,
        "S1 S2",
    ),
    Mutant(
        "a grant is handed back with the lock's delay",
        "core/cleanup.py",
        "        settings = self._deployment.settings(delay_ms, group)",
        "        settings = self._deployment.settings(0, group)",
        DELAYED,
        "S2 S5",
    ),
    Mutant(
        "leaving the line is within the timeout",
        "core/server_acquire.py",
        "tombstone, self._time_left())",
        "tombstone)",
        IN_TIME,
        "L4",
    ),
    Mutant(
        "a loss begins the delay",
        "scripts/release.lua",
        "elseif how == 'lost' and holder and delay > 0 then",
        "elseif false then",
        DELAYED,
        "DELAY",
    ),
    Mutant(
        "each level is released by itself",
        "core/release.py",
        "    if hold.grips or not hold.claim_release():\n",
        "    if not hold.claim_release():\n",
        NESTED,
        "S12",
    ),
    Mutant(
        "a check of a released level does not end the lease",
        "core/release.py",
        "if hold.state is HELD and not current:",
        "if hold.state is HELD:",
        NESTED,
        "S12",
    ),
    Mutant(
        "taking it again fails at once",
        "core/held.py",
        "            if hold.alive(self._port.now(), self._port.process()):\n"
        "                return hold\n",
        "",
        STORM,
        "L5",
    ),
    Mutant(
        "barging wakes the first in line",
        "scripts/_hand_over.lua",
        "    local first = tell_next('A', 0)\n",
        "    local first\n",
        {"calm": True, "fair": False, "ttl": 5.0},
        "L1",
    ),
    Mutant(
        "a renewal needs no memory",
        "scripts/renew.lua",
        "  keep_hold(holder, token, left, ttl)",
        "  call('SET', lock, holder, 'PX', math.max(left, ttl + delay))",
        {"full": 0.4, "hold": 1.0},
        "L8",
    ),
    # A full server
    Mutant(
        "a release needs no memory",
        "scripts/release.lua",
        "  call('DEL', lock)\n  return '1' .. serial",
        "  call('SET', KEYS[2] .. 's', token, 'PX', 1000)\n"
        "  call('DEL', lock)\n  return '1' .. serial",
        FULL,
        "L8",
    ),
]

RARE = [
    Mutant(
        "a lease that is being cleaned up is given to no more nodes",
        "core/token_locations.py",
        "        self._leaving.add(token)  # a late",
        "        # a late",
        MANY,
        "S10",
    ),
    Mutant(
        "a node that is given a lease again stays unsure",
        "core/token_locations.py",
        "            there.update(dict.fromkeys(nodes, UNSURE))\n",
        "            there.update(dict.fromkeys(nodes, PRESENT))\n",
        {},
        "S10",
    ),
    Mutant(
        "a waiter may have to wait for replicas before it asks again",
        "sim/checks/free_lock.py",
        "        if settings.calm and not settings.drop and not settings.replicas:",
        "        if settings.calm and not settings.drop:",
        {},
        "L1",
    ),
    Mutant(
        "a lock that is taken and released between two looks is not free all the time",
        "sim/checks/server.py",
        "self.record.free_since = self.world.now  # it may be released",
        "# it may be released",
        {},
        "L1",
    ),
    Mutant(
        "a closed client may have been notified of a free lock",
        "sim/checks/free_lock.py",
        "len(record.silent) >= watchers",
        "len(record.silent & record.gone) >= watchers",
        {},
        "L1",
    ),
    Mutant(
        "a late clean-up on one of several nodes does not end the lock delay",
        "core/token_locations.py",
        "LOST_TOMBSTONE if there.is_lost else TOMBSTONE_MS",
        "TOMBSTONE_MS",
        {},
        "DELAY",
    ),
    Mutant(
        "a client that was stopped may have left the lock",
        "sim/checks/leftovers.py",
        " or client in stopped or",
        " or",
        {},
        "S10",
    ),
    Mutant(
        "after an eviction one waiter that does not respond delays the others",
        "sim/checks/free_lock.py",
        "watchers = 1 if settings.evict_holder else 2",
        "watchers = 2",
        {},
        "L1",
    ),
    Mutant(
        "a waiter that polls may pause after a reply",
        "sim/checks/hand_over.py",
        "            busy = busy or world.now < answered_at + pause\n",
        "",
        {},
        "L3",
    ),
    Mutant(
        "a node that always answers last is given the lease",
        "core/token_locations.py",
        "            self._missing.add((token, node))\n",
        "",
        {},
        "RESTORE",
    ),
    Mutant(
        "a free lock without order is watched by another client",
        "scripts/_hand_over.lua",
        "      have_watched(client, client, window)",
        "      local second = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 1, 1)[1]\n"
        "      if second then tell(second, 'W', 0, window) end",
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
        "a node from which a lease was evicted does not count as one that has it",
        "sim/checks/quorum.py",
        "if node.name not in self._evicted_from[hold.token]]",
        "]",
        {},
        "S10",
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
        "seconds=min(grant.seconds, spec.ttl)",
        "seconds=grant.seconds",
        {},
        "MAX_HOLD",
    ),
    Mutant(
        "a token that others go on with is kept for a connection that is being opened",
        "core/line.py",
        "        self._to_forget.append((token, now))\n        if now",
        "        self._to_forget.append((token, now))\n"
        "        if self.subscription is None:\n            self.forget(token)\n        if now",
        {},
        "S4",
    ),
    Mutant(
        "votes are waited for even if no time is left",
        "core/quorum.py",
        "self._ask(votes, max(timeout, SHORTEST_ROUND))",
        "self._ask(votes, timeout)",
        {},
        "S16",
    ),
    Mutant(
        "a lock that its owner wants may be kept under another token",
        "sim/checks/leftovers.py",
        "if name == token or is_joined(name.encode(), token.encode()):",
        "if name == token:",
        {},
        "S10",
    ),
    Mutant(
        "a holder that is also in the queue leaves it when it releases",
        "scripts/release.lua",
        "  call('ZREM', queue, token, '!' .. token)\n  if not hand_over() then",
        "  if not hand_over() then",
        {},
        "S8",
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
        "an extension counts from the sending that was answered",
        "core/extend.py",
        "        sent_at = port.now()\n",
        "        sent_at = sent_at or port.now()\n",
        {},
        "S3",
    ),
    Mutant(
        "a waiter that asks for its place does not ignore messages for long",
        "core/server_acquire.py",
        "            limit = min(self._time_left(), LOOK_TIMEOUT)\n",
        "            limit = self._time_left()\n",
        {"drawn": True},
        "L3",
    ),
    # Mistakes of checks
    Mutant(
        "a node that resets connections has more time to be cleaned up",
        "sim/settings.py",
        '        if self.nodes == 1:\n            noticed.add("reset")\n',
        '        noticed.add("reset")\n',
        {"drawn": True},
        "S10",
    ),
    Mutant(
        "a node that lost its data may not know what was evicted",
        "sim/checks/quorum.py",
        "forgets = record.forgetful or self.settings.wipe",
        "forgets = record.forgetful",
        {"drawn": True},
        "S10",
    ),
]
"""Too rare to be hunted for: each was met once in many worlds, and that world was kept."""

EVICTED: Worlds = {"evict_holder": 0.3}
EVICTED_LATE: Worlds = {**EVICTED, "slow": 0.2, "ttl": 6.0}
EVICTED_CALM: Worlds = {"calm": True, "evict_holder": 0.7, "hold": 1.0, "ttl": 5.0}
EVICTED_DELAYED: Worlds = {**EVICTED, "lock_delay": 1.0}
STALLED: Worlds = {"stall": 0.2, "hold": 1.0}
HURRIED: Worlds = {"ttl": 30.0, "min_validity": 29.6, "slow": 0.3, "polls": True}
LEAST: Worlds = {"calm": True, "ttl": 10.0, "min_validity": 5.0}
REPLACED: Worlds = {"calm": True, "sentinel": True, "failover": 0.2, "hold": 0.5}
REPLACED_UNFAIR: Worlds = {**REPLACED, "fair": False}
LOST_ANSWERS: Worlds = {"calm": True, "clients": 1, "tasks": 3, "reset": 0.05, "ttl": 10.0}
RESET_LONG: Worlds = {"ttl": 10.0, "hold": 3.0, "reset": 0.05}
DROPPED: Worlds = {"calm": True, "drop": 0.2}
FORKED: Worlds = {"fork": 0.02}
FORKED_CALM: Worlds = {"calm": True, "fork": 0.05, "tasks": 2}
CLOSED: Worlds = {"close": 0.2, "half_open": 0.03, "tasks": 2, "ttl": 0.5}
CLOSED_CALM: Worlds = {"calm": True, "close": 0.5, "tasks": 2}
LIMITED: Worlds = {"calm": True, "max_hold": 0.5, "ttl": 1.0, "hold": 1.0}
OPERATED = [
    Mutant(
        "an eviction is of the holder that was shown",
        "scripts/evict.lua",
        "if not token or redis.sha1hex(token) ~= ARGV[1] then",
        "if not token then",
        EVICTED,
        "S4",
    ),
    Mutant(
        "an evicted token never gets the lock again",
        "scripts/evict.lua",
        "bury(token, 60000)\n",
        "",
        EVICTED_LATE,
        "S10 EVICT",
    ),
    Mutant(
        "an eviction hands the lock over",
        "scripts/evict.lua",
        "elseif not hand_over() then",
        "else",
        EVICTED_CALM,
        "L2",
    ),
    Mutant(
        "an eviction begins the lock delay",
        "scripts/evict.lua",
        "if delay > 0 and not is_over(left) then",
        "if false then",
        EVICTED_DELAYED,
        "DELAY",
    ),
    Mutant(
        "an eviction raises the fence counter in the delay too",
        "scripts/evict.lua",
        "  new_fence()\n  tell_next",
        "  tell_next",
        EVICTED_DELAYED,
        "EVICT",
    ),
    Mutant(
        "a lease whose renewal is refused is lost",
        "core/renewer.py",
        "            item.lose(item.refusal(reply, now))\n",
        "            self._schedule(item, item.deadline)\n",
        EVICTED_CALM,
        "S5 EVICT",
    ),
    Mutant(
        "a lease whose extension is refused is lost",
        "core/extend.py",
        "    if not reply:\n"
        "        hold.lose(hold.refusal(reply, session.port.now()))\n"
        "        raise hold.loss()\n",
        "",
        EVICTED_CALM,
        "S5",
    ),
    Mutant(
        "renewal ends with max_hold",
        "core/renewer.py",
        "if hold.renewing and now + _early(hold, hold.renew_until) >= hold.renew_until:",
        "if False:",
        LIMITED,
        "MAX_HOLD",
    ),
    Mutant(
        "a renewal that is late is not sent after max_hold",
        "core/renewer.py",
        "now + _early(hold, hold.renew_until) >= hold.renew_until",
        "hold.renew_at >= hold.renew_until",
        {**LIMITED, "stop": 0.5},
        "MAX_HOLD",
    ),
    Mutant(
        "the end of renewal by max_hold is reported",
        "core/renewer.py",
        '            self._report(Event("max_hold", hold.spec.name, hold.fence, detail))\n',
        "",
        LIMITED,
        "MAX_HOLD",
    ),
    Mutant(
        "a renewal that is answered after the deadline does not count",
        "core/hold.py",
        "        if now >= self.deadline:\n            return False\n",
        "",
        STALLED,
        "S5",
    ),
    Mutant(
        "a renewal that is answered after the loss does not count",
        "core/renewer.py",
        "            if item.live:\n                self._answered",
        "            if reply and isinstance(item, Hold):\n"
        "                item.__dict__.pop('state', None)\n"
        "            if True:\n                self._answered",
        SLOW,
        "S5 S1",
    ),
    Mutant(
        "nothing is reported of a renewal that fails after the loss",
        "core/renewer.py",
        "            if item.live:\n                self._answered",
        "            if True:\n                self._answered",
        {**SLOW, "stall": 0.1, "ttl": 1.0},
        "S5 S9",
    ),
    Mutant(
        "a grant that came too late is released",
        "core/attempt.py",
        "failures=0, late_grants=late, needs_tombstone=True, state=Ready()",
        "failures=0, late_grants=late, state=Ready()",
        HURRIED,
        "S10 S16",
    ),
    Mutant(
        "a deadline counts from the first sending without an answer",
        "core/attempt.py",
        "sent_at = self.sent_at if self.failures else now",
        "sent_at = now",
        SLOW,
        "S2",
    ),
    Mutant(
        "a confirmed grant has the fence that the renewal answers",
        "core/server_acquire.py",
        "self.attempt = on_confirmation(",
        "if isinstance(reply, int) and reply:\n"
        '            reply = cast("Waiter", self.waiter).grant.fence\n'
        "        self.attempt = on_confirmation(",
        PAUSES,
        "S9",
    ),
    Mutant(
        "a waiter that comes back shows its ticket",
        "core/attempt.py",
        "        attempt = attempt._replace(ticket=held.ticket.decode())",
        '        attempt = attempt._replace(ticket="0")',
        STORM,
        "FIFO",
    ),
    Mutant(
        "the end of a lost lease begins the delay",
        "core/session.py",
        "self.cleanups.schedule_lease(hold, LOST_TOMBSTONE)",
        "self.cleanups.schedule_lease(hold)",
        DELAYED,
        "DELAY",
    ),
    Mutant(
        "a handed-over lease has min_validity left",
        "core/attempt.py",
        "least = max(grant.seconds / 2, min_validity)",
        "least = grant.seconds / 2",
        LEAST,
        "S2",
    ),
    Mutant(
        "a server in quarantine grants no lock",
        "scripts/acquire.lua",
        "if quarantined then",
        "if false then",
        REPLACED_UNFAIR,
        "S1",
    ),
    Mutant(
        "a quarantine outlasts the longest lease",
        "scripts/guard.lua",
        "local lasts = longest + overlap",
        "local lasts = overlap",
        REPLACED,
        "S1",
    ),
    Mutant(
        "a quarantine outlasts what a replaced server still grants",
        "scripts/guard.lua",
        "local lasts = longest + overlap",
        "local lasts = longest",
        REPLACED,
        "S1",
    ),
    Mutant(
        "nothing is renewed while a replaced server may take writes",
        "scripts/renew.lua",
        "if quarantined and quarantined > longest then",
        "if false then",
        REPLACED,
        "S1",
    ),
    Mutant(
        "waiters ask again after a release without an answer",
        "core/release.py",
        "        hold.unsure = True\n"
        "        session.waiters.recheck_all(hold.spec)\n"
        "    if session.closed",
        "        hold.unsure = True\n    if session.closed",
        LOST_ANSWERS,
        "L1 L3",
    ),
    Mutant(
        "waiters ask again after an acquire without an answer",
        "core/server_acquire.py",
        "            if isinstance(reply, OutcomeUnknown):  # it may",
        "            if False:  # it may",
        LOST_ANSWERS,
        "L1 L3",
    ),
    Mutant(
        "waiters ask again after an acquire that was interrupted",
        "core/server_acquire.py",
        '            if tombstone != "0":\n                session.waiters.recheck_all(spec)\n',
        "",
        CUT_SHORT,
        "L1 L3",
    ),
    Mutant(
        "waiters ask again after a release that was interrupted",
        "core/release.py",
        "    else:\n"
        "        session.waiters.recheck_all(hold.spec)\n"
        "        await session.port.shielded",
        "    else:\n        await session.port.shielded",
        CUT_SHORT,
        "L1 L3",
    ),
    Mutant(
        "a renewal that failed is tried again before the deadline",
        "core/renewer.py",
        "                self._schedule(item, min(now + item.patience / 2, item.deadline))",
        "                wait = math.inf if isinstance(item, Hold) else item.patience / 2\n"
        "                self._schedule(item, min(now + wait, item.deadline))",
        RESET_LONG,
        "RENEW",
    ),
    Mutant(
        "a dropped lease is reported",
        "core/renewer.py",
        "if hold.is_dropped and not hold.reported_dropped:",
        "if False:",
        DROPPED,
        "DROP",
    ),
    Mutant(
        "a release takes a majority",
        "core/rounds.py",
        "        if self.has_majority():\n            return max(self.yes.values())",
        "        if self.has_majority() or (self.yes and isinstance(self, Release)):\n"
        "            return max(self.yes.values())",
        {**MANY, "calm": True, "freeze": 0.4, "restart": 0.2, "ttl": 10.0},
        "S10",
    ),
    Mutant(
        "a forked child does not hold what its parent holds",
        "core/hold.py",
        "return self.state is HELD and now < self.deadline and self.process == process",
        "return self.state is HELD and now < self.deadline",
        FORKED,
        "S13",
    ),
    Mutant(
        "a forked child is refused what it asks of its parent's lease",
        "core/release.py",
        " and hold.process == port.process()\n    if current and hold.state is HELD and ref(",
        "\n    if current and hold.state is HELD and ref(",
        FORKED,
        "S13",
    ),
    Mutant(
        "a forked child does not go on with its parent's attempt",
        "core/server_acquire.py",
        'in this state")\n            self._check_process()\n',
        'in this state")\n',
        FORKED_CALM,
        "S13",
    ),
    Mutant(
        "a forked child does not ask again after a confirmation failed",
        "core/server_acquire.py",
        'in this state")\n            self._check_process()\n',
        'in this state")\n'
        "            if not isinstance(self.attempt.state, Ready):\n"
        "                self._check_process()\n",
        FORKED_CALM,
        "S13",
    ),
    Mutant(
        "a forked child does not go on with its parent's release",
        "core/release.py",
        "    _check_process(session, hold)\n    if isinstance(error, OutcomeUnknown):",
        "    if isinstance(error, OutcomeUnknown):",
        FORKED,
        "S13",
    ),
    Mutant(
        "a forked child cleans up nothing of its parent's attempt",
        "core/server_acquire.py",
        "            if self._session.port.process() == self._process:  # else",
        "            if True:  # else",
        FORKED_CALM,
        "S13",
    ),
    Mutant(
        "a renewal that waits is not sent once the client is closed",
        "core/renewer.py",
        "[item for item in self._next_batch() if self._is_to_be_sent(item, asked_at)]",
        "[item for item in self._next_batch() if item.live]",
        CLOSED,
        "CLOSE",
    ),
    Mutant(
        "waiters of a closed client end",
        "core/attempt.py",
        "if moment.closed or now >= budget.end:",
        "if now >= budget.end:",
        CLOSED_CALM,
        "CLOSE L2",
    ),
    Mutant(
        "a closed client still reports a loss",
        "core/renewer.py",
        "            elif self._closed or now >= idle_since + LINGER:\n",
        "            if self._closed or now >= (idle_since or now) + LINGER:\n",
        CLOSED_CALM,
        "S3",
    ),
]
"""Of operators, `max_hold`, forks, closed clients, quarantine, and what is rare in a sweep."""

MUTANTS += QUORUM + REPLICAS + HAND_OFF + OPERATED

if __name__ == "__main__":
    _main()
