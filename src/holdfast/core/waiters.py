"""The waiters of one client in one process, by their pub/sub channel (`core.line`)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from holdfast.core.line import Line
from holdfast.core.messages import channel_of, read_message
from holdfast.core.token import client_in

if TYPE_CHECKING:
    from holdfast.core.cleanup import Cleanups
    from holdfast.core.line import Waiter
    from holdfast.core.spec import LockSpec
    from holdfast.keys import Keys
    from holdfast.port import Port, Reply


class Waiters:
    """The waiters of one client in one process."""

    def __init__(self, port: Port, cleanups: Cleanups) -> None:
        self._port = port
        self._cleanups = cleanups
        self._lines: WeakValueDictionary[bytes, Line] = WeakValueDictionary()
        """By channel; the port keeps them alive."""
        self.any_yet = False
        """A caller had to wait. The next ones request a place in the queue at once."""

    def line(self, keys: Keys) -> Line:
        """Return the line with which the caller would wait for this lock."""
        self.any_yet = True
        return self._port.line(self._make_line, keys)

    def _make_line(self, channel: bytes) -> Line:
        cleanups = self._cleanups
        line = self._lines[channel] = Line(channel, cleanups.return_grant, cleanups.leave_queue)
        return line

    def enter(self, spec: LockSpec, token: str, now: float) -> Waiter | None:
        """Register a waiter before its first request, if this client is subscribed already."""
        line = self.line(spec.keys)
        subscription = line.subscription
        if subscription is None or not subscription.is_counted:
            return None
        waiter = line.enter(token, spec.keys[0], self._port.signal(), now)
        # Every lost connection is noticed. Here: register, then compare the subscription.
        # `Line.cut`: clears the subscription, then has all registered waiters request again.
        if line.subscription is subscription:
            return waiter
        waiter.forget()
        return None

    def on_grant(self, message: bytes, sent_at: float) -> None:
        """Handle a grant to a waiter of this client that came with the reply to a request.

        Its waiter may be on another event loop than the caller.
        """
        grant = read_message(message)
        line = self._lines.get(channel_of(client_in(grant.token), grant.key))
        if line is not None:
            line.granted(grant, sent_at, self._port.now())
        else:  # of an event loop that is gone
            self._cleanups.return_grant(grant.key, grant.token, grant.delay_ms)

    def on_release(self, reply: Reply, sent_at: float) -> bool:
        """Handle the reply to a release; return whether the lock was held by the token."""
        if isinstance(reply, int) or not reply:
            return reply == 1
        was_held, message = reply
        self.on_grant(message, sent_at)
        return bool(was_held)

    def can_notify(self, token: str, lock_key: bytes) -> bool:
        """Whether the client that drew the token is in this process, and has waited."""
        return channel_of(client_in(token), lock_key) in self._lines

    def recheck_all(self, spec: LockSpec) -> None:
        """Have every waiter for this lock request again: one of them may have been granted it."""
        # `valuerefs` copies in one step. `items` and `values` run Python code between two entries,
        # and fail when another thread adds one there.
        for reference in self._lines.valuerefs():
            line = reference()
            if line is not None:
                line.recheck_soon(spec.keys[0])
