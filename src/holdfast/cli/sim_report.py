"""The output of `holdfast sim run`: progress, the states reached, a run that breaks a promise."""

from __future__ import annotations

import re
import shlex
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.sim_output import print_line, without_bytes_literals, write_file
from holdfast.cli.sim_picture import draw, picture_of
from holdfast.cli.sweeping import Sweeping, chunks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from holdfast.sim.sweep import Found, Report

A_MOMENT = 3.0
"""Seconds between two lines of progress while a run is shrunk."""

A_WHILE = 10.0
"""Seconds between two lines of progress without a terminal."""


def follow(
    console: Console, sweeping: Sweeping, first: int, wanted: int | None, seconds: float | None
) -> None:
    """Run the simulations, and show progress: a bar on a terminal, else lines."""
    how_many = "simulations" if wanted is None else f"{wanted} simulations"
    how_long = "" if seconds is None else f" for {seconds:g} s"
    print_line(
        console, f"running {how_many}{how_long} starting at seed {first}, {sweeping.jobs} at a time"
    )
    bar = _bar(console) if console.is_terminal else None
    line_at = A_WHILE
    with bar or nullcontext():
        task = bar.add_task("", total=wanted or seconds) if bar else None
        limit = float("inf") if seconds is None else seconds
        for report in sweeping.run(chunks(first, wanted), limit):
            if bar is not None and task is not None:
                done = report.runs if wanted else min(report.seconds, seconds or 0.0)
                bar.update(task, completed=done, description=summary(report))
            elif report.seconds >= line_at:
                print_line(console, summary(report))
                line_at = report.seconds + A_WHILE


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}")
    return Progress(BarColumn(), words, TimeElapsedColumn(), console=console, transient=True)


def summary(report: Report) -> str:
    """Return the number of runs, and their rate."""
    rate = report.runs / report.seconds if report.seconds else 0.0
    return f"{report.runs} runs in {report.seconds:.1f} s, {rate:.0f} per second"


def print_reached(console: Console, report: Report) -> None:
    """Print how many runs reached each state."""
    from rich.table import Table
    from rich.text import Text

    from holdfast.sim.states import RARE_STATES, STATES
    from holdfast.sim.swarm import possible_pairs

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("runs", justify="right")
    table.add_column("that reached this state")
    for name in STATES + RARE_STATES:
        runs = report.reached[name]
        style = "" if runs else "yellow"
        table.add_row(Text(str(runs) if runs else "never", style), Text(name, style))
    console.print(table)
    print_line(console)
    possible = possible_pairs()
    print_line(
        console,
        f"pairs of features and faults that were switched on together: "
        f"{len(report.pairs & possible)} of {len(possible)} possible",
    )


def print_found(
    console: Console, found: Found, command: str, save: Path | None, seconds: float
) -> None:
    """Print and save a failed run, then shrink it; shrinking may be interrupted."""
    from holdfast.sim.shrinking import smallest

    name = re.sub(r"[^\w-]+", "-", f"holdfast-{found.check}-seed-{found.seed}")
    path = save or Path(f"{name}.json")
    detail = without_bytes_literals(found.detail)
    print_line(console, f"seed {found.seed} breaks {found.check}: {detail}", "bold red")
    print_line(console, f"settings: {_settings(found)}")
    print_line(console, f"to repeat this run: {command}")
    write_file(path, found.dump())
    print_line(
        console, f"saved in {path}; to draw it: holdfast sim replay {shlex.quote(str(path))}"
    )
    if not seconds:
        return
    print_line(console, f"searching for a smaller run for at most {seconds:g} s ...")
    small = smallest(found, seconds, progress=_Progress(console))
    write_file(path, small.dump())
    print_line(console, f"a smaller run, saved in {path}: {_size(small)}")
    print_line(console, f"settings: {_settings(small)}")
    print_line(console)
    draw(console, picture_of(small, small.run(), whole=False))


class _Progress:
    """Prints every few seconds how small a run has become."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line_at = time.monotonic() + A_MOMENT

    def __call__(self, found: Found) -> None:
        now = time.monotonic()
        if now >= self._line_at:
            self._line_at = now + A_MOMENT
            print_line(self._console, f"  so far: {_size(found)}; {_settings(found)}", "dim")


def _size(found: Found) -> str:
    settings, special = found.settings, sum(map(bool, found.choices))
    parts = [
        (settings.nodes, "server"),
        (settings.clients, "client"),
        (settings.clients * settings.tasks * settings.turns, "turn"),
        (special, "choice"),
    ]
    counted = [f"{number} {word}{'s' * (number != 1)}" for number, word in parts]
    return f"{', '.join(counted[:-1])}, {counted[-1]} other than 0"


def _settings(found: Found) -> str:
    """Return the settings that differ from the defaults, on one line."""
    return " ".join(f"{name}={value}" for name, value in found.settings.non_default().items())
