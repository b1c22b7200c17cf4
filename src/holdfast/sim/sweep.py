"""Many simulation runs, by seed or exhaustively, and saving and replaying failed runs."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.sim.choices import Choices, RandomChoices, every
from holdfast.sim.run import simulate
from holdfast.sim.settings import CALM, Settings
from holdfast.sim.states import RARE_STATES, STATES
from holdfast.sim.swarm import draw, pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.sim.run import RunResult

SMALL = replace(
    CALM,
    clients=2,
    turns=1,
    drift=0.0,
    slow=0.1,
    reset=0.1,
    half_open=0.1,
    doubled=0.1,
    pause=0.1,
    crash=0.1,
    cancel=0.1,
)
"""The small run of which all variants within BUDGETS are tried: one client holds, one waits."""

RUNS_FOR_RARE_STATES = 30_000

_LONGEST = 1_000_000  # choices of one run

BUDGETS = {"delay": 1, "fault": 1, "slow": 1, "pause": 1, "crash": 1}
"""At most one delayed message and one fault, of any kind and duration."""

OUTAGES = replace(
    CALM,
    clients=2,
    turns=1,
    drift=0.0,
    stop=0.1,
    partition=0.1,
    freeze=0.1,
    restart=0.1,
    script_flush=0.1,
    full=0.1,
)
OUTAGE_BUDGETS = {"delay": 1, "fault": 1, "length": 1, "way": 1, "who": 1}
"""The same for outages of the server."""

SMALL_QUORUM = replace(SMALL, nodes=3, hold=0.1)
QUORUM_BUDGETS = {"fault": 1, "slow": 1, "pause": 1, "crash": 1}
"""The same for three nodes, without a delayed message."""

QUORUM_OUTAGES = replace(OUTAGES, nodes=3, hold=0.6, wipe=0.1)
QUORUM_OUTAGE_BUDGETS = {"fault": 1, "length": 1, "way": 1, "who": 1, "node": 1}
"""The same for outages of any one node."""


@dataclass(frozen=True)
class Found:
    """A run in which a check failed."""

    settings: Settings
    choices: Sequence[int]
    check: str
    detail: str
    seed: int | None = None

    def dump(self) -> str:
        """Return the run as JSON, which `load` reads."""
        given = self.settings.non_default()
        chosen = {str(index): value for index, value in enumerate(self.choices) if value}
        saved = {"check": self.check, "detail": self.detail, "settings": given, "choices": chosen}
        return json.dumps(saved, indent=2) + "\n"

    @classmethod
    def load(cls, text: str) -> Found:
        """Read a run that `dump` wrote.

        Raises:
            ValueError: the text is not a saved run.
        """
        try:
            saved = json.loads(text)
            settings = _settings(saved["settings"])
            chosen = {int(index): int(value) for index, value in saved["choices"].items()}
            if not all(0 <= index < _LONGEST for index in chosen):
                raise ValueError("not a saved run: too many choices")
            choices = [chosen.get(index, 0) for index in range(max(chosen, default=-1) + 1)]
            return cls(settings, choices, str(saved["check"]), str(saved["detail"]))
        except KeyError as error:
            raise ValueError(f'not a saved run: it has no "{error.args[0]}"') from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a saved run: {error!r}") from error

    def run(self) -> RunResult:
        """Replay the run."""
        return simulate(self.settings, Choices(self.choices))


def _settings(given: dict[str, Any]) -> Settings:
    usual = asdict(Settings())
    for name, value in given.items():
        if name not in usual:
            raise ValueError(f"not a saved run: unknown setting {name!r}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (isinstance(value, bool) if isinstance(usual[name], bool) else number):
            raise ValueError(f"not a saved run: {name} is {value!r}")
    return Settings(**given)


@dataclass
class Report:
    """The results of a sweep so far."""

    runs: int = 0
    seconds: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)
    """The number of runs that reached each state."""
    pairs: set[tuple[str, str]] = field(default_factory=set)
    """The features and faults that were switched on together."""
    found: list[Found] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """The states that no run reached, with the rare ones only if there were many runs."""
        expected = STATES + RARE_STATES if self.runs >= RUNS_FOR_RARE_STATES else STATES
        return [name for name in expected if not self.reached[name]]

    def add(self, other: Report) -> None:
        """Add the results of another part of the sweep."""
        self.runs += other.runs
        self.reached.update(other.reached)
        self.pairs |= other.pairs
        self.found += other.found

    def note(self, settings: Settings, outcome: RunResult, seed: int | None = None) -> None:
        """Add one run."""
        self.runs += 1
        self.reached.update(name for name, times in outcome.reached.items() if times)
        self.pairs |= pairs_of(settings)
        if outcome.check:
            found = Found(settings, outcome.choices, outcome.check, outcome.detail, seed)
            self.found.append(found)


def sweep(
    seeds: Iterable[int],
    fixed: Mapping[str, Any] | None = None,
    *,
    twice: bool = False,
    may_continue: Callable[[Report], bool] = lambda _: True,
) -> Report:
    """Run each seed with settings drawn for it, until `may_continue` returns False.

    The `fixed` settings are not drawn. With `twice`, each run is repeated and compared.

    Raises:
        AssertionError: two runs of the same seed differ.
    """
    report, began = Report(), time.perf_counter()
    for seed in seeds:
        settings = draw(seed, fixed)
        outcome = simulate(settings, RandomChoices(seed))
        if twice and repr(simulate(settings, RandomChoices(seed))) != repr(outcome):
            raise AssertionError(f"seed {seed} gave two different runs")
        report.note(settings, outcome, seed)
        report.seconds = time.perf_counter() - began
        if not may_continue(report):
            break
    return report


def exhaust(
    settings: Settings = SMALL, budgets: Mapping[str, int] | None = None
) -> Iterator[RunResult]:
    """Run every variant of a run that the budgets allow."""
    outcomes: list[RunResult] = []

    def run(choices: Choices) -> Any:  # noqa: ANN401 - unused
        outcomes.append(simulate(settings, choices))

    for _ in every(run, BUDGETS if budgets is None else budgets):
        yield outcomes.pop()
