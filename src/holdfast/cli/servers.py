"""Options of several commands, the servers that they choose, and what if these are unreachable."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import sanitized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.overview.scan import Overview

LOCAL = "local"
UNREACHABLE = 3
"""Exit status if a server cannot be reached."""

URL_HELP = (
    "Server, as redis://…, redis+cluster://… or redis+sentinel://…/service (repeat it for each "
    "node of a quorum). Default: HOLDFAST_URL"
)

Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        "-u",
        metavar="URL",
        help=f"{URL_HELP}, else the embedded server.",
        show_default=False,
    ),
]

Local = Annotated[
    bool,
    typer.Option(
        "--local",
        help="Use the embedded server, even if HOLDFAST_URL is set. Its locks exclude only "
        "processes of this user on this machine.",
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-N",
        metavar="NAMESPACE",
        help="Namespace of the lock, as in Client(namespace=…).",
        show_default=False,
    ),
]

OnlyNamespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-N",
        metavar="NAMESPACE",
        help="Only locks in this namespace.",
        show_default=False,
    ),
]

LongestTtl = Annotated[
    float,
    typer.Option(
        "--longest-ttl",
        min=0.01,
        metavar="SECONDS",
        help="With Sentinels or a quorum: the longest_ttl of all clients.",
    ),
]


def chosen_servers(urls: Sequence[str] | None, *, local: bool) -> str | list[str] | None:
    """Return the `url` argument for a client. Spaces separate URLs, as in HOLDFAST_URL."""
    each = split_urls(urls or ())
    if local and each:
        raise typer.BadParameter("give --url or --local, not both")
    if local:
        return LOCAL
    return each[0] if len(each) == 1 else each or None


def split_urls(urls: Sequence[str]) -> list[str]:
    """Split options and arguments into URLs.

    Raises:
        typer.BadParameter: one is empty. Ignoring it would select other servers.
    """
    if not all(map(str.strip, urls)):
        raise typer.BadParameter(
            "the URL is empty, perhaps because a variable is not set: give the URL of a server, or "
            "leave it out"
        )
    return " ".join(urls).split()


@contextlib.contextmanager
def open_overview(urls: Sequence[str] | None, *, local: bool) -> Iterator[Overview]:
    """Open an overview of the servers; exit if they cannot be reached."""
    from holdfast.errors import ConfigurationError
    from holdfast.overview.scan import Overview

    chosen = chosen_servers(urls, local=local)
    try:
        overview = Overview(chosen)
    except ConfigurationError as error:
        raise typer.BadParameter(sanitized(str(error))) from None
    try:
        with exit_if_unreachable():
            yield overview
    finally:
        overview.close()


@contextlib.contextmanager
def exit_if_unreachable() -> Iterator[None]:
    """Print an error of holdfast to stderr, and exit with status `UNREACHABLE`."""
    from holdfast.errors import HoldfastError

    try:
        yield
    except HoldfastError as error:
        print_stderr(str(error))
        raise typer.Exit(UNREACHABLE) from None


def print_stderr(text: str) -> None:
    """Print one line to stderr."""
    print(f"holdfast: {sanitized(text)}", file=sys.stderr)  # noqa: T201 - command output
