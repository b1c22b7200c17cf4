"""Output and file helpers of the `holdfast sim` commands."""

from __future__ import annotations

import re
import textwrap
from ast import literal_eval
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console


TEXT_MIN_WIDTH = 40
"""The least number of columns for a text after its label."""


def print_line(console: Console, words: str = "", style: str = "") -> None:
    """Print one line without wrapping it."""
    console.print(words, style=style, soft_wrap=True)


def fail(words: str, status: int = 1) -> NoReturn:
    """Print an error, and exit with this status."""
    typer.echo(f"holdfast: {words}", err=True)
    raise typer.Exit(status)


def print_wrapped(console: Console, label: str, words: str, style: str = "") -> None:
    """Print a text after a label; further lines are indented by the width of the label."""
    width = max(TEXT_MIN_WIDTH, console.width - len(label))
    for line in textwrap.wrap(words, width, break_on_hyphens=False) or [""]:
        print_line(console, label + line, style)
        label = " " * len(label)


_BYTES = re.compile(r"""\bb'(?:[^'\\]|\\.)*'|\bb"(?:[^"\\]|\\.)*\"""")


def without_bytes_literals(text: str) -> str:
    """Show tokens that a check has written as Python bytes literals as plain text."""
    return _BYTES.sub(lambda found: literal_eval(found[0]).decode(errors="replace"), text)


def write_file(path: Path, text: str) -> None:
    """Write a file, or exit with an error."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


def in_a_folder(path: Path | None) -> Path | None:
    """Reject a path that cannot be written, before the command starts."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a directory")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"the directory {path.parent} does not exist")
    return path


PageFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=in_a_folder, help="Write the pictures as one HTML page."),
]
