"""`holdfast run`: run a command while holding locks, as flock(1) does on one machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer

from holdfast.cli import Interrupted
from holdfast.cli.console import report_line, sanitized
from holdfast.cli.servers import LOCAL, Local, LongestTtl, Namespace, Urls, chosen_servers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from holdfast.api.client import Client, Lock
    from holdfast.api.multi_lock import MultiLock
    from holdfast.api.shared import ReadLock, WriteLock
    from holdfast.cli.child import Child
    from holdfast.cli.supervise import CommandEnd, Signals
    from holdfast.cli.switch import Switch
    from holdfast.core.events import Event
    from holdfast.errors import HoldfastError
    from holdfast.holder import Holder

    Single: TypeAlias = Lock | ReadLock | WriteLock

UNAVAILABLE, LOST, MISCONFIGURED, HELD_TOO_LONG = 69, 75, 78, 124
LABEL_MAX, NAME_MAX = 200, 60
REPORT_AFTER, CHECK_EVERY = 1.0, 2.0
"""Seconds of waiting after which the holder is reported, and between checks whether it changed."""

OTHERS_WAIT = "other clients are ahead in the queue"
"""Reported instead of the holder if the lock has none."""

SHOWN_MAX = 3
"""How many names a message lists."""


def run(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the lock."),
    ],
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="Command to run, after --."),
    ],
    *,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Another lock, acquired together with NAME; may be repeated."
        ),
    ] = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", "--nb", "-n", help="Do not wait for the lock.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", "-w", min=0.0, metavar="SECONDS", help="Wait at most this long."),
    ] = None,
    exit_code: Annotated[
        int,
        typer.Option(
            "--exit-code",
            "-E",
            min=0,
            max=255,
            metavar="N",
            help="Exit status if another client holds the lock.",
        ),
    ] = 1,
    ttl: Annotated[
        float,
        typer.Option(
            min=1.0, metavar="SECONDS", help="Expiry of the lock if this machine dies; 1 or more."
        ),
    ] = 30.0,
    max_hold: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="End the command after this time, as timeout(1) does."
        ),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", "-s", help="Hold the rwlock NAME for reading, beside others."),
    ] = False,
    exclusive: Annotated[
        bool,
        typer.Option("--exclusive", "-x", help="Hold the rwlock NAME for writing, alone."),
    ] = False,
    owner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Processes with the same owner may hold the lock together."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Shown to operators, and stored on the server: give one if the arguments are "
            "secret. [default: COMMAND]",
        ),
    ] = None,
    lock_delay: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="After a loss, grant the lock to no client for this time.",
        ),
    ] = 0.0,
    replicas: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="With Sentinels or a cluster: replicas that must have the lock; give the number "
            "of all replicas.",
        ),
    ] = 0,
    longest_ttl: LongestTtl = 60.0,
    namespace: Namespace = None,
    urls: Urls = None,
    local: Local = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Report events on stderr.")
    ] = False,
) -> None:
    """Run a command while holding a lock, and exit with its status.

    Example: `holdfast run nightly-backup -- ./backup.sh`

    To skip the command if another machine runs it already:

    `holdfast run -n -E 0 nightly-backup -- ./backup.sh`

    With --also, the command runs when all of these locks are held. They are acquired in a fixed
    order, so that two of these commands never wait for each other:

    `holdfast run --also account:2 account:1 -- ./transfer.sh`

    With --shared, several commands run at once, but none beside one with --exclusive:

    `holdfast run --shared catalog -- ./report.sh`

    The command has the terminal, input and signals as if it were run directly. Its environment
    has HOLDFAST_LOCK, HOLDFAST_FENCE (send it with each write) and HOLDFAST_TOKEN: those of
    NAME. HOLDFAST_LOCKS is the number of locks, and HOLDFAST_LOCK_1, HOLDFAST_FENCE_1 and
    HOLDFAST_TOKEN_1, then _2 and so on, are those of each one.

    If a lock cannot be renewed, the process group of the command receives TERM and then KILL, so
    that it has ended before another client is granted the lock.

    If the command does not run because another client holds the lock, one line on stderr names
    the holder, except with `-E 0` outside a terminal.

    Exit status: that of the command; 128 + n if signal n ended the command or the wait; or

    * 1 (or --exit-code): another client holds the lock

    * 2: wrong usage

    * 69: no server is reachable, or too few of a quorum

    * 75: the lock was lost, and the command was ended, or never begun

    * 78: the server refuses access (wrong password), or a setting is not valid

    * 124: --max-hold has passed, and the command was ended

    * 126, 127: the command cannot be executed, or does not exist
    """
    if command[0] == "--":
        del command[0]
    if not command or command[0].startswith("-"):
        raise typer.BadParameter(
            "usage: holdfast run [OPTIONS] NAME -- COMMAND...; options come before the name"
        )
    names = name, *(also or ())
    if len(set(names)) < len(names):
        raise typer.BadParameter("a name is given twice: give each lock once")
    if also and (shared or exclusive):
        raise typer.BadParameter("--also is for locks: leave out --shared and --exclusive")
    if (shared or exclusive) and (shared == exclusive or owner is not None or lock_delay):
        raise typer.BadParameter(
            "give one of --shared and --exclusive, without --owner and --lock-delay: these are for "
            "an rwlock, which is another lock than the one of the same name without them"
        )
    if not hasattr(os, "fork"):
        raise typer.BadParameter(
            "holdfast run needs process groups and signals, which this system does not have"
        )
    from holdfast.cli.child import Child, UnrunnableError

    server = _server(urls, local=local)
    try:
        child = Child(command)
    except UnrunnableError as error:
        report_line(str(error))
        raise typer.Exit(error.status) from None
    settings = RunSettings(
        names=names,
        server=server,
        ttl=ttl,
        timeout=0.0 if no_wait else timeout,
        max_hold=max_hold,
        owner=owner,
        label=" ".join(command)[:LABEL_MAX] if label is None else label,
        lock_delay=lock_delay,
        replicas=replicas,
        longest_ttl=longest_ttl,
        namespace=namespace,
        verbose=verbose,
        side="read" if shared else "write" if exclusive else "",
    )
    try:
        status = _status(settings, child, exit_code)
    except Interrupted as interrupted:
        status = -interrupted.number
    _exit(status)


def _server(urls: Sequence[str] | None, *, local: bool) -> str | Sequence[str] | None:
    """Return the server for the client; warn if it is the embedded server by default."""
    server = chosen_servers(urls, local=local)
    if server is not None or os.environ.get("HOLDFAST_URL"):
        return server
    report_line(
        "no server is given, so the embedded server is used: its locks exclude only processes of "
        "this user on this machine; set HOLDFAST_URL to a server that all machines reach, or give "
        "--local to use the embedded server without this warning"
    )
    return LOCAL


class RunSettings(NamedTuple):
    """The locks and their settings, the server, and whether to report events."""

    names: tuple[str, ...]
    server: str | Sequence[str] | None
    ttl: float
    timeout: float | None
    max_hold: float | None
    owner: str | None
    label: str
    lock_delay: float
    replicas: int
    longest_ttl: float
    namespace: str | None
    verbose: bool
    side: str
    """The side of the rwlock: "read", "write", or "" for a lock."""

    @property
    def shown(self) -> str:
        """The namespace and the names, for messages."""
        shown = list(map(self.shown_name, self.names[:SHOWN_MAX]))
        more = len(self.names) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")

    def shown_name(self, name: str) -> str:
        """Return the namespace and one name, for messages."""
        name = sanitized(name, NAME_MAX)
        return f"'{sanitized(self.namespace, NAME_MAX)}: {name}'" if self.namespace else f"'{name}'"


def _exit(status: int) -> NoReturn:
    """Exit with a status; -n means that signal n ended the command.

    After Ctrl-C, holdfast ends itself with SIGINT too, so that a shell ends its loop or script.
    `os._exit` skips the shutdown of Python, which takes longer than most of this command.
    """
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(status if status >= 0 else 128 - status)


def _status(settings: RunSettings, child: Child, busy: int) -> int:
    """Hold the lock and run the command; return the status for `_exit`, `busy` on a timeout.

    Without a terminal, a `busy` of 0 suppresses the message about the holder: for cron, which sends
    a mail if there is any output.

    All processes are forked here, before any thread is started.
    """
    from holdfast.cli.switch import Switch

    switch = Switch(child.pid)
    try:
        from holdfast.cli.supervise import Signals
        from holdfast.errors import (
            AcquireTimeout,
            HoldfastError,
            LeaseLost,
            NodeUnavailable,
            OutcomeUnknown,
        )

        try:
            return _hold_and_run(settings, child, switch, Signals())
        except AcquireTimeout as error:
            if busy or _is_verbose(settings):
                holder = error.holder
                why = f"is held by {holder}" if holder else f"was not acquired: {OTHERS_WAIT}"
                report_line(f"{settings.shown_name(error.lock)} {why}")
            return busy
        except HoldfastError as error:
            _report_error(settings, error)
            if isinstance(error, LeaseLost):
                return LOST
            unavailable = isinstance(error, (NodeUnavailable, OutcomeUnknown))
            return UNAVAILABLE if unavailable else MISCONFIGURED
    finally:
        switch.disarm()
        child.end()


def _hold_and_run(settings: RunSettings, child: Child, switch: Switch, signals: Signals) -> int:
    from holdfast.api.client import Client
    from holdfast.cli.foreground import Foreground
    from holdfast.cli.supervise import Supervisor, leases_of
    from holdfast.errors import HoldfastError

    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # otherwise it writes to stderr
    client = Client(
        settings.server,
        longest_ttl=settings.longest_ttl,
        namespace=settings.namespace,
        on_event=partial(_report_event, settings) if settings.verbose else None,
    )
    lock = _lock(settings, client)
    outcome = None
    waiting = _report_waiting(settings, lock)
    try:
        with lock as lease:
            signals.start_recording()
            waiting.set()
            leases = leases_of(lease, settings.names)
            if settings.verbose:
                for each in leases:
                    report_line(f"acquired {settings.shown_name(each.name)}, fence {each.fence}")
            supervisor = Supervisor(
                lease,
                leases,
                child,
                signals=signals,
                switch=switch,
                terminal=Foreground(),
                ttl=settings.ttl,
                max_hold=settings.max_hold,
            )
            outcome = supervisor.run()
    except HoldfastError as error:
        if outcome is None:
            raise
        return _status_of(outcome, settings, error)
    finally:
        waiting.set()
    return _status_of(outcome, settings, None)


def _lock(settings: RunSettings, client: Client) -> Single | MultiLock:
    if settings.side:
        rwlock = client.rwlock(
            settings.names[0],
            ttl=settings.ttl,
            timeout=settings.timeout,
            max_hold=settings.max_hold,
            label=settings.label,
            replicas=settings.replicas,
        )
        return rwlock.read() if settings.side == "read" else rwlock.write()
    locks = [
        client.lock(
            name,
            ttl=settings.ttl,
            timeout=settings.timeout,
            max_hold=settings.max_hold,
            owner=settings.owner,
            label=settings.label,
            lock_delay=settings.lock_delay,
            replicas=settings.replicas,
        )
        for name in settings.names
    ]
    return locks[0] if len(locks) == 1 else client.lock_all(locks, timeout=settings.timeout)


def _awaited(lock: Single | MultiLock) -> tuple[str, Holder | None]:
    """Return the name of the lock that the caller waits for, and its holder, or one of several.

    Several locks are acquired in a fixed order: it is the first one that this process does not
    hold.
    """
    from holdfast.api.client import Lock
    from holdfast.api.multi_lock import MultiLock

    name, holder = "", None
    for each in lock.locks if isinstance(lock, MultiLock) else (lock,):
        name = each.name
        holder = each.holder() if isinstance(each, Lock) else next(iter(each.holders()), None)
        if holder is None or not _is_here(holder):
            break
    return name, holder


def _is_here(holder: Holder) -> bool:
    return (holder.host, holder.pid) == (socket.gethostname(), os.getpid())


def _status_of(outcome: CommandEnd, settings: RunSettings, unreleased: HoldfastError | None) -> int:
    from holdfast.errors import LeaseLost

    if outcome.forced_by:
        return LOST if outcome.forced_by == "lost" else HELD_TOO_LONG
    if isinstance(unreleased, LeaseLost):
        _report_error(settings, unreleased)
        return LOST
    if unreleased:
        stays = f"it expires within {settings.ttl + settings.lock_delay:g} s"
        report_line(
            f"{settings.shown} was not released: {stays}: {unreleased.__context__ or unreleased}"
        )
    if outcome.failure:
        report_line(str(outcome.failure))
        return outcome.failure.status
    return outcome.status


def _report_waiting(settings: RunSettings, lock: Single | MultiLock) -> threading.Event:
    """Report the holder during a long wait, on a terminal or with `--verbose`.

    It is reported again when it changes, or when the server is unavailable. The caller sets the
    returned event to end the reports.
    """
    over = threading.Event()

    def report() -> None:
        from holdfast.errors import HoldfastError

        reported, pause = None, REPORT_AFTER
        while not over.wait(pause):
            try:
                name, holder = _awaited(lock)
                current = holder and holder.token
                text = _why_waiting(settings, name, holder)
            except HoldfastError as error:
                current = str(error.__context__ or error)
                text = f"{settings.shown}: {current}"
            if text and current != reported and not over.is_set():
                report_line(f"waiting for {text}")
            reported, pause = current, CHECK_EVERY

    if _is_verbose(settings):
        threading.Thread(target=report, name="holdfast-waiting", daemon=True).start()
    return over


def _why_waiting(settings: RunSettings, name: str, holder: Holder | None) -> str:
    """Return a report about a lock; "" if the wait is just over."""
    shown = settings.shown_name(name)
    if holder is None:
        return f"{shown}: {OTHERS_WAIT}"
    if _is_here(holder):
        return f"{shown}: granted, but not yet on the replicas" if settings.replicas else ""
    return f"{shown}, held by {holder}"


def _is_verbose(settings: RunSettings) -> bool:
    """Whether to report the progress: stderr is a terminal, or `--verbose` is given."""
    return settings.verbose or (sys.stderr is not None and sys.stderr.isatty())


def _report_error(settings: RunSettings, error: BaseException) -> None:
    text = str(error)
    for name in settings.names:
        text = text.replace(repr(name), settings.shown_name(name))
    if settings.replicas and f" of {settings.replicas} replicas have it" in text:
        text = f"{text}: restore the replicas, or give a lower --replicas"
    report_line(text)


def _report_event(settings: RunSettings, event: Event) -> None:
    if event.kind in {"max_hold", "waiting"}:  # the supervisor and `_report_waiting` report these
        return
    fence = f" (fence {event.fence})" if event.fence else ""
    lock = f" {settings.shown_name(event.lock)}{fence}" if event.lock else ""
    report_line(f"{event.kind}{lock}: {event.detail}")
