"""Attempts to acquire a lock on three fake nodes, with a manual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.adapters.thread_port import run
from holdfast.core.lease_state import LeaseRef
from holdfast.core.quorum import Quorum
from holdfast.core.quorum_acquire import acquire
from holdfast.core.spec import describe
from holdfast.errors import NodeUnavailable
from kit.fake_nodes import ClockedPort, FakeNodes, session_of
from kit.lock_settings import PLAIN

if TYPE_CHECKING:
    from holdfast.core.events import Event
    from holdfast.core.lease_state import LeaseState
    from holdfast.core.waiter_channel import WaiterChannel

TTL, START = 10.0, 100.0
GRANTED = [7, 7, 7]
OTHER, THIRD = b"hf1:x:1:bob@web:9:job:", b"hf1:y:1:eve@db:8:job:"
HELD = [[OTHER, 4000]] * 3
UNREACHABLE = [NodeUnavailable(f"{name} is unreachable") for name in FakeNodes.names]
"""Replies of the nodes: granted; held by another client; unreachable."""


class QuorumAttempts:
    """A client of three nodes, and its attempts to acquire one lock."""

    def __init__(self, *, polls: bool = False) -> None:
        self.port = ClockedPort()
        self.nodes: Any = FakeNodes(self.port)
        self.events: list[Event] = []
        self.quorum = Quorum(self.nodes, self.nodes, self.events.append)
        report = self.events.append
        self.session = session_of(self.port, report, polls=polls, quorum=self.quorum)
        self.ref = LeaseRef()

    def spec(self, **settings: Any) -> Any:
        given = {**PLAIN, "ttl": TTL, "command_timeout": 0.5, "min_validity": 2.0, **settings}
        return describe("a", **given, quorum=True, longest_ttl=60.0)

    def acquire(self, *rounds: Any, timeout: float | None = None, **settings: Any) -> LeaseState:
        """Acquire; the nodes reply with these rounds of votes and repeat the last one."""
        self.nodes.rounds = list(rounds)
        self.ref = LeaseRef()
        spec = self.spec(**settings)
        granted = run(acquire(self.session, self.quorum, spec, timeout, self.ref))
        assert granted is self.ref
        assert self.ref._lease is not None
        return self.ref._lease

    def fail(self, error: type[BaseException], *rounds: Any, **settings: Any) -> Any:
        """Try to acquire; return the error that it raises."""
        with pytest.raises(error) as caught:
            self.acquire(*rounds, **settings)
        assert type(caught.value) is error
        assert not self.session.held.newest
        return caught.value

    @property
    def votes(self) -> list[tuple[float, tuple[str, ...]]]:
        """Timeout and arguments of each round of votes."""
        return [(limit, args) for _, limit, args in self.nodes.sent("vote")]

    @property
    def released(self) -> list[tuple[list[int], str]]:
        """Nodes and token of each release."""
        return [(nodes, args[0]) for nodes, _, args in self.nodes.sent("release")]

    @property
    def pauses(self) -> list[float]:
        return self.port.slept + self.port.waited

    @property
    def channels(self) -> list[WaiterChannel]:
        keys = self.spec().keys
        return [self.session.waiters.channel(keys.at(node)) for node in range(3)]

    @property
    def known(self) -> list[set[str]]:
        """The tokens that each channel knows."""
        return [set(channel._registered) for channel in self.channels]
