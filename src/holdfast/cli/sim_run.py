"""`holdfast sim run`: its options, which are the settings of a run, and what it does with them."""

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
"""How many runs there are by default. That many reach every state, or the sweep fails."""

WHO = "Who takes part, and with what lock"
GOES_WRONG = "What goes wrong: probabilities"
BREAKS = "What breaks the assumptions: then only fences have to hold"


def _number(text: str, least: float) -> Any:  # noqa: ANN401 - what typer gives
    return typer.Option(min=least, help=text, rich_help_panel=WHO, show_default=False)


def _switch(text: str, *, off: str = "") -> Any:  # noqa: ANN401 - what typer gives
    """Make an option that switches a feature on or `off`; without it, that is drawn."""
    names = (off,) if off else ()
    return typer.Option(*names, help=text, rich_help_panel=WHO, show_default=False)


def _chance(text: str, panel: str = GOES_WRONG) -> Any:  # noqa: ANN401 - what typer gives
    return typer.Option(
        min=0, max=1, metavar="P", help=text, rich_help_panel=panel, show_default=False
    )


def run(
    ctx: typer.Context,
    *,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help=f"How many runs: {RUNS}, or as many as --seconds allow."),
    ] = None,
    first: Annotated[int, typer.Option(min=0, metavar="SEED", help="The first seed.")] = 0,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="For how long, at most.", show_default=False)
    ] = None,
    twice: Annotated[
        bool, typer.Option("--twice", help="Repeat each run, and compare the two.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="How many processes: as many as there are cores.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=in_a_folder,
            help="Where to save a run that breaks a promise.",
            show_default=False,
        ),
    ] = None,
    shrink: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="For how long to make such a run smaller."),
    ] = 60.0,
    calm: Annotated[
        bool, typer.Option("--calm", help="Nothing goes wrong, except what is given below.")
    ] = False,
    nodes: Annotated[int | None, _number("How many servers keep the lock together.", 1)] = None,
    replicas: Annotated[
        int | None, _number("How many replicas have what is granted, before it is.", 0)
    ] = None,
    sentinel: Annotated[bool | None, _switch("A promoted replica is in quarantine.")] = None,
    clients: Annotated[int | None, _number("How many clients.", 1)] = None,
    tasks: Annotated[int | None, _number("How many tasks each has.", 1)] = None,
    turns: Annotated[int | None, _number("How often each task takes the lock.", 1)] = None,
    ttl: Annotated[float | None, _number("The lock's ttl, in seconds.", 0.01)] = None,
    timeout: Annotated[float | None, _number("How long acquiring waits at most.", 0)] = None,
    hold: Annotated[float | None, _number("How long a turn takes, about.", 0)] = None,
    lock_delay: Annotated[float | None, _number("The lock's lock_delay.", 0)] = None,
    owner: Annotated[
        bool | None, _switch("Clients act for one of two owners, or for none.")
    ] = None,
    reentrant: Annotated[bool | None, _switch("Holders may acquire it again.")] = None,
    fair: Annotated[
        bool | None, _switch("The lock is granted in the order of requests.", off="--fair/--unfair")
    ] = None,
    polls: Annotated[bool | None, _switch("Waiting clients poll.")] = None,
    loop: Annotated[
        bool | None, _switch("With several servers: tasks share connections, as on a loop.")
    ] = None,
    skew: Annotated[
        float | None, _number("With several servers: seconds by which clocks may be wrong.", 0)
    ] = None,
    renew: Annotated[bool | None, _switch("Leases are renewed.")] = None,
    min_validity: Annotated[
        float | None, _number("What a lease has left at least when it is granted.", 0)
    ] = None,
    max_hold: Annotated[float | None, _number("The lock's max_hold.", 0)] = None,
    uncounted: Annotated[bool | None, _switch("The server does not count its listeners.")] = None,
    drift: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.005,
            help="By how much a clock may run fast or slow.",
            rich_help_panel=WHO,
            show_default=False,
        ),
    ] = None,
    drop: Annotated[float | None, _chance("A lease is dropped, and not released.", WHO)] = None,
    hand_off: Annotated[
        float | None, _chance("A lease is handed to another client in the end.", WHO)
    ] = None,
    atomic: Annotated[float | None, _chance("A turn begins with atomic operations.", WHO)] = None,
    cached: Annotated[
        float | None, _chance("A turn begins with calls of a cached function.", WHO)
    ] = None,
    extend: Annotated[float | None, _chance("A lease is extended at once.", WHO)] = None,
    faults_end: Annotated[
        float | None, _number("When the faults stop, and all clients have to finish.", 0)
    ] = None,
    slow: Annotated[float | None, _chance("A message is slow.")] = None,
    reset: Annotated[float | None, _chance("A connection is reset.")] = None,
    half_open: Annotated[float | None, _chance("A connection goes silent.")] = None,
    doubled: Annotated[float | None, _chance("A request is carried out twice.")] = None,
    server_crash: Annotated[
        float | None, _chance("The server restarts between a request and its reply.")
    ] = None,
    pause: Annotated[float | None, _chance("A client is paused.")] = None,
    crash: Annotated[float | None, _chance("A client dies.")] = None,
    cancel: Annotated[float | None, _chance("A task is cancelled.")] = None,
    partition: Annotated[float | None, _chance("A client is cut off for a while.")] = None,
    stop: Annotated[float | None, _chance("A client is paused, whatever it is doing.")] = None,
    freeze: Annotated[float | None, _chance("The server hangs for a while.")] = None,
    restart: Annotated[float | None, _chance("The server restarts, with its data.")] = None,
    script_flush: Annotated[float | None, _chance("The server forgets the scripts.")] = None,
    full: Annotated[float | None, _chance("The server is out of memory for a while.")] = None,
    stall: Annotated[
        float | None, _chance("A client is paused between an answer and its use.")
    ] = None,
    fork: Annotated[float | None, _chance("A process forks; its child goes on.")] = None,
    close: Annotated[float | None, _chance("A client is closed.")] = None,
    evict_holder: Annotated[float | None, _chance("An operator evicts the holder.")] = None,
    wipe: Annotated[float | None, _chance("The server restarts without its data.", BREAKS)] = None,
    evict: Annotated[float | None, _chance("The server evicts a key.", BREAKS)] = None,
    clock_jump: Annotated[float | None, _chance("The server's clock jumps.", BREAKS)] = None,
    failover: Annotated[float | None, _chance("A lagging replica takes over.", BREAKS)] = None,
) -> None:
    """Run simulations by seed: clients share a lock while things go wrong, and all is checked.

    The settings of each run are drawn from its seed: servers, clients, features of the lock, and
    what goes wrong. An option fixes one of them for all runs. The status is 1 if a promise was
    broken: then a smaller run that breaks it is shown, and saved for `holdfast sim replay`. It is
    also 1 if a state was reached by none of 3000 runs or more without such options.

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
        fail(f"the simulations could not be run: {error or repr(error)}")
    report = sweeping.report
    print_reached(console, report)
    if report.found:
        print_line(console, summary(report))
        found = min(report.found, key=lambda each: each.seed or 0)
        print_found(console, found, _command(found, fixed), save, shrink)
        raise typer.Exit(1)
    never = f"; {len(report.missing)} states were never reached" if report.missing else ""
    print_line(console, f"{summary(report)}: every promise was kept{never}", "green")
    if report.missing and not fixed and report.worlds >= RUNS:
        print_line(
            console, f"never reached, though it has to be: {', '.join(report.missing)}", "red"
        )
        raise typer.Exit(1)


def _fixed(ctx: typer.Context) -> dict[str, Any]:
    """Return the settings that were given; the others are drawn."""
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
    """Return the command that does the same run again."""
    words = ["holdfast", "sim", "run", "--first", str(found.seed), "--seeds", "1"]
    for name, value in fixed.items():
        option = "--" + name.replace("_", "-")
        if value is False:
            words.append("--unfair" if name == "fair" else f"--no-{option[2:]}")
        else:
            words += [option] if value is True else [option, f"{value:g}"]
    return shlex.join(words)
