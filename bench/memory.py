"""Benchmark: memory that many locks with different names leave, in the process and on the server.

    make bench, or: PYTHONPATH=tests python bench/memory.py [--cycles N]

Fence counters expire after an hour on the server. The benchmark sets their expiry to one
millisecond instead of waiting.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import tracemalloc

import redis

import holdfast
from kit.servers import Server, programs
from kit.waiting import eventually

MIB = 1024 * 1024


def used(server: redis.Redis) -> int:
    """Return the server's memory for data, in bytes."""
    return int(server.info("memory")["used_memory_dataset"])


def cycles(client: holdfast.Client, begin: int, number: int) -> None:
    """Acquire and release `number` locks with different names."""
    for name in range(begin, begin + number):
        client.lock(f"order:{name}").acquire().release()


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Memory that many locks leave.")
    parser.add_argument("--cycles", type=int, default=100_000)
    count = parser.parse_args().cycles
    print(f"\nPython {sys.version.split()[0]}, {count:,} cycles on distinct names")
    with Server.start(next(iter(programs().values()))) as server:
        watcher = redis.Redis(unix_socket_path=server.unix_path)
        with holdfast.Client(server.url) as client:
            cycles(client, 0, 2_000)
            watcher.flushall()
            gc.collect()
            tracemalloc.start()
            before, server_before = tracemalloc.get_traced_memory()[0], used(watcher)
            tracemalloc.stop()
            peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            tracemalloc.start()
            cycles(client, 2_000, count)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
            counters, server_full = watcher.dbsize(), used(watcher)
            with watcher.pipeline(transaction=False) as expire:
                for key in watcher.scan_iter(match="*:fence", count=1000):
                    expire.pexpire(key, 1)
                expire.execute()
            eventually(lambda: watcher.dbsize() == 0, within=60, what="the counters expire")
            server_after = used(watcher)
    print(f"process    {grown / MIB:+.2f} MiB of Python objects, peak RSS {peak / 1024:+.1f} MiB")
    print(f"server     {(server_full - server_before) / MIB:+.2f} MiB in {counters:,} counters")
    print(f"           {(server_after - server_before) / MIB:+.2f} MiB, 0 keys, after their expiry")
    return 0 if grown < MIB else 1


if __name__ == "__main__":
    raise SystemExit(main())
