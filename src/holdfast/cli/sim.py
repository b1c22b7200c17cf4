"""`holdfast sim`: hazards played, worlds run by the thousand, and single ones replayed.

The simulator is imported by the commands, not here: asking for help should not wait for it.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from holdfast.cli import Interrupted
from holdfast.cli.console import open_console
from holdfast.cli.sweeping import Sweeping, chunks, cores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.progress import Progress

    from holdfast.sim.hazards import Hazard, Side
    from holdfast.sim.play import Outcome
    from holdfast.sim.sweep import Found, Report
    from holdfast.sim.timeline import LaneKind, Timeline

LEAST = 40
"""Columns for an outcome, however narrow the terminal."""

RUNS = 1000
"""How many runs there are by default."""

ENOUGH = 3000
"""Runs that together reach every state: if so many never reached one, the sweep fails."""

A_MOMENT = 3.0
"""Seconds between two lines about a run that is made smaller."""

A_WHILE = 10.0
"""Seconds between two lines of progress where there is no terminal for a bar."""

SIDE_BY_SIDE = 130
"""Columns from which on two pictures stand beside each other."""

EVENTS, EVENTS_LEAST = 60, 20
"""How much of a long world is drawn: at most, and at least if it begins where nobody holds."""

LAST_LOOK = 1000
"""Microseconds for which the end of a world is drawn, so that it is seen how things stood."""

NOT_SAVED = "not a saved world: "

sim = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@sim.callback(invoke_without_command=True)
def _sim(ctx: typer.Context) -> None:
    """Watch locks in simulated worlds, where everything that can go wrong does.

    Example: `holdfast sim hazards`
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


# ---- options


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file that could not be written, before anything is done for it."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


PageFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=_in_a_folder, help="Write the pictures as one web page."),
]


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


# ---- sim hazards


@sim.command()
def hazards(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Only these.", show_default=False),
    ] = None,
    *,
    page: PageFile = None,
    only_list: Annotated[bool, typer.Option("--list", help="Only tell their names.")] = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Draw all, not only those that are named.")
    ] = False,
) -> None:
    """Play the ways in which locks go wrong, each in the classic way and with holdfast.

    Example: `holdfast sim hazards --page hazards.html`
    """
    from holdfast.sim.hazards import GALLERY

    console = open_console()
    chosen = [_hazard(name, GALLERY) for name in names] if names else list(GALLERY)
    if only_list:
        width = max(len(hazard.name) for hazard in chosen)
        for hazard in chosen:
            _say(console, f"{hazard.name:<{width}}  {hazard.title}")
        return
    shown = [(hazard, hazard.run()) for hazard in chosen]
    as_told = 0
    for hazard, both in shown:
        as_told += bool(both.broken.violated) and not both.holdfast.violated
        _tell_hazard(console, hazard, both.broken, both.holdfast)
        if pictures or names:
            _draw_both(console, both.broken.timeline, both.holdfast.timeline)
    if page is not None:
        from holdfast.sim.pictures.page import draw_page

        drawn = [each.timeline for _, both in shown for each in (both.broken, both.holdfast)]
        _write(page, draw_page(drawn, "How locks go wrong, and what holdfast does"))
        _say(console, f"the pictures are in {page}")
    if as_told < len(shown):
        _say(
            console, f"{len(shown) - as_told} of {len(shown)} did not come out as told", "bold red"
        )
        raise typer.Exit(1)
    ways = "the classic way" if len(shown) == 1 else f"each of {len(shown)} classic ways"
    _say(console, f"{ways} went wrong; with holdfast the resource was never harmed")
    if together := sum(bool(both.holdfast.together) for _, both in shown):
        _say(
            console,
            f"in {together} of {len(shown)} two clients did hold the lock at once, with holdfast "
            "too: there the fence protected the resource",
        )


def _hazard(name: str, gallery: Sequence[Hazard]) -> Hazard:
    for hazard in gallery:
        if hazard.name == name.replace("-", "_"):
            return hazard
    known = ", ".join(hazard.name for hazard in gallery)
    raise typer.BadParameter(f"no hazard is called {name!r}; there are {known}")


