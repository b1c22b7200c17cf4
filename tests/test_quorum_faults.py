"""Faults of servers, one after the other, while several processes contend for a lock on them.

While a majority works, the contenders make progress. In all cases no two of them hold the lock at
once, and the resource that it protects loses no update.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from kit.clocks import COMPILER, ClockedServer
from kit.contention_run import KEY, ContentionRun
from kit.pausable_proxy import FROM_SERVER, TO_SERVER, PausableProxy
from kit.quorum_servers import init_for_quorum
from kit.servers import Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
PROGRAMS = list(programs().values())
TTL = 1.0


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def resource(stack: contextlib.ExitStack) -> Server:
    return stack.enter_context(Server.start(PROGRAMS[0]))


def nodes(stack: contextlib.ExitStack, number: int) -> list[Server]:
    servers = [
        stack.enter_context(Server.start(PROGRAMS[each % len(PROGRAMS)], *DURABLE))
        for each in range(number)
    ]
    for server in servers:
        init_for_quorum(server)
    return servers


@pytest.mark.long
def test_contenders_make_progress_while_nodes_fail_one_by_one(
    stack: contextlib.ExitStack, resource: Server
) -> None:
    servers = nodes(stack, 3)
    proxies = [stack.enter_context(PausableProxy(server)) for server in servers]
    with ContentionRun([proxy.url for proxy in proxies], resource, ttl=TTL) as run:
        run.wait_for_turns()
        servers[0].freeze()
        run.wait_for_turns()
        servers[0].thaw()
        servers[1].kill()
        run.wait_for_turns()
        servers[1].restart()
        run.wait_for_turns()
        for way in ((TO_SERVER,), (FROM_SERVER,), (TO_SERVER, FROM_SERVER)):
            proxies[2].pause(*way)
            run.wait_for_turns()
            proxies[2].resume()
            run.wait_for_turns(10)
        servers[0].command("SCRIPT", "FLUSH")
        servers[1].command("CLIENT", "KILL", "TYPE", "normal")
        servers[2].command("CONFIG", "SET", "maxmemory", 1)
        run.wait_for_turns()
        servers[2].command("CONFIG", "SET", "maxmemory", 0)
        run.wait_for_turns()
        report = run.end()
    report.check_exclusion()
    report.check_fences()
    report.check_resource()
    eventually(
        lambda: not any(server.command("EXISTS", KEY) for server in servers),
        within=10,
        what="nothing is left on any node",
    )


def test_contenders_make_progress_only_with_a_majority(
    stack: contextlib.ExitStack, resource: Server
) -> None:
    servers = nodes(stack, 5)
    with ContentionRun([server.url for server in servers], resource, ttl=TTL) as run:
        run.wait_for_turns()
        for server in servers[:3]:
            server.freeze()
        # The last holder has lost the lock once the key is gone from the nodes that still work.
        eventually(
            lambda: not any(server.command("EXISTS", KEY) for server in servers[3:]),
            within=10,
            what="the lock is free",
        )
        for server in servers[:3]:
            server.thaw()
        run.wait_for_turns()
        for server in servers[2:]:
            server.kill()
        for server in servers[2:]:
            server.restart()
        run.wait_for_turns()
        report = run.end()
    report.check_exclusion()
    report.check_fences()
    report.check_resource()


@pytest.mark.long
def test_a_node_that_repeatedly_loses_its_data_never_grants_a_held_lock(
    stack: contextlib.ExitStack, resource: Server
) -> None:
    forgetful = stack.enter_context(Server.start(PROGRAMS[0]))
    servers = [*nodes(stack, 2), forgetful]
    targets = [server.url for server in servers]
    with ContentionRun(targets, resource, ttl=TTL, longest_ttl=TTL) as run:
        run.wait_for_turns()
        for _ in range(3):
            forgetful.restart()
            run.wait_for_turns(20)
        eventually(lambda: forgetful.command("EXISTS", f"{KEY}:fence"), within=20, what="it votes")
        forgetful.restart()
        run.wait_for_turns(20)
        report = run.end()
    report.check_exclusion()
    report.check_fences()
    report.check_resource()


@pytest.mark.skipif(COMPILER is None, reason="the clock of a server is set by a compiled library")
@pytest.mark.long
def test_clock_steps_may_break_exclusion_but_not_the_order_of_fences(
    stack: contextlib.ExitStack, resource: Server
) -> None:
    servers = [stack.enter_context(ClockedServer.start(PROGRAMS[0], *DURABLE)) for _ in range(3)]
    for server in servers:
        init_for_quorum(server)
    with ContentionRun([server.url for server in servers], resource, ttl=TTL) as run:
        run.wait_for_turns()
        for step in (3, -3, 3600, 0, -30):
            for server in servers:
                server.step(step)
                # A clock that is set back keeps a held lock for that much longer. An operator can
                # break it.
                if step < 0:
                    server.command("DEL", KEY)
                run.wait_for_turns(10)
        report = run.end()
    report.check_fences(since="requested")
    report.check_resource()
