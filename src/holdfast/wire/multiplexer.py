"""One connection per event loop and server, which all tasks of the loop share.

Requests are written once per iteration of the loop, or as soon as `FLUSH` of them are queued. So
the server can process the first while the client packs the last. Replies arrive in the order of the
requests. The deque `pending` matches them, and the serial of each reply confirms the match. If a
caller is cancelled or times out, its entry stays in the deque, and its late reply is dropped.

redis-py opens the connection, with TLS, passwords and unix sockets. Then this object takes over the
transport. When the connection ends, all pending requests fail with `OutcomeUnknown`, and the next
request opens a new connection. The multiplexer ends the connection itself in three cases:

- A reply does not match. An error reply has no serial: it is held until an echo confirms the match
  (`wire.error_echo`).
- The oldest request has waited for the command timeout of the client.
- The oldest request has timed out earlier, and nothing was received in that time. A lock with a
  short ttl has short timeouts, and its next attempt needs another connection.

As in `wire.blocking_connection`, the loop does not sleep after quick replies: for `SPIN` seconds
after a write it keeps iterating.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.blocking_connection import CAN_SPIN, QUICK, SPIN
from holdfast.wire.clock import now
from holdfast.wire.diagnosis import no_reply_error
from holdfast.wire.error_echo import ErrorEcho, HeldError
from holdfast.wire.error_replies import (
    acl_error,
    atomic_probes,
    is_acl_denial,
    lock_probes,
    suggests_failover,
)
from holdfast.wire.packing import (
    UnexpectedReply,
    decode_reply,
    pack,
    pack_eval,
    pack_evalsha,
    serials,
)
from holdfast.wire.shared_task import ignore_failure
from holdfast.wire.target import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.target import Endpoint, Target

FLUSH = 16
"""The number of queued requests that are written before the loop's iteration ends."""

LAG = 0.05
"""Seconds by which a timer may be late before the loop counts as blocked."""

LEAST_SILENCE = 0.2
"""Seconds without any reply after which a connection counts as lost, at least. A shared connection
is not closed because of a request with a shorter timeout."""

Future = asyncio.Future
PendingReply: TypeAlias = "tuple[Any, float, float, Request | None, bytes]"
"""An expected reply: the caller's future (or what `_future_of` accepts), when the request was made,
when it times out, the request, and its serial."""


