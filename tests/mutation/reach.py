"""Which simulation runs and tests reach a line: recorded once per tree and cached.

A simulation is deterministic: a run that executes none of a mutant's lines gives the same result
as without the mutant, so it is skipped. A statement that is executed on import affects every run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mutation.python_operators import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "holdfast"
CACHE_FOLDER = ROOT / ".mutation"
INCLUDE = re.compile(r" *--:include (\w+)$")
Line = tuple[str, int]
Bits = dict[str, dict[str, str]]
"""By file and line, the runs or tests that reach it, as the bits of a hexadecimal number."""

SHORT = ["-m", "not long", "-p", "no:randomly", "--ignore-glob=tests/test_sim*"]
"""The tests that are recorded. Tests of the simulator are excluded: the simulator itself runs
first, and some of these tests read the source."""

OF_SCRIPTS = "tests/test_scripts"
"""The prefix of test files that send scripts to a server directly. Coverage does not show which
scripts they use."""


class Reach:
    """The runs and tests that reach each line of this tree."""

    def __init__(self, runs: int, workers: int) -> None:
        self.runs = runs
        recorded = _cached(f"runs-{_digest('src')}-{runs}", lambda: _record_runs(runs, workers))
        self._by_runs: Bits = recorded["lines"]
        self._sizes: dict[str, int] = recorded["sizes"]
        recorded = _cached(f"tests-{_digest('src', 'tests')}", lambda: _record_tests(workers))
        self._by_tests: Bits = recorded["lines"]
        self._tests: list[tuple[str, float]] = recorded["tests"]

    def seeds(self, mutant: Mutant) -> list[int]:
        """Return the runs that reach it, shortest first: the longest tenth takes half the time."""
        everything = bool(mutant.change.place.binds)
        found = range(self.runs) if everything else _reaching(self._by_runs, _lines(mutant))
        return sorted(found, key=lambda seed: self._sizes[str(seed)])

    def tests(self, mutant: Mutant) -> list[tuple[str, float]]:
        """Return tests to try, in this order, and the seconds that each takes.

        1. Tests of files that import the module and name the function, or send the script:
           coverage misses some of these.
        2. Tests that reach the line, from files that import the module.
        3. All others that reach the line; if there are none, those that reach its function. Some
           tests trace the lines themselves, and coverage sees none of these.

        Within a group the files take turns, and within a file the variants of a test; the quickest
        comes first.
        """
        binds, function = mutant.change.place.binds, mutant.change.place.function
        if mutant.file.endswith(".lua"):
            scripts = scripts_with(Path(mutant.file).stem)
            names = [
                "user_script_once" if script == "user_script" else script.upper()
                for script in scripts
            ]
            lines = [line for name in names for line in uses(name)]
            named = [test for test in self._tests if sends(_file_of(test), names)]
        else:
            lines = uses(binds) if binds else _lines(mutant)
            direct = [test for test in self._tests if imports(_file_of(test), mutant.file)]
            name = function.rpartition(".")[2]
            named = [test for test in direct if name in _named_in(_file_of(test))]
        found = range(len(self._tests)) if binds == "*" else _reaching(self._by_tests, lines)
        if not found:
            found = _reaching(self._by_tests, _lines_around(mutant))
        first = {test[0] for test in named}
        reached = [self._tests[number] for number in found]
        others = [test for test in reached if test[0] not in first]
        near = [test for test in others if imports(_file_of(test), mutant.file)]
        far = [test for test in others if not imports(_file_of(test), mutant.file)]
        return [*_dealt(named), *_dealt(near), *_dealt(far)]


def _file_of(test: tuple[str, float]) -> str:
    return test[0].split("::")[0]


def _dealt(tests: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Order tests as `Reach.tests` describes."""
    dealt = sorted(tests, key=lambda test: test[1])
    for mark in ("[", "::"):
        counts = Counter[str]()
        ranked: list[tuple[int, tuple[str, float]]] = []
        for test in dealt:
            group = test[0].split(mark)[0]
            ranked.append((counts[group], test))
            counts[group] += 1
        dealt = [test for _, test in sorted(ranked, key=lambda each: each[0])]
    return dealt


def _reaching(bits: Bits, lines: list[Line]) -> list[int]:
    """The numbers of those that reach one of the lines."""
    found = reduce(
        or_, (int(bits.get(file, {}).get(str(line), "0"), 16) for file, line in lines), 0
    )
    return [number for number in range(found.bit_length()) if found >> number & 1]


@cache
def _named_in(file: str) -> frozenset[str]:
    """The names in a file of tests."""
    return frozenset(re.findall(r"\w+", (ROOT / file).read_text()))


