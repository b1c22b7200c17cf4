"""Matching of error replies to their requests, on connections that many requests share.

An error reply has no serial. If the network loses the reply to request A, and request B fails, the
error arrives in the place of A's reply. Its caller would conclude that A was not executed, and
would not release the lock that A was granted.

So an error reply is held, and a PING with a serial is sent behind all pending requests. If its
reply arrives in the expected place, no reply before it was lost or duplicated, and the error is
delivered. If not, the connection ends, and the outcome of all pending requests is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis

from holdfast.wire.echo_framing import pack_echo
from holdfast.wire.error_replies import denied_command, error_for_reply
from holdfast.wire.packing import UnexpectedReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.errors import HoldfastError
    from holdfast.port import Request


class ErrorEcho(NamedTuple):
    """An error reply that is held, and the serial of the PING that follows its request."""

    text: str
    serial: bytes

    def pack(self) -> bytes:
        """Pack the PING.

        Raises:
            UnexpectedReply: the error is the reply to such a PING, not to the request.
        """
        if _denies_ping(self.text):
            raise UnexpectedReply
        return pack_echo(self.serial)

    def check(self, reply: object) -> None:
        """Check the reply to the PING. It may be that the user has no permission for PING.

        Raises:
            UnexpectedReply: it is another reply, or may be one.
        """
        if isinstance(reply, hiredis.ReplyError):
            if not _denies_ping(str(reply)):  # such as BUSY, the reply to any request
                raise UnexpectedReply(str(error_for_reply(self.text, "perhaps it")))
        elif reply != self.serial:
            raise UnexpectedReply


def _denies_ping(text: str) -> bool:
    """Whether this replies to a PING: no script of holdfast contains that command."""
    return denied_command(text) == "ping"


class HeldRequest(NamedTuple):
    """A request with an error reply that is held."""

    request: Request
    echo: ErrorEcho


class HeldError:
    """The interface of a future for the reply to the PING; see `multiplexer.PendingReply`."""

    def __init__(self, future: Any, echo: ErrorEcho, deliver: Callable[[], None]) -> None:  # noqa: ANN401 - a future, or the like
        self._echo = echo
        self._deliver = deliver
        self.done: Callable[[], bool] = future.done
        self.cancelled: Callable[[], bool] = future.cancelled
        self.set_exception: Callable[[HoldfastError], None] = future.set_exception

    def set_result(self, reply: object) -> None:
        """Deliver the error.

        Raises:
            UnexpectedReply: it may be the reply to another request.
        """
        self._echo.check(reply)
        self._deliver()
