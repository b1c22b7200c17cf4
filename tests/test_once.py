"""Idempotent work: the contract of `client.once(...)`, with both APIs and on every server."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from redis.crc import key_slot

import holdfast
from holdfast.keys import keys_of_kind, kind_in, lock_key_in, name_in, namespace_in
from holdfast.scripts import CLAIM, COMPARE_AND_DELETE, FINISH
from kit.apis import Tasks
from kit.contention import tombstones, waiters
from kit.failing_port import LATE, LOST, UNSENT, hook_raising, install, record_cleanups
from kit.interrupts import InterruptAt
from kit.processes import Process
from kit.servers import ONE_KIND, commands_processed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server

LOCK = "holdfast:{a}:once"
RESULT, FENCE, QUEUE = "holdfast:result:{a}", f"{LOCK}:fence", f"{LOCK}:queue"


def calls(script: Any) -> Any:
    """Match the calls of one script."""
    return lambda args: len(args) > 1 and args[1] == script.sha.encode()


async def run_once(client: Any, result: object = None, **settings: Any) -> tuple[bool, Any]:
    """Do the work "a"; return whether this caller did it, and the result that it received."""
    async with client.once("a", **settings) as run:
        if run.first:
            run.result = result
    return run.first, run.result


async def until_queued(api: Api, server: Server, count: int = 1) -> None:
    async def queued() -> bool:
        return waiters(server, QUEUE) == count

    await api.eventually(queued)
    server.command("PING")  # as in `wait_until_queued`


def is_queued(server: Server) -> bool:
    return waiters(server, QUEUE) == 1


def is_free(server: Server) -> bool:
    return not server.command("EXISTS", LOCK) and not waiters(server, QUEUE)


# Doing the work


async def test_the_first_caller_does_the_work_and_later_callers_receive_its_result(
    client: Any, server: Server
) -> None:
    async with client.once("a", keep=60) as run:
        assert run.first
        assert run.result is None
        assert server.command("GET", LOCK).decode() == run.lease.token
        assert run.fence == run.lease.fence == int(server.command("GET", FENCE))
        run.result = {"paid": (1, 2)}
    fence = run.fence
    assert run.result == {"paid": [1, 2]}  # encoded and decoded, as for all callers
    assert is_free(server)
    assert 0 < server.command("PTTL", RESULT) <= 60_000
    assert 0 < server.command("PTTL", FENCE) <= 60_000
    async with client.once("a", keep=60) as again:
        assert not again.first
        with pytest.raises(holdfast.NotHeld, match="was done before"):
            again.lease  # noqa: B018 - the access is the test
        assert again.fence == fence
        assert again.result == {"paid": [1, 2]}
    assert is_free(server)


async def test_fences_grow_after_the_clock_was_set_back_however_long_it_takes(
    client: Any, server: Server
) -> None:
    """The counter lives until the clock has passed it. Otherwise the next fence would be lower."""
    ahead = int(server.command("TIME")[0]) * 1_000_000 + 7_200_000_000
    server.command("SET", FENCE, ahead)
    async with client.once("a", keep=60) as run:
        assert run.fence > ahead
    assert 7_200_000 < server.command("PTTL", FENCE) <= 7_260_000


async def test_a_result_costs_a_later_caller_one_request(client: Any, server: Server) -> None:
    await run_once(client, 1)
    server.reset_stats()
    assert await run_once(client) == (False, 1)
    assert commands_processed(server) == {"evalsha": 1, "get": 1, "pttl": 1}


async def test_work_that_raises_stores_nothing_and_the_next_caller_does_it(
    client: Any, server: Server
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.once("a") as run:
            run.result = 1
            raise ZeroDivisionError
    assert is_free(server)
    assert not server.command("EXISTS", RESULT)
    assert await run_once(client, 2) == (True, 2)


async def test_callers_wait_in_the_queue_and_all_receive_the_result_at_once(
    api: Api, server: Server
) -> None:
    holder, *others = (api.connect(server.url) for _ in range(4))
    async with holder.once("a") as run:
        callers = []
        for number, other in enumerate(others, 1):
            callers.append(api.start(run_once(other)))
            await until_queued(api, server, number)
        server.reset_stats()
        assert not {"evalsha", "eval"} & set(commands_processed(server))  # they do not poll
        run.result = "done"
    assert [await caller.result() for caller in callers] == [(False, "done")] * 3
    assert is_free(server)


async def test_callers_of_one_client_wait_for_one_another(api: Api, client: Any) -> None:
    go = api.event()

    async def work() -> tuple[bool, Any]:
        async with client.once("a") as run:
            if run.first:
                assert await api.wait(go, 20)
                run.result = 7
        return run.first, run.result

    callers = [api.start(work()) for _ in range(4)]
    go.set()
    results = [await caller.result() for caller in callers]
    assert sorted(results) == [(False, 7)] * 3 + [(True, 7)]


async def test_when_the_work_raises_the_first_waiter_does_it(api: Api, server: Server) -> None:
    holder, *others = (api.connect(server.url) for _ in range(3))
    callers = []
    with pytest.raises(ZeroDivisionError):
        async with holder.once("a"):
            for number, other in enumerate(others, 1):
                callers.append(api.start(run_once(other, number)))
                await until_queued(api, server, number)
            raise ZeroDivisionError
    assert [await caller.result() for caller in callers] == [(True, 1), (False, 1)]


async def test_without_waiting_the_error_names_the_caller_that_does_the_work(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    async with client.once("a") as run:
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            async with other.once("a", timeout=0):
                pytest.fail("two callers do the work")
        assert caught.value.lock == "a"
        assert caught.value.holder is not None
        assert caught.value.holder.token == run.lease.token
        with pytest.raises(holdfast.AcquireTimeout):
            async with other.once("a", timeout=dt.timedelta(milliseconds=50)):
                pytest.fail("two callers do the work")
        run.result = 1
    assert await run_once(other, timeout=0) == (False, 1)
    assert is_free(server)


async def test_the_label_of_a_caller_is_shown_to_others(client: Any) -> None:
    async with client.once("a", label="checkout"):
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            await run_once(client, timeout=0)
    holder = caught.value.holder
    assert holder is not None
    assert holder.label == "checkout"


def test_a_cancelled_caller_leaves_the_queue(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client, client.once("a") as run:
            caller = asyncio.create_task(run_once(client))
            await Tasks().eventually(lambda: asyncio.to_thread(is_queued, server))
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            assert not waiters(server, QUEUE)
            run.result = 1

    asyncio.run(scenario())


async def test_polling_callers_receive_the_result(api: Api, server: Server) -> None:
    client, other = api.connect(server.url), api.connect(server.url, wait="poll")
    async with client.once("a") as run:
        caller = api.start(run_once(other))
        run.result = 3
    assert await caller.result() == (False, 3)


async def test_the_same_work_inside_itself_would_deadlock(client: Any) -> None:
    async with client.once("a") as run:
        with pytest.raises(holdfast.WouldDeadlock, match="use another id"):
            async with client.once("a"):
                pytest.fail("the work was entered twice")
        run.result = 1
    assert await run_once(client) == (False, 1)


# Results


async def test_a_result_that_is_not_set_is_none_with_any_codec(client: Any, server: Server) -> None:
    for codec in (None, holdfast.RAW, holdfast.PICKLE):
        server.command("DEL", RESULT)
        async with client.once("a", codec=codec):
            pass
        async with client.once("a", codec=codec) as run:
            assert not run.first
            assert run.result is None


async def test_a_raw_result_may_be_empty_and_any_bytes(client: Any, server: Server) -> None:
    for result in (b"", b"1 0\n\x00\xff"):
        server.command("DEL", RESULT)
        assert await run_once(client, result, codec=holdfast.RAW) == (True, result)
        assert await run_once(client, codec=holdfast.RAW) == (False, result)


async def test_a_result_that_cannot_be_encoded_is_not_stored(client: Any, server: Server) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        await run_once(client, object())
    assert is_free(server)
    assert await run_once(client, 1) == (True, 1)


async def test_a_result_that_cannot_be_decoded_is_not_replaced(client: Any) -> None:
    await run_once(client, b"\xff", codec=holdfast.RAW)
    with pytest.raises(holdfast.WrongValue, match="cannot decode the value of 'a'"):
        await run_once(client, 2)
    assert await run_once(client, codec=holdfast.RAW) == (False, b"\xff")


async def test_a_result_is_not_set_by_a_caller_that_did_not_do_the_work(client: Any) -> None:
    await run_once(client, 1)
    with pytest.raises(holdfast.NotHeld, match=r"if run\.first:"):
        async with client.once("a") as run:
            run.result = 2
    assert await run_once(client) == (False, 1)


async def test_after_keep_the_work_is_done_again(client: Any, server: Server) -> None:
    first = client.once("a", keep=60)
    async with first:
        first.result = 1
    server.command("PEXPIRE", RESULT, 1)
    while server.command("EXISTS", RESULT):
        pass
    async with client.once("a") as run:
        assert run.first
        assert run.fence > first.fence
        run.result = 2
    assert await run_once(client) == (False, 2)


# Looking at a result, and forgetting it


async def test_peek_returns_the_result_without_doing_the_work(client: Any, server: Server) -> None:
    assert await client.once("a").peek() is None
    assert await client.once("a").peek(default="none") == "none"
    async with client.once("a") as run:
        assert await client.once("a").peek(default="none") == "none"  # it does not wait
        run.result = {"paid": 1}
    assert await client.once("a").peek() == {"paid": 1}
    assert is_free(server)


async def test_peek_distinguishes_a_result_of_none_from_no_result(client: Any) -> None:
    async with client.once("a"):
        pass
    assert await client.once("a").peek(default="none") is None


async def test_after_forget_the_work_is_done_again(client: Any, server: Server) -> None:
    await client.once("a").forget()  # nothing is stored yet
    assert await run_once(client, 1) == (True, 1)
    await client.once("a").forget()
    assert not server.command("EXISTS", RESULT)
    assert await run_once(client, 2) == (True, 2)


async def test_forget_during_the_work_does_not_discard_its_result(client: Any) -> None:
    async with client.once("a") as run:
        await client.once("a").forget()
        run.result = 1
    assert await run_once(client) == (False, 1)


async def test_a_forget_that_arrives_later_keeps_the_result_of_a_later_run(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=0.5)
    await run_once(client, 1)
    late = server.command("GET", RESULT)
    proxy.drop_reply(matching=calls(COMPARE_AND_DELETE), close=True)
    await client.once("a").forget()  # sent again, because the reply was lost
    assert not proxy.rules_left
    assert await run_once(client, 2) == (True, 2)
    assert not await client.atomic.compare_and_delete(RESULT, late)
    assert await run_once(client) == (False, 2)


async def test_without_the_server_peek_and_forget_name_the_work(api: Api, proxy: Proxy) -> None:
    client = api.connect(proxy.url, command_timeout=0.3)
    proxy.refuse()
    for call in (client.once("a").peek, client.once("a").forget):
        with pytest.raises(holdfast.NodeUnavailable, match="stored for 'a' cannot be read") as e:
            await call()
        assert e.value.lock == "a"


# Losing the lease


async def test_the_result_of_a_lost_lease_is_not_stored(api: Api, server: Server) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    with pytest.raises(holdfast.LeaseLost, match="the result was not stored") as caught:
        async with client.once("a") as run:
            server.command("DEL", LOCK)
            assert await run_once(other, "theirs") == (True, "theirs")
            run.result = "mine"
    assert caught.value.lock == "a"
    assert caught.value.fence == run.fence
    assert await run_once(client) == (False, "theirs")


async def test_an_evicted_caller_stores_nothing(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    operator = client.lock("the work", key=LOCK)
    with pytest.raises(holdfast.LeaseLost):
        async with client.once("a") as run:
            assert await operator.evict(await operator.holder())
            run.result = "mine"
    assert not server.command("EXISTS", RESULT)
    assert await run_once(client, 2) == (True, 2)


async def test_a_lease_that_was_released_in_the_block_stores_nothing(
    client: Any, server: Server
) -> None:
    with pytest.raises(holdfast.NotHeld):
        async with client.once("a") as run:
            run.result = 1
            await run.lease.release()
    assert not server.command("EXISTS", RESULT)


async def test_work_that_hangs_is_done_by_the_next_caller_after_max_hold(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    with pytest.raises(holdfast.LeaseLost, match="its time ran out"):
        async with client.once("a", ttl=0.5, max_hold=0.1) as run:

            async def lost() -> bool:
                return not run.lease.held

            await api.eventually(lost)
            run.result = "mine"
    assert await run_once(other, "theirs", timeout=20) == (True, "theirs")


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_the_work_of_a_killed_process_is_done_by_the_next_caller_after_the_ttl(
    server: Server,
) -> None:
    text = """
        with client.once("a", ttl=0.5) as run:
            print(run.first, flush=True)
            time.sleep(60)
    """
    with Process(server, text) as process, holdfast.Client(server.url) as client:
        assert process.read_line() == "True"
        process.kill()
        with client.once("a", timeout=10) as run:
            assert run.first
            run.result = 1


# Faults


async def test_a_lost_reply_of_the_store_is_retried(api: Api, server: Server, proxy: Proxy) -> None:
    client = api.connect(proxy.url, command_timeout=1)
    async with client.once("a") as run:
        proxy.drop_reply(matching=calls(FINISH), close=True)
        run.result = 1
    assert not proxy.rules_left
    assert is_free(server)
    assert await run_once(client) == (False, 1)


async def test_a_store_that_arrives_again_later_changes_nothing(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client, later = api.connect(proxy.url), api.event()
    proxy.duplicate_request(matching=calls(FINISH))
    async with client.once("a") as run:
        run.result = 1
    later.set()
    assert await run_once(client) == (False, 1)
    assert is_free(server)


async def test_without_the_server_the_work_is_not_done(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url)
    proxy.refuse()
    with pytest.raises(holdfast.NodeUnavailable):
        async with client.once("a"):
            pytest.fail("the work was done without the server")
    proxy.accept()
    assert await run_once(client, 1) == (True, 1)
    assert is_free(server)


class Setting:
    """A client with a failing port."""

    def __init__(self, client: Any, server: Server) -> None:
        self.client, self.server = client, server
        self.port = install(client)
        self.cleanups = record_cleanups(client)

    def store(self, *outcomes: str, keep: float = 60) -> None:
        with self.client.once("a", keep=keep) as run:
            self.port.plan["finish"] = list(outcomes)
            run.result = 1

    def stored(self) -> bool:
        return bool(self.server.command("EXISTS", RESULT))

    def locked(self) -> bool:
        return bool(self.server.command("EXISTS", LOCK))


@pytest.fixture
def on(server: Server) -> Iterator[Setting]:
    with holdfast.Client(server.url) as client:
        yield Setting(client, server)


@pytest.mark.parametrize("outcomes", [[LOST], [LATE], [UNSENT], [LOST, LATE], [LOST, UNSENT]])
def test_a_store_without_a_reply_is_retried(on: Setting, outcomes: list[str]) -> None:
    on.store(*outcomes)
    assert on.stored()
    assert not on.locked()
    assert not on.cleanups


@pytest.mark.parametrize("outcomes", [[LOST] * 3, [LATE] * 3, [UNSENT] * 3, [LATE, UNSENT, LOST]])
def test_a_store_without_any_reply_is_unknown_and_continues_in_the_background(
    on: Setting, outcomes: list[str]
) -> None:
    with pytest.raises(holdfast.OutcomeUnknown, match="retried in the background") as caught:
        on.store(*outcomes)
    assert caught.value.lock == "a"
    assert caught.value.node == "n1"
    (cleanup,) = on.cleanups
    assert cleanup.args[3:] == ("0 0", b"1", "0")
    assert cleanup.ttl == 30
    assert not on.client._session.held


async def test_the_background_stores_the_result_when_the_server_is_back(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=1)
    with pytest.raises(holdfast.OutcomeUnknown):
        async with client.once("a") as run:
            run.result = 1
            proxy.refuse()
            proxy.cut()
    assert server.command("EXISTS", LOCK)
    proxy.accept()
    assert await run_once(api.connect(server.url), timeout=20) == (False, 1)


def test_a_retry_that_finds_its_result_gone_cannot_know(on: Setting) -> None:
    def pass_time() -> None:
        on.port.time += 2
        on.server.command("DEL", RESULT)

    on.port.after["finish"] = pass_time
    with pytest.raises(holdfast.OutcomeUnknown, match="may or may not have been stored"):
        on.store(LOST, keep=2)
    assert not on.cleanups


def test_a_retry_that_finds_neither_its_lock_nor_its_result_has_lost_the_lease(
    on: Setting,
) -> None:
    on.port.after["finish"] = lambda: on.server.command("DEL", LOCK)
    with pytest.raises(holdfast.LeaseLost, match="was not stored"):
        on.store(LATE)
    assert not on.stored()


@pytest.mark.parametrize(
    ("outcome", "kind"), [(LOST, holdfast.OutcomeUnknown), (UNSENT, holdfast.NodeUnavailable)]
)
def test_a_closed_client_stores_nothing_in_the_background(
    on: Setting, outcome: str, kind: type[Exception]
) -> None:
    on.port.after["finish"] = lambda: setattr(on.client._session, "closed", True)
    with pytest.raises(kind, match="this client is closed"):
        on.store(outcome)
    assert not on.cleanups


def test_a_store_that_the_server_refuses_releases_the_lock(on: Setting) -> None:
    on.port.before["finish"] = hook_raising(holdfast.ConfigurationError("denied"))
    with pytest.raises(holdfast.ConfigurationError, match="was not stored: denied"):
        on.store()
    (cleanup,) = on.cleanups
    assert len(cleanup.args) == 4  # a release


def test_an_interrupted_store_is_completed(on: Setting) -> None:
    on.port.before["finish"] = hook_raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        on.store()
    assert on.stored()
    assert not on.locked()
    assert not on.cleanups


# A coroutine that is interrupted before its first step warns that it was never awaited.
@pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")
def test_an_interrupt_at_any_line_at_the_end_of_the_block_stores_the_result(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        for at in itertools.count(1):
            run = client.once(f"order {at}", keep=60)
            run.__enter__()
            run.result = at
            interrupt = InterruptAt(at, ("",))
            try:
                with interrupt:
                    run.__exit__(None, None, None)
            except KeyboardInterrupt:
                with client.once(f"order {at}", keep=60) as again:
                    assert (again.first, again.result) == (False, at), interrupt.position
            else:
                break
    assert at > 100


def test_an_interrupted_store_that_is_refused_reports_the_loss(on: Setting) -> None:
    def evict_and_interrupt() -> None:
        on.server.command("DEL", LOCK)
        raise KeyboardInterrupt

    on.port.before["finish"] = evict_and_interrupt
    with pytest.raises(KeyboardInterrupt), on.client.once("a") as run:
        run.result = 1
    assert run.lease.lost.is_set()
    with pytest.raises(holdfast.LeaseLost):
        run.lease.check()


def test_an_interrupted_store_without_a_reply_continues_in_the_background(on: Setting) -> None:
    on.port.before["finish"] = hook_raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        on.store(LATE)
    (cleanup,) = on.cleanups
    assert cleanup.args[4] == b"1"


async def test_a_late_request_for_the_lock_does_not_take_it_after_the_store(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=0.5)
    proxy.hold_request(matching=calls(CLAIM))
    async with client.once("a", keep=1) as run:
        run.result = 1
    assert tombstones(server, QUEUE) == 1


# Arguments and names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, "^once 'a': keep=0: give seconds from 1.0 to 31536000, e.g. 86400$"),
        ({"keep": None}, "keep=None"),
        ({"keep": True}, "keep=True"),
        ({"ttl": 0}, "ttl=0: give seconds"),
        ({"timeout": -1}, "timeout=-1"),
        ({"codec": "json"}, "codec='json' has no dumps and loads"),
    ],
)
def test_wrong_arguments_are_rejected_at_once(settings: dict[str, Any], message: str) -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match=message):
            kind("redis://127.0.0.1:1").once("a", **settings)


@pytest.mark.parametrize("name", ["", b"a", None, "a" * 1025])
def test_an_id_is_a_name(name: Any) -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError):
            kind("redis://127.0.0.1:1").once(name)


def test_several_independent_servers_are_rejected_with_the_reason() -> None:
    servers = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match="in one step"):
            kind(servers).once("a")


async def test_a_block_is_entered_once(client: Any) -> None:
    run = client.once("a", keep=120)
    for name in ("first", "lease", "fence", "result"):
        with pytest.raises(holdfast.NotHeld, match="was not entered"):
            getattr(run, name)
    assert (run.name, run.keep) == ("a", 120.0)
    async with run:
        pass
    with pytest.raises(holdfast.ConfigurationError, match="was entered before"):
        async with run:
            pytest.fail("it was entered twice")


def test_a_run_has_a_repr_and_cannot_be_pickled(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        run = client.once("a")
        assert repr(run) == "<Once 'a', not entered>"
        with run:
            assert repr(run).startswith("<Once 'a', first, <Lease of 'a', fence ")
        with client.once("a") as again:
            assert repr(again) == "<Once 'a', done before>"
        with pytest.raises(TypeError, match="pass its id"):
            pickle.dumps(run)


NAMES = ["a", "}", "{", "a}b", "{a}", "%7B", "a b:once", "é" * 400, "\udc80"]


@pytest.mark.parametrize("namespace", ["", "shop"])
@pytest.mark.parametrize("name", NAMES)
def test_all_keys_of_the_work_are_in_one_slot_and_identify_it(name: str, namespace: str) -> None:
    keys = keys_of_kind("once", name, namespace, "result")
    assert len({key_slot(key) for key in keys}) == 1
    lock, *others, result = keys
    assert [lock_key_in(key) for key in (lock, *others, result)] == [lock, lock, lock, None]
    assert kind_in(lock) == "once"
    assert namespace_in(lock) == namespace
    if len(name) < 300:
        assert name_in(lock) == name


@pytest.mark.parametrize("name", NAMES)
async def test_a_result_belongs_to_its_id_alone(api: Api, server: Server, name: str) -> None:
    client = api.connect(server.url)
    shop = api.connect(server.url, namespace="shop")
    for number, (each, id_) in enumerate(((client, name), (shop, name), (client, name + "2"))):
        async with each.once(id_) as run:
            assert run.first
            run.result = number
    async with client.once(name) as run:
        assert run.result == 0


async def test_the_work_excludes_nothing_else_of_its_name(client: Any) -> None:
    async def compute() -> str:
        return "cached"

    value = client.cached(60, key="a")(compute)
    async with client.lock("a"), client.once("a") as run:
        assert await value() == "cached"
        for once in ("fence", "queue", "a"):
            assert await client.atomic.incr("a", once=once) > 0
        run.result = "done"
    assert await value() == "cached"
    assert await run_once(client) == (False, "done")
