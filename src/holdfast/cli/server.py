"""`holdfast server`: the embedded server, which starts and ends by itself."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.console import open_console, plain
from holdfast.cli.locks import AsJson, seconds
from holdfast.cli.servers import complain, unasked

if TYPE_CHECKING:
    from holdfast.embedded.tending import Status
    from holdfast.overview.views import LockView

NONE_RUNS = 1
"""The status when there is no server to tell of."""

IN_USE = 1
"""The status when the server was left alone because it is in use."""

TOLD = 5
"""Locks that are named before the rest is counted."""

server = typer.Typer(
    add_completion=False,
    help="Inspect and end the embedded server, which starts by itself if no URL is given, or for "
    '`Client("local")` and `--local`.\n\nExample: `holdfast server status`',
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@server.command()
def status(*, as_json: AsJson = False) -> None:
    """Tell whether the server runs, where, since when, and who uses it. Starts none.

    Example: `holdfast server status --json`

    The status is 0 if it runs, 1 if it does not, 3 if it does not answer.
    """
    from holdfast.embedded import socket_path, tending

    with unasked():
        found = tending.status()
        locks = [] if found is None else _locks()
        path = socket_path()
    if as_json:
        typer.echo(json.dumps(_as_data(found, locks, path), indent=2))
    elif found is None:
        complain(f"no embedded server runs (it would be at {path})")
    else:
        _tell(found, locks)
    raise typer.Exit(NONE_RUNS if found is None else 0)


@server.command()
def stop(
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """End the server. Asks first if somebody uses it.

    Example: `holdfast server stop`

    It keeps nothing on disk: locks that are held are forgotten. Their holders learn of it when
    they renew; whoever asks meanwhile starts a new server, and gets the lock.

    The status is 0 if none runs any more, 1 if it is in use and was left alone, 2 if it is in use
    and there is no terminal to ask on and no `--yes`, 3 if it does not answer.
    """
    from holdfast.embedded import tending

    with unasked():
        if tending.status() is None:
            complain("no embedded server runs")
            return
        if not tending.stop(even_if_used=yes):
            _ask()
            tending.stop(even_if_used=True)
    open_console().print("stopped")


def _ask() -> None:
    from holdfast.embedded import tending

    found, keys = tending.status(), tending.kept()
    locks = [] if found is None else _locks()
    uses = [_counted(found.connections, "connection")] if found and found.connections else []
    if any(lock.state == "held" for lock in locks):
        uses.append(_named(locks))
    elif keys:
        named = ", ".join(plain(key.decode("utf-8", "surrogateescape")) for key in keys[:TOLD])
        more = f" and {len(keys) - TOLD} more" if len(keys) > TOLD else ""
        uses.append(f"{_counted(len(keys), 'key')} would be lost: {named}{more}")
    complain(f"it is in use: {'; '.join(uses) or 'it was, a moment ago'}")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        complain("there is no terminal to ask on: give --yes to end it all the same")
        raise typer.Exit(2)
    if not typer.confirm("End it all the same?", err=True):
        complain("left alone")
        raise typer.Exit(IN_USE)


def _locks() -> list[LockView]:
    """The locks on it that are held, or waited for."""
    from holdfast.embedded import socket_path
    from holdfast.overview.looking import Overview

    overview = Overview(f"unix://{socket_path()}")
    try:
        return sorted(overview.survey(lambda _: True).locks, key=lambda lock: lock.shown)
    finally:
        overview.close()


def _named(locks: list[LockView]) -> str:
    held = [plain(lock.shown) for lock in locks if lock.state == "held"]
    if not held:
        return "no lock is held"
    more = f" and {len(held) - TOLD} more" if len(held) > TOLD else ""
    verb = "is" if len(held) == 1 else "are"
    return f"{_counted(len(held), 'lock')} {verb} held: {', '.join(held[:TOLD])}{more}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _as_data(found: Status | None, locks: list[LockView], path: str) -> dict[str, Any]:
    if found is None:
        return {"running": False, "socket": path}
    facts = {**found._asdict(), "folder": str(found.folder), "socket": path}
    held = sum(lock.state == "held" for lock in locks)
    return {"running": True, **facts, "held": held, "waiting": sum(each.waiting for each in locks)}


def _tell(found: Status, locks: list[LockView]) -> None:
    from rich.table import Table
    from rich.text import Text

    waiting = sum(lock.waiting for lock in locks)
    guardian = "" if found.guardian is None else f", watched by {found.guardian}"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in (
        ("server", found.version),
        ("pid", f"{found.pid}{guardian}"),
        ("socket", str(found.socket)),
        ("folder", str(found.folder)),
        ("up for", seconds(found.uptime)),
        ("used by", _counted(found.connections, "connection")),
        ("locks", f"{_named(locks)}; {waiting or 'nobody'} waiting"),
    ):
        table.add_row(name, Text(plain(words)))
    open_console().print(table)
