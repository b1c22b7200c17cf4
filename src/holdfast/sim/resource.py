"""The resource that the lock of a simulation run guards. It checks fences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.sim.simulation import Simulation


class Resource:
    """A value that accepts a write only if no higher fence was used before."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._highest = 0
        self.value = 0
        self.accepted = 0

    def read(self, actor: str, fence: int) -> int | None:
        """Return the value, or None if a higher fence was used before."""
        if fence < self._highest:
            self._sim.note("refused", "resource", actor, fence)
            return None
        self._highest = fence
        return self.value

    def write(self, actor: str, fence: int, value: int) -> bool:
        """Write the value unless a higher fence was used before; return whether it was written."""
        if fence < self._highest:
            self._sim.note("refused", "resource", actor, fence)
            return False
        self._highest = fence
        self.value = value
        self.accepted += 1
        self._sim.note("accepted", "resource", actor, fence)
        return True
