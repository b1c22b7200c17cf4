"""The connection of an event loop to one server, with user scripts and replication."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import hiredis

from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.echo_framing import check_echo, pack_echo, run_user_script
from holdfast.wire.error_echo import ErrorEcho
from holdfast.wire.multiplexer import Future, Multiplexer
from holdfast.wire.packing import UnexpectedReply, decode_reply, pack, pack_eval, pack_evalsha
from holdfast.wire.replication import check_replication, pack_wait

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.echo_framing import Step
    from holdfast.wire.packing import Command

CLOSE_DETECTION_ITERATIONS = 4
"""Iterations of the loop within which it detects that a connection has ended."""


class ServerMultiplexer(Multiplexer):
    """A multiplexer with the requests that only a single server or cluster node receives."""

    async def call_replicated(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script, and wait until enough replicas have its writes.

        WAIT blocks the connection, so use a dedicated connection for such calls.
        """
        give_up = now() + timeout
        if self._transport is None:
            give_up = await self.open(timeout)
        for pack_script in (pack_evalsha, pack_eval):
            serial, wait = next(self._serials), pack_wait(keys.replicas, max(0.0, give_up - now()))
            future = self._send_raw(pack_script(script, keys, args, serial), give_up)
            try:
                raw, acked = await asyncio.gather(future, self._send_raw(wait, give_up))
            except OutcomeUnknown as error:
                self._abort(error)  # its WAIT blocks all later requests
                raise
            if isinstance(raw, hiredis.ReplyError):
                await self._confirm_error(str(raw), give_up)
            if not str(raw).startswith("NOSCRIPT"):
                break
        if isinstance(raw, hiredis.ReplyError):
            refused: Future[Reply] = Future(loop=self.loop)
            self._handle_error_reply(str(raw), refused, give_up, keys)
            return await refused
        node, user = self._target.node, self._target.user
        try:
            reply = check_replication(decode_reply(raw, serial), acked, keys.replicas, node, user)
        except UnexpectedReply as error:
            self._abort(error)
            raise self._unknown(error) from None
        if isinstance(reply, HoldfastError):
            self._reconnect_if_failed_over(reply)
            raise reply
        return reply

    async def _confirm_error(self, text: str, give_up: float) -> None:
        """Raise `OutcomeUnknown` if this error reply may belong to another request."""
        try:
            echo = ErrorEcho(text, next(self._serials))
            echo.check(await self._send_raw(echo.pack(), give_up))
        except UnexpectedReply as error:
            self._abort(error)
            raise self._unknown(error) from None

    def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Awaitable[Reply]:
        """Run a script; as `AtomicPort.step`."""
        if self._poll is not None and not self.pending and self._poll.poll(0):
            return self._step_after_read((script, keys, args), timeout)
        if not script.serial:
            return self._run_framed((script, keys, args), timeout)
        return self.call(script, keys, cast("tuple[str, ...]", args), timeout)

    async def _step_after_read(self, step: Step, timeout: float) -> Reply:
        """Let the loop read unexpected input first. Usually it is the end of the connection."""
        end, transport = now() + timeout, self._transport
        for _ in range(CLOSE_DETECTION_ITERATIONS):
            if self._transport is not transport:
                break
            await asyncio.sleep(0)
        if not step[0].serial:
            return await self._run_framed(step, max(0.0, end - now()))
        return await self.call(*cast("Request", step), max(0.0, end - now()))

    async def _run_framed(self, step: Step, timeout: float, before: bytes = b"") -> Reply:
        give_up, node = now() + timeout, self._target.node
        dialogue = run_user_script(step)
        command = next(dialogue)
        try:
            while True:
                command = dialogue.send(await self._send_framed(command, give_up, before))
        except StopIteration as done:
            reply = done.value
        except (OutcomeUnknown, UnexpectedReply) as error:
            if isinstance(error, UnexpectedReply):
                self._abort(error)
            raise OutcomeUnknown(str(error), node=node) from None
        if isinstance(reply, hiredis.ReplyError):
            refused: Future[Reply] = Future(loop=self.loop)
            self._handle_error_reply(str(reply), refused, give_up, step[1])
            return await refused
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    async def _send_framed(self, command: Command, give_up: float, before: bytes) -> object:
        # Connect again if needed: an earlier command was rejected without any effect.
        if self._transport is None:
            await self.open(max(0.0, give_up - now()))
        serial = next(self._serials)
        packed = [pack(command), pack_echo(serial)]
        # The three must be adjacent.
        futures = [
            self._send_raw(each, give_up) for each in ([before, *packed] if before else packed)
        ]
        *_, raw, echo = await asyncio.gather(*futures)
        check_echo(echo, serial)
        return raw
