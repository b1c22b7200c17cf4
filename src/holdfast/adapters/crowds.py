"""Several nodes over threads and over asyncio: the port, which goes by the majority of them."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Any

from holdfast.adapters.tasks import Place, Tasks
from holdfast.adapters.threads import Threads
from holdfast.wire.loop_crowd import LoopCrowd
from holdfast.wire.loop_ears import LoopEars

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Heard, Listener, Post
    from holdfast.wire.blocking_ears import BlockingEars
    from holdfast.wire.crowd import BlockingCrowd
    from holdfast.wire.target import Target


class ThreadNodes(Threads):
    """`holdfast.port.Nodes`, and the port, for the threads of one client of several servers."""

    def __init__(self, crowd: BlockingCrowd, ears: Sequence[BlockingEars]) -> None:
        super().__init__()
        self._crowd = crowd
        self._ears = ears
        self.names = crowd.names
        self.new_locations_mutex = crowd.new_locations_mutex

    async def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        heard: Heard,
        meanwhile: Callable[[], float] | None = None,
    ) -> None:
        """Ask over the connections that this thread has, or shares."""
        self._crowd.ask(posts, timeout, heard, meanwhile)

    async def listen(self, listener: Listener, timeout: float, keys: Keys) -> None:
        """Listen at one node, with a thread that all waiting threads share."""
        self._ears[keys.node or 0].listen(listener, timeout)


class _Place(Place):
    """What belongs to one event loop, with connections to several servers."""

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        super().__init__()
        self.crowd = LoopCrowd(targets, timeout)
        self.ears = [LoopEars(target, timeout) for target in targets]

    async def drain(self) -> None:
        """Hear what the slower nodes answer."""
        await self.crowd.drain()

    def close(self) -> None:
        """Close the connections."""
        self.crowd.close()
        for ears in self.ears:
            ears.close()


class TaskNodes(Tasks[_Place]):
    """`holdfast.port.Nodes`, and the port, for the tasks of one client of several servers."""

    def __init__(
        self,
        targets: Sequence[Target],
        timeout: float,
        names: Sequence[str],
    ) -> None:
        super().__init__(lambda: _Place(targets, timeout), timeout)
        self.names = names

    new_locations_mutex = staticmethod(RLock)

    def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        heard: Heard,
        meanwhile: Callable[[], float] | None = None,  # noqa: ARG002 - tasks are not in the background
    ) -> Coroutine[Any, Any, None]:
        """Ask over this loop's connections."""
        return self._here().crowd.ask(posts, timeout, heard)

    async def listen(self, listener: Listener, timeout: float, keys: Keys) -> None:
        """Listen at one node, on a connection that all tasks of this loop share."""
        await self._here().ears[keys.node or 0].listen(listener, timeout)
