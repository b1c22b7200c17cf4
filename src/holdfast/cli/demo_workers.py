"""The worker processes of `holdfast demo`, and the database that one of them writes to.

This module is run as a program. Its arguments are the role, the server and the shared resource. It
prints `ready`. Then it calls the method that each line of its input names, and prints the result.
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
    """Return the key of the stock; the process of the demo calls this."""
    return f"holdfast:demo:{os.getpid()}:stock"


class Account:
    """A database without locks, which stores the highest fence that it has seen."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Create the database."""
        with contextlib.closing(sqlite3.connect(self.path)) as account, account:
            account.execute("CREATE TABLE account (written_by INTEGER, fence INTEGER)")
            account.execute("INSERT INTO account VALUES (0, 0)")

    def write(self, fence: int) -> bool:
        """Write, unless a higher fence was written before; return whether it was written."""
        with contextlib.closing(sqlite3.connect(self.path)) as account, account:
            update = "UPDATE account SET written_by = ?, fence = ? WHERE fence <= ?"
            return account.execute(update, (os.getpid(), fence, fence)).rowcount > 0

    def written_by(self) -> int:
        """Return the pid of the last writer."""
        with contextlib.closing(sqlite3.connect(self.path)) as account:
            return int(account.execute("SELECT written_by FROM account").fetchone()[0])


class Seller:
    """Sells units one by one."""

    def __init__(self, client: holdfast.Client, url: str, stock: str) -> None:
        import redis

        self._shop = redis.Redis.from_url(url)
        self._stock = stock
        self._lock = client.lock(stock)

    def unlocked(self) -> str:
        """Sell without a lock."""
        return self._sell(contextlib.nullcontext())

    def locked(self) -> str:
        """Sell with a lock."""
        return self._sell(self._lock)

    def _sell(self, guard: AbstractContextManager[object]) -> str:
        for _ in range(SALES // SELLERS):
            with guard:
                left = int(self._shop.get(self._stock) or 0)
                time.sleep(0.0005)
                self._shop.set(self._stock, left - 1)
        return "sold"


class Holder:
    """Holds a lock until it is killed."""

    def __init__(self, client: holdfast.Client, _url: str, resource: str) -> None:
        self._lock = client.lock(resource, ttl=TTL)
        self._leases: list[holdfast.Lease] = []

    def acquire(self) -> int:
        """Acquire the lock; return the fence."""
        self._leases.append(self._lock.acquire())
        return self._leases[-1].fence

    def check(self) -> str:
        """Return the state of the lease."""
        try:
            self._leases[-1].check()
        except holdfast.LeaseLost as lost:
            return f"LeaseLost, reason '{lost.reason}'"
        return "it is held"


class Writer(Holder):
    """Holds a lock, and writes."""

    def __init__(self, client: holdfast.Client, url: str, resource: str) -> None:
        super().__init__(client, url, resource)
        self._account = Account(Path(resource))

    def write(self) -> str:
        """Write with the fence of the lease, without checking the lease."""
        return "written" if self._account.write(self._leases[-1].fence) else "refused"


def main(role: str, url: str, resource: str) -> None:
    """Call the method that each line of stdin names, and print its result."""
    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # the demo reports the loss
    with holdfast.Client(url) as client:
        worker = {"sell": Seller, "hold": Holder, "write": Writer}[role](client, url, resource)
        print("ready", flush=True)  # noqa: T201 - read by the demo
        for line in sys.stdin:
            method: Callable[[], object] = getattr(worker, line.strip())
            print(method(), flush=True)  # noqa: T201 - read by the demo


if __name__ == "__main__":
    main(*sys.argv[1:])
