"""What a waiter whose process is stopped costs itself and the waiters behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.contention import KEY, assert_clean, in_line, joined, waiters
from kit.processes import Process

if TYPE_CHECKING:
    from kit.faces import Face
    from kit.servers import Server

WAITER = """
    print("waiting", flush=True)
    with client.lock("a", ttl=60) as lease:
        print(lease.fence, flush=True)
        sys.stdin.readline()
    print("released", flush=True)
"""


@pytest.mark.only_client("threads")
async def test_a_grant_is_valid_for_one_second_until_its_waiter_is_heard_from(
    face: Face, server: Server
) -> None:
    lease = await face.connect(server.url).lock("a", ttl=60).acquire()
    with Process(server, WAITER) as stopped:
        await in_line(face, server, 1)
        stopped.stop()
        await lease.release()
        assert waiters(server) == 0, "it was not granted to the stopped process"
        assert server.command("PTTL", KEY) <= 1000


@pytest.mark.only_client("asyncio")
async def test_a_process_stopped_beyond_its_window_keeps_its_place_in_the_queue(
    face: Face, server: Server
) -> None:
    holder, second, third = (face.connect(server.url) for _ in range(3))
    lease = await holder.lock("a", ttl=60).acquire()
    with Process(server, WAITER) as stopped:
        assert stopped.says() == "waiting"
        await in_line(face, server, 1)
        waits, waits_longer = await joined(
            face,
            server,
            second.lock("a", ttl=60).acquire(),
            third.lock("a", ttl=60).acquire(),
            already=1,
        )
        stopped.stop()
        await lease.release()
        next_lease = await waits.result(30)
        stopped.go_on()
        await in_line(face, server, 2)
        next_lease.check()
        await next_lease.release()
        fence = int(stopped.says())
        assert fence > next_lease.fence
        assert not waits_longer.done, "it was passed over by a waiter that came later"
        stopped.tell()
        assert stopped.says() == "released"
        last = await waits_longer.result(30)
        assert last.fence > fence
        await last.release()
    assert_clean(server)
