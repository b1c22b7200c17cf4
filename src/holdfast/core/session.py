"""What one client knows in one process: its port, its renewer, and the holds it has.

A forked child inherits the object but none of that: `renew_process` begins anew there, so that a
child never renews, releases or believes in what its parent holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.events import Event
from holdfast.core.hold import RELEASED
from holdfast.core.renewer import Renewer

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.hold import Hold
    from holdfast.core.spec import LockSpec
    from holdfast.port import Background, Port


class Session:
    """The state that the verbs of the core share."""

    def __init__(
        self,
        port: Port,
        make_background: Callable[[], Background],
        report: Callable[[Event], None],
    ) -> None:
        self.port = port
        self._make_background = make_background
        self.report = report
        self._begin()

    def _begin(self) -> None:
        self.process = self.port.process()
        self.renewer = Renewer(self._make_background(), self.report)
        self.held: dict[bytes, Hold] = {}
        """The newest hold of each key. Exclusion itself sees to it that no older one is alive."""

    def mine(self, spec: LockSpec) -> Hold | None:
        """The hold on this lock that the calling thread or task is within, if any."""
        if self.process != self.port.process():
            self._begin()
        hold = self.held.get(spec.key)
        if hold is None or hold.actor is not self.port.actor():
            return None
        return hold if hold.alive(self.port.now(), self.process) else None

    def took(self, hold: Hold) -> None:
        """Keep in mind, and alive, what was just granted."""
        self.held[hold.spec.key] = hold
        self.renewer.watch(hold, hold.asked_at + hold.spec.first_due)

    def disown(self, hold: Hold) -> None:
        """End a hold that its caller never got to see."""
        hold.state = RELEASED
        self.forget(hold)

    def forget(self, hold: Hold) -> None:
        """Drop a hold that has ended, unless a newer one stands in its place."""
        self.renewer.handed_in.discard(hold)
        if self.held.get(hold.spec.key) is hold:
            self.held.pop(hold.spec.key, None)

    def lost(self, hold: Hold) -> None:
        """See that a loss is reported, and that nothing of the lease stays on the server."""
        self.forget(hold)
        reason = hold.reason or hold.overdue()
        # An extension whose answer was lost may keep the key long beyond the deadline, and a
        # request that was abandoned may still arrive.
        if reason != "taken" or hold.tainted:
            self.renewer.clean_up(hold.spec, hold.token, fence=hold.fence, ttl=hold.longest_ttl)
        self.report(Event("lost", hold.spec.name, hold.fence, reason))
