"""`holdfast demo`: what a lock is for, in seven scenes with real processes."""

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
from holdfast.cli.demo_workers import (
    GIVE_UP_AFTER,
    PERMITS,
    SALES,
    SELLERS,
    TTL,
    Account,
    key_of,
)
from holdfast.cli.servers import exit_if_unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from rich.console import Console


def demo() -> None:
    """Show what a lock is for, with real processes, in twenty seconds.

    Example: `holdfast demo`

    Seven scenes on the embedded server: a lost update; the same with a lock; a holder that is
    killed; a holder that is stopped, and writes after its lease has ended; a deadlock of two locks,
    and how to avoid it; a holder of permits that is killed; work that is done once, although a
    process dies.
    """
    from holdfast import embedded

    with exit_if_unreachable():
        url = f"unix://{embedded.ensure()}"
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # so that no worker survives, not even a stopped one
    show = _Demo(open_console(), url)
    show.title("Several processes share one resource: what goes wrong, and how a lock helps.")
    with show.start_workers("sell", SELLERS) as sellers:
        _lost_update(show, sellers)
        _with_a_lock(show, sellers)
    with show.start_workers("hold", 2) as (holder, waiter):
        _killed_holder(show, holder, waiter)
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        account = Account(Path(folder, "account.db"))
        account.create()
        with show.start_workers("write", 2, str(account.path)) as (first, second):
            _late_write(show, account, first, second)
    with show.start_workers("share", 3, key_of("")) as (first, second, third):
        _two_locks(show, first, second)
        _killed_permit(show, first, second, third)
        _work_once(show, second, third)
    show.title("What to read next")
    show.text("README.md: how to use holdfast, and what it does not guarantee.")
    show.text("docs/guarantees.md: the guarantees on one server, a quorum, Sentinels.")
    show.text("holdfast run --help: run a command under a lock.")
    show.text("holdfast top: see all locks and their holders.")


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(number)


# The scenes


def _lost_update(show: _Demo, sellers: list[_Worker]) -> None:
    show.title("1  A lost update")
    show.text(f"{SELLERS} processes sell {SALES} units. For each sale they read the stock,")
    show.text("and write back one less.")
    show.sold("without a lock", show.sell(sellers, "unlocked"))
    show.text("Two processes read the same number, and both write back one less:")
    show.text("one sale is lost.")


def _with_a_lock(show: _Demo, sellers: list[_Worker]) -> None:
    show.title("2  The same with a lock")
    show.code('with client.lock("stock"):')
    show.sold("with holdfast", show.sell(sellers, "locked"))


def _killed_holder(show: _Demo, holder: _Worker, waiter: _Worker) -> None:
    show.title("3  The holder is killed")
    fence = int(holder.request("acquire"))
    show.text(f"Process {holder.pid} holds the lock (ttl {TTL:g} s), process {waiter.pid} waits.")
    waiter.send("acquire")
    answers: list[str] = []
    waited = show.kill(holder, lambda: answers.append(waiter.receive()))
    next_fence = int(answers[0])
    show.success(f"Process {waiter.pid} holds the lock {waited:.1f} s later, without any cleanup.")
    show.text("Each lease has a fence, greater than all fences before it:")
    show.text(f"{fence} < {next_fence}.")


def _late_write(show: _Demo, account: Account, first: _Worker, second: _Worker) -> None:
    show.title("4  The holder is stopped, and writes too late")
    old = int(first.request("acquire"))
    show.text(f"Process {first.pid} holds the lock, fence {old}, and will write.")
    os.kill(first.pid, signal.SIGSTOP)
    show.code(f"kill -STOP {first.pid}      # as a long garbage collection would")
    new = int(second.request("acquire"))
    show.text(f"Its lease ends. Process {second.pid} is granted the lock, fence {new},")
    show.text("and writes.")
    second.request("write")
    os.kill(first.pid, signal.SIGCONT)
    show.code(f"kill -CONT {first.pid}      # continues, and writes")
    answer = first.request("write")
    show.code("UPDATE account SET …, fence = ? WHERE fence <= ?")
    if answer == "refused" and account.written_by() == second.pid:
        show.success("The database refuses the late write: its fence is lower.")
    else:
        raise SystemExit(f"holdfast: the late write was not refused ({answer}): please report it")
    show.text(f"The lease of process {first.pid} reports the loss too:")
    show.text(f"{first.request('check')}.")


def _two_locks(show: _Demo, first: _Worker, second: _Worker) -> None:
    show.title("5  Two locks at once")
    first.request("lock a")
    second.request("lock b")
    show.text(f"Process {first.pid} has locked account a, and {second.pid} account b.")
    first.send("lock b")
    second.send("lock a")
    for each in (first, second):
        each.receive()
    show.text("Now each of them needs the other account too: a deadlock.")
    show.failure(f"After {GIVE_UP_AFTER:g} s it is ended by the timeout, and nothing is done.")
    for each in (first, second):
        each.request("unlock")
    show.code("with client.lock_all([source, target]):")
    left, count = show.transfer(first, second)
    if left:
        raise SystemExit(f"holdfast: {left} is missing in the accounts: please report it")
    show.success(f"{count} transfers, half of them from a to b and half from b to a: no deadlock,")
    show.success("and the total is unchanged.")


