"""A TLS proxy: it terminates TLS and forwards plain bytes to a server.

The certificate in `tls/` is for 127.0.0.1 and only for these tests; its key is not secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from typing import Self

CERTIFICATE = Path(__file__).parent / "tls" / "cert.pem"
_KEY = Path(__file__).parent / "tls" / "key.pem"


class TlsProxy:
    """Accepts TLS connections and forwards their content to a server."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(PATIENCE), "the TLS proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        """Serve until stopped; then close all connections, including those being set up."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE, _KEY)
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            inner_reader, inner_writer = await asyncio.open_connection(*self._target)
            ends.append(inner_writer)
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        except asyncio.CancelledError:
            return
        finally:
            for end in ends:
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
