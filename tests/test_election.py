"""Leader election: the contract of `client.election(...)`, with both APIs and on every server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
from redis.crc import key_slot

import holdfast
from holdfast.keys import is_observers, keys_of_kind, kind_in, lock_key_in, name_in, namespace_in
from holdfast.scripts import CAMPAIGN, OBSERVE, RESIGN
from holdfast.wire import guard
from kit.apis import Tasks
from kit.clusters import Cluster
from kit.contention import tombstones, waiters
from kit.processes import Process
from kit.quorum_servers import init_for_quorum
from kit.sentinels import Sentinels
from kit.servers import ONE_KIND, ReplyError, Server, commands_processed, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.apis import Api
    from kit.proxy import Proxy

PROGRAM = next(iter(programs().values()))
LOCK, OBSERVERS = "holdfast:{a}:election", "holdfast:observers:{a}"
FENCE, QUEUE = f"{LOCK}:fence", f"{LOCK}:queue"


def calls(script: Any) -> Any:
    """Match the calls of one script."""
    return lambda args: len(args) > 1 and args[1] == script.sha.encode()


class Watcher:
    """Watches the leader in the background, and keeps the labels that it has received."""

    def __init__(self, api: Api, client: Any, **settings: Any) -> None:
        self.seen: list[str | None] = []
        self._api = api
        self._election = client.election("a", **settings)
        api.start(self._watch())

    async def _watch(self) -> None:
        with contextlib.suppress(holdfast.NodeUnavailable):  # the client is closed at the end
            async for leader in self._election.watch():
                self.seen.append(leader.label if leader else None)

    async def until(self, *seen: str | None) -> None:
        """Wait until exactly these were received."""

        async def received() -> bool:
            assert self.seen == list(seen)[: len(self.seen)]
            return self.seen == list(seen)

        await self._api.eventually(received)


async def until_waiting(api: Api, server: Server, queue: str, count: int = 1) -> None:
    async def waits() -> bool:
        return waiters(server, queue) == count

    await api.eventually(waits)
    server.command("PING")  # as in `wait_until_queued`


async def lead(client: Any, label: str | None = None, **settings: Any) -> Any:
    return await client.election("a", label=label, **settings).lead(timeout=20).acquire()


# Leading


@pytest.mark.every_pair
async def test_s15_a_term_is_a_lease_and_its_number_the_fence(api: Api, server: Server) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    election, theirs = client.election("a", ttl=10), other.election("a")
    assert not election.is_leader
    assert await election.leader() is None
    async with election.lead() as term:
        assert term.is_leader
        assert term.held
        assert election.is_leader
        assert client.election("a").is_leader, "of the client, not of one object"
        assert not theirs.is_leader
        assert not client.election("b").is_leader
        assert term.number == term.fence == int(server.command("GET", FENCE))
        assert server.command("GET", LOCK).decode() == term.token
        assert 9_000 < server.command("PTTL", LOCK) <= 10_000
        assert (await theirs.leader()).token == term.token
    assert not term.is_leader
    assert not election.is_leader
    assert not server.command("EXISTS", LOCK)
    async with theirs.lead() as later:
        assert later.number > term.number
        assert theirs.is_leader
        assert not election.is_leader


async def test_others_read_the_label_the_address_and_the_number_of_the_leader(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    term = await lead(client, "http://10.0.0.7:8080")
    leader = await other.election("a").leader()
    assert leader.label == "http://10.0.0.7:8080"
    assert leader.fence == term.number
    assert leader.host
    assert leader.pid
    assert leader.remaining > 0
    await term.resign()
    assert await other.election("a").leader() is None
    await term.resign()  # it changes nothing


async def test_a_free_election_takes_one_request_and_so_does_resigning(
    client: Any, server: Server
) -> None:
    async with client.election("a").lead():
        pass
    server.reset_stats()
    async with client.election("a").lead():
        pass
    assert commands_processed(server)["evalsha"] == 2


async def test_candidates_lead_in_order_and_do_not_poll(api: Api, server: Server) -> None:
    clients = [api.connect(server.url) for _ in range(4)]
    order: list[int] = []

    async def campaign(number: int) -> None:
        async with clients[number].election("a").lead():
            order.append(number)

    term = await lead(clients[0])
    waiting = []
    for number in (1, 2, 3):
        waiting.append(api.start(campaign(number)))
        await until_waiting(api, server, QUEUE, number)
    server.reset_stats()
    assert not {"evalsha", "eval"} & set(commands_processed(server))
    await term.resign()
    for each in waiting:
        await each.result()
    assert order == [1, 2, 3]


async def test_a_candidate_that_does_not_wait_gets_the_leader_in_the_error(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    term = await lead(client, "first")
    assert await other.election("a").lead().try_acquire() is None
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        async with other.election("a").lead(timeout=0):
            pytest.fail("two clients lead")
    assert caught.value.holder is not None
    assert caught.value.holder.label == "first"
    with pytest.raises(holdfast.WouldDeadlock):
        await lead(client)
    await term.release()


@pytest.mark.only_client("threads")
async def test_s15_without_the_server_a_client_stops_leading_at_its_deadline(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client, other = api.connect(proxy.url), api.connect(server.url)
    election = client.election("a", ttl=1)
    term = await lead(client, ttl=1)
    proxy.refuse()
    proxy.cut()
    async with other.election("a").lead(timeout=20) as successor:
        assert not term.is_leader
        assert not election.is_leader
        assert successor.number > term.number
    assert await api.wait(term.lost, 5)
    with pytest.raises(holdfast.LeaseLost):
        await term.resign()
    proxy.accept()


async def test_a_term_cannot_be_exported(client: Any) -> None:
    async with client.election("a").lead() as term:
        with pytest.raises(holdfast.ConfigurationError, match="lead in the other process"):
            await term.export()
        assert term.is_leader


async def test_an_election_excludes_no_lock_of_its_name(client: Any) -> None:
    async with (
        client.lock("a") as lease,
        client.election("a").lead() as term,
        client.once("a") as run,
    ):
        assert lease.held
        assert term.held
        assert run.first


async def test_a_campaign_is_a_decorator(client: Any) -> None:
    async def led() -> bool:
        assert client.election("a").is_leader
        return True

    assert await client.election("a").lead()(led)()
    assert not client.election("a").is_leader


# Watching


async def test_a_watcher_receives_the_present_leader_and_each_new_one(
    api: Api, server: Server
) -> None:
    first, second, watching = (api.connect(server.url) for _ in range(3))
    watcher = Watcher(api, watching)
    await watcher.until(None)
    await until_waiting(api, server, OBSERVERS)
    term = await lead(first, "first")
    await watcher.until(None, "first")
    await until_waiting(api, server, OBSERVERS)
    await term.resign()
    await watcher.until(None, "first", None)
    await until_waiting(api, server, OBSERVERS)
    term = await lead(second, "second")
    await watcher.until(None, "first", None, "second")
    await term.resign()


async def test_a_watcher_sends_nothing_while_it_waits(api: Api, server: Server) -> None:
    leader, watching = api.connect(server.url), api.connect(server.url)
    term = await lead(leader, "first")
    watcher = Watcher(api, watching)
    await watcher.until("first")
    await until_waiting(api, server, OBSERVERS)
    server.reset_stats()
    assert not {"evalsha", "eval"} & set(commands_processed(server))
    await term.resign()
    await watcher.until("first", None)
    await until_waiting(api, server, OBSERVERS)
    # One to resign; one to read who leads, and one to wait again.
    assert commands_processed(server)["evalsha"] == 3


async def test_all_watchers_are_notified_of_a_successor_that_waited(
    api: Api, server: Server
) -> None:
    first, second, watching, also = (api.connect(server.url) for _ in range(4))
    term = await lead(first, "first")
    watchers = [Watcher(api, each) for each in (watching, watching, also, second)]
    await until_waiting(api, server, OBSERVERS, len(watchers))
    successor = api.start(lead(second, "second"))
    await until_waiting(api, server, QUEUE)
    await term.resign()
    for watcher in watchers:
        await watcher.until("first", "second")  # never without a leader in between
    await (await successor.result()).resign()


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
@pytest.mark.only_client("asyncio")
async def test_a_watcher_detects_that_the_leader_was_killed(api: Api, server: Server) -> None:
    text = """
        with client.election("a", ttl=0.5, label="killed").lead():
            print("leads", flush=True)
            time.sleep(60)
    """
    with Process(server, text) as process:
        process.read_line()
        watcher = Watcher(api, api.connect(server.url))
        await watcher.until("killed")
        await until_waiting(api, server, OBSERVERS)
        process.kill()
        await watcher.until("killed", None)


async def test_a_watcher_finds_a_leader_whose_message_was_lost(
    api: Api, server: Server, proxy: Proxy
) -> None:
    leader, watching = api.connect(server.url), api.connect(proxy.url)
    term = await lead(leader, "first", ttl=1)
    watcher = Watcher(api, watching)
    await watcher.until("first")
    await until_waiting(api, server, OBSERVERS)
    # As if the message was lost: the queue is empty when the leader resigns.
    server.command("DEL", OBSERVERS)
    await term.resign()
    await watcher.until("first", None)


async def test_a_watcher_continues_after_its_connection_was_cut(
    api: Api, server: Server, proxy: Proxy
) -> None:
    leader, watching = api.connect(server.url), api.connect(proxy.url)
    term = await lead(leader, "first")
    watcher = Watcher(api, watching)
    await until_waiting(api, server, OBSERVERS)
    proxy.cut()
    await term.resign()
    await watcher.until("first", None)


async def test_a_watcher_finds_the_successor_of_an_evicted_leader(api: Api, server: Server) -> None:
    first, second, watching = (api.connect(server.url) for _ in range(3))
    term = await lead(first, "first", ttl=1)
    watcher = Watcher(api, watching)
    await until_waiting(api, server, OBSERVERS)
    successor = api.start(lead(second, "second"))
    await until_waiting(api, server, QUEUE)
    operator = watching.lock("the leader", key=LOCK)
    assert await operator.evict(await operator.holder())
    await watcher.until("first", "second")
    await (await successor.result()).resign()
    with pytest.raises(holdfast.LeaseLost):
        await term.resign()


async def test_a_polling_watcher_receives_each_new_leader(api: Api, server: Server) -> None:
    leader, watching = api.connect(server.url), api.connect(server.url, wait="poll")
    watcher = Watcher(api, watching)
    await watcher.until(None)
    term = await lead(leader, "first")
    await watcher.until(None, "first")
    await term.resign()
    await watcher.until(None, "first", None)


async def test_a_watcher_may_lead_itself(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    watcher = Watcher(api, client)
    await until_waiting(api, server, OBSERVERS)
    async with client.election("a", label="me").lead():
        await watcher.until(None, "me")
        async for leader in client.election("a").watch():
            assert leader.label == "me"
            break
    await watcher.until(None, "me", None)


async def test_a_watcher_without_the_server_raises_and_names_the_election(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url)
    assert server
    proxy.refuse()
    with pytest.raises(holdfast.NodeUnavailable, match="the leader of 'a' is not known") as caught:
        async for _ in client.election("a").watch():
            pytest.fail("there is no server")
    assert caught.value.lock == "a"


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_watcher_in_a_thread_ends_when_its_client_is_closed(server: Server) -> None:
    client, ended = holdfast.Client(server.url), threading.Event()

    def watch() -> None:
        with pytest.raises(holdfast.NodeUnavailable, match="closed"):
            for _ in client.election("a").watch():
                pass
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    eventually(lambda: waiters(server, OBSERVERS) == 1)
    client.close()
    assert ended.wait(20)


def test_a_cancelled_watcher_leaves_the_queue_of_observers(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            election = client.election("a")

            async def watch() -> None:
                async for _ in election.watch():
                    pass

            async def waits() -> bool:
                return waiters(server, OBSERVERS) == 1

            task = asyncio.create_task(watch())
            await Tasks().eventually(waits)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not waiters(server, OBSERVERS)
            assert not server.command("EXISTS", LOCK)

    asyncio.run(scenario())


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_message_to_an_observer_that_has_left_ends_nothing(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        cleanups: list[object] = []
        client._session.renewer.schedule_cleanup = (  # type: ignore[method-assign]  # to observe it
            lambda *args, **_: cleanups.append(args)
        )
        client._session.cleanups.leave_queue(OBSERVERS.encode(), "hf1:gone:1:", 0)
        assert not cleanups
        client._session.cleanups.leave_queue(LOCK.encode(), "hf1:gone:1:", 0)
        assert cleanups


async def test_a_request_to_observe_that_arrives_late_finds_its_tombstone(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=0.2)
    proxy.hold_request(matching=calls(OBSERVE))
    async for leader in client.election("a").watch():
        assert leader is None
        break
    server.command("ZADD", OBSERVERS, "3e16", "+hf1:x:1:")
    reply = server.command(
        *("EVAL", OBSERVE.text, 3, OBSERVERS, LOCK, FENCE, "hf1:x:1:", 1000, "0", "", "-", "000")
    )
    assert reply == b"0000"
    assert not waiters(server, OBSERVERS)
    assert tombstones(server, OBSERVERS)


# Lost and repeated requests


def test_s17_a_ttl_of_0_is_refused(server: Server) -> None:
    keys = LOCK, FENCE, QUEUE, OBSERVERS
    with pytest.raises(ReplyError, match="ttl must be at least 1 ms"):
        server.command("EVAL", CAMPAIGN.text, 4, *keys, "hf1:x:1:", 0, "", "", "000")
    assert not server.command("EXISTS", LOCK)


async def test_s9_a_repeated_campaign_is_one_term_and_notifies_once(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client, watching = api.connect(proxy.url, command_timeout=0.5), api.connect(server.url)
    watcher = Watcher(api, watching)
    await until_waiting(api, server, OBSERVERS)
    proxy.drop_reply(matching=calls(CAMPAIGN), close=True)
    term = await lead(client, "first")
    await watcher.until(None, "first")
    assert term.number == int(server.command("GET", FENCE))
    proxy.drop_reply(matching=calls(RESIGN), close=True)
    await term.resign()
    await watcher.until(None, "first", None)
    assert not proxy.rules_left


# run


async def test_run_returns_what_the_function_returned_in_its_term(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    election = client.election("a")

    async def function(term: Any) -> int:
        assert term.is_leader
        assert election.is_leader
        return 7

    assert await election.run(function) == 7
    assert not server.command("EXISTS", LOCK)


async def test_run_resigns_and_raises_what_the_function_raises(client: Any, server: Server) -> None:
    async def function(_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await client.election("a").run(function)
    assert not server.command("EXISTS", LOCK)


@pytest.mark.parametrize("how", ["returns", "checks"])
async def test_run_calls_the_function_again_in_the_next_term(
    api: Api, server: Server, how: str
) -> None:
    client, numbers = api.connect(server.url), list[int]()

    async def function(term: Any) -> str:
        numbers.append(term.number)
        if len(numbers) == 1:
            server.command("DEL", LOCK)
            assert await api.wait(term.lost, 20)
            if how == "checks":
                term.check()
        return "done"

    assert await client.election("a", ttl=1).run(function) == "done"
    assert len(numbers) == 2
    assert numbers[0] < numbers[1]


async def test_run_passes_on_the_loss_of_another_lease(client: Any, server: Server) -> None:
    async def function(_: Any) -> None:
        async with client.lock("a", ttl=0.5) as lease:
            server.command("DEL", "holdfast:{a}")
            await lease.release()

    with pytest.raises(holdfast.LeaseLost):
        await client.election("a").run(function)
    assert not server.command("EXISTS", LOCK)


async def test_run_keeps_trying_while_the_server_is_unavailable(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url)
    proxy.refuse()

    async def function(term: Any) -> int:
        return int(term.number)

    result = api.start(client.election("a").run(function))
    attempts = itertools.count()

    async def tried() -> bool:
        return next(attempts) > 20

    await api.eventually(tried)
    assert not result.done
    proxy.accept()
    number = await result.result()
    assert int(server.command("GET", FENCE)) == number + 1  # released


async def test_run_waits_for_its_turn_and_ends_when_its_client_is_closed(
    api: Api, server: Server
) -> None:
    leader, client = api.connect(server.url), api.connect(server.url)

    async def function(_: Any) -> None:
        pytest.fail("two clients lead")

    term = await lead(leader)
    waiting = api.start(client.election("a").run(function))
    await until_waiting(api, server, QUEUE)
    await client.close()
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        await waiting.result()
    await term.resign()


def test_run_of_a_task_that_is_cancelled_resigns(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            leads = asyncio.Event()

            async def function(_: holdfast.AsyncTerm) -> None:
                leads.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(client.election("a").run(function))
            await leads.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not server.command("EXISTS", LOCK)

    asyncio.run(scenario())


def test_a_loss_cancels_the_function_of_a_task(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            cancelled = 0

            async def function(_: holdfast.AsyncTerm) -> str:
                nonlocal cancelled
                if cancelled:
                    return "done"
                server.command("DEL", LOCK)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled += 1
                    raise
                return "never"

            assert await client.election("a", ttl=0.5).run(function) == "done"
            assert cancelled == 1

    asyncio.run(scenario())


def test_run_refuses_a_function_of_the_other_kind() -> None:
    sync = holdfast.Client("redis://127.0.0.1:1").election("a")
    aio: Any = holdfast.AsyncClient("redis://127.0.0.1:1").election("a")

    async def coroutine(_: object) -> None: ...

    with pytest.raises(holdfast.ConfigurationError, match=r"use holdfast\.AsyncClient"):
        sync.run(coroutine)  # type: ignore[unused-coroutine]  # nothing runs
    with pytest.raises(holdfast.ConfigurationError, match="is not a coroutine function"):
        asyncio.run(aio.run(print))


# Arguments and names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ttl": 0}, "ttl=0: give seconds"),
        ({"label": 3}, "label: give a string"),
        ({"replicas": -1}, "replicas=-1"),
    ],
)
def test_wrong_arguments_are_rejected_at_once(settings: dict[str, Any], message: str) -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match=message):
            kind("redis://127.0.0.1:1").election("a", **settings)
        with pytest.raises(holdfast.ConfigurationError, match="timeout=-1"):
            kind("redis://127.0.0.1:1").election("a").lead(timeout=-1)
        with pytest.raises(holdfast.ConfigurationError):
            kind("redis://127.0.0.1:1").election("")


def test_calls_of_a_lock_on_an_election_show_what_to_write() -> None:
    election: Any = holdfast.Client("redis://127.0.0.1:1").election("a")
    for name, message in (
        ("acquire", r"election\.lead\(\)\.acquire\(\)"),
        ("holder", r"election\.leader\(\)"),
        ("resign", "resign the term"),
        ("__enter__", r"election\.lead\(\) as term"),
    ):
        with pytest.raises((AttributeError, TypeError), match=message):
            getattr(election, name)()


def test_an_election_has_a_repr_and_cannot_be_pickled() -> None:
    election = holdfast.Client("redis://127.0.0.1:1").election("a", ttl=5, label="x")
    assert repr(election) == "<Election 'a', ttl=5.0, label='x'>"
    assert repr(election.lead(timeout=3)) == "<Campaign 'a', ttl=5.0, timeout=3, label='x'>"
    assert (election.name, election.key) == ("a", LOCK)
    with pytest.raises(TypeError, match=r"client\.election\(name\)"):
        pickle.dumps(election)


NAMES = ["a", "}", "{", "a}b", "%7B", "a b:election", "é" * 400, "\udc80"]


@pytest.mark.parametrize("namespace", ["", "shop"])
@pytest.mark.parametrize("name", NAMES)
def test_all_keys_of_an_election_are_in_one_slot_and_identify_it(name: str, namespace: str) -> None:
    keys = keys_of_kind("election", name, namespace, "observers")
    assert len({key_slot(key) for key in keys}) == 1
    lock, *others, observers = keys
    assert [lock_key_in(key) for key in (lock, *others, observers)] == [lock, lock, lock, None]
    assert is_observers(observers)
    assert not any(is_observers(key) for key in (lock, *others))
    assert kind_in(lock) == "election"
    assert namespace_in(lock) == namespace
    if len(name) < 300:
        assert name_in(lock) == name


async def test_an_election_belongs_to_its_name_and_its_namespace(api: Api, server: Server) -> None:
    client, shop = api.connect(server.url), api.connect(server.url, namespace="shop")
    async with client.election("{a}").lead(), shop.election("{a}").lead():
        assert client.election("{a}").is_leader
        assert (await client.election("{a}").leader()).token
        assert await client.election("a").leader() is None


# Deployments


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(PROGRAM) as cluster:
        yield cluster


@pytest.mark.every_pair
@pytest.mark.parametrize("program", [PROGRAM], ids=[""])
async def test_in_a_cluster_watchers_are_notified(program: str, api: Api, cluster: Cluster) -> None:
    assert program
    cluster.flush()
    server = cluster.primary_of("a")
    first, second, watching = (api.connect(cluster.url) for _ in range(3))
    term = await lead(first, "first")
    watcher = Watcher(api, watching)
    await watcher.until("first")
    await until_waiting(api, server, OBSERVERS)
    successor = api.start(lead(second, "second"))
    await until_waiting(api, server, QUEUE)
    await term.resign()
    await watcher.until("first", "second")
    await (await successor.result()).resign()
    await watcher.until("first", "second", None)


@pytest.mark.only_client("asyncio")
async def test_behind_sentinels_it_works_and_a_quarantine_is_respected(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 0.5)
    with Sentinels(PROGRAM) as service:
        init_for_quorum(service.primary, 2.0)
        client = api.connect(service.url, longest_ttl=2.0)
        watcher = Watcher(api, api.connect(service.url, longest_ttl=2.0), ttl=2)
        await until_waiting(api, service.primary, OBSERVERS)
        async with client.election("a", ttl=2, label="first", replicas=1).lead():
            await watcher.until(None, "first")
        await watcher.until(None, "first", None)
        service.primary.command("SET", "holdfast:quarantine", "2000", "PX", "60000")
        with pytest.raises(holdfast.NodeUnavailable, match="may have lost locks"):
            await client.election("a", ttl=2).lead(timeout=0).acquire()


async def test_s15_on_a_quorum_one_client_leads_and_watchers_read_the_leader(api: Api) -> None:
    with contextlib.ExitStack() as stack:
        durable = "--appendonly", "yes", "--appendfsync", "always"
        servers = [stack.enter_context(Server.start(PROGRAM, *durable)) for _ in range(3)]
        for server in servers:
            init_for_quorum(server)
        urls = [server.url for server in servers]
        client, other = api.connect(urls), api.connect(urls)
        watcher = Watcher(api, other)
        await watcher.until(None)
        async with client.election("a", label="first").lead() as term:
            assert client.election("a").is_leader
            assert not other.election("a").is_leader
            assert await other.election("a").lead().try_acquire() is None
            await watcher.until(None, "first")
            assert (await other.election("a").leader()).fence == term.number
            assert not any(server.command("EXISTS", OBSERVERS) for server in servers)
        servers[0].freeze()

        async def function(later: Any) -> int:
            return int(later.number)

        assert await other.election("a", label="second").run(function) > term.number
        servers[0].thaw()
        await client.close()
        await other.close()
