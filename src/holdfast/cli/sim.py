"""`holdfast sim`: the commands that run simulations.

They import the simulator only when they run, so that `--help` is fast.
"""

from __future__ import annotations

import typer

from holdfast.cli.sim_hazards import hazards
from holdfast.cli.sim_replay import replay
from holdfast.cli.sim_run import run

sim = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown")
for each in (hazards, run, replay):
    sim.command()(each)


@sim.callback()
def _sim() -> None:
    """Run the lock in a simulation, with injected faults.

    Example: `holdfast sim hazards`
    """
