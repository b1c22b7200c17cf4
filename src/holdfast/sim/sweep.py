"""Many worlds: by seeds, or all of a small one; and what was found, kept and replayed."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.sim.checks import (
    CLOSED,
    EVICTED,
    FORKED,
    HANDED_ON,
    LIMITED,
    PUSHED,
    REACHED,
    UNCOUNTED,
)
from holdfast.sim.choices import Choices, RandomChoices, every, shrink
from holdfast.sim.play import play
from holdfast.sim.quorum_checks import REACHED_BY_MANY
from holdfast.sim.settings import CALM, STORMY, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.sim.play import Outcome

SINGLE_NODE: Mapping[str, Settings] = {
    "storm": STORMY,
    "calm": CALM,
    "calm, tasks": replace(CALM, clients=2, tasks=2, ttl=5.0),
    "nothing doubled": replace(STORMY, doubled=0.0, cancel=0.04, slow=0.1),
    "long ttl": replace(STORMY, ttl=30.0, half_open=0.03, crash=0.01, clients=5, doubled=0.0),
    "long delay": replace(STORMY, lock_delay=30.0, turns=2),
    "tasks": replace(STORMY, clients=2, tasks=2),
    "owner": replace(STORMY, owner=True),
    "delay": replace(STORMY, lock_delay=1.0),
    "barge": replace(STORMY, fair=False),
    "reentrant": replace(STORMY, reentrant=True),
    "polls": replace(STORMY, polls=True),
    "no renewal": replace(STORMY, renew=False),
    "timeout": replace(STORMY, timeout=1.0),
    "short ttl": replace(STORMY, ttl=0.3),
    "slow answers": replace(STORMY, slow=0.2, hold=1.0, ttl=1.0),
    "data lost": replace(STORMY, wipe=0.05, evict=0.05),
    "clock jumps": replace(STORMY, clock_jump=0.1),
    "failover": replace(STORMY, failover=0.1),
    "handed on": replace(STORMY, hand_off=0.4),
    "handed on, calm": replace(CALM, hand_off=0.4),
    "handed on, nothing doubled": replace(
        STORMY, hand_off=0.4, doubled=0.0, cancel=0.04, slow=0.1, ttl=30.0
    ),
    "handed on, delay": replace(STORMY, hand_off=0.4, lock_delay=1.0),
    "handed on, data lost": replace(STORMY, hand_off=0.4, wipe=0.05, evict=0.05),
    "evicted by an operator": replace(STORMY, evict_holder=0.3),
    "evicted by an operator, prompt": replace(CALM, evict_holder=0.7, hold=1.0),
    "evicted by an operator, delay": replace(STORMY, evict_holder=0.3, lock_delay=1.0),
    "evicted by an operator, owner": replace(STORMY, evict_holder=0.3, owner=True),
    "max_hold": replace(STORMY, max_hold=0.5, ttl=1.0, hold=1.0),
    "max_hold, prompt": replace(CALM, max_hold=0.5, ttl=1.0, hold=1.0, hand_off=0.2),
    "uncounted": replace(STORMY, uncounted=True),
    "stalls": replace(STORMY, stall=0.2, hold=1.0),
    "forks": replace(STORMY, fork=0.02),
    "forks, prompt": replace(CALM, fork=0.05, hand_off=0.1, tasks=2),
    "closed": replace(STORMY, close=0.2),
    "closed, prompt": replace(CALM, close=0.5, tasks=2),
}
"""The kinds of worlds that a sweep without settings of its own goes through."""

_MANY = replace(STORMY, nodes=3, skew=2.0)

QUORUM: Mapping[str, Settings] = {
    "quorum, storm": _MANY,
    "quorum, calm": replace(CALM, nodes=3, skew=2.0),
    "quorum, calm loop": replace(CALM, nodes=3, skew=2.0, loop=True, clients=2, tasks=2),
    "quorum, loop": replace(_MANY, loop=True),
    "quorum, tasks of a loop": replace(_MANY, loop=True, clients=2, tasks=2),
    "quorum, tasks": replace(_MANY, clients=2, tasks=2),
    "quorum, nothing doubled": replace(_MANY, doubled=0.0, cancel=0.04, slow=0.1),
    "quorum, loop, nothing doubled": replace(_MANY, doubled=0.0, cancel=0.04, slow=0.1, loop=True),
    "quorum, five": replace(_MANY, nodes=5),
    "quorum, delay": replace(_MANY, lock_delay=1.0),
    "quorum, reentrant": replace(_MANY, reentrant=True),
    "quorum, polls": replace(_MANY, polls=True),
    "quorum, no renewal": replace(_MANY, renew=False),
    "quorum, timeout": replace(_MANY, timeout=1.0),
    "quorum, short ttl": replace(_MANY, ttl=0.3),
    "quorum, slow answers": replace(_MANY, slow=0.2, hold=1.0, ttl=1.0),
    "quorum, right clocks": replace(_MANY, skew=0.0),
    "quorum, data lost": replace(_MANY, wipe=0.15, restart=0.0, full=0.0),
    "quorum, evictions": replace(_MANY, evict=0.1),
    "quorum, clock jumps": replace(_MANY, clock_jump=0.1),
    "quorum, handed on": replace(_MANY, hand_off=0.4),
    "quorum, handed on, calm": replace(CALM, nodes=3, skew=2.0, loop=True, hand_off=0.4),
    "quorum, handed on, torn": replace(
        CALM, nodes=3, hand_off=0.5, clients=2, ttl=30.0, reset=0.05, slow=0.2, restart=0.5
    ),
    "quorum, handed on, loop": replace(_MANY, hand_off=0.4, loop=True, doubled=0.0, slow=0.1),
    "quorum, handed on, delay": replace(_MANY, hand_off=0.4, lock_delay=1.0),
    "quorum, handed on, data lost": replace(_MANY, hand_off=0.4, wipe=0.15, restart=0.0, full=0.0),
    "quorum, handed on by five": replace(_MANY, hand_off=0.4, nodes=5),
    "quorum, evicted by an operator": replace(_MANY, evict_holder=0.3),
    "quorum, evicted by an operator, prompt": replace(
        CALM, nodes=3, evict_holder=0.7, hold=1.0, ttl=5.0
    ),
    "quorum, forks": replace(_MANY, fork=0.02),
    "quorum, forks, prompt": replace(CALM, nodes=3, fork=0.05, hand_off=0.1, clients=2, tasks=2),
    "quorum, closed": replace(_MANY, close=0.2),
    "quorum, closed, prompt": replace(CALM, nodes=3, close=0.5, loop=True, clients=2, tasks=2),
    "quorum, max_hold": replace(_MANY, max_hold=0.5, ttl=1.0, hold=1.0),
}
"""The same for a lock that several nodes keep."""


_COPIED = replace(STORMY, replicas=2, failover=0.15)

REPLICATED: Mapping[str, Settings] = {
    "replicas, storm": _COPIED,
    "replicas, failovers": replace(CALM, replicas=2, failover=0.4, hold=1.0),
    "replicas, polls": replace(_COPIED, polls=True),
    "replicas, tasks": replace(_COPIED, clients=2, tasks=2),
    "replicas, long ttl": replace(_COPIED, ttl=10.0, hold=1.0, crash=0.01),
    "replicas, no renewal": replace(_COPIED, renew=False),
    "replicas, handed on": replace(_COPIED, hand_off=0.4),
}
"""The same for one server and its replicas, any of which may take its place."""


def kinds_of(nodes: int, replicas: int = 0) -> list[Settings]:
    """All kinds of worlds with so many nodes, or replicas of one."""
    if replicas:
        return [replace(kind, replicas=replicas, nodes=nodes) for kind in REPLICATED.values()]
    if nodes == 1:
        return list(SINGLE_NODE.values())
    return [replace(kind, nodes=max(nodes, kind.nodes)) for kind in QUORUM.values()]


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
"""The world of which every interleaving is gone through: one holds, the other waits."""

_LONGEST = 1_000_000  # choices that a world may make

BUDGETS = {"delay": 1, "fault": 1, "slow": 1, "pause": 1, "crash": 1}
"""How many messages may be overtaken there, how many faults may happen, and of any length."""

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
"""The same for what may happen to the server."""

SMALL_QUORUM = replace(SMALL, nodes=3, hold=0.05)
SMALL_BUDGETS = {"fault": 1, "slow": 1, "pause": 1, "crash": 1}
"""The same with three nodes: one fault, of any length, to any message or client, at any time."""

QUORUM_OUTAGES = replace(OUTAGES, nodes=3, hold=0.6, wipe=0.1)
QUORUM_OUTAGE_BUDGETS = {"fault": 1, "length": 1, "way": 1, "who": 1, "node": 1}
"""And to any node."""


@dataclass(frozen=True)
class Found:
    """A world in which something that must hold did not."""

    settings: Settings
    choices: Sequence[int]
    check: str
    detail: str
    seed: int | None = None

    def dump(self) -> str:
        """As text that can be kept, and read back."""
        usual = asdict(Settings())
        mine = asdict(self.settings)
        given = {name: value for name, value in mine.items() if value != usual[name]}
        chosen = {str(index): value for index, value in enumerate(self.choices) if value}
        kept = {"check": self.check, "detail": self.detail, "settings": given, "choices": chosen}
        return json.dumps(kept, indent=2) + "\n"

    @classmethod
    def load(cls, text: str) -> Found:
        """Read what `dump` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            kept = json.loads(text)
            settings = _settings(kept["settings"])
            chosen = {int(index): int(value) for index, value in kept["choices"].items()}
            if not all(0 <= index < _LONGEST for index in chosen):
                raise ValueError("not a saved world: no world has that many choices")
            choices = [chosen.get(index, 0) for index in range(max(chosen, default=-1) + 1)]
            return cls(settings, choices, str(kept["check"]), str(kept["detail"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a saved world: {error!r}") from error

    def run(self) -> Outcome:
        """Let it happen again."""
        return play(self.settings, Choices(self.choices))

    def shortest(self) -> Found:
        """The shortest list of choices that breaks the same promise."""

        def fails(choices: Sequence[int]) -> bool:
            return play(self.settings, Choices(choices)).check == self.check

        choices = shrink(self.choices, fails)
        outcome = play(self.settings, Choices(choices))
        return replace(self, choices=choices, detail=outcome.detail)


def _settings(given: dict[str, Any]) -> Settings:
    usual = asdict(Settings())
    for name, value in given.items():
        if name not in usual:
            raise ValueError(f"not a saved world: unknown setting {name!r}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (isinstance(value, bool) if isinstance(usual[name], bool) else number):
            raise ValueError(f"not a saved world: {name} is {value!r}")
    return Settings(**given)


@dataclass
class Report:
    """What a sweep has seen so far."""

    states: Sequence[str] = REACHED
    """Those that worlds like these have to come across."""
    worlds: int = 0
    seconds: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """The states that no world reached."""
        return [name for name in self.states if not self.reached[name]]

    def add(self, other: Report) -> None:
        """Take in what another part of the sweep has seen."""
        self.worlds += other.worlds
        self.reached.update(other.reached)
        self.found += other.found

    def note(self, settings: Settings, outcome: Outcome, seed: int | None = None) -> None:
        """Take in one world."""
        self.worlds += 1
        self.reached.update(outcome.reached)
        if outcome.check:
            found = Found(settings, outcome.choices, outcome.check, outcome.detail, seed)
            self.found.append(found)


def states_of(kinds: Sequence[Settings]) -> Sequence[str]:
    """What worlds of these kinds have to come across."""
    more: list[str] = []
    more += HANDED_ON if any(kind.hand_off for kind in kinds) else ()
    more += EVICTED if any(kind.evict_holder for kind in kinds) else ()
    more += LIMITED if any(kind.max_hold for kind in kinds) else ()
    more += FORKED if any(kind.fork for kind in kinds) else ()
    more += CLOSED if any(kind.close for kind in kinds) else ()
    if all(kind.nodes > 1 for kind in kinds):
        return [*REACHED_BY_MANY, *more]
    more += UNCOUNTED if any(kind.uncounted for kind in kinds) else ()
    never = set(PUSHED) if all(kind.polls for kind in kinds) else set()
    if all(kind.trusts for kind in kinds):
        never |= {"a lease lost: taken", "a lease lost: key_missing"}
    return [state for state in (*REACHED, *more) if state not in never]


def sweep(
    seeds: Iterable[int],
    kinds: Sequence[Settings] = tuple(SINGLE_NODE.values()),
    *,
    twice: bool = False,
    go_on: Callable[[Report], bool] = lambda _: True,
) -> Report:
    """Run a world for each seed, until `go_on` says no; each twice to see that it is the same.

    The kinds take turns.

    Raises:
        AssertionError: a world was another the second time.
    """
    report, began = Report(states_of(kinds)), time.perf_counter()
    for seed in seeds:
        kind = kinds[seed % len(kinds)]
        outcome = play(kind, RandomChoices(seed))
        if twice and repr(play(kind, RandomChoices(seed))) != repr(outcome):
            raise AssertionError(f"seed {seed} gave two different worlds")
        report.note(kind, outcome, seed)
        report.seconds = time.perf_counter() - began
        if not go_on(report):
            break
    return report


def exhaust(
    settings: Settings = SMALL, budgets: Mapping[str, int] | None = None
) -> Iterator[Outcome]:
    """Run every world that differs from the calm one by as much as the budgets allow."""
    outcomes: list[Outcome] = []

    def run(choices: Choices) -> Any:  # noqa: ANN401 - nobody looks at it
        outcomes.append(play(settings, choices))

    for _ in every(run, BUDGETS if budgets is None else budgets):
        yield outcomes.pop()
