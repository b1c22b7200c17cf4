"""Namespaces: applications on one server share no locks, and operators see the namespaces."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app
from holdfast.core.messages import channel_of
from holdfast.keys import keys_of, lock_key_in, lock_key_of, name_in, namespace_in
from kit.terminal import HOLDFAST, PATIENCE, environment

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec
    from kit.apis import Api
    from kit.servers import Server

TEXTS = st.text(st.sampled_from("ab{}:é\udcff"), min_size=1, max_size=12)
NAMESPACES = st.text(st.sampled_from("abé. -/"), min_size=0, max_size=4)


def spec_of(client: Any, name: str = "a", **given: Any) -> LockSpec:
    spec: LockSpec = client.lock(name, **given)._spec
    return spec


@settings(max_examples=200)
@given(NAMESPACES, TEXTS, NAMESPACES, TEXTS)
def test_two_namespaces_share_no_key_and_each_key_identifies_its_lock(
    namespace: str, name: str, other_namespace: str, other: str
) -> None:
    key = lock_key_of(name, namespace=namespace)
    keys = keys_of(key, holds=True)
    assert len({key_slot(each) for each in (*keys, channel_of("~client", key))}) == 1
    assert all(each.startswith(b"holdfast:") for each in keys)
    assert {lock_key_in(each) for each in keys} == {key}
    assert (name_in(key), namespace_in(key)) == (name, namespace)
    if (namespace, name) != (other_namespace, other):
        assert not set(keys) & set(keys_of(lock_key_of(other, namespace=other_namespace)))


def test_without_a_namespace_the_keys_are_unchanged() -> None:
    client = holdfast.Client("redis://127.0.0.1:1", namespace="shop")
    assert spec_of(holdfast.Client("redis://127.0.0.1:1")).keys[0] == b"holdfast:{a}"
    assert spec_of(client).keys.names == (
        b"holdfast:in:shop:{a}",
        b"holdfast:in:shop:{a}:fence",
        b"holdfast:in:shop:{a}:queue",
    )
    assert spec_of(client, "b").keys[0] == b"holdfast:in:shop:{b}"  # a new name with known settings
    assert spec_of(client, key="a:key").keys[0] == b"a:key"
    assert client.lock("a").name == "a"


@pytest.mark.parametrize("bad", ["", "a:b", "{a}", "a\n", "x" * 101, 5, b"a"])
def test_an_invalid_namespace_is_refused(bad: Any) -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match="namespace="):
            kind("redis://127.0.0.1:1", namespace=bad)


async def test_locks_of_two_namespaces_do_not_exclude_one_another(api: Api, server: Server) -> None:
    shop, bank = (
        api.connect(server.url, namespace="shop"),
        api.connect(server.url, namespace="bank"),
    )
    plain = api.connect(server.url)
    async with shop.lock("a"), bank.lock("a", timeout=0), plain.lock("a", timeout=0):
        again = api.connect(server.url, namespace="shop")
        assert await again.lock("a").try_acquire() is None
        async with bank.lock("b", key="k"):
            assert await shop.lock("c", key="k").try_acquire() is None


async def test_an_exported_lease_is_adopted_in_its_namespace(api: Api, server: Server) -> None:
    shop, plain = api.connect(server.url, namespace="shop"), api.connect(server.url)
    lease = await plain.adopt(await (await shop.lock("a").acquire()).export())
    assert await shop.lock("a").locked()
    assert lease.name == "a"
    await lease.release()
    assert not await shop.lock("a").locked()


async def test_cached_values_are_separate_for_each_namespace(api: Api, server: Server) -> None:
    computed = []

    async def price() -> int:
        computed.append(1)
        return len(computed)

    for namespace in ("shop", "bank", None):
        client = api.connect(server.url, namespace=namespace)
        cached = client.cached(60, key="price")(price)
        assert await cached() == await cached() == len(computed)
    assert computed == [1, 1, 1]
    assert all(key.startswith(b"holdfast:") for key in server.command("KEYS", "*"))


async def test_an_operation_id_is_shared_by_all_namespaces(api: Api, server: Server) -> None:
    count = "return redis.call('INCR', KEYS[1])"
    for namespace in ("shop", "bank", None):
        atomic = api.connect(server.url, namespace=namespace).atomic
        assert await atomic.incr("stock", once="order 7") == 1
        assert await atomic.script(count)(keys=["runs"], once="order 7") == 1
    assert server.command("MGET", "stock", "runs") == [b"1", b"1"]


def status_of_run(server: Server, *words: str) -> tuple[int, str]:
    ended = subprocess.run(
        [*HOLDFAST, "run", "--no-wait", *words, "true"],
        env=environment(HOLDFAST_URL=server.url),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    return ended.returncode, ended.stderr


def test_run_excludes_clients_of_its_namespace_only(server: Server) -> None:
    with holdfast.Client(server.url, namespace="shop") as shop, shop.lock("nightly"):
        status, message = status_of_run(server, "-v", "-N", "shop", "nightly")
        assert status == 1
        assert "'shop: nightly' is held by" in message
        assert status_of_run(server, "--namespace", "bank", "nightly") == (0, "")
        assert status_of_run(server, "nightly") == (0, "")


def output_of(server: Server, *words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--url", server.url])


def test_ls_shows_and_filters_namespaces(server: Server) -> None:
    with (
        holdfast.Client(server.url, namespace="shop") as shop,
        holdfast.Client(server.url) as plain,
    ):
        with shop.lock("invoice"), plain.lock("backup"):
            listed = output_of(server, "ls").stdout
            assert "shop: invoice" in listed
            assert "backup" in listed
            facts = json.loads(output_of(server, "ls", "--json").stdout)["locks"]
            assert {(each["namespace"], each["name"]) for each in facts} == {
                ("shop", "invoice"),
                ("", "backup"),
            }
            only = output_of(server, "ls", "invoice", "--namespace", "shop").stdout
            assert "shop: invoice" in only
            assert "backup" not in only
            assert output_of(server, "show", "invoice").exit_code == 1
            shown = output_of(server, "show", "invoice", "-N", "shop")
            assert shown.exit_code == 0
            assert "shop: invoice" in shown.stdout
            for words in (("show", "x"), ("break", "x", "--yes"), ("ls",)):
                for bad in ("a:b", ""):
                    refused = output_of(server, *words, "-N", bad)
                    assert (refused.exit_code, words) == (2, words)
                    assert "namespace=" in refused.stderr
        lease = shop.lock("invoice", renew=False).acquire()
        assert output_of(server, "break", "invoice", "--yes", "-N", "shop").exit_code == 0
        assert not shop.lock("invoice").locked()
        again = output_of(server, "break", "invoice", "--yes", "-N", "shop")
        assert again.exit_code == 1
        assert "'shop: invoice' is not held" in again.stderr
        with pytest.raises(holdfast.LeaseLost):
            lease.release()