def _tell_hazard(console: Console, hazard: Hazard, classic: Side, fenced: Side) -> None:
    from rich.padding import Padding
    from rich.text import Text

    _say(console, hazard.title, "bold")
    _say(console, f"  {hazard.name}", "dim")
    console.print(Padding(Text(hazard.story), (0, 0, 0, 2)))
    style = "red" if fenced.violated else "yellow" if fenced.together else "green"
    for way, side, colour in (
        ("the classic way: ", classic, "red" if classic.violated else ""),
        ("with holdfast:   ", fenced, style),
    ):
        indent = 2 + len(way)
        lines = textwrap.wrap(_outcome_of(side), max(LEAST, console.width - indent))
        _say(console, f"  {way}{lines[0]}", colour)
        for line in lines[1:]:
            _say(console, " " * indent + line, colour)
    _say(console)


def _outcome_of(side: Side) -> str:
    refused = f"the fence refused {side.refused} late write{'s' * (side.refused > 1)}"
    if side.violated or not side.refused:
        return side.violated or "nothing went wrong"
    if side.together:
        who = " and ".join(side.together)
        who = who[0].upper() + who[1:]
        return f"{who} did hold the lock at the same time; {refused} and protected the resource"
    return f"nothing went wrong; {refused}"


def _draw_both(console: Console, left: Timeline, right: Timeline) -> None:
    from rich.table import Table

    from holdfast.sim.pictures.text import draw_text

    if console.width >= SIDE_BY_SIDE:
        beside = Table.grid(padding=(0, 3, 0, 0))
        width = (console.width - 3) // 2
        beside.add_row(draw_text(left, width), draw_text(right, width))
        console.print(beside)
        _say(console)
        return
    for each in (left, right):
        console.print(draw_text(each, console.width))
        _say(console)


# ---- sim run


@sim.command()
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
            callback=_in_a_folder,
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
    owner: Annotated[bool | None, _switch("All clients give the same owner.")] = None,
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
    slow: Annotated[float | None, _chance("A message is slow.")] = None,
    reset: Annotated[float | None, _chance("A connection is reset.")] = None,
    half_open: Annotated[float | None, _chance("A connection goes silent.")] = None,
    doubled: Annotated[float | None, _chance("A request is carried out twice.")] = None,
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
            _follow(console, sweeping, first, wanted, seconds)
    except Interrupted:
        _say(console, f"stopped; {_tell(sweeping.report)}")
        raise
    except (AssertionError, BrokenProcessPool) as error:
        _fail(f"the simulations could not be run: {error or repr(error)}")
    report = sweeping.report
    _tell_reached(console, report)
    if report.found:
        _say(console, _tell(report))
        found = min(report.found, key=lambda each: each.seed or 0)
        _tell_found(console, found, _command(found, fixed), save, shrink)
        raise typer.Exit(1)
    never = f"; {len(report.missing)} states were never reached" if report.missing else ""
    _say(console, f"{_tell(report)}: every promise was kept{never}", "green")
    if report.missing and not fixed and report.worlds >= ENOUGH:
        _say(console, f"never reached, though it has to be: {', '.join(report.missing)}", "red")
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


def _follow(
    console: Console, sweeping: Sweeping, first: int, wanted: int | None, seconds: float | None
) -> None:
    """Let the simulations run, and report progress: by a bar on a terminal, or else by lines."""
    how_many = "simulations" if wanted is None else f"{wanted} simulations"
    how_long = "" if seconds is None else f" for {seconds:g} s"
    _say(console, f"running {how_many}{how_long} from seed {first} on, {sweeping.jobs} at a time")
    bar = _bar(console) if console.is_terminal else None
    line_at = A_WHILE
    with bar or nullcontext():
        task = bar.add_task("", total=wanted or seconds) if bar else None
        limit = float("inf") if seconds is None else seconds
        for report in sweeping.run(chunks(first, wanted), limit):
            if bar is not None and task is not None:
                done = report.worlds if wanted else min(report.seconds, seconds or 0.0)
                bar.update(task, completed=done, description=_tell(report))
            elif report.seconds >= line_at:
                _say(console, _tell(report))
                line_at = report.seconds + A_WHILE


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}")
    return Progress(BarColumn(), words, TimeElapsedColumn(), console=console, transient=True)


