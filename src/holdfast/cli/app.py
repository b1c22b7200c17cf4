"""The command `holdfast`. Each subcommand is a module that is imported only when it is used."""

from __future__ import annotations

import re
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import holdfast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

COMMANDS = {
    "run": "holdfast.cli.run:run",
    "ls": "holdfast.cli.locks:ls",
    "show": "holdfast.cli.locks:show",
    "break": "holdfast.cli.breaking:break_",
    "top": "holdfast.cli.top:top",
    "doctor": "holdfast.cli.doctor:doctor",
    "quorum": "holdfast.cli.quorum:quorum",
    "server": "holdfast.cli.server:server",
    "demo": "holdfast.cli.demo:demo",
    "sim": "holdfast.cli.sim:sim",
}
"""The function or the command group of each subcommand, in the order of `--help`."""

WITH_COMMAND = {"run"}
"""Subcommands that run another command: options after the first argument belong to that command."""


class WithCommand(TyperCommand):
    """A subcommand whose arguments are a name and a command."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002 - typer's signature
        """Return the words of the usage line."""
        return [self.options_metavar or "", "NAME", "[--]", "COMMAND..."]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's signature
        """Parse the arguments; show how to write them if one is missing."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if not error.message:  # a missing argument
                error.message = f"Write: {ctx.command_path} NAME -- COMMAND"
            raise


class Commands(TyperGroup):
    """A group that imports only the subcommand that is used."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - typer's signature
        """Return the options of the group itself."""
        params = super().get_params(ctx)
        _simplify(params)
        return params

    def list_commands(self, ctx: object) -> list[str]:  # noqa: ARG002 - typer's signature
        """Return the names of the subcommands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - typer's signature
        """Import a subcommand; None if it does not exist."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(module), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            settings = {"allow_interspersed_args": cmd_name not in WITH_COMMAND}
            kind = WithCommand if cmd_name in WITH_COMMAND else TyperCommand
            alone.command(cls=kind, context_settings=settings)(found)
            found = alone
        command = get_command(found)
        command.name = cmd_name
        for each in (command, *getattr(command, "commands", {}).values()):
            _simplify(each.params if ctx is None else each.get_params(ctx))
        return command


def _simplify(params: Iterable[Any]) -> None:
    """Show no `<bool>` after a flag, which takes no value.

    Show no type after an argument, and no braces around a required one in the usage line. Show no
    range such as `[0<=x<=1]`: on 80 columns it leaves too little width for the help. The error for
    a value out of range names the range.
    """
    for param in params:
        param._get_number_range_help_str = lambda: None  # noqa: SLF001 - typer has no setting for it
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None  # noqa: ARG005 - typer's signature
            param.get_usage_pieces = partial(_without_braces, param.get_usage_pieces)


def _without_braces(usage_pieces: Callable[[Any], list[str]], ctx: object) -> list[str]:
    return [re.sub(r"[{}]", "", piece) for piece in usage_pieces(ctx)]


app = typer.Typer(
    name="holdfast",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {holdfast.__version__}")
        raise typer.Exit


@app.callback()
def _holdfast(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda value: _print_version(wanted=value),
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Distributed locks on Redis and Valkey, whose leases report when they are lost.

    Example: `holdfast run nightly-backup -- ./backup.sh`
    """
