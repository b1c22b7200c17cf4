"""Interleavings that once failed. Each test is named after the promise."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import redis.credentials

import holdfast
from holdfast.core import release as releasing
from holdfast.wire.clock import now
from kit.contention import tombstones
from kit.renewals import renew_now
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server
    from kit.waiting import Busyness

KEY = "holdfast:{a}"


def on_alarm(work: Callable[[], None]) -> Any:
    """Run `work` in a handler of SIGALRM."""

    def handle(*_: object) -> None:
        work()

    return signal.signal(signal.SIGALRM, handle)


def signal_when(arrived: threading.Event) -> None:
    arrived.wait(PATIENCE)
    os.kill(os.getpid(), signal.SIGALRM)


def test_a_signal_handler_that_uses_the_client_receives_no_reply_of_another_request(
    server: Server, proxy: Proxy
) -> None:
    with holdfast.Client(server.url) as others, holdfast.Client(proxy.url) as client:
        mine = client.lock("a", ttl=30).acquire()
        theirs = others.lock("b", ttl=30).acquire()
        held = proxy.hold_reply(1)
        before = on_alarm(mine.release)
        try:
            signaller = threading.Thread(target=signal_when, args=(held.arrived,))
            deliver = threading.Timer(0.3, held.release)
            signaller.start()
            deliver.start()
            assert client.lock("b", ttl=30).try_acquire() is None
        finally:
            signal.signal(signal.SIGALRM, before)
        signaller.join()
        deliver.join()
        assert server.command("EXISTS", KEY) == 0
        theirs.release()


def test_a_signal_handler_may_acquire_while_its_thread_wakes_the_renewer(server: Server) -> None:
    code = f"""
import holdfast, signal, threading
client = holdfast.Client({server.url!r})
nested = []
start = threading.Thread.start
def interrupted(self):
    if self.name == "holdfast-renewer" and not nested:
        nested.append(1)
        signal.raise_signal(signal.SIGALRM)
    start(self)
threading.Thread.start = interrupted
signal.signal(signal.SIGALRM, lambda *_: client.lock("b").acquire().release())
lease = client.lock("a", ttl=0.5).acquire()
first = lease._state.deadline
while lease.held and lease._state.deadline == first: pass
assert lease.held, "the lease was not renewed"
lease.release()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


async def test_a_duplicated_reply_grants_no_other_lock(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url)
    async with client.lock("a"):
        pass
    proxy.double_reply(1)
    lease = await client.lock("a").acquire()
    server.command("SET", "holdfast:{b}", "another client", "PX", 30_000)
    assert await client.lock("b").try_acquire() is None
    assert server.command("GET", KEY).decode() == lease.token
    await lease.release()


def test_a_lock_with_a_short_ttl_does_not_close_the_shared_connection(proxy: Proxy) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(proxy.url) as client:
            async with client.lock("warm"):
                pass
            connections = proxy.connections
            proxy.delay(0.05)
            done = asyncio.Event()

            async def ordinary() -> None:
                for _ in range(5):
                    async with client.lock(f"own:{id(asyncio.current_task())}"):
                        pass
                done.set()

            async def hasty() -> None:
                # A new name each time, so none is held already.
                names = map("hasty {}".format, itertools.count())
                while not done.is_set():
                    with pytest.raises(holdfast.NodeUnavailable):
                        await client.lock(next(names), ttl=0.04).acquire(timeout=0)

            await asyncio.gather(ordinary(), hasty())
            assert proxy.connections <= connections + 1, "only the renewer may have connected"

    asyncio.run(scenario())


async def test_a_lock_with_a_short_ttl_is_acquired_although_all_connections_are_dead(
    api: Api, proxy: Proxy
) -> None:
    """As after a firewall has dropped them: nothing arrives, and new connections work."""
    client = api.connect(proxy.url)
    async with client.lock("a", ttl=1):
        pass
    proxy.mute()
    lease = await client.lock("a", ttl=1, timeout=10).acquire()
    await lease.release()


def test_an_error_while_the_renewer_connects_loses_no_lease(server: Server) -> None:
    class FailingOnce(redis.credentials.CredentialProvider):
        def __init__(self) -> None:
            self.calls = 0

        def get_credentials(self) -> tuple[str, str]:
            self.calls += 1
            if self.calls == 2:
                raise LookupError("no credentials today")
            return "ann", "pw"

    server.command("ACL", "SETUSER", "ann", "on", ">pw", "~*", "&*", "+@all")
    theirs = redis.Redis(host=server.host, port=server.port, credential_provider=FailingOnce())
    with holdfast.Client(theirs) as client:
        lease = client.lock("a", ttl=30).acquire()
        first = lease._state.deadline
        renew_now(client, lease)
        eventually(lambda: lease._state.deadline > first, what="it is renewed")
        lease.release()
    server.command("ACL", "DELUSER", "ann")