class Multiplexer(asyncio.Protocol):
    """The connection of one event loop to one server."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._opening: asyncio.Task[None] | None = None
        self._probing: set[asyncio.Task[None]] = set()
        self._can_fail_over = target.longest_ttl < math.inf
        self._reset()
        target.observe_failover(self)

    def _reset(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.is_open = False
        self._writer: Any = None
        self._poll: select.poll | None = None
        self._reader = hiredis.Reader()
        self._unsent: list[bytes] = []
        self._serials = serials()
        self.pending: deque[PendingReply] = deque()
        """The expected replies, in order."""
        self._timer: asyncio.TimerHandle | None = None
        self._check_at = math.inf
        self._sent_at = 0.0
        self._received_at = -math.inf
        self._spinning = self._quick = self._lagged = False

    # Opening and closing

    async def open(self, timeout: float) -> float:
        """Connect. Concurrent callers share one attempt, which a cancelled caller does not stop.

        Return when `timeout` expires. The time to start the embedded server does not count.
        """
        node = self._target.node
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=node)
        if self._target.prepare is not None:
            await self.loop.run_in_executor(None, self._target.prepare)
        end = now() + timeout
        if self._transport is not None:
            return end
        if self._opening is None or self._opening.done():
            self._opening = self.loop.create_task(self._connect())
            self._opening.add_done_callback(ignore_failure)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._opening)
        except TimeoutError:
            raise self._target.timeout_error() from None
        if self._transport is None:
            raise NodeUnavailable(f"{node} closed the connection", node=node)
        return end

    async def _connect(self) -> None:
        connection = await self._target.connect_async(self._timeout)
        # A private name of redis-py, tested with the oldest and newest supported versions.
        self._writer = connection._writer  # noqa: SLF001 - its finalizer closes the transport
        connection._reader = connection._writer = None  # noqa: SLF001 - this object owns it now
        transport: asyncio.Transport = self._writer.transport
        transport.set_protocol(self)
        sock = transport.get_extra_info("socket")
        if CAN_SPIN and sock is not None:
            self._poll = select.poll()
            self._poll.register(sock.fileno(), select.POLLIN)
        self._endpoint = endpoint_of(connection)
        self._transport, self.is_open = transport, True
        if self.closed:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all pending requests with `OutcomeUnknown`."""
        self._fail(error or ConnectionResetError("the connection was closed"))

    def _fail(self, error: Exception) -> None:
        pending = self.pending
        if self._timer is not None:
            self._timer.cancel()
        self._reset()
        for caller, *_ in pending:
            future = self._future_of(caller)
            if not future.done():
                future.set_exception(self._unknown(error))

    def _future_of(self, caller: Any) -> Any:  # noqa: ANN401 - a future, or the like
        """Return the future of a caller."""
        return caller

    def _abort(self, error: Exception) -> None:
        if self._transport is not None:
            self._transport.set_protocol(asyncio.Protocol())
            self._transport.abort()
        self._fail(error)

    def endpoint_changed(self, endpoint: Endpoint) -> None:
        """Disconnect from a server that is not `endpoint`. Called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._disconnect_unless, endpoint)

    def _disconnect_unless(self, endpoint: Endpoint | None) -> None:
        if self._transport is not None and self._endpoint != endpoint:
            self._abort(ConnectionResetError("another server has replaced it"))

    def _unknown(self, error: object) -> OutcomeUnknown:
        return no_reply_error(self._target.node, error)

    def close(self) -> None:
        """Close the connection. Pending requests fail with `OutcomeUnknown`."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # Requests

    def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Awaitable[Reply]:
        """Run a script on the server, once; as `holdfast.port.Call`."""
        if self._transport is None:
            return self._call_first((script, keys, args), timeout)
        # The hottest path of the client: `send`, inlined.
        future: Future[Reply] = Future(loop=self.loop)
        serial, at, unsent = next(self._serials), now(), self._unsent
        give_up = at + timeout
        self.pending.append((future, at, give_up, (script, keys, args), serial))
        if not unsent:
            self.loop.call_soon(self._flush)
        unsent.append(pack_evalsha(script, keys, args, serial))
        if len(unsent) >= FLUSH:
            self._flush()
        if give_up < self._check_at:
            self._schedule_check(give_up)
        return future

    async def _call_first(self, request: Request, timeout: float) -> Reply:
        end = await self.open(timeout)
        return await self.call(*request, max(0.0, end - now()))

    def _send_raw(self, packed: bytes, give_up: float) -> Future[Any]:
        """Send a command, and return a future of its raw reply."""
        future: Future[Any] = Future(loop=self.loop)
        self.send(packed, (future, now(), give_up, None, b"bare"))
        return future

    def send(self, packed: bytes, entry: PendingReply) -> None:
        """Send a request, and expect its reply. Call it only if the connection `is_open`."""
        unsent = self._unsent
        self.pending.append(entry)
        if not unsent:
            self.loop.call_soon(self._flush)
        unsent.append(packed)
        if len(unsent) >= FLUSH:
            self._flush()
        if entry[2] < self._check_at:
            self._schedule_check(entry[2])

    def write(self, packed: bytes, give_up: float) -> None:
        """Write requests that are already in `pending`. The first times out at `give_up`."""
        if self.is_open:
            self._unsent.append(packed)
            self._flush()
            if give_up < self._check_at:
                self._schedule_check(give_up)

    def _flush(self) -> None:
        if not self._unsent or self._transport is None:
            return
        packed, self._unsent = self._unsent, []
        self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))
        self._sent_at = now()
        if self._quick and not self._spinning:
            self._spinning = True
            self.loop.call_soon(self._spin)

    def _spin(self) -> None:
        if self.pending and now() < self._sent_at + SPIN:
            self.loop.call_soon(self._spin)
        else:
            self._spinning = False

    # Replies

    def data_received(self, data: bytes) -> None:
        """Pass each reply to its caller."""
        gets, pending = self._reader.gets, self.pending
        self._reader.feed(data)
        try:
            while (raw := gets()) is not False:
                # Removed only after the check. If the reply does not match, this caller fails too.
                future, _, _, request, serial = pending[0]
                # `decode_reply`, inlined for the most common replies.
                if type(raw) is bytes and raw[-3:] == serial:
                    reply = int(raw[:-3])
                elif isinstance(raw, hiredis.ReplyError) or request is None:
                    self._handle_special_reply(raw, pending[0])
                    pending.popleft()
                    continue
                else:
                    reply = decode_reply(raw, serial)
                pending.popleft()
                if not future.done():
                    future.set_result(reply)
        except (hiredis.HiredisError, IndexError, UnexpectedReply, ValueError) as error:
            self._abort(error)
            return
        self._received_at = at = now()
        self._quick = CAN_SPIN and at - self._sent_at < QUICK

    def _handle_special_reply(self, raw: object, entry: PendingReply) -> None:
        """Handle a reply without a serial: an error reply, or a raw reply.

        If its request has already timed out, the reply may belong to another request. Then the
        connection must end.
        """
        caller, _, give_up, request, _ = entry
        future, text = self._future_of(caller), str(raw)
        if future.cancelled():
            return
        if future.done():
            raise UnexpectedReply
        if request is None:
            future.set_result(raw)
            return
        echo = ErrorEcho(text, next(self._serials))
        held = HeldError(future, echo, lambda: self._handle_error(text, caller, give_up, request))
        self.send(echo.pack(), (held, now(), give_up, None, b"bare"))

    def _handle_error(self, text: str, caller: Any, give_up: float, request: Request) -> None:  # noqa: ANN401 - as `_future_of`
        """Handle the error reply to this request."""
        if text.startswith("NOSCRIPT"):
            serial = next(self._serials)
            self.send(pack_eval(*request, serial), (caller, now(), give_up, request, serial))
        else:
            self._handle_error_reply(text, self._future_of(caller), give_up, request[1])

    def _handle_error_reply(
        self, text: str, future: Future[Any], give_up: float, keys: Keys
    ) -> None:
        if is_acl_denial(text):
            task = self.loop.create_task(self._probe_permissions(text, future, give_up, keys))
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)
            return
        error = self._target.error_for_reply(text)
        future.set_exception(error)
        self._reconnect_if_failed_over(error)

    def _reconnect_if_failed_over(self, error: HoldfastError) -> None:
        """Disconnect after a reply that suggests a failover, so that the primary is looked up."""
        if self._can_fail_over and suggests_failover(error):
            self.loop.call_soon(self._disconnect_unless, None)

    async def _probe_permissions(
        self, text: str, future: Future[Reply], give_up: float, keys: Keys
    ) -> None:
        which = atomic_probes if keys.spare else lock_probes
        futures = [self._send_raw(pack(probe), give_up) for probe in which(keys)]
        replies = await asyncio.gather(*futures, return_exceptions=True)
        if not future.done():
            node, user = self._target.node, self._target.user
            future.set_exception(acl_error(text, replies, keys, node, user))

    # Timeouts

    def _schedule_check(self, at: float) -> None:
        """Check the pending requests for timeouts at `at`, or earlier."""
        if self._timer is not None:
            self._timer.cancel()
        self._check_at = at
        self._timer = self.loop.call_later(at - now(), self._check_timeouts, at)

    def _check_timeouts(self, due: float) -> None:
        at = now()
        self._timer, self._check_at = None, math.inf
        if not self.pending:
            return
        if at > due + LAG and not self._lagged:
            # The loop was blocked: earlier requests may have been written only now.
            self._lagged = True
            self._schedule_check(at + LAG)
            return
        self._lagged = False
        if self._is_lost(at):
            self._abort(TimeoutError())
            return
        for caller, _, give_up, *_ in self.pending:
            if give_up <= at and not self._future_of(caller).done():
                self._future_of(caller).set_exception(self._unknown(TimeoutError()))
        waiting = [give_up for _, _, give_up, *_ in self.pending if give_up > at]
        self._schedule_check(min(waiting, default=at + self._timeout))

    def _is_lost(self, at: float) -> bool:
        """Whether the oldest request shows that no reply will arrive on this connection."""
        _, made_at, give_up, *_ = self.pending[0]
        if at - made_at >= self._timeout:
            return True
        silence = at - max(made_at, self._received_at)
        return at >= give_up and silence >= max(LEAST_SILENCE, give_up - made_at)
