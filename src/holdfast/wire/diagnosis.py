"""Why there is no connection, or no reply: what happened, and what to do about it.

The text of `why_unreachable` does not name the server: the caller that raises the error does, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from typing import TYPE_CHECKING

import redis

from holdfast.errors import OutcomeUnknown
from holdfast.wire.clock import now

if TYPE_CHECKING:
    from collections.abc import Iterator

_HANGS = "it hangs (it is stopped, swaps, or runs a long command), or the network is down"
NO_REPLY = f"no reply in time: {_HANGS}"

_REFUSED = "connection refused: start the server, or correct the address"
_NO_TLS = "Write redis:// if it does not use TLS"
_CLOSED = (
    "it closed the connection before its first reply: write rediss:// if it expects TLS, or see "
    "its log"
)
_CLOSED_TLS = (
    f"it closed the connection during the TLS handshake. {_NO_TLS}, or give ssl_certfile= and "
    "ssl_keyfile= if it asks for a client certificate"
)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
"""How OpenSSL reports an answer that is not TLS; different versions use different names."""
_PING, _TO_PING = b"PING\r\n", (b"+", b"-")
_HUNG_UP = ("Connection closed by server", "EOF occurred", "UNEXPECTED_EOF")


def too_slow(*, tls: bool) -> str:
    """Say that a connection was not ready in time, without knowing which step hung."""
    return f"no reply in time. {_NO_TLS}; otherwise {_HANGS}" if tls else NO_REPLY


def plain_reply(host: str, port: int, timeout: float) -> ssl.SSLError | None:
    """Find out whether a server that did not answer a TLS handshake answers without TLS.

    Redis and Valkey wait for the end of a line, which a handshake need not contain. So they do not
    answer it, as if they hung.
    """
    end = now() + timeout
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout) as plain:
        plain.sendall(_PING)
        plain.settimeout(max(0.001, end - now()))
        return _judge(plain.recv(1))
    return None


async def plain_reply_async(host: str, port: int, timeout: float) -> ssl.SSLError | None:
    """Find out the same on the running event loop."""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_PING)
                return _judge(await reader.read(1))
            finally:
                writer.close()
    return None


def _judge(reply: bytes) -> ssl.SSLError | None:
    """Make OpenSSL's error for a reply that is not TLS. An alert of TLS begins with 0x15."""
    return ssl.SSLError(f"{_NOT_TLS[0]}: it answers without TLS") if reply in _TO_PING else None


def unanswered(node: str, error: object) -> OutcomeUnknown:
    """Make the error for a request that was sent, and may have been carried out or not."""
    if isinstance(error, (BlockingIOError, TimeoutError)):
        error = NO_REPLY
    return OutcomeUnknown(f"{node} did not answer: {error}", node=node)


def why_unreachable(error: Exception, *, tls: bool, timeout: float) -> str:
    """Say why a server could not be connected to within `timeout`, and the remedy."""
    causes = list(_causes(error))
    texts = " ".join(map(str, causes))
    for cause in causes:
        words = _of_system(cause) or (_of_tls(cause) if isinstance(cause, ssl.SSLError) else "")
        if words:
            return words
    if f"[Errno {errno.ECONNREFUSED}]" in texts:  # asyncio's, of a host with several addresses
        return _REFUSED
    if any(isinstance(cause, (TimeoutError, redis.TimeoutError)) for cause in causes):
        return _too_late(texts, tls=tls, timeout=timeout)
    if "Protocol error" in texts:
        return _of_protocol(texts)
    reset = any(isinstance(cause, ConnectionError) for cause in causes)
    if reset or any(sign in texts for sign in _HUNG_UP):
        return _CLOSED_TLS if tls else _CLOSED
    return _said_by_system(causes) or str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _of_system(cause: BaseException) -> str:
    if isinstance(cause, socket.gaierror):
        return f"its host name does not resolve ({cause.strerror}): correct the name, or check DNS"
    if isinstance(cause, ConnectionRefusedError):
        return _REFUSED
    if isinstance(cause, FileNotFoundError):
        return "there is no such socket: start the server, or correct the path"
    if isinstance(cause, PermissionError):
        return f"{cause.strerror}: give this user permission to connect"
    return ""


def _of_tls(cause: ssl.SSLError) -> str:
    text = str(cause)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({cause.verify_message}): give ssl_ca_certs=, the "
            "file with the certificate of the CA that signed it"
        )
    if any(sign in text for sign in _NOT_TLS):
        return "what answers there does not speak TLS: write redis://, or give the TLS port"
    if "CERTIFICATE_REQUIRED" in text:
        return "it requires a client certificate: give ssl_certfile= and ssl_keyfile="
    return ""


def _too_late(texts: str, *, tls: bool, timeout: float) -> str:
    if "connecting" in texts and not tls:
        return f"no connection within {timeout:g} s: its host is down, or a firewall is in between"
    return too_slow(tls=tls)


def _of_protocol(texts: str) -> str:
    if 'got "H"' in texts:
        return "an HTTP server answers there: give the port of Redis or Valkey"
    if r'got "\x15"' in texts:
        return "it expects TLS: write rediss://"
    return "what answers there does not speak the protocol of Redis: give the port of a server"


def _said_by_system(causes: list[BaseException]) -> str:
    said = [cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror]
    return said[-1] if said else ""
