"""`holdfast ls` and `show`: list locks, and show one."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import (
    format_seconds,
    identity,
    open_console,
    open_wide_console,
    sanitized,
)
from holdfast.cli.kinds import KINDS, LISTED_KINDS, record_rows, text_of, with_article
from holdfast.cli.servers import (
    UNREACHABLE,
    AsJson,
    Local,
    Namespace,
    OnlyNamespace,
    Urls,
    open_overview,
    print_stderr,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.text import Text

    from holdfast.core.token import TokenInfo
    from holdfast.holder import Holder
    from holdfast.overview.scan import Overview
    from holdfast.overview.views import LockView, State

NOT_HELD = 1
"""Exit status if the lock is not held, or was not broken."""

SORTS: dict[str, Callable[[LockView], tuple[float, str]]] = {
    "name": lambda lock: (0.0, lock.display_name),
    "age": lambda lock: (-(lock.age or 0.0), lock.display_name),
    "left": lambda lock: (
        float("inf") if lock.remaining is None else lock.remaining,
        lock.display_name,
    ),
    "waiting": lambda lock: (-lock.waiting, lock.display_name),
    "wait": lambda lock: (-lock.longest_wait, lock.display_name),
}
"""Sort keys of `--sort`; the greatest comes first, except for name and left."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name, or the id of the work.")]
ByKey = Annotated[
    bool,
    typer.Option("--key", help="NAME is the exact key, for locks created with key=."),
]
OfKind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help=f"One of {', '.join(KINDS)}. By default the one that is in use.",
        show_default=False,
    ),
]
OnlyKind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help=f"Only this kind: {', '.join(LISTED_KINDS)}.",
        show_default=False,
    ),
]


def ls(
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN",
            help="Names to show, as a glob: * any text, ? one character, [a-z] one of these; "
            "a backslash escapes.",
            show_default=False,
        ),
    ] = None,
    *,
    held: Annotated[bool, typer.Option("--held", help="Only locks that are held.")] = False,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only locks with waiters.")] = False,
    sort: Annotated[
        str, typer.Option(metavar="BY", help=f"Sort by {', '.join(SORTS)}.", show_default=True)
    ] = "name",
    kind: OnlyKind = None,
    as_json: AsJson = False,
    namespace: OnlyNamespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    """List locks, permits and work that are held or waited for.

    Example: `holdfast ls 'invoice:*' --waiting --sort wait`

    Anything but a lock has its kind after the name. Rates and what is only stored (results, last
    starts, cached values) are not listed: `holdfast show NAME` shows them.

    Locks are found with SCAN, which does not block the server. A lock created with `key=` is
    shown as `key …`, once a client of holdfast has used it. A lock in a namespace is shown with
    its namespace, as in `shop: invoice:7`. PATTERN matches the name alone; `--namespace` limits
    the list to one namespace. With `--json`, a byte that is not UTF-8 is a lone surrogate, and
    `key_hex` is the exact key. One line on stderr names the servers that were queried.

    Exit status:

    * 0: listed, even if there are no locks

    * 2: wrong usage

    * 3: so few servers replied that locks may be missing (a single server, or no majority of a
    quorum), because one or more did not reply, or refused; or no URL is given and no embedded
    server is running
    """
    from holdfast.cli.listing import format_listing
    from holdfast.overview.scan import ALL

    if sort not in SORTS:
        raise typer.BadParameter(f"sort by one of {', '.join(SORTS)}, not by {sanitized(sort)!r}")
    _check_kind(kind, LISTED_KINDS)
    with open_overview(urls, local=local) as overview:
        survey = overview.survey(matching(pattern, namespace), waiters=ALL if as_json else 1)
    locks = [
        lock
        for lock in sorted(survey.locks, key=SORTS[sort])
        if (lock.state == "held" or not held)
        and (lock.waiting or not waiting)
        and kind in {None, lock.kind}
    ]
    servers = ", ".join(overview.servers)
    if as_json:
        facts = replace(survey, locks=tuple(locks)).as_data()
        typer.echo(json.dumps({"servers": overview.servers, **facts}, indent=2))
    elif locks:
        print_stderr(f"locks on {servers}")
        console = open_wide_console()
        coloured = console.color_system is not None and not console.no_color
        typer.echo("\n".join(format_listing(locks, console.width, coloured=coloured)))
    elif survey.complete:
        which = "matching " if pattern or held or waiting or kind or namespace else ""
        print_stderr(f"no {which}locks on {servers}")
    for node, failure in survey.failures.items():
        print_stderr(failure if node in failure else f"{node}: {failure}")
    raise typer.Exit(0 if survey.complete else UNREACHABLE)


