"""What the commands of `holdfast sim` print, and the files that they write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console


def print_line(console: Console, words: str = "", style: str = "") -> None:
    """Write one line, however long."""
    console.print(words, style=style, soft_wrap=True)


def fail(words: str) -> NoReturn:
    """Print an error, and end with status 1."""
    typer.echo(f"holdfast: {words}", err=True)
    raise typer.Exit(1)


def write_file(path: Path, text: str) -> None:
    """Write a file, or end with an error."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{path} could not be written: {error.strerror}")


def in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file that could not be written, before anything is done for it."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


PageFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=in_a_folder, help="Write the pictures as one web page."),
]
