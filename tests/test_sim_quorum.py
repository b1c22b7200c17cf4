"""Several nodes in the simulator: every promise is kept, in many worlds and in all small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.hold import Grip, Hold
from holdfast.sim.checks.promises import Violated
from holdfast.sim.checks.quorum import QuorumChecks
from holdfast.sim.choices import Choices
from holdfast.sim.node import Server
from holdfast.sim.play import Play
from holdfast.sim.settings import CALM, STORMY, Settings
from holdfast.sim.sweep import (
    QUORUM_BUDGETS,
    QUORUM_OUTAGE_BUDGETS,
    QUORUM_OUTAGES,
    SMALL_QUORUM,
    Report,
    exhaust,
    sweep,
)
from holdfast.sim.world import World


@pytest.mark.first
@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 300), marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("fixed", [{"nodes": 3}, {"replicas": 2, "failover": 0.15}], ids=str)
def test_no_run_of_several_nodes_or_replicas_breaks_a_promise(
    fixed: dict[str, float], seeds: range
) -> None:
    report = sweep(seeds, fixed)
    assert [(each.seed, each.check, each.detail) for each in report.found] == []


@pytest.mark.parametrize(
    ("settings", "budgets", "worlds"),
    [
        (SMALL_QUORUM, {"delay": 1}, 250),
        (SMALL_QUORUM, QUORUM_BUDGETS, 1000),
        (replace(SMALL_QUORUM, loop=True), QUORUM_BUDGETS, 1000),
        (QUORUM_OUTAGES, QUORUM_OUTAGE_BUDGETS, 200),
    ],
    ids=["one slower message", "one fault", "one fault on a loop", "one outage"],
)
@pytest.mark.long
def test_no_interleaving_of_two_clients_and_three_nodes_breaks_a_promise(
    settings: Settings, budgets: dict[str, int], worlds: int
) -> None:
    report = Report()
    for outcome in exhaust(settings, budgets):
        report.note(settings, outcome)
    assert [(each.check, each.detail, each.choices) for each in report.found] == []
    assert report.worlds > worlds
    assert report.reached["votes released"] > 5  # runs, of any number of times


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 2},
        {"nodes": 0},
        {"nodes": 3, "owner": True},
        {"nodes": 3, "failover": 0.1},
        {"nodes": 3, "wipe": 0.1, "clock_jump": 0.1},
        {"wipe": 0.1, "clock_jump": 0.1},
        {"evict": 0.1, "clock_jump": 0.1},
        {"loop": True},
        {"nodes": 3, "replicas": 2},
        {"replicas": -1},
        {"skew": 1.0},
    ],
)
def test_what_does_not_go_together_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="node"):
        replace(CALM, **wrong)  # type: ignore[arg-type]  # settings of several types


def test_lost_data_is_no_excuse_where_a_node_keeps_silent_afterwards() -> None:
    assert replace(STORMY, nodes=3, wipe=0.1).trusts
    assert not replace(STORMY, wipe=0.1).trusts
    silent = replace(STORMY, nodes=3, skew=2.0).quarantine
    assert silent > 3 * STORMY.ttl
    assert silent > 2 * (2.0 + 1.0)


# What is checked is checked


def _world() -> tuple[Play, QuorumChecks]:
    world = Play(replace(CALM, nodes=3, clients=2), Choices())
    assert isinstance(world.checks, QuorumChecks)
    return world, world.checks


def _hold(world: Play, client: int, fence: int) -> Hold:
    owner = world.clients[client]
    token = f"hf1:{owner.machine.name}:1:sim@sim:1:t:"
    session = owner.session
    return Hold(world.spec, token, fence, owner.now(), None, session.process, session, Grip())


def test_a_replica_fetches_what_was_lost_on_its_way_while_its_primary_was_down() -> None:
    world = World(Choices())
    primary, replica = (Server(world, name, CALM) for name in ("primary", "replica"))
    primary.lead(replica)
    primary.command("SET", b"a", b"1")
    primary.restart(1_000_000)
    world.run(lambda: not primary.down, 2_000_000)
    assert replica.data.run("GET", b"a") == b"1"


def test_a_fence_that_no_majority_stood_at_is_reported() -> None:
    world, checks = _world()
    hold = _hold(world, 0, 7)
    checks._stood[hold.token, 7] = {"n1"}
    with pytest.raises(Violated, match="stood at 1 nodes only"):
        checks.granted(world.clients[0], hold)
    world.world.end()


def test_a_fence_given_twice_is_reported() -> None:
    world, checks = _world()
    first, second = _hold(world, 0, 7), _hold(world, 1, 7)
    for hold in (first, second):
        checks._stood[hold.token, 7] = {"n1", "n2"}
    checks.granted(world.clients[0], first)
    with pytest.raises(Violated, match="was given to"):
        checks.granted(world.clients[1], second)
    world.world.end()


def test_a_lower_fence_for_one_who_asked_later_is_reported_even_where_nothing_can_be_trusted() -> (
    None
):
    world, checks = _world()
    checks.record.untrusted = True
    first, second = _hold(world, 0, 7), _hold(world, 1, 6)
    checks._stood[first.token, 7] = checks._stood[second.token, 6] = {"n1", "n2"}
    checks.granted(world.clients[0], first)
    with pytest.raises(Violated, match="was asked for when 7 was held"):
        checks.granted(world.clients[1], second)
    world.world.end()
