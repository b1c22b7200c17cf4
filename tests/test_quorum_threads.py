"""Many threads and several servers: all threads but the main one share their connections.

Whichever thread reads does it for all. What befalls it must not befall the others.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import select
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.keys import keys_of
from holdfast.port import Interrupted
from holdfast.scripts import INSPECT
from holdfast.wire.given import targets_of
from holdfast.wire.node_connection import LATE_AFTER
from holdfast.wire.node_pool import NodePool
from holdfast.wire.shared_node_pool import SharedNodePool, _Pending
from kit.homes import settle_in
from kit.interrupts import (
    AtLine,
    InterruptAt,
    have_it_taken_for_ended,
)
from kit.processes import Process
from kit.proxy import Proxy
from kit.servers import Server, programs
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
PROGRAM = next(iter(programs().values()))


@pytest.fixture(scope="module")
def three_servers() -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Server.start(PROGRAM, *DURABLE)) for _ in range(3)]


@pytest.fixture
def three(three_servers: list[Server]) -> Iterator[list[Server]]:
    """Three servers with nothing on them; whoever freezes one has it thawed."""
    for server in three_servers:
        settle_in(server)
    yield three_servers
    for server in three_servers:
        server.thaw()


@pytest.fixture
def proxies(three: list[Server]) -> Iterator[list[Proxy]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Proxy(server.host, server.port)) for server in three]


def urls(servers: list[Any]) -> list[str]:
    return [server.url for server in servers]


def locks_on(server: Server) -> list[bytes]:
    found: list[bytes] = server.command("KEYS", "holdfast:{*}")
    return found


def nothing_is_left(servers: list[Server]) -> bool:
    return not any(map(locks_on, servers))


class Work:
    """Things done by threads of their own, each of which has to end."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def begin(self, work: Callable[..., object], *given: object) -> threading.Thread:
        def run() -> None:
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - looked at by the story
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def end(self) -> list[BaseException]:
        """Wait for all of them, and return what they raised."""
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "it waits for ever"
        return self.errors


def connect_to_all(client: holdfast.Client, servers: list[Server]) -> None:
    """Acquire locks in threads until one is on every server: it connects to slow ones meanwhile."""
    work = Work()

    def are_connected() -> bool:
        work.begin(client.lock(f"warm {len(work.threads)}").acquire)
        work.end()
        return all(map(locks_on, servers))

    eventually(are_connected, what="all nodes are connected")


def test_threads_share_one_connection_to_each_node(three: list[Server]) -> None:
    def connections(server: Server) -> int:
        count: int = server.command("CLIENT", "LIST").count(b"\n")
        return count

    with holdfast.Client(urls(three)) as client:
        work, all_hold = Work(), threading.Barrier(17)

        def hold(name: str) -> None:
            with client.lock(name):
                all_hold.wait(PATIENCE)
                all_hold.wait(PATIENCE)

        for number in range(16):
            work.begin(hold, f"lock {number}")
        all_hold.wait(PATIENCE)
        # Theirs, and the one that asks.
        assert [connections(server) for server in three] == [2, 2, 2]
        all_hold.wait(PATIENCE)
        assert work.end() == []
    eventually(lambda: nothing_is_left(three), what="all is released")


def connected_table(client: holdfast.Client, work: Work) -> SharedNodePool:
    """The pool that threads share, connected to all nodes: a majority is enough to acquire."""

    def is_connected() -> bool:
        work.begin(client.lock("warm").acquire().release).join()
        return all(
            connection.sock is not None and not connection.expected
            for connection in pool().connections
        )

    def pool() -> SharedNodePool:
        port: Any = client._session.port
        found: SharedNodePool = port._crowd._shared
        return found

    eventually(is_connected, what="it is connected to all nodes")
    return pool()


def test_what_a_thread_asks_is_sent_while_another_sleeps_until_it_is_answered(
    proxies: list[Proxy],
) -> None:
    with patient(proxies) as client:
        work = Work()
        connected_table(client, work)
        held = [proxy.hold_reply(matching=asks_for("first")) for proxy in proxies]
        done: list[str] = []

        def take(name: str) -> None:
            with client.lock(name):
                done.append(name)

        def was_asked_for(name: str) -> bool:
            key = b"holdfast:{%b}" % name.encode()
            return all(any(key in args for args in list(proxy.log)) for proxy in proxies)

        work.begin(take, "first")
        for each in held:
            assert each.arrived.wait(PATIENCE)
        work.begin(take, "second")
        eventually(lambda: was_asked_for("second"), what="it is sent")
        assert done == []
        for each in held:
            each.release()
        assert work.end() == []
        assert sorted(done) == ["first", "second"]


