"""What `import holdfast` costs a program that only imports it.

make bench, or: python bench/imports.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

BAR_MS = 15.0


def started(code: str) -> float:
    """Milliseconds that Python takes to start and run `code`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter
    return (time.perf_counter() - began) * 1000


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="What importing holdfast costs.")
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    bare, ours = [], []
    for _ in range(rounds):
        bare.append(started("pass"))
        ours.append(started("import holdfast"))
    cost = statistics.median(ours) - statistics.median(bare)
    print(
        f"\nimport     {cost:+.1f} ms over bare Python ({statistics.median(bare):.1f} ms), ", end=""
    )
    print(f"bar {BAR_MS:g} ms: {'holds' if cost <= BAR_MS else 'MISSED'}")
    return 0 if cost <= BAR_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())
