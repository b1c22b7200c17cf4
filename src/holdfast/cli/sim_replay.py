"""`holdfast sim replay`: repeats a saved run, and draws it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console
from holdfast.cli.sim_output import (
    PageFile,
    fail,
    in_a_folder,
    print_line,
    print_wrapped,
    without_bytes_literals,
    write_file,
)
from holdfast.cli.sim_picture import draw, picture_of

if TYPE_CHECKING:
    from holdfast.sim.sweep import Found

NOT_SAVED = "not a saved run: "
UNREADABLE = 2
"""Exit status if the file does not exist, or is not a saved run; 1 means a broken promise."""


def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A run that `holdfast sim run` saved.")
    ],
    *,
    page: PageFile = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=in_a_folder,
            help="Write the picture as an SVG file.",
        ),
    ] = None,
    all_messages: Annotated[
        bool,
        typer.Option("--all-messages", help="Draw the whole run, not only its last events."),
    ] = False,
) -> None:
    """Repeat a saved run, and draw it.

    Example: `holdfast sim replay holdfast-S1-seed-42.json`

    Exit status:

    * 0: every promise is kept

    * 1: the run still breaks a promise

    * 2: wrong usage, or the file does not exist, or is not a saved run
    """
    console = open_console()
    try:
        found = _loaded(file)
        outcome = found.run()
    except OSError as error:
        fail(f"{file}: {error.strerror}", UNREADABLE)
    except ValueError as error:  # the file is invalid, or its settings are
        why = str(error).removeprefix(NOT_SAVED)
        fail(f"{file} is not a saved run: {why}", UNREADABLE)
    timeline = picture_of(found, outcome, whole=all_messages)
    draw(console, timeline)
    print_wrapped(console, "when it was saved: ", _broke(found.check, found.detail))
    now = _broke(outcome.check, outcome.detail)
    print_wrapped(console, "now:               ", now, "bold red" if outcome.check else "green")
    if page is not None:
        from holdfast.sim.pictures.page import draw_page

        write_file(page, draw_page([timeline], timeline.title))
        print_line(console, f"the picture is in {page}")
    if svg is not None:
        from holdfast.sim.pictures.page import draw_svg

        write_file(svg, draw_svg(timeline))
        print_line(console, f"the picture is in {svg}")
    if outcome.check:
        raise typer.Exit(1)


def _loaded(file: Path) -> Found:
    from holdfast.sim.settings import Settings
    from holdfast.sim.sweep import Found

    found = Found.load(file.read_text(encoding="utf-8"))
    for each in fields(Settings):
        value, usual = getattr(found.settings, each.name), each.default
        if value != usual and not isinstance(value, (int, float)):
            raise ValueError(f"{each.name} is {value!r}")
    return found


def _broke(check: str, detail: str) -> str:
    return (
        f"{check} was broken: {without_bytes_literals(detail)}"
        if check
        else "every promise was kept"
    )
