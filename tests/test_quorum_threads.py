"""Many threads and several servers: all threads but the main one share their connections.

Whichever thread reads does it for all. What befalls it must not befall the others.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
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
from holdfast.core.spec import keys_of
from holdfast.scripts import INSPECT
from holdfast.wire.shared_table import Bell, SharedTable, _Turn
from holdfast.wire.table import LATE, Table
from holdfast.wire.target import targets_of
from kit.homes import settle_in
from kit.interrupts import (
    AtLine,
    AtPlace,
    InterruptAt,
    Passing,
    have_it_taken_for_ended,
    interrupted_everywhere,
    strike,
)
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


def connected_table(client: holdfast.Client, work: Work) -> SharedTable:
    """The table that threads share, connected to all nodes: a majority is enough to acquire."""

    def is_connected() -> bool:
        work.begin(client.lock("warm").acquire().release).join()
        return all(seat.sock is not None and not seat.owed for seat in table().seats)

    def table() -> SharedTable:
        port: Any = client._session.port
        found: SharedTable = port._crowd._shared["table"]
        return found

    eventually(is_connected, what="it is connected to all nodes")
    return table()


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
        table = connected_table(client, work)
        sockets = [seat.sock for seat in table.seats]
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
        assert [seat.sock for seat in table.seats] == sockets


def test_a_reader_that_finds_its_own_replies_when_it_sends_for_another_returns_at_once(
    proxies: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = SharedTable._look
    held = {name: [proxy.hold_reply(matching=asks_for(name)) for proxy in proxies] for name in "ab"}

    def replies_come_first(table: SharedTable) -> float:
        if table._put_down and not held["a"][0].released.is_set():
            for each in held["a"]:
                each.release()
            for seat in table.seats:
                assert select.select([seat.sock], [], [], PATIENCE)[0]
        return look(table)

    monkeypatch.setattr(SharedTable, "_look", replies_come_first)
    with patient(proxies) as client:
        work, done = Work(), list[str]()
        connected_table(client, work)

        def take(name: str) -> None:
            with client.lock(name, ttl=10 * LONG):
                done.append(name)

        work.begin(take, "a")
        for each in held["a"]:
            assert each.arrived.wait(PATIENCE)
        time.sleep(2 * LATE)  # from then on replies are looked for before more is sent
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

        def turns() -> set[_Turn]:
            return {each for each in gc.get_objects() if type(each) is _Turn}

        others = turns()  # what earlier stories left
        gc.disable()
        try:
            work.begin(cycles, 50).join()
            port: Any = client._session.port
            seats = port._crowd._shared["table"].seats
            owed = {question for seat in seats for question, *_ in seat.owed}  # by a slow node
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


class Victim:
    """A thread that can be ended from outside.

    It stays until `bury`, because its number must not go to another thread that is then struck: a
    thread that is struck as it starts never says so, and its parent waits for that without end.
    """

    def __init__(self, work: Work, do: Callable[..., object], *given: object) -> None:
        self._do, self._given = do, given
        self._ended, self._buried = threading.Event(), threading.Event()
        self._thread = work.begin(self._run)

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):
            self._do(*self._given)
        while not self._buried.is_set():
            with contextlib.suppress(SystemExit):
                self._ended.set()
                self._buried.wait()

    def is_ended(self) -> bool:
        """Strike until it ends: Python ignores what strikes while something is being collected."""
        if not self._ended.is_set() and self._thread.is_alive():
            strike(self._thread.ident, SystemExit)
        return self._ended.wait(0.02) or not self._thread.is_alive()

    def bury(self) -> None:
        """Let the thread end."""
        self._buried.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_thread_that_is_ended_from_outside_harms_no_other(three: list[Server]) -> None:
    """As some job queues do it when the time of a job is up."""
    with holdfast.Client(urls(three)) as client:
        work, over, victims = Work(), threading.Event(), list[Victim]()
        cycles = [0] * 6

        def take(number: int) -> None:
            while not over.is_set():
                with client.lock(f"lock {number}", ttl=60) as lease:
                    lease.check()
                cycles[number] += 1

        try:
            for number in range(6):
                work.begin(take, number)
            eventually(lambda: all(cycles), what="all of them are at it")
            victims += [Victim(work, take, 0) for _ in range(20)]
            for victim in victims:
                eventually(victim.is_ended, what="it ends")
            before = list(cycles)
            eventually(
                lambda: all(now > then for now, then in zip(cycles, before, strict=True)),
                what="all go on",
            )
        finally:
            over.set()
            for victim in victims:
                victim.bury()
        errors = work.end()
        assert [error for error in errors if not isinstance(error, SystemExit)] == []
        eventually(lambda: nothing_is_left(three), what="nothing is left")


@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.long, id="all"), pytest.param(12, id="some")]
)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("busy", [0, 3], ids=["alone", "beside others"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_a_thread_is_interrupted_others_still_get_the_lock(
    three: list[Server], every: int, busy: int, *, twice: bool
) -> None:
    with holdfast.Client(urls(three)) as client:
        lines, over = 0, threading.Event()

        def take(name: str = "a") -> None:
            with client.lock(name, ttl=60, timeout=PATIENCE) as lease:
                lease.check()

        def take_and_take(number: int) -> None:
            while not over.is_set():
                take(f"lock {number}")

        def others(where: str) -> None:
            second = Work()
            second.begin(take)
            assert second.end() == [], where

        def interrupt() -> None:
            nonlocal lines
            parts = tuple(f"wire{os.sep}{name}" for name in ("crowd.py", "shared_table", "table"))
            lines = interrupted_everywhere(take, others, every, parts, twice=twice)

        work = Work()
        for number in range(busy):
            work.begin(take_and_take, number)
        work.begin(take).join()
        work.begin(interrupt).join()
        over.set()
        assert work.end() == []
        assert lines
        # Before it is closed: some of it is left to the background.
        eventually(lambda: nothing_is_left(three), what="nothing is left")


LONG = 100 * PATIENCE
"""Seconds. Whoever is forgotten waits for as long, and is found to."""


def patient(nodes: list[Any]) -> holdfast.Client:
    return holdfast.Client(urls(nodes), command_timeout=LONG, longest_ttl=10 * LONG)


SEATS = tuple(f"wire{os.sep}{name}" for name in ("shared_table", "table"))


@pytest.fixture
def breaches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who touched the seats while another thread did."""
    touching: list[int] = []
    found: list[str] = []

    def watched(method: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any, **named: Any) -> None:
            thread = threading.get_ident()
            if set(touching) - {thread}:
                found.append(method.__name__)
            touching.append(thread)
            try:
                method(*given, **named)
            finally:
                touching.remove(thread)

        return call

    for name in ("_take_up", "_read", "interrupt"):
        monkeypatch.setattr(SharedTable, name, watched(getattr(SharedTable, name)))
    return found


