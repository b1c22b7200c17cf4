"""Many threads and several servers: all threads except the main one share their connections.

One thread at a time reads for all of them. If it fails or is interrupted, the others must not fail.
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
from holdfast.wire.node_connection import LATE_AFTER
from holdfast.wire.node_pool import NodePool
from holdfast.wire.server_argument import parse_targets
from holdfast.wire.shared_node_pool import SharedNodePool, _Pending
from kit.interrupts import (
    AtLine,
    InterruptAt,
    make_thread_seem_ended,
)
from kit.processes import Process
from kit.proxy import Proxy
from kit.quorum_servers import init_for_quorum
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
    """Three empty servers. Frozen ones are thawed after the test."""
    for server in three_servers:
        init_for_quorum(server)
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
    """Work that runs in threads, all of which must end."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def begin(self, work: Callable[..., object], *given: object) -> threading.Thread:
        def run() -> None:
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - checked by the test
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def end(self) -> list[BaseException]:
        """Wait for all threads, and return the exceptions that they raised."""
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the thread never ends"
        return self.errors


def connect_to_all(client: holdfast.Client, servers: list[Server]) -> None:
    """Acquire locks in threads until one is on every server, because slow servers are connected
    later."""
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
        # The shared connection, and the one that sends CLIENT LIST.
        assert [connections(server) for server in three] == [2, 2, 2]
        all_hold.wait(PATIENCE)
        assert work.end() == []
    eventually(lambda: nothing_is_left(three), what="all is released")


def connected_pool(client: holdfast.Client, work: Work) -> SharedNodePool:
    """Return the shared pool once it is connected to all nodes. A majority is enough to acquire."""

    def is_connected() -> bool:
        work.begin(client.lock("warm").acquire().release).join()
        return all(
            connection.sock is not None and not connection.expected
            for connection in pool().connections
        )

    def pool() -> SharedNodePool:
        port: Any = client._session.port
        found: SharedNodePool = port._pools._shared
        return found

    eventually(is_connected, what="it is connected to all nodes")
    return pool()


def test_a_request_is_sent_while_another_thread_waits_for_replies(
    proxies: list[Proxy],
) -> None:
    with client_with_long_timeout(proxies) as client:
        work = Work()
        connected_pool(client, work)
        held = [proxy.hold_reply(matching=is_request_for("first")) for proxy in proxies]
        done: list[str] = []

        def take(name: str) -> None:
            with client.lock(name):
                done.append(name)

        def was_requested(name: str) -> bool:
            key = b"holdfast:{%b}" % name.encode()
            return all(any(key in args for args in list(proxy.log)) for proxy in proxies)

        work.begin(take, "first")
        for each in held:
            assert each.arrived.wait(PATIENCE)
        work.begin(take, "second")
        eventually(lambda: was_requested("second"), what="it is sent")
        assert done == []
        for each in held:
            each.release()
        assert work.end() == []
        assert sorted(done) == ["first", "second"]


def test_a_reader_continues_for_all_even_if_joining_its_thread_was_interrupted(
    proxies: list[Proxy],
) -> None:
    with client_with_long_timeout(proxies) as client:
        work = Work()
        pool = connected_pool(client, work)
        sockets = [connection.sock for connection in pool.connections]
        done: list[str] = []
        held = [proxy.hold_reply(matching=is_request_for("first")) for proxy in proxies]

        def take(name: str) -> None:
            try:
                with client.lock(name) as lease:
                    lease.check()
            finally:
                done.append(name)

        first = work.begin(take, "first")
        for each in held:
            assert each.arrived.wait(PATIENCE)
        make_thread_seem_ended(first)
        work.begin(take, "second")
        eventually(
            lambda: all(any(map(is_request_for("second"), list(proxy.log))) for proxy in proxies),
            what="the first thread sends it",
        )
        for each in held:
            each.release()
        eventually(lambda: sorted(done) == ["first", "second"], what="both threads are done")
        assert work.errors == []
        assert [connection.sock for connection in pool.connections] == sockets


