"""Locks with an owner: several holds of one key in one process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from kit.servers import Server


def in_a_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_holder_never_waits_for_itself_after_a_co_holder_released(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        ours, plain = client.lock("a", owner="us"), client.lock("a", timeout=PATIENCE)
        with ours:
            in_a_thread(lambda: ours.acquire().release())
            with pytest.raises(holdfast.WouldDeadlock):
                plain.acquire()
            with ours:  # the same thread, again
                pass
            with pytest.raises(holdfast.WouldDeadlock):
                plain.acquire()
        with plain:
            pass


def test_a_lease_released_by_another_thread_frees_the_lock(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        ours = client.lock("a", owner="us")
        leases = [ours.acquire() for _ in range(3)]
        for lease in leases[::-1]:
            in_a_thread(lease.release)
        assert not client._session.held.shared
        with client.lock("a", timeout=PATIENCE):
            pass


def test_a_thread_can_wait_for_a_lease_of_another_thread(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lease = client.lock("a", owner="us").acquire()
        got: list[int] = []

        def wait() -> None:
            threading.Timer(0.1, lease.release).start()
            with client.lock("a", timeout=PATIENCE) as mine:
                got.append(mine.fence)

        in_a_thread(wait)
        assert got > [lease.fence]
