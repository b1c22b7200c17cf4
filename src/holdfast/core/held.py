"""The leases that one client holds in one process, as far as it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.core.hold import Hold
    from holdfast.core.spec import LockSpec
    from holdfast.port import Port


class HeldLeases:
    """By key. Several threads use it without a mutex: single operations of a dict are atomic."""

    __slots__ = ("_port", "mutex", "newest", "shared")

    def __init__(self, port: Port) -> None:
        self._port = port
        self.mutex = port.new_mutex()
        """For the levels of a lease: one thread may enter it again while another one leaves it."""
        self.newest: dict[bytes, Hold] = {}
        """The newest lease of each key without an owner. By exclusion, no older one is valid."""
        self.shared: dict[Hold, None] = {}
        """The leases with an owner, of which a key may have several."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.newest or self.shared)

    def add(self, hold: Hold) -> None:
        """Add a lease that was just granted."""
        if hold.spec.owner is None:
            self.newest[hold.spec.keys[0]] = hold
        else:
            self.shared[hold] = None

    def remove(self, hold: Hold) -> None:
        """Remove a lease that has ended. A newer one of the same lock stays."""
        if hold.spec.owner is not None:
            self.shared.pop(hold, None)
        elif self.newest.get(hold.spec.keys[0]) is hold:
            self.newest.pop(hold.spec.keys[0], None)

    def _of(self, key: bytes) -> list[Hold]:
        """Return the leases of one key. No other thread runs while a dict is copied to a list."""
        newest = self.newest.get(key)
        holds = [] if newest is None else [newest]
        return holds + [hold for hold in list(self.shared) if hold.spec.keys[0] == key]

    def valid(self) -> list[Hold]:
        """Return the leases that are valid now."""
        now, process = self._port.now(), self._port.process()
        holds = [*self.newest.values(), *self.shared]
        return [hold for hold in holds if hold.alive(now, process)]

    def mine(self, spec: LockSpec) -> Hold | None:
        """Return the lease of this lock that the calling thread or task holds, if any."""
        actor = self._port.actor()
        for hold in self._of(spec.keys[0]):
            if hold.actor is not actor:
                continue
            if spec.owner is not None and hold.spec.owner == spec.owner:
                return None  # the server counts the leases of an owner
            if hold.alive(self._port.now(), self._port.process()):
                return hold
        return None

    def is_blocked_by_waiting(self, spec: LockSpec) -> bool:
        """Whether a holder of this lock could not release it while the caller waits for it."""
        now, process = self._port.now(), self._port.process()
        return any(
            hold.alive(now, process)
            and self._port.blocks(hold.actor)
            and (spec.owner is None or hold.spec.owner != spec.owner)
            for hold in self._of(spec.keys[0])
        )
