"""Several nodes on an event loop: `wire.crowd`, over one multiplexed connection to each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.crowd import AGAIN, GRACE, Question
from holdfast.wire.multiplexed import Multiplexer, seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.port import Heard, Post
    from holdfast.wire.target import Target


class _Voice:
    """Takes the answer to one post, as a future would."""

    __slots__ = ("_number", "_question", "_table", "_told")

    def __init__(self, table: LoopCrowd, question: Question, number: int) -> None:
        self._table = table
        self._question = question
        self._number = number
        self._told = False

    def done(self) -> bool:
        """Whether it was answered."""
        return self._told

    def cancelled(self) -> bool:
        """Nobody cancels it: what is asked has to be known."""
        return False

    def set_result(self, reply: Any) -> None:  # noqa: ANN401 - any answer
        """Take the answer."""
        self._told = True
        self._table.told(self._question, self._number, reply)

    set_exception = set_result


class _Asked(Question):
    """A question that a task waits for."""

    def __init__(self, posts: int, heard: Heard, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(posts, heard)
        self.waiting: asyncio.Future[None] = loop.create_future()


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
        question = _Asked(len(posts), heard, self._loop)
        end = now() + timeout
        if not all(wire.is_open for wire in self._wires):
            await self._connect(end)
        for number, (node, request) in enumerate(posts):
            wire = self._wires[node]
            if wire.is_open:
                give_up = end if timeout else end + self._timeout
                wire.post(_Voice(self, question, number), request, give_up)
            else:
                question.tell(number, self._unavailable(node))
        if question.over or not timeout:
            return
        timer = self._loop.call_at(self._loop.time() + max(0.0, end - now()), self._end, question)
        try:
            await question.waiting
        finally:
            timer.cancel()
        for number in question.unanswered() if not question.over else ():
            name = self.names[posts[number][0]]
            error = OutcomeUnknown(f"{name} did not answer: no answer in time", node=name)
            question.tell(number, error)

    def told(self, question: Question, number: int, answer: object) -> None:
        """Pass an answer on, and end the wait if it is enough."""
        question.tell(number, answer)
        if question.over:
            self._end(question)

    @staticmethod
    def _end(question: Any) -> None:  # noqa: ANN401 - one of ours
        if not question.waiting.done():
            question.waiting.set_result(None)

    def _unavailable(self, node: int) -> HoldfastError:
        name = self.names[node]
        return self._failures[node] or NodeUnavailable(f"{name} is not connected yet", node=name)

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
        finally:
            self._again_at[node] = now() + AGAIN
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
