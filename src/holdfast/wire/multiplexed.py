"""The connection for an event loop: one, which all its tasks share.

Requests are written together, once a turn of the loop, or as soon as `FLUSH` of them have come
together, so that the server works on the first while the last are still being made. Answers come
in the order of the requests: a deque matches them, and each answer's serial proves the match. A
caller that was cancelled, or whose time was up, leaves its place in the deque, and the late answer
is dropped there.

redis-py opens the connection (TLS, passwords, unix sockets); then this object takes its transport
over. When the connection ends, everything without an answer fails as `OutcomeUnknown`, and the
next request opens a new one. It is ended here when an answer is not the one whose turn it is, and
when the one whose turn it is has waited for a whole timeout of the client.

As in `wire.blocking`, a server on this machine is not slept for: for `SPIN` seconds after a write
the loop is kept turning, if answers have been quick.
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
from holdfast.wire.clock import now
from holdfast.wire.diagnosis import unanswered
from holdfast.wire.link import CAN_SPIN, QUICK, SPIN
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, opened, pack, serials
from holdfast.wire.refusals import denial, is_denial, is_doubtful, probes, probes_of_step
from holdfast.wire.target import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.target import Endpoint, Target

FLUSH = 16
"""Requests that are written without waiting for the end of the loop's turn."""

LAG = 0.05
"""Seconds by which the loop may be late before it counts as having been blocked."""

Future = asyncio.Future
Place: TypeAlias = "tuple[Any, float, float, Request | None, bytes]"
"""Whose turn it is: the caller's future (or what stands for it: see `_future`), when it asked and
gives up, what it asked, and the serial."""


