"""`holdfast sim hazards`: known ways in which locks fail, each compared with holdfast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console
from holdfast.cli.sim_output import PageFile, print_line, print_wrapped, write_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from holdfast.sim.hazards import Hazard, Side
    from holdfast.sim.timeline import Timeline

SIDE_BY_SIDE = 130
"""The number of columns from which two pictures are drawn side by side."""


def hazards(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Run only these hazards.", show_default=False),
    ] = None,
    *,
    page: PageFile = None,
    only_list: Annotated[bool, typer.Option("--list", help="List their names only.")] = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Draw all pictures, not only those of named hazards.")
    ] = False,
) -> None:
    """Play thirteen ways in which locks fail, without and with holdfast.

    Example: `holdfast sim hazards --page hazards.html`

    Exit status:

    * 0: each ended as described: the classic recipe failed, and with holdfast the resource was
    never corrupted

    * 1: a hazard did not end as described

    * 2: wrong usage, or no hazard has this name
    """
    from holdfast.sim.hazards import HAZARDS

    console = open_console()
    chosen = [_hazard(name, HAZARDS) for name in names] if names else list(HAZARDS)
    if only_list:
        width = max(len(hazard.name) for hazard in chosen)
        for hazard in chosen:
            print_line(console, f"{hazard.name:<{width}}  {hazard.title}")
        return
    shown = [(hazard, hazard.run()) for hazard in chosen]
    as_described = 0
    for hazard, both in shown:
        as_described += bool(both.broken.violated) and not both.holdfast.violated
        _print_hazard(console, hazard, both.broken, both.holdfast)
        if pictures or names:
            _draw_both(console, both.broken.timeline, both.holdfast.timeline)
    if page is not None:
        from holdfast.sim.pictures.page import draw_page

        drawn = [each.timeline for _, both in shown for each in (both.broken, both.holdfast)]
        write_file(page, draw_page(drawn, "How locks fail, and what holdfast does"))
        print_line(console, f"the pictures are in {page}")
    if as_described < len(shown):
        failed = len(shown) - as_described
        print_line(console, f"{failed} of {len(shown)} did not end as described", "bold red")
        raise typer.Exit(1)
    counted = {1: "the classic recipe", 2: "both classic recipes"}
    ways = counted.get(len(shown), f"all {len(shown)} classic recipes")
    print_line(console, f"{ways} failed; with holdfast the resource was never corrupted")
    if overlapping := sum(bool(both.holdfast.overlapping_holders) for _, both in shown):
        print_line(
            console,
            f"in {overlapping} of {len(shown)} scenarios two clients held the lock at once, even "
            "with holdfast;",
        )
        print_line(console, "the fence protected the resource")


def _hazard(name: str, known_hazards: Sequence[Hazard]) -> Hazard:
    for hazard in known_hazards:
        if hazard.name == name.replace("-", "_"):
            return hazard
    known = ", ".join(hazard.name for hazard in known_hazards)
    raise typer.BadParameter(f"no hazard is called {name!r}; the hazards are {known}")


def _print_hazard(console: Console, hazard: Hazard, classic: Side, fenced: Side) -> None:
    from rich.padding import Padding
    from rich.text import Text

    print_line(console, hazard.title, "bold")
    print_line(console, f"  {hazard.name}", "dim")
    console.print(Padding(Text(hazard.description), (0, 0, 0, 2)))
    style = "red" if fenced.violated else "yellow" if fenced.overlapping_holders else "green"
    colour = "red" if classic.violated else ""
    print_wrapped(console, "  classic recipe: ", _outcome_of(classic), colour)
    print_wrapped(console, "  with holdfast:  ", _outcome_of(fenced), style)
    print_line(console)


def _outcome_of(side: Side) -> str:
    refused = f"the fence refused {side.refused} late write{'s' * (side.refused > 1)}"
    if side.violated or not side.refused:
        return side.violated or "no failure"
    if side.overlapping_holders:
        who = " and ".join(side.overlapping_holders)
        return f"{who} held the lock at the same time; {refused} and protected the resource"
    return f"no failure; {refused}"


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
