"""The process that simulates a mutant: it changes a text of the package, and reports what fails.

`kit/mutants.py` starts it. It imports the package only after the change.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import FileLoader


def mutate(path: Path, old: bytes, new: bytes) -> None:
    """Replace a text in a file of the package when this process reads the file."""
    compiled = cache_from_source(str(path)) if path.suffix == ".py" else None
    read = SourceFileLoader.get_data

    def get_data(loader: FileLoader, name: str) -> bytes:
        if name == compiled:
            raise FileNotFoundError(name)
        text = read(loader, name)
        return text.replace(old, new) if Path(name) == path else text

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign, assignment]  # intended
    sys.dont_write_bytecode = True


def run(work: dict[str, Any]) -> dict[str, Any]:
    """Load the package with a change, and return the first check that fails in its runs."""
    sys.path.insert(0, work["source"])
    if work["old"]:
        path = Path(work["source"], "holdfast", work["file"])
        mutate(path, work["old"].encode(), work["new"].encode())

    from dataclasses import replace  # noqa: PLC0415 - after the change

    from holdfast.sim.choices import RandomChoices  # noqa: PLC0415 - the same
    from holdfast.sim.run import simulate  # noqa: PLC0415 - the same
    from holdfast.sim.settings import CALM, STORMY  # noqa: PLC0415 - the same

    if "saved" in work:
        from holdfast.sim import sweep  # noqa: PLC0415 - the same

        outcome = sweep.Found.load(work["saved"]).run()
        return {"check": outcome.check, "seed": -1, "runs": 1, "detail": outcome.detail}
    from holdfast.sim.swarm import draw  # noqa: PLC0415 - the same

    changes = dict(work["settings"])
    drawn = changes.pop("drawn", False)
    base = CALM if changes.pop("calm", False) else STORMY
    for seed in range(work["seeds"]):
        settings = draw(seed, changes) if drawn else replace(base, **changes)
        outcome = simulate(settings, RandomChoices(seed))
        if outcome.check:
            runs = seed + 1
            return {"check": outcome.check, "seed": seed, "runs": runs, "detail": outcome.detail}
    return {"check": "", "seed": -1, "runs": work["seeds"], "detail": ""}
