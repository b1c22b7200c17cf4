"""`holdfast ls`, `show` and `break`: who holds what, who waits, and taking it from them."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console, open_wide_console, plain
from holdfast.cli.servers import (
    UNASKED,
    Local,
    LongestTtl,
    Namespace,
    Urls,
    complain,
    given,
    overview_of,
    unasked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.text import Text

    from holdfast.core.token import Party
    from holdfast.holder import Holder
    from holdfast.overview.views import LockView, State

NOBODY = 1
"""The status when there is nobody to show, or to break."""

TTL = 30.0
"""Seconds; those who are next in line have their own."""

SORTS: dict[str, Callable[[LockView], tuple[float, str]]] = {
    "name": lambda lock: (0.0, lock.shown),
    "age": lambda lock: (-(lock.age or 0.0), lock.shown),
    "left": lambda lock: (float("inf") if lock.remaining is None else lock.remaining, lock.shown),
    "waiting": lambda lock: (-lock.waiting, lock.shown),
    "wait": lambda lock: (-lock.longest_wait, lock.shown),
}
"""How locks can be sorted; most of what is asked for comes first."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="The lock's name.")]
ByKey = Annotated[
    bool,
    typer.Option("--key", help="NAME is the exact key, of a lock that was given one by key=."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]


def ls(
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN",
            help="Names to show, as in a shell: * any text, ? one character, [a-z] one of these; "
            "a backslash takes their meaning from them.",
            show_default=False,
        ),
    ] = None,
    *,
    held: Annotated[bool, typer.Option("--held", help="Only locks that somebody holds.")] = False,
    waiting: Annotated[
        bool, typer.Option("--waiting", help="Only locks that somebody waits for.")
    ] = False,
    sort: Annotated[
        str, typer.Option(metavar="BY", help=f"Sort by {', '.join(SORTS)}.", show_default=True)
    ] = "name",
    as_json: AsJson = False,
    namespace: Namespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    r"""List the locks that are held or waited for: by whom, since when, for how long, who waits.

    Example: `holdfast ls 'invoice:*' --waiting --sort wait`

    Keys are found by SCAN, so that the server serves others meanwhile. A lock that was given its
    key (`key=`) is shown by that, with `key` before it, once a client of holdfast has used it. A
    lock in a namespace is shown with its namespace, as in `shop: invoice:7`. PATTERN matches the
    name alone; `--namespace` limits the list to one namespace.
    With `--json`, text that is not UTF-8 has a lone surrogate for each byte, and `key_hex` is
    the exact key.

    The status is 0, even if there are none; 3 if a server could not be asked, so that locks may be
    missing, or if no URL is given and no embedded server runs. One line on stderr names the
    servers that were queried.
    """
    from holdfast.cli.listing import listed
    from holdfast.overview.looking import ALL

    if sort not in SORTS:
        raise typer.BadParameter(f"sort by one of {', '.join(SORTS)}, not by {plain(sort)!r}")
    with overview_of(urls, local=local) as overview:
        survey = overview.survey(matching(pattern, namespace), waiters=ALL if as_json else 1)
    locks = [
        lock
        for lock in sorted(survey.locks, key=SORTS[sort])
        if (lock.state == "held" or not held) and (lock.waiting or not waiting)
    ]
    servers = ", ".join(overview.servers)
    if as_json:
        facts = replace(survey, locks=tuple(locks)).as_data()
        typer.echo(json.dumps({"servers": overview.servers, **facts}, indent=2))
    elif locks:
        complain(f"locks on {servers}")
        console = open_wide_console()
        coloured = console.color_system is not None and not console.no_color
        typer.echo("\n".join(listed(locks, console.width, coloured=coloured)))
    elif survey.complete:
        which = "matching " if pattern or held or waiting or namespace else ""
        complain(f"no {which}locks on {servers}")
    for node, failure in survey.failures.items():
        complain(failure if node in failure else f"{node}: {failure}")
    raise typer.Exit(0 if survey.complete else UNASKED)


