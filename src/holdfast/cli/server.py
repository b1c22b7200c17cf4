"""`holdfast server`: status of the embedded server, and stopping it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.console import format_seconds, open_console, sanitized
from holdfast.cli.servers import AsJson, exit_if_unreachable, print_stderr

if TYPE_CHECKING:
    from holdfast.embedded.control import Status
    from holdfast.overview.views import LockView

NOT_RUNNING = 1
"""Exit status of `status` if no embedded server is running."""

IN_USE = 1
"""Exit status of `stop` if the server is in use and was not stopped."""

NAMED_MAX = 5
"""Number of locks or keys that are named; the rest is only counted."""

server = typer.Typer(
    add_completion=False,
    help="Inspect or stop the embedded server.\n\nExample: `holdfast server status`\n\n"
    'It starts automatically if no URL is given, and with `Client("local")` or `--local`.',
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@server.command()
def status(*, as_json: AsJson = False) -> None:
    """Show whether the server is running, and its use. Does not start it.

    Example: `holdfast server status --json`

    Exit status:

    * 0: it is running

    * 1: it is not running

    * 3: it does not reply
    """
    from holdfast.embedded import control, socket_path

    with exit_if_unreachable():
        found = control.status()
        locks = [] if found is None else _locks()
        path = socket_path()
    if as_json:
        typer.echo(json.dumps(_as_data(found, locks, path), indent=2))
    elif found is None:
        print_stderr(
            f"no embedded server is running (its socket would be {path}): start it with holdfast "
            "run --local"
        )
    else:
        _print_status(found, locks)
    raise typer.Exit(NOT_RUNNING if found is None else 0)


@server.command()
def stop(
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Stop the server. Asks for confirmation if it is in use.

    Example: `holdfast server stop`

    The server stores nothing on disk, so locks that are held are lost. Their holders detect this
    when they renew. Until then another client may start a new server and acquire the lock.

    Exit status:

    * 0: no server is running any more

    * 1: it is in use, and you declined

    * 2: wrong usage, or it is in use and there is neither a terminal nor `--yes`

    * 3: it does not reply
    """
    from holdfast.embedded import control

    with exit_if_unreachable():
        if control.status() is None:
            print_stderr("no embedded server is running")
            return
        if not control.stop(force=yes):
            _confirm()
            control.stop(force=True)
    open_console().print("the embedded server was stopped")


def _confirm() -> None:
    from holdfast.embedded import control

    found, keys = control.status(), control.keys_in_use()
    locks = [] if found is None else _locks()
    uses = [_counted(found.connections, "connection")] if found and found.connections else []
    if any(lock.state == "held" for lock in locks):
        uses.append(_named(locks))
    elif keys:
        named = ", ".join(
            sanitized(key.decode("utf-8", "surrogateescape")) for key in keys[:NAMED_MAX]
        )
        more = f" and {len(keys) - NAMED_MAX} more" if len(keys) > NAMED_MAX else ""
        uses.append(f"{_counted(len(keys), 'key')} would be lost: {named}{more}")
    print_stderr(f"the server is in use: {'; '.join(uses) or 'its last client has just left'}")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print_stderr("there is no terminal to ask for confirmation: give --yes to stop the server")
        raise typer.Exit(2)
    if not typer.confirm("Stop it anyway?", err=True):
        print_stderr("the server was not stopped")
        raise typer.Exit(IN_USE)


def _locks() -> list[LockView]:
    """Return the locks on the server that are held or have waiters."""
    from holdfast.embedded import socket_path
    from holdfast.overview.scan import Overview

    overview = Overview(f"unix://{socket_path()}")
    try:
        return sorted(overview.survey(lambda _: True).locks, key=lambda lock: lock.display_name)
    finally:
        overview.close()


def _named(locks: list[LockView]) -> str:
    held = [sanitized(lock.display_name) for lock in locks if lock.state == "held"]
    if not held:
        return "no lock is held"
    more = f" and {len(held) - NAMED_MAX} more" if len(held) > NAMED_MAX else ""
    verb = "is" if len(held) == 1 else "are"
    return f"{_counted(len(held), 'lock')} {verb} held: {', '.join(held[:NAMED_MAX])}{more}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _as_data(found: Status | None, locks: list[LockView], path: str) -> dict[str, Any]:
    if found is None:
        return {"running": False, "socket": path}
    facts = {**found._asdict(), "folder": str(found.folder), "socket": path}
    facts["monitor"] = facts.pop("guardian")
    held = sum(lock.state == "held" for lock in locks)
    return {"running": True, **facts, "held": held, "waiting": sum(each.waiting for each in locks)}


def _print_status(found: Status, locks: list[LockView]) -> None:
    from rich.table import Table
    from rich.text import Text

    waiting = sum(lock.waiting for lock in locks)
    monitor = "" if found.guardian is None else f", monitor: process {found.guardian}"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in (
        ("server", found.version),
        ("pid", f"{found.pid}{monitor}"),
        ("socket", str(found.socket)),
        ("folder", str(found.folder)),
        ("up for", format_seconds(found.uptime)),
        ("used by", _counted(found.connections, "connection")),
        ("locks", f"{_named(locks)}; {_counted(waiting, 'waiter')}"),
    ):
        table.add_row(name, Text(sanitized(words)))
    open_console().print(table)
