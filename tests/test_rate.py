"""Rates: the contract, with both APIs, on every server."""

from __future__ import annotations

import math
import pickle
import random
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.keys import lock_key_in, lock_key_of
from holdfast.overview.scan import Overview
from kit.servers import Server, commands_processed

if TYPE_CHECKING:
    from kit.apis import Api

KEY = "holdfast:{a}:rate"
HOUR = 3600
RULES = ["+evalsha", "+eval", "+get", "+set", "+del", "+time"]
"""The commands that rates need. Locks need them too."""
SECOND = 1_000_000


def full_at(server: Server) -> int:
    """Return the time in the key, in microseconds; 0 if that time is over, and the key is gone."""
    return int((server.command("GET", KEY) or b"0").split()[0])


def clock(server: Server) -> int:
    seconds, microseconds = server.command("TIME")
    return int(seconds) * SECOND + int(microseconds)


def pass_time(server: Server, seconds: float) -> None:
    """Set the time in the key back, as if that many seconds had passed."""
    left = server.command("PTTL", KEY)
    time = full_at(server) - round(seconds * SECOND)
    server.command("SET", KEY, time, "PX", max(1, left))


# Requests


async def test_a_burst_is_allowed_at_once_and_the_next_request_is_not(client: Any) -> None:
    rate = client.rate("a", limit=10, per=HOUR, burst=3)
    verdicts = [await rate.try_acquire() for _ in range(4)]
    assert [each.allowed for each in verdicts] == [True, True, True, False]
    assert [bool(each) for each in verdicts] == [True, True, True, False]
    assert [each.remaining for each in verdicts] == [2, 1, 0, 0]
    assert [each.retry_after for each in verdicts[:3]] == [0.0, 0.0, 0.0]
    assert 350 < verdicts[3].retry_after < 360
    assert {each.unavailable for each in verdicts} == {""}


async def test_capacity_becomes_available_evenly(client: Any, server: Server) -> None:
    rate = client.rate("a", limit=10, per=HOUR)
    assert (await rate.try_acquire(10)).remaining == 0
    pass_time(server, 355)
    assert not await rate.try_acquire()
    pass_time(server, 6)  # 361 s: a tenth of an hour
    assert (await rate.try_acquire()).remaining == 0
    assert not await rate.try_acquire()
    pass_time(server, 3 * 360)
    assert (await rate.peek()).remaining == 3


async def test_unused_capacity_is_saved_up_to_the_burst(client: Any, server: Server) -> None:
    rate = client.rate("a", limit=10, per=HOUR, burst=4)
    assert await rate.try_acquire(4)
    pass_time(server, 24 * HOUR)
    assert (await rate.peek()).remaining == 4
    assert await rate.try_acquire(4)
    assert not await rate.try_acquire()


async def test_a_refused_request_takes_nothing(client: Any, server: Server) -> None:
    rate = client.rate("a", limit=10, per=HOUR)
    assert await rate.try_acquire(7)
    before = server.command("GET", KEY)
    refused = await rate.try_acquire(4)
    assert (refused.allowed, refused.remaining) == (False, 3)
    assert 350 < refused.retry_after <= 360
    assert server.command("GET", KEY) == before
    assert (await rate.try_acquire(3)).remaining == 0


async def test_a_request_is_allowed_after_retry_after(client: Any, server: Server) -> None:
    rate = client.rate("a", limit=7, per=HOUR)
    assert await rate.try_acquire(7)
    for cost in (1, 3, 7):
        refused = await rate.try_acquire(cost)
        pass_time(server, refused.retry_after)
        assert await rate.try_acquire(cost)


async def test_burst_requests_of_cost_one_are_allowed_whatever_the_limit(client: Any) -> None:
    for number, limit in enumerate((1, 3, 7, 11, 13, 999)):
        rate = client.rate(f"{number}", limit=limit, per=24 * HOUR)
        for expected in range(limit - 1, -1, -1):
            assert (await rate.try_acquire()).remaining == expected
        assert not await rate.try_acquire()


async def test_remaining_is_exactly_the_highest_cost_that_is_allowed(client: Any) -> None:
    chance = random.Random(7)  # noqa: S311 - it is a test
    for number in range(40):
        limit, burst = chance.randint(10**5, 10**6), chance.randint(1, 10**6)
        rate = client.rate(f"{number}", limit=limit, per=30 * 86_400, burst=burst)
        left = (await rate.try_acquire(chance.randint(1, burst))).remaining
        assert left == (await rate.peek()).remaining
        if left < burst:
            assert not await rate.try_acquire(left + 1)
        if left:
            assert (await rate.try_acquire(left)).remaining == 0


async def test_the_key_has_the_time_at_which_the_full_burst_is_available(
    client: Any, server: Server
) -> None:
    rate = client.rate("a", limit=3, per=1.0, burst=300)
    assert rate.key == KEY
    before = clock(server)
    await rate.try_acquire(200)
    step = math.ceil(Fraction(200 * SECOND, 3))
    assert before + step <= full_at(server) <= clock(server) + step
    left = server.command("PTTL", KEY)
    assert (full_at(server) - clock(server)) / 1000 <= left <= step / 1000 + 2
    assert server.command("KEYS", "*") == [KEY.encode()]


