"""`holdfast break`: take a lock from its holder, or forget a record."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import format_seconds, identity, open_console, sanitized
from holdfast.cli.kinds import KindText, text_of, with_article
from holdfast.cli.locks import (
    FREE_TEXT,
    NOT_HELD,
    ByKey,
    Name,
    OfKind,
    print_lock,
    read_kinds,
)
from holdfast.cli.servers import (
    Local,
    LongestTtl,
    Namespace,
    Urls,
    chosen_servers,
    exit_if_unreachable,
    open_overview,
    print_stderr,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.api.client import Client, Lock
    from holdfast.api.shared import RWLock, Semaphore
    from holdfast.holder import Holder
    from holdfast.overview.views import LockView

TTL = 30.0
"""The ttl of the evicting client; it does not apply to the next holder."""


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
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Delete what is stored: a result, the last start, a cached value, or the use of "
            "a rate.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    longest_ttl: LongestTtl = 60.0,
    namespace: Namespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    """Take a lock from its holder, or forget a result.

    Example: `holdfast break nightly-backup`

    Shows the holder, and asks for confirmation. The first waiter is granted the lock. If the holder
    has changed by then, nothing is done. The holder is not stopped: it detects the loss at its next
    renewal, after up to a third of its ttl. Until then two clients may work at the same time, so
    the resource should check fences. If the lock has a lock_delay, the first waiter is granted the
    lock after it; a second break ends the delay.

    Permits of a semaphore or an rwlock, the run of work that is done once or of a periodic job, and
    the computation of a cached value are taken in the same way. A barrier is aborted, so that all
    its parties get `BrokenBarrier`, and a latch is opened. With --forget, the holder stays,
    and what is stored is deleted, so that the work is done again:

    `holdfast break --kind once --forget 'order 42'`

    Exit status:

    * 0: broken, or forgotten

    * 1: it is not held (or nothing is stored), it has changed, or you declined

    * 2: wrong usage, or neither a terminal nor `--yes`; or the name has several kinds or holders,
    and none was chosen

    * 3: the server (of a quorum, a majority) did not reply, or refused; or no URL is given and no
    embedded server is running
    """
    from holdfast.api.client import Client
    from holdfast.errors import ConfigurationError

    with open_overview(urls, local=local) as overview:
        lock = _chosen_lock(read_kinds(overview, name, namespace, kind, key=key), forget=forget)
        if not (_can_forget(lock) if forget else _can_break(lock)):
            _print_nothing(lock, overview.servers, forget=forget)
            raise typer.Exit(NOT_HELD)
        print_lock(open_console(), lock, overview.servers)
        evicted = None if forget or lock.is_waited_for else _chosen_holder(lock, holder)
        if not yes:
            _confirm(lock, evicted)
        # Without a handler, logging would write to stderr.
        logging.getLogger("holdfast").addHandler(logging.NullHandler())
        try:
            client = Client(
                chosen_servers(urls, local=local),
                longest_ttl=longest_ttl,
                namespace=lock.namespace or None,
            )
        except ConfigurationError as error:
            raise typer.BadParameter(sanitized(str(error))) from None
        with exit_if_unreachable(), client:
            if evicted is None:
                end = text_of(lock).forget if forget else text_of(lock).end_wait
                done = end is not None and end(client, lock)
            else:
                done = _target(client, lock, min(TTL, longest_ttl)).evict(evicted)
        if not done:
            why = f"{text_of(lock).record} has changed" if forget else "has another holder now"
            shown = f"'{lock.display_name}'{':' if forget else ''}"
            print_stderr(f"{shown} {why}: nothing was done")
            raise typer.Exit(NOT_HELD)
        if forget:
            result = f"forgotten; {text_of(lock).forgotten}"
        else:
            result = _result(overview.read_lock(lock.key), ended_delay=lock.state == "delayed")
        open_console().print(result, soft_wrap=True)


def _chosen_lock(found: Sequence[LockView], *, forget: bool) -> LockView:
    """Return the only one that can be broken; exit if there are several."""
    able = [each for each in found if (_can_forget if forget else _can_break)(each)]
    if len(able) > 1:
        kinds = " and ".join(with_article(each.kind) for each in able)
        print_stderr(f"there are {kinds} with this name: choose one with --kind")
        raise typer.Exit(2)
    if able:
        return able[0]
    return next((each for each in found if each.record), found[0])


def _can_break(lock: LockView) -> bool:
    """Whether it has a holder, or clients wait for it."""
    return bool(lock.holders or lock.progress)


def _can_forget(lock: LockView) -> bool:
    """Whether there is a record; or a computation that has to be discarded."""
    return lock.record is not None or (lock.kind == "cache" and bool(lock.holders))


def _print_nothing(lock: LockView, servers: Sequence[str], *, forget: bool) -> None:
    shown, words = f"'{lock.display_name}'", text_of(lock)
    where = f"(on {', '.join(servers)})"
    if forget:
        print_stderr(f"nothing is stored for {shown} {where}")
    elif lock.record is not None:
        print_stderr(f"{shown} is not held {where}; --forget deletes {words.record}")
    elif lock.state == "free" and words.free != KindText().free:
        print_stderr(f"{shown}: {words.free} {where}")
    else:
        print_stderr(f"{shown} is {FREE_TEXT[lock.state]} {where}")


def _chosen_holder(lock: LockView, number: int | None) -> Holder:
    """Return the holder that is to be evicted."""
    if not lock.has_permits:
        return replace(lock.holders[0], token=lock.token)
    if number is None and len(lock.holders) > 1:
        print_stderr(f"it has {len(lock.holders)} holders: give the number of one as --holder")
        raise typer.Exit(2)
    if number is not None and number > len(lock.holders):
        print_stderr(f"it has {len(lock.holders)} holders, and no number {number}")
        raise typer.Exit(2)
    return lock.holders[(number or 1) - 1]


def _confirm(lock: LockView, evicted: Holder | None) -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print_stderr("there is no terminal to ask for confirmation: give --yes to break the lock")
        raise typer.Exit(2)
    what = "End the lock delay" if lock.state == "delayed" else "Break this lock"
    if lock.is_waited_for:
        what = text_of(lock).end
    elif evicted is None:
        what = f"Forget {text_of(lock).record}"
    elif lock.has_permits or text_of(lock).record:
        what = f"Evict {sanitized(identity(evicted))}"
    if not typer.confirm(f"{what}?", err=True):
        print_stderr("nothing was changed")
        raise typer.Exit(NOT_HELD)


def _target(client: Client, lock: LockView, ttl: float) -> Lock | RWLock | Semaphore:
    """Return the lock with which the holder is evicted."""
    if lock.kind == "semaphore":
        return client.semaphore(lock.name or "", limit=1, ttl=ttl)
    if lock.kind == "rwlock":
        return client.rwlock(lock.name or "", ttl=ttl)
    if lock.kind == "lock" and lock.name is not None:
        return client.lock(lock.name, ttl=ttl)
    key = lock.key.decode("utf-8", "surrogateescape")
    return client.lock(lock.name or "a lock by its key", key=key, ttl=ttl)


def _result(lock: LockView, *, ended_delay: bool) -> str:
    if lock.is_waited_for:
        return sanitized(lock.progress or "open")
    if lock.state == "delayed":
        return f"broken; its lock_delay ends in {format_seconds(lock.remaining)}"
    done = "the lock delay is over" if ended_delay else "broken"
    if lock.holders:
        return f"{done}; now held by {sanitized(', '.join(map(identity, lock.holders)))}"
    return f"{done}; now free"
