"""`holdfast quorum`: prepare the servers of a quorum."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console, plain
from holdfast.cli.servers import LongestTtl, complain, separated, unasked

if TYPE_CHECKING:
    from holdfast.quorum_init import Examined, Plan

REFUSED = 1
"""The status when the servers were left as they are."""

quorum = typer.Typer(
    add_completion=False,
    help="Prepare the servers of a quorum.\n\n"
    "Example: `holdfast quorum init redis://a:6379 redis://b:6379 redis://c:6379`",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@quorum.callback()
def _family() -> None:
    """Keep `init` a subcommand: without a callback, Typer merges a single command into `quorum`."""


@quorum.command()
def init(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="Each node of a quorum; or sentinels (redis+sentinel://…/service). Without one: "
            "HOLDFAST_URL.",
            show_default=False,
        ),
    ] = None,
    *,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", "-u", metavar="URL", help="The same, as an option."),
    ] = None,
    longest_ttl: LongestTtl = 60.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Declare new servers fit to grant locks at once. Checks them first, and asks.

    A server that has just started may have lost locks, and grants none for `--longest-ttl`. New
    servers have lost nothing, but only you know that they are new: this assumes that none of them
    granted a lock in that time. It refuses if a server has locks, is a replica, or is given twice.

    Example: `holdfast quorum init redis://a:6379 redis://b:6379 redis://c:6379`

    The status is 0 if all are fit, 1 if they were left as they are, 2 if there is no terminal to
    ask on and no `--yes`, 3 if a server does not answer.
    """
    from holdfast.errors import ConfigurationError
    from holdfast.quorum_init import declare, examine

    named = separated([*(urls or ()), *(url or ())])
    given = named or os.environ.get("HOLDFAST_URL", "").split()
    if not given:
        raise typer.BadParameter("give the URL of each server, e.g. redis://localhost:6379/0")
    with unasked():
        try:
            plan = examine(given, longest_ttl)
        except ConfigurationError as error:
            raise typer.BadParameter(plain(str(error))) from None
        for server in plan.servers:
            open_console().print(f"{plain(server.node)}: {_state(server)}", soft_wrap=True)
        if plan.problems:
            for problem in plan.problems:
                complain(problem)
            raise typer.Exit(REFUSED)
        if plan.unfit:
            _ask(plan, yes=yes)
            declare(plan)
    open_console().print(f"{_counted(plan)} may grant locks")


def _state(server: Examined) -> str:
    if server.is_fit:
        return "fit already"
    if not server.found.home:
        return "new"
    return "was used before, and has started or was promoted since"


def _ask(plan: Plan, *, yes: bool) -> None:
    for warning in plan.warnings:
        complain(f"warning: {warning}")
    complain(
        f"this assumes: no lock was granted in the last {plan.assumed:g} s, neither by these "
        "servers nor by others in their place. Otherwise two clients could hold a lock at once"
    )
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        complain("there is no terminal to ask on: give --yes if the assumption holds")
        raise typer.Exit(2)
    if not typer.confirm(f"Declare {_counted(plan)} fit to grant locks now?", err=True):
        complain("nothing was changed")
        raise typer.Exit(REFUSED)


def _counted(plan: Plan) -> str:
    return "this server" if len(plan.servers) == 1 else f"these {len(plan.servers)} servers"
