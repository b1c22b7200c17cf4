"""Connections of an event loop to several nodes: one multiplexed connection per node."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import HoldfastError
from holdfast.port import Unconnected
from holdfast.wire.blocking_connection import CAN_SPIN, QUICK
from holdfast.wire.clock import now
from holdfast.wire.multiplexer import Multiplexer
from holdfast.wire.node_connection import PendingPosts, age_failure, retry_after
from holdfast.wire.node_pool import GRACE
from holdfast.wire.packing import UnexpectedReply, decode_reply, pack_evalsha, serials
from holdfast.wire.shared_task import ignore_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import OnReply, Post
    from holdfast.wire.multiplexer import PendingReply
    from holdfast.wire.target import Target


FLUSH = 32
"""The number of queued requests to all nodes that are written before the loop's iteration ends."""


class _AwaitedPosts(PendingPosts):
    """Requests to several nodes that a task waits for."""

    __slots__ = ("waiting",)

    def __init__(
        self, posts: Sequence[Post], on_reply: OnReply, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(posts, on_reply)
        self.waiting: asyncio.Future[None] = loop.create_future()

    def end(self) -> None:
        """Wake the task: enough replies have arrived."""
        self.over = True
        if not self.waiting.done():
            self.waiting.set_result(None)


_PostRef: TypeAlias = "tuple[_AwaitedPosts, int]"
"""The requests of a task, and the index of one: the caller in `multiplexer.PendingReply`."""


class _NodeFuture:
    """The interface of a future for one request to one node, for errors and timeouts."""

    def __init__(self, caller: _PostRef, node: int) -> None:
        self._posts, self._post = caller
        self._node = node

    def done(self) -> bool:
        """Whether the caller has received an error already."""
        return not self._posts.is_missing(self._post, self._node)

    def cancelled(self) -> bool:
        """Return False: even a cancelled caller must receive the outcome."""
        return False

    def set_exception(self, error: HoldfastError) -> None:
        """Report the error, and ignore a later reply."""
        self._posts.notify(self._post, self._node, error)


class _PoolMultiplexer(Multiplexer):
    """The connection to one node of the pool."""

    def __init__(
        self, target: Target, timeout: float, node: int, flush: Callable[[], None]
    ) -> None:
        super().__init__(target, timeout)
        self._node = node
        self._flush_all = flush

    def _future_of(self, caller: Any) -> Any:  # noqa: ANN401 - a future, or the like
        return _NodeFuture(caller, self._node) if isinstance(caller, tuple) else caller

    def send(self, packed: bytes, entry: PendingReply) -> None:
        """Send a request to this node only, after the queued requests to all nodes."""
        self._flush_all()
        super().send(packed, entry)

    def data_received(self, data: bytes) -> None:
        """Pass each reply to its caller; as `Multiplexer.data_received`, inlined for speed."""
        node, gets, pending = self._node, self._reader.gets, self.pending
        self._reader.feed(data)
        try:
            while (raw := gets()) is not False:
                caller, _, _, request, serial = pending[0]
                if type(raw) is bytes and raw[-3:] == serial:
                    reply = int(raw[:-3])
                elif isinstance(raw, hiredis.ReplyError) or request is None:
                    self._handle_special_reply(raw, pending[0])
                    pending.popleft()
                    continue
                else:
                    reply = decode_reply(raw, serial)
                pending.popleft()
                awaited, number = caller
                awaited.notify(number, node, reply)
        except (hiredis.HiredisError, IndexError, UnexpectedReply, ValueError) as error:
            self._abort(error)
            return
        self._received_at = at = now()
        self._quick = CAN_SPIN and at - self._sent_at < QUICK


class AsyncioNodePool:
    """The connections of one event loop to several nodes."""

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.names = [target.node for target in targets]
        self._wires = [
            _PoolMultiplexer(target, timeout, node, self._flush)
            for node, target in enumerate(targets)
        ]
        self._unsent: list[bytes] = []
        """Requests to all nodes that are not written yet. Their replies are already expected."""
        self._first_timeout = math.inf
        """When the first of them times out."""
        self._serials = serials()
        self._timeout = timeout
        self._majority = len(targets) // 2 + 1
        self._reconnect_at = [0.0] * len(targets)
        self._failures: list[tuple[HoldfastError, float] | None] = [None] * len(targets)
        """The last connect error of each node, and when it occurred."""
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._waited = False

    async def send_all(self, posts: Sequence[Post], timeout: float, on_reply: OnReply) -> None:
        """As `Nodes.send_all`."""
        awaited = _AwaitedPosts(posts, on_reply, self._loop)
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
            packed = pack_evalsha(*request, serial)
            entry = (awaited, number), at, give_up, request, serial
            if all_open and len(nodes) == len(wires):
                for wire in wires:
                    wire.pending.append(entry)
                self._send(packed, give_up)
                continue
            for node in nodes:
                wire = wires[node]
                if wire.is_open:
                    wire.send(packed, entry)
                else:
                    awaited.notify(number, node, self._unavailable(node))
        # Each connection reports its own timeouts.
        if timeout and not awaited.over:
            await awaited.waiting

    def _send(self, packed: bytes, give_up: float) -> None:
        """Queue a request to all nodes."""
        unsent = self._unsent
        if not unsent:
            self._loop.call_soon(self._flush)
        unsent.append(packed)
        self._first_timeout = min(self._first_timeout, give_up)
        if len(unsent) >= FLUSH:
            self._flush()

    def _flush(self) -> None:
        if self._unsent:
            packed, give_up = b"".join(self._unsent), self._first_timeout
            self._unsent, self._first_timeout = [], math.inf
            for wire in self._wires:
                wire.write(packed, give_up)

    def _unavailable(self, node: int) -> HoldfastError:
        name, failure = self.names[node], self._failures[node]
        if failure is not None:
            return age_failure(failure[0], now() - failure[1])
        return Unconnected(f"{name} is not connected yet", node=name)

    async def _connect(self, end: float) -> None:
        """Open missing connections. Wait for a majority only the first time or if it is missing.

        Waits until shortly before `end`, so that the nodes that are connected can still reply.
        """
        at = now()
        grace, end = at + GRACE, end - min(GRACE, max(0.0, end - at) / 2)
        for node, wire in enumerate(self._wires):
            if not wire.is_open and node not in self._opening and at >= self._reconnect_at[node]:
                self._opening[node] = task = self._loop.create_task(self._open(node))
                task.add_done_callback(ignore_failure)
        if self._is_majority() and self._waited:
            return
        while self._opening and now() < end:
            limit = min(end, grace) if self._is_majority() else end
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
            self._reconnect_at[node] = at + retry_after(error)
        finally:
            del self._opening[node]

    async def drain(self) -> None:
        """Read late replies for at most `GRACE` seconds."""
        end = now() + GRACE
        while any(wire.pending for wire in self._wires) and now() < end:  # noqa: ASYNC110 - no common event
            await asyncio.sleep(0.001)

    def close(self) -> None:
        """Close the connections."""
        for wire in self._wires:
            wire.close()