def test_a_reader_that_receives_its_replies_while_it_sends_for_another_returns_at_once(
    proxies: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SharedNodePool._on_tick
    held = {
        name: [proxy.hold_reply(matching=is_request_for(name)) for proxy in proxies]
        for name in "ab"
    }

    def replies_come_first(pool: SharedNodePool) -> float:
        if pool._queue and not held["a"][0].released.is_set():
            for each in held["a"]:
                each.release()
            for connection in pool.connections:
                assert select.select([connection.sock], [], [], PATIENCE)[0]
        return original(pool)

    monkeypatch.setattr(SharedNodePool, "_on_tick", replies_come_first)
    with client_with_long_timeout(proxies) as client:
        work, done = Work(), list[str]()
        connected_pool(client, work)

        def take(name: str) -> None:
            with client.lock(name, ttl=10 * LONG):
                done.append(name)

        work.begin(take, "a")
        for each in held["a"]:
            assert each.arrived.wait(PATIENCE)
        time.sleep(2 * LATE_AFTER)  # after that, the reader checks for replies before it sends more
        work.begin(take, "b")
        try:
            eventually(lambda: done == ["a"], what="it does not wait for the other's replies")
        finally:
            for each in held["b"]:
                each.release()
        assert work.end() == []


def test_a_cycle_leaves_no_garbage_for_the_collector(three: list[Server]) -> None:
    with holdfast.Client(urls(three)) as client:
        work, lock = Work(), client.lock("a")

        def cycles(count: int) -> None:
            for _ in range(count):
                with lock:
                    pass

        def pending() -> set[_Pending]:
            return {each for each in gc.get_objects() if type(each) is _Pending}

        others = pending()  # from earlier tests
        gc.disable()
        try:
            work.begin(cycles, 50).join()
            port: Any = client._session.port
            connections = port._pools._shared.connections
            owed = {
                request for connection in connections for request, *_ in connection.expected
            }  # of a slow node
            left = pending() - others - owed
        finally:
            gc.enable()
        assert work.end() == []
        assert len(left) < 10


def test_many_threads_can_use_distant_nodes_at_once(proxies: list[Proxy]) -> None:
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


def test_a_distant_node_gets_the_leases_of_all_threads(
    three: list[Server], proxies: list[Proxy]
) -> None:
    failed: list[holdfast.Event] = []
    given = [three[0].url, three[1].url, proxies[2].url]
    with holdfast.Client(given, command_timeout=2, on_event=failed.append) as client:
        work, over, held = Work(), threading.Event(), threading.Barrier(25)
        connect_to_all(client, three)
        proxies[2].delay(0.15)

        def take(number: int) -> None:
            # At most 8 requests: each vote may need a second round to agree on the fence. A node
            # that owes more replies to a thread counts as slow.
            for _ in range(2):
                client.lock(f"lock {number}").acquire().release()
            with client.lock(f"lock {number}"):
                held.wait(PATIENCE)
                over.wait(PATIENCE)

        for number in range(24):
            work.begin(take, number)
        held.wait(PATIENCE)
        eventually(lambda: len(locks_on(three[2])) >= 25, what="the slow node has all locks")
        over.set()
        assert work.end() == []
    assert [event for event in failed if event.kind != "closed_while_held"] == []


def test_all_threads_make_progress_with_a_hung_node_and_it_keeps_nothing(
    three: list[Server],
) -> None:
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
        eventually(lambda: len(locks_on(three[2])) > 0, what="the threads acquire locks")
        three[2].freeze()
        frozen.set()
        assert work.end() == []
        three[2].thaw()
        eventually(lambda: nothing_is_left(three), what="nothing is left")


LONG = 100 * PATIENCE
"""Seconds. A thread that is not woken waits this long, so the test fails."""


def client_with_long_timeout(nodes: list[Any]) -> holdfast.Client:
    return holdfast.Client(urls(nodes), command_timeout=LONG, longest_ttl=10 * LONG)


CONNECTIONS = tuple(f"wire{os.sep}{name}" for name in ("node_", "shared_node_pool"))


@pytest.mark.parametrize(
    "while_dropping", [False, True], ids=["while connecting", "while dropping"]
)
def test_a_connection_dropped_while_the_pool_takes_over_others_is_opened_again(
    three: list[Server], *, while_dropping: bool
) -> None:
    for at in itertools.count(1):
        pool = NodePool(parse_targets(urls(three), LONG), PATIENCE)
        pool.send_all(
            [(range(3), (INSPECT, keys_of(b"holdfast:{a}"), ()))], PATIENCE, lambda *_: False
        )
        connection = pool.connections[0]
        both: list[Callable[[], Any]] = [pool._ready, partial(connection.drop, "it fails")]
        one, other = reversed(both) if while_dropping else both
        with AtLine(at, CONNECTIONS, other) as line:
            one()
        assert connection.sock is None or line.position is None
        assert connection in pool.unready or line.position is None, line.position
        pool.close()
        if line.position is None:
            assert at > 1
            return


def test_a_connection_that_two_threads_close_at_once_is_closed(three: list[Server]) -> None:
    for at in itertools.count(1):
        pool = NodePool(parse_targets(urls(three), LONG), PATIENCE)
        send_to_all(pool)
        connection = pool.connections[0]
        sock = connection.sock
        with AtLine(at, CONNECTIONS, partial(connection.drop, "it fails")) as line:
            connection.close()
        assert sock.fileno() == -1
        pool.close()
        if line.position is None:
            assert at > 1
            return


def send_to_all(pool: NodePool) -> None:
    """Send a request to all nodes."""
    pool.send_all([(range(3), (INSPECT, keys_of(b"holdfast:{a}"), ()))], PATIENCE, lambda *_: False)


def with_an_unready_connection(servers: list[Server]) -> NodePool:
    """Return a pool that has lost one connection."""
    pool = NodePool(parse_targets(urls(servers), LONG), PATIENCE)
    send_to_all(pool)
    pool.connections[0].drop("it fails")
    return pool


def test_a_connection_whose_take_over_is_interrupted_is_taken_over_later(
    three: list[Server],
) -> None:
    for at in itertools.count(1):
        pool = with_an_unready_connection(three)
        interrupt = InterruptAt(at, (f"wire{os.sep}node_",))
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            send_to_all(pool)
        taken = [
            connection.sock is not None or connection in pool.unready
            for connection in pool.connections
        ]
        assert all(taken), interrupt.position
        pool.close()
        if interrupt.position is None:
            assert at > 1
            return


def are_connected_after_request(pool: NodePool) -> bool:
    """Send a request, and return whether all nodes are connected."""
    send_to_all(pool)
    return all(connection.sock is not None for connection in pool.connections)


@pytest.mark.parametrize("end", [NodePool.interrupt, NodePool.close], ids=["interrupted", "closed"])
def test_a_connection_that_is_closed_while_it_is_taken_over_is_no_error(
    three: list[Server], end: Callable[[NodePool], None]
) -> None:
    for at in itertools.count(1):
        pool = with_an_unready_connection(three)
        connection = pool.connections[0]
        connection.open()
        eventually(lambda: not connection.opening, what="the connection is open")  # noqa: B023 - of this round
        with AtLine(at, (f"wire{os.sep}node_",), partial(end, pool)) as line:
            pool._ready()
        with contextlib.ExitStack() as stack:
            for _ in range(8):  # reuse the numbers of closed sockets for files, which can be read
                stack.enter_context(Path(os.devnull).open("rb"))
            if end is NodePool.interrupt:
                eventually(
                    partial(are_connected_after_request, pool),
                    what=f"all are connected after {line.position}",
                )
        pool.close()
        if line.position is None:
            assert at > 1
            return


def is_request_for(name: str) -> Callable[[tuple[bytes, ...]], bool]:
    key = b"holdfast:{%b}" % name.encode()
    return lambda args: key in args


def test_a_failing_reader_interrupts_the_other_threads_and_keeps_the_connections(
    proxies: list[Proxy],
) -> None:
    with client_with_long_timeout(proxies) as client:
        work = Work()
        pool = connected_pool(client, work)
        held = [proxy.hold_reply(matching=is_request_for("reader")) for proxy in proxies]
        replies: list[object] = []

        failures = [MemoryError()]

        def fail(*_: object) -> bool:
            if failures:
                raise failures.pop()
            return True

        def send(name: str, on_reply: Callable[..., bool]) -> None:
            keys = keys_of(b"holdfast:{%b}" % name.encode())
            pool.send_all([(range(3), (INSPECT, keys, ()))], LONG, on_reply)

        def note(_: int, __: int, answer: object) -> bool:
            replies.append(answer)
            return len(replies) == 3

        work.begin(send, "reader", fail)
        for each in held:
            assert each.arrived.wait(PATIENCE)
        others = [proxy.hold_reply(matching=is_request_for("other")) for proxy in proxies]
        work.begin(send, "other", note)
        for each in others:
            assert each.arrived.wait(PATIENCE)
        held[0].release()
        (error,) = work.end()
        assert isinstance(error, MemoryError)
        assert {type(each) for each in replies} == {Interrupted}
        for each in (*held, *others):
            each.release()
        work.errors.clear()
        connected_pool(client, work)
        assert work.end() == []


def test_a_thread_stops_waiting_at_its_timeout_while_another_reads(proxies: list[Proxy]) -> None:
    with client_with_long_timeout(proxies) as client:
        work = Work()
        pool = connected_pool(client, work)
        held = [proxy.hold_reply(matching=is_request_for("reader")) for proxy in proxies]
        held += [proxy.hold_reply(matching=is_request_for("other")) for proxy in proxies]
        replies: list[object] = []

        def send(name: str, timeout: float, on_reply: Callable[..., bool]) -> None:
            keys = keys_of(b"holdfast:{%b}" % name.encode())
            pool.send_all([(range(3), (INSPECT, keys, ()))], timeout, on_reply)

        def note(_: int, __: int, answer: object) -> bool:
            replies.append(answer)
            return False

        reader = work.begin(send, "reader", LONG, lambda *_: False)
        for each in held[:3]:
            assert each.arrived.wait(PATIENCE)
        work.begin(send, "other", 0.1, note).join(PATIENCE)
        assert [type(each) for each in replies] == [holdfast.OutcomeUnknown] * 3
        assert reader.is_alive()
        for each in held:
            each.release()
        assert work.end() == []


def test_a_thread_that_comes_before_the_reader_sleeps_is_given_up_at_its_timeout(
    proxies: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_with_long_timeout(proxies) as client:
        work = Work()
        pool = connected_pool(client, work)
        held = [proxy.hold_reply(matching=is_request_for("reader")) for proxy in proxies]
        held += [proxy.hold_reply(matching=is_request_for("other")) for proxy in proxies]
        replies: list[object] = []
        poll = SharedNodePool._poll_sockets

        def send(name: str, timeout: float, on_reply: Callable[..., bool]) -> None:
            keys = keys_of(b"holdfast:{%b}" % name.encode())
            pool.send_all([(range(3), (INSPECT, keys, ()))], timeout, on_reply)

        def note(_: int, __: int, answer: object) -> bool:
            replies.append(answer)
            return False

        def delayed_poll(pool: SharedNodePool, milliseconds: int) -> list[tuple[int, int]]:
            monkeypatch.setattr(SharedNodePool, "_poll_sockets", poll)
            work.begin(send, "other", 0.1, note)
            eventually(lambda: len(pool._waiting) == 1, what="the other thread waits")
            pool._send_queued()  # as a tick that began before the thread was waiting
            return poll(pool, milliseconds)

        monkeypatch.setattr(SharedNodePool, "_poll_sockets", delayed_poll)
        work.begin(send, "reader", LONG, lambda *_: False)
        eventually(lambda: len(replies) == 3, what="the other thread is given up")
        assert [type(each) for each in replies] == [holdfast.OutcomeUnknown] * 3
        for each in held:
            each.release()
        assert work.end() == []


def test_a_reader_that_cannot_run_delays_the_others_once(three: list[Server]) -> None:
    with holdfast.Client(urls(three), command_timeout=0.2) as client:
        work, blocked, over = Work(), threading.Event(), threading.Event()
        stuck = connected_pool(client, work)

        def read_nothing() -> None:
            request = INSPECT, keys_of(b"holdfast:{a}"), ()
            mine = _Pending([([0], request)], lambda *_: True, 0.0)
            assert stuck._become_reader(mine)
            blocked.set()
            over.wait(PATIENCE)
            stuck._release_reader()

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


def test_a_request_whose_caller_has_timed_out_is_not_sent(proxies: list[Proxy]) -> None:
    """It would arrive after the release that its caller sends next."""
    with client_with_long_timeout(proxies) as client:
        work = Work()
        pool = connected_pool(client, work)

        def send(name: str, timeout: float) -> None:
            keys = keys_of(b"holdfast:{%b}" % name.encode())
            pool.send_all([(range(3), (INSPECT, keys, ()))], timeout, lambda *_: False)

        reader = _Pending([], lambda *_: False, 0.0)
        reader.over = False
        assert pool._become_reader(reader)  # and reads nothing
        work.begin(send, "given up", 0.1).join(PATIENCE)
        pool._release_reader()
        work.begin(send, "next", LONG).join(PATIENCE)
        for proxy in proxies:
            sent = {key for args in list(proxy.log) for key in args if b"holdfast:{" in key}
            assert b"holdfast:{next}" in sent
            assert b"holdfast:{given up}" not in sent
        assert work.end() == []


def test_a_garbage_collector_callback_may_acquire_a_lock(three: list[Server]) -> None:
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


def test_closing_a_client_ends_the_waits_of_all_threads(three: list[Server]) -> None:
    client = holdfast.Client(urls(three), command_timeout=5)
    work, warm = Work(), threading.Thread(target=client.lock("warm").acquire)
    warm.start()
    warm.join()
    for server in three[1:]:
        server.freeze()
    for number in range(8):
        work.begin(client.lock(f"lock {number}").acquire)
    eventually(lambda: len(locks_on(three[0])) >= 8, what="all threads have sent their votes")
    client.close()
    errors = work.end()
    assert len(errors) == 8
    assert all(isinstance(error, holdfast.NodeUnavailable) for error in errors), errors


# Python warns that threads of the parent do not exist in the child.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_by_a_thread_opens_new_connections(three: list[Server]) -> None:
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
        assert process.read_line() == "ready"
        for _ in range(8):
            time.sleep(0.3)
            process.stop()
            time.sleep(0.7)  # longer than the command timeout, and than a reader may be late
            process.resume()
        process.send_line()
        assert process.read_line() == "lost []"
    finally:
        process.kill()
