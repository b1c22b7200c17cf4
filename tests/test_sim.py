"""The simulator: runs are deterministic, and every promise is kept in them."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.core.lease_state import LeaseRef, LeaseState
from holdfast.sim import lock_turns
from holdfast.sim.checks.promises import PROMISES, Violated
from holdfast.sim.choices import Choices, PossibleChoices, RandomChoices, every, shrink
from holdfast.sim.run import SimulationRun, simulate
from holdfast.sim.settings import CALM, STORMY, Settings
from holdfast.sim.simulation import Cancelled, Future, Process, Simulation, Stuck
from holdfast.sim.states import RARE_STATES, STATES
from holdfast.sim.swarm import FAULTS, draw
from holdfast.sim.sweep import OUTAGE_BUDGETS, OUTAGES, Found, Report, exhaust, sweep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.spec import LockSpec
    from holdfast.sim.client import SimClient

SAVED_RUNS = sorted((Path(__file__).parent / "saved_runs").glob("*.json"))

# Every promise, in many runs


@pytest.mark.first
@pytest.mark.parametrize(
    "seeds", [range(250), pytest.param(range(250, 1500), marks=pytest.mark.long)], ids=str
)
def test_no_run_of_a_sweep_breaks_a_promise(seeds: range) -> None:
    report = sweep(seeds)
    assert [(each.seed, each.check, each.detail) for each in report.found] == []
    assert set(report.reached) <= {*STATES, *RARE_STATES}


@pytest.mark.long
def test_three_thousand_runs_reach_every_state() -> None:
    report = sweep(range(10_000, 13_000))
    assert [(each.seed, each.check, each.detail) for each in report.found] == []
    assert report.missing == []


@pytest.mark.long
def test_no_interleaving_of_a_small_run_with_one_fault_breaks_a_promise() -> None:
    report = Report()
    for outcome in exhaust():
        report.note(CALM, outcome)
    for outcome in exhaust(OUTAGES, OUTAGE_BUDGETS):
        report.note(CALM, outcome)
    assert [(each.check, each.detail) for each in report.found] == []
    assert report.runs > 20_000
    for state in (
        "granted by a push",
        "granted after a holder that never released",
        "a grant without a waiter, released",
        "a request that found its tombstone",
        "a late write, refused by its fence",
    ):
        assert report.reached[state] > 50, state


@pytest.mark.parametrize("saved_run", SAVED_RUNS, ids=lambda path: path.stem)
def test_saved_runs_break_no_promise(saved_run: Path) -> None:
    found = Found.load(saved_run.read_text())
    outcome = found.run()
    assert (outcome.check, outcome.detail) == ("", "")


# Determinism


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(each, marks=pytest.mark.long) for each in range(20, 100, 20))]
)
def test_a_seed_gives_the_same_run_byte_for_byte(first: int) -> None:
    for seed in range(first, first + 20):
        settings = draw(seed)
        once, again = (simulate(settings, RandomChoices(seed)) for _ in range(2))
        assert repr(once) == repr(again)
        assert repr(simulate(settings, Choices(once.choices))) == repr(once)


def test_another_seed_gives_another_run() -> None:
    assert len({repr(simulate(STORMY, RandomChoices(seed)).trace) for seed in range(20)}) == 20


def test_a_found_run_can_be_saved_and_loaded() -> None:
    found = Found(replace(STORMY, ttl=0.3), [0, 3, 0, 0, 1], "S1", "two at once", seed=7)
    again = Found.load(found.dump())
    assert (again.settings, list(again.choices), again.check) == (
        found.settings,
        [0, 3, 0, 0, 1],
        "S1",
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"settings": {"no": 1}, "choices": {}, "check": "", "detail": ""}',
        '{"settings": {"clients": "many"}, "choices": {}, "check": "", "detail": ""}',
        '{"settings": {}, "choices": {"9999999999": 1}, "check": "", "detail": ""}',
    ],
)
def test_an_invalid_saved_run_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"saved run|Expecting value"):
        Found.load(text)


# Choices


def test_every_list_of_choices_within_the_budget_is_tried_once() -> None:
    def run(choices: Choices) -> object:
        return [choices.pick("a", (1, 1, 1)), choices.pick("b", (1, 1)), choices.pick("c", (1, 1))]

    assert sorted(every(run, {"a": 1, "b": 1})) == [[a, b, 0] for a in range(3) for b in range(2)]
    assert sorted(every(run, {})) == [[0, 0, 0]]


def test_choices_with_zero_weight_are_not_tried() -> None:
    def run(choices: Choices) -> object:
        return choices.pick("a", (0.9, 0, 0, 0.1))

    assert sorted(every(run, {"a": 1})) == [[0], [3]]


def test_choices_of_another_run_choose_nothing_with_zero_weight() -> None:
    choices = PossibleChoices([2, 2])
    assert choices.pick("fault", (0.9, 0.1, 0.0)) == 0
    assert choices.pick("fault", (0.9, 0.1, 0.1)) == 2
    assert choices.made == [0, 2]


def test_a_budget_counts_over_all_faults() -> None:
    def run(choices: Choices) -> object:
        return [choices.pick(f"fault:{name}", (1, 1)) for name in "abc"]

    assert sorted(every(run, {"fault": 1})) == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]


def test_choices_that_depend_on_others_are_tried_too() -> None:
    def run(choices: Choices) -> object:
        return choices.pick("a", (1, 1)) and choices.pick("b", (1, 1))

    assert sorted(every(run, {"a": 1, "b": 1})) == [[0], [1, 0], [1, 1]]


def test_shrinking_leaves_what_is_needed_and_nothing_else() -> None:
    tried = []

    def run(choices: Sequence[int]) -> Sequence[int] | None:
        tried.append(list(choices))
        fails = len(choices) > 40 and choices[17] == 2 and choices[40] == 1
        return choices if fails else None

    start = [3] * 100
    start[17], start[40] = 2, 1
    shrunk = shrink(start, run)
    assert len(shrunk) == 41
    assert [index for index, chosen in enumerate(shrunk) if chosen] == [17, 40]
    assert len(tried) < 40


def test_an_unexpected_error_is_reported_as_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(lock_turns, "acquire", fails)
    outcome = simulate(CALM, RandomChoices(1))
    assert (outcome.check, outcome.detail) == ("ERROR", "ZeroDivisionError('a mistake')")


def test_wrong_arguments_that_are_accepted_are_reported_as_a_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.core.value.check_ttl", lambda *_, **__: None)
    outcome = simulate(replace(CALM, cached=1.0), RandomChoices(1))
    assert (outcome.check, outcome.detail) == ("CACHE", "{'ttl': 0.0} was accepted")


# Processes and clocks


def _simulation_and_process() -> tuple[Simulation, Process]:
    sim = Simulation(Choices())
    return sim, Process(sim, "one")


def test_a_task_that_waits_forever_is_detected() -> None:
    sim, process = _simulation_and_process()
    task = process.spawn(_forever(), "waits")
    with pytest.raises(Stuck):
        sim.run(lambda: task.result.done, 10_000_000)


async def _forever() -> None:
    await Future[None]()


def test_a_paused_process_does_nothing_while_its_clock_runs_and_then_catches_up_in_order() -> None:
    sim, process = _simulation_and_process()
    done: list[tuple[int, str]] = []
    for name, at in (("a", 10), ("b", 20), ("c", 300)):
        sim.at(at, lambda name=name: process.call(lambda: done.append((sim.now, name))))  # type: ignore[misc]  # bound early
    sim.at(5, lambda: process.pause(100))
    sim.run(lambda: len(done) == 3, 1000)
    assert done == [(105, "a"), (105, "b"), (300, "c")]
    assert process.now() == pytest.approx(0.0003)


def test_a_crashed_process_never_continues() -> None:
    sim, process = _simulation_and_process()
    done: list[str] = []
    process.after(1.0, lambda: done.append("late"))
    sim.at(10, process.crash)
    with pytest.raises(Stuck):
        sim.run(lambda: bool(done), 3_000_000)
    assert not done


def test_a_clock_that_runs_fast_reaches_a_time_sooner() -> None:
    sim = Simulation(Choices())
    fast = Process(sim, "fast", rate=1.1, offset=50.0)
    done: list[int] = []
    fast.after(1.1, lambda: done.append(sim.now))
    sim.run(lambda: bool(done), 3_000_000)
    assert done[0] == pytest.approx(1_000_000, abs=5)
    assert fast.true_time(fast.now()) == pytest.approx(sim.now, abs=1)


def test_a_cancelled_task_is_woken_where_it_waits() -> None:
    sim, process = _simulation_and_process()
    seen: list[str] = []

    async def scenario() -> None:
        try:
            await Future[None]()
        except Cancelled:
            seen.append("cancelled")
            raise

    task = process.spawn(scenario(), "scenario")
    sim.at(10, task.cancel)
    sim.run(lambda: task.result.done, 100)
    assert seen == ["cancelled"]


# The checks detect violations


def test_a_lock_that_is_never_granted_is_reported_as_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await Future[None]()

    monkeypatch.setattr(lock_turns, "acquire", never)
    outcome = simulate(CALM, RandomChoices(1))
    assert outcome.check == "L2"


def test_the_table_of_promises_names_the_modules_that_check_each() -> None:
    checking: dict[str, set[str]] = {}
    for file in Path(lock_turns.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="fail" | "_fail") | ast.Name("fail"),
                    args=[ast.Constant(str(letter)), _],
                ):
                    checking.setdefault(letter, set()).add(file.stem)
    assert {letter: set(each.modules.split()) for letter, each in PROMISES.items()} == checking


def test_two_holders_at_once_are_reported() -> None:
    run = SimulationRun(replace(CALM, clients=2), Choices())
    first, second = run.clients
    spec = run.spec
    held = [(client, _lease(client, spec, number)) for number, client in enumerate((first, second))]
    for number, (_, lease) in enumerate(held):
        run.checks.record.fences[number + 1] = lease.token
    run.checks.granted(*held[0])
    with pytest.raises(Violated, match="hold the lock at the same time"):
        run.checks.granted(*held[1])
    run.sim.end()


def _lease(client: SimClient, spec: LockSpec, number: int) -> LeaseState:
    token = f"hf1:{client.machine.name}:1:sim@sim:1:t:"
    session = client.session
    return LeaseState(
        spec, token, number + 1, client.now(), None, session.process, session, LeaseRef()
    )


def test_every_state_is_listed_once() -> None:
    assert len(set(STATES)) == len(STATES)


@pytest.mark.parametrize(
    "wrong", [{"export": 0.9}, {"export": 0.1, "owner": True}, {"export": 0.1, "nodes": 3}]
)
def test_invalid_export_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="export"):
        replace(CALM, **wrong)  # type: ignore[arg-type]  # settings of several types


def test_exported_leases_are_adopted_in_runs_without_faults() -> None:
    report = sweep(range(40), {**dict.fromkeys(FAULTS, 0.0), "export": 0.4})
    assert [(each.seed, each.check, each.detail) for each in report.found] == []
    assert report.reached["a lease adopted"] > 20


def test_settings_know_whether_exclusion_is_guaranteed() -> None:
    assert STORMY.assumptions_hold
    for broken in ("wipe", "evict", "clock_jump", "failover"):
        assert not replace(Settings(), **{broken: 0.1}).assumptions_hold  # type: ignore[arg-type]  # a probability
