"""redis-py connections that apply one deadline to all steps of connecting."""

from __future__ import annotations

import functools
import math
import socket
import traceback
from typing import Any

import redis.connection as threads

from holdfast.wire.clock import now
from holdfast.wire.diagnosis import probe_plaintext, probe_plaintext_async
from holdfast.wire.process import close_after_fork

LEAST_TIMEOUT = 0.001
"""The smallest timeout of a step, in seconds. redis-py may treat a timeout of 0 as no limit."""


class _Deadline:
    """A mixin for redis-py connections: all steps of connecting end by `end`.

    redis-py by itself applies its whole timeout to each address of the host, to TLS, and to each
    reply.
    """

    host: str
    port: int
    end = math.inf
    reserve = 0.0
    """Seconds that the TLS handshake leaves for `diagnosis.probe_plaintext`, in case it fails."""

    def _left(self) -> float:
        return max(LEAST_TIMEOUT, self.end - self.reserve - now())

    def _ignore_timeout(self, timeout: float) -> None:
        """Ignore the timeouts that redis-py sets."""

    socket_timeout = socket_connect_timeout = property(_left, _ignore_timeout)


class _BlockingDeadline(_Deadline):
    """The mixin for blocking connections. redis-py sets the socket timeout once for all replies."""

    _sock: Any

    def _connect(self) -> Any:  # noqa: ANN401 - a plain or TLS socket
        try:
            sock = super()._connect()  # type: ignore[misc]  # a mixin
        except TimeoutError as error:
            _close_sockets_of(error)
            reply = probe_plaintext(self.host, self.port, self.reserve) if self.reserve else None
            raise reply or error from None
        except BaseException as error:
            _close_sockets_of(error)
            raise
        self.reserve = 0.0
        close_after_fork(sock)
        return sock

    def read_response(self, *args: Any, **settings: Any) -> Any:  # noqa: ANN401 - redis-py's
        """Read a reply before the deadline."""
        if self._sock is not None:
            self._sock.settimeout(self._left())
        return super().read_response(*args, **settings)  # type: ignore[misc]  # a mixin

    def release_deadline(self, timeout: float) -> None:
        """End the deadline: the connection is ready. Apply `timeout` to each socket operation."""
        self._sock.settimeout(timeout)


class _LoopDeadline(_Deadline):
    """The mixin for asyncio connections."""

    _writer: Any

    async def _connect(self) -> None:
        try:
            await super()._connect()  # type: ignore[misc]  # a mixin
        except TimeoutError as error:
            wanted = self.reserve > 0
            reply = (
                await probe_plaintext_async(self.host, self.port, self.reserve) if wanted else None
            )
            raise reply or error from None
        self.reserve = 0.0
        close_after_fork(self._writer)


@functools.cache
def with_deadline(library: Any, kind: str) -> Any:  # noqa: ANN401 - a class of redis-py
    """Return redis-py's connection class of this name, with a deadline.

    `library` is `redis.connection` or `redis.asyncio.connection`.
    """
    mixin = _BlockingDeadline if library is threads else _LoopDeadline
    return type(kind, (mixin, getattr(library, kind)), {})


def _close_sockets_of(error: BaseException) -> None:
    """Close the sockets that redis-py was connecting when it raised `error`.

    An interrupted redis-py leaves them to the garbage collector. redis-py 5 does so, too, if a unix
    socket does not exist or TLS settings are wrong. Only frames of redis-py and ssl count: others
    may belong to a signal handler with sockets of the user.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in {"redis.connection", "ssl"}:
            for value in list(frame.f_locals.values()):
                if isinstance(value, socket.socket):
                    value.close()
