"""Messages for failed connections and missing replies: what happened, and what to do about it.

`unreachable_reason` does not name the server, because the error that contains its text does.
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

HANGS = "it hangs (it is stopped, swaps, or runs a long command), or the network is down"
NO_REPLY = f"no reply in time: {HANGS}"

_REFUSED = "connection refused: start the server, or correct the address"
_NO_TLS = "Write redis:// if it does not use TLS"
_CLOSED = (
    "it closed the connection before its first reply: write rediss:// if it expects TLS, or see "
    "its log"
)
_CLOSED_TLS = (
    f"it closed the connection during the TLS handshake. {_NO_TLS}, or give ssl_certfile= and "
    "ssl_keyfile= if it requires a client certificate"
)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
"""How versions of OpenSSL report a reply that is not TLS."""
_PING, _TO_PING = b"PING\r\n", (b"+", b"-")
_CLOSED_SIGNS = ("Connection closed by server", "EOF occurred", "UNEXPECTED_EOF")


def timeout_reason(*, tls: bool) -> str:
    """Describe a connect that timed out in an unknown step."""
    return f"no reply in time. {_NO_TLS}; otherwise {HANGS}" if tls else NO_REPLY


def probe_plaintext(host: str, port: int, timeout: float) -> ssl.SSLError | None:
    """Check whether a server that ignored a TLS handshake replies without TLS.

    Redis and Valkey wait for the end of a line. A TLS handshake may contain none, so a server
    without TLS does not reply to it, as if it hung.
    """
    end = now() + timeout
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout) as plain:
        plain.sendall(_PING)
        plain.settimeout(max(0.001, end - now()))
        return _plaintext_error(plain.recv(1))
    return None


async def probe_plaintext_async(host: str, port: int, timeout: float) -> ssl.SSLError | None:
    """Do the same as `probe_plaintext` on the running event loop."""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_PING)
                return _plaintext_error(await reader.read(1))
            finally:
                writer.close()
    return None


def _plaintext_error(reply: bytes) -> ssl.SSLError | None:
    """Return OpenSSL's error for a reply that is not TLS. A TLS alert begins with 0x15."""
    return ssl.SSLError(f"{_NOT_TLS[0]}: it answers without TLS") if reply in _TO_PING else None


def no_reply_error(node: str, error: object) -> OutcomeUnknown:
    """Return the error for a request that was sent, and may have been executed or not."""
    if isinstance(error, BrokenPipeError):
        return OutcomeUnknown(f"the connection to {node} broke before the reply", node=node)
    if isinstance(error, (BlockingIOError, TimeoutError)):
        error = NO_REPLY
    return OutcomeUnknown(f"{node} did not reply: {error}", node=node)


def unreachable_reason(
    error: Exception, handled: BaseException | None, *, tls: bool, timeout: float
) -> str:
    """Explain why connecting within `timeout` failed, and what to do about it.

    `handled` is the exception that the caller was already handling. It is part of the context of
    `error`, but explains nothing.
    """
    causes = list(_causes(error, handled))
    texts = " ".join(map(str, causes))
    for cause in causes:
        words = _system_reason(cause)
        words = words or (_tls_reason(cause) if isinstance(cause, ssl.SSLError) else "")
        if words:
            return words
    if f"[Errno {errno.ECONNREFUSED}]" in texts:  # asyncio, for a host with several addresses
        return _REFUSED
    if any(isinstance(cause, (TimeoutError, redis.TimeoutError)) for cause in causes):
        return _timeout_reason(texts, tls=tls, timeout=timeout)
    if "Protocol error" in texts:
        return _protocol_reason(texts)
    reset = any(isinstance(cause, ConnectionError) for cause in causes)
    if reset or any(sign in texts for sign in _CLOSED_SIGNS):
        return _CLOSED_TLS if tls else _CLOSED
    return _system_message(causes) or str(error)


def _causes(error: BaseException | None, handled: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that, and so on, up to `handled`."""
    seen: set[int] = set()
    while error is not None and error is not handled and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _system_reason(cause: BaseException) -> str:
    if isinstance(cause, socket.gaierror):
        return f"its host name does not resolve ({cause.strerror}): correct the name, or check DNS"
    if isinstance(cause, ConnectionRefusedError):
        return _REFUSED
    if isinstance(cause, FileNotFoundError):
        return "there is no such socket: start the server, or correct the path"
    if isinstance(cause, PermissionError):
        return f"{cause.strerror}: give this user permission to connect"
    return ""


def _tls_reason(cause: ssl.SSLError) -> str:
    text = str(cause)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({cause.verify_message}): give ssl_ca_certs=, the "
            "file with the certificate of the CA that signed it"
        )
    if any(sign in text for sign in _NOT_TLS):
        return "that port does not speak TLS: write redis://, or give the TLS port"
    if "CERTIFICATE_REQUIRED" in text:
        return "it requires a client certificate: give ssl_certfile= and ssl_keyfile="
    return ""


def _timeout_reason(texts: str, *, tls: bool, timeout: float) -> str:
    if "connecting" in texts and not tls:
        return f"no connection within {timeout:g} s: its host is down, or a firewall is in between"
    return timeout_reason(tls=tls)


def _protocol_reason(texts: str) -> str:
    if 'got "H"' in texts:
        return "an HTTP server answers there: give the port of Redis or Valkey"
    if r'got "\x15"' in texts:
        return "it expects TLS: write rediss://"
    return "that port does not speak the protocol of Redis: give the port of Redis or Valkey"


def _system_message(causes: list[BaseException]) -> str:
    texts = [cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror]
    return texts[-1] if texts else ""
