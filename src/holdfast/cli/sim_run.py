"""`holdfast sim run`: runs simulations. Its options are the settings of a run."""

from __future__ import annotations

import shlex
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import Interrupted
from holdfast.cli.console import open_console
from holdfast.cli.sim_output import fail, in_a_folder, print_line
from holdfast.cli.sim_report import follow, print_found, print_reached, summary
from holdfast.cli.sweeping import Sweeping, cores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.sim.sweep import Found

RUNS = 3000
"""The default number of runs. A sweep of this size must reach every state."""

SETUP = "Servers, clients and lock"
FAULTS_PANEL = "Faults: probabilities"
UNSAFE_PANEL = "Faults that break the assumptions: only fences are checked"


def _count(text: str, least: int) -> Any:  # noqa: ANN401 - what typer gives
    return typer.Option(
        min=least, metavar="N", help=text, rich_help_panel=SETUP, show_default=False
    )


def _seconds(text: str, least: float) -> Any:  # noqa: ANN401 - what typer gives
    return typer.Option(
        min=least, metavar="SECONDS", help=text, rich_help_panel=SETUP, show_default=False
    )


def _switch(text: str, *, off: str = "") -> Any:  # noqa: ANN401 - what typer gives
    """Return an option that switches a feature on or `off`; by default it is drawn."""
    names = (off,) if off else ()
    return typer.Option(*names, help=text, rich_help_panel=SETUP, show_default=False)


def _chance(text: str, panel: str = FAULTS_PANEL) -> Any:  # noqa: ANN401 - what typer gives
    return typer.Option(
        min=0, max=1, metavar="P", help=text, rich_help_panel=panel, show_default=False
    )


