"""The command `holdfast` and its families of commands."""

from __future__ import annotations

from typing import Annotated

import typer

import holdfast
from holdfast.cli.doctor import doctor
from holdfast.cli.run import run
from holdfast.cli.sim import sim

app = typer.Typer(
    name="holdfast",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(sim, name="sim")
app.command()(doctor)
app.command(context_settings={"allow_interspersed_args": False})(run)


def _tell_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {holdfast.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _holdfast(
    ctx: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback does it
        bool,
        typer.Option(
            "--version",
            callback=lambda value: _tell_version(wanted=value),
            is_eager=True,
            help="Tell the version.",
        ),
    ] = False,
) -> None:
    """Distributed locks on Redis and Valkey that tell their holder the truth."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
