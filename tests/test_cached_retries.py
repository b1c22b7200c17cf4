"""A cached function whose requests fail: it retries, computes without the server, or reports.

The server is real. The port in front of it fails as planned and has a manual clock. Background
tasks run immediately, in the caller's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import redis

import holdfast
from holdfast.adapters.thread_port import run
from holdfast.core import cache as caching
from holdfast.core.flight import Flight
from kit.failing_port import LATE, LOST, UNSENT, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.servers import Server

LOCK = "holdfast:{a}:cache"
VALUE, FENCE, QUEUE = "holdfast:value:{a}", f"{LOCK}:fence", f"{LOCK}:queue"


class Setting:
    """A client with a failing port, and a function that counts its calls."""

    def __init__(self, client: Any, server: Server, events: list[holdfast.Event]) -> None:
        self.client, self.server, self.events = client, server, events
        self.port = install(client)
        self.cache = client._caching._cache
        self.cache._run_in_background = lambda operation: run(operation) is None
        self.calls = 0
        self.during_call: Callable[[], object] = lambda: None

    def cached(self, **given: Any) -> Any:
        return self.client.cached(**{"ttl": 60, "key": "a", **given})(self._work)

    def _work(self) -> int:
        self.calls += 1
        number = self.calls
        self.during_call()
        return number

    def kept(self) -> bytes | None:
        value = self.server.command("GET", VALUE)
        return None if value is None else bytes(value.partition(b"\n")[2])

    def reported(self) -> list[tuple[str, str, int]]:
        return [(event.kind, event.lock, event.fence) for event in self.events]


@pytest.fixture
def on(server: Server) -> Iterator[Setting]:
    events: list[holdfast.Event] = []
    with holdfast.Client(server.url, command_timeout=1.0, on_event=events.append) as client:
        client._session.report = events.append
        yield Setting(client, server, events)


@pytest.mark.parametrize(
    ("outcomes", "lasts", "limits", "hit"),
    [
        ([], 0.0, [1.0], True),
        ([UNSENT], 0.0, [1.0, 1.0], True),
        ([LOST], 0.25, [1.0, 0.75], True),
        ([UNSENT, UNSENT], 0.25, [1.0, 0.75, 0.5], True),
        ([LATE, UNSENT, UNSENT], 0.0, [1.0, 1.0, 1.0], False),
        ([UNSENT, UNSENT, LATE], 0.25, [1.0, 0.75, 0.5], False),
        ([LATE], 1.0, [1.0], False),
        ([LATE], 1.5, [1.0], False),
        ([UNSENT, LATE], 0.5, [1.0, 0.5], False),
    ],
)
def test_a_lookup_is_retried_while_there_is_time(
    on: Setting, outcomes: list[str], lasts: float, limits: list[float], hit: bool
) -> None:
    function = on.cached()
    assert function() == 1
    on.port.sent("read_cached")
    on.port.time = 1000.0
    on.port.plan["read_cached"], on.port.duration = [*outcomes], lasts
    assert function() == (1 if hit else 2)
    assert on.port.sent("read_cached") == limits
    assert on.kept() == b"1"
    assert on.reported() == ([] if hit else [("uncached", "a", 0)])


def test_a_forked_child_does_not_retry_its_parents_lookup(on: Setting) -> None:
    function = on.cached()
    assert function() == 1
    on.port.sent("read_cached")
    on.port.plan["read_cached"] = [UNSENT, UNSENT]
    on.port.before["read_cached"] = lambda: setattr(on.port, "forked", 1)
    function()
    assert len(on.port.sent("read_cached")) == 1


def test_an_unreachable_server_is_retried_every_two_seconds(on: Setting) -> None:
    function, port = on.cached(), on.port
    assert function() == 1
    port.sent("read_cached")
    port.time = 1000.0
    port.plan["read_cached"] = [UNSENT] * 6
    assert (function(), len(port.sent("read_cached"))) == (2, 3)
    assert on.reported() == [("uncached", "a", 0)]
    assert on.events[0].detail == "values are computed and not stored: it is unsent"
    for seconds, computed in ((0.0, 3), (1.999, 4)):
        port.time = 1000.0 + seconds
        assert (function(), port.sent("read_cached")) == (computed, [])
    port.time = 1002.0
    assert (function(), len(port.sent("read_cached"))) == (5, 3)
    assert len(on.reported()) == 1, "the same outage is reported once"
    port.time = 1004.0
    assert function() == 1
    port.plan["read_cached"] = [UNSENT] * 3
    assert function() == 6
    assert len(on.reported()) == 2
    on.client.close()
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        function()
    assert on.calls == 6


def test_any_reply_makes_the_client_use_the_server_again(on: Setting) -> None:
    function, port = on.cached(), on.port
    assert function() == 1
    port.plan["read_cached"] = [UNSENT] * 3
    assert function() == 2
    function.invalidate()
    port.sent("read_cached")
    assert function() == 3
    assert len(port.sent("read_cached")) == 1
    assert on.kept() == b"3"


def test_an_invalidation_is_sent_three_times(on: Setting) -> None:
    function, port = on.cached(lock_ttl=3.0), on.port
    assert function() == 1
    port.time = 1000.0
    for lasts, limits in ((1.0, [1.0, 1.0, 1.0]), (1.25, [1.0, 1.0, 0.5])):
        port.plan["invalidate"], port.duration = [LATE, LOST, UNSENT], lasts
        with pytest.raises(holdfast.NodeUnavailable, match="unsent"):
            function.invalidate()
        assert port.sent("invalidate") == pytest.approx(limits)
    port.plan["invalidate"], port.duration = [UNSENT, LATE], 0.0
    function.invalidate()
    assert len(port.sent("invalidate")) == 3
    assert on.kept() is None


# Storing


def test_a_value_is_stored_with_its_time_and_its_cost(on: Setting) -> None:
    def takes_time() -> None:
        on.port.time += 1.5

    on.during_call = takes_time
    assert on.cached(ttl=20, stale=5)() == 1
    fence = on.server.command("GET", FENCE)
    head, _, payload = on.server.command("GET", VALUE).partition(b"\n")
    assert head.split() == [b"%d" % (int(fence) - 1), b"5000", b"1500"]  # it was released
    assert payload == b"1"
    assert 20_000 < on.server.command("PTTL", VALUE) <= 25_000
    assert on.port.sent("store") == [1.0]
    assert on.server.command("EXISTS", LOCK) == 0


def test_storing_is_retried_until_a_reply_arrives(on: Setting) -> None:
    function = on.cached()
    for number, outcomes in enumerate(([UNSENT], [LOST, UNSENT], [LATE, LATE]), 1):
        on.port.plan["store"] = [*outcomes]
        assert function.refresh() == number
        assert on.kept() == str(number).encode()
        assert len(on.port.sent("store")) == len(outcomes) + 1
        assert on.server.command("EXISTS", LOCK) == 0
    assert not on.events


def test_a_value_that_could_not_be_stored_is_returned_and_reported(on: Setting) -> None:
    on.port.plan["store"] = [UNSENT] * 3
    assert on.cached()() == 1
    assert on.kept() is None
    assert on.reported() == [("uncached", "a", 0)]
    assert on.events[0].detail.endswith("it is unsent")
    on.port.plan["store"] = [UNSENT] * 3
    with pytest.raises(holdfast.NodeUnavailable, match="it is unsent"):
        on.cached().refresh()


def test_a_value_of_a_lost_lease_is_returned_and_not_stored(on: Setting) -> None:
    def takes_too_long() -> None:
        on.port.time += 20.0

    on.during_call = takes_too_long
    assert on.cached(lock_ttl=30)() == 1
    assert not on.port.sent("store")
    assert on.kept() is None


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failed_computation_releases_the_lock(on: Setting, error: type[BaseException]) -> None:
    def fails() -> None:
        assert on.server.command("EXISTS", LOCK) == 1
        raise error

    on.during_call = fails
    for call in (on.cached(), on.cached().refresh):
        with pytest.raises(error):
            call()
        assert on.server.command("EXISTS", LOCK, VALUE) == 0
    assert not on.events


def test_a_value_that_was_stored_by_another_client_is_not_computed(on: Setting) -> None:
    def other_stores(payload: str) -> Callable[[], object]:
        return lambda: on.server.command("SET", VALUE, f"7 0 1\n{payload}", "PX", 60_000)

    on.port.before["claim"] = other_stores("41")
    assert (on.cached()(), on.calls) == (41, 0)
    on.server.command("DEL", VALUE)
    on.port.before["claim"] = other_stores("{no JSON")
    assert (on.cached()(), on.calls) == (1, 1)
    assert on.kept() == b"{no JSON"
    assert on.cached()() == 2, "a value that cannot be decoded is replaced"
    assert on.kept() == b"2"
    assert on.server.command("EXISTS", LOCK) == 0


def test_a_stored_value_that_cannot_be_decoded_is_replaced(on: Setting) -> None:
    assert on.cached()() == 1
    fence = on.server.command("GET", FENCE).decode()
    on.server.command("SET", VALUE, f"{fence} 0 1\n{{no JSON", "PX", 60_000)
    assert on.cached()() == 2
    assert on.kept() == b"2"


@pytest.mark.parametrize("changed", [LOCK, FENCE])
def test_a_value_is_not_stored_without_the_current_lease_and_fence(
    on: Setting, changed: str
) -> None:
    on.during_call = lambda: on.server.command("SET", changed, "7", "PX", 60_000)
    assert on.cached()() == 1
    assert on.kept() is None
    assert len(on.port.sent("store")) == 1
    assert on.server.command("GET", changed) == (b"7" if changed == LOCK else b"8")  # released


def test_storing_empties_the_queue_except_for_tombstones(on: Setting) -> None:
    waiting = [part for ticket in range(2500) for part in (ticket + 1, f"hf1:gone:{ticket}:::")]

    def others_queue() -> None:
        on.server.command("ZADD", QUEUE, *waiting, 1.5e16, "given up")

    on.during_call = others_queue
    connection: Any = redis.Redis(unix_socket_path=on.server.unix_path)
    with connection, connection.pubsub() as listener:
        listener.subscribe("holdfast:push:gone")
        assert listener.get_message(timeout=30) is not None
        assert on.cached().refresh() == 1
        message = listener.get_message(timeout=30)
    assert message["data"] == f"A:0:0:13:hf1:gone:0:::{LOCK}".encode(), (
        "the message makes the waiter recheck"
    )
    assert on.server.command("ZRANGE", QUEUE, 0, -1) == [b"given up"]
    assert on.kept() == b"1"


def test_the_fence_of_a_value_grows_and_expires_after_a_minute(on: Setting) -> None:
    function, fences = on.cached(), []
    for change in (function, function.invalidate, function.invalidate, function.refresh):
        change()
        fences.append(int(on.server.command("GET", FENCE)))
        assert 50_000 < on.server.command("PTTL", FENCE) <= 60_000
    assert fences == sorted(set(fences))
    ahead = fences[-1] // 10 * 10 + 10**12 + 1
    on.server.command("SET", FENCE, ahead)
    function.invalidate()
    assert int(on.server.command("GET", FENCE)) == ahead + 9
    assert on.kept() is None


def test_a_key_without_a_valid_value_is_replaced(on: Setting) -> None:
    for number, foreign in enumerate(("not ours", "7 0\n41", "x 0 1\n41"), 1):
        on.server.command("SET", VALUE, foreign)
        assert on.cached()() == number
        assert on.kept() == str(number).encode()
        assert 50_000 < on.server.command("PTTL", VALUE) <= 60_000


def test_a_function_that_calls_itself_for_the_same_value_is_refused(on: Setting) -> None:
    function = on.cached()
    on.during_call = function
    with pytest.raises(holdfast.WouldDeadlock, match=r"^the computation of 'a' requests") as caught:
        function()
    assert caught.value.lock == "a"


def test_a_free_lock_is_acquired_even_if_the_lookup_used_all_the_time(on: Setting) -> None:
    late = on.port.time + 6.0
    on.port.before["read_cached"] = lambda: setattr(on.port, "time", late)
    assert on.cached(timeout=5)() == 1
    assert on.kept() == b"1"


# The background


def stale(on: Setting) -> Any:
    """Make a cached function whose value is stale."""
    function = on.cached(stale=30)
    assert function() == 1
    assert on.server.command("PEXPIRE", VALUE, 20_000) == 1
    return function


def test_a_failed_refresh_is_retried_after_a_second(
    on: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = stale(on)
    later: list[tuple[float, Callable[[], object]]] = []
    monkeypatch.setattr(on.client._session.renewer, "call_later", lambda *each: later.append(each))

    def fails() -> None:
        raise ZeroDivisionError("in vain")

    on.during_call = fails
    assert (function(), on.calls) == (1, 2)
    assert on.reported() == [("refresh_failed", "a", 0)]
    assert on.events[0].detail.endswith(": ZeroDivisionError('in vain')")
    on.during_call = lambda: None
    assert (function(), on.calls) == (1, 2), "it is not retried immediately"
    ((seconds, again),) = later
    assert seconds == 1.0
    again()
    assert (function(), function(), on.calls) == (1, 3, 3)
    assert (len(on.events), len(later)) == (1, 1)


def test_a_refresh_that_could_not_be_stored_is_retried(
    on: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = stale(on)
    later: list[Any] = []
    monkeypatch.setattr(on.client._session.renewer, "call_later", lambda *each: later.append(each))
    on.port.plan["store"] = [UNSENT] * 3
    assert function() == 1
    assert on.reported() == [("refresh_failed", "a", 0)]
    assert on.events[0].detail.endswith("NodeUnavailable('it is unsent')")
    assert [each for each in later if each[0] == 1.0]
    assert on.cache._refreshing


def test_a_refresh_that_is_not_needed_is_not_a_failure(on: Setting) -> None:
    function = stale(on)

    def other_stores() -> None:
        on.server.command("SET", VALUE, f"{2**60} 0 1\n41", "PX", 60_000)

    on.port.before["claim"] = other_stores
    assert function() == 1
    assert (function(), on.calls) == (41, 1)
    assert not on.events
    assert not on.cache._refreshing


def test_a_refresh_that_fails_because_the_client_is_closed_is_not_reported(on: Setting) -> None:
    function = stale(on)

    def closes() -> None:
        on.client.close()
        raise ZeroDivisionError

    on.during_call = closes
    assert (function(), on.calls) == (1, 2)
    assert "refresh_failed" not in {event.kind for event in on.events}
    assert not on.cache._refreshing


def test_one_refresh_at_a_time_unless_its_thread_or_task_is_gone(
    on: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = stale(on)
    on.cache._refreshing["a"] = other = Flight(object())
    assert (function(), on.calls) == (1, 1)
    assert on.cache._refreshing == {"a": other}
    monkeypatch.setattr(on.port, "is_gone", lambda actor: actor is other.actor)
    begin, begun = on.cache._run_in_background, []

    def begin_later(operation: Any) -> bool:
        begun.append(operation)
        return True

    on.cache._run_in_background = begin_later
    assert (function(), len(begun)) == (1, 1)
    assert (function(), len(begun)) == (1, 1), "the thread or task of the new one still exists"
    assert begin(begun[0])
    assert on.calls == 2
    assert not on.cache._refreshing


def test_a_refresh_that_the_background_rejects_is_retried_by_the_next_call(
    on: Setting,
) -> None:
    function = stale(on)
    begin = on.cache._run_in_background
    on.cache._run_in_background = lambda _: False
    assert (function(), on.calls) == (1, 1)
    assert not on.cache._refreshing

    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    on.cache._run_in_background = interrupted
    with pytest.raises(KeyboardInterrupt):
        function()
    assert not on.cache._refreshing
    on.cache._run_in_background = begin
    assert (function(), on.calls) == (1, 2)


# Waiting for another caller


def join_flight(on: Setting, give_up: float) -> Flight:
    """Wait for the computation of another caller."""
    flight = on.cache.flights["a"] = Flight(object())
    wanted: Any = type("Wanted", (), {"name": "a", "spec": on.cached(timeout=5)})
    wanted.spec.lock = type("Lock", (), {"timeout": 5})
    run(caching._join(on.cache, wanted, flight, give_up))
    return flight


def waits(on: Setting, monkeypatch: pytest.MonkeyPatch, found: Callable[[], bool]) -> list[float]:
    """Make waits end immediately; return the list of their timeouts."""
    limits: list[float] = []

    async def wait(_: object, timeout: float) -> bool:
        limits.append(timeout)
        on.port.time += timeout
        return found()

    monkeypatch.setattr(on.port, "wait", wait, raising=False)
    return limits


def test_a_waiting_caller_checks_every_second_whether_the_other_is_gone(
    on: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on.port.time = 1000.0
    limits: list[float] = []

    def last() -> bool:
        on.port.gone = len(limits) == 3
        return False

    limits = waits(on, monkeypatch, last)
    flight = join_flight(on, 1010.0)
    assert limits == [1.0, 1.0, 1.0]
    assert flight.done
    assert not on.cache.flights


def test_a_forked_child_stops_waiting_for_its_parent(
    on: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forks() -> bool:
        on.port.forked = 1
        return False

    limits = waits(on, monkeypatch, forks)
    assert join_flight(on, float("inf")).done
    assert limits == [1.0]
    assert not on.cache.flights


def test_a_woken_caller_checks_only_the_flight(
    on: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on.port.gone = True

    def woken() -> bool:
        flight = on.cache.flights["a"]
        on.cache.end("a", flight)
        on.cache.flights["a"] = flight
        return True

    waits(on, monkeypatch, woken)
    assert join_flight(on, float("inf")).done
    assert on.cache.flights


def test_a_caller_waits_for_another_until_its_timeout(
    on: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on.port.time = 1000.0
    limits = waits(on, monkeypatch, lambda: False)
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        join_flight(on, 1002.5)
    assert limits == [1.0, 1.0, 0.5]
    assert str(caught.value) == "'a' was not computed within 5 s"
    assert caught.value.lock == "a"
