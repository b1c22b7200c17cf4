"""Benchmark: the time of `import holdfast` and of `holdfast --version`.

make bench, or: python bench/imports.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

CODES = {
    "import holdfast": ("import holdfast", 15.0),
    "holdfast --version": (
        "import sys; sys.argv[1:] = ['--version']; from holdfast.cli import main; main()",
        150.0,
    ),
}
"""The code, and its target in milliseconds above the start of Python."""


def run_time(code: str) -> float:
    """Return the milliseconds that Python takes to start and run `code`."""
    began = time.perf_counter()
    subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL
    )
    return (time.perf_counter() - began) * 1000


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="The time of importing holdfast.")
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    took: dict[str, list[float]] = {"": [], **{name: [] for name in CODES}}
    for _ in range(rounds):
        took[""].append(run_time("pass"))
        for name, (code, _) in CODES.items():
            took[name].append(run_time(code))
    bare = statistics.median(took[""])
    print(f"\nbare Python         {bare:.1f} ms")
    missed = 0
    for name, (_, target) in CODES.items():
        cost = statistics.median(took[name]) - bare
        missed += cost > target
        result = "met" if cost <= target else "MISSED"
        print(f"{name:<19} {cost:+.1f} ms, target {target:g} ms: {result}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
