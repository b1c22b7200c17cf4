"""The waiters of one client in one process, by their pub/sub channel (`core.waiter_channel`)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from holdfast.core.messages import channel_of, read_message
from holdfast.core.token import client_in
from holdfast.core.waiter_channel import WaiterChannel

if TYPE_CHECKING:
    from holdfast.core.cleanup import Cleanups
    from holdfast.core.spec import LockSpec
    from holdfast.core.waiter import Waiter
    from holdfast.keys import Keys
    from holdfast.port import Port, Reply


class Waiters:
    """The waiters of one client in one process."""

    def __init__(self, port: Port, cleanups: Cleanups) -> None:
        self._port = port
        self._cleanups = cleanups
        self._channels: WeakValueDictionary[tuple[bytes, int | None], WaiterChannel]
        self._channels = WeakValueDictionary()
        """By name and node of a quorum. The port keeps them alive."""
        self.has_waited = False
        """A first request did not get its lock at once. So the next ones ask for a place."""

    def channel(self, keys: Keys) -> WaiterChannel:
        """Return the channel on which the caller waits for this lock."""
        channel = self._port.channel(self._make_channel, keys)
        # Only now: `_make_channel` may have made one that the port does not use, because a signal
        # handler has added another. And an interrupt may have kept the first caller from this line.
        key = channel.name, keys.node
        if self._channels.get(key) is not channel:
            self._channels[key] = channel
        return channel

    def _make_channel(self, name: bytes) -> WaiterChannel:
        return WaiterChannel(name, self._cleanups.return_grant, self._cleanups.leave_queue)

    def register(self, spec: LockSpec, token: str, now: float) -> Waiter | None:
        """Register a waiter before its first request, if the channel is subscribed already."""
        channel = self.channel(spec.keys)
        subscription = channel.subscription
        if subscription is None or not subscription.is_counted:
            return None
        waiter = channel.register(token, spec.keys.lock, self._port.signal(), now)
        # Invariant: a waiter detects every lost connection. Here: register, then compare the
        # subscription. In `on_disconnect`: clear the subscription, then have all registered
        # waiters request again. Without the comparison a waiter that registers between these two
        # steps would wait on a connection that is gone.
        if channel.subscription is subscription:
            return waiter
        waiter.unregister()
        return None

    def unregister(self, spec: LockSpec, token: str) -> None:
        """Unregister the waiter with this token, if there is one."""
        channel = self._channels.get((channel_of(client_in(token), spec.keys.lock), None))
        if channel is not None:
            channel.unregister(token)

    def on_grant(self, message: bytes, sent_at: float) -> None:
        """Handle a grant to a waiter of this client that arrived with the reply to a request.

        Only a single server or a cluster sends such grants. The waiter may be on another event loop
        than the caller.
        """
        grant = read_message(message)
        channel = self._channels.get((channel_of(client_in(grant.token), grant.key), None))
        if channel is not None:
            channel.on_grant(grant, sent_at, self._port.now())
        else:  # the waiter's event loop is closed
            self._cleanups.return_grant(grant.key, grant.token, grant.delay_ms)

    def on_release(self, reply: Reply, sent_at: float) -> bool:
        """Handle the reply to a release; return whether the token held the lock."""
        if isinstance(reply, int) or not reply:
            return reply == 1
        was_held, message = reply
        self.on_grant(message, sent_at)
        return bool(was_held)

    def can_notify(self, token: str, lock_key: bytes) -> bool:
        """Whether the client that made the token is in this process, and has waited."""
        return (channel_of(client_in(token), lock_key), None) in self._channels

    def recheck_all(self, spec: LockSpec) -> None:
        """Have every waiter for this lock request again: one may have been granted the lock."""
        # `valuerefs` makes a copy in one atomic step. `items` and `values` run Python code between
        # two entries, and raise if another thread adds an entry at that moment.
        for reference in self._channels.valuerefs():
            channel = reference()
            if channel is not None:
                channel.recheck_soon(spec.keys.lock)
