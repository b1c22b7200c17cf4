"""The leases that one client holds in one process, as far as it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.lease_state import LeaseState
    from holdfast.core.spec import LockSpec
    from holdfast.port import Port


class HeldLeases:
    """The held leases, by key.

    Several threads use its dicts without a mutex, because their single operations are atomic.
    """

    __slots__ = ("_port", "mutex", "newest", "shared")

    def __init__(self, port: Port) -> None:
        self._port = port
        self.mutex = port.new_mutex()
        """Guards the references of all leases, and the start of a release: one thread may add a
        reference while another removes the last one. Also guards the choice of the newest lease."""
        self.newest: dict[bytes, LeaseState] = {}
        """The newest lease of each lock with one holder. Older ones have ended on the server, and
        their next renewal detects it."""
        self.shared: dict[bytes, dict[LeaseState, None]] = {}
        """The leases with an owner, and those of semaphores and rwlocks. A key may have several. A
        key that has none is not in here."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.newest or self.shared)

    def add(self, lease: LeaseState) -> None:
        """Add a lease that was just granted.

        A lease may come after a newer one: its thread was slow, and it has ended on the server.
        """
        key = lease.spec.keys.lock
        if lease.spec.is_shared:
            with self.mutex:
                # A signal handler may remove the last lease, and with it this dict, at any moment.
                while lease not in self.shared.get(key, ()):
                    self.shared.setdefault(key, {})[lease] = None
            return
        with self.mutex:
            newest = self.newest.get(key)
            if newest is None or newest.fence <= lease.fence:
                self.newest[key] = lease

    def remove(self, lease: LeaseState) -> None:
        """Remove a lease that has ended. A newer lease of the same lock is kept."""
        key = lease.spec.keys.lock
        with self.mutex:
            if lease.spec.is_shared:
                leases = self.shared.get(key, {})
                leases.pop(lease, None)
                # CPython runs signal handlers only after calls and at backward jumps. So none can
                # add a lease between the test and `pop`.
                _ = leases or self.shared.pop(key, None)
            elif self.newest.get(key) is lease:
                del self.newest[key]

    def _of(self, key: bytes) -> list[LeaseState]:
        """Return the leases of one key. To copy a dict to a list is one atomic step."""
        newest = self.newest.get(key)
        leases = [] if newest is None else [newest]
        return leases + list(self.shared.get(key, ()))

    def all(self) -> list[LeaseState]:
        """Return all leases."""
        shared = [lease for leases in list(self.shared.values()) for lease in list(leases)]
        return [*self.newest.values(), *shared]

    def valid(self) -> list[LeaseState]:
        """Return the leases that are valid now."""
        now, process = self._port.now(), self._port.process()
        return [lease for lease in self.all() if lease.is_valid(now, process)]

    def held_by_caller(self, spec: LockSpec) -> LeaseState | None:
        """Return the lease of this lock that the calling thread or task holds, if any."""
        actor = self._port.actor()
        for lease in self._of(spec.keys.lock):
            if lease.actor is not actor:
                continue
            if spec.owner is not None and lease.spec.owner == spec.owner:
                return None  # the server manages the several leases of an owner
            if lease.is_valid(self._port.now(), self._port.process()):
                return lease
        return None

    def is_blocked_by_waiting(self, spec: LockSpec) -> bool:
        """Whether a holder of this lock cannot release it while the caller waits."""
        now, process = self._port.now(), self._port.process()
        return any(
            lease.is_valid(now, process)
            and self._port.blocks(lease.actor)
            and (spec.owner is None or lease.spec.owner != spec.owner)
            for lease in self._of(spec.keys.lock)
        )

    def weight_of_caller(self, spec: LockSpec) -> int:
        """Return the permits of this semaphore or rwlock that the calling thread or task holds."""
        actor = self._port.actor()
        return self._weight(spec, lambda holder: holder is actor)

    def weight_blocked_by_waiting(self, spec: LockSpec) -> int:
        """Return the permits whose holders cannot release them while the caller waits."""
        return self._weight(spec, self._port.blocks)

    def _weight(self, spec: LockSpec, counts: Callable[[object], bool]) -> int:
        now, process = self._port.now(), self._port.process()
        return sum(
            lease.spec.weight
            for lease in self._of(spec.keys.lock)
            if lease.actor is not None and counts(lease.actor) and lease.is_valid(now, process)
        )
