"""`holdfast top`: the locks, live."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console
from holdfast.cli.locks import cell, holders_of, name_of, seconds, waiting_of
from holdfast.cli.servers import Local, Namespace, Urls, complain, overview_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from holdfast.cli.terminal import Terminal
    from holdfast.overview.looking import Overview
    from holdfast.overview.views import LockView, Survey

NO_TERMINAL = 2
RECENT = 10.0
"""Seconds over which the rate of hand-overs is taken."""

REMEMBERED = 100_000
"""Locks of which is remembered who held them last."""

HEAD, FOOT = 4, 1
"""Lines above and below the locks."""

MEDIUM, WIDE = 60, 90
"""Columns from which on there is room for times, and for everything."""


class Board:
    """What is on the screen, and why: the last look, what was counted, what the user asked for."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.locks: tuple[LockView, ...] = ()
        self.looked_at: float | None = None
        """When the locks were last seen."""
        self.took = 0.0
        self.trouble = ""
        self.filter = ""
        self.typing = False
        self.by, self.reverse = "t", False
        self.first = 0
        self.found = 0
        """How many there are to be seen, of which the first ones may be above the screen."""
        self.changes: dict[bytes, int] = {}
        """Of each lock, how often another held it than the look before."""
        self._last: dict[bytes, str] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._began: float | None = None

    def take(self, survey: Survey, now: float, took: float) -> None:
        """Take in a look that ended just now."""
        self.trouble = "; ".join(survey.failures.values())
        if not survey.complete and not survey.locks:
            return
        self.locks, self.looked_at, self.took = survey.locks, now, took
        seen = 0
        for lock in survey.locks:
            if not lock.holders:
                continue
            before = self._last.pop(lock.key, lock.token)
            self._last[lock.key] = lock.token  # the latest last
            if before != lock.token:
                seen += 1
                self.changes[lock.key] = self.changes.get(lock.key, 0) + 1
        while len(self._last) > REMEMBERED:
            forgotten = next(iter(self._last))
            del self._last[forgotten]
            self.changes.pop(forgotten, None)
        self._began = now if self._began is None else self._began
        self._recent.append((now, seen))
        while self._recent and self._recent[0][0] < now - RECENT:
            self._recent.popleft()

    def fail(self, why: str) -> None:
        """Take in that there was nothing to be seen."""
        self.trouble = why

    def rate(self, now: float) -> float:
        """Hand-overs seen a second, of late."""
        if self._began is None or now <= self._began:
            return 0.0
        return sum(seen for _, seen in self._recent) / min(RECENT, now - self._began)

    def press(self, key: str) -> bool:
        """Do what a key is for; False if it is for leaving."""
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
        """The locks that are to be seen, of which no more than `room` at once."""
        from holdfast.overview.patterns import matcher

        matches = matcher(self.filter, anywhere=True)
        _, how = SORTS[self.by]
        found = [lock for lock in self.locks if matches(lock.shown)]
        found.sort(key=lambda lock: (how(self, lock), lock.shown), reverse=self.reverse)
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
"""Rows that a key moves by, as far as there are any."""

SORTS: dict[str, tuple[str, Callable[[Board, LockView], float]]] = {
    "n": ("name", lambda _, __: 0.0),
    "a": ("age", lambda _, lock: -(lock.age or 0.0)),
    "l": ("left", lambda _, lock: math.inf if lock.remaining is None else lock.remaining),
    "w": ("waiting", lambda _, lock: -lock.waiting),
    "t": ("longest wait", lambda _, lock: -lock.longest_wait),
    "h": ("hand-overs", lambda board, lock: -board.changes.get(lock.key, 0)),
}
"""What locks are sorted by, by its key; what is worth a look comes first, and else the name."""


def top(
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="Names to watch, as for `ls`.", show_default=False),
    ] = None,
    *,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, help="Seconds between two looks.")
    ] = 2.0,
    namespace: Namespace = None,
    urls: Urls = None,
    local: Local = False,
) -> None:
    """Watch the locks: holders, waiters, hand-overs, the longest wait. Press q to leave.

    Example: `holdfast top 'invoice:*' --interval 1`

    Keys: n, a, l, w, t, h sort by name, age, time left, waiters, longest wait, hand-overs, and
    pressed again the other way; / filters by what is typed; arrows, Page Up and Down, Home and End
    scroll.

    The server is looked through once an interval, by SCAN, beginning when the last look has ended.
    Hand-overs are those that are seen: a lock that another holds than the look before counts
    one, whatever happened between. If the server goes away, what was seen last stays, and it is
    looked for at each interval.

    The status is 0 when you leave by q; 2 without a terminal: `holdfast ls --json` is for programs;
    3 if no URL is given and no embedded server runs.
    """
    from holdfast.cli.locks import matching
    from holdfast.cli.terminal import Terminal, is_terminal

    if not is_terminal():
        complain("top needs a terminal; for programs there is holdfast ls --json")
        raise typer.Exit(NO_TERMINAL)
    wanted = matching(pattern, namespace)
    with overview_of(urls, local=local) as overview:
        overview.check()
        with Terminal(open_console()) as terminal:
            looks = Looks(overview, wanted, interval, terminal.ring)
            _watch(terminal, looks, Board(", ".join(overview.servers)), interval)


