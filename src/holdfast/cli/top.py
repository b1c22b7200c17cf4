"""`holdfast top`: a live view of the locks."""

from __future__ import annotations

import math
import sys
import textwrap
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import format_seconds, open_console, sanitized
from holdfast.cli.locks import age_of, cell, holders_of, name_of, waiting_of
from holdfast.cli.servers import Local, OnlyNamespace, Urls, open_overview, print_stderr

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from holdfast.cli.terminal import Terminal
    from holdfast.overview.scan import Overview
    from holdfast.overview.views import LockView, Survey

NO_TERMINAL = 2
RATE_PERIOD = 10.0
"""Seconds over which the rate of hand-overs is averaged."""

REMEMBERED_MAX = 100_000
"""Number of locks whose last holder is remembered."""

HEADER_LINES, FOOTER_LINES = 4, 1
"""Lines above and below the locks, if there is no error of several lines."""

ERROR_LINES = 2
"""The most lines for an error."""

MEDIUM, WIDE = 60, 80
"""Widths from which times, and all columns are shown."""


class TopState:
    """The data on the screen: the last survey, counters, filter and sorting."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.locks: tuple[LockView, ...] = ()
        self.updated_at: float | None = None
        """When the last survey ended."""
        self.took = 0.0
        self.error = ""
        self.filter = ""
        self.typing = False
        self.by, self.reverse = "t", False
        self.first = 0
        self.found = 0
        """Number of locks that match the filter."""
        self.changes: dict[bytes, int] = {}
        """For each lock, how often its holder differed from the previous survey."""
        self._last_holder: dict[bytes, str] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._started_at: float | None = None

    def update(self, survey: Survey, now: float, took: float) -> None:
        """Use a survey that has just ended."""
        self.error = "; ".join(survey.failures.values())
        if not survey.complete and not survey.locks:
            return
        self.locks, self.updated_at, self.took = survey.locks, now, took
        seen = 0
        for lock in survey.locks:
            if not lock.holders:
                continue
            # A semaphore has a token per holder.
            tokens = lock.token or " ".join(holder.token for holder in lock.holders)
            before = self._last_holder.pop(lock.key, tokens)
            self._last_holder[lock.key] = tokens  # moves it to the end
            if before != tokens:
                seen += 1
                self.changes[lock.key] = self.changes.get(lock.key, 0) + 1
        while len(self._last_holder) > REMEMBERED_MAX:
            forgotten = next(iter(self._last_holder))
            del self._last_holder[forgotten]
            self.changes.pop(forgotten, None)
        self._started_at = now if self._started_at is None else self._started_at
        self._recent.append((now, seen))
        while self._recent and self._recent[0][0] < now - RATE_PERIOD:
            self._recent.popleft()

    def fail(self, why: str) -> None:
        """Show an error instead of a new survey."""
        self.error = why

    def rate(self, now: float) -> float:
        """Return the hand-overs per second, averaged over `RATE_PERIOD`."""
        if self._started_at is None or now <= self._started_at:
            return 0.0
        return sum(seen for _, seen in self._recent) / min(RATE_PERIOD, now - self._started_at)

    def press(self, key: str) -> bool:
        """Handle a key; return False if it quits."""
        from holdfast.cli import terminal

        if self.typing:
            self._type(key)
        elif key == "q":
            return False
        elif key == "/":
            self.typing = True
        elif key in SORTS:
            self.reverse = key == self.by and not self.reverse
            self.by = key
        elif key == terminal.ESCAPE:
            self.filter = ""
        else:
            self.first += SCROLLS.get(key, 0)
        return True

    def _type(self, key: str) -> None:
        from holdfast.cli import terminal

        if key in (terminal.ENTER, terminal.ESCAPE):
            self.typing = False
            self.filter = "" if key == terminal.ESCAPE else self.filter
        elif key == terminal.BACKSPACE:
            self.filter = self.filter[:-1]
        elif key == terminal.ERASE:
            self.filter = ""
        elif len(key) == 1 and key.isprintable():
            self.filter += key
        self.first = 0

    def rows(self, room: int) -> list[LockView]:
        """Return the locks to show: filtered, sorted, at most `room`."""
        from holdfast.overview.patterns import matcher

        matches = matcher(self.filter, anywhere=True)
        _, how = SORTS[self.by]
        found = [lock for lock in self.locks if matches(lock.display_name)]
        found.sort(key=lambda lock: (how(self, lock), lock.display_name), reverse=self.reverse)
        self.first = max(0, min(self.first, len(found) - room))
        self.found = len(found)
        return found[self.first : self.first + room]


SCROLLS = {
    "down": 1,
    "j": 1,
    "up": -1,
    "k": -1,
    "page down": 10,
    " ": 10,
    "page up": -10,
    "end": sys.maxsize,
    "G": sys.maxsize,
    "home": -sys.maxsize,
    "g": -sys.maxsize,
}
"""Rows by which a key scrolls."""

SORTS: dict[str, tuple[str, Callable[[TopState, LockView], float]]] = {
    "n": ("name", lambda _, __: 0.0),
    "a": ("age", lambda _, lock: -(lock.age or 0.0)),
    "l": ("left", lambda _, lock: math.inf if lock.remaining is None else lock.remaining),
    "w": ("waiting", lambda _, lock: -lock.waiting),
    "t": ("wait", lambda _, lock: -lock.longest_wait),
    "h": ("hand-overs", lambda state, lock: -state.changes.get(lock.key, 0)),
}
"""Sort orders by key: a label and the sort value; equal locks are sorted by name."""


def top(
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="Names to show, as for `ls`.", show_default=False),
    ] = None,
    *,
    interval: Annotated[
        float,
        typer.Option("--interval", "-i", min=0.1, metavar="SECONDS", help="Time between updates."),
    ] = 2.0,
    namespace: OnlyNamespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    """Show locks live: holders, waiters, hand-overs. Press q to quit.

    Example: `holdfast top 'invoice:*' --interval 1`

    Keys: n, a, l, w, t, h sort by name, age, time left, waiters, longest wait, hand-overs; the
    same key again reverses the order. / filters by name. Arrows or j and k scroll by one row, Page
    Up, Page Down and Space by ten. Home or g shows the first row, End or G the last.

    Each update scans the server (SCAN); the interval starts when the previous update has ended. A
    lock whose holder differs from the previous update counts as one hand-over, even if there were
    more in between; so does a semaphore whose holders differ. If the server becomes unreachable,
    the last update stays on the screen, and the next ones are tried at each interval.

    Exit status:

    * 0: you pressed q

    * 2: wrong usage, or no terminal (use `holdfast ls --json` in programs)

    * 3: no URL is given and no embedded server is running
    """
    from holdfast.cli.locks import matching
    from holdfast.cli.terminal import Terminal, is_terminal

    if not is_terminal():
        print_stderr("top needs a terminal; programs can use holdfast ls --json")
        raise typer.Exit(NO_TERMINAL)
    wanted = matching(pattern, namespace)
    with open_overview(urls, local=local) as overview:
        overview.check()
        with Terminal(open_console()) as terminal:
            poller = Poller(overview, wanted, interval, terminal.wake)
            _watch(terminal, poller, TopState(", ".join(overview.servers)), interval)


class Poller:
    """Surveys the locks in a background thread, so that a hung server does not block the keys."""

    def __init__(
        self,
        overview: Overview,
        wanted: Callable[[bytes], bool],
        interval: float,
        wake: Callable[[], None],
    ) -> None:
        self._overview = overview
        self._wanted = wanted
        self._interval = interval
        self._wake = wake
        self._updates: deque[Callable[[TopState], None]] = deque()
        threading.Thread(target=self._poll, name="holdfast-top", daemon=True).start()

    def _poll(self) -> None:
        from holdfast.errors import HoldfastError

        while True:
            began = time.monotonic()
            try:
                survey = self._overview.survey(self._wanted)
            except HoldfastError as error:
                why = str(error)
                self._updates.append(lambda state, why=why: state.fail(why))  # type: ignore[misc]
            else:
                now = time.monotonic()
                update = (survey, now, now - began)
                self._updates.append(lambda state, update=update: state.update(*update))  # type: ignore[misc]
            self._wake()
            time.sleep(self._interval)

    def apply_to(self, state: TopState) -> None:
        """Apply the results since the last call."""
        while self._updates:
            self._updates.popleft()(state)


def _watch(terminal: Terminal, poller: Poller, state: TopState, interval: float) -> None:
    console = terminal.console
    while True:
        poller.apply_to(state)
        terminal.draw(_render(state, console.width, console.height, interval))
        if not all(state.press(key) for key in terminal.wait(1.0)):
            return


# Rendering


def _render(state: TopState, width: int, height: int, interval: float) -> Group:
    from rich.console import Group

    now = time.monotonic()
    error = _error_lines(state, now, width)
    room = max(1, height - HEADER_LINES - FOOTER_LINES - max(0, len(error) - 1))
    rows = state.rows(room)
    blank = [cell("")] * (room - len(rows))
    return Group(
        cell(f"locks on {state.servers}", "dim"),
        cell(_counts(state, now), "bold"),
        *(error or [cell(_status(state, interval, room), "dim")]),
        _table(state, rows, width),
        *blank,
        _footer(state),
    )


def _counts(state: TopState, now: float) -> str:
    """Return the totals; nothing before the first update."""
    if state.updated_at is None:
        return ""
    held = sum(lock.state == "held" for lock in state.locks)
    waiting = sum(lock.waiting for lock in state.locks)
    longest = max((lock.longest_wait for lock in state.locks), default=0.0)
    return (
        f"{held} held, {waiting} waiting, longest wait {format_seconds(longest)}, "
        f"{state.rate(now):.1f} hand-overs per second"
    )


def _error_lines(state: TopState, now: float, width: int) -> list[Text]:
    """Return the error, and the age of the last update, in one line or two."""
    if not state.error:
        return []
    updated = state.updated_at
    ago = "" if updated is None else f"updated {format_seconds(now - updated)} ago; "
    text = sanitized(ago + state.error)
    lines = textwrap.wrap(text, max(width, 2), max_lines=ERROR_LINES, placeholder="…")
    return [cell(line, "bold red") for line in lines]


def _status(state: TopState, interval: float, room: int) -> str:
    if state.updated_at is None:
        return "scanning …"
    parts = [f"filter {state.filter!r} (Esc removes it)"] if state.filter else []
    if state.found > room:
        last = min(state.first + room, state.found)
        parts.append(f"rows {state.first + 1} to {last} of {state.found}")
    parts.append(f"updated every {interval:g} s, the last update took {state.took:.3f} s")
    return "; ".join(parts)


def _footer(state: TopState) -> Text:
    from rich.text import Text

    if state.typing:
        return cell(f"filter: {state.filter}▏ (Enter: keep, Esc: remove)", "reverse")
    footer = Text("q quit  / filter  sort: ", "dim", no_wrap=True, overflow="ellipsis")
    for number, (key, (name, _)) in enumerate(SORTS.items()):
        footer.append("  " if number else "")
        footer.append(f"{key} {name}", "reverse" if key == state.by else "")
    return footer


def _table(state: TopState, rows: list[LockView], width: int) -> Table:
    from rich.table import Table

    columns = ["waiting"]
    if width >= MEDIUM:
        columns = ["age", "left", "waiting", "longest wait"]
    if width >= WIDE:
        columns.append("hand-overs")
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="reverse", expand=True
    )
    table.add_column("lock", ratio=1)
    table.add_column("holder", ratio=1)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for lock in rows:
        facts = {
            "age": age_of(lock),
            "left": "" if not lock.holders else format_seconds(lock.remaining),
            "waiting": waiting_of(lock),
            "longest wait": format_seconds(lock.longest_wait) if lock.waiting else "",
            "hand-overs": str(state.changes.get(lock.key) or ""),
        }
        style = "" if lock.state == "held" else "yellow"
        cells = [cell(facts[name]) for name in columns]
        table.add_row(name_of(lock), cell(holders_of(lock), style), *cells)
    return table