def show(
    name: Name,
    *,
    key: ByKey = False,
    kind: OfKind = None,
    as_json: AsJson = False,
    namespace: Namespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    """Show a lock with its holders and all waiters, a result, or a value.

    Example: `holdfast show nightly-backup`

    NAME may also be that of a semaphore, an rwlock, a periodic job (its last start), a cached value
    or a rate, or the id of work that is done once (its result). If several kinds have this name,
    the first one that is held or waited for is shown, and the others are named.

    Exit status:

    * 0: it is held, or something is stored for it

    * 1: it is not held, and nothing is stored

    * 2: wrong usage

    * 3: the server (of a quorum, a majority) did not reply, or refused; or no URL is given and no
    embedded server is running
    """
    with open_overview(urls, local=local) as overview:
        found = read_kinds(overview, name, namespace, kind, key=key)
    lock, *others = sorted(found, key=lambda each: (not each.is_used, each.record is None))
    also = [each.kind for each in others if each.is_used or each.record]
    if as_json:
        facts = {**lock.as_data(), "also": also, "servers": overview.servers}
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_lock(open_console(), lock, overview.servers, also)
    raise typer.Exit(0 if lock.state == "held" or lock.record else NOT_HELD)


FREE_TEXT: dict[State, str] = {
    "free": "not held",
    "contested": "not held: no majority of the servers has the same holder",
}


def _key_of(name: str, namespace: str | None, kind: str, *, key: bool) -> bytes:
    from holdfast.errors import ConfigurationError
    from holdfast.keys import checked_namespace, key_of_kind, lock_key_of

    try:
        within = checked_namespace(namespace)
        return lock_key_of(name, name) if key else key_of_kind(kind, name, within)
    except ConfigurationError as error:
        raise typer.BadParameter(sanitized(str(error))) from None


def _check_kind(kind: str | None, known: Sequence[str]) -> None:
    if kind is not None and kind not in known:
        raise typer.BadParameter(f"--kind is one of {', '.join(known)}")


def read_kinds(
    overview: Overview, name: str, namespace: str | None, kind: str | None, *, key: bool
) -> list[LockView]:
    """Return what each kind has under this name; only that kind, or that key, if it is given.

    Raises:
        typer.BadParameter: the kind, the name or the namespace is not valid.
    """
    from holdfast.overview.kinds import KINDS as ALL_KINDS

    _check_kind(kind, KINDS)
    if key and kind is not None:
        raise typer.BadParameter("give --key or --kind, not both: a key has one kind")
    on_quorum = len(overview.servers) > 1
    wanted = [
        each.name
        for each in ALL_KINDS
        if (kind in {None, each.name}) and (each.on_quorum or not on_quorum)
    ]
    if not wanted:
        raise typer.BadParameter(f"--kind {kind}: there is none on several independent servers")
    keys = [_key_of(name, namespace, each, key=key) for each in wanted[: 1 if key else None]]
    return [overview.read_lock(each) for each in keys]


def matching(pattern: str | None, namespace: str | None) -> Callable[[bytes], bool]:
    """Return a filter of lock keys by name, or by key for locks created with `key=`.

    With a namespace, only locks in it match.

    Raises:
        typer.BadParameter: the namespace is not valid.
    """
    from holdfast.errors import ConfigurationError
    from holdfast.keys import checked_namespace, name_in, namespace_in
    from holdfast.overview.patterns import matcher

    try:
        checked_namespace(namespace)
    except ConfigurationError as error:
        raise typer.BadParameter(sanitized(str(error))) from None
    matches = matcher("*" if pattern is None else pattern)

    def wanted(key: bytes) -> bool:
        name = name_in(key)
        if namespace is not None and namespace_in(key) != namespace:
            return False
        return matches(key.decode("utf-8", "surrogateescape") if name is None else name)

    return wanted


# Formatting


def holders_of(lock: LockView) -> str:
    """Return the holders of a lock for a row of a list, where width is short."""
    if lock.is_waited_for:
        return lock.progress
    first = identity(lock.holders[0], " ") if lock.holders else ""
    if lock.state == "delayed":
        return f"none: lock delay after {first}"
    if not lock.holders:
        return "none" if lock.state == "free" else "none: no majority"
    more = f" and {len(lock.holders) - 1} more" if len(lock.holders) > 1 else ""
    permits = f"{lock.permits}: " if lock.permits else ""
    return permits + first + more


def cell(text: str, style: str = "") -> Text:
    """Return untrusted text as a cell of one line."""
    from rich.text import Text

    return Text(sanitized(text), style, no_wrap=True, overflow="ellipsis")


def name_of(lock: LockView) -> Text:
    """Return a lock's name, or its key with `key` before it."""
    return (
        cell(lock.display_name)
        if lock.name is not None
        else cell(f"key {lock.display_name}", "italic")
    )


def print_lock(
    console: Console, lock: LockView, servers: Sequence[str], also: Sequence[str] = ()
) -> None:
    """Print all that is known; `also` are other kinds with the same name."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in [*_rows(lock, servers), *_other_kinds(also)]:
        table.add_row(name, Text(sanitized(words)))
    console.print(Text(sanitized(lock.display_name), "bold", overflow="fold"))
    console.print(table)


def _rows(lock: LockView, servers: Sequence[str]) -> list[tuple[str, str]]:
    holders = _holder_rows(lock) if lock.holders or not lock.record else []
    facts = [*holders, *record_rows(lock), ("key", lock.key.decode("utf-8", "surrogateescape"))]
    facts.append(("server", ", ".join(servers)))
    if lock.nodes[1] > 1 and lock.state != "free":
        facts.append(("on", f"{lock.nodes[0]} of the {lock.nodes[1]} servers that replied"))
    if lock.kind != "rate":
        facts.append(("waiting", str(lock.waiting or "none")))
    there = [waiter for waiter in lock.waiters if waiter.connected is not False]
    for number, waiter in enumerate(there, 1):
        share = _share(lock, waiter.party)
        facts.append(
            (f"{number:>7}", f"{identity(waiter.party)}{share}, for {format_seconds(waiter.age)}")
        )
    for waiter in lock.waiters:
        if waiter.connected is False:
            since = f"{identity(waiter.party)}, queued {format_seconds(waiter.age)} ago"
            facts.append(("   gone", f"{since}: its client is not connected"))
    return facts


def age_of(lock: LockView) -> str:
    """Return how long a lock has been held, as text; "?" if that is not known."""
    if lock.state in {"free", "contested"}:
        return ""
    return "?" if lock.age is None else format_seconds(lock.age)


def waiting_of(lock: LockView) -> str:
    """Return the number of waiters, and of queue entries whose client is gone."""
    counts = [str(lock.waiting)] if lock.waiting else []
    return ", ".join([*counts, f"{lock.gone} gone"] if lock.gone else counts)


def _holder_rows(lock: LockView) -> list[tuple[str, str]]:
    if lock.is_waited_for:
        return _rows_of_parties(lock)
    text = text_of(lock)
    if not lock.holders:
        return [("state", text.free if lock.state == "free" else FREE_TEXT[lock.state])]
    delayed, first = lock.state == "delayed", lock.holders[0]
    if lock.has_permits:
        return _rows_of_permits(lock)
    facts = []
    for number, holder in enumerate(lock.holders):
        label = "and by" if number else "lost" if delayed else text.held_by
        facts.append((label, _shown(holder)))
        if holder.pid is not None:
            facts.append(("thread", holder.thread or ""))
    if first.owner is not None:
        facts.append(("owner", first.owner))
    if lock.age is not None and first.since is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(first.since))
        facts.append(("since", f"{since}, {format_seconds(lock.age)} ago"))
    if delayed:
        facts.append(
            ("delay", f"no client is granted the lock for another {format_seconds(lock.remaining)}")
        )
    else:
        endless = lock.remaining is None
        left = "no expiry" if endless else f"{format_seconds(lock.remaining)}, unless renewed"
        facts.append(("remaining", left))
    if lock.fence is not None:
        facts.append(("fence", str(lock.fence)))
    return facts


def _rows_of_permits(lock: LockView) -> list[tuple[str, str]]:
    facts = [("held by", lock.permits)]
    if len(lock.limits) > 1:
        limits = " or ".join(map(str, lock.limits))
        words = f"clients give different limits ({limits}): each is granted permits while all "
        facts.append(("limits", f"{words}permits in use are at most its own limit"))
    for number, holder in enumerate(lock.holders, 1):
        left = f"for another {format_seconds(holder.remaining)} unless renewed"
        facts.append((f"{number:>7}", f"{_shown(holder)}{_share(lock, holder)}, {left}"))
        if holder.pid is not None:
            facts.append(("thread", holder.thread or ""))
    return [*facts, ("fence", f"{lock.fence}, the last one that was granted")]


def _rows_of_parties(lock: LockView) -> list[tuple[str, str]]:
    facts = [("state", lock.progress or ("open, or not used" if lock.kind == "latch" else "free"))]
    for holder in lock.holders:
        left = f"for another {format_seconds(holder.remaining)} unless renewed"
        facts.append(("party", f"{_shown(holder)}, {left}"))
    return facts


def _shown(holder: Holder) -> str:
    token = f", token {holder.token}" if holder.pid is None else ""
    return identity(holder) + token


def _share(lock: LockView, party: Holder | TokenInfo | None) -> str:
    """Return what a holder has, or a waiter wants, of a semaphore or an rwlock, as text."""
    if not lock.has_permits or party is None:
        return ""
    if lock.kind == "rwlock":
        return ", to write" if party.weight == party.limit else ", to read"
    return f", {party.weight} of {party.limit} permits"


def _other_kinds(also: Sequence[str]) -> list[tuple[str, str]]:
    if not also:
        return []
    return [("also", ", ".join(f"{with_article(kind)} (--kind {kind})" for kind in also))]