class Looks:
    """Looks again and again, in a thread of its own: a server that hangs does not hang the keys."""

    def __init__(
        self,
        overview: Overview,
        wanted: Callable[[bytes], bool],
        interval: float,
        ring: Callable[[], None],
    ) -> None:
        self._overview = overview
        self._wanted = wanted
        self._interval = interval
        self._ring = ring
        self._seen: deque[Callable[[Board], None]] = deque()
        threading.Thread(target=self._look, name="holdfast-top", daemon=True).start()

    def _look(self) -> None:
        from holdfast.errors import HoldfastError

        while True:
            began = time.monotonic()
            try:
                survey = self._overview.survey(self._wanted)
            except HoldfastError as error:
                why = str(error)
                self._seen.append(lambda board, why=why: board.fail(why))  # type: ignore[misc]
            else:
                now = time.monotonic()
                news = (survey, now, now - began)
                self._seen.append(lambda board, news=news: board.take(*news))  # type: ignore[misc]
            self._ring()
            time.sleep(self._interval)

    def tell(self, board: Board) -> None:
        """Have the board take in what was seen since."""
        while self._seen:
            self._seen.popleft()(board)


def _watch(terminal: Terminal, looks: Looks, board: Board, interval: float) -> None:
    console = terminal.console
    while True:
        looks.tell(board)
        terminal.draw(_picture(board, console.width, console.height, interval))
        if not all(board.press(key) for key in terminal.wait(1.0)):
            return


# ---- what it looks like


def _picture(board: Board, width: int, height: int, interval: float) -> Group:
    from rich.console import Group

    room = max(1, height - HEAD - FOOT)
    rows = board.rows(room)
    blank = [cell("")] * (room - len(rows))
    return Group(*_head(board, interval, room), _table(board, rows, width), *blank, _foot(board))


def _head(board: Board, interval: float, room: int) -> list[Text]:
    now = time.monotonic()
    held = sum(lock.state == "held" for lock in board.locks)
    waiting = sum(lock.waiting for lock in board.locks)
    longest = max((lock.longest_wait for lock in board.locks), default=0.0)
    counts = (
        f"{held} held, {waiting} waiting, longest wait {seconds(longest)}, "
        f"{board.rate(now):.1f} hand-overs a second seen"
    )
    if board.looked_at is None:
        state = cell(board.trouble or "looking …", "bold red" if board.trouble else "dim")
    elif board.trouble:
        ago = seconds(now - board.looked_at)
        state = cell(f"as seen {ago} ago; {board.trouble}", "bold red")
    else:
        looks = f"one look every {interval:g} s, the last took {board.took:.3f} s"
        part = f"rows {board.first + 1} to {min(board.first + room, board.found)} of {board.found}"
        state = cell(f"{part}; {looks}" if board.found > room else looks, "dim")
    return [cell(f"locks on {board.servers}", "dim"), cell(counts, "bold"), state]


def _foot(board: Board) -> Text:
    name, _ = SORTS[board.by]
    if board.typing:
        return cell(f"filter: {board.filter}▏ (Enter keeps it, Esc drops it)", "reverse")
    sorts = " ".join(f"{key} {name}" for key, (name, _) in SORTS.items())
    filtered = f"filter {board.filter!r}, Esc drops it" if board.filter else "/ filter"
    return cell(f"q quit  {filtered}  sorted by {name}: {sorts}", "dim")


def _table(board: Board, rows: list[LockView], width: int) -> Table:
    from rich.table import Table

    columns = ["waiting"]
    if width >= MEDIUM:
        columns = ["age", "left", "waiting", "longest"]
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
            "age": "" if lock.age is None else seconds(lock.age),
            "left": "" if not lock.holders else seconds(lock.remaining),
            "waiting": waiting_of(lock),
            "longest": seconds(lock.longest_wait) if lock.waiting else "",
            "hand-overs": str(board.changes.get(lock.key) or ""),
        }
        style = "" if lock.state == "held" else "yellow"
        told = [cell(facts[name]) for name in columns]
        table.add_row(name_of(lock), cell(holders_of(lock), style), *told)
    return table
