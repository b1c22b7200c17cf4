"""Which servers a command is about, and what it says and returns when they cannot be asked."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.overview.looking import Overview

LOCAL = "local"
UNASKED = 3
"""The status when servers could not be asked."""

URL_HELP = (
    "A server, sentinels (redis+sentinel://…/service), a cluster (redis+cluster://…); given again "
    "for each node of a quorum. Without it: HOLDFAST_URL"
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
        help="The embedded server, whatever HOLDFAST_URL is: its locks exclude processes of this "
        "user on this machine only.",
    ),
]

Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-N",
        metavar="NAMESPACE",
        help="The `namespace=` of the clients that use it.",
        show_default=False,
    ),
]

LongestTtl = Annotated[
    float,
    typer.Option(
        "--longest-ttl",
        min=0.01,
        metavar="SECONDS",
        help="Behind Sentinels, and of a quorum: what clients there are given as longest_ttl.",
    ),
]


def given(urls: Sequence[str] | None, *, local: bool) -> str | list[str] | None:
    """Return what to give a client for these options; spaces separate URLs, as in HOLDFAST_URL."""
    each = separated(urls or ())
    if local and each:
        raise typer.BadParameter("give --url or --local, not both")
    if local:
        return LOCAL
    return each[0] if len(each) == 1 else each or None


def separated(urls: Sequence[str]) -> list[str]:
    """Return each URL of these options and arguments.

    Raises:
        typer.BadParameter: one is empty. Without it, the command would use other servers.
    """
    if not all(map(str.strip, urls)):
        raise typer.BadParameter(
            "the URL or --url is empty, perhaps from a variable that is not set: give the URL of a "
            "server, or leave it out"
        )
    return " ".join(urls).split()


@contextlib.contextmanager
def overview_of(urls: Sequence[str] | None, *, local: bool) -> Iterator[Overview]:
    """Look at the servers; end the command if they cannot be asked."""
    from holdfast.errors import ConfigurationError
    from holdfast.overview.looking import Overview

    chosen = given(urls, local=local)
    try:
        overview = Overview(chosen)
    except ConfigurationError as error:
        raise typer.BadParameter(plain(str(error))) from None
    try:
        with unasked():
            yield overview
    finally:
        overview.close()


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Say why a server could not be asked, and end with the status that says so."""
    from holdfast.errors import HoldfastError

    try:
        yield
    except HoldfastError as error:
        complain(str(error))
        raise typer.Exit(UNASKED) from None


def complain(text: str) -> None:
    """Say something on stderr, in one line."""
    print(f"holdfast: {plain(text)}", file=sys.stderr)  # noqa: T201 - where it belongs