def _tell(report: Report) -> str:
    rate = report.worlds / report.seconds if report.seconds else 0.0
    return f"{report.worlds} runs in {report.seconds:.1f} s, {rate:.0f} per second"


def _tell_reached(console: Console, report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from holdfast.sim.states import STATES
    from holdfast.sim.swarm import possible_pairs

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("runs", justify="right")
    table.add_column("that reached this state")
    for name in STATES:
        runs = report.reached[name]
        style = "" if runs else "yellow"
        table.add_row(Text(str(runs) if runs else "never", style), Text(name, style))
    console.print(table)
    _say(console)
    possible = possible_pairs()
    _say(
        console,
        f"pairs of features and faults that were switched on together: "
        f"{len(report.pairs & possible)} of {len(possible)} possible ones",
    )


def _tell_found(
    console: Console, found: Found, command: str, save: Path | None, seconds: float
) -> None:
    """Save it before it is made smaller: that takes a while, and may be interrupted."""
    from holdfast.sim.shrinking import smallest

    name = re.sub(r"[^\w-]+", "-", f"holdfast-{found.check}-seed-{found.seed}")
    path = save or Path(f"{name}.json")
    _say(console, f"seed {found.seed} breaks {found.check}: {found.detail}", "bold red")
    _say(console, f"settings: {_settings(found)}")
    _say(console, f"the same run again: {command}")
    _write(path, found.dump())
    _say(console, f"saved in {path}; to see it: holdfast sim replay {shlex.quote(str(path))}")
    if not seconds:
        return
    _say(console, f"looking for a smaller run, for {seconds:g} s at most ...")
    small = smallest(found, seconds, progress=_Progress(console))
    _write(path, small.dump())
    _say(console, f"a smaller run, saved in {path}: {_size(small)}")
    _say(console, f"settings: {_settings(small)}")
    _say(console)
    _draw(console, _picture(small, small.run(), whole=False))


class _Progress:
    """Tells from time to time how small a run has become."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line_at = time.monotonic() + A_MOMENT

    def __call__(self, found: Found) -> None:
        now = time.monotonic()
        if now >= self._line_at:
            self._line_at = now + A_MOMENT
            _say(self._console, f"  so far: {_size(found)}; {_settings(found)}", "dim")


def _size(found: Found) -> str:
    settings, special = found.settings, sum(map(bool, found.choices))
    parts = [
        (settings.nodes, "server"),
        (settings.clients, "client"),
        (settings.clients * settings.tasks * settings.turns, "turn"),
        (special, "choice"),
    ]
    counted = [f"{number} {word}{'s' * (number != 1)}" for number, word in parts]
    return f"{', '.join(counted[:-1])}, {counted[-1]} other than usual"


def _settings(found: Found) -> str:
    """Return on one line the settings that differ from a calm run's."""
    return " ".join(f"{name}={value}" for name, value in found.settings.unusual().items())


# ---- sim replay


@sim.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `holdfast sim run` saved.")],
    *,
    page: PageFile = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_in_a_folder,
            help="Write the picture as a drawing, for slides.",
        ),
    ] = None,
    all_messages: Annotated[
        bool,
        typer.Option("--all-messages", help="Draw all of it, and not only what led to its end."),
    ] = False,
) -> None:
    """Let a saved world happen again, and draw it. The status is 1 if it still breaks a promise.

    Example: `holdfast sim replay holdfast-S1-seed-42.json`
    """
    console = open_console()
    try:
        found = _loaded(file)
        outcome = found.run()
    except OSError as error:
        _fail(f"{file}: {error.strerror}")
    except ValueError as error:  # of reading it, or of settings with which no lock can be made
        _fail(f"{file} is not a saved world: {str(error).removeprefix(NOT_SAVED)}")
    timeline = _picture(found, outcome, whole=all_messages)
    _draw(console, timeline)
    _say(console, f"when it was kept: {_broke(found.check, found.detail)}")
    now = _broke(outcome.check, outcome.detail)
    _say(console, f"now:              {now}", "bold red" if outcome.check else "green")
    if page is not None:
        from holdfast.sim.pictures.page import draw_page

        _write(page, draw_page([timeline], timeline.title))
        _say(console, f"the picture is in {page}")
    if svg is not None:
        from holdfast.sim.pictures.page import draw_svg

        _write(svg, draw_svg(timeline))
        _say(console, f"the drawing is in {svg}")
    if outcome.check:
        raise typer.Exit(1)


