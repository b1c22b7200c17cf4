"""Attempts to acquire a lock on three nodes that are not there, on a clock that the test sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.adapters.threads import run
from holdfast.core.hold import Grip
from holdfast.core.quorum import Quorum
from holdfast.core.quorum_acquire import acquire as win
from holdfast.core.spec import describe
from holdfast.errors import NodeUnavailable
from kit.fake_nodes import ClockedPort, FakeNodes, session_of
from kit.lock_settings import PLAIN

if TYPE_CHECKING:
    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.core.line import Line

TTL, START = 10.0, 100.0
WON = [7, 7, 7]
OTHER, THIRD = b"hf1:x:1:bob@web:9:job:", b"hf1:y:1:eve@db:8:job:"
HELD = [[OTHER, 4000]] * 3
AWAY = [NodeUnavailable(f"{name} is away") for name in FakeNodes.names]
"""What the nodes answer: it is won; it is held by another; they do not answer."""


class QuorumAttempts:
    """A client of three nodes, and its attempts to acquire one lock."""

    def __init__(self, *, polls: bool = False) -> None:
        self.port = ClockedPort()
        self.nodes: Any = FakeNodes(self.port)
        self.events: list[Event] = []
        self.quorum = Quorum(self.nodes, self.nodes, self.events.append)
        report = self.events.append
        self.session = session_of(self.port, report, polls=polls, quorum=self.quorum)
        self.grip = Grip()

    def spec(self, **settings: Any) -> Any:
        given = {**PLAIN, "ttl": TTL, "command_timeout": 0.5, "min_validity": 2.0, **settings}
        return describe("a", **given, quorum=True, longest_ttl=60.0)

    def win(self, *rounds: Any, timeout: float | None = None, **settings: Any) -> Hold:
        """Acquire; the nodes answer with these rounds of votes, and repeat the last one."""
        self.nodes.rounds = list(rounds)
        self.grip = Grip()
        spec = self.spec(**settings)
        won = run(win(self.session, self.quorum, spec, timeout, self.grip))
        assert won is self.grip
        assert self.grip._hold is not None
        return self.grip._hold

    def fail(self, error: type[BaseException], *rounds: Any, **settings: Any) -> Any:
        """Acquire in vain; return the error."""
        with pytest.raises(error) as caught:
            self.win(*rounds, **settings)
        assert type(caught.value) is error
        assert not self.session.held.newest
        return caught.value

    @property
    def votes(self) -> list[tuple[float, tuple[str, ...]]]:
        """The time limits of the rounds of votes, and their arguments."""
        return [(limit, args) for _, limit, args in self.nodes.sent("vote")]

    @property
    def released(self) -> list[tuple[list[int], str]]:
        """On which nodes which tokens were released."""
        return [(nodes, args[0]) for nodes, _, args in self.nodes.sent("release")]

    @property
    def pauses(self) -> list[float]:
        return self.port.slept + self.port.waited

    @property
    def lines(self) -> list[Line]:
        keys = self.spec().keys
        return [self.session.waiters.line(keys.at(node)) for node in range(3)]

    @property
    def known(self) -> list[set[str]]:
        """The tokens that each line knows."""
        return [set(line._known) for line in self.lines]
