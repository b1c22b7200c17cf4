"""The process that runs the simulator: with a mutant, or to record the lines that runs execute.

It reads its task from standard input and writes the result to standard output, both as JSON. The
top level imports nothing of the package, because the mutant must be in place first.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import coverage
import lupa.lua51  # type: ignore[import-untyped]  # it has no hints

from kit.mutant_run import mutate
from kit.mutants import SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.sim.run import RunResult

PACKAGE = SOURCE / "holdfast"
SAVED_RUNS = SOURCE.parent / "tests" / "saved_runs"
MEMORY = 3 << 30
LONGEST_RUN = 30
"""Seconds of processor time after which a run counts as endless. Most runs take far less."""

MANY_RUNS = 0.3
"""The average processor time that a run may take, in seconds."""

_HOOK = b"""
local executed = {}
debug.sethook(function(_, line)
  if debug.getinfo(2, 'S').source == '@user_script' then
    executed[line] = true
  end
end, 'l')
return function()
  local lines = {}
  for line in pairs(executed) do
    lines[#lines + 1] = line
  end
  executed = {}
  return lines
end
"""


def default_run() -> Callable[[int], RunResult]:
    """Return a function that runs one seed as `holdfast sim run` does."""
    from holdfast.sim.choices import RandomChoices  # noqa: PLC0415 - after the change
    from holdfast.sim.run import simulate  # noqa: PLC0415 - the same
    from holdfast.sim.swarm import draw  # noqa: PLC0415 - the same

    return lambda seed: simulate(draw(seed), RandomChoices(seed))


def replayed(saved: Path) -> RunResult:
    """Replay a saved run."""
    from holdfast.sim.sweep import Found  # noqa: PLC0415 - after the change

    return Found.load(saved.read_text()).run()


def try_mutant(work: dict[str, Any]) -> dict[str, Any]:
    """Simulate runs with these seeds, then the saved runs if wanted; stop at a failure."""
    path = PACKAGE / work["file"]
    assert path.read_text() == work["old"], "the source was changed meanwhile"
    mutate(path, work["old"].encode(), work["new"].encode())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    seconds = LONGEST_RUN + int(MANY_RUNS * len(work["seeds"]))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    seed = -1
    try:
        run = default_run()
        for seed in work["seeds"]:
            signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_RUN)  # its signal ends the process
            if check := run(seed).check:
                return {"check": check, "runs": seed + 1}
        seed = -1
        for saved in sorted(SAVED_RUNS.glob("*.json")) if work["replay"] else ():
            signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_RUN)
            if check := replayed(saved).check:
                return {"check": check, "runs": 0, "saved": saved.stem}
    except Exception as error:  # noqa: BLE001 - the mutant may raise anything
        return {"check": type(error).__name__, "runs": seed + 1}
    return {"check": "", "runs": 0}


def record(seeds: range) -> dict[str, Any]:
    """Record the lines of the core and of the scripts that each run executes, and its size.

    `lines[file][line]` is the set of seeds, as the bits of a hexadecimal number. The size of a run
    is the number of its choices: its time is about proportional.
    """
    watching = coverage.Coverage(data_file=None, config_file=False, include=[f"{PACKAGE}/core/*"])
    watching.start()
    scripts = _watch_scripts()
    run = default_run()
    sizes: dict[int, int] = {}
    found: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    modules = [module for name, module in sys.modules.items() if name.startswith("holdfast.")]
    cached = [each for module in modules for each in vars(module).values() if _is_cached(each)]
    for seed in seeds:
        for each in cached:  # otherwise the lines that fill a cache count for the first run only
            each.cache_clear()
        watching.switch_context(str(seed))
        outcome = run(seed)
        assert not outcome.check, f"{outcome.check} fails with seed {seed}, without any mutant"
        sizes[seed] = len(outcome.choices)
        for text, lines in scripts().items():
            for line in lines:
                found[text][line] |= 1 << seed
    watching.stop()
    data = watching.get_data()
    for file in data.measured_files():
        name = file[len(str(PACKAGE)) + 1 :]
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                if context:  # without one, an import executed the line
                    found[name][line] |= 1 << int(context)
    bits = {file: {line: f"{each:x}" for line, each in by.items()} for file, by in found.items()}
    return {"lines": bits, "sizes": sizes}


def _is_cached(value: object) -> bool:
    module = getattr(value, "__module__", "") or ""
    return hasattr(value, "cache_clear") and module.startswith("holdfast.core")


def _watch_scripts() -> Callable[[], dict[str, set[int]]]:
    """Return a function that returns the script lines executed since its last call."""
    from holdfast import scripts  # noqa: PLC0415 - after the recording began
    from holdfast.sim import lua  # noqa: PLC0415 - the same

    make_runtime, run_script = lupa.lua51.LuaRuntime, lua.Scripts.run
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(make_runtime(**options))
        return made[-1]

    lupa.lua51.LuaRuntime = make
    lua.Scripts()  # the first instance creates the shared runtime
    lupa.lua51.LuaRuntime = make_runtime
    executed = made[0].execute(_HOOK)
    places = {
        each.text: _origins(each.name)
        for each in vars(scripts).values()
        if isinstance(each, scripts.Script)
    }
    found: dict[str, set[int]] = defaultdict(set)

    def run(self: lua.Scripts, text: bytes, *rest: Any) -> Any:
        try:
            return run_script(self, text, *rest)
        finally:
            if (
                text not in places
            ):  # of a user: one line, alone or in the first line of user_script.lua
                places[text] = _origins("user_script") if text.count(b"\n") else [("", 0)]
            for line in executed().values():
                file, number = places[text][line - 1]
                found[file].add(number)

    def since() -> dict[str, set[int]]:
        lines = dict(found)
        found.clear()
        return lines

    lua.Scripts.run = run  # type: ignore[assignment, method-assign]  # the same, and noted
    return since


def _origins(name: str) -> list[tuple[str, int]]:
    """Return the file and line of each line of a script, after its includes are expanded."""
    from mutation.reach import INCLUDE  # noqa: PLC0415 - it needs none of the package

    found: list[tuple[str, int]] = []
    text = (PACKAGE / "scripts" / f"{name}.lua").read_text()
    for number, line in enumerate(text.split("\n"), 1):
        if included := INCLUDE.match(line):
            found += _origins(included[1])
        else:
            found.append((f"scripts/{name}.lua", number))
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))
    work = json.load(sys.stdin)
    result = try_mutant(work) if "file" in work else record(range(*work["range"]))
    json.dump(result, sys.stdout)
