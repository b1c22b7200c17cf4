"""`holdfast quorum`: prepare the servers of a quorum."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import format_seconds, open_console, sanitized
from holdfast.cli.servers import LongestTtl, exit_if_unreachable, print_stderr, split_urls

if TYPE_CHECKING:
    from holdfast.quorum_init import Examined, Plan

REFUSED = 1
"""Exit status if nothing was changed."""

quorum = typer.Typer(
    add_completion=False,
    help="Prepare the servers of a quorum.\n\n"
    "Example: `holdfast quorum init redis://a:6379 redis://b:6379 redis://c:6379`",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@quorum.callback()
def _group() -> None:
    """Keep `init` a subcommand: without a callback, Typer merges a single command into `quorum`."""


@quorum.command()
def init(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="Each node of a quorum, or redis+sentinel://…/service. Default: HOLDFAST_URL.",
            show_default=False,
        ),
    ] = None,
    *,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", "-u", metavar="URL", help="The same as the argument."),
    ] = None,
    longest_ttl: LongestTtl = 60.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Let new servers grant locks at once, after checks and a confirmation.

    Example: `holdfast quorum init redis://a:6379 redis://b:6379 redis://c:6379`

    A server that has just started may have lost locks, so it grants none for `--longest-ttl`
    seconds. New servers have lost nothing, but holdfast cannot detect that they are new. This
    command assumes that none of them has granted a lock in that time. It fails if a server has
    locks, is a replica, or is given twice.

    Exit status:

    * 0: all servers may grant locks

    * 1: a check failed or you declined, and nothing was changed

    * 2: wrong usage (two servers, or an address given twice), or neither a terminal nor `--yes`

    * 3: a server did not reply
    """
    from holdfast.errors import ConfigurationError
    from holdfast.quorum_init import end_quarantine, examine

    named = split_urls([*(urls or ()), *(url or ())])
    given = named or os.environ.get("HOLDFAST_URL", "").split()
    if not given:
        raise typer.BadParameter("give the URL of each server, e.g. redis://localhost:6379/0")
    with exit_if_unreachable():
        try:
            plan = examine(given, longest_ttl)
        except ConfigurationError as error:
            raise typer.BadParameter(sanitized(str(error))) from None
        for server in plan.servers:
            open_console().print(f"{sanitized(server.node)}: {_state(server)}", soft_wrap=True)
        if plan.problems:
            for problem in plan.problems:
                print_stderr(problem)
            raise typer.Exit(REFUSED)
        if plan.in_quarantine:
            _confirm(plan, yes=yes)
            end_quarantine(plan)
    open_console().print(f"{_counted(plan)} may grant locks")


def _state(server: Examined) -> str:
    if server.may_grant:
        return "may grant locks already"
    if not server.status.restart_marker:
        return "new"
    if server.status.restart_marker == server.status.mark:
        return f"in quarantine for another {format_seconds(server.status.quarantine_left)}"
    return "restarted or promoted since a client last used it"


def _confirm(plan: Plan, *, yes: bool) -> None:
    for warning in plan.warnings:
        print_stderr(f"warning: {warning}")
    print_stderr(
        f"assumption: no lock was granted in the last {plan.assumed:g} s, neither by these "
        "servers nor by servers that they replace; otherwise two clients could hold the same lock"
    )
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print_stderr(
            "there is no terminal to ask for confirmation: give --yes if the assumption is true"
        )
        raise typer.Exit(2)
    if not typer.confirm(f"Let {_counted(plan)} grant locks now?", err=True):
        print_stderr("nothing was changed")
        raise typer.Exit(REFUSED)


def _counted(plan: Plan) -> str:
    return "this server" if len(plan.servers) == 1 else f"these {len(plan.servers)} servers"