def test_two_threads_that_release_the_last_two_levels_release_the_lock(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a", ttl=30, reentrant=True)
        leases = [lock.acquire(), lock.acquire()]
        both = threading.Barrier(2)
        check = releasing.check_valid

        def check_then_wait(*args: Any) -> Any:
            found = check(*args)
            both.wait(PATIENCE)
            return found

        monkeypatch.setattr(releasing, "check_valid", check_then_wait)
        threads = [threading.Thread(target=lease.release) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.command("EXISTS", KEY) == 0


@pytest.mark.only_client("threads")
async def test_a_hung_name_server_does_not_delay_the_report_of_a_loss(
    api: Api, own_server: Server, monkeypatch: pytest.MonkeyPatch, busy: Busyness
) -> None:
    client = api.connect(own_server.url.replace("127.0.0.1", "localhost"), command_timeout=3)
    lease = await client.lock("a", ttl=1.2).acquire()
    hung = threading.Event()

    def look_up(*_: object, **__: object) -> Any:
        hung.wait(20)
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    own_server.kill()
    assert await api.wait(lease.lost, PATIENCE)
    late = now() - lease._state.deadline
    hung.set()
    assert late < 1 + busy.allowance


async def test_acquire_ends_in_time_even_if_it_must_connect_first(
    api: Api, own_server: Server, busy: Busyness
) -> None:
    own_server.freeze()
    for timeout in (0, 0.2):
        client = api.connect(own_server.url, command_timeout=5)
        began = now()
        with pytest.raises(holdfast.NodeUnavailable):
            await client.lock("a", ttl=0.4).acquire(timeout=timeout)
        assert now() - began < timeout + 0.1 + 0.5 + busy.allowance
    own_server.thaw()


async def test_a_late_request_of_a_lost_lease_finds_a_tombstone(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=1)
    async with client.lock("a"):
        pass
    late = proxy.hold_request(1)
    lease = await client.lock("a", ttl=60).acquire()
    server.command("DEL", KEY)
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(60)
    eventually(lambda: tombstones(server) == 1, what="its tombstone")
    late.release()
    assert server.command("EXISTS", KEY) == 0


async def test_a_wrong_password_is_tried_once_and_not_again_in_the_background(
    api: Api, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "ann", "on", ">right", "~*", "&*", "+@all")
    own_server.command("ACL", "LOG", "RESET")
    client = api.connect(f"redis://ann:wrong@{own_server.host}:{own_server.port}")
    with pytest.raises(holdfast.ConfigurationError):
        await client.lock("a").acquire()
    assert not client._session.renewer.inbox
    assert client._session.renewer._background._thread is None


def test_an_interrupt_is_never_replaced_by_an_error_about_the_lock(
    server: Server, proxy: Proxy
) -> None:
    with holdfast.Client(proxy.url, command_timeout=1) as client:
        client.lock("a").acquire().release()
        held = proxy.hold_reply(1)

        def send_signal() -> None:
            held.arrived.wait(PATIENCE)
            proxy.refuse()  # so that the release fails at first
            os.kill(os.getpid(), signal.SIGINT)

        signaller = threading.Thread(target=send_signal)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        signaller.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                client.lock("a", ttl=60).acquire()
        finally:
            signal.signal(signal.SIGINT, before)
        signaller.join()
        held.release()
        proxy.accept()
        eventually(lambda: server.command("EXISTS", KEY) == 0)


def test_a_with_block_may_be_left_by_another_thread(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a")
        entering = threading.Thread(target=lock.__enter__)
        entering.start()
        entering.join()
        assert lock.locked()
        lock.__exit__(None, None, None)
        assert not lock.locked()


async def test_a_lease_is_a_context_manager(client: Any) -> None:
    lock = client.lock("a")
    async with await lock.acquire(timeout=5) as lease:
        assert lease.held
    assert not await lock.locked()


async def test_reentering_many_times_leaves_no_references(client: Any) -> None:
    lock = client.lock("a", reentrant=True)
    async with lock as outer:
        before = len(outer._lease.refs)
        for _ in range(50):
            async with lock:
                pass
        assert len(outer._lease.refs) == before


async def test_a_denied_release_is_repeated_until_the_user_has_the_right(
    api: Api, own_server: Server
) -> None:
    rights = ["+evalsha", "+eval", "+exists", "+get", "+set", "+pttl", "+pexpire", "+time"]
    rights += ["+incrby", "+zadd", "+zrem", "+zrange"]
    own_server.command("ACL", "SETUSER", "ann", "on", ">pw", "~holdfast:*", *rights)
    client = api.connect(f"redis://ann:pw@{own_server.host}:{own_server.port}")
    lease = await client.lock("a", ttl=60).acquire()
    with pytest.raises(holdfast.ConfigurationError, match=r"\+del"):
        await lease.release()
    own_server.command("ACL", "SETUSER", "ann", "+del")
    eventually(lambda: own_server.command("EXISTS", KEY) == 0, what="the lock is released")


async def test_the_fence_counter_outlives_a_long_lease(client: Any, server: Server) -> None:
    async with client.lock("a", ttl=7200):
        assert server.command("PTTL", f"{KEY}:fence") > 7_200_000


def test_a_blocked_loop_is_not_mistaken_for_a_silent_server(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url, command_timeout=0.2) as client:
            async with client.lock("warm"):
                pass
            acquiring = asyncio.ensure_future(client.lock("a").acquire())
            await asyncio.sleep(0)
            time.sleep(0.5)
            lease = await acquiring
            assert not lease._state.needs_tombstone
            await lease.release()

    asyncio.run(scenario())
