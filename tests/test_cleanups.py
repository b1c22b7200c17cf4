"""Cleanups: at most one per token and node, and none is lost.

A caller requests a cleanup while the renewer sends it, handles its reply, or gives it up. Tests of
such races run once per line of the request. At that line, the complete other operation runs.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from holdfast.adapters.thread_port import run
from holdfast.core.renewer import Renewer
from holdfast.core.spec import TOMBSTONE_MS
from holdfast.errors import NodeUnavailable
from holdfast.keys import keys_of
from holdfast.scripts import RELEASE
from kit.interrupts import AtLine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.events import Event
    from holdfast.errors import HoldfastError
    from holdfast.port import Job, Reply, Request

REQUEST: Request = RELEASE, keys_of(b"holdfast:{a}"), ("a token", "1", TOMBSTONE_MS, "")
GIVEN_UP_AFTER = int(TOMBSTONE_MS) / 1000
UNREACHABLE = NodeUnavailable("it is unreachable")
LINES = (f"core{os.sep}renewer", f"core{os.sep}cleanup")


class Scenario:
    """A renewer that a test drives step by step; this object is also its background."""

    def __init__(self) -> None:
        self.time = 0.0
        self.sent = 0
        self.reply: Reply | HoldfastError = 1
        self.while_outstanding: Callable[[], None] = lambda: None
        """Called while the reply is outstanding."""
        self.events: list[Event] = []
        self.forgotten = 0
        self.renewer = Renewer(self, self.events.append, lambda _: False)

    def now(self) -> float:
        return self.time

    def wake(self, job: Job) -> bool:  # noqa: ARG002 - there is only one
        return True

    async def sleep_until(self, until: float) -> None:
        self.time = until

    async def call_many(
        self, requests: Sequence[Request], *_: object
    ) -> list[Reply | HoldfastError]:
        self.sent += len(requests)
        self.while_outstanding()
        return [self.reply] * len(requests)

    def forget(self) -> None:
        self.forgotten += 1

    def request(self, ttl: float = 0.0) -> None:
        self.renewer.schedule_cleanup("a", REQUEST, fence=7, ttl=ttl, forget=self.forget)

    def run_step(self) -> None:
        self.renewer._advance()
        run(self.renewer._send_batch())


def test_a_cleanup_requested_while_it_is_given_up_is_sent() -> None:
    for at in itertools.count(1):
        scenario = Scenario()
        scenario.reply = UNREACHABLE
        scenario.request()
        scenario.run_step()
        scenario.time, scenario.reply, scenario.sent = GIVEN_UP_AFTER, 1, 0
        with AtLine(at, LINES, scenario.run_step) as line:
            scenario.request()
        scenario.run_step()
        assert scenario.sent, line.position
        assert not scenario.renewer._cleanups
        if line.position is None:
            assert at > 1
            return


def test_a_cleanup_requested_with_a_longer_ttl_while_it_completes_is_kept_longer() -> None:
    longer = 10 * GIVEN_UP_AFTER
    for at in itertools.count(1):
        scenario = Scenario()
        scenario.request()
        lines: list[AtLine] = []

        def request_during_reply(
            at: int = at, scenario: Scenario = scenario, lines: list[AtLine] = lines
        ) -> None:
            # The reply is handled at line number `at` of the request.
            item = next(iter(scenario.renewer._cleanups.values()))
            with AtLine(at, LINES, lambda: scenario.renewer._handle_reply(item, 0.0, 1)) as line:
                scenario.request(longer)
            lines.append(line)

        scenario.while_outstanding = request_during_reply
        scenario.run_step()
        if lines[0].position is None:
            assert at > 1
            return
        scenario.while_outstanding, scenario.reply = lambda: None, UNREACHABLE
        scenario.time = 2 * GIVEN_UP_AFTER
        scenario.run_step()
        assert scenario.sent > 1, lines[0].position
        assert [each.deadline for each in scenario.renewer._cleanups.values()] == [longer]


def test_a_cleanup_requested_after_it_was_sent_is_sent_again_even_by_a_closed_client() -> None:
    scenario = Scenario()
    scenario.request()
    scenario.renewer.close()
    scenario.reply, scenario.while_outstanding = UNREACHABLE, scenario.request
    scenario.run_step()
    assert (scenario.sent, scenario.forgotten) == (1, 0)
    scenario.while_outstanding, scenario.time = lambda: None, 1.0
    scenario.run_step()
    assert (scenario.sent, scenario.forgotten) == (2, 1)
    assert [(event.kind, event.fence) for event in scenario.events] == [("cleanup_failed", 7)]
    assert not scenario.renewer._cleanups