class Multiplexer(asyncio.Protocol):
    """One node's connection on one event loop."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._opening: asyncio.Task[None] | None = None
        self._explaining: set[asyncio.Task[None]] = set()
        self._moves = target.longest_ttl < math.inf
        """Commands for which the connection was ended."""
        self._begin()
        target.followed_by(self)

    def _begin(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.is_open = False
        self._writer: Any = None
        self._poll: select.poll | None = None
        self._reader = hiredis.Reader()
        self._unsent: list[bytes] = []
        self._serials = serials()
        self.unanswered: deque[Place] = deque()
        """Whose answers are to come, in order."""
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = math.inf
        self._sent_at = 0.0
        self._spinning = self._quick = self._lagged = False

    # The connection's life

    @property
    def owes(self) -> bool:
        """Whether some answer is to come."""
        return bool(self.unanswered)

    async def open(self, timeout: float) -> float:
        """Connect, once for all callers that wait for it; one that gives up does not stop it.

        Returns when `timeout` is over. Starting the embedded server takes none of that time.
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
            self._opening.add_done_callback(seen)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._opening)
        except TimeoutError:
            raise self._target.too_slow() from None
        if self._transport is None:
            raise NodeUnavailable(f"{node} hung up", node=node)
        return end

    async def _connect(self) -> None:
        connection = await self._target.connect_async(self._timeout)
        # redis-py has no public name for it; the oldest and newest supported both have this one.
        self._writer = connection._writer  # noqa: SLF001 - would close the transport if collected
        connection._reader = connection._writer = None  # noqa: SLF001 - it is ours from here on
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
        """Fail, as unknown, whatever has no answer."""
        self._fail(error or ConnectionResetError("the connection was closed"))

    def _fail(self, error: Exception) -> None:
        unanswered = self.unanswered
        if self._timer is not None:
            self._timer.cancel()
        self._begin()
        for asked, *_ in unanswered:
            future = self._future(asked)
            if not future.done():
                future.set_exception(self._unknown(error))

    def _future(self, asked: Any) -> Any:  # noqa: ANN401 - or what is as good as one
        """The future of who asked."""
        return asked

    def _give_up(self, error: Exception) -> None:
        if self._transport is not None:
            self._transport.set_protocol(asyncio.Protocol())
            self._transport.abort()
        self._fail(error)

    def moved(self, endpoint: Endpoint) -> None:
        """Leave a server that is not `endpoint`; called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is gone
            self.loop.call_soon_threadsafe(self._leave_for, endpoint)

    def _leave_for(self, endpoint: Endpoint | None) -> None:
        if self._transport is not None and self._endpoint != endpoint:
            self._give_up(ConnectionResetError("another server took its place"))

    def _unknown(self, error: object) -> OutcomeUnknown:
        return unanswered(self._target.node, error)

    def close(self) -> None:
        """Close the connection; requests under way end as unknown."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # Requests

    def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Awaitable[Reply]:
        """Run a script on the node, once; as `Port.call`."""
        if self._transport is None:
            return self._call_first((script, keys, args), timeout)
        # The most travelled road of all: `send`, written out.
        future: Future[Reply] = Future(loop=self.loop)
        serial, at, unsent = next(self._serials), now(), self._unsent
        give_up = at + timeout
        self.unanswered.append((future, at, give_up, (script, keys, args), serial))
        if not unsent:
            self.loop.call_soon(self._flush)
        unsent.append(by_sha(script, keys, args, serial))
        if len(unsent) >= FLUSH:
            self._flush()
        if give_up < self._look_at:
            self._look(give_up)
        return future

    async def _call_first(self, request: Request, timeout: float) -> Reply:
        end = await self.open(timeout)
        return await self.call(*request, max(0.0, end - now()))

    def _ask(self, packed: bytes, give_up: float) -> Future[Any]:
        """Send something whose answer is wanted as it comes."""
        future: Future[Any] = Future(loop=self.loop)
        self.send(packed, (future, now(), give_up, None, b"bare"))
        return future

    def send(self, packed: bytes, place: Place) -> None:
        """Send a request, and remember whose it is; only while it `is_open`."""
        unsent = self._unsent
        self.unanswered.append(place)
        if not unsent:
            self.loop.call_soon(self._flush)
        unsent.append(packed)
        if len(unsent) >= FLUSH:
            self._flush()
        if place[2] < self._look_at:
            self._look(place[2])

    def write(self, packed: bytes, give_up: float) -> None:
        """Write requests whose places are taken, the first of which gives up then."""
        if self.is_open:
            self._unsent.append(packed)
            self._flush()
            if give_up < self._look_at:
                self._look(give_up)

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
        if self.unanswered and now() < self._sent_at + SPIN:
            self.loop.call_soon(self._spin)
        else:
            self._spinning = False

    # Answers

    def data_received(self, data: bytes) -> None:
        """Hand each answer to the one whose turn it is."""
        gets, unanswered = self._reader.gets, self.unanswered
        self._reader.feed(data)
        try:
            while (answer := gets()) is not False:
                # Taken off last: whoever it is fails with the rest if the answer is not theirs.
                future, _, _, request, serial = unanswered[0]
                # `opened`, written out for the most of them.
                if type(answer) is bytes and answer[-3:] == serial:
                    reply = int(answer[:-3])
                elif isinstance(answer, hiredis.ReplyError) or request is None:
                    self._answered_oddly(answer, unanswered[0])
                    unanswered.popleft()
                    continue
                else:
                    reply = opened(answer, serial)
                unanswered.popleft()
                if not future.done():
                    future.set_result(reply)
        except (hiredis.HiredisError, IndexError, StrayAnswer, ValueError) as error:
            self._give_up(error)
            return
        self._quick = CAN_SPIN and now() - self._sent_at < QUICK

    def _answered_oddly(self, answer: object, place: Place) -> None:
        """Deal with an error reply, and with the answer to a probe.

        It carries no serial. If nobody answered its request in time, it may be another's: then the
        answers are out of step, and only a new connection helps.
        """
        asked, _, give_up, request, _ = place
        future, text = self._future(asked), str(answer)
        if future.cancelled():
            return
        if future.done():
            raise StrayAnswer
        if request is None:
            future.set_result(answer)
        elif text.startswith("NOSCRIPT"):
            serial = next(self._serials)
            self.send(by_text(*request, serial), (asked, now(), give_up, request, serial))
        else:
            self._refused(text, future, give_up, request[1])

    def _refused(self, text: str, future: Future[Any], give_up: float, keys: Keys) -> None:
        if is_denial(text):
            task = self.loop.create_task(self._explain(text, future, give_up, keys))
            self._explaining.add(task)
            task.add_done_callback(self._explaining.discard)
            return
        error = self._target.refusal(text)
        future.set_exception(error)
        self._doubt(error)

    def _doubt(self, error: HoldfastError) -> None:
        """After an answer that another server might not have given, ask anew which one it is."""
        if self._moves and is_doubtful(error):
            self.loop.call_soon(self._leave_for, None)

    async def _explain(self, text: str, future: Future[Reply], give_up: float, keys: Keys) -> None:
        which = probes_of_step if keys.spare else probes
        asked = [self._ask(pack(probe), give_up) for probe in which(keys)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        if not future.done():
            node, user = self._target.node, self._target.user
            future.set_exception(denial(text, answers, keys, node, user))

    # Answers that do not come

    def _look(self, at: float) -> None:
        """See to it that requests without an answer are looked at no later than `at`."""
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = at
        self._timer = self.loop.call_later(at - now(), self._overdue, at)

    def _overdue(self, due: float) -> None:
        at = now()
        self._timer, self._look_at = None, math.inf
        if not self.unanswered:
            return
        if at > due + LAG and not self._lagged:
            # The loop was blocked: what was asked before may have been written only now.
            self._lagged = True
            self._look(at + LAG)
            return
        self._lagged = False
        if at - self.unanswered[0][1] >= self._timeout:
            self._give_up(TimeoutError())
            return
        for asked, _, give_up, *_ in self.unanswered:
            if give_up <= at and not self._future(asked).done():
                self._future(asked).set_exception(self._unknown(TimeoutError()))
        waiting = [give_up for _, _, give_up, *_ in self.unanswered if give_up > at]
        self._look(min(waiting, default=at + self._timeout))


def seen(task: asyncio.Task[None]) -> None:
    """Take note of a failed connect that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