def sends(file: str, scripts: list[str]) -> bool:
    """Whether a file of tests sends one of these scripts itself."""
    return file.startswith(OF_SCRIPTS) and not _named_in(file).isdisjoint(scripts)


@cache
def imports(file: str, module: str) -> bool:
    """Whether a file of tests imports a module of the package, which is given as a path."""
    name = f"holdfast.{module.removesuffix('.py').replace('/', '.')}"
    return f"from {name} import" in (ROOT / file).read_text()


def _lines(mutant: Mutant) -> list[Line]:
    place = mutant.change.place
    return [(mutant.file, line) for line in range(place.first, place.last + 1)]


def _lines_around(mutant: Mutant) -> list[Line]:
    first, last = mutant.change.place.scope
    return [(mutant.file, line) for line in range(first, last + 1)]


@cache
def scripts_with(part: str) -> list[str]:
    """The scripts that contain a part, directly or in another part; of a script, itself too."""
    found = set() if part.startswith("_") else {part}
    for path in sorted(PACKAGE.glob("scripts/*.lua")):
        lines = path.read_text().splitlines()
        if part in (each[1] for line in lines if (each := INCLUDE.match(line))):
            found.update(scripts_with(path.stem))
    return sorted(found)


def uses(name: str, through: frozenset[str] = frozenset()) -> list[Line]:
    """Return the lines that use a name of a module or class, directly or through other names."""
    lines, defined = _names()
    found = list(lines[name])
    for other in defined[name] - through - {name}:
        found += uses(other, through | {name})
    return found


@cache
def _names() -> tuple[dict[str, list[Line]], dict[str, set[str]]]:
    """By name: the lines that use it, and the names that modules and classes define with it."""
    lines: dict[str, list[Line]] = defaultdict(list)
    defined: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for name, line in _loads(node):
                lines[name].append((str(path.relative_to(PACKAGE)), line))
            for each in node.body if isinstance(node, (ast.Module, ast.ClassDef)) else ():
                if (definition := name_of(each)) != "*":
                    loads = {name for part in ast.walk(each) for name, _ in _loads(part)}
                    for name in loads:
                        defined[name].add(definition)
    return lines, defined


def _loads(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno


def _cached(name: str, make: Any) -> Any:
    path = CACHE_FOLDER / f"{name}.json"
    if not path.exists():
        CACHE_FOLDER.mkdir(exist_ok=True)
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


def _digest(*folders: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*")):
        if path.suffix in {".py", ".lua"} and "mutation" not in str(path.relative_to(ROOT)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _record_runs(runs: int, workers: int) -> dict[str, Any]:
    print(f"recording the lines that {runs} simulation runs execute", flush=True)
    size = -(-runs // workers)
    parts = [(begin, min(begin + size, runs)) for begin in range(0, runs, size)]
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    sizes: dict[str, int] = {}
    with ThreadPoolExecutor(workers) as pool:
        for part in pool.map(lambda each: simulate({"range": each}), parts):
            sizes |= part["sizes"]
            for file, lines in part["lines"].items():
                for line, bits in lines.items():
                    found[file][line] |= int(bits, 16)
    return {"lines": _written(found), "sizes": sizes}


def _written(found: dict[str, dict[str, int]]) -> Bits:
    return {file: {line: f"{bits:x}" for line, bits in by.items()} for file, by in found.items()}


def simulate(work: dict[str, Any]) -> Any:
    """Run `mutation.simulate` in a process.

    Raises:
        CalledProcessError: the process was killed, for example by its time limit.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTHONHASHSEED": "0"}
    child = subprocess.run(
        [sys.executable, "-m", "mutation.simulate"],
        input=json.dumps(work),
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        check=True,
    )
    return json.loads(child.stdout)


def _record_tests(workers: int) -> dict[str, Any]:
    print("recording the lines that each test executes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "MUTATION_RECORD": folder}
        command = ["-m", "pytest", "-q", "-n", str(workers), *SHORT, "-p", "mutation.recorder"]
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False)
        return merged(Path(folder))


def merged(folder: Path) -> dict[str, Any]:
    """Merge the records of the processes of a parallel run."""
    tests: list[tuple[str, float]] = []
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in sorted(folder.glob("*.json")):
        for test, record in json.loads(path.read_text()).items():
            for file, lines in record["lines"].items():
                for line in lines:
                    found[file][line] |= 1 << len(tests)
            tests.append((test, record["seconds"]))
    assert tests, "no test passed"
    return {"tests": tests, "lines": _written(found)}
