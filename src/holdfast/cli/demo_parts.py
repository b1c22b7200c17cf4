"""The processes of `holdfast demo`: what each does, and the database that one of them writes to.

This file is run as a program: which part to play, the server, and the thing that is shared. It says
`ready`, and then does what each line that it is given says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import holdfast

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

SELLERS, SALES = 8, 400
TTL = 2.0


def stock_key() -> str:
    """Where the stock of this demo is kept, as its stage calls it."""
    return f"holdfast:demo:{os.getpid()}:stock"


class Account:
    """A database that knows nothing of locks, and writes down the highest number it has seen."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        """Make it."""
        with contextlib.closing(sqlite3.connect(self.path)) as account, account:
            account.execute("CREATE TABLE account (written_by INTEGER, fence INTEGER)")
            account.execute("INSERT INTO account VALUES (0, 0)")

    def write(self, fence: int) -> bool:
        """Write to it, unless somebody with a higher number has; say whether it was written."""
        with contextlib.closing(sqlite3.connect(self.path)) as account, account:
            update = "UPDATE account SET written_by = ?, fence = ? WHERE fence <= ?"
            return account.execute(update, (os.getpid(), fence, fence)).rowcount > 0

    def written_by(self) -> int:
        """Say who wrote last."""
        with contextlib.closing(sqlite3.connect(self.path)) as account:
            return int(account.execute("SELECT written_by FROM account").fetchone()[0])


class Sell:
    """Sells units one by one, as shops do all day."""

    def __init__(self, client: holdfast.Client, url: str, stock: str) -> None:
        import redis

        self._shop = redis.Redis.from_url(url)
        self._stock = stock
        self._lock = client.lock(stock)

    def unlocked(self) -> str:
        """Sell as if nobody else did."""
        return self._sell(contextlib.nullcontext())

    def locked(self) -> str:
        """Sell when it is our turn."""
        return self._sell(self._lock)

    def _sell(self, guard: AbstractContextManager[object]) -> str:
        for _ in range(SALES // SELLERS):
            with guard:
                left = int(self._shop.get(self._stock) or 0)
                time.sleep(0.0005)
                self._shop.set(self._stock, left - 1)
        return "sold"


class Hold:
    """Holds a lock until it is killed."""

    def __init__(self, client: holdfast.Client, _url: str, thing: str) -> None:
        self._lock = client.lock(thing, ttl=TTL)
        self._leases: list[holdfast.Lease] = []

    def acquire(self) -> int:
        """Take the lock; the number of the lease."""
        self._leases.append(self._lock.acquire())
        return self._leases[-1].fence

    def check(self) -> str:
        """Say what the lease says of itself."""
        try:
            self._leases[-1].check()
        except holdfast.LeaseLost as lost:
            return f"its lease is lost ({lost.reason})"
        return "its lease is held"


class Write(Hold):
    """Holds a lock, and writes."""

    def __init__(self, client: holdfast.Client, url: str, thing: str) -> None:
        super().__init__(client, url, thing)
        self._account = Account(Path(thing))

    def write(self) -> str:
        """Write, without a look at the clock, but with the number of the lease."""
        return "written" if self._account.write(self._leases[-1].fence) else "refused"


def main(part: str, url: str, thing: str) -> None:
    """Do what each line says, and answer with a line."""
    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # the stage tells it
    with holdfast.Client(url) as client:
        actor = {"sell": Sell, "hold": Hold, "write": Write}[part](client, url, thing)
        print("ready", flush=True)  # noqa: T201 - the stage hears it
        for line in sys.stdin:
            does: Callable[[], object] = getattr(actor, line.strip())
            print(does(), flush=True)  # noqa: T201 - the stage hears it


if __name__ == "__main__":
    main(*sys.argv[1:])
