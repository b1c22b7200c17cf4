"""`holdfast ls`, `show` and `break`: list locks, show one, and take one from its holder."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console, open_wide_console, sanitized
from holdfast.cli.servers import (
    UNREACHABLE,
    Local,
    LongestTtl,
    Namespace,
    OnlyNamespace,
    Urls,
    chosen_servers,
    exit_if_unreachable,
    open_overview,
    print_stderr,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.text import Text

    from holdfast.api.client import Client, Lock
    from holdfast.api.shared import RWLock, Semaphore
    from holdfast.core.token import TokenInfo
    from holdfast.holder import Holder
    from holdfast.overview.scan import Overview
    from holdfast.overview.views import LockView, State

NOT_HELD = 1
"""Exit status if the lock is not held, or was not broken."""

TTL = 30.0
"""The ttl of the evicting client; it does not apply to the next holder."""

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

Name = Annotated[str, typer.Argument(metavar="NAME", help="The lock's name.")]
ByKey = Annotated[
    bool,
    typer.Option("--key", help="NAME is the exact key, for locks created with key=."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KINDS = "lock", "semaphore", "rwlock", "barrier", "latch"
OfKind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help=f"One of {', '.join(KINDS)}: by default, the first one that is held or waited for.",
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
    as_json: AsJson = False,
    namespace: OnlyNamespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    """List locks that are held or have waiters.

    Example: `holdfast ls 'invoice:*' --waiting --sort wait`

    Locks are found with SCAN, which does not block the server. A lock created with `key=` is
    shown as `key …`, once a client of holdfast has used it. A lock in a namespace is shown with
    its namespace, as in `shop: invoice:7`. PATTERN matches the name alone; `--namespace` limits
    the list to one namespace. With `--json`, a byte that is not UTF-8 is a lone surrogate, and
    `key_hex` is the exact key. One line on stderr names the servers that were queried.

    Exit status:

    * 0: listed, even if there are no locks

    * 2: wrong usage

    * 3: so few servers answered that locks may be missing (a single server, or no majority of a
    quorum), because one or more did not answer, or refused; or no URL is given and no embedded
    server is running
    """
    from holdfast.cli.listing import format_listing
    from holdfast.overview.scan import ALL

    if sort not in SORTS:
        raise typer.BadParameter(f"sort by one of {', '.join(SORTS)}, not by {sanitized(sort)!r}")
    with open_overview(urls, local=local) as overview:
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
        print_stderr(f"locks on {servers}")
        console = open_wide_console()
        coloured = console.color_system is not None and not console.no_color
        typer.echo("\n".join(format_listing(locks, console.width, coloured=coloured)))
    elif survey.complete:
        which = "matching " if pattern or held or waiting or namespace else ""
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
    """Show one lock of any kind: its holders, and all waiters in order.

    Of a barrier it shows the parties that have arrived, and of a latch how many are left.

    Example: `holdfast show nightly-backup`

    Exit status:

    * 0: the lock is held; parties wait at the barrier, or it is broken; the latch is not open

    * 1: otherwise

    * 2: wrong usage

    * 3: the server (of a quorum, a majority) did not answer, or refused; or no URL is given and no
    embedded server is running
    """
    with open_overview(urls, local=local) as overview:
        lock = _read(overview, name, namespace, kind, key=key)
    if as_json:
        typer.echo(json.dumps({**lock.as_data(), "servers": overview.servers}, indent=2))
    else:
        _print_lock(open_console(), lock, overview.servers)
    raise typer.Exit(0 if lock.state == "held" else NOT_HELD)


def break_(
    name: Name,
    *,
    key: ByKey = False,
    kind: OfKind = None,
    holder: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Of several holders, the one that `show` lists as number N."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    longest_ttl: LongestTtl = 60.0,
    namespace: Namespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    """Take a lock, or permits, from a holder, and grant them to the first waiter.

    Example: `holdfast break nightly-backup`

    Shows the holder, and asks for confirmation. If the holder has changed by then, nothing is
    done. The holder is not stopped: it detects the loss at its next renewal, after up to a third
    of its ttl. Until then two clients may work at the same time, so the resource should check
    fences. If the lock has a lock_delay, the first waiter is granted the lock after it; a second
    break ends the delay.

    A barrier is aborted, so that all its parties get `BrokenBarrier`. A latch is opened.

    Exit status:

    * 0: broken

    * 1: the lock is not held, its holder has changed, or you declined

    * 2: wrong usage, or neither a terminal nor `--yes`

    * 3: the server (of a quorum, a majority) did not answer, or refused; or no URL is given and no
    embedded server is running
    """
    from holdfast.api.client import Client
    from holdfast.errors import ConfigurationError

    console = open_console()
    with open_overview(urls, local=local) as overview:
        lock = _read(overview, name, namespace, kind, key=key)
        if not lock.holders and not lock.progress:
            servers = ", ".join(overview.servers)
            print_stderr(f"'{lock.display_name}' is {_FREE_TEXT[lock.state]} (on {servers})")
            raise typer.Exit(NOT_HELD)
        _print_lock(console, lock, overview.servers)
        chosen = _chosen(lock, holder)
        if not yes:
            _confirm(lock, chosen)
        # Without a handler, logging would write to stderr.
        logging.getLogger("holdfast").addHandler(logging.NullHandler())
        try:
            client = Client(
                chosen_servers(urls, local=local), longest_ttl=longest_ttl, namespace=namespace
            )
        except ConfigurationError as error:
            raise typer.BadParameter(sanitized(str(error))) from None
        with exit_if_unreachable(), client:
            ttl = min(TTL, longest_ttl)
            broken = _end_wait(client, lock, name) if chosen is None else False
            if chosen is not None:
                target: Lock | RWLock | Semaphore
                if lock.kind == "semaphore":
                    target = client.semaphore(name, limit=1, ttl=ttl)
                elif lock.kind == "rwlock":
                    target = client.rwlock(name, ttl=ttl)
                else:
                    by_key = name if key else None
                    target = client.lock("a lock by its key" if key else name, key=by_key, ttl=ttl)
                broken = target.evict(chosen)
        if not broken:
            print_stderr(f"'{lock.display_name}' has another holder now: nothing was done")
            raise typer.Exit(NOT_HELD)
        result = _result(overview.read_lock(lock.key), ended_delay=lock.state == "delayed")
        console.print(result, soft_wrap=True)


_FREE_TEXT: dict[State, str] = {
    "free": "not held",
    "contested": "not held: no majority of the servers has the same holder",
}


def _key_of(name: str, namespace: str | None, *, key: bool) -> bytes:
    from holdfast.errors import ConfigurationError
    from holdfast.keys import checked_namespace, lock_key_of

    try:
        return lock_key_of(name, name if key else None, checked_namespace(namespace))
    except ConfigurationError as error:
        raise typer.BadParameter(sanitized(str(error))) from None


def _read(
    overview: Overview, name: str, namespace: str | None, kind: str | None, *, key: bool
) -> LockView:
    """Return the lock of this kind, or of the first kind that is held or waited for."""
    if kind is not None and (kind not in KINDS or key):
        raise typer.BadParameter(f"--kind is one of {', '.join(KINDS)}, and not for --key")
    lock_key = _key_of(name, namespace, key=key)
    wanted = KINDS if kind is None and not key else (kind or "lock",)
    if len(overview.servers) > 1:  # a quorum has locks only
        wanted = ("lock",)
    first: LockView | None = None
    for each in wanted:
        lock = overview.read_lock(lock_key if each == "lock" else lock_key + b":" + each.encode())
        if lock.holders or lock.waiting or lock.progress:
            return lock
        first = first or lock
    assert first is not None  # noqa: S101 - there is at least one kind
    return first


def _end_wait(client: Client, lock: LockView, name: str) -> bool:
    """Abort a barrier, or open a latch."""
    if lock.kind == "latch":
        return client.latch(name, count=1).open()
    client.barrier(name, parties=1).abort()
    return True


def _chosen(lock: LockView, number: int | None) -> Holder | None:
    """Return the holder that is to be evicted; None for a barrier or a latch."""
    if lock.is_waited_for:
        return None
    if not lock.has_permits:
        return replace(lock.holders[0], token=lock.token)
    if number is None and len(lock.holders) > 1:
        print_stderr(f"it has {len(lock.holders)} holders: give the number of one as --holder")
        raise typer.Exit(2)
    if number is not None and number > len(lock.holders):
        print_stderr(f"it has {len(lock.holders)} holders, and no number {number}")
        raise typer.Exit(2)
    return lock.holders[(number or 1) - 1]


def _confirm(lock: LockView, chosen: Holder | None) -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print_stderr("there is no terminal to ask for confirmation: give --yes to break the lock")
        raise typer.Exit(2)
    what = "End the lock delay" if lock.state == "delayed" else "Break this lock"
    if chosen is None:
        what = "Open this latch" if lock.kind == "latch" else "Abort this barrier"
    elif lock.has_permits:
        what = f"Evict {sanitized(identity(chosen))}"
    if not typer.confirm(f"{what}?", err=True):
        print_stderr("nothing was changed")
        raise typer.Exit(NOT_HELD)


def _result(lock: LockView, *, ended_delay: bool) -> str:
    if lock.is_waited_for:
        return sanitized(lock.progress or "open")
    if lock.state == "delayed":
        return f"broken; its lock_delay ends in {format_seconds(lock.remaining)}"
    done = "the lock delay is over" if ended_delay else "broken"
    if lock.holders:
        return f"{done}; now held by {sanitized(', '.join(map(identity, lock.holders)))}"
    return f"{done}; now free"


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


def format_seconds(length: float | None) -> str:
    """Format a duration in few characters; None means that it never ends."""
    if length is None:
        return "∞"
    if length < 10:  # noqa: PLR2004 - a decimal matters here
        return f"{length:.1f} s"
    for unit, size, until in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if length < until * size:
            return f"{length / size:.0f} {unit}"
    return f"{length / 86400:.0f} d"


def identity(holder: Holder | TokenInfo | None, before_pid: str = ", pid ") -> str:
    """Return the process of a holder or waiter, and its label, as text."""
    if holder is None or holder.pid is None:
        return "another client"
    place = holder.host or ""
    place = place if holder.user is None else f"{holder.user}@{place}"
    label = f" ({holder.label})" if holder.label else ""
    return f"{place}{before_pid}{holder.pid}{label}"


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


def _print_lock(console: Console, lock: LockView, servers: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in _rows(lock, servers):
        table.add_row(name, Text(sanitized(words)))
    console.print(Text(sanitized(lock.display_name), "bold", overflow="fold"))
    console.print(table)


def _rows(lock: LockView, servers: Sequence[str]) -> list[tuple[str, str]]:
    facts = [*_holder_rows(lock), ("key", lock.key.decode("utf-8", "surrogateescape"))]
    facts.append(("server", ", ".join(servers)))
    if lock.nodes[1] > 1 and lock.state != "free":
        facts.append(("on", f"{lock.nodes[0]} of the {lock.nodes[1]} servers that answered"))
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


def waiting_of(lock: LockView) -> str:
    """Return the number of waiters, and of queue entries whose client is gone."""
    counts = [str(lock.waiting)] if lock.waiting else []
    return ", ".join([*counts, f"{lock.gone} gone"] if lock.gone else counts)


def _holder_rows(lock: LockView) -> list[tuple[str, str]]:
    if lock.is_waited_for:
        return _rows_of_parties(lock)
    if not lock.holders:
        return [("state", _FREE_TEXT[lock.state])]
    delayed, first = lock.state == "delayed", lock.holders[0]
    if lock.has_permits:
        return _rows_of_permits(lock)
    facts = []
    for number, holder in enumerate(lock.holders):
        facts.append(("and by" if number else "lost" if delayed else "held by", _shown(holder)))
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