async def test_a_request_is_one_command(client: Any, server: Server) -> None:
    rate = client.rate("a", limit=3, per=HOUR)
    await rate.try_acquire()
    server.reset_stats()
    await rate.try_acquire()
    await rate.try_acquire(2)
    assert commands_processed(server) == {
        "evalsha": 2,
        "time": 2,
        "get": 2,
        "set": 1,
        **{name: 1 for name in commands_processed(server) if name.startswith("config")},
    }


async def test_names_and_namespaces_are_separate(api: Api, server: Server) -> None:
    client, shop = api.connect(server.url), api.connect(server.url, namespace="shop")
    for each in (client.rate("a", limit=1, per=HOUR), client.rate("b", limit=1, per=HOUR)):
        assert await each.try_acquire()
    assert await shop.rate("a", limit=1, per=HOUR).try_acquire()
    assert not await client.rate("a", limit=1, per=HOUR).try_acquire()
    assert server.command("EXISTS", "holdfast:in:shop:{a}:rate") == 1


async def test_a_lock_and_a_rate_may_have_the_same_name(client: Any, server: Server) -> None:
    assert await client.rate("a", limit=1, per=HOUR).try_acquire()
    async with client.lock("a"):
        assert not await client.rate("a", limit=1, per=HOUR).try_acquire()
    assert server.command("EXISTS", KEY) == 1


async def test_a_rate_is_not_listed_as_a_lock(client: Any, server: Server) -> None:
    await client.rate("a", limit=1, per=HOUR).try_acquire()
    assert lock_key_in(KEY.encode()) is None
    for name in ("a", "a}:rate", "a:rate"):
        assert lock_key_in(lock_key_of(name)) == lock_key_of(name)
    overview = Overview(server.url)
    try:
        assert overview.survey(lambda _: True).locks == ()
    finally:
        overview.close()


# Different settings for one name


async def test_a_new_limit_takes_effect_with_the_next_request(client: Any) -> None:
    assert await client.rate("a", limit=1, per=HOUR).try_acquire()
    assert not await client.rate("a", limit=1, per=HOUR).try_acquire()
    # The time of the first request is an hour, which is 10 of 10 per hour, and half of 20 in two.
    assert not await client.rate("a", limit=10, per=HOUR).try_acquire()
    assert (await client.rate("a", limit=10, per=HOUR, burst=20).try_acquire()).remaining == 9


async def test_clients_with_different_limits_share_the_time(client: Any) -> None:
    slow, fast = client.rate("a", limit=10, per=HOUR), client.rate("a", limit=100, per=HOUR)
    assert (await slow.try_acquire(5)).remaining == 5
    assert (await fast.try_acquire(10)).remaining == 40
    assert (await slow.peek()).remaining == 4


# Waiting


async def test_acquire_waits_until_the_cost_is_available(client: Any, server: Server) -> None:
    rate = client.rate("a", limit=20, per=1.0, burst=1)
    first = await rate.acquire()
    assert (first.allowed, first.remaining, first.retry_after) == (True, 0, 0.0)
    for _ in range(3):
        reserved_until = full_at(server)
        assert await rate.acquire()
        assert clock(server) >= reserved_until  # the burst of 1 was available again


async def test_acquire_is_one_request_even_if_it_waits(client: Any, server: Server) -> None:
    rate = client.rate("a", limit=50, per=1.0, burst=1)
    await rate.acquire()
    server.reset_stats()
    for _ in range(5):
        await rate.acquire()
    assert commands_processed(server)["evalsha"] == 5


