"""How long a waiter in a stopped process delays itself and the waiters behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.contention import KEY, assert_clean, enqueue, wait_until_queued, waiters
from kit.processes import Process

if TYPE_CHECKING:
    from kit.apis import Api
    from kit.servers import Server

WAITER = """
    print("waiting", flush=True)
    with client.lock("a", ttl=60) as lease:
        print(lease.fence, flush=True)
        sys.stdin.readline()
    print("released", flush=True)
"""


@pytest.mark.only_client("threads")
async def test_a_grant_to_a_stopped_waiter_is_valid_for_one_second(
    api: Api, server: Server
) -> None:
    lease = await api.connect(server.url).lock("a", ttl=60).acquire()
    with Process(server, WAITER) as stopped:
        await wait_until_queued(api, server, 1)
        stopped.stop()
        await lease.release()
        assert waiters(server) == 0, "the lock was not granted to the stopped process"
        assert server.command("PTTL", KEY) <= 1000


@pytest.mark.only_client("asyncio")
async def test_a_process_stopped_beyond_its_window_keeps_its_place_in_the_queue(
    api: Api, server: Server
) -> None:
    holder, second, third = (api.connect(server.url) for _ in range(3))
    lease = await holder.lock("a", ttl=60).acquire()
    with Process(server, WAITER) as stopped:
        assert stopped.read_line() == "waiting"
        await wait_until_queued(api, server, 1)
        waits, waits_longer = await enqueue(
            api,
            server,
            second.lock("a", ttl=60).acquire(),
            third.lock("a", ttl=60).acquire(),
            already=1,
        )
        stopped.stop()
        await lease.release()
        next_lease = await waits.result(30)
        stopped.resume()
        await wait_until_queued(api, server, 2)
        next_lease.check()
        await next_lease.release()
        fence = int(stopped.read_line())
        assert fence > next_lease.fence
        assert not waits_longer.done, "a waiter that came later was granted first"
        stopped.send_line()
        assert stopped.read_line() == "released"
        last = await waits_longer.result(30)
        assert last.fence > fence
        await last.release()
    assert_clean(server)
