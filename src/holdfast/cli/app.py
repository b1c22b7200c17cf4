"""The command `holdfast`. Each of its commands is a module, imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import holdfast

COMMANDS = {
    "run": "holdfast.cli.run:run",
    "ls": "holdfast.cli.locks:ls",
    "show": "holdfast.cli.locks:show",
    "break": "holdfast.cli.locks:break_",
    "top": "holdfast.cli.top:top",
    "doctor": "holdfast.cli.doctor:doctor",
    "quorum": "holdfast.cli.quorum:quorum",
    "server": "holdfast.cli.server:server",
    "demo": "holdfast.cli.demo:demo",
    "sim": "holdfast.cli.sim:sim",
}
"""In the order of help: where each is, a function or a family of commands."""

TAKES_A_COMMAND = {"run"}
"""What begins with a dash after the first word is not for us."""


class Commands(TyperGroup):
    """The commands, none of which is imported for the sake of another."""

    def list_commands(self, ctx: object) -> list[str]:  # noqa: ARG002 - typer's
        """Say which there are."""
        return list(COMMANDS)

    def get_command(self, ctx: object, cmd_name: str) -> Any:  # noqa: ANN401, ARG002 - typer's
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(module), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            settings = {"allow_interspersed_args": cmd_name not in TAKES_A_COMMAND}
            alone.command(context_settings=settings)(found)
            found = alone
        command = get_command(found)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="holdfast",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


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
