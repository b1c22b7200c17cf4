"""The push connection of a simulated client: it subscribes, receives messages and sends pings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.sim.node import Connection
from holdfast.sim.world import Future

if TYPE_CHECKING:
    from holdfast.port import Listener
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.world import Timer

LINGER = 30.0
"""Seconds that a push connection which no waiter needs is kept."""


class Subscription:
    """The push connection of one client."""

    def __init__(self, client: SimClient, listener: Listener, server: Server) -> None:
        self._client = client
        self._listener = listener
        self.opened: Future[None] = Future()
        self._sent_at = client.now()
        self._idle_since = client.now()
        self._timer: Timer | None = None
        self._roused = False
        self._connection = connection = Connection(client.machine, server)
        connection.on_push = self._hear
        connection.on_lost = self._lost
        channel = listener.channel
        answer = connection.ask("subscribe", lambda: connection.channels.add(channel))
        answer.waiting.append(self._subscribed)
        client.machine.after(client.command_timeout, self._give_up)

    def _subscribed(self) -> None:
        if self._connection.open and not self.opened.done:
            self._listener.opened(self._sent_at, self._rouse)
            self.opened.set(None)
            self._look()

    def _give_up(self) -> None:
        if not self.opened.done:
            self._connection.close()
            self.opened.fail(ConnectionResetError())

    def _lost(self) -> None:
        if not self.opened.done:
            self.opened.fail(ConnectionResetError())
            return
        self._cut()

    def _hang_up(self) -> None:
        self._connection.close()
        self._cut()

    def _cut(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._listener.idle:
            self._client.observer.deaf(self._client)
        self._listener.cut(self._client.now())

    def _hear(self, message: Any) -> None:  # noqa: ANN401 - any message
        if self.opened.done:
            if message[0] == b"message":
                self._client.observer.pushed(self._client, message[2])
            try:
                self._listener.heard(message, self._client.now())
            except ValueError:
                self._hang_up()
            self._rouse()

    def _rouse(self) -> None:
        if not self._roused:
            self._roused = True
            self._client.machine.soon(self._look)

    def _look(self) -> None:
        self._roused = False
        if not self._connection.open:
            return
        now = self._client.now()
        try:
            pings, wake_at = self._listener.tick(now)
        except TimeoutError:
            self._hang_up()
            return
        for _, payload in pings:
            self._connection.tell("ping", partial(self._connection.push, [b"pong", payload]))
        if not self._listener.idle:
            self._idle_since = now
        elif now >= self._idle_since + LINGER:
            self._hang_up()
            return
        if self._timer is not None:
            self._timer.cancel()
        wait = max(0.0, min(wake_at, self._idle_since + LINGER) - now)
        self._timer = self._client.machine.after(wait, self._look)
