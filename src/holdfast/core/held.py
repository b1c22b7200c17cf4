"""The leases that one client holds in one process, as far as it knows."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.core.hold import Hold
    from holdfast.core.spec import LockSpec
    from holdfast.port import Port


class HeldLeases:
    """Several threads use this without a mutex. `_remove_shared` has a race, which is harmless."""

    __slots__ = ("_port", "newest", "shared")

    def __init__(self, port: Port) -> None:
        self._port = port
        self.newest: dict[bytes, Hold] = {}
        """The newest lease of each key without an owner. By exclusion, no older one is valid."""
        self.shared: dict[tuple[bytes, Any], list[Hold]] = {}
        """The leases with an owner, of which a key may have several, by key and actor."""

    def add(self, hold: Hold) -> None:
        """Add a lease that was just granted."""
        if hold.spec.owner is None:
            self.newest[hold.spec.keys[0]] = hold
        else:
            self.shared.setdefault((hold.spec.keys[0], hold.actor), []).append(hold)

    def remove(self, hold: Hold) -> None:
        """Remove a lease that has ended. A newer one of the same lock stays."""
        if hold.spec.owner is not None:
            self._remove_shared(hold)
        elif self.newest.get(hold.spec.keys[0]) is hold:
            self.newest.pop(hold.spec.keys[0], None)

    def _remove_shared(self, hold: Hold) -> None:
        # Race: this thread finds the list empty, the actor appends its next lease to it, and this
        # thread removes the list. Then that lease is missing here: it stays held, but no
        # WouldDeadlock is raised if the actor waits for itself.
        place = hold.spec.keys[0], hold.actor
        holds = self.shared.get(place, [])
        if hold in holds:
            holds.remove(hold)
        if not holds:
            self.shared.pop(place, None)

    def valid(self) -> list[Hold]:
        """Return the leases that are valid now."""
        now, process = self._port.now(), self._port.process()
        holds = [*self.newest.values(), *chain(*list(self.shared.values()))]
        return [hold for hold in holds if hold.alive(now, process)]

    def mine(self, spec: LockSpec) -> Hold | None:
        """Return the lease of this lock that the calling thread or task holds, if any."""
        key, actor = spec.keys[0], self._port.actor()
        newest = self.newest.get(key)
        holds = [] if newest is None or newest.actor is not actor else [newest]
        holds += self.shared.get((key, actor), [])
        for hold in holds:
            if spec.owner is not None and hold.spec.owner == spec.owner:
                return None  # the server counts the leases of an owner
            if hold.alive(self._port.now(), self._port.process()):
                return hold
        return None

    def is_blocked_by_waiting(self, spec: LockSpec) -> bool:
        """Whether a holder of this lock could not release it while the caller waits for it."""
        key, now, process = spec.keys[0], self._port.now(), self._port.process()
        newest = self.newest.get(key)
        holds = [] if newest is None else [newest]
        for place, others in list(self.shared.items()):
            if place[0] == key:
                holds += others
        return any(
            hold.alive(now, process)
            and self._port.blocks(hold.actor)
            and (spec.owner is None or hold.spec.owner != spec.owner)
            for hold in holds
        )