def test_a_thread_goes_on_reading_for_all_although_joining_it_was_interrupted(
    proxies: list[Proxy],
) -> None:
    with patient(proxies) as client:
        work = Work()
        pool = connected_table(client, work)
        sockets = [connection.sock for connection in pool.connections]
        done: list[str] = []
        held = [proxy.hold_reply(matching=asks_for("first")) for proxy in proxies]

        def take(name: str) -> None:
            try:
                with client.lock(name) as lease:
                    lease.check()
            finally:
                done.append(name)

        first = work.begin(take, "first")
        for each in held:
            assert each.arrived.wait(PATIENCE)
        have_it_taken_for_ended(first)
        work.begin(take, "second")
        eventually(
            lambda: all(any(map(asks_for("second"), list(proxy.log))) for proxy in proxies),
            what="it is sent by the first",
        )
        for each in held:
            each.release()
        eventually(lambda: sorted(done) == ["first", "second"], what="both are through")
        assert work.errors == []
        assert [connection.sock for connection in pool.connections] == sockets


def test_a_reader_that_finds_its_own_replies_when_it_sends_for_another_returns_at_once(
    proxies: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = SharedNodePool._look
    held = {name: [proxy.hold_reply(matching=asks_for(name)) for proxy in proxies] for name in "ab"}

    def replies_come_first(pool: SharedNodePool) -> float:
        if pool._queue and not held["a"][0].released.is_set():
            for each in held["a"]:
                each.release()
            for connection in pool.connections:
                assert select.select([connection.sock], [], [], PATIENCE)[0]
        return look(pool)

    monkeypatch.setattr(SharedNodePool, "_look", replies_come_first)
    with patient(proxies) as client:
        work, done = Work(), list[str]()
        connected_table(client, work)

        def take(name: str) -> None:
            with client.lock(name, ttl=10 * LONG):
                done.append(name)

        work.begin(take, "a")
        for each in held["a"]:
            assert each.arrived.wait(PATIENCE)
        time.sleep(2 * LATE_AFTER)  # from then on replies are looked for before more is sent
        work.begin(take, "b")
        try:
            eventually(lambda: done == ["a"], what="it does not wait for the other's replies")
        finally:
            for each in held["b"]:
                each.release()
        assert work.end() == []


def test_a_cycle_leaves_nothing_for_the_collector_to_find(three: list[Server]) -> None:
    with holdfast.Client(urls(three)) as client:
        work, lock = Work(), client.lock("a")

        def cycles(count: int) -> None:
            for _ in range(count):
                with lock:
                    pass

        def turns() -> set[_Pending]:
            return {each for each in gc.get_objects() if type(each) is _Pending}

        others = turns()  # what earlier stories left
        gc.disable()
        try:
            work.begin(cycles, 50).join()
            port: Any = client._session.port
            seats = port._crowd._shared.connections
            owed = {
                question for connection in seats for question, *_ in connection.expected
            }  # by a slow node
            left = turns() - others - owed
        finally:
            gc.enable()
        assert work.end() == []
        assert len(left) < 10


def test_nodes_that_are_far_away_can_be_asked_by_many_at_once(proxies: list[Proxy]) -> None:
    with holdfast.Client(urls(proxies), command_timeout=2) as client:
        client.lock("warm").acquire().release()
        for proxy in proxies:
            proxy.delay(0.15)
        work = Work()

        def take(name: str) -> None:
            for _ in range(2):
                with client.lock(name) as lease:
                    lease.check()

        for number in range(24):
            work.begin(take, f"lock {number}")
        assert work.end() == []


def test_a_node_that_is_far_away_gets_the_leases_of_all_threads(
    three: list[Server], proxies: list[Proxy]
) -> None:
    failed: list[holdfast.Event] = []
    given = [three[0].url, three[1].url, proxies[2].url]
    with holdfast.Client(given, command_timeout=2, on_event=failed.append) as client:
        work, over, held = Work(), threading.Event(), threading.Barrier(25)
        connect_to_all(client, three)
        proxies[2].delay(0.15)

        def take(number: int) -> None:
            # At most 8 requests, of which the votes may need one more each, to agree on the fence:
            # a node that owes more replies to a thread counts as slow.
            for _ in range(2):
                client.lock(f"lock {number}").acquire().release()
            with client.lock(f"lock {number}"):
                held.wait(PATIENCE)
                over.wait(PATIENCE)

        for number in range(24):
            work.begin(take, number)
        held.wait(PATIENCE)
        eventually(lambda: len(locks_on(three[2])) >= 25, what="it has all of them")
        over.set()
        assert work.end() == []
    assert [event for event in failed if event.kind != "closed_while_held"] == []


def test_with_a_node_that_hangs_all_threads_go_on_and_it_keeps_nothing(three: list[Server]) -> None:
    with holdfast.Client(urls(three), command_timeout=0.3) as client:
        work, frozen = Work(), threading.Event()

        def take(name: str) -> None:
            for number in itertools.count():
                with client.lock(name, ttl=60) as lease:
                    lease.check()
                if frozen.is_set() and number > 20:
                    return

        for number in range(8):
            work.begin(take, f"lock {number}")
        eventually(lambda: len(locks_on(three[2])) > 0, what="they are at it")
        three[2].freeze()
        frozen.set()
        assert work.end() == []
        three[2].thaw()
        eventually(lambda: nothing_is_left(three), what="nothing is left")


LONG = 100 * PATIENCE
"""Seconds. Whoever is forgotten waits for as long, and is found to."""


def patient(nodes: list[Any]) -> holdfast.Client:
    return holdfast.Client(urls(nodes), command_timeout=LONG, longest_ttl=10 * LONG)


CONNECTIONS = tuple(f"wire{os.sep}{name}" for name in ("node_", "shared_node_pool"))


@pytest.mark.parametrize("amid_hanging_up", [False, True], ids=["amid coming", "amid hanging up"])
def test_a_node_that_is_hung_up_on_just_as_another_comes_is_connected_to_again(
    three: list[Server], *, amid_hanging_up: bool
) -> None:
    for at in itertools.count(1):
        pool = NodePool(targets_of(urls(three), LONG), PATIENCE)
        pool.ask([(range(3), (INSPECT, keys_of(b"holdfast:{a}"), ()))], PATIENCE, lambda *_: False)
        connection = pool.connections[0]
        both: list[Callable[[], Any]] = [pool._ready, partial(connection.drop, "it fails")]
        one, other = reversed(both) if amid_hanging_up else both
        with AtLine(at, CONNECTIONS, other) as line:
            one()
        assert connection.sock is None or line.struck is None
        assert connection in pool.unready or line.struck is None, line.struck
        pool.close()
        if line.struck is None:
            assert at > 1
            return


def test_a_connection_that_two_threads_close_on_at_once_is_closed(three: list[Server]) -> None:
    for at in itertools.count(1):
        pool = NodePool(targets_of(urls(three), LONG), PATIENCE)
        look(pool)
        connection = pool.connections[0]
        sock = connection.sock
        with AtLine(at, CONNECTIONS, partial(connection.drop, "it fails")) as line:
            connection.close()
        assert sock.fileno() == -1
        pool.close()
        if line.struck is None:
            assert at > 1
            return


def look(pool: NodePool) -> None:
    """Ask all nodes something, at any pool."""
    pool.ask([(range(3), (INSPECT, keys_of(b"holdfast:{a}"), ()))], PATIENCE, lambda *_: False)


def with_an_unready_connection(servers: list[Server]) -> NodePool:
    """A pool at which one connection was lost."""
    pool = NodePool(targets_of(urls(servers), LONG), PATIENCE)
    look(pool)
    pool.connections[0].drop("it fails")
    return pool


def test_wherever_one_who_takes_a_connection_over_is_interrupted_another_will(
    three: list[Server],
) -> None:
    for at in itertools.count(1):
        pool = with_an_unready_connection(three)
        interrupt = InterruptAt(at, (f"wire{os.sep}node_",))
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            look(pool)
        taken = [
            connection.sock is not None or connection in pool.unready
            for connection in pool.connections
        ]
        assert all(taken), interrupt.struck
        pool.close()
        if interrupt.struck is None:
            assert at > 1
            return


def are_taken(pool: NodePool) -> bool:
    """Whether all seats are, for who asks."""
    look(pool)
    return all(connection.sock is not None for connection in pool.connections)


@pytest.mark.parametrize("end", [NodePool.interrupt, NodePool.close], ids=["interrupted", "closed"])
def test_a_connection_that_is_closed_amid_being_taken_over_is_no_error(
    three: list[Server], end: Callable[[NodePool], None]
) -> None:
    for at in itertools.count(1):
        pool = with_an_unready_connection(three)
        connection = pool.connections[0]
        connection.open()
        eventually(lambda: not connection.opening, what="it is there")  # noqa: B023 - of this round
        with AtLine(at, (f"wire{os.sep}node_",), partial(end, pool)) as line:
            pool._ready()
        with contextlib.ExitStack() as stack:
            for _ in range(8):  # the numbers of closed sockets go to files, which can be read from
                stack.enter_context(Path(os.devnull).open("rb"))
            if end is NodePool.interrupt:
                eventually(partial(are_taken, pool), what=f"all are taken after {line.struck}")
        pool.close()
        if line.struck is None:
            assert at > 1
            return


def asks_for(name: str) -> Callable[[tuple[bytes, ...]], bool]:
    key = b"holdfast:{%b}" % name.encode()
    return lambda args: key in args


def test_a_reader_that_fails_leaves_the_others_without_replies_and_connected(
    proxies: list[Proxy],
) -> None:
    with patient(proxies) as client:
        work = Work()
        pool = connected_table(client, work)
        held = [proxy.hold_reply(matching=asks_for("reader")) for proxy in proxies]
        told: list[object] = []

        failures = [MemoryError()]

        def fail(*_: object) -> bool:
            if failures:
                raise failures.pop()
            return True

        def ask(name: str, heard: Callable[..., bool]) -> None:
            keys = keys_of(b"holdfast:{%b}" % name.encode())
            pool.ask([(range(3), (INSPECT, keys, ()))], LONG, heard)

        def note(_: int, __: int, answer: object) -> bool:
            told.append(answer)
            return len(told) == 3

        work.begin(ask, "reader", fail)
        for each in held:
            assert each.arrived.wait(PATIENCE)
        others = [proxy.hold_reply(matching=asks_for("other")) for proxy in proxies]
        work.begin(ask, "other", note)
        for each in others:
            assert each.arrived.wait(PATIENCE)
        held[0].release()
        (error,) = work.end()
        assert isinstance(error, MemoryError)
        assert {type(each) for each in told} == {Interrupted}
        for each in (*held, *others):
            each.release()
        work.errors.clear()
        connected_table(client, work)
        assert work.end() == []


def test_a_thread_stops_waiting_at_its_timeout_while_another_reads(proxies: list[Proxy]) -> None:
    with patient(proxies) as client:
        work = Work()
        pool = connected_table(client, work)
        held = [proxy.hold_reply(matching=asks_for("reader")) for proxy in proxies]
        held += [proxy.hold_reply(matching=asks_for("other")) for proxy in proxies]
        told: list[object] = []

        def ask(name: str, timeout: float, heard: Callable[..., bool]) -> None:
            keys = keys_of(b"holdfast:{%b}" % name.encode())
            pool.ask([(range(3), (INSPECT, keys, ()))], timeout, heard)

        def note(_: int, __: int, answer: object) -> bool:
            told.append(answer)
            return False

        reader = work.begin(ask, "reader", LONG, lambda *_: False)
        for each in held[:3]:
            assert each.arrived.wait(PATIENCE)
        work.begin(ask, "other", 0.1, note).join(PATIENCE)
        assert [type(each) for each in told] == [holdfast.OutcomeUnknown] * 3
        assert reader.is_alive()
        for each in held:
            each.release()
        assert work.end() == []


def test_a_reader_that_cannot_run_delays_the_others_once(three: list[Server]) -> None:
    with holdfast.Client(urls(three), command_timeout=0.2) as client:
        work, blocked, over = Work(), threading.Event(), threading.Event()
        stuck = connected_table(client, work)

        def read_nothing() -> None:
            request = INSPECT, keys_of(b"holdfast:{a}"), ()
            mine = _Pending([([0], request)], lambda *_: True, 0.0, stuck._mutex)
            assert stuck._becomes_reader(mine)
            blocked.set()
            over.wait(PATIENCE)
            stuck._pass_on()

        def take() -> None:
            with client.lock("a", ttl=60, timeout=PATIENCE) as lease:
                lease.check()

        work.begin(read_nothing)
        assert blocked.wait(PATIENCE)
        threads = [work.begin(take) for _ in range(3)]
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert stuck.is_stuck
        over.set()
        assert work.end() == []
    eventually(lambda: nothing_is_left(three), what="nothing is left")


def test_what_the_collector_calls_may_lock_in_the_middle_of_locking(three: list[Server]) -> None:
    with holdfast.Client(urls(three)) as client:
        work, nested = Work(), [0]

        def collected(phase: str, _: object) -> None:
            if phase == "start" and threading.current_thread() in work.threads:
                gc.callbacks.remove(collected)
                with client.lock("nested"):
                    nested[0] += 1
                gc.callbacks.append(collected)

        def take(name: str) -> None:
            for _ in range(20):
                with client.lock(name):
                    pass

        before = gc.get_threshold()
        gc.set_threshold(50)
        gc.callbacks.append(collected)
        try:
            for number in range(3):
                work.begin(take, f"lock {number}")
            assert work.end() == []
        finally:
            gc.set_threshold(*before)
            gc.callbacks.remove(collected)
        assert nested[0]
    eventually(lambda: nothing_is_left(three), what="nothing is left")


def test_closing_ends_what_all_threads_wait_for(three: list[Server]) -> None:
    client = holdfast.Client(urls(three), command_timeout=5)
    work, warm = Work(), threading.Thread(target=client.lock("warm").acquire)
    warm.start()
    warm.join()
    for server in three[1:]:
        server.freeze()
    for number in range(8):
        work.begin(client.lock(f"lock {number}").acquire)
    eventually(lambda: len(locks_on(three[0])) >= 8, what="all have asked")
    client.close()
    errors = work.end()
    assert len(errors) == 8
    assert all(isinstance(error, holdfast.NodeUnavailable) for error in errors), errors


# Python warns of threads that stay behind in the parent.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_a_thread_forks_has_connections_of_its_own(three: list[Server]) -> None:
    with holdfast.Client(urls(three)) as client:
        work, over = Work(), threading.Event()

        def take(name: str) -> None:
            while not over.is_set():
                with client.lock(name):
                    pass

        def fork() -> None:
            for _ in range(5):
                child = os.fork()
                if child == 0:
                    try:
                        with client.lock("child") as lease:
                            lease.check()
                        second = Work()
                        second.begin(lambda: client.lock("child's thread").acquire().release())
                        os._exit(1 if second.end() else 0)
                    finally:
                        os._exit(2)
                assert os.waitpid(child, 0)[1] == 0

        for number in range(4):
            work.begin(take, f"lock {number}")
        work.begin(fork).join()
        over.set()
        assert work.end() == []


RELEASING = """
    import threading
    client, lost, ended = holdfast.Client({urls}, command_timeout=0.3), [], threading.Event()

    def work(name):
        while not ended.is_set():
            try:
                with client.lock(name, ttl=60, timeout=30):
                    pass
            except holdfast.LeaseLost as error:
                lost.append(str(error))
            except holdfast.HoldfastError:
                pass  # the server did not reply in time

    workers = [threading.Thread(target=work, args=(f"lock {number}",)) for number in range(8)]
    for worker in workers:
        worker.start()
    print("ready", flush=True)
    sys.stdin.readline()
    ended.set()
    for worker in workers:
        worker.join()
    print("lost", lost, flush=True)
"""


@pytest.mark.long
def test_a_process_that_is_stopped_while_its_threads_release_loses_no_lease(
    three: list[Server],
) -> None:
    process = Process(three[0], RELEASING.replace("{urls}", repr(urls(three))))
    try:
        assert process.says() == "ready"
        for _ in range(8):
            time.sleep(0.3)
            process.stop()
            time.sleep(0.7)  # longer than the timeout of a command, and a reader needs to go on
            process.go_on()
        process.tell()
        assert process.says() == "lost []"
    finally:
        process.kill()
