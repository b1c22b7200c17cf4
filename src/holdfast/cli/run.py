"""`holdfast run`: a command under a lock, as with flock(1), on as many machines as there are."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer

from holdfast.cli import Interrupted
from holdfast.cli.console import plain, say
from holdfast.cli.servers import LOCAL, Local, LongestTtl, Namespace, Urls, given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.cli.child import Child
    from holdfast.cli.supervise import CommandEnd, Signals
    from holdfast.cli.switch import Switch
    from holdfast.core.events import Event
    from holdfast.errors import HoldfastError
    from holdfast.faces.client import Lock

UNAVAILABLE, LOST, MISCONFIGURED, HELD_TOO_LONG = 69, 75, 78, 124
LABEL_MOST, NAME_MOST = 200, 60
PATIENCE, LOOK_AFTER = 1.0, 2.0
"""Seconds of waiting after which it is told for whom, and between two looks whether that is so."""


def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What is locked.")],
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What is run once it is, after a --.")
    ],
    *,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", "--nb", "-n", help="Do not wait if it is locked.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", "-w", min=0.0, metavar="SECONDS", help="Wait no longer."),
    ] = None,
    exit_code: Annotated[
        int,
        typer.Option("--exit-code", "-E", min=0, max=255, help="The status if it stays locked."),
    ] = 1,
    ttl: Annotated[
        float,
        typer.Option(min=1.0, metavar="SECONDS", help="Kept so long if this machine dies."),
    ] = 30.0,
    max_hold: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="End the command after so long, as timeout(1) does."
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whoever gives this name too may hold it as well."),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Shown to who asks who holds it. [default: COMMAND]"),
    ] = None,
    lock_delay: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="If it is lost, nobody gets it for so long after."
        ),
    ] = 0.0,
    replicas: Annotated[
        int, typer.Option(min=0, help="Behind Sentinels: replicas that must have it, best all.")
    ] = 0,
    longest_ttl: LongestTtl = 60.0,
    namespace: Namespace = None,
    urls: Urls = None,
    local: Local = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Tell what happens, on stderr.")
    ] = False,
) -> None:
    """Run a command while holding a lock, and end with its status.

    For example: `holdfast run nightly-backup -- ./backup.sh`, or, to let it be if another machine
    does it already: `holdfast run --no-wait --exit-code 0 nightly-backup -- ./backup.sh`

    The command has terminal, input and signals as if it were run directly, and in its environment
    HOLDFAST_LOCK, HOLDFAST_FENCE (send it along with each write) and HOLDFAST_TOKEN. If the lock
    cannot be kept, all of its process group is asked to end (TERM) and then killed, so that it is
    dead before anybody else can get the lock.

    The status is that of the command, 128 + n if signal n ended it or the waiting, or

    * 1 (or --exit-code): somebody else holds the lock

    * 69: no server; 78: the server refuses us (a wrong password), or a setting cannot work

    * 75: the lock was lost, and the command was ended

    * 124: --max-hold was over, and the command was ended

    * 126: the command cannot be run; 127: there is none; 2: wrong usage
    """
    if command[0] == "--":
        del command[0]
    if not command or command[0].startswith("-"):
        raise typer.BadParameter(
            "write holdfast run [OPTIONS] NAME -- COMMAND...; options stand before the name"
        )
    if not hasattr(os, "fork"):
        raise typer.BadParameter("this system has no process groups and signals")
    from holdfast.cli.child import Child, UnrunnableError

    server = _server(urls, local=local)
    try:
        child = Child(command)
    except UnrunnableError as error:
        say(str(error))
        raise typer.Exit(error.status) from None
    wanted = Wanted(
        name=name,
        server=server,
        ttl=ttl,
        timeout=0.0 if no_wait else timeout,
        max_hold=max_hold,
        owner=owner,
        label=" ".join(command)[:LABEL_MOST] if label is None else label,
        lock_delay=lock_delay,
        replicas=replicas,
        longest_ttl=longest_ttl,
        namespace=namespace,
        verbose=verbose,
    )
    try:
        status = _status(wanted, child, exit_code)
    except Interrupted as interrupted:
        status = -interrupted.number
    _leave(status)


def _server(urls: Sequence[str] | None, *, local: bool) -> str | Sequence[str] | None:
    """Return what to give the client, and warn if the embedded server was not chosen."""
    server = given(urls, local=local)
    if server is not None or os.environ.get("HOLDFAST_URL"):
        return server
    say(
        "no server was named, so the embedded server is used: locks exclude processes of this user "
        "on this machine only; set HOLDFAST_URL to a server that all machines reach, or give "
        "--local if this is what you want"
    )
    return LOCAL


class Wanted(NamedTuple):
    """The lock to be held, where, and how much to tell of it."""

    name: str
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

    @property
    def shown(self) -> str:
        """The namespace and the name, in a message."""
        name = plain(self.name, NAME_MOST)
        return f"'{plain(self.namespace, NAME_MOST)}: {name}'" if self.namespace else f"'{name}'"


def _leave(status: int) -> NoReturn:
    """End with a status, or as a command that was ended by a signal, which is less than 0.

    Ctrl-C ends us too, and not only our command: by that a shell knows that it is to end its loop,
    or its script. Python is not taken apart: that takes longer than most of what we do, and threads
    may still have something to tell.
    """
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(status if status >= 0 else 128 - status)


def _status(wanted: Wanted, child: Child, busy: int) -> int:
    """Hold the lock and run the command; return the status to end with, `busy` if others hold it.

    It is that of `_leave`. Before there is any thread, everything is forked that will be needed.
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
            return _hold_and_run(wanted, child, switch, Signals())
        except AcquireTimeout as error:
            if _is_followed(wanted):
                say(f"{wanted.shown} is locked: {error.holder or 'others are ahead of us'}")
            return busy
        except HoldfastError as error:
            _tell(wanted, error)
            if isinstance(error, LeaseLost):
                return LOST
            away = isinstance(error, (NodeUnavailable, OutcomeUnknown))
            return UNAVAILABLE if away else MISCONFIGURED
    finally:
        switch.disarm()
        child.end()