def show(
    name: Name,
    *,
    key: ByKey = False,
    as_json: AsJson = False,
    namespace: Namespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    """Show one lock: who holds it, since when, for how long, and all who wait, in their order.

    Example: `holdfast show nightly-backup`

    The status is 0 if somebody holds it, 1 if nobody does, 3 if the server could not be asked, or
    if no URL is given and no embedded server runs.
    """
    with overview_of(urls, local=local) as overview:
        lock = overview.look(_key_of(name, namespace, key=key))
    if as_json:
        typer.echo(json.dumps({**lock.as_data(), "servers": overview.servers}, indent=2))
    else:
        _tell(open_console(), lock, overview.servers)
    raise typer.Exit(0 if lock.state == "held" else NOBODY)


def break_(
    name: Name,
    *,
    key: ByKey = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    longest_ttl: LongestTtl = 60.0,
    namespace: Namespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    """Take a lock from whoever holds it, and hand it to the next in line. Asks first.

    Example: `holdfast break nightly-backup`

    Only the holder that is shown loses it: if it changes hands meanwhile, nothing is done. The
    holder is not stopped. It learns of this when it next renews, after up to a third of its ttl,
    and until then two may work: let the resource look at fences. If the holder gave the lock a
    lock_delay, that begins, and the next in line gets it afterwards; breaking it again ends it.

    The status is 0 if it was broken, 1 if nobody holds it, it changed hands, or you said no, 2 if
    there is no terminal to ask on and no `--yes`, 3 if the server could not be asked, or if no URL
    is given and no embedded server runs.
    """
    from holdfast.errors import ConfigurationError
    from holdfast.faces.client import Client

    lock_key = _key_of(name, namespace, key=key)
    console = open_console()
    with overview_of(urls, local=local) as overview:
        lock = overview.look(lock_key)
        if not lock.holders:
            servers = ", ".join(overview.servers)
            complain(f"{lock.shown} is held by {_NOBODY[lock.state]} ({servers})")
            raise typer.Exit(NOBODY)
        _tell(console, lock, overview.servers)
        if not yes:
            _ask(lock)
        logging.getLogger("holdfast").addHandler(logging.NullHandler())  # else it writes to stderr
        try:
            client = Client(given(urls, local=local), longest_ttl=longest_ttl, namespace=namespace)
        except ConfigurationError as error:
            raise typer.BadParameter(plain(str(error))) from None
        with unasked(), client:
            target = client.lock(
                "a lock by its key" if key else name,
                key=name if key else None,
                ttl=min(TTL, longest_ttl),
            )
            broken = target.evict(replace(lock.holders[0], token=lock.token))
        if not broken:
            complain(f"{lock.shown} has changed hands meanwhile: nothing was done")
            raise typer.Exit(NOBODY)
        console.print(_after(overview.look(lock_key)), soft_wrap=True)


_NOBODY: dict[State, str] = {
    "free": "nobody",
    "contested": "nobody: it is on some of the servers, and no majority has the same holder",
}


def _key_of(name: str, namespace: str | None, *, key: bool) -> bytes:
    from holdfast.errors import ConfigurationError
    from holdfast.keys import checked_namespace, lock_key_of

    try:
        return lock_key_of(name, name if key else None, checked_namespace(namespace))
    except ConfigurationError as error:
        raise typer.BadParameter(plain(str(error))) from None


def _ask(lock: LockView) -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        complain("there is no terminal to ask on: give --yes to break it all the same")
        raise typer.Exit(2)
    what = "End the delay" if lock.state == "delayed" else "Break it"
    if not typer.confirm(f"{what}?", err=True):
        complain("left alone")
        raise typer.Exit(NOBODY)


def _after(lock: LockView) -> str:
    if lock.state == "delayed":
        return f"broken; its lock_delay runs for another {seconds(lock.remaining)}"
    if lock.holders:
        return f"broken; now held by {plain(', '.join(map(who, lock.holders)))}"
    return "broken; nobody holds it now"


def matching(pattern: str | None, namespace: str | None) -> Callable[[bytes], bool]:
    """Return a test of lock keys: whether the name, or the key that was given, matches `pattern`.

    With a namespace, only locks in it match.

    Raises:
        typer.BadParameter: it cannot be a namespace.
    """
    from holdfast.errors import ConfigurationError
    from holdfast.keys import checked_namespace, name_in, namespace_in
    from holdfast.overview.patterns import matcher

    try:
        checked_namespace(namespace)
    except ConfigurationError as error:
        raise typer.BadParameter(plain(str(error))) from None
    matches = matcher("*" if pattern is None else pattern)

    def wanted(key: bytes) -> bool:
        name = name_in(key)
        if namespace is not None and namespace_in(key) != namespace:
            return False
        return matches(key.decode("utf-8", "surrogateescape") if name is None else name)

    return wanted


# ---- in words


def seconds(length: float | None) -> str:
    """A length of time in few characters; None is for ever."""
    if length is None:
        return "∞"
    if length < 10:  # noqa: PLR2004 - one digit more is worth something
        return f"{length:.1f} s"
    for unit, size, until in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if length < until * size:
            return f"{length / size:.0f} {unit}"
    return f"{length / 86400:.0f} d"


def who(holder: Holder | Party | None) -> str:
    """Who holds or waits: the process, and its label."""
    if holder is None or holder.pid is None:
        return "another client"
    place = holder.host or ""
    place = place if holder.user is None else f"{holder.user}@{place}"
    label = f" ({holder.label})" if holder.label else ""
    return f"{place} {holder.pid}{label}"


def holders_of(lock: LockView) -> str:
    """Who holds a lock, in one line."""
    if lock.state == "delayed":
        return f"nobody: delay after {who(lock.holders[0])}"
    if not lock.holders:
        return "nobody" if lock.state == "free" else "nobody: no majority"
    more = f" and {len(lock.holders) - 1} more" if len(lock.holders) > 1 else ""
    return who(lock.holders[0]) + more


def cell(text: str, style: str = "") -> Text:
    """Text of others, in one line however long it is."""
    from rich.text import Text

    return Text(plain(text), style, no_wrap=True, overflow="ellipsis")


def name_of(lock: LockView) -> Text:
    """A lock's name, or its key, which is said to be one."""
    return cell(lock.shown) if lock.name is not None else cell(f"key {lock.shown}", "italic")


def _tell(console: Console, lock: LockView, servers: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in _facts(lock, servers):
        table.add_row(name, Text(plain(words)))
    console.print(Text(plain(lock.shown), "bold", overflow="fold"))
    console.print(table)


def _facts(lock: LockView, servers: Sequence[str]) -> list[tuple[str, str]]:
    facts = [*_of_holders(lock), ("key", lock.key.decode("utf-8", "surrogateescape"))]
    facts.append(("server", ", ".join(servers)))
    if lock.nodes[1] > 1:
        facts.append(("on", f"{lock.nodes[0]} of the {lock.nodes[1]} servers that were heard"))
    facts.append(("waiting", str(lock.waiting or "nobody")))
    there = [waiter for waiter in lock.waiters if waiter.listening is not False]
    for number, waiter in enumerate(there, 1):
        facts.append((f"{number:>7}", f"{who(waiter.party)}, for {seconds(waiter.age)}"))
    for waiter in lock.waiters:
        if waiter.listening is False:
            since = f"{who(waiter.party)}, queued {seconds(waiter.age)} ago"
            facts.append(("   gone", f"{since}: its client is not connected"))
    return facts


def waiting_of(lock: LockView) -> str:
    """How many clients wait for a lock, and how many entries of its queue are of gone clients."""
    counts = [str(lock.waiting)] if lock.waiting else []
    return ", ".join([*counts, f"{lock.gone} gone"] if lock.gone else counts)


def _of_holders(lock: LockView) -> list[tuple[str, str]]:
    if not lock.holders:
        return [("held by", _NOBODY[lock.state])]
    delayed, first = lock.state == "delayed", lock.holders[0]
    facts = [("lost" if delayed else "held by", _in_full(first))]
    facts += [("and by", _in_full(holder)) for holder in lock.holders[1:]]
    if first.owner is not None:
        facts.append(("owner", first.owner))
    if lock.age is not None and first.since is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(first.since))
        facts.append(("since", f"{since}, {seconds(lock.age)} ago"))
    if delayed:
        facts.append(("delay", f"nobody gets it for another {seconds(lock.remaining)}"))
    else:
        endless = lock.remaining is None
        left = "it never expires" if endless else f"{seconds(lock.remaining)}, unless renewed"
        facts.append(("remaining", left))
    if lock.fence is not None:
        facts.append(("fence", str(lock.fence)))
    return facts


def _in_full(holder: Holder) -> str:
    if holder.pid is None:
        return f"another client, whose token is {holder.token}"
    place = holder.host if holder.user is None else f"{holder.user}@{holder.host}"
    label = f", {holder.label}" if holder.label else ""
    return f"{place}, pid {holder.pid}, {holder.thread}{label}"
