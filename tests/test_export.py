"""A lease that one process exports and another adopts."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from kit.contention import waiters
from kit.renewals import renew_now
from kit.waiting import eventually

if TYPE_CHECKING:
    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server

KEY = "holdfast:{a}"


async def load_script(giver: Any, taker: Any) -> None:
    """Load the script on the server, so that the next dropped reply is the reply to it."""
    await (await taker.adopt(await (await giver.lock("warm").acquire()).export())).release()


async def test_an_adopted_lease_keeps_fence_and_settings(api: Api, server: Server) -> None:
    giver, taker = api.connect(server.url), api.connect(server.url)
    given = await giver.lock("a", ttl=20, label="import", lock_delay=1).acquire()
    taken = await taker.adopt(await given.export())
    assert (taken.name, taken.fence) == ("a", given.fence)
    assert taken.held
    assert not given.held
    assert 15 < taken.remaining() < 20
    holder = await taker.lock("a").holder()
    assert (holder.token, holder.label) == (taken.token, "import")
    assert server.command("PTTL", KEY) > 20_000
    await taken.extend(30)
    await taken.release()
    assert server.command("EXISTS", KEY) == 0


async def test_export_ends_the_lease_without_releasing_the_lock(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    async with client.lock("a", ttl=20) as lease:
        text = await lease.export()
        with pytest.raises(holdfast.NotHeld):
            lease.check()
        with pytest.raises(holdfast.NotHeld):
            await lease.export()
    await lease.release()
    assert server.command("EXISTS", KEY) == 1
    await (await client.adopt(text)).release()


async def test_export_renews_the_lease_for_a_whole_ttl(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    lease = await client.lock("a", ttl=20).acquire()
    server.command("PEXPIRE", KEY, 5000)
    await lease.export()
    assert server.command("PTTL", KEY) > 15_000


async def test_an_adopted_lease_is_renewed(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    lease = await client.lock("a", ttl=30).acquire()
    adopted = await client.adopt(await lease.export())
    first = adopted._state.deadline
    renew_now(client, adopted)

    async def later() -> bool:
        return bool(adopted._state.deadline > first)

    await api.eventually(later)
    await adopted.release()


async def test_an_exported_lease_is_adopted_only_once(api: Api, server: Server) -> None:
    one, other = api.connect(server.url), api.connect(server.url)
    text = await (await one.lock("a").acquire()).export()
    lease = await one.adopt(text)
    for client in (other, one):
        with pytest.raises(holdfast.LeaseLost, match="adopted"):
            await client.adopt(text)
    assert lease.held
    await lease.release()
    with pytest.raises(holdfast.LeaseLost):
        await other.adopt(text)


async def test_an_expired_lease_cannot_be_adopted(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    text = await (await client.lock("a", ttl=0.6).acquire()).export()
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the lease expires")
    with pytest.raises(holdfast.LeaseLost):
        await client.adopt(text)
    assert server.command("EXISTS", KEY) == 0


async def test_a_lost_lease_cannot_be_exported(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    lease = await client.lock("a").acquire()
    server.command("DEL", KEY)
    with pytest.raises(holdfast.LeaseLost):
        await lease.export()
    assert server.command("EXISTS", KEY) == 0


async def test_a_waiter_gets_the_lock_when_the_adopter_releases(api: Api, server: Server) -> None:
    giver, taker, waiter = (api.connect(server.url) for _ in range(3))
    given = await giver.lock("a").acquire()

    async def wait() -> int:
        async with waiter.lock("a", timeout=10) as lease:
            return int(lease.fence)

    async def pass_on() -> None:
        async def queued() -> bool:
            return bool(waiters(server))

        await api.eventually(queued)
        taken = await taker.adopt(await given.export())
        await taken.release()

    fence, _ = await api.gather(wait(), pass_on())
    assert fence > given.fence


async def test_reentrant_levels_and_owners_are_not_exported(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    lock = client.lock("a", reentrant=True)
    outer, inner = await lock.acquire(), await lock.acquire()
    with pytest.raises(holdfast.ConfigurationError, match="several levels"):
        await inner.export()
    await inner.release()
    await client.adopt(await outer.export())
    owned = await client.lock("b", owner="me").acquire()
    with pytest.raises(holdfast.ConfigurationError, match="owner"):
        await owned.export()
    assert owned.held


@pytest.mark.parametrize("text", ["", "nonsense", "hf1-lease-", "hf1-lease-e30=", None, 5])
async def test_an_invalid_export_text_is_refused(api: Api, server: Server, text: Any) -> None:
    client = api.connect(server.url)
    with pytest.raises(holdfast.ConfigurationError, match="export"):
        await client.adopt(text)


@pytest.mark.parametrize("fact", ["ttl", "longest"])
async def test_an_export_text_with_an_invalid_time_is_refused(
    api: Api, server: Server, fact: str
) -> None:
    client = api.connect(server.url)
    text = await (await client.lock("a").acquire()).export()
    facts = json.loads(base64.urlsafe_b64decode(text.removeprefix("hf1-lease-")))
    for wrong in (None, "30", True, -1, math.inf, math.nan):
        changed = json.dumps({**facts, fact: wrong}).encode()
        with pytest.raises(holdfast.ConfigurationError, match=fact):
            await client.adopt("hf1-lease-" + base64.urlsafe_b64encode(changed).decode())
    await client.adopt(text)


@pytest.mark.parametrize(
    "fault", ["drop_reply", "drop_request", "double_reply", "duplicate_request"]
)
async def test_an_adoption_whose_reply_was_lost_is_retried(
    api: Api, server: Server, proxy: Proxy, fault: str
) -> None:
    giver = api.connect(server.url)
    taker = api.connect(proxy.url, command_timeout=1)
    await load_script(giver, taker)
    text = await (await giver.lock("a").acquire()).export()
    getattr(proxy, fault)(1)
    lease = await taker.adopt(text)
    assert server.command("GET", KEY).decode() == lease.token
    await lease.release()
    assert server.command("EXISTS", KEY) == 0


async def test_an_adoption_without_any_reply_leaves_no_lock(
    api: Api, server: Server, proxy: Proxy
) -> None:
    giver = api.connect(server.url)
    taker = api.connect(proxy.url, command_timeout=1)
    await load_script(giver, taker)
    text = await (await giver.lock("a").acquire()).export()
    for number in (1, 2, 3):
        proxy.drop_reply(number)
    with pytest.raises(holdfast.NodeUnavailable):
        await taker.adopt(text)
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the lock is released")


def test_an_exported_lease_outlives_its_process(server: Server) -> None:
    code = "import sys, holdfast; c = holdfast.Client(sys.argv[1]); "
    code += "print(c.lock('a', ttl=20).acquire().export())"
    text = subprocess.run(
        [sys.executable, "-c", code, server.url], check=True, capture_output=True, text=True
    ).stdout.strip()
    with holdfast.Client(server.url) as client, client.adopt(text) as lease:
        assert lease.held
    assert server.command("EXISTS", KEY) == 0