def run(
    ctx: typer.Context,
    *,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help=f"Number of runs: {RUNS}, or as many as --seconds allows."
        ),
    ] = None,
    first: Annotated[int, typer.Option(min=0, metavar="SEED", help="The first seed.")] = 0,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Time limit.", show_default=False),
    ] = None,
    twice: Annotated[bool, typer.Option("--twice", help="Do each run twice, and compare.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Number of processes: by default, the number of cores."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=in_a_folder,
            help="The file for a run that breaks a promise.",
            show_default=False,
        ),
    ] = None,
    shrink: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Time limit for shrinking such a run."),
    ] = 60.0,
    calm: Annotated[
        bool, typer.Option("--calm", help="No faults except those given below.")
    ] = False,
    nodes: Annotated[
        int | None, _count("Number of servers; more than one form a quorum.", 1)
    ] = None,
    replicas: Annotated[
        int | None, _count("Number of replicas that must have a grant before it counts.", 0)
    ] = None,
    sentinel: Annotated[bool | None, _switch("A promoted replica is in quarantine.")] = None,
    clients: Annotated[int | None, _count("Number of clients.", 1)] = None,
    tasks: Annotated[int | None, _count("Number of tasks per client.", 1)] = None,
    turns: Annotated[int | None, _count("How often each task acquires the lock.", 1)] = None,
    ttl: Annotated[float | None, _seconds("The lock's ttl.", 0.01)] = None,
    timeout: Annotated[float | None, _seconds("The timeout of acquire.", 0)] = None,
    hold: Annotated[float | None, _seconds("The approximate duration of a turn.", 0)] = None,
    lock_delay: Annotated[float | None, _seconds("The lock's lock_delay.", 0)] = None,
    owner: Annotated[
        bool | None, _switch("Clients act for one of two owners, or for none.")
    ] = None,
    reentrant: Annotated[bool | None, _switch("A holder may acquire the lock again.")] = None,
    fair: Annotated[
        bool | None, _switch("The lock is granted in the order of requests.", off="--fair/--unfair")
    ] = None,
    semaphore: Annotated[int | None, _count("The lock is a semaphore with this limit.", 0)] = None,
    rwlock: Annotated[bool | None, _switch("The lock is an rwlock.")] = None,
    polls: Annotated[bool | None, _switch("Waiting clients poll.")] = None,
    loop: Annotated[
        bool | None, _switch("Quorum only: tasks share connections, as on an event loop.")
    ] = None,
    skew: Annotated[
        float | None, _seconds("Quorum only: the largest error of a wall clock.", 0)
    ] = None,
    renew: Annotated[bool | None, _switch("Leases are renewed.")] = None,
    min_validity: Annotated[
        float | None, _seconds("The shortest validity with which a lease is granted.", 0)
    ] = None,
    max_hold: Annotated[float | None, _seconds("The lock's max_hold.", 0)] = None,
    uncounted: Annotated[
        bool | None, _switch("PUBLISH always returns 0, as behind some proxies.")
    ] = None,
    drift: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.005,
            metavar="RATIO",
            help="The largest relative error of a clock rate.",
            rich_help_panel=SETUP,
            show_default=False,
        ),
    ] = None,
    drop: Annotated[float | None, _chance("A lease is dropped instead of released.", SETUP)] = None,
    export: Annotated[
        float | None, _chance("A lease is exported, and other clients adopt it.", SETUP)
    ] = None,
    atomic: Annotated[float | None, _chance("A turn begins with atomic operations.", SETUP)] = None,
    cached: Annotated[
        float | None, _chance("A turn begins with calls of a cached function.", SETUP)
    ] = None,
    rate: Annotated[float | None, _chance("A turn begins with requests to a rate.", SETUP)] = None,
    several: Annotated[
        float | None, _chance("A turn acquires two or three locks together.", SETUP)
    ] = None,
    once: Annotated[
        float | None, _chance("A turn begins with work that is done once.", SETUP)
    ] = None,
    periodic: Annotated[
        float | None, _chance("A turn begins with calls of a periodic job.", SETUP)
    ] = None,
    election: Annotated[
        float | None, _chance("A turn begins with an election, or with observing it.", SETUP)
    ] = None,
    latch: Annotated[float | None, _chance("A turn begins at a latch.", SETUP)] = None,
    barrier: Annotated[float | None, _chance("A turn begins at a barrier.", SETUP)] = None,
    extend: Annotated[float | None, _chance("A lease is extended at once.", SETUP)] = None,
    faults_end: Annotated[
        float | None, _seconds("When the faults stop, and all clients must finish.", 0)
    ] = None,
    slow: Annotated[float | None, _chance("A message is slow.")] = None,
    reset: Annotated[float | None, _chance("A connection is reset.")] = None,
    half_open: Annotated[float | None, _chance("A connection goes silent.")] = None,
    doubled: Annotated[float | None, _chance("A request is delivered twice.")] = None,
    server_crash: Annotated[
        float | None, _chance("The server restarts between a request and its reply.")
    ] = None,
    pause: Annotated[float | None, _chance("A client is paused.")] = None,
    crash: Annotated[float | None, _chance("A client crashes.")] = None,
    cancel: Annotated[float | None, _chance("A task is cancelled.")] = None,
    partition: Annotated[
        float | None, _chance("A client is partitioned from a server for a while.")
    ] = None,
    stop: Annotated[float | None, _chance("A client is paused, whatever it is doing.")] = None,
    freeze: Annotated[float | None, _chance("The server hangs for a while.")] = None,
    restart: Annotated[float | None, _chance("The server restarts, with its data.")] = None,
    script_flush: Annotated[float | None, _chance("The server drops its script cache.")] = None,
    full: Annotated[float | None, _chance("The server is out of memory for a while.")] = None,
    stall: Annotated[
        float | None, _chance("A client is paused between a reply and its use.")
    ] = None,
    fork: Annotated[float | None, _chance("A process forks, and the child continues.")] = None,
    close: Annotated[float | None, _chance("A client is closed.")] = None,
    evict_holder: Annotated[float | None, _chance("An operator evicts the holder.")] = None,
    wipe: Annotated[
        float | None, _chance("The server restarts without its data.", UNSAFE_PANEL)
    ] = None,
    evict: Annotated[float | None, _chance("The server evicts a key.", UNSAFE_PANEL)] = None,
    clock_jump: Annotated[float | None, _chance("The server's clock jumps.", UNSAFE_PANEL)] = None,
    failover: Annotated[
        float | None, _chance("A lagging replica takes over.", UNSAFE_PANEL)
    ] = None,
) -> None:
    """Run simulations with faults by seed, and check all promises.

    The settings of each run are drawn from its seed: servers, clients, features of the lock, and
    faults. An option fixes one setting for all runs. The exit status is 1 if a run breaks a
    promise. Then a smaller run that breaks it is shown, and saved for `holdfast sim replay`. The
    status is also 1 if 3000 or more runs without such options do not reach every state.

    Example: `holdfast sim run --seeds 20000 --nodes 3 --ttl 2`
    """
    fixed = _fixed(ctx)
    console = open_console()
    jobs = jobs or cores()
    wanted = RUNS if seeds is None and seconds is None else seeds
    try:
        with Sweeping(fixed, twice=twice, jobs=jobs) as sweeping:
            follow(console, sweeping, first, wanted, seconds)
    except Interrupted:
        print_line(console, f"stopped; {summary(sweeping.report)}")
        raise
    except (AssertionError, BrokenProcessPool) as error:
        fail(f"the simulations failed: {error or repr(error)}")
    report = sweeping.report
    print_reached(console, report)
    if report.found:
        print_line(console, summary(report))
        found = min(report.found, key=lambda each: each.seed or 0)
        print_found(console, found, _command(found, fixed), save, shrink)
        raise typer.Exit(1)
    print_line(console, f"{summary(report)}: every promise was kept", "green")
    if report.missing:
        number = len(report.missing)
        verb = "was" if number == 1 else "were"
        print_line(console, f"{number} of the required states {verb} never reached", "yellow")
    if report.missing and not fixed and report.runs >= RUNS:
        print_line(
            console, f"required states that were never reached: {', '.join(report.missing)}", "red"
        )
        raise typer.Exit(1)


def _fixed(ctx: typer.Context) -> dict[str, Any]:
    """Return the settings given as options; the others are drawn."""
    from holdfast.sim.settings import Settings
    from holdfast.sim.swarm import FAULTS, draw

    known = {each.name for each in fields(Settings)}
    given = {name: each for name, each in ctx.params.items() if name in known and each is not None}
    fixed = {**dict.fromkeys(FAULTS, 0.0), **given} if ctx.params["calm"] else given
    try:
        draw(0, fixed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return fixed


def _command(found: Found, fixed: Mapping[str, Any]) -> str:
    """Return the command that repeats a run."""
    words = ["holdfast", "sim", "run", "--first", str(found.seed), "--seeds", "1"]
    for name, value in fixed.items():
        option = "--" + name.replace("_", "-")
        if value is False:
            words.append("--unfair" if name == "fair" else f"--no-{option[2:]}")
        else:
            words += [option] if value is True else [option, f"{value:g}"]
    return shlex.join(words)
