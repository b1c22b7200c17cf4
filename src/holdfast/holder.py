"""The holder of a lock, as it is shown to people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Holder:
    """The holder of a lock, as the server reported it.

    - `host`, `pid`, `user`, `thread`: the process of the holder, its user, and its thread or task.
    - `label`, `owner`: those of the lock, if it has any.
    - `since`: when the lock was acquired, in seconds since the epoch by the server's clock.
    - `fence`: the fencing number of the lease.
    - `remaining`: seconds that the holder has left unless it renews; None if the key never expires.
    - `weight`, `limit`: of a semaphore, the permits that the holder has, and the limit under which
      they were granted. A reader of an rwlock has the weight 1, and a writer that of the whole
      limit. None for a lock.
    - `token`: the value of the lock's key. Bytes that are not UTF-8 are lone surrogates, as in file
      names.

    Another library may use the same key. Of such a holder only `token` and `remaining` are known.
    Of the holders of a semaphore or an rwlock, `since` and `fence` are not known.
    """

    host: str | None
    pid: int | None
    label: str | None
    since: float | None
    fence: int | None
    remaining: float | None
    thread: str | None
    token: str
    user: str | None = None
    owner: str | None = None
    weight: int | None = None
    limit: int | None = None

    @property
    def exclusive(self) -> bool:
        """Whether there is no other holder beside it: it has a lock, or all permits."""
        return self.weight == self.limit

    @property
    def after_loss(self) -> bool | None:
        """Whether the lease before this one ended without a release; None if that is not known."""
        return None if self.fence is None else self.fence % 10 == 2  # noqa: PLR2004 - see scripts/_fence.lua

    @property
    def process(self) -> str:
        """The process, its user and the label, as text."""
        place = self.host if self.user is None else f"{self.user}@{self.host}"
        description = "another client" if self.pid is None else f"{place}, pid {self.pid}"
        return f"{description} ({self.label})" if self.label else description

    def __str__(self) -> str:
        description = self.process
        if self.remaining is None:
            return f"{description}, without expiry"
        return f"{description}, for another {self.remaining:.1f} s unless renewed"
