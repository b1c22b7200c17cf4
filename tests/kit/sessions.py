"""A session without a server, and the holds and waiters that it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.core.hold import Grip, Hold
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
    """A quorum of nodes without servers, which notes what a session asks of it."""

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


class Led:
    """A session, and the holds that it was given."""

    def __init__(self, *, quorum: Any = None, longest_ttl: float = 60.0) -> None:
        self.port = ClockedPort()
        self.events: list[Event] = []
        self.session: Session = session_of(
            self.port, self.events.append, quorum=quorum, longest_ttl=longest_ttl
        )
        self._grips: list[Grip] = []

    def spec(self, name: str = "a", **settings: Any) -> LockSpec:
        return describe(name, **{**PLAIN, "ttl": 10, **settings})

    def take(self, name: str = "a", *, token: str = TOKEN, **settings: Any) -> Hold:
        """Have the caller be granted a lock."""
        self._grips.append(Grip())
        spec, port, grip = self.spec(name, **settings), self.port, self._grips[-1]
        session = self.session
        hold = Hold(spec, token, 3, port.time, port.caller, session.process, session, grip)
        session.took(hold)
        return hold

    def waiter(self, token: str = TOKEN, key: bytes = KEY) -> Any:
        return self.session.waiters.line(keys_of(key)).enter(
            token, key, CountedSignal(), self.port.time
        )

    @property
    def cleanups(self) -> list[Cleanup]:
        return cleanups_of(self.session)

    @property
    def requests(self) -> list[tuple[str, ...]]:
        """The arguments of the releases that the background is to send."""
        return [each.request[2] for each in self.cleanups]
