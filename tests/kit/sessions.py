"""A session without a server, with leases and waiters that a test adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.core.lease_state import LeaseRef, LeaseState
from holdfast.core.quorum import Quorum
from holdfast.core.spec import describe
from holdfast.keys import keys_of
from kit.fake_nodes import (
    CLIENT,
    ClockedPort,
    CountedSignal,
    FakeNodes,
    cleanups_of,
    session_of,
)
from kit.lock_settings import PLAIN

if TYPE_CHECKING:
    from holdfast.core.events import Event
    from holdfast.core.renewer import Cleanup
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec

START = 100.0
KEY = b"holdfast:{a}"
TOKEN = f"hf1:{CLIENT}:7:ann@here:1:main:"


class FakeQuorum(Quorum):
    """A quorum of fake nodes that records the calls of a session."""

    def __init__(self) -> None:
        nodes = FakeNodes(ClockedPort())
        super().__init__(nodes, nodes, lambda _: None, 60.0)
        self.begun: list[Session] = []
        self.closed = False
        self.forgotten: list[str] = []

    def begin(self, session: Session) -> None:
        self.begun.append(session)
        super().begin(session)

    def close(self) -> None:
        self.closed = True
        super().close()

    def forget(self, token: str, node: int | None) -> None:
        self.forgotten.append(token)
        super().forget(token, node)


class SessionWithLeases:
    """A session and the leases that a test added to it."""

    def __init__(self, *, quorum: Any = None, longest_ttl: float = 60.0) -> None:
        self.port = ClockedPort()
        self.events: list[Event] = []
        self.session: Session = session_of(
            self.port, self.events.append, quorum=quorum, longest_ttl=longest_ttl
        )
        self._refs: list[LeaseRef] = []

    def spec(self, name: str = "a", **settings: Any) -> LockSpec:
        return describe(name, **{**PLAIN, "ttl": 10, **settings})

    def take(
        self, name: str = "a", *, token: str = TOKEN, fence: int = 3, **settings: Any
    ) -> LeaseState:
        """Add a lease, as if the caller had been granted a lock."""
        self._refs.append(LeaseRef())
        spec, port, ref = self.spec(name, **settings), self.port, self._refs[-1]
        session = self.session
        lease = LeaseState(
            spec, token, fence, port.time, port.caller, session.process, session, ref
        )
        session.track(lease)
        return lease

    def waiter(self, token: str = TOKEN, key: bytes = KEY) -> Any:
        return self.session.waiters.channel(keys_of(key)).register(
            token, key, CountedSignal(), self.port.time
        )

    @property
    def cleanups(self) -> list[Cleanup]:
        return cleanups_of(self.session)

    @property
    def requests(self) -> list[tuple[str, ...]]:
        """The arguments of the pending cleanup requests."""
        return [each.request[2] for each in self.cleanups]