def _hold_and_run(wanted: Wanted, child: Child, switch: Switch, signals: Signals) -> int:
    from holdfast.cli.foreground import Foreground
    from holdfast.cli.supervise import Supervisor
    from holdfast.errors import HoldfastError
    from holdfast.faces.client import Client

    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # else it writes to stderr
    client = Client(
        wanted.server,
        longest_ttl=wanted.longest_ttl,
        namespace=wanted.namespace,
        on_event=_tell_event if wanted.verbose else None,
    )
    lock = client.lock(
        wanted.name,
        ttl=wanted.ttl,
        timeout=wanted.timeout,
        max_hold=wanted.max_hold,
        owner=wanted.owner,
        label=wanted.label,
        lock_delay=wanted.lock_delay,
        replicas=wanted.replicas,
    )
    outcome = None
    waiting = _tell_of_waiting(wanted, lock)
    try:
        with lock as lease:
            signals.noted()
            waiting.set()
            if wanted.verbose:
                say(f"{wanted.shown} is ours, fence {lease.fence}")
            supervisor = Supervisor(
                lease,
                child,
                signals=signals,
                switch=switch,
                terminal=Foreground(),
                ttl=wanted.ttl,
                max_hold=wanted.max_hold,
            )
            outcome = supervisor.run()
    except HoldfastError as error:
        if outcome is None:
            raise
        return _status_of(outcome, wanted, error)
    finally:
        waiting.set()
    return _status_of(outcome, wanted, None)


def _status_of(outcome: CommandEnd, wanted: Wanted, unreleased: HoldfastError | None) -> int:
    from holdfast.errors import LeaseLost

    if outcome.had_to:
        return LOST if outcome.had_to == "lost" else HELD_TOO_LONG
    if isinstance(unreleased, LeaseLost):
        _tell(wanted, unreleased)
        return LOST
    if unreleased:
        stays = f"it stays locked for up to {wanted.ttl + wanted.lock_delay:g} s"
        say(f"{wanted.shown} was not released: {stays}: {unreleased.__context__ or unreleased}")
    if outcome.failure:
        say(str(outcome.failure))
        return outcome.failure.status
    return outcome.status


def _tell_of_waiting(wanted: Wanted, lock: Lock) -> threading.Event:
    """Say who holds it when the wait takes long, to people and to who wants to know.

    Again when it is somebody else, or the server is away. Set what is returned to have it end.
    """
    over = threading.Event()

    def tell() -> None:
        from holdfast.errors import HoldfastError

        told, pause = None, PATIENCE
        while not over.wait(pause):
            try:
                holder = lock.holder()
                who, text = holder and holder.token, str(holder or "others are ahead of us")
            except HoldfastError as error:
                who = text = str(error.__context__ or error)
            if who != told and not over.is_set():
                say(f"waiting for {wanted.shown}: {text}")
            told, pause = who, LOOK_AFTER

    if _is_followed(wanted):
        threading.Thread(target=tell, name="holdfast-waiting", daemon=True).start()
    return over


def _is_followed(wanted: Wanted) -> bool:
    """Whether stderr is a terminal, or `--verbose` asks for messages."""
    return wanted.verbose or (sys.stderr is not None and sys.stderr.isatty())


def _tell(wanted: Wanted, error: BaseException) -> None:
    say(str(error).replace(repr(wanted.name), wanted.shown))


def _tell_event(event: Event) -> None:
    say(f"{event.kind}: {event.detail}")
