"""The errors of holdfast, one type for each way in which an operation can fail.

An error has the name of its lock or key. It is also a built-in error that programs already catch
(`TimeoutError`, `ConnectionError`, `ValueError`), and it can be pickled. The type shows who has to
act: the author of the call for `ConfigurationError`, the operator of the server for
`NodeUnavailable`, and the program itself for `AcquireTimeout`, `LeaseLost` and `StaleFence`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.holder import Holder

LossReason = Literal["expired", "taken", "key_missing", "unreachable"]
"""Why a lease was lost.

- "expired": its time ran out.
- "taken": another client has acquired the lock since, or an operator evicted this holder
  (`holdfast break`, `evict`).
- "key_missing": the server no longer has the lock's key. It restarted without its data, failed over
  to a replica that did not have the key, or was flushed; or the key was deleted, or evicted for
  lack of memory (`maxmemory-policy`). If a release reports it, another client may have acquired
  and released the lock since.
- "unreachable": no renewal succeeded before the deadline: the server could not be reached, or
  refused the requests.
"""


class HoldfastError(Exception):
    """The base class of all errors of holdfast. `lock` is the name of the lock, or the key."""

    def __init__(self, message: str, *, lock: str = "") -> None:
        super().__init__(message)
        self.lock = lock


class AcquireTimeout(HoldfastError, TimeoutError):
    """The lock was not granted within the timeout, because another client held it.

    `holder` is the last known holder.
    """

    def __init__(self, message: str, *, lock: str = "", holder: Holder | None = None) -> None:
        super().__init__(message, lock=lock)
        self.holder = holder


class RateLimited(AcquireTimeout):
    """The request would be allowed only after the timeout. Nothing was taken from the rate.

    `retry_after` is the number of seconds until it would be allowed if no other is sent.
    """

    def __init__(
        self,
        message: str,
        *,
        lock: str = "",
        holder: Holder | None = None,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message, lock=lock, holder=holder)
        self.retry_after = retry_after


class LeaseLost(HoldfastError):
    """The lease ended without being released. Another client may have held the lock since.

    `reason` is "expired", "taken", "key_missing" or "unreachable": `LossReason` explains each.
    `fence` is the fencing number of the lost lease.
    """

    def __init__(
        self, message: str, *, lock: str = "", reason: LossReason = "expired", fence: int = 0
    ) -> None:
        super().__init__(message, lock=lock)
        self.reason = reason
        self.fence = fence


class StaleFence(HoldfastError):
    """A resource refused a late write: a newer lease has used the resource. Nothing was written.

    `resource` is what the guard protects, `fence` the fence of the late lease, and `newest_fence`
    the fence that the resource has seen.
    """

    def __init__(
        self,
        message: str,
        *,
        lock: str = "",
        resource: str = "",
        fence: int = 0,
        newest_fence: int = 0,
    ) -> None:
        super().__init__(message, lock=lock)
        self.resource = resource
        self.fence = fence
        self.newest_fence = newest_fence


class NotHeld(HoldfastError):
    """The lease is not held: it was released before, or it belongs to the parent process.

    `check`, `extend` and `export` raise it after a release. `release` does not: after a release it
    does nothing. It raises NotHeld in a forked child only. The end of a `with lock` block raises it
    if the block's lease cannot be found.
    """


class WouldDeadlock(HoldfastError):
    """The caller holds the lock, which is not reentrant, and would wait for itself.

    It is also raised when a blocking client is used in coroutines, and another task of the same
    event loop holds the lock. Waiting would block the loop, so that task could never release it.
    """


class NodeUnavailable(HoldfastError, ConnectionError):
    """The server could not be reached, did not reply, or refused the request.

    An acquire that raises it holds nothing. After `release`, the lock may stay locked for up to its
    ttl. After `extend` and `export` the lease is unchanged.
    """

    def __init__(self, message: str, *, lock: str = "", node: str = "") -> None:
        super().__init__(message, lock=lock)
        self.node = node


class NoQuorum(NodeUnavailable):
    """Too few of the nodes that keep the lock replied. What is held: see `NodeUnavailable`.

    `nodes` has the outcome for each node, by its name.
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
    """A request was sent and got no reply: it may or may not have been carried out."""

    def __init__(self, message: str, *, lock: str = "", node: str = "") -> None:
        super().__init__(message, lock=lock)
        self.node = node


class WrongValue(HoldfastError, ValueError):
    """The value of the key has the wrong type or format, and was left unchanged.

    It is not a string, not a 64-bit integer where one is required, or the codec cannot read it.
    """


class Contended(HoldfastError, TimeoutError):
    """Other clients changed the value between each read and write, until the timeout was over.

    This call changed nothing.
    """


class ScriptFailed(HoldfastError, RuntimeError):
    """A script of the user raised an error. What it wrote before that stays written."""


class ConfigurationError(HoldfastError, ValueError):
    """The call, or a setting, can never work. The message shows what to write instead."""
