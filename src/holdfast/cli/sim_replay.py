"""`holdfast sim replay`: a saved run happens again, and is drawn."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console
from holdfast.cli.sim_output import PageFile, fail, in_a_folder, print_line, write_file
from holdfast.cli.sim_picture import draw, picture_of

if TYPE_CHECKING:
    from holdfast.sim.sweep import Found

NOT_SAVED = "not a saved world: "


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `holdfast sim run` saved.")],
    *,
    page: PageFile = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=in_a_folder,
            help="Write the picture as a drawing, for slides.",
        ),
    ] = None,
    all_messages: Annotated[
        bool,
        typer.Option("--all-messages", help="Draw all of it, and not only what led to its end."),
    ] = False,
) -> None:
    """Let a saved world happen again, and draw it. The status is 1 if it still breaks a promise.

    Example: `holdfast sim replay holdfast-S1-seed-42.json`
    """
    console = open_console()
    try:
        found = _loaded(file)
        outcome = found.run()
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    except ValueError as error:  # of reading it, or of settings with which no lock can be made
        fail(f"{file} is not a saved world: {str(error).removeprefix(NOT_SAVED)}")
    timeline = picture_of(found, outcome, whole=all_messages)
    draw(console, timeline)
    print_line(console, f"when it was kept: {_broke(found.check, found.detail)}")
    now = _broke(outcome.check, outcome.detail)
    print_line(console, f"now:              {now}", "bold red" if outcome.check else "green")
    if page is not None:
        from holdfast.sim.pictures.page import draw_page

        write_file(page, draw_page([timeline], timeline.title))
        print_line(console, f"the picture is in {page}")
    if svg is not None:
        from holdfast.sim.pictures.page import draw_svg

        write_file(svg, draw_svg(timeline))
        print_line(console, f"the drawing is in {svg}")
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
    return f"{check} was broken: {detail}" if check else "every promise was kept"
