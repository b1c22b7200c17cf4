"""`holdfast sim hazards`: the ways in which locks go wrong, each beside what holdfast does."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console
from holdfast.cli.sim_output import PageFile, print_line, write_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from holdfast.sim.hazards import Hazard, Side
    from holdfast.sim.timeline import Timeline

LEAST = 40
"""Columns for an outcome, however narrow the terminal."""

SIDE_BY_SIDE = 130
"""Columns from which on two pictures stand beside each other."""


def hazards(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Only these.", show_default=False),
    ] = None,
    *,
    page: PageFile = None,
    only_list: Annotated[bool, typer.Option("--list", help="Only tell their names.")] = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Draw all, not only those that are named.")
    ] = False,
) -> None:
    """Play the ways in which locks go wrong, each in the classic way and with holdfast.

    Example: `holdfast sim hazards --page hazards.html`
    """
    from holdfast.sim.hazards import GALLERY

    console = open_console()
    chosen = [_hazard(name, GALLERY) for name in names] if names else list(GALLERY)
    if only_list:
        width = max(len(hazard.name) for hazard in chosen)
        for hazard in chosen:
            print_line(console, f"{hazard.name:<{width}}  {hazard.title}")
        return
    shown = [(hazard, hazard.run()) for hazard in chosen]
    as_told = 0
    for hazard, both in shown:
        as_told += bool(both.broken.violated) and not both.holdfast.violated
        _print_hazard(console, hazard, both.broken, both.holdfast)
        if pictures or names:
            _draw_both(console, both.broken.timeline, both.holdfast.timeline)
    if page is not None:
        from holdfast.sim.pictures.page import draw_page

        drawn = [each.timeline for _, both in shown for each in (both.broken, both.holdfast)]
        write_file(page, draw_page(drawn, "How locks go wrong, and what holdfast does"))
        print_line(console, f"the pictures are in {page}")
    if as_told < len(shown):
        print_line(
            console, f"{len(shown) - as_told} of {len(shown)} did not come out as told", "bold red"
        )
        raise typer.Exit(1)
    ways = "the classic way" if len(shown) == 1 else f"each of {len(shown)} classic ways"
    print_line(console, f"{ways} went wrong; with holdfast the resource was never harmed")
    if together := sum(bool(both.holdfast.together) for _, both in shown):
        print_line(
            console,
            f"in {together} of {len(shown)} two clients did hold the lock at once, with holdfast "
            "too: there the fence protected the resource",
        )


def _hazard(name: str, gallery: Sequence[Hazard]) -> Hazard:
    for hazard in gallery:
        if hazard.name == name.replace("-", "_"):
            return hazard
    known = ", ".join(hazard.name for hazard in gallery)
    raise typer.BadParameter(f"no hazard is called {name!r}; there are {known}")


def _print_hazard(console: Console, hazard: Hazard, classic: Side, fenced: Side) -> None:
    from rich.padding import Padding
    from rich.text import Text

    print_line(console, hazard.title, "bold")
    print_line(console, f"  {hazard.name}", "dim")
    console.print(Padding(Text(hazard.story), (0, 0, 0, 2)))
    style = "red" if fenced.violated else "yellow" if fenced.together else "green"
    for way, side, colour in (
        ("the classic way: ", classic, "red" if classic.violated else ""),
        ("with holdfast:   ", fenced, style),
    ):
        indent = 2 + len(way)
        lines = textwrap.wrap(_outcome_of(side), max(LEAST, console.width - indent))
        print_line(console, f"  {way}{lines[0]}", colour)
        for line in lines[1:]:
            print_line(console, " " * indent + line, colour)
    print_line(console)


def _outcome_of(side: Side) -> str:
    refused = f"the fence refused {side.refused} late write{'s' * (side.refused > 1)}"
    if side.violated or not side.refused:
        return side.violated or "nothing went wrong"
    if side.together:
        who = " and ".join(side.together)
        who = who[0].upper() + who[1:]
        return f"{who} did hold the lock at the same time; {refused} and protected the resource"
    return f"nothing went wrong; {refused}"


def _draw_both(console: Console, left: Timeline, right: Timeline) -> None:
    from rich.table import Table

    from holdfast.sim.pictures.text import draw_text

    if console.width >= SIDE_BY_SIDE:
        beside = Table.grid(padding=(0, 3, 0, 0))
        width = (console.width - 3) // 2
        beside.add_row(draw_text(left, width), draw_text(right, width))
        console.print(beside)
        print_line(console)
        return
    for each in (left, right):
        console.print(draw_text(each, console.width))
        print_line(console)