def _killed_permit(show: _Demo, first: _Worker, second: _Worker, waiter: _Worker) -> None:
    show.title("6  A holder of a permit is killed")
    show.code(f'client.semaphore("gpu", limit={PERMITS})')
    for each in (first, second):
        each.request("take_permit")
    show.text(f"Processes {first.pid} and {second.pid} have a permit each,")
    show.text(f"process {waiter.pid} waits.")
    waiter.send("take_permit")
    waited = show.kill(first, waiter.receive)
    used = waiter.request("permits_in_use")
    show.success(f"Process {waiter.pid} has its permit {waited:.1f} s later.")
    show.success(f"{used} of {PERMITS} permits are in use: none was lost.")


def _work_once(show: _Demo, first: _Worker, second: _Worker) -> None:
    show.title("7  Work that is done once")
    show.code('with client.once("order 7", keep=86400) as run:')
    first.request("begin_charge")
    show.text(f"Process {first.pid} begins to charge order 7, and so would {second.pid}.")
    second.send("charge")
    waited = show.kill(first, second.receive)
    show.text(f"Process {second.pid} waited for the result, and charges {waited:.1f} s later.")
    if second.request("charge") != f"received {second.pid}":
        raise SystemExit("holdfast: the order was charged twice: please report it")
    show.success("The next call charges nothing, and receives the stored result.")


class _Demo:
    """Prints the scenes, and starts the worker processes."""

    def __init__(self, console: Console, url: str) -> None:
        self._console = console
        self._url = url

    def title(self, words: str) -> None:
        """Print the title of a scene."""
        self._console.print()
        self._console.print(words, style="bold")

    def text(self, words: str) -> None:
        """Print a line of text."""
        self._console.print(f"   {words}", soft_wrap=True)

    def success(self, words: str) -> None:
        """Print a line about something that went well."""
        self._console.print(f"   {words}", style="green", soft_wrap=True)

    def failure(self, words: str) -> None:
        """Print a line about something that went wrong."""
        self._console.print(f"   {words}", style="bold red", soft_wrap=True)

    def code(self, words: str) -> None:
        """Print a command or a line of code."""
        self._console.print(f"      {words}", style="cyan", soft_wrap=True)

    def sold(self, how: str, left: int) -> None:
        """Print the result of a sale."""
        words = f"   {how:<16}{left:>4} left in stock, {left or 'no'} sales lost"
        self._console.print(words, style="bold red" if left else "green", soft_wrap=True)

    @contextlib.contextmanager
    def start_workers(self, role: str, count: int, resource: str = "") -> Iterator[list[_Worker]]:
        """Start worker processes, and kill them at the end of the block."""
        workers: list[_Worker] = []
        try:
            workers += [_Worker(role, self._url, resource or key_of("stock")) for _ in range(count)]
            for worker in workers:
                worker.receive()
            yield workers
        finally:
            for worker in workers:
                worker.kill()

    def kill(self, worker: _Worker, until: Callable[[], object]) -> float:
        """Kill a worker; return how many seconds the other one had to wait."""
        os.kill(worker.pid, signal.SIGKILL)
        died_at = time.monotonic()
        self.code(f"kill -9 {worker.pid}")
        until()
        return time.monotonic() - died_at

    def transfer(self, first: _Worker, second: _Worker) -> tuple[int, int]:
        """Have both transfer in opposite directions; return what is missing, and the count."""
        import redis

        keys = key_of("a"), key_of("b")
        with redis.Redis.from_url(self._url) as bank:
            for key in keys:
                bank.set(key, 100)
            first.send("transfer a b")
            second.send("transfer b a")
            count = int(first.receive()) + int(second.receive())
            return 200 - sum(int(bank.getdel(key) or 0) for key in keys), count

    def sell(self, sellers: list[_Worker], how: str) -> int:
        """Have all sellers sell at the same time; return the stock that is left."""
        import redis

        with redis.Redis.from_url(self._url) as shop:
            shop.set(key_of("stock"), SALES, px=60_000)
            for seller in sellers:
                seller.send(how)
            for seller in sellers:
                seller.receive()
            return int(shop.getdel(key_of("stock")) or 0)


class _Worker:
    """A worker process (see demo_workers.py)."""

    def __init__(self, role: str, url: str, resource: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - a module of holdfast
            [sys.executable, "-m", "holdfast.cli.demo_workers", role, url, resource],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the demo only
        )
        self.pid = self._process.pid

    def send(self, method: str) -> None:
        """Have it start a method."""
        assert self._process.stdin is not None  # noqa: S101 - set above
        self._process.stdin.write(f"{method}\n")
        self._process.stdin.flush()

    def receive(self) -> str:
        """Wait for the result of the method."""
        assert self._process.stdout is not None  # noqa: S101 - set above
        words = self._process.stdout.readline().strip()
        if not words:
            raise SystemExit("holdfast: a process of the demo failed; its error is above")
        return words

    def request(self, method: str) -> str:
        """Have it run a method, and return the result."""
        self.send(method)
        return self.receive()

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()
