"""Several nodes in the simulator: every promise is kept in many random runs and all small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.lease_state import LeaseRef, LeaseState
from holdfast.sim.checks.promises import Violated
from holdfast.sim.checks.quorum import QuorumChecks
from holdfast.sim.choices import Choices
from holdfast.sim.node import Server
from holdfast.sim.run import SimulationRun
from holdfast.sim.settings import CALM, STORMY, Settings
from holdfast.sim.simulation import Simulation
from holdfast.sim.sweep import (
    QUORUM_BUDGETS,
    QUORUM_OUTAGE_BUDGETS,
    QUORUM_OUTAGES,
    SMALL_QUORUM,
    Report,
    exhaust,
    sweep,
)


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
    ("settings", "budgets", "runs"),
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
    settings: Settings, budgets: dict[str, int], runs: int
) -> None:
    report = Report()
    for outcome in exhaust(settings, budgets):
        report.note(settings, outcome)
    assert [(each.check, each.detail, each.choices) for each in report.found] == []
    assert report.runs > runs
    # Counts runs, whatever the number of releases in each.
    assert report.reached["votes released"] > 5


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
def test_settings_that_cannot_be_combined_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="node"):
        replace(CALM, **wrong)  # type: ignore[arg-type]  # settings of several types


def test_exclusion_is_checked_after_data_loss_if_there_is_a_quarantine() -> None:
    assert replace(STORMY, nodes=3, wipe=0.1).assumptions_hold
    assert not replace(STORMY, wipe=0.1).assumptions_hold
    silent = replace(STORMY, nodes=3, skew=2.0).quarantine
    assert silent > 3 * STORMY.ttl
    assert silent > 2 * (2.0 + 1.0)


# The checks detect violations


def _quorum_run() -> tuple[SimulationRun, QuorumChecks]:
    run = SimulationRun(replace(CALM, nodes=3, clients=2), Choices())
    assert isinstance(run.checks, QuorumChecks)
    return run, run.checks


def _lease(run: SimulationRun, client: int, fence: int) -> LeaseState:
    owner = run.clients[client]
    token = f"hf1:{owner.machine.name}:1:sim@sim:1:t:"
    session = owner.session
    return LeaseState(
        run.spec, token, fence, owner.now(), None, session.process, session, LeaseRef()
    )


def test_a_replica_fetches_writes_that_were_lost_while_its_primary_was_down() -> None:
    sim = Simulation(Choices())
    primary, replica = (Server(sim, name, CALM) for name in ("primary", "replica"))
    primary.add_follower(replica)
    primary.command("SET", b"a", b"1")
    primary.restart(1_000_000)
    sim.run(lambda: not primary.down, 2_000_000)
    assert replica.data.run("GET", b"a") == b"1"


def test_a_fence_without_a_majority_is_reported() -> None:
    run, checks = _quorum_run()
    lease = _lease(run, 0, 7)
    checks._seen_at[lease.token, 7] = {"n1"}
    with pytest.raises(Violated, match="only 1 nodes had fence 7"):
        checks.granted(run.clients[0], lease)
    run.sim.end()


def test_a_duplicate_fence_is_reported() -> None:
    run, checks = _quorum_run()
    first, second = _lease(run, 0, 7), _lease(run, 1, 7)
    for lease in (first, second):
        checks._seen_at[lease.token, 7] = {"n1", "n2"}
    checks.granted(run.clients[0], first)
    with pytest.raises(Violated, match="was granted to"):
        checks.granted(run.clients[1], second)
    run.sim.end()


def test_a_lower_fence_for_a_later_request_is_always_reported() -> None:
    run, checks = _quorum_run()
    checks.record.untrusted = True
    first, second = _lease(run, 0, 7), _lease(run, 1, 6)
    checks._seen_at[first.token, 7] = checks._seen_at[second.token, 6] = {"n1", "n2"}
    checks.granted(run.clients[0], first)
    with pytest.raises(Violated, match="was requested after 7 was held"):
        checks.granted(run.clients[1], second)
    run.sim.end()
