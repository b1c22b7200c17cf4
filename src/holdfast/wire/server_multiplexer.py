"""The connection of an event loop to one server, with scripts of the user and with replicas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import hiredis

from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.copies import confirmed, wait_for
from holdfast.wire.multiplexed import Future, Multiplexer
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, opened, pack
from holdfast.wire.sealed import check_seal, run_script, seal

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.packing import Command
    from holdfast.wire.sealed import Step

TURNS = 4
"""Turns of the loop within which it notices that a connection has ended."""


class ServerMultiplexer(Multiplexer):
    """What only a single server is asked for."""

    async def call_copied(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script whose answer counts once enough replicas have what it wrote.

        Until then nothing else is answered on this connection: give such calls one of their own.
        """
        give_up = now() + timeout
        if self._transport is None:
            give_up = await self.open(timeout)
        for pack_script in (by_sha, by_text):
            serial, wait = next(self._serials), wait_for(keys.replicas, max(0.0, give_up - now()))
            asked = self._ask(pack_script(script, keys, args, serial), give_up)
            try:
                answer, copies = await asyncio.gather(asked, self._ask(wait, give_up))
            except OutcomeUnknown as error:
                self._give_up(error)  # all behind it would only wait for its WAIT
                raise
            if not str(answer).startswith("NOSCRIPT"):
                break
        if isinstance(answer, hiredis.ReplyError):
            refused: Future[Reply] = Future(loop=self.loop)
            self._refused(str(answer), refused, give_up, keys)
            return await refused
        node, user = self._target.node, self._target.user
        try:
            reply = confirmed(opened(answer, serial), copies, keys.replicas, node, user)
        except StrayAnswer as error:
            self._give_up(error)
            raise self._unknown(error) from None
        if isinstance(reply, HoldfastError):
            self._doubt(reply)
            raise reply
        return reply

    def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Awaitable[Reply]:
        """Run a script; as `StepPort.step`."""
        if self._poll is not None and not self.unanswered and self._poll.poll(0):
            return self._step_anew((script, keys, args), timeout)
        if not script.serial:
            return self._sealed((script, keys, args), timeout)
        return self.call(script, keys, cast("tuple[str, ...]", args), timeout)

    async def _step_anew(self, step: Step, timeout: float) -> Reply:
        """Let the loop first read what came although nothing was asked: mostly, it is the end."""
        end, transport = now() + timeout, self._transport
        for _ in range(TURNS):
            if self._transport is not transport:
                break
            await asyncio.sleep(0)
        if not step[0].serial:
            return await self._sealed(step, max(0.0, end - now()))
        return await self.call(*cast("Request", step), max(0.0, end - now()))

    async def _sealed(self, step: Step, timeout: float, before: bytes = b"") -> Reply:
        give_up, node = now() + timeout, self._target.node
        said = run_script(step)
        command = next(said)
        try:
            while True:
                command = said.send(await self._ask_sealed(command, give_up, before))
        except StopIteration as done:
            reply = done.value
        except (OutcomeUnknown, StrayAnswer) as error:
            if isinstance(error, StrayAnswer):
                self._give_up(error)
            raise OutcomeUnknown(str(error), node=node) from None
        if isinstance(reply, hiredis.ReplyError):
            refused: Future[Reply] = Future(loop=self.loop)
            self._refused(str(reply), refused, give_up, step[1])
            return await refused
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    async def _ask_sealed(self, command: Command, give_up: float, before: bytes) -> object:
        # Again with each command: what went before it was refused, and changed nothing.
        if self._transport is None:
            await self.open(max(0.0, give_up - now()))
        serial = next(self._serials)
        packed = [pack(command), seal(serial)]
        # One after the other, with nothing in between.
        asked = [self._ask(each, give_up) for each in ([before, *packed] if before else packed)]
        *_, answer, sealed = await asyncio.gather(*asked)
        check_seal(sealed, serial)
        return answer
