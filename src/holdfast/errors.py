"""Every way an operation can end badly, each with its own type.

An error carries the name of the lock or key it is about, is also the built-in error its readers
already catch (`TimeoutError`, `ConnectionError`, `ValueError`), and survives pickling. The split
follows who must act: `ConfigurationError` is for whoever wrote the call, `NodeUnavailable` for
whoever runs the server, `AcquireTimeout` and `LeaseLost` for the program itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.holder import Holder

LossReason = Literal["expired", "taken", "key_missing", "unreachable"]
"""Why a lease was lost.

- "expired": its time ran out.
- "taken": another client has acquired the lock since, or an operator broke it (`holdfast break`,
  `evict`).
- "key_missing": the server no longer has the lock's key. It restarted without its data, failed over
  to a replica that did not have the key, or was flushed; or the key was deleted, or evicted for
  lack of memory (`maxmemory-policy`). If a release reports it, another client may have acquired
  and released the lock since.
- "unreachable": the server could not be reached in time to renew it, or refused until then.
"""


class HoldfastError(Exception):
    """The root of every error raised by holdfast; `lock` is the lock concerned, or the key."""

    def __init__(self, message: str, *, lock: str = "") -> None:
        super().__init__(message)
        self.lock = lock


class AcquireTimeout(HoldfastError, TimeoutError):
    """The lock was held by somebody else for as long as the caller was ready to wait.

    `holder` says by whom, as last heard from the server.
    """

    def __init__(self, message: str, *, lock: str = "", holder: Holder | None = None) -> None:
        super().__init__(message, lock=lock)
        self.holder = holder


class LeaseLost(HoldfastError):
    """The lease is over although nobody released it; work done since may not have been alone.

    `reason` is "expired", "taken", "key_missing" or "unreachable": `LossReason` explains each.
    `fence` is the number of the lost lease.
    """

    def __init__(
        self, message: str, *, lock: str = "", reason: LossReason = "expired", fence: int = 0
    ) -> None:
        super().__init__(message, lock=lock)
        self.reason = reason
        self.fence = fence


class NotHeld(HoldfastError):
    """This process never held the lease: it was left twice, or taken before a fork."""


class WouldDeadlock(HoldfastError):
    """The caller would wait for itself: it holds the lock, which is not reentrant.

    Or a client for threads is used in coroutines, and another task of the same event loop holds
    the lock: waiting would block the loop, and the holder could never release it.
    """


class NodeUnavailable(HoldfastError, ConnectionError):
    """The server could not be reached, did not answer, or refused to work; nothing is held."""

    def __init__(self, message: str, *, lock: str = "", node: str = "") -> None:
        super().__init__(message, lock=lock)
        self.node = node


class NoQuorum(NodeUnavailable):
    """Too few of the nodes that keep the lock could be asked; nothing is held.

    `nodes` says of each what came of asking it.
    """

    def __init__(
        self,
        message: str,
        *,
        lock: str = "",
        node: str = "",
        nodes: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, lock=lock, node=node)
        self.nodes = dict(nodes or {})


class OutcomeUnknown(HoldfastError):
    """A command was sent and its answer never came: it may have been carried out, or not."""

    def __init__(self, message: str, *, lock: str = "", node: str = "") -> None:
        super().__init__(message, lock=lock)
        self.node = node


class WrongValue(HoldfastError, ValueError):
    """What the key holds cannot be worked with, and was left as it is.

    It is no string, no integer of 64 bits where one is needed, or nothing that the codec can read.
    """


class Contended(HoldfastError, TimeoutError):
    """Others changed the value between our reading and our writing it, for a whole timeout.

    Nothing was changed.
    """


class ScriptFailed(HoldfastError, RuntimeError):
    """A script of the user's ended with an error. What it wrote before that stays written."""


class ConfigurationError(HoldfastError, ValueError):
    """What was asked for cannot work as written; the message says what to write instead."""
