"""Eight processes sell from one stock, first without a lock and then with one.

    make demo

A sale is what shops do all day: read the stock, think a moment, write it back less one. Without a
lock two of them read the same number, and one of the two sales is never booked. The server is
started for the occasion, unless HOLDFAST_URL names one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import IO

import redis

import holdfast
from holdfast import embedded

PROCESSES, SALES_EACH = 8, 50
SOLD = PROCESSES * SALES_EACH
STOCK = "holdfast:demo:stock"


def sell(url: str, *, locked: bool) -> None:
    """Sell units one by one; this is what each of the processes does."""
    with holdfast.Client(url) as client, redis.Redis.from_url(url) as shop:
        guard = client.lock("demo") if locked else contextlib.nullcontext()
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(SALES_EACH):
            with guard:
                left = int(shop.get(STOCK) or 0)
                time.sleep(0.0002)
                shop.set(STOCK, left - 1)


def open_shop(url: str, *, locked: bool) -> tuple[int, float]:
    """Let all processes sell at once; return what the stock says then, and the seconds it took."""
    with redis.Redis.from_url(url) as shop:
        shop.set(STOCK, SOLD, px=600_000)
        sellers = [
            subprocess.Popen(  # noqa: S603 - this very file
                [sys.executable, __file__, url, "locked" if locked else "unlocked"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(PROCESSES)
        ]
        for seller in sellers:
            _pipe(seller.stdout).readline()
        began = time.perf_counter()
        for seller in sellers:
            _pipe(seller.stdin).write(b"go\n")
            _pipe(seller.stdin).flush()
        for seller in sellers:
            seller.communicate()
        took = time.perf_counter() - began
        if any(seller.returncode for seller in sellers):
            raise SystemExit("a seller failed; its error is above")
        left = int(shop.getdel(STOCK) or 0)
    return left, took


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    """The pipe that was asked for."""
    if pipe is None:
        raise TypeError("the process was started without pipes")
    return pipe


def main() -> None:
    """Sell the same stock twice and print what is left."""
    url = os.environ.get("HOLDFAST_URL") or f"unix://{embedded.ensure()}"
    print(
        f"\n{PROCESSES} processes sell {SOLD} units, one at a time each, from a stock of {SOLD}.\n"
    )
    print(f"  {'':<16}{'left in stock':>15}{'sales lost':>13}{'seconds':>10}")
    for name, locked in (("without a lock", False), ("with holdfast", True)):
        left, took = open_shop(url, locked=locked)
        print(f"  {name:<16}{left:>15}{left:>13}{took:>10.2f}")
    print("\nThe difference is one line, `with lock:`. README.md says what it promises.\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sell(sys.argv[1], locked=sys.argv[2] == "locked")
    else:
        main()
