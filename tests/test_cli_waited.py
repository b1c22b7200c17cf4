"""The command line on barriers and latches."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import holdfast
from kit.contention import waiters
from kit.servers import ONE_KIND
from kit.waiting import PATIENCE, eventually
from test_cli_locks import data, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.servers import Server

pytestmark = pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)


@pytest.fixture
def client(server: Server) -> Iterator[holdfast.Client]:
    with holdfast.Client(server.url) as client:
        yield client


class Waiting:
    """A wait in a thread, and the error that it raised."""

    def __init__(self, wait: Callable[[], object], server: Server, queue: str) -> None:
        self.error: holdfast.HoldfastError | None = None
        self._thread = threading.Thread(target=self._run, args=(wait,))
        self._thread.start()
        eventually(lambda: waiters(server, queue) > 0, what="it waits")

    def _run(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except holdfast.HoldfastError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def test_a_barrier_is_listed_shown_and_aborted(server: Server, client: holdfast.Client) -> None:
    barrier = client.barrier("phase", parties=3, label="shard 1")
    waiting = Waiting(barrier.wait, server, "holdfast:{phase}:barrier:queue")
    (listed,) = run(server, "ls", width=200).lines[1:]
    assert "phase (barrier)" in listed
    assert "1 of 3 parties have arrived" in listed
    (found,) = data(server, "ls")["locks"]
    assert (found["kind"], found["progress"]) == ("barrier", "1 of 3 parties have arrived")
    assert [each["label"] for each in found["holders"]] == ["shard 1"]
    shown = run(server, "show", "phase")
    assert shown.status == 0
    assert "1 of 3 parties have arrived" in shown.out
    assert "(shard 1), for another" in shown.out
    broken = run(server, "break", "phase", "--yes")
    assert broken.status == 0
    assert "broken (aborted) by" in broken.out
    waiting.join()
    assert isinstance(waiting.error, holdfast.BrokenBarrier)
    assert waiting.error.reason == "aborted"
    assert "broken (aborted) by" in run(server, "ls", width=200).lines[1]
    barrier.reset()
    assert run(server, "show", "phase", "--kind", "barrier").status == 1
    assert run(server, "break", "phase", "--kind", "barrier", "--yes").status == 1


def test_a_latch_is_listed_shown_and_opened(server: Server, client: holdfast.Client) -> None:
    latch = client.latch("imports", count=3)
    latch.count_down()
    waiting = Waiting(latch.wait, server, "holdfast:{imports}:latch:queue")
    (listed,) = run(server, "ls", width=200).lines[1:]
    assert "imports (latch)" in listed
    assert "2 of 3 left" in listed
    shown = run(server, "show", "imports", "--kind", "latch")
    assert shown.status == 0
    assert "2 of 3 left" in shown.out
    broken = run(server, "break", "imports", "--yes")
    assert (broken.status, "open" in broken.out) == (0, True)
    waiting.join()
    assert waiting.error is None
    assert latch.left() == 0
    assert run(server, "ls").lines == []
    assert run(server, "show", "imports", "--kind", "latch").status == 1
