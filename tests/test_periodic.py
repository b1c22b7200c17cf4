"""Periodic jobs: the contract of `client.periodic(...)`, with both APIs and on every server.

A test sets the record of the last start, or the length of a period. So no test waits for a period.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import inspect
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core.periodic import describe_job
from holdfast.core.retry import TRIES
from holdfast.core.spec import describe
from holdfast.keys import keys_of_kind, kind_in, lock_key_in, name_in
from holdfast.scripts import START
from kit.contention import tombstones
from kit.processes import Process
from kit.servers import ONE_KIND, commands_processed

if TYPE_CHECKING:
    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server

LOCK, RECORD = "holdfast:{a}:periodic", "holdfast:last:{a}"
YEAR = 365 * 86_400
"""A period that does not end during a test, except on a few days in a century."""


def calls(script: Any) -> Any:
    """Match the calls of one script."""
    return lambda args: len(args) > 1 and args[1] == script.sha.encode()


class Job:
    """A periodic job that keeps its runs, and blocks until it is released if a test wants that."""

    def __init__(self, api: Api, client: Any, **settings: Any) -> None:
        self.runs: list[Any] = []
        self.fails: BaseException | None = None
        self.begun, self.go = api.event(), api.event()
        self.go.set()

        async def function(run: Any, value: object = None) -> object:
            self.runs.append(run)
            self.begun.set()
            assert await api.wait(self.go, 20), "the test did not release the job"
            if self.fails is not None:
                raise self.fails
            return value

        self.call = client.periodic(**{"name": "a", "every": YEAR, **settings})(function)


def started_ago(server: Server, seconds: float) -> None:
    """Move the last start back by this time."""
    at, rest = server.command("GET", RECORD).split(b" ", 1)
    moved = b"%d %b" % (int(at) - int(seconds * 1000), rest)
    server.command("SET", RECORD, moved, "PX", server.command("PTTL", RECORD))


def server_time(server: Server) -> float:
    seconds, microseconds = server.command("TIME")
    return int(seconds) + int(microseconds) / 1_000_000


# Runs


async def test_a_period_has_one_run_over_all_clients(api: Api, server: Server) -> None:
    jobs = [Job(api, api.connect(server.url)) for _ in range(3)]
    assert await jobs[0].call("result") == "result"
    outcomes = [await job.call("result") for job in jobs]
    assert [outcome.why for outcome in outcomes] == ["done"] * 3
    assert [len(job.runs) for job in jobs] == [1, 0, 0]
    assert not server.command("EXISTS", LOCK)


async def test_many_concurrent_calls_start_one_run(api: Api, server: Server) -> None:
    jobs = [Job(api, api.connect(server.url)) for _ in range(4)]
    outcomes = await api.gather(*(job.call("result") for job in jobs for _ in range(3)))
    assert outcomes.count("result") == 1
    assert sum(len(job.runs) for job in jobs) == 1
    others = [each for each in outcomes if each != "result"]
    assert {each.why for each in others} <= {"done", "running"}


async def test_a_run_knows_its_lease_its_period_and_the_run_before_it(
    api: Api, server: Server
) -> None:
    client = api.connect(server.url)
    job = Job(api, client, offset=3600.5)
    before = server_time(server)
    await job.call()
    after = server_time(server)
    (run,) = job.runs
    assert (run.name, run.last) == ("a", None)
    assert before * 1e6 <= run.fence <= after * 1e6
    assert int((before - 3600.5) // YEAR) <= run.number <= int((after - 3600.5) // YEAR)
    at, fence, *settings, token = server.command("GET", RECORD).decode().split(" ", 5)
    assert (int(fence), token) == (run.fence, run.lease.token)
    assert settings == [str(YEAR * 1000), "3600500", "0"]
    assert 30 * 86_400_000 < server.command("PTTL", RECORD) <= 30 * 86_400_000 + 2 * YEAR * 1000
    started_ago(server, YEAR)
    await job.call()
    later = job.runs[1]
    assert later.fence > run.fence
    assert later.last.at == int(at) / 1000 - YEAR
    assert later.last.by.token == run.lease.token
    assert later.last.by.pid is not None
    with pytest.raises(holdfast.NotHeld):
        later.check()


async def test_the_lease_is_held_during_the_run(api: Api, client: Any, server: Server) -> None:
    job = Job(api, client, ttl=dt.timedelta(seconds=20))
    job.go.clear()
    call = api.start(job.call(5))
    assert await api.wait(job.begun, 20)
    (run,) = job.runs
    run.check()
    assert run.lease.held
    assert server.command("GET", LOCK).decode() == run.lease.token
    assert 0 < server.command("PTTL", LOCK) <= 20_000
    job.go.set()
    assert await call.result() == 5
    assert not run.lease.held


async def test_a_call_during_a_run_is_skipped_and_names_the_process_that_runs(
    api: Api, server: Server
) -> None:
    job, other = Job(api, api.connect(server.url)), Job(api, api.connect(server.url))
    job.go.clear()
    call = api.start(job.call())
    assert await api.wait(job.begun, 20)
    (run,) = job.runs
    for periods in (0, 1):  # a run that lasts longer than its period overlaps no other
        started_ago(server, periods * YEAR)
        skipped = await other.call()
        assert skipped.why == "running"
        assert skipped.by.token == run.lease.token
        assert 0 < skipped.by.remaining <= 30
        assert skipped.at == pytest.approx(run.fence / 1_000_000)
        assert 0 < skipped.next <= YEAR
    # The run of an earlier period: the present period begins a run as soon as that one ends.
    fence = (server_time(server) - YEAR) * 1_000_000
    server.command("SET", f"{LOCK}:fence", f"{fence:.0f}")
    assert (await other.call()).next <= 30.001
    job.go.set()
    await call.result()
    assert not other.runs


async def test_a_call_inside_its_own_run_is_skipped(api: Api, client: Any) -> None:
    job = Job(api, client)
    outcomes: list[Any] = []

    async def function(run: Any) -> None:  # noqa: ARG001 - it is given
        outcomes.append(await job.call())

    await client.periodic("a", every=YEAR)(function)()
    assert [each.why for each in outcomes] == ["running"]


async def test_a_skipped_call_is_false_and_shows_the_reason_the_runner_and_the_time(
    api: Api, client: Any, server: Server
) -> None:
    job = Job(api, client, at_least=60)
    await job.call()
    skipped = await job.call()
    assert isinstance(skipped, holdfast.Skipped)
    assert not skipped
    assert (skipped.why, skipped.by.token) == ("done", job.runs[0].lease.token)
    assert skipped.at == int(server.command("GET", RECORD).split()[0]) / 1000
    to_boundary = YEAR - server_time(server) % YEAR
    assert skipped.next == pytest.approx(max(to_boundary, 60), abs=20)
    assert str(skipped).startswith(f"this period's run was started by {skipped.by.host}, pid ")
    assert pickle.loads(pickle.dumps(skipped)) == skipped  # noqa: S301 - our own
    with pytest.raises(AttributeError):
        skipped.why = "other"  # type: ignore[misc,assignment]  # that is the test


async def test_the_label_of_a_run_is_shown_to_the_calls_that_are_skipped(
    api: Api, client: Any
) -> None:
    job = Job(api, client, label="db2")
    await job.call()
    assert (await job.call()).by.label == "db2"


async def test_a_run_that_hangs_does_not_prevent_later_runs_beyond_max_hold(
    api: Api, client: Any, server: Server
) -> None:
    job = Job(api, client)

    async def free() -> bool:
        return not server.command("EXISTS", LOCK)

    async def hang(run: Any) -> None:
        assert run.lease.held
        await api.eventually(free)

    with pytest.raises(holdfast.LeaseLost, match="its time ran out"):
        await client.periodic("a", every=YEAR, ttl=0.5, max_hold=0.1)(hang)()
    await api.eventually(free)
    started_ago(server, YEAR)
    assert await job.call("next") == "next"


async def test_two_starts_are_at_least_at_least_apart(
    api: Api, client: Any, server: Server
) -> None:
    every = 50 * YEAR // 100
    job = Job(api, client, every=every, at_least=every * 0.9)
    await job.call()
    into = server_time(server) % every
    started_ago(server, into + 1)  # the last start was in the period before
    if into + 1 < every * 0.9:
        skipped = await job.call()
        assert skipped.why == "too_soon"
        assert skipped.next == pytest.approx(every * 0.9 - into - 1, abs=20)
    started_ago(server, every)
    await job.call()
    assert len(job.runs) == 2


async def test_a_start_in_the_future_counts_as_this_period(
    api: Api, client: Any, server: Server
) -> None:
    job = Job(api, client)
    await job.call()
    started_ago(server, -3 * YEAR)  # the server's clock was set back
    skipped = await job.call()
    assert skipped.why == "done"
    assert 3 * YEAR < skipped.next <= 4 * YEAR


async def test_a_run_that_raises_is_not_repeated_in_its_period(
    api: Api, client: Any, server: Server
) -> None:
    job = Job(api, client)
    job.fails = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await job.call()
    assert not server.command("EXISTS", LOCK)
    assert (await job.call()).why == "done"


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_the_run_of_a_killed_process_counts_as_the_run_of_its_period(server: Server) -> None:
    text = f"""
        @client.periodic("a", every={YEAR}, ttl=0.5)
        def job(run):
            print(run.number, flush=True)
            time.sleep(60)
        job()
    """
    with Process(server, text) as process, holdfast.Client(server.url) as client:
        number = int(process.read_line())
        process.kill()
        job = client.periodic("a", every=YEAR, ttl=0.5)(lambda run: run.number)
        while (outcome := job()) and outcome.why == "running":
            pass
        skipped: Any = outcome
        while skipped.why == "running":
            skipped = job()
        assert skipped.why == "done"
        started_ago(server, YEAR)
        assert job() in {number, number + 1}


async def test_a_lost_lease_is_reported_as_with_a_lock(
    api: Api, client: Any, server: Server
) -> None:
    job = Job(api, client)

    async def function(run: Any) -> str:
        job.runs.append(run)
        server.command("DEL", LOCK)
        return "done"

    with pytest.raises(holdfast.LeaseLost):
        await client.periodic("a", every=YEAR)(function)()
    assert (await job.call()).why == "done"


async def test_a_skipped_call_costs_one_request_and_a_run_three(
    api: Api, client: Any, server: Server
) -> None:
    job = Job(api, client)
    await job.call()
    started_ago(server, YEAR)
    server.reset_stats()
    await job.call()
    assert commands_processed(server)["evalsha"] == 3
    server.reset_stats()
    assert not await job.call()
    assert commands_processed(server)["evalsha"] == 1


# The last start


async def test_last_is_the_last_run_that_any_client_started(api: Api, server: Server) -> None:
    job, other = (Job(api, api.connect(server.url)) for _ in range(2))
    assert await job.call.last() is None
    before = server_time(server)
    await other.call()
    last = await job.call.last()
    assert before - 0.001 <= last.at <= server_time(server)
    assert last.by.fence == other.runs[0].fence


async def test_after_forget_the_next_call_runs_in_this_period(api: Api, client: Any) -> None:
    job = Job(api, client)
    await job.call.forget()  # no start is recorded yet
    await job.call()
    assert not await job.call()
    await job.call.forget()
    assert await job.call.last() is None
    assert await job.call("again") == "again"


async def test_forget_after_a_start_in_the_far_future_lets_the_job_run(
    api: Api, client: Any, server: Server
) -> None:
    """The clock of the server was far ahead for one call. Without forget, the job would wait."""
    job = Job(api, client)
    await job.call()
    started_ago(server, -400 * 86_400)
    assert (await job.call()).next > 86_400
    assert (await job.call.last()).at > server_time(server) + 86_400
    await job.call.forget()
    assert await job.call("again") == "again"


async def test_forget_during_a_run_starts_no_second_one(api: Api, client: Any) -> None:
    job = Job(api, client)
    job.go.clear()
    call = api.start(job.call("result"))
    assert await api.wait(job.begun, 20)
    await job.call.forget()
    assert (await job.call()).why == "running"
    job.go.set()
    assert await call.result() == "result"


# Faults


@pytest.mark.parametrize("k", [1, 2])
async def test_a_lost_reply_starts_no_second_run(
    api: Api, server: Server, proxy: Proxy, k: int
) -> None:
    job = Job(api, api.connect(proxy.url, command_timeout=0.3))
    proxy.drop_reply(k, matching=calls(START), close=True)
    assert await job.call("result") == "result"
    assert not proxy.rules_left
    assert (await job.call()).why == "done"
    assert len(job.runs) == 1
    assert not server.command("EXISTS", LOCK)


async def test_without_the_server_the_job_does_not_run(api: Api, proxy: Proxy) -> None:
    job = Job(api, api.connect(proxy.url, command_timeout=0.5))
    proxy.refuse()
    with pytest.raises(holdfast.NodeUnavailable):
        await job.call()
    assert not job.runs
    proxy.accept()
    assert await job.call("result") == "result"


async def test_a_start_whose_reply_never_comes_counts_and_leaves_no_lock(
    api: Api, server: Server, proxy: Proxy
) -> None:
    job = Job(api, api.connect(proxy.url, command_timeout=0.5))
    for k in range(2, 2 + TRIES):
        proxy.drop_reply(k, matching=calls(START))
    with pytest.raises(holdfast.NodeUnavailable):
        await job.call()
    assert not job.runs
    assert not proxy.rules_left

    async def is_free() -> bool:
        return not server.command("EXISTS", LOCK)

    await api.eventually(is_free)
    assert tombstones(server, f"{LOCK}:queue") == 1
    assert (await job.call()).why == "done"


def test_a_cancelled_run_releases_its_lock(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            begun = asyncio.Event()

            @client.periodic("a", every=YEAR)
            async def job(run: holdfast.PeriodicRun[holdfast.AsyncLease]) -> None:
                run.check()
                begun.set()
                await asyncio.sleep(60)

            call = asyncio.create_task(job())
            await begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not server.command("EXISTS", LOCK)
            skipped = await job()
            assert isinstance(skipped, holdfast.Skipped)
            assert skipped.why == "done"

    asyncio.run(scenario())


# Arguments and names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "^periodic 'a': every=0: give seconds from 0.1 to 31536000, e.g. 86400$"),
        ({"every": None}, "every=None"),
        ({"every": 0.05}, "every=0.05"),
        ({"at_least": 60}, "^periodic 'a': at_least=60: give seconds, 0 or more, below every=60"),
        ({"at_least": -1}, "at_least=-1"),
        ({"at_least": None}, "at_least=None"),
        ({"offset": 60}, "offset=60"),
        ({"offset": True}, "offset=True"),
        ({"ttl": 0}, "ttl=0: give seconds"),
        ({"name": ""}, "the name is empty"),
    ],
)
def test_wrong_arguments_are_rejected_at_once(settings: dict[str, Any], message: str) -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match=message):
            kind("redis://127.0.0.1:1").periodic(**{"name": "a", "every": 60, **settings})


def test_several_independent_servers_are_rejected_with_the_reason() -> None:
    servers = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match="by one clock"):
            kind(servers).periodic("a", every=60)


def test_the_wrong_kind_of_function_is_rejected_with_the_remedy() -> None:
    sync: Any = holdfast.Client("redis://127.0.0.1:1").periodic("a", every=60)
    aio: Any = holdfast.AsyncClient("redis://127.0.0.1:1").periodic("a", every=60)

    async def coroutine(run: Any) -> None: ...

    def plain(run: Any) -> None: ...

    def generator(run: Any) -> Any:
        yield run

    class AsyncCall:
        async def __call__(self, run: Any) -> None: ...

    for decorate, function, remedy in (
        (sync, coroutine, "AsyncClient"),
        (aio, plain, "holdfast.Client"),
        (sync, generator, "generator"),
        (aio, generator, "generator"),
        (sync, functools.partial(coroutine), "AsyncClient"),
        (sync, AsyncCall(), "AsyncClient"),
        (sync, "nightly", "is not a function"),
        (aio, "nightly", "is not a function"),
    ):
        with pytest.raises(holdfast.ConfigurationError, match=remedy):
            decorate(function)
    fields: Any = holdfast.Client("redis://127.0.0.1:1").periodic("job of {user}", every=60)
    with pytest.raises(holdfast.ConfigurationError, match="not a format string"):
        fields(lambda run, user: (run, user))


@pytest.mark.parametrize("kind", [holdfast.Client, holdfast.AsyncClient])
def test_a_method_is_refused_and_its_bound_method_receives_the_run(kind: Any) -> None:
    client = kind("redis://127.0.0.1:1")

    class Shop:
        if kind is holdfast.Client:

            def refresh(self, run: Any) -> None: ...
        else:

            async def refresh(self, run: Any) -> None: ...  # type: ignore[misc]  # the other one

    with pytest.raises(holdfast.ConfigurationError, match=r"receive the run as 'self'") as caught:
        client.periodic("a", every=60)(Shop.refresh)
    assert str(caught.value).endswith("as in client.periodic(...)(self.refresh)")
    assert caught.value.lock == "a"
    assert client.periodic("a", every=60)(Shop().refresh).__name__ == "refresh"


async def test_a_bound_method_is_a_periodic_job(api: Api, client: Any) -> None:
    class Shop(Job):
        async def refresh(self, run: Any) -> tuple[Any, Any]:
            return self, run

    shop = Shop(api, client)
    receiver, run = await client.periodic("a", every=YEAR)(shop.refresh)()
    assert receiver is shop
    assert run.name == "a"


def test_a_job_keeps_the_name_of_its_function_and_takes_its_other_arguments(
    server: Server,
) -> None:
    with holdfast.Client(server.url) as client:

        @client.periodic("a", every=YEAR)
        def nightly(run: holdfast.PeriodicRun[holdfast.Lease], *, number: int) -> str:
            """Back up."""
            return f"{number} {run!r}"

        decorated: Any = nightly
        assert (decorated.__name__, decorated.__doc__) == ("nightly", "Back up.")
        assert "run" not in inspect.signature(nightly).parameters
        assert str(nightly(number=3)).startswith("3 <PeriodicRun of 'a', period ")


def test_the_settings_are_arguments_of_the_script() -> None:
    spec = describe(
        "a",
        ttl=30,
        timeout=None,
        renew=True,
        max_hold=None,
        reentrant=False,
        owner=None,
        fair=True,
        lock_delay=0,
        key=None,
        label=None,
        command_timeout=1,
    )
    job = describe_job(
        spec, "shop", every=dt.timedelta(hours=1), at_least=60.5, offset=0.0005, quorum=False
    )
    assert job.lock.extra_args == ("3600000", "1", "60500", str(30 * 86_400_000 + 7_200_000))
    assert job.lock.keys[3] == b"holdfast:last:shop:{a}"


def test_the_keys_of_a_job_identify_it() -> None:
    lock, *others, record = keys_of_kind("periodic", "a}b", "", "last")
    assert [lock_key_in(key) for key in (*others, record)] == [lock, lock, None]
    assert (kind_in(lock), name_in(lock)) == ("periodic", "a}b")
