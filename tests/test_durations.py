"""Durations may be `datetime.timedelta`; ids of `once=` may be integers."""

from __future__ import annotations

from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import pytest

import holdfast

if TYPE_CHECKING:
    from kit.apis import Api
    from kit.servers import Server

MINUTE = timedelta(minutes=1)


async def test_every_duration_may_be_a_timedelta(api: Api, server: Server) -> None:
    client = api.connect(
        server.url,
        command_timeout=timedelta(seconds=2),
        min_validity=timedelta(milliseconds=1),
        longest_ttl=timedelta(minutes=5),
    )
    lock = client.lock("a", ttl=MINUTE, timeout=MINUTE, max_hold=MINUTE, lock_delay=MINUTE)
    spec = client.inner.lock("a", ttl=MINUTE)._spec if hasattr(client, "inner") else None
    assert spec is None or (spec.ttl, spec.ttl_ms) == (60.0, "60000")
    lease = await lock.acquire(timeout=timedelta(seconds=30))
    assert 50 < lease.remaining() <= 60
    await lease.extend(2 * MINUTE)
    assert 110 < lease.remaining() <= 120
    with pytest.raises(holdfast.AcquireTimeout, match=r"within 0\.01 s"):
        await api.connect(server.url).lock("a").acquire(timeout=timedelta(milliseconds=10))
    await lease.release()


async def test_atomic_operations_accept_a_timedelta(api: Api, server: Server) -> None:
    atomic = api.connect(server.url).atomic
    await atomic.incr("count", expire=MINUTE)
    assert 50_000 < server.command("PTTL", "count") <= 60_000
    assert await atomic.compare_and_set("state", None, "new", ttl=MINUTE)
    assert 50_000 < server.command("PTTL", "state") <= 60_000


def test_cached_functions_accept_a_timedelta(server: Server) -> None:
    with holdfast.Client(server.url) as client:

        @client.cached(MINUTE, key="v", stale=MINUTE, lock_ttl=MINUTE, timeout=MINUTE)
        def value() -> int:
            return 7

        assert value() == 7
        assert 110_000 < server.command("PTTL", "holdfast:value:{v}") <= 120_000


@pytest.mark.parametrize("kind", [holdfast.Client, holdfast.AsyncClient])
def test_an_invalid_timedelta_is_refused(kind: Any) -> None:
    client = kind("redis://127.0.0.1:1")
    for bad in ({"ttl": timedelta(0)}, {"timeout": -MINUTE}, {"max_hold": timedelta(0)}):
        with pytest.raises(holdfast.ConfigurationError, match=next(iter(bad))):
            client.lock("a", **bad)


async def test_an_integer_id_is_the_same_as_its_digits(api: Api, server: Server) -> None:
    class Order(IntEnum):
        FIRST = 7

    atomic = api.connect(server.url).atomic
    for once in (7, "7", Order.FIRST, 7):
        assert await atomic.incr("stock", once=once) == 1
    assert await atomic.incr("stock", once=8) == 2
    with pytest.raises(holdfast.ConfigurationError, match="once=True"):
        await atomic.incr("stock", once=True)
