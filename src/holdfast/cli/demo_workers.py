"""The worker processes of `holdfast demo`, and the database that one of them writes to.

This module is run as a program. Its arguments are the role, the server and the shared resource. It
prints `ready`. Then it calls the method that each line of its input names, with the other words of
the line as arguments, and prints the result.
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

    from holdfast.api.once import Once

SELLERS, SALES = 8, 400
TRANSFERS, PERMITS = 50, 2
TTL = 2.0
GIVE_UP_AFTER = 1.0
"""Seconds after which a process gives up to wait for a second lock."""


def key_of(what: str) -> str:
    """Return the key of the stock or of an account; the process of the demo calls this."""
    return f"holdfast:demo:{os.getpid()}:{what}"


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


class Sharer:
    """Transfers between accounts, takes permits, and does work once."""

    def __init__(self, client: holdfast.Client, url: str, resource: str) -> None:
        import redis

        self._client = client
        self._bank = redis.Redis.from_url(url)
        self._resource = resource
        self._leases: list[holdfast.Lease] = []
        self._work: list[object] = []

    def lock(self, account: str) -> str:
        """Acquire the lock of an account; return whether it was granted in time."""
        lock = self._client.lock(self._resource + account, timeout=GIVE_UP_AFTER, ttl=TTL)
        try:
            self._leases.append(lock.acquire())
        except holdfast.AcquireTimeout:
            return "gave up"
        return "granted"

    def unlock(self) -> str:
        """Release all locks."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        return "released"

    def transfer(self, source: str, target: str) -> int:
        """Transfer 1 several times; return how many times."""
        keys = self._resource + source, self._resource + target
        for _ in range(TRANSFERS):
            with self._client.lock_all(keys):
                first, second = (int(self._bank.get(key) or 0) for key in keys)
                time.sleep(0.0005)
                self._bank.mset({keys[0]: first - 1, keys[1]: second + 1})
        return TRANSFERS

    def take_permit(self) -> str:
        """Take a permit, and keep it."""
        gpu = self._client.semaphore(f"{self._resource}gpu", limit=PERMITS, ttl=TTL)
        self._leases.append(gpu.acquire())
        return "granted"

    def permits_in_use(self) -> int:
        """Return how many permits are in use."""
        gpu = self._client.semaphore(f"{self._resource}gpu", limit=PERMITS)
        return sum(holder.weight or 0 for holder in gpu.holders())

    def begin_charge(self) -> str:
        """Begin to charge an order, and never end."""
        self._work.append(self._charge().__enter__())
        return "begun"

    def charge(self) -> str:
        """Charge the order, unless that is done already; return by whom it was charged."""
        with self._charge() as run:
            if run.first:
                run.result = os.getpid()
        return f"{'charged' if run.first else 'received'} {run.result}"

    def _charge(self) -> Once:
        return self._client.once(f"{self._resource}order 7", keep=60, ttl=TTL)


def main(role: str, url: str, resource: str) -> None:
    """Call the method that each line of stdin names, and print its result."""
    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # the demo reports the loss
    with holdfast.Client(url) as client:
        roles = {"sell": Seller, "hold": Holder, "write": Writer, "share": Sharer}
        worker = roles[role](client, url, resource)
        print("ready", flush=True)  # noqa: T201 - read by the demo
        for line in sys.stdin:
            name, *args = line.split()
            method: Callable[..., object] = getattr(worker, name)
            print(method(*args), flush=True)  # noqa: T201 - read by the demo


if __name__ == "__main__":
    main(*sys.argv[1:])