async def test_no_waiting_caller_is_served_before_its_share(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    rate = client.rate("a", limit=50, per=1.0, burst=1)
    ended: list[int] = []

    async def work() -> None:
        await rate.acquire()
        ended.append(clock(server))

    began = clock(server)
    await api.gather(*(work() for _ in range(10)))
    assert all(at >= began + place * 20_000 for place, at in enumerate(sorted(ended)))


async def test_beyond_the_timeout_acquire_raises_at_once_and_takes_nothing(
    client: Any, server: Server
) -> None:
    rate = client.rate("a", limit=1, per=HOUR)
    await rate.acquire()
    before = server.command("GET", KEY)
    for timeout in (0, 10, timedelta(minutes=5)):
        with pytest.raises(holdfast.RateLimited, match=r"'a'.*nothing was taken") as caught:
            await rate.acquire(timeout=timeout)
        assert isinstance(caught.value, holdfast.AcquireTimeout)
        assert 3590 < caught.value.retry_after <= HOUR
        assert caught.value.lock == "a"
        copied = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
        assert copied.retry_after == caught.value.retry_after
    assert server.command("GET", KEY) == before


@pytest.mark.only_client("asyncio")
async def test_a_request_behind_a_reservation_does_not_overtake_it(
    api: Api, client: Any, server: Server
) -> None:
    rate = client.rate("a", limit=1, per=1.0, burst=1)
    await rate.try_acquire()
    waiting = api.start(rate.acquire())

    async def reserved() -> bool:
        return b" " in server.command("GET", KEY)

    await api.eventually(reserved)
    verdict = await rate.try_acquire()
    assert not verdict
    assert verdict.retry_after > 1.0
    assert await waiting.result()


async def test_a_user_who_may_use_locks_may_use_rates(api: Api, own_server: Server) -> None:
    own_server.command("ACL", "SETUSER", "ann", "on", ">pw", "~holdfast:*", *RULES)
    url = f"redis://ann:pw@{own_server.host}:{own_server.port}"
    rate = api.connect(url).rate("a", limit=10, per=HOUR)
    await rate.acquire()
    await rate.try_acquire()
    assert (await rate.peek()).remaining == 8
    await rate.reset()


# Looking and forgetting


async def test_peek_takes_nothing_and_writes_nothing(client: Any, server: Server) -> None:
    rate = client.rate("a", limit=10, per=HOUR)
    assert await rate.peek() == (True, 10, 0.0, "")
    assert server.command("EXISTS", KEY) == 0
    await rate.try_acquire(8)
    assert await rate.peek(2) == (True, 2, 0.0, "")
    refused = await rate.peek(3)
    assert (refused.allowed, refused.remaining) == (False, 2)
    assert 350 < refused.retry_after <= 360
    assert await rate.peek(2)


async def test_reset_makes_the_full_burst_available(client: Any, server: Server) -> None:
    rate = client.rate("a", limit=10, per=HOUR)
    await rate.try_acquire(10)
    assert await rate.reset() is None
    assert server.command("EXISTS", KEY) == 0
    await rate.reset()
    assert (await rate.try_acquire()).remaining == 9


# Settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"limit": 0}, "limit=0"),
        ({"limit": 0.5}, r"limit=0\.5.*longer per"),
        ({"limit": True}, "limit=True"),
        ({"limit": "10"}, "limit='10'"),
        ({"limit": []}, r"limit=\[\]"),
        ({"per": 0}, "per=0"),
        ({"per": timedelta(0)}, r"per=0\.0"),
        ({"per": math.inf}, "per=inf"),
        ({"per": "second"}, "per='second'"),
        ({"burst": 0}, "burst=0"),
        ({"burst": 2.0}, r"burst=2\.0"),
        ({"burst": 10**9}, "more than a year"),
        ({"on_unavailable": "deny"}, "on_unavailable='deny'.*'raise' or 'allow'"),
        ({"name": ""}, "name is empty"),
        ({"name": b"a"}, "name=b'a'"),
        ({"name": ["a"]}, "name="),
        ({"name": "x" * 2000}, "2000 bytes"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_write(wrong: dict[str, Any], message: str) -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        client: Any = kind("redis://127.0.0.1:1")
        for _ in range(2):
            with pytest.raises(holdfast.ConfigurationError, match=message):
                client.rate(**{"name": "a", "limit": 10, "per": 1.0, **wrong})


async def test_a_wrong_cost_is_refused_before_a_request(api: Api) -> None:
    rate = api.connect("redis://127.0.0.1:1").rate("a", limit=10, burst=5, on_unavailable="allow")
    for call in (rate.try_acquire, rate.acquire, rate.peek):
        with pytest.raises(holdfast.ConfigurationError, match=r"'a'.*cost=6 exceeds burst=5") as e:
            await call(6)
        assert e.value.lock == "a"
        for wrong in (0, -1, True, 1.0, "1", None):
            with pytest.raises(holdfast.ConfigurationError, match="cost="):
                await call(wrong)
    for wrong in (-1, math.inf, True, "1"):
        with pytest.raises(holdfast.ConfigurationError, match=r"^rate 'a': timeout="):
            await rate.acquire(timeout=wrong)


def test_several_independent_servers_are_refused_with_the_reason() -> None:
    nodes = [f"redis://127.0.0.1:{number}" for number in (1, 2, 3)]
    for client in (holdfast.Client(nodes), holdfast.AsyncClient(nodes)):
        with pytest.raises(holdfast.ConfigurationError, match=r"counted on one server.*several"):
            client.rate("a", limit=1)


def test_the_settings_of_a_rate_are_attributes() -> None:
    for client in (holdfast.Client, holdfast.AsyncClient):
        rate = client("redis://127.0.0.1:1").rate("a", limit=10, per=timedelta(minutes=1))
        assert (rate.name, rate.limit, rate.per, rate.burst, rate.key) == ("a", 10, 60.0, 10, KEY)
        assert repr(rate).endswith("Rate 'a', limit=10, per=60.0, burst=10>")
    verdict = holdfast.Verdict(allowed=False, remaining=2, retry_after=0.5)
    with pytest.raises(AttributeError):
        verdict.allowed = True  # type: ignore[misc]  # that it is refused is the test
    assert not verdict
