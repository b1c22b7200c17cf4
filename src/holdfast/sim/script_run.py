"""What a server ran: one script, with the state of the lock before and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.keys import Keys
    from holdfast.sim.node import Server


class LockState(NamedTuple):
    """What a server has in the keys of a lock, at one moment."""

    holder: bytes | None = None
    """The token that has the lock."""
    fence: bytes | None = None
    left_ms: int = -2
    """How long the lock's key stays, as PTTL says it."""
    queue: Sequence[bytes] = ()
    """The tokens of waiters, in order."""
    queue_left_ms: int = -2
    holds: Sequence[bytes] = ()
    """The holds of an owner, and the marks among them."""
    holds_left_ms: int = -2


class ScriptRun(NamedTuple):
    """One script that a server ran."""

    server: Server
    script: str
    """The script's name."""
    keys: Keys
    args: Sequence[str]
    reply: Any
    messages: Sequence[bytes]
    """What it published."""
    before: LockState
    after: LockState

    @property
    def by_holder(self) -> bool:
        """Whether the token of the request had the lock before."""
        return self.before.holder == self.args[0].encode()

    @property
    def changed_holder(self) -> bool:
        """Whether the lock went to another token, or was freed."""
        return self.before.holder != self.after.holder
