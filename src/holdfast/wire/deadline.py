"""Connections of redis-py of which all steps of connecting end by one deadline."""

from __future__ import annotations

import functools
import math
import socket
import traceback
from typing import Any

import redis.connection as threads

from holdfast.wire.clock import now
from holdfast.wire.diagnosis import plain_reply, plain_reply_async
from holdfast.wire.process import close_after_fork

LEAST_TIMEOUT = 0.001
"""Seconds that a step of connecting is given, even if the deadline has passed: redis-py may take 0
as no limit."""


class _Deadline:
    """A connection of redis-py whose steps of connecting all end by `end`.

    redis-py gives its whole timeout to each address of the host, to TLS, and to each reply.
    """

    host: str
    port: int
    end = math.inf
    reserve = 0.0
    """Seconds before the end that the TLS handshake must leave to what follows if it fails."""

    def _left(self) -> float:
        return max(LEAST_TIMEOUT, self.end - self.reserve - now())

    def _keep_deadline(self, timeout: float) -> None:
        """Ignore the timeouts that redis-py sets."""

    socket_timeout = socket_connect_timeout = property(_left, _keep_deadline)


class _BlockingDeadline(_Deadline):
    """The same for threads, where redis-py sets the socket's timeout once for all replies."""

    _sock: Any

    def _connect(self) -> Any:  # noqa: ANN401 - a socket, plain or of TLS
        try:
            sock = super()._connect()  # type: ignore[misc]  # a mixin
        except TimeoutError as error:
            _close_sockets_of(error)
            reply = plain_reply(self.host, self.port, self.reserve) if self.reserve else None
            raise reply or error from None
        except BaseException as error:
            _close_sockets_of(error)
            raise
        self.reserve = 0.0
        close_after_fork(sock)
        return sock

    def read_response(self, *args: Any, **settings: Any) -> Any:  # noqa: ANN401 - redis-py's
        """Read a reply by the deadline."""
        if self._sock is not None:
            self._sock.settimeout(self._left())
        return super().read_response(*args, **settings)  # type: ignore[misc]  # a mixin

    def release_deadline(self, timeout: float) -> None:
        """Give each operation of the socket `timeout` from now on: the connection is ready."""
        self._sock.settimeout(timeout)


class _LoopDeadline(_Deadline):
    """The same, on an event loop."""

    _writer: Any

    async def _connect(self) -> None:
        try:
            await super()._connect()  # type: ignore[misc]  # a mixin
        except TimeoutError as error:
            wanted = self.reserve > 0
            reply = await plain_reply_async(self.host, self.port, self.reserve) if wanted else None
            raise reply or error from None
        self.reserve = 0.0
        close_after_fork(self._writer)


@functools.cache
def with_deadline(face: Any, kind: str) -> Any:  # noqa: ANN401 - a class of either face
    """Return the class of redis-py's connections of this kind, with a deadline."""
    mixin = _BlockingDeadline if face is threads else _LoopDeadline
    return type(kind, (mixin, getattr(face, kind)), {})


def _close_sockets_of(error: BaseException) -> None:
    """Close the sockets that redis-py was connecting when this was raised.

    It leaves them to the garbage collector when it is interrupted; redis-py 5 also when there is no
    such unix socket, and when the settings for TLS are wrong. Other frames may be those of a signal
    handler, whose sockets are not ours.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in {"redis.connection", "ssl"}:
            for value in list(frame.f_locals.values()):
                if isinstance(value, socket.socket):
                    value.close()
