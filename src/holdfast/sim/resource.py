"""The resource that the lock of a simulation run guards, with its check of fences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.sim.world import World


class Resource:
    """What the lock guards: it takes a write only with a fence as high as any it has seen."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._highest = 0
        self.value = 0
        self.accepted = 0

    def read(self, who: str, fence: int) -> int | None:
        """The value, or None if the reader comes too late."""
        if fence < self._highest:
            self._world.note("refused", "resource", who, fence)
            return None
        self._highest = fence
        return self.value

    def write(self, who: str, fence: int, value: int) -> bool:
        """Take the value unless the writer comes too late."""
        if fence < self._highest:
            self._world.note("refused", "resource", who, fence)
            return False
        self._highest = fence
        self.value = value
        self.accepted += 1
        self._world.note("accepted", "resource", who, fence)
        return True
