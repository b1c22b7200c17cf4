"""A pytest plugin that records which lines of the package each test runs, and its duration.

`mutation.reach` enables it with `-p mutation.recorder`. Each process of a parallel run writes one
file into the folder named by MUTATION_RECORD.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import coverage
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"

_coverage = coverage.Coverage(
    data_file=None, config_file=False, include=[f"{SOURCE}/*"], omit=[f"{SOURCE}/sim/*"]
)
_coverage.set_option("run:disable_warnings", ["trace-changed", "no-data-collected"])
_seconds: dict[str, float] = {}
_failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record one test. Restart coverage for each, because a test may set a trace function."""
    _coverage.start()
    _coverage.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _coverage.stop()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the duration of a test. A test that fails without a mutant is not used."""
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write the record."""
    data = _coverage.get_data()
    lines: dict[str, dict[str, list[int]]] = {}
    for file in data.measured_files():
        name = str(Path(file).relative_to(SOURCE))
        for line, tests in data.contexts_by_lineno(file).items():
            for test in tests:
                lines.setdefault(test, {}).setdefault(name, []).append(line)
    passed = {test: each for test, each in lines.items() if test in _seconds.keys() - _failed}
    record = {test: {"seconds": _seconds[test], "lines": each} for test, each in passed.items()}
    Path(os.environ["MUTATION_RECORD"], f"{os.getpid()}.json").write_text(json.dumps(record))
