"""What a guard needs of a lease, and the error for one that comes too late."""

from __future__ import annotations

from typing import Protocol

from holdfast.errors import ConfigurationError, StaleFence

_FENCE_END = 2**53  # numbers below are exact in Lua too


class HasFence(Protocol):
    """A lease: anything with the name of its lock and a fence."""

    @property
    def name(self) -> str:
        """The name of the lock."""

    @property
    def fence(self) -> int:
        """The fence: a whole number from 1 to 2**53 - 1 that grows with each lease."""


def has_fence(given: object) -> bool:
    """Whether this is a lease, with a fence that a guard can check."""
    fence: object = getattr(given, "fence", None)
    return type(fence) is int and 0 < fence < _FENCE_END


def fence_of(lease: HasFence) -> int:
    """Return the fence of a lease.

    Raises:
        ConfigurationError: it has none, or one that is out of range.
    """
    if getattr(lease, "leases", None) is not None:
        raise ConfigurationError(
            f"{lease!r} has several fences: give the lease of one lock, lease.leases[name]"
        )
    if getattr(lease, "exclusive", True) is False:
        raise ConfigurationError(
            f"{lease!r} is not exclusive, so another valid lease may have a greater fence: guard "
            "writes with the lease of a lock, or of the writer of an rwlock"
        )
    if has_fence(lease):
        return lease.fence
    raise ConfigurationError(
        f"{lease!r} has no valid fence: give the lease that lock.acquire() or 'with lock' returned"
    )


def stale(lease: HasFence, resource: str, newest_fence: int) -> StaleFence:
    """Return the error for a lease that is older than one that the resource has seen."""
    return StaleFence(
        f"{resource!r} refused fence {lease.fence} of lock {lease.name!r}, because a newer lease "
        f"with fence {newest_fence} has used it: discard this work, and acquire the lock again",
        lock=lease.name,
        resource=resource,
        fence=lease.fence,
        newest_fence=newest_fence,
    )
