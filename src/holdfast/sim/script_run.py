"""One script that a server ran, with the state of the lock before and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.keys import Keys
    from holdfast.sim.node import Server


class LockState(NamedTuple):
    """The keys of a lock on one server, at one moment."""

    holder: bytes | None = None
    """The token in the lock's key."""
    fence: bytes | None = None
    left_ms: int = -2
    """The remaining time of the lock's key, as PTTL returns it."""
    queue: Sequence[bytes] = ()
    """The tokens of waiters, in order."""
    queue_left_ms: int = -2
    holds: Sequence[bytes] = ()
    """The holds of an owner, and the markers among them."""
    holds_left_ms: int = -2
    permits: Mapping[bytes, int] = {}
    """The holders of a semaphore or an rwlock, and how many ms their leases have left."""


class ScriptRun(NamedTuple):
    """One script that a server ran."""

    server: Server
    script: str
    """The script's name."""
    keys: Keys
    args: Sequence[str]
    reply: Any
    messages: Sequence[bytes]
    """The messages that it published."""
    before: LockState
    after: LockState

    @property
    def by_holder(self) -> bool:
        """Whether the token of the request held the lock before."""
        return self.before.holder == self.args[0].encode()

    @property
    def changed_holder(self) -> bool:
        """Whether the lock was granted to another token, or became free."""
        return self.before.holder != self.after.holder
