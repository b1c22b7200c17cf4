"""What befalls servers, one after the other, while several processes take turns at a lock on them.

As long as a majority works the contenders go on; whatever happens, no two hold the lock together,
and what it guards loses nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from kit.campaign import KEY, Campaign
from kit.clocks import COMPILER, ClockedServer
from kit.gate import FROM, TO, Gate
from kit.homes import settle_in
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
        settle_in(server)
    return servers


@pytest.mark.long
def test_nodes_killed_frozen_and_cut_off_one_by_one_stop_nobody(
    stack: contextlib.ExitStack, resource: Server
) -> None:
    servers = nodes(stack, 3)
    gates = [stack.enter_context(Gate(server)) for server in servers]
    with Campaign([gate.url for gate in gates], resource, ttl=TTL) as campaign:
        campaign.goes_on()
        servers[0].freeze()
        campaign.goes_on()
        servers[0].thaw()
        servers[1].kill()
        campaign.goes_on()
        servers[1].restart()
        campaign.goes_on()
        for way in ((TO,), (FROM,), (TO, FROM)):
            gates[2].shut(*way)
            campaign.goes_on()
            gates[2].open()
            campaign.goes_on(10)
        servers[0].command("SCRIPT", "FLUSH")
        servers[1].command("CLIENT", "KILL", "TYPE", "normal")
        servers[2].command("CONFIG", "SET", "maxmemory", 1)
        campaign.goes_on()
        servers[2].command("CONFIG", "SET", "maxmemory", 0)
        campaign.goes_on()
        report = campaign.end()
    report.check_exclusion()
    report.check_fences()
    report.check_resource()
    eventually(
        lambda: not any(server.command("EXISTS", KEY) for server in servers),
        within=10,
        what="nothing is left on any node",
    )


def test_without_a_majority_nobody_goes_on_and_with_it_everybody(
    stack: contextlib.ExitStack, resource: Server
) -> None:
    servers = nodes(stack, 5)
    with Campaign([server.url for server in servers], resource, ttl=TTL) as campaign:
        campaign.goes_on()
        for server in servers[:3]:
            server.freeze()
        # Whoever had it has lost it when it is gone from the nodes that still work.
        eventually(
            lambda: not any(server.command("EXISTS", KEY) for server in servers[3:]),
            within=10,
            what="nobody holds it any more",
        )
        for server in servers[:3]:
            server.thaw()
        campaign.goes_on()
        for server in servers[2:]:
            server.kill()
        for server in servers[2:]:
            server.restart()
        campaign.goes_on()
        report = campaign.end()
    report.check_exclusion()
    report.check_fences()
    report.check_resource()


@pytest.mark.long
def test_a_node_that_forgets_all_again_and_again_lets_nobody_in_beside_a_holder(
    stack: contextlib.ExitStack, resource: Server
) -> None:
    forgetful = stack.enter_context(Server.start(PROGRAMS[0]))
    servers = [*nodes(stack, 2), forgetful]
    targets = [server.url for server in servers]
    with Campaign(targets, resource, ttl=TTL, longest_ttl=TTL) as campaign:
        campaign.goes_on()
        for _ in range(3):
            forgetful.restart()
            campaign.goes_on(20)
        eventually(lambda: forgetful.command("EXISTS", f"{KEY}:fence"), within=20, what="it votes")
        forgetful.restart()
        campaign.goes_on(20)
        report = campaign.end()
    report.check_exclusion()
    report.check_fences()
    report.check_resource()


@pytest.mark.skipif(COMPILER is None, reason="the clock of a server is set by a compiled library")
@pytest.mark.long
def test_clocks_that_step_may_end_exclusion_but_not_the_order_of_fences(
    stack: contextlib.ExitStack, resource: Server
) -> None:
    servers = [stack.enter_context(ClockedServer.start(PROGRAMS[0], *DURABLE)) for _ in range(3)]
    for server in servers:
        settle_in(server)
    with Campaign([server.url for server in servers], resource, ttl=TTL) as campaign:
        campaign.goes_on()
        for step in (3, -3, 3600, 0, -30):
            for server in servers:
                server.step(step)
                # A clock set back keeps what is held for as long; an operator can break it.
                if step < 0:
                    server.command("DEL", KEY)
                campaign.goes_on(10)
        report = campaign.end()
    report.check_fences(since="asked")
    report.check_resource()
