"""`holdfast demo`: what a lock is for, in four scenes, played by real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli import Interrupted
from holdfast.cli.console import open_console
from holdfast.cli.demo_parts import SALES, SELLERS, TTL, Account, stock_key
from holdfast.cli.servers import unasked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from rich.console import Console


def demo() -> None:
    """Show what a lock is for, and what this one does, with real processes, in ten seconds.

    Four scenes on the embedded server: the lost update; the same with a lock; a holder
    that is killed; a holder that is paused, and writes when its time is up.

    Example: `holdfast demo`
    """
    from holdfast import embedded

    with unasked():
        url = f"unix://{embedded.ensure()}"
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # so that no process stays, least of all a paused one
    stage = _Stage(open_console(), url)
    stage.title("Processes share one thing. What goes wrong, and what a lock does about it.")
    with stage.cast("sell", SELLERS) as sellers:
        _lost_update(stage, sellers)
        _the_same_with_a_lock(stage, sellers)
    with stage.cast("hold", 2) as (holder, waiter):
        _the_holder_dies(stage, holder, waiter)
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        account = Account(Path(folder, "account.db"))
        account.open()
        with stage.cast("write", 2, str(account.path)) as (first, second):
            _a_late_write(stage, account, first, second)
    stage.title("What to read next")
    stage.line("README.md: how to use it, and what it does not promise.")
    stage.line("docs/guarantees.md: what holds on one server, on several, behind Sentinel.")
    stage.line("holdfast run --help: any command, under a lock. holdfast top: who holds what.")


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(number)


# The scenes


def _lost_update(stage: _Stage, sellers: list[_Actor]) -> None:
    stage.title("1  The lost update")
    stage.line(f"{SELLERS} processes sell {SALES} units: read the stock, think, write it less one.")
    stage.sold("without a lock", stage.sell(sellers, "unlocked"))
    stage.line("Two read the same number, both write it less one: one of the two sales is lost.")


def _the_same_with_a_lock(stage: _Stage, sellers: list[_Actor]) -> None:
    stage.title("2  The same, with a lock")
    stage.code('with client.lock("stock"):')
    stage.sold("with holdfast", stage.sell(sellers, "locked"))


def _the_holder_dies(stage: _Stage, holder: _Actor, waiter: _Actor) -> None:
    stage.title("3  The holder dies")
    fence = int(holder.does("acquire"))
    stage.line(f"Process {holder.pid} holds the lock (ttl {TTL:g} s), process {waiter.pid} waits.")
    waiter.starts("acquire")
    os.kill(holder.pid, signal.SIGKILL)
    died_at = time.monotonic()
    stage.code(f"kill -9 {holder.pid}")
    next_fence = int(waiter.says())
    waited = time.monotonic() - died_at
    stage.good(f"Process {waiter.pid} has it {waited:.1f} s later. Nobody had to clean up.")
    stage.line(f"Each holding has a number, greater than all before: {fence} < {next_fence}.")


def _a_late_write(stage: _Stage, account: Account, first: _Actor, second: _Actor) -> None:
    stage.title("4  The holder is paused, and writes late")
    old = int(first.does("acquire"))
    stage.line(f"Process {first.pid} holds the lock, number {old}, and is about to write.")
    os.kill(first.pid, signal.SIGSTOP)
    stage.code(f"kill -STOP {first.pid}      # a long garbage collection, a laptop's lid")
    new = int(second.does("acquire"))
    stage.line(f"Its time is up: process {second.pid} gets the lock, number {new}, and writes.")
    second.does("write")
    os.kill(first.pid, signal.SIGCONT)
    stage.code(f"kill -CONT {first.pid}      # it has not noticed anything, and writes")
    answer = first.does("write")
    stage.code("UPDATE account SET …, fence = ? WHERE fence <= ?      # the number goes along")
    if answer == "refused" and account.written_by() == second.pid:
        stage.good(f"The database refuses: {old} is behind {new}. The late write did no harm.")
    else:
        raise SystemExit(f"holdfast: the late write came through ({answer}): please report it")
    stage.line(f"The holder was told as well: {first.does('check')}.")


class _Stage:
    """Where the scenes are told."""

    def __init__(self, console: Console, url: str) -> None:
        self._console = console
        self._url = url

    def title(self, words: str) -> None:
        """Begin a scene."""
        self._console.print()
        self._console.print(words, style="bold")

    def line(self, words: str) -> None:
        """Tell something."""
        self._console.print(f"   {words}", soft_wrap=True)

    def good(self, words: str) -> None:
        """Tell something that went well."""
        self._console.print(f"   {words}", style="green", soft_wrap=True)

    def code(self, words: str) -> None:
        """Show what somebody typed."""
        self._console.print(f"      {words}", style="cyan", soft_wrap=True)

    def sold(self, how: str, left: int) -> None:
        """Tell how a sale went."""
        words = f"   {how:<16}{left:>4} left in stock, {left or 'no'} sales lost"
        self._console.print(words, style="bold red" if left else "green", soft_wrap=True)

    @contextlib.contextmanager
    def cast(self, part: str, times: int, thing: str = "") -> Iterator[list[_Actor]]:
        """Have processes play a part."""
        actors: list[_Actor] = []
        try:
            actors += [_Actor(part, self._url, thing or stock_key()) for _ in range(times)]
            for actor in actors:
                actor.says()
            yield actors
        finally:
            for actor in actors:
                actor.leave()

    def sell(self, sellers: list[_Actor], how: str) -> int:
        """Have all sell at once; return what is left then."""
        import redis

        with redis.Redis.from_url(self._url) as shop:
            shop.set(stock_key(), SALES, px=60_000)
            for seller in sellers:
                seller.starts(how)
            for seller in sellers:
                seller.says()
            return int(shop.getdel(stock_key()) or 0)


class _Actor:
    """A process that plays a part."""

    def __init__(self, part: str, url: str, thing: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own
            [sys.executable, "-m", "holdfast.cli.demo_parts", part, url, thing],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the stage
        )
        self.pid = self._process.pid

    def starts(self, what: str) -> None:
        """Have it begin to do something."""
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()

    def says(self) -> str:
        """What it has to say when it is done."""
        assert self._process.stdout is not None  # noqa: S101 - asked for above
        words = self._process.stdout.readline().strip()
        if not words:
            raise SystemExit("holdfast: a process of the demo failed; its error is above")
        return words

    def does(self, what: str) -> str:
        """Have it do something, and say what came of it."""
        self.starts(what)
        return self.says()

    def leave(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        self._process.communicate()
