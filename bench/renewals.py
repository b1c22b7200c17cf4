"""Benchmark: one client holds and renews many leases; its cost, and that no lease is lost.

make bench, or: PYTHONPATH=tests python bench/renewals.py [--leases N] [--seconds S]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from typing import TYPE_CHECKING

import holdfast
from kit.servers import Server, commands_processed, programs

if TYPE_CHECKING:
    from collections.abc import Sequence


async def hold(server: Server, leases: int, seconds: float, ttl: float) -> int:
    """Hold the leases for that time; return the number of failures."""
    lost: list[holdfast.Event] = []
    async with holdfast.AsyncClient(server.url, on_event=lost.append) as client:
        began = time.perf_counter()
        names = [f"lease:{number}" for number in range(leases)]
        held = await asyncio.gather(*(client.lock(name, ttl=ttl).acquire() for name in names))
        print(f"acquired   {leases:,} leases in {time.perf_counter() - began:.2f} s, ttl {ttl:g} s")
        server.reset_stats()
        cpu, began = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        took = time.perf_counter() - began
        cpu = time.process_time() - cpu
        commands = commands_processed(server).get("evalsha", 0)
        renewers = [t for t in threading.enumerate() if t.name == "holdfast-renewer"]
        still = sum(lease.held for lease in held)
        print(f"held       {still:,} of {leases:,} after {took:.0f} s; events: {len(lost)}")
        print(f"renewals   {commands:,} commands, {commands / took:,.0f} per second")
        print(f"CPU        {cpu:.2f} s of this process, {100 * cpu / took:.1f} % of one core")
        print(f"threads    {len(renewers)} renewer")
        await asyncio.gather(*(lease.release() for lease in held))
    return leases - still + len(lost) + abs(1 - len(renewers))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="One client that renews many leases.")
    parser.add_argument("--leases", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--ttl", type=float, default=30)
    options = parser.parse_args(arguments)
    with Server.start(next(iter(programs().values()))) as server:
        print(f"\nPython {sys.version.split()[0]}")
        failures = asyncio.run(hold(server, options.leases, options.seconds, options.ttl))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
