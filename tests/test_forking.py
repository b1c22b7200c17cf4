"""What a forked child keeps of its parent's clients: nothing, and the parent notices nothing."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.adapters import threads
from holdfast.core import session
from kit.contention import waiters
from kit.servers import ONE_KIND, Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable


# Python warns of forking a process with threads; that a fork is harmless is what is shown here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

PROGRAM = next(iter(programs().values()))
LIMIT = 30.0


def in_child(work: Callable[[], object]) -> str:
    """Fork, run `work` in the child, and return what it returned there."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write, str(work()).encode())
            status = 0
        except BaseException:  # noqa: BLE001 - reported by the status
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as result:
        returned = result.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the child failed; its traceback is on stderr"
    return returned


# What belongs to a process


def by_the_second_thread(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, do: Callable[[], object]
) -> str:
    """Fork, and have a thread of the child do something while another one makes `module.name`."""
    making, done = threading.Event(), threading.Event()
    make = getattr(module, name)

    def gated(*arguments: Any, **named: Any) -> Any:
        if threading.active_count() > 1:  # otherwise no thread can interfere
            making.set()
            done.wait(LIMIT)
        return make(*arguments, **named)

    def child() -> object:
        monkeypatch.setattr(module, name, gated)
        results: list[object] = []

        def second() -> None:
            making.wait(LIMIT)
            try:
                results.append(do())
            finally:
                done.set()

        def first() -> None:
            do()
            making.set()

        workers = [threading.Thread(target=work) for work in (first, second)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LIMIT)
        return results[0]

    return in_child(child)


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_every_thread_of_a_forked_child_draws_tokens_of_its_own_process(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Siblings that draw from their parent's factory draw equal tokens, and both hold the lock.
    with holdfast.Client(server.url) as client:

        def token() -> str:
            with client.lock(threading.current_thread().name) as lease:
                return lease.token

        parents = token().split(":")[1]
        childs = by_the_second_thread(monkeypatch, threads, "new_mint", token)
        assert childs.split(":")[1] != parents


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_no_thread_of_a_forked_child_uses_the_renewer_of_the_parent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(server.url) as client, client.lock("parents"):
        parents = client._session.renewer

        def is_the_parents() -> bool:
            with client.lock(threading.current_thread().name):
                return client._session.renewer is parents

        assert by_the_second_thread(monkeypatch, session, "Renewer", is_the_parents) == "False"


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_forked_child_waits_for_no_mutex_that_a_thread_of_the_parent_had(server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock("warm"):
        port, events = client._session.port, client._events
        mutexes = [port._lines._mutex, port._ears._mutex, events._mutex]  # type: ignore[attr-defined]
        taken, over = threading.Event(), threading.Event()

        def take() -> None:
            with contextlib.ExitStack() as stack:
                for mutex in mutexes:
                    stack.enter_context(mutex)
                taken.set()
                over.wait(LIMIT)

        def child() -> str:
            holder = client.lock("a").acquire()
            waiting = threading.Thread(target=lambda: client.lock("a").acquire(timeout=LIMIT))
            waiting.start()
            eventually(lambda: waiters(server) == 1, within=LIMIT)
            holder.release()
            waiting.join(LIMIT)
            return str(waiting.is_alive())

        taker = threading.Thread(target=take)
        taker.start()
        taken.wait(LIMIT)
        try:
            assert in_child(child) == "False"
        finally:
            over.set()
            taker.join()
