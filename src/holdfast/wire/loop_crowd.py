"""Several nodes on an event loop: `wire.crowd`, over one multiplexed connection to each."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import HoldfastError
from holdfast.port import Unconnected
from holdfast.wire.clock import now
from holdfast.wire.link import CAN_SPIN, QUICK
from holdfast.wire.multiplexed import Multiplexer, seen
from holdfast.wire.node_connection import PendingPosts, aged, retry_after
from holdfast.wire.node_pool import GRACE
from holdfast.wire.packing import StrayAnswer, by_sha, opened, serials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Heard, Post
    from holdfast.wire.multiplexed import Place
    from holdfast.wire.target import Target


FLUSH = 32
"""Requests to all nodes that are written without waiting for the end of the loop's turn."""


class _Question(PendingPosts):
    """A question that a task waits for."""

    __slots__ = ("waiting",)

    def __init__(
        self, posts: Sequence[Post], heard: Heard, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(posts, heard)
        self.waiting: asyncio.Future[None] = loop.create_future()

    def end(self) -> None:
        """Enough is known: wake who waits."""
        self.over = True
        if not self.waiting.done():
            self.waiting.set_result(None)


_Asked: TypeAlias = "tuple[_Question, int]"
"""A question and one of its posts: what stands for a future in the places of all its nodes."""


class _Voice:
    """Takes one node's answer to a post as a future would, where it is out of the ordinary."""

    def __init__(self, asked: _Asked, node: int) -> None:
        self._question, self._number = asked
        self._node = node

    def done(self) -> bool:
        """Whether it is not waited for any more."""
        return (self._number, self._node) in self._question.given_up

    def cancelled(self) -> bool:
        """Nobody cancels it: what was asked has to be known."""
        return False

    def set_exception(self, error: HoldfastError) -> None:
        """Take the error; there will be no other answer."""
        self._question.give_up(self._number, self._node, error)


class _Member(Multiplexer):
    """The connection to one of the nodes."""

    def __init__(
        self, target: Target, timeout: float, node: int, flush: Callable[[], None]
    ) -> None:
        super().__init__(target, timeout)
        self._node = node
        self._flush_all = flush

    def _future(self, asked: Any) -> Any:  # noqa: ANN401 - a future, or as good as one
        return asked if isinstance(asked, asyncio.Future) else _Voice(asked, self._node)

    def send(self, packed: bytes, place: Place) -> None:
        """Send a request to this node alone, behind those to all of them."""
        self._flush_all()
        super().send(packed, place)

    def data_received(self, data: bytes) -> None:
        """Tell each answer to the question whose turn it is: as `Multiplexer`'s, and as quick."""
        node, gets, unanswered = self._node, self._reader.gets, self.unanswered
        self._reader.feed(data)
        try:
            while (answer := gets()) is not False:
                asked, _, _, request, serial = unanswered[0]
                if type(answer) is bytes and answer[-3:] == serial:
                    reply = int(answer[:-3])
                elif isinstance(answer, hiredis.ReplyError) or request is None:
                    self._answered_oddly(answer, unanswered[0])
                    unanswered.popleft()
                    continue
                else:
                    reply = opened(answer, serial)
                unanswered.popleft()
                question, number = asked
                question.tell(number, node, reply)
        except (hiredis.HiredisError, IndexError, StrayAnswer, ValueError) as error:
            self._give_up(error)
            return
        self._quick = CAN_SPIN and now() - self._sent_at < QUICK


class LoopCrowd:
    """The connections of one event loop to several nodes."""

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.names = [target.node for target in targets]
        self._wires = [
            _Member(target, timeout, node, self._flush) for node, target in enumerate(targets)
        ]
        self._unsent: list[bytes] = []
        """Requests to all nodes that are to be written; their places are taken."""
        self._give_up = math.inf
        """When the first of them does."""
        self._serials = serials()
        self._timeout = timeout
        self._majority = len(targets) // 2 + 1
        self._again_at = [0.0] * len(targets)
        self._failures: list[tuple[HoldfastError, float] | None] = [None] * len(targets)
        """Why each could not be connected to, and when that was."""
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._waited = False

    async def ask(self, posts: Sequence[Post], timeout: float, heard: Heard) -> None:
        """As `Nodes.ask`."""
        question = _Question(posts, heard, self._loop)
        at, wires = now(), self._wires
        end = at + timeout
        all_open = True
        for wire in wires:
            if not wire.is_open:
                all_open = False
                await self._connect(end)
                at = now()
                break
        give_up = end if timeout else end + self._timeout
        for number, (nodes, request) in enumerate(posts):
            serial = next(self._serials)
            packed = by_sha(*request, serial)
            place = (question, number), at, give_up, request, serial
            if all_open and len(nodes) == len(wires):
                for wire in wires:
                    wire.unanswered.append(place)
                self._send(packed, give_up)
                continue
            for node in nodes:
                wire = wires[node]
                if wire.is_open:
                    wire.send(packed, place)
                else:
                    question.tell(number, node, self._unavailable(node))
        # Each connection tells by itself when it is too late for an answer.
        if timeout and not question.over:
            await question.waiting

    def _send(self, packed: bytes, give_up: float) -> None:
        """Have a request written to all nodes, together with others."""
        unsent = self._unsent
        if not unsent:
            self._loop.call_soon(self._flush)
        unsent.append(packed)
        self._give_up = min(self._give_up, give_up)
        if len(unsent) >= FLUSH:
            self._flush()

    def _flush(self) -> None:
        if self._unsent:
            packed, give_up = b"".join(self._unsent), self._give_up
            self._unsent, self._give_up = [], math.inf
            for wire in self._wires:
                wire.write(packed, give_up)

    def _unavailable(self, node: int) -> HoldfastError:
        name, failure = self.names[node], self._failures[node]
        if failure is not None:
            return aged(failure[0], now() - failure[1])
        return Unconnected(f"{name} is not connected yet", node=name)

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
            at = now()
            self._failures[node] = error, at
            self._again_at[node] = at + retry_after(error)
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