def lines_of(function: Callable[..., object]) -> set[str]:
    text, first = inspect.getsourcelines(function)
    file = Path(inspect.getfile(function)).name
    return {f"{file}:{number}" for number in range(first, first + len(text))}


TURNS = lines_of(SharedTable._put_it_down) | lines_of(SharedTable._pass_on)
"""Where it is decided who reads."""


def test_at_whichever_line_of_one_another_comes_only_one_reads(
    three: list[Server], breaches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = threading.Event()
    sleep = _Turn.sleep

    def fall_asleep(turn: _Turn, seconds: float) -> bool:
        settled.set()
        return sleep(turn, seconds)

    monkeypatch.setattr(_Turn, "sleep", fall_asleep)
    with patient(three) as client:
        lock, other = (client.lock(name, ttl=10 * LONG) for name in ("one", "other"))
        work = Work()

        def take() -> None:
            with other:
                settled.set()

        def come() -> None:
            settled.clear()
            work.begin(take)
            assert settled.wait(PATIENCE)

        def come_at(place: tuple[str, int]) -> bool:
            with AtPlace(place, SEATS, come) as line:
                lease = lock.acquire()
            assert (work.end(), breaches) == ([], []), line.struck
            lease.release()
            return line.struck is not None

        def places() -> set[tuple[str, int]]:
            with Passing(SEATS) as passing:
                lease = lock.acquire()
            lease.release()
            return passing.places(3)

        def one() -> None:
            found = set.union(*(places() for _ in range(5)))
            struck = [place for place in sorted(found) if any(come_at(place) for _ in range(3))]
            # Not all: whether it spins, and whether the third answer is read at once, varies.
            assert len(struck) > 2 / 3 * len(found) > 0
            lines = {line for line, _ in found} - {line for line, _ in struck}
            assert not lines & TURNS

        telling = Work()
        telling.begin(take).join()
        telling.begin(one).join()
        assert telling.errors == []
    eventually(lambda: nothing_is_left(three), what="nothing is left")


@pytest.mark.parametrize("amid_hanging_up", [False, True], ids=["amid coming", "amid hanging up"])
def test_a_node_that_is_hung_up_on_just_as_another_comes_is_connected_to_again(
    three: list[Server], *, amid_hanging_up: bool
) -> None:
    for at in itertools.count(1):
        table = Table(targets_of(urls(three), LONG), PATIENCE)
        table.ask([(range(3), (INSPECT, keys_of(b"holdfast:{a}"), ()))], PATIENCE, lambda *_: False)
        seat = table.seats[0]
        both: list[Callable[[], Any]] = [table._ready, partial(seat.drop, "it fails")]
        one, other = reversed(both) if amid_hanging_up else both
        with AtLine(at, SEATS, other) as line:
            one()
        assert seat.sock is None or line.struck is None
        assert seat in table.empty or line.struck is None, line.struck
        table.close()
        if line.struck is None:
            assert at > 1
            return


def test_a_connection_that_two_threads_hang_up_on_at_once_is_closed(three: list[Server]) -> None:
    for at in itertools.count(1):
        table = Table(targets_of(urls(three), LONG), PATIENCE)
        look(table)
        seat = table.seats[0]
        sock = seat.sock
        with AtLine(at, SEATS, partial(seat.drop, "it fails")) as line:
            seat.hang_up()
        assert sock.fileno() == -1
        table.close()
        if line.struck is None:
            assert at > 1
            return


def look(table: Table) -> None:
    """Ask all nodes something, at any table."""
    table.ask([(range(3), (INSPECT, keys_of(b"holdfast:{a}"), ()))], PATIENCE, lambda *_: False)


def with_an_empty_seat(servers: list[Server]) -> SharedTable:
    """A table of many threads at which one connection was lost."""
    table = SharedTable(targets_of(urls(servers), LONG), PATIENCE, Bell())
    look(table)
    table.seats[0].drop("it fails")
    return table


def test_wherever_one_who_takes_a_connection_over_is_interrupted_another_will(
    three: list[Server],
) -> None:
    for at in itertools.count(1):
        table = with_an_empty_seat(three)
        interrupt = InterruptAt(at, (f"wire{os.sep}table",))
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            look(table)
        taken = [seat.sock is not None or seat in table.empty for seat in table.seats]
        assert all(taken), interrupt.struck
        table.close()
        if interrupt.struck is None:
            assert at > 1
            return


def are_taken(table: Table) -> bool:
    """Whether all seats are, for who asks."""
    look(table)
    return all(seat.sock is not None for seat in table.seats)


@pytest.mark.parametrize("end", [Table.interrupt, Table.close], ids=["interrupted", "closed"])
def test_a_connection_that_is_closed_amid_being_taken_over_is_no_error(
    three: list[Server], end: Callable[[Table], None]
) -> None:
    for at in itertools.count(1):
        table = with_an_empty_seat(three)
        seat = table.seats[0]
        seat.open()
        eventually(lambda: not seat.opening, what="it is there")  # noqa: B023 - of this round
        with AtLine(at, (f"wire{os.sep}table",), partial(end, table)) as line:
            table._ready()
        with contextlib.ExitStack() as stack:
            for _ in range(8):  # the numbers of closed sockets go to files, which can be read from
                stack.enter_context(Path(os.devnull).open("rb"))
            if end is Table.interrupt:
                eventually(partial(are_taken, table), what=f"all are taken after {line.struck}")
        table.close()
        if line.struck is None:
            assert at > 1
            return


def asks_for(name: str) -> Callable[[tuple[bytes, ...]], bool]:
    key = b"holdfast:{%b}" % name.encode()
    return lambda args: key in args


class Trio:
    """The first reads, the second, if there is one, waits, and a third comes."""

    def __init__(
        self, client: holdfast.Client, proxies: list[Proxy], at: int, *, second: bool
    ) -> None:
        self._client, self._proxies = client, proxies
        self._has_left, self._over = threading.Event(), threading.Event()
        self.asleep_before = False
        names = [f"first {at}", f"second {at}"][: 1 + second]
        replies = [[p.hold_reply(matching=asks_for(name)) for p in proxies] for name in names]
        self._replies = [[each.release for each in some] for some in replies]
        self._others = Work()
        self._others.begin(self._hold, names[0])
        for each in replies[0]:
            assert each.arrived.wait(PATIENCE)
        if second:
            self._others.begin(self._hold, names[1])
            eventually(partial(self._was_sent, names[1]), what="it is sent")
        self.third = threading.get_ident()

    def _hold(self, name: str) -> None:
        with self._client.lock(name, ttl=10 * LONG):
            self._has_left.set()
            self._over.wait(LONG)

    def _was_sent(self, name: str) -> bool:
        return all(any(map(asks_for(name), list(proxy.log))) for proxy in self._proxies)

    def first_leaves(self) -> None:
        """Unless it has left already: the second goes on reading."""
        if self._replies[0]:
            self._release(0)
            assert self._has_left.wait(PATIENCE)
            if len(self._replies) > 1:
                port: Any = self._client._session.port
                eventually(lambda: port._crowd._shared["table"]._sleeps, what="the second reads")

    def _release(self, which: int) -> None:
        while self._replies[which]:
            self._replies[which].pop()()

    def falls_asleep(self, thread: int) -> None:
        if thread == self.third:
            self.asleep_before |= bool(self._replies[0])
            self.first_leaves()
            self._release(-1)

    def end(self) -> list[BaseException]:
        self._over.set()
        return self._others.end()


@pytest.mark.parametrize("second", [False, True], ids=["naming nobody", "naming another"])
def test_at_whichever_line_of_one_the_reader_leaves_one_reads_and_only_one(
    proxies: list[Proxy], breaches: list[str], monkeypatch: pytest.MonkeyPatch, *, second: bool
) -> None:
    trio: list[Trio] = []
    sleep = _Turn.sleep

    def fall_asleep(turn: _Turn, seconds: float) -> bool:
        for each in trio:
            each.falls_asleep(turn.thread)
        return sleep(turn, seconds)

    monkeypatch.setattr(_Turn, "sleep", fall_asleep)
    with patient(proxies) as client:
        connected_table(client, Work())
        lock = client.lock("third", ttl=10 * LONG)

        def third() -> None:
            for at in itertools.count(1):
                trio[:] = [Trio(client, proxies, at, second=second)]
                with AtLine(at, SEATS, trio[0].first_leaves) as line, lock:
                    pass
                assert (trio[0].end(), breaches) == ([], []), line.struck
                if trio[0].asleep_before:
                    assert at > 1
                    return

        telling = Work()
        telling.begin(third).join(10 * PATIENCE)  # it is many stories
        assert telling.end() == []


@pytest.mark.parametrize("stays", [False, True], ids=["gone", "stuck"])
def test_a_thread_that_was_to_read_for_all_and_does_not_is_not_waited_for(
    three: list[Server], *, stays: bool
) -> None:
    with holdfast.Client(urls(three), command_timeout=0.2) as client:
        work, begun, over = Work(), threading.Event(), threading.Event()

        def take() -> None:
            with client.lock("a", ttl=60) as lease:
                lease.check()

        def begin_and_do_nothing(table: Any) -> None:
            if stays:
                table.inside.add(threading.get_ident())
            assert table._put_it_down(_Turn((), lambda *_: True, 0.0, {}))
            begun.set()
            over.wait(PATIENCE)

        work.begin(take).join()
        port: Any = client._session.port
        table = port._crowd._shared["table"]
        work.begin(begin_and_do_nothing, table)
        assert begun.wait(PATIENCE)
        for _ in range(3):
            work.begin(take)
        for thread in work.threads[2:]:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert table.deserted == stays
        over.set()
        assert work.end() == []
    eventually(lambda: nothing_is_left(three), what="nothing is left")


def test_what_a_thread_that_died_amid_reading_would_have_read_is_accounted_for(
    three: list[Server], proxies: list[Proxy]
) -> None:
    with holdfast.Client(urls(proxies), command_timeout=2) as client:
        work, held, over = Work(), threading.Event(), threading.Event()

        def hold() -> None:
            with client.lock("a", ttl=60):
                held.set()
                over.wait(PATIENCE)

        def die() -> None:
            table.inside.add(threading.get_ident())
            assert table._put_it_down(_Turn((), lambda *_: True, 0.0, {}))

        connect_to_all(client, three)
        late = proxies[2].hold_request(matching=asks_for("a"))
        work.begin(hold)
        assert held.wait(PATIENCE)
        port: Any = client._session.port
        table = port._crowd._shared["table"]
        work.begin(die).join()
        work.begin(client.lock("other").acquire).join()
        over.set()
        assert work.end() == []
        quorum: Any = client._session.quorum

        def is_given_back() -> bool:
            work.begin(client.lock(f"lock {len(work.threads)}").acquire).join()
            return not quorum.whereabouts._leaving

        eventually(is_given_back, what="all have answered that they gave it back")
        late.release()  # the vote of the third
        eventually(lambda: not any(b"{a}" in key for key in locks_on(three[2])), what="it is gone")


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
