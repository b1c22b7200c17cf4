"""Several nodes on an event loop: `wire.crowd`, over one multiplexed connection to each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.port import Unconnected
from holdfast.wire.clock import now
from holdfast.wire.crowd import AGAIN, GRACE, SERIAL, Question
from holdfast.wire.multiplexed import Multiplexer, seen
from holdfast.wire.packing import by_sha

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.port import Heard, Post
    from holdfast.wire.target import Target


class _Question(Question):
    """A question that a task waits for."""

    __slots__ = ("waiting",)

    def __init__(self, posts: int, heard: Heard, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(posts, heard)
        self.waiting: asyncio.Future[None] = loop.create_future()


class _Voice:
    """Takes the answer to one post, as a future would."""

    __slots__ = ("_number", "_question", "_told")

    def __init__(self, question: _Question, number: int) -> None:
        self._question = question
        self._number = number
        self._told = False

    def done(self) -> bool:
        """Whether it was answered."""
        return self._told

    def cancelled(self) -> bool:
        """Nobody cancels it: what was asked has to be known."""
        return False

    def set_result(self, reply: Any) -> None:  # noqa: ANN401 - any answer
        """Take the answer."""
        self._told = True
        question = self._question
        question.tell(self._number, reply)
        if question.over and not question.waiting.done():
            question.waiting.set_result(None)

    set_exception = set_result


class LoopCrowd:
    """The connections of one event loop to several nodes."""

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.names = [target.node for target in targets]
        self._wires = [Multiplexer(target, timeout) for target in targets]
        self._timeout = timeout
        self._majority = len(targets) // 2 + 1
        self._again_at = [0.0] * len(targets)
        self._failures: list[HoldfastError | None] = [None] * len(targets)
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._waited = False

    async def ask(self, posts: Sequence[Post], timeout: float, heard: Heard) -> None:
        """As `Nodes.ask`."""
        question = _Question(len(posts), heard, self._loop)
        end = now() + timeout
        if not all(wire.is_open for wire in self._wires):
            await self._connect(end)
        give_up = end if timeout else end + self._timeout
        packed, last = b"", None
        for number, (node, request) in enumerate(posts):
            wire = self._wires[node]
            if not wire.is_open:
                question.tell(number, self._unavailable(node))
                continue
            if request is not last:
                packed, last = by_sha(*request, SERIAL)[: -len(SERIAL) - 2], request
            wire.post(_Voice(question, number), request, packed, give_up)
        # Each connection tells by itself when it is too late for an answer.
        if timeout and not question.over:
            await question.waiting

    def _unavailable(self, node: int) -> HoldfastError:
        name = self.names[node]
        return self._failures[node] or Unconnected(f"{name} is not connected yet", node=name)

    async def _connect(self, end: float) -> None:
        """Have as many connections as can be had now, and at least wait for a majority."""
        at = now()
        for node, wire in enumerate(self._wires):
            if not wire.is_open and node not in self._opening and at >= self._again_at[node]:
                self._opening[node] = task = self._loop.create_task(self._open(node))
                task.add_done_callback(seen)
        if self._is_majority() and self._waited:
            return
        while self._opening and now() < end:
            limit = min(end, at + GRACE) if self._is_majority() else end
            if now() >= limit:
                break
            await asyncio.wait(
                self._opening.values(),
                timeout=limit - now(),
                return_when=asyncio.FIRST_COMPLETED,
            )
        self._waited = True

    def _is_majority(self) -> bool:
        return sum(wire.is_open for wire in self._wires) >= self._majority

    async def _open(self, node: int) -> None:
        try:
            await self._wires[node].open(self._timeout)
            self._failures[node] = None
        except HoldfastError as error:
            self._failures[node] = error
            self._again_at[node] = now() + AGAIN
        finally:
            del self._opening[node]

    async def drain(self) -> None:
        """Let what is owed come, as far as it does at once."""
        end = now() + GRACE
        while any(wire.owes for wire in self._wires) and now() < end:  # noqa: ASYNC110 - each is told by itself
            await asyncio.sleep(0.001)

    def close(self) -> None:
        """Close the connections."""
        for wire in self._wires:
            wire.close()
