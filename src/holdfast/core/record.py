"""What is stored beside the lock of a kind: the result of work, or the last start of a job.

A record names the run that stored it. It is deleted only if it is still the one that was read. So a
request that arrives late, or twice, deletes no record of a later run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.atomic import check_reply
from holdfast.core.retry import retry
from holdfast.errors import NodeUnavailable, OutcomeUnknown
from holdfast.keys import Keys, siblings_of
from holdfast.scripts import COMPARE_AND_DELETE, READ

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec
    from holdfast.port import AtomicPort


class Record:
    """The record beside one lock. Its key is the last one of the lock."""

    __slots__ = ("_key", "_keys", "_name", "_port", "_timeout")

    def __init__(self, port: AtomicPort, lock: LockSpec) -> None:
        self._port = port
        self._timeout = lock.command_timeout
        self._name = lock.name
        self._key = lock.keys[-1]
        self._keys = Keys((self._key,), spare=siblings_of(self._key) + b":absent")

    async def read(self) -> bytes | None:
        """Return the record; None if there is none.

        Raises:
            NodeUnavailable: the server does not reply.
            WrongValue, ConfigurationError: the key has another type, or the server refuses this.
        """
        try:
            reply, _ = await retry(self._port.step, (READ, self._keys, (), self._timeout))
        except (OutcomeUnknown, NodeUnavailable) as error:
            message = f"what is stored for {self._name!r} cannot be read: {error}"
            raise NodeUnavailable(message, lock=self._name, node=error.node) from None
        found: bytes | None = check_reply(reply, self._key)[1]
        return found

    async def forget(self) -> None:
        """Delete the record that is there now.

        Raises:
            OutcomeUnknown: the server did not reply; the call can be repeated.
            NodeUnavailable, WrongValue, ConfigurationError: as `read`; nothing was deleted.
        """
        record = await self.read()
        if record is None:
            return
        request = COMPARE_AND_DELETE, self._keys, (record,), self._timeout
        try:
            await retry(self._port.step, request)
        except (OutcomeUnknown, NodeUnavailable) as error:
            might = "may or may not have been" if isinstance(error, OutcomeUnknown) else "was not"
            message = f"what is stored for {self._name!r} {might} deleted: {error}; call this again"
            raise type(error)(message, lock=self._name, node=error.node) from None
