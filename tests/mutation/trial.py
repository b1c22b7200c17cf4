"""One mutant against the simulator, and then against the tests."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kit.runtimes import living_processes_of
from mutation.reach import ROOT, simulate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from mutation.mutants import Mutant
    from mutation.reach import Reach

SHORTER = 0.8
"""The part of the runs that is tried before the tests, the shortest first."""

MOST_TESTS, MOST_SECONDS = 2000, 120.0
"""Limits for the tests of one mutant: their number, and the sum of their recorded seconds."""

MEMORY_BYTES = 4 << 30
"""The memory limit of a test process: a mutant may allocate without end."""

NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".mutation", "__pycache__", ".*_cache")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\S+\[.*?\]|::\S+)?)(?: - |$)", re.MULTILINE)


class Result(NamedTuple):
    """What caught a mutant."""

    how: str
    """`simulator`, `tests`, `time`, `survived` or `accepted`."""
    by: str = ""
    """The check; the test, or `import` if no test could start; the reason if it is accepted."""
    runs: int = 0
    """A sweep of this many runs from seed 0 contains one that fails; 0 if none failed."""
    reached: int = 0
    """The number of runs that reach it."""
    tests: int = 0
    """The number of tests that reach it."""
    seconds: float = 0.0


def try_out(mutant: Mutant, reach: Reach, copy: Copy) -> Result:
    """Try the runs that reach the mutant, then saved runs, then tests; stop at a failure.

    The longest runs come last. They take most of the time, and detect few mutants that neither a
    shorter run nor a test detects.
    """
    began = time.monotonic()
    seeds, tests = reach.seeds(mutant), reach.tests(mutant)
    shorter = round(len(seeds) * SHORTER)
    result = _simulated(mutant, seeds[:shorter], replay=True)
    if result.how == "survived":
        result = _tested(mutant, tests, copy)
    if result.how == "survived":
        result = _simulated(mutant, seeds[shorter:], replay=False)
    seconds = time.monotonic() - began
    return result._replace(reached=len(seeds), tests=len(tests), seconds=round(seconds, 1))


def _simulated(mutant: Mutant, seeds: list[int], *, replay: bool) -> Result:
    """Try runs with these seeds, and with `replay` the saved runs."""
    work: dict[str, object] = {"file": mutant.file, "old": mutant.old, "new": mutant.new}
    work |= {"seeds": seeds, "replay": replay}
    try:
        found = simulate(work)
    except subprocess.CalledProcessError as error:
        if error.returncode not in {-signal.SIGVTALRM, -signal.SIGXCPU}:
            raise
        return Result("time", "simulator")
    if found.get("saved"):  # the suite replays these too
        return Result("tests", f"tests/saved_runs/{found['saved']}.json")
    if found["check"]:
        return Result("simulator", found["check"], runs=found["runs"])
    return Result("survived")


def _tested(mutant: Mutant, tests: list[tuple[str, float]], copy: Copy) -> Result:
    """Run the first tests of the list.

    A test catches the mutant if it fails twice with the mutant and passes without it. A timeout
    also counts. So does a failure without a test name, such as an import error, if all tests pass
    without the mutant.
    """
    chosen: list[str] = []
    total = 0.0
    for test, seconds in tests[:MOST_TESTS]:
        total += seconds
        if chosen and total > MOST_SECONDS:
            break
        chosen.append(test)
    while chosen:
        with copy.changed(mutant):
            failed = copy.test(chosen, limit=60 + 10 * total)
        if failed == "":
            break
        if failed not in chosen:
            passes = copy.test(chosen, limit=60 + 10 * total) == ""
            detected = Result("time", "tests") if failed is None else Result("tests", failed)
            return detected if passes else Result("survived")
        with copy.changed(mutant):
            fails_again = copy.test([failed], limit=300) != ""
        if fails_again and copy.test([failed], limit=300) == "":
            return Result("tests", failed)
        chosen.remove(failed)
    return Result("survived")


class Copy:
    """A copy of the tree, in which tests run with a mutant.

    The processes that tests start import the mutant too.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hfm"))
        self._child: subprocess.Popen[str] | None = None
        self._tree = self.folder / "tree"
        shutil.copytree(ROOT, self._tree, ignore=NOT_COPIED)
        path = f"{self._tree / 'src'}{os.pathsep}{self._tree / 'tests'}"
        self._environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.folder)}
        where = [sys.executable, "-c", "import holdfast; print(holdfast.__file__)"]
        imported = subprocess.run(
            where, env=self._environment, stdout=subprocess.PIPE, text=True, check=True
        )
        assert imported.stdout.startswith(str(self._tree)), "the copy is not what is imported"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_processes()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Write the mutant into the copy, and restore the file afterwards."""
        path = self._tree / "src" / "holdfast" / mutant.file
        try:
            self._write(path, mutant.new)
            yield
        finally:
            self._write(path, mutant.old)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        if path.suffix == ".py":  # its compiled file is matched by seconds and size
            Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def test(self, tests: list[str], limit: float) -> str | None:
        """Run some tests; return the first that fails, or '', or None if they take too long."""
        options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:randomly", "-p", "no:cacheprovider"]
        child = self._child = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self._tree,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        resource.prlimit(child.pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        try:
            output, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._end_processes()
        if child.returncode in {0, 5}:  # 5: each was deselected
            return ""
        found = FAILED.search(output)
        return found[1] if found else "import"

    def _end_processes(self) -> None:
        """Kill the processes that tests left: their process group, and servers in the folder."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None
        for pid in living_processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
