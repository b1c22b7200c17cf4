"""What `import holdfast` costs a program that only imports it, and `holdfast --version` a person.

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
"""What is run, and the milliseconds that it may take more than nothing does."""


def started(code: str) -> float:
    """Milliseconds that Python takes to start and run `code`."""
    began = time.perf_counter()
    subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL
    )
    return (time.perf_counter() - began) * 1000


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="What importing holdfast costs.")
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    took: dict[str, list[float]] = {"": [], **{name: [] for name in CODES}}
    for _ in range(rounds):
        took[""].append(started("pass"))
        for name, (code, _) in CODES.items():
            took[name].append(started(code))
    bare = statistics.median(took[""])
    print(f"\nbare Python         {bare:.1f} ms")
    missed = 0
    for name, (_, bar) in CODES.items():
        cost = statistics.median(took[name]) - bare
        missed += cost > bar
        holds = "holds" if cost <= bar else "MISSED"
        print(f"{name:<19} {cost:+.1f} ms, bar {bar:g} ms: {holds}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
