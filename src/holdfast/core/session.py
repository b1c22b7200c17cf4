"""What one client has in one process: its leases, its waiters, its clean-ups and its renewer.

A forked child inherits the object. `begin` replaces its contents there, before any of the child's
code runs. So a child never renews or releases what its parent holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.core.cleanup import Cleanups
from holdfast.core.events import Event
from holdfast.core.held import HeldLeases
from holdfast.core.hold import RELEASED, forked
from holdfast.core.renewer import Renewer
from holdfast.core.spec import LOST_TOMBSTONE
from holdfast.core.waiters import Waiters
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.deployment import Deployment
    from holdfast.core.hold import Hold
    from holdfast.port import Background, Port

NAMED = 100
"""Leases that an event names at most."""


class Session:
    """What the operations of one client share."""

    def __init__(
        self,
        port: Port,
        make_background: Callable[[], Background],
        report: Callable[[Event], None],
        deployment: Deployment,
        *,
        polls: bool,
    ) -> None:
        self.port = port
        self.deployment = deployment
        self.report = report
        self.polls = polls
        """Waiting clients poll, and receive no messages."""
        self.closed = False
        self._make_background = make_background
        self.begin()

    def begin(self) -> None:
        """Begin without leases and waiters: in a new client, and in each forked child."""
        self.process = self.port.process()
        self.renewer = Renewer(self._make_background(), self.report, self.port.has_ended)
        self.held = HeldLeases(self.port)
        self.cleanups = Cleanups(self.deployment, self.renewer)
        self.waiters = Waiters(self.port, self.cleanups)
        self.deployment.begin(self)

    def close(self) -> None:
        """Renew nothing from now on, and report what is still held.

        An attempt ends with its next failure: the caller closes the connections after this.
        """
        if not self.closed:
            self._report_held()
        self.closed = True
        self.deployment.close()
        self.renewer.close()

    def _report_held(self) -> None:
        held = self.held.valid()
        if not held:
            return
        names = [f"{hold.spec.name!r} (fence {hold.fence})" for hold in held[:NAMED]]
        if len(held) > NAMED:
            names.append(f"{len(held) - NAMED} more")
        detail = f"the client was closed while it held {', '.join(names)}: no longer renewed"
        self.report(Event("closed_while_held", detail=detail))

    def took(self, hold: Hold) -> None:
        """Keep a lease that was just granted, and renew it.

        Raises:
            ConfigurationError: it is to be renewed, and cannot be.
            NotHeld: it is the parent's: this process was forked since the attempt began.
        """
        self.held.add(hold)
        # Without renewal the background only reports the deadline, which holds by itself. Locks of
        # redis-py are not watched at all.
        is_watched = hold.spec.first_due == math.inf or self.renewer.watch(hold)
        if not is_watched and hold.spec.renew:
            name = hold.spec.name
            raise ConfigurationError(
                f"lock {name!r} cannot be renewed: no thread can be started, as in an atexit "
                "handler; give it renew=False and a ttl that is longer than the work",
                lock=name,
            )
        # Last: what is forked after this is forked after acquire().
        self.check_process(hold.process, hold.spec.name)

    def check_process(self, process: int, name: str, verb: str = "acquire") -> None:
        """Raise NotHeld if this process was forked from the one in which an operation began."""
        if process != self.port.process():
            raise forked(name, verb) from None

    def abandon(self, hold: Hold) -> None:
        """End a lease in this process, without releasing it on the server."""
        hold.state = RELEASED
        self.forget(hold)

    def forget(self, hold: Hold) -> None:
        """Forget a lease that has ended. A newer one of the same lock stays."""
        self.renewer.unwatch(hold)
        self.held.remove(hold)

    def lost(self, hold: Hold) -> None:
        """Report a loss, and remove what is left of the lease from the server."""
        self.forget(hold)
        hold.forget_waiter(self.port.now())  # a late message must not end the lock delay
        self.report(Event("lost", hold.spec.name, hold.fence, hold.loss().reason))
        # An extension without a reply may keep the key long beyond the deadline, and a request
        # without a reply may still arrive. On a quorum a minority of the nodes may have the token.
        refused = hold.reason in {"taken", "key_missing"}
        if not refused or hold.needs_tombstone or self.deployment.is_quorum:
            self.cleanups.schedule_lease(hold, LOST_TOMBSTONE)  # begins the lock delay

    def moved(self, _seat: object) -> None:
        """Renew all leases: another server has taken over. Called from any thread."""
        if self.held:
            self.renewer.look_again()