def _loaded(file: Path) -> Found:
    from holdfast.sim.settings import Settings
    from holdfast.sim.sweep import Found

    found = Found.load(file.read_text(encoding="utf-8"))
    for each in fields(Settings):
        value, usual = getattr(found.settings, each.name), each.default
        if value != usual and not isinstance(value, (int, float)):
            raise ValueError(f"{each.name} is {value!r}")
    return found


def _broke(check: str, detail: str) -> str:
    return f"{check} was broken: {detail}" if check else "every promise was kept"


# ---- pictures of a world


def _picture(found: Found, outcome: Outcome, *, whole: bool) -> Timeline:
    """Make a timeline of a world: all of it, or what led to its end."""
    from holdfast.sim.deployment import nodes_of
    from holdfast.sim.telling import timeline_of

    settings = found.settings
    lanes: dict[str, LaneKind] = {f"c{each + 1}": "client" for each in range(settings.clients)}
    lanes |= dict.fromkeys(nodes_of(settings), "server")
    lanes |= {"replica": "server"} if settings.failover and not settings.replicas else {}
    lanes |= {"resource": "resource"}
    nodes = f" and {settings.nodes} nodes" if settings.nodes > 1 else ""
    title = (
        f"{outcome.check or 'No promise'} is broken in a world of {settings.clients} clients{nodes}"
    )
    verdict = outcome.detail or "Every promise was kept."
    end = (outcome.trace[-1][0] + LAST_LOOK, "end", "world")
    timeline = timeline_of([*outcome.trace, end], title, verdict, lanes)
    if whole:
        return timeline
    free = [at for at, kind, _, *rest in outcome.trace if kind == "holder" and rest[0] is None]
    return _end_of(_without_routine(timeline), free)


def _without_routine(timeline: Timeline) -> Timeline:
    """Leave out connecting and hanging up, and the pings and pongs."""
    arrows = [
        arrow
        for arrow in timeline.arrows
        if arrow.text not in {"ping", "pong", "connect", "answer to connect", "hang up"}
    ]
    return replace(timeline, arrows=arrows)


def _end_of(timeline: Timeline, free: Sequence[int]) -> Timeline:
    """Keep the last events, if possible from a moment on at which nobody held the lock."""
    moments = [mark.at for mark in timeline.marks]
    moments += [moment for bar in timeline.bars for moment in (bar.began, bar.ended)]
    moments += [arrow.arrived or arrow.sent for arrow in timeline.arrows]
    if len(moments) <= EVENTS:
        return timeline
    moments.sort()
    earliest, latest = moments[-EVENTS], moments[-EVENTS_LEAST]
    start = max((at for at in free if earliest <= at <= latest), default=earliest)
    return replace(
        timeline,
        title=f"{timeline.title}, from {start / 1000:.0f} ms on",
        arrows=[each for each in timeline.arrows if (each.arrived or each.sent) >= start],
        bars=[
            replace(bar, began=max(bar.began, start)) for bar in timeline.bars if bar.ended > start
        ],
        marks=[mark for mark in timeline.marks if mark.at >= start],
    )


def _draw(console: Console, timeline: Timeline) -> None:
    from holdfast.sim.pictures.text import draw_text

    console.print(draw_text(timeline, console.width))
    _say(console)


# ---- saying and writing


def _say(console: Console, words: str = "", style: str = "") -> None:
    """Write one line, however long."""
    console.print(words, style=style, soft_wrap=True)


def _fail(words: str) -> NoReturn:
    typer.echo(f"holdfast: {words}", err=True)
    raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _fail(f"{path} could not be written: {error.strerror}")
