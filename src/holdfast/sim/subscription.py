"""A simulated client's pub/sub connection: it subscribes, receives messages and sends PINGs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.sim.node import Connection
from holdfast.sim.simulation import Future

if TYPE_CHECKING:
    from holdfast.port import Listener
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.simulation import Timer

LINGER = 30.0
"""Seconds for which an idle pub/sub connection is kept open."""


class Subscription:
    """The pub/sub connection of one client."""

    def __init__(self, client: SimClient, listener: Listener, server: Server) -> None:
        self._client = client
        self._listener = listener
        self.opened: Future[None] = Future()
        self._sent_at = client.now()
        self._idle_since = client.now()
        self._timer: Timer | None = None
        self._tick_scheduled = False
        self._connection = connection = Connection(client.machine, server)
        connection.on_push = self._receive
        connection.on_lost = self._lost
        channel = listener.name
        reply = connection.request("subscribe", lambda: connection.channels.add(channel))
        reply.waiting.append(self._subscribed)
        client.machine.after(client.command_timeout, self._give_up)

    def _subscribed(self) -> None:
        if self._connection.open and not self.opened.done:
            self._listener.on_subscribed(self._sent_at, self._wake)
            self.opened.set(None)
            self._tick()

    def _give_up(self) -> None:
        if not self.opened.done:
            self._connection.close()
            self.opened.fail(ConnectionResetError())

    def _lost(self) -> None:
        if not self.opened.done:
            self.opened.fail(ConnectionResetError())
            return
        self._disconnected()

    def _disconnect(self) -> None:
        self._connection.close()
        self._disconnected()

    def _disconnected(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._listener.idle:
            self._client.observer.pubsub_connection_lost(self._client)
        self._listener.on_disconnect(self._client.now())

    def _receive(self, message: Any) -> None:  # noqa: ANN401 - any message
        if self.opened.done:
            if message[0] == b"message":
                self._client.observer.message_received(self._client, message[2])
            try:
                self._listener.on_message(message, self._client.now())
            except ValueError:
                self._disconnect()
            self._wake()

    def _wake(self) -> None:
        if not self._tick_scheduled:
            self._tick_scheduled = True
            self._client.machine.soon(self._tick)

    def _tick(self) -> None:
        self._tick_scheduled = False
        if not self._connection.open:
            return
        now = self._client.now()
        try:
            pings, wake_at = self._listener.tick(now)
        except TimeoutError:
            self._disconnect()
            return
        for _, payload in pings:
            self._connection.send("ping", partial(self._connection.push, [b"pong", payload]))
        if not self._listener.idle:
            self._idle_since = now
        elif now >= self._idle_since + LINGER:
            self._disconnect()
            return
        if self._timer is not None:
            self._timer.cancel()
        wait = max(0.0, min(wake_at, self._idle_since + LINGER) - now)
        self._timer = self._client.machine.after(wait, self._tick)
