"""`holdfast sim`: the family of commands that run simulations.

The commands import the simulator when they run, so that `--help` is quick.
"""

from __future__ import annotations

import typer

from holdfast.cli.sim_hazards import hazards
from holdfast.cli.sim_replay import replay
from holdfast.cli.sim_run import run

sim = typer.Typer(add_completion=False, rich_markup_mode="markdown")
for each in (hazards, run, replay):
    sim.command()(each)


@sim.callback(invoke_without_command=True)
def _sim(ctx: typer.Context) -> None:
    """Watch locks in simulated worlds, where everything that can go wrong does.

    Example: `holdfast sim hazards`
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
