"""`make mutation`: draw a sample of mutants, try each, list the survivors."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from queue import SimpleQueue
from statistics import median
from typing import TYPE_CHECKING

from mutation.accepted import ACCEPTED
from mutation.mutants import Mutant, draw, every_mutant
from mutation.reach import CACHE_FOLDER, Reach
from mutation.trial import Copy, Result, try_out

if TYPE_CHECKING:
    from collections.abc import Iterator

HOW = ("simulator", "tests", "time", "survived", "accepted")

Tried = list[tuple[Mutant, Result]]


def main() -> int:
    """Run the command; the status is 1 if there are survivors that are not accepted."""
    options = _options()
    mutants = every_mutant()
    sample = list(draw(mutants, options.sample, options.seed))
    title = f"{len(sample)} of {len(mutants)} mutants, seed {options.seed}"
    print(title, flush=True)
    results = CACHE_FOLDER / f"results-{options.runs}.json"
    cached: dict[str, list[object]] = json.loads(results.read_text()) if results.exists() else {}
    known = {key: Result(*each) for key, each in cached.items()}  # type: ignore[arg-type]
    again = {"survived"} if options.survivors else set(HOW) if options.fresh else set()
    accepted = {each[:-1]: each.reason for each in ACCEPTED}
    tried: Tried = []
    rest: list[Mutant] = []
    for mutant in sample:
        result = known.get(mutant.key)
        if mutant.name in accepted:
            tried.append((mutant, Result("accepted", accepted[mutant.name])))
        elif result is None or result.how in again:
            rest.append(mutant)
        else:
            tried.append((mutant, result))
    for mutant, result in _try_all(rest, options.runs, options.workers) if rest else ():
        tried.append((mutant, result))
        cached[mutant.key] = list(result)
        results.write_text(json.dumps(cached))
        print(f"{len(tried)}/{len(sample)} {_summary(mutant, result)}", flush=True)
    report = _report(tried, f"{title}, {len(sample) - len(rest)} not tried again")
    (CACHE_FOLDER / f"table-{options.sample}-{options.seed}.md").write_text(report)
    print(report)
    return int(any(result.how == "survived" for _, result in tried))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    parser.add_argument("--sample", type=int, default=300, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3000, help="simulation runs per mutant")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--fresh", action="store_true", help="try all but the accepted again")
    parser.add_argument("--survivors", action="store_true", help="try earlier survivors again")
    return parser.parse_args()


def _try_all(mutants: list[Mutant], runs: int, workers: int) -> Iterator[tuple[Mutant, Result]]:
    """Try mutants in parallel, each worker in a copy of the tree."""
    reach = Reach(runs, workers)
    copies: SimpleQueue[Copy] = SimpleQueue()

    def one(mutant: Mutant) -> tuple[Mutant, Result]:
        copy = copies.get()
        try:
            return mutant, try_out(mutant, reach, copy)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(workers) as pool, ExitStack() as stack:
        for _ in range(workers):
            copies.put(stack.enter_context(Copy()))
        running = [pool.submit(one, mutant) for mutant in mutants]
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for done in as_completed(running):
            yield done.result()


def _summary(mutant: Mutant, result: Result) -> str:
    place = f"{mutant.file}:{mutant.line}: {mutant.change.operator}"
    if result.how == "accepted":
        return f"accepted  {place}: {result.by}"
    runs = f" after {result.runs} runs" if result.runs else ""
    by = f" by {result.by}{runs}" if result.by else ""
    reached = f"reached by {result.reached} runs and {result.tests} tests"
    return f"{result.how:9} {place}{by} ({reached}; {result.seconds:.0f} s)"


def _report(tried: Tried, title: str) -> str:
    """Return the table of results, the checks that caught mutants, and the survivors."""
    lines = [f"{title}, {time.strftime('%Y-%m-%d')}", ""]
    lines += [
        "| | mutants | simulator | tests | time-out | survived | accepted |",
        "|---" * 7 + "|",
    ]
    for name in ("core", "scripts", ""):
        counted = Counter(result.how for mutant, result in tried if mutant.file.startswith(name))
        cells = [name or "all", counted.total(), *(counted[how] for how in HOW)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    runs: dict[str, list[int]] = {}
    for _, result in tried:
        if result.how == "simulator":
            runs.setdefault(result.by, []).append(result.runs)
    lines += ["", "| check | mutants | runs, at most: median | most |", "|---" * 4 + "|"]
    for check, needed in sorted(runs.items(), key=lambda each: -len(each[1])):
        lines.append(f"| {check} | {len(needed)} | {median(needed):.0f} | {max(needed)} |")
    for mutant, result in sorted(tried, key=lambda each: (each[0].file, each[0].line)):
        if result.how in {"survived", "accepted"}:
            function = f" in {mutant.change.place.function}" if mutant.change.place.function else ""
            lines += ["", f"{_summary(mutant, result)}{function}", mutant.diff]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
