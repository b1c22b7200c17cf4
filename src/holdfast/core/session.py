"""The state of one client in one process: its leases, waiters, cleanups, and its renewer.

A forked child inherits the session. `begin` replaces its contents there, before any code of the
child runs. So a child never renews or releases what its parent holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.core.cleanup import Cleanups
from holdfast.core.events import Event
from holdfast.core.held import HeldLeases
from holdfast.core.lease_state import LOST, RELEASED
from holdfast.core.renewer import Renewer
from holdfast.core.spec import LOST_TOMBSTONE, TOMBSTONE_MS
from holdfast.core.waiters import Waiters
from holdfast.errors import ConfigurationError, NotHeld

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.deployment import Deployment
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.spec import LockSpec
    from holdfast.port import Background, Port

LEASES_NAMED_MAX = 100
"""How many leases an event names, at most."""


class Session:
    """The state that the operations of one client share, in one process."""

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
        """Waiting callers poll, and receive no messages."""
        self.closed = False
        self._make_background = make_background
        self.begin()

    def begin(self) -> None:
        """Start without leases and waiters: in a new client, and in each forked child."""
        self.process = self.port.process()
        self.renewer = Renewer(self._make_background(), self.report, self.port.has_ended)
        self.held = HeldLeases(self.port)
        self.cleanups = Cleanups(self.deployment, self.renewer)
        self.waiters = Waiters(self.port, self.cleanups)
        self.held_meanwhile: dict[LeaseRef, tuple[LockSpec, Sequence[LeaseRef]]] = {}
        """For each lock that `core.acquire_all` is acquiring now, by its reference: its spec, and
        the references of the leases that this call already holds. The loss of one ends the wait."""
        self.deployment.begin(self)

    def close(self) -> None:
        """Stop renewing, and report the leases that are still held.

        The caller closes the connections afterwards. An attempt that is under way then fails.
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
        names = [f"{lease.spec.name!r} (fence {lease.fence})" for lease in held[:LEASES_NAMED_MAX]]
        if len(held) > LEASES_NAMED_MAX:
            names.append(f"{len(held) - LEASES_NAMED_MAX} more")
        detail = (
            f"the client was closed while it held {', '.join(names)}: no longer renewed; release "
            "leases before you close the client"
        )
        self.report(Event("closed_while_held", detail=detail))

    def track(self, lease: LeaseState) -> None:
        """Add a lease that was just granted, and start to renew it.

        Raises:
            ConfigurationError: it has to be renewed, and no thread can be started for that.
            NotHeld: this process was forked since the attempt began. The lease is the parent's.
        """
        self.held.add(lease)
        # Without renewal, only the report of a loss needs the renewer. For a lock of redis-py
        # nothing is scheduled (its `first_due` is inf).
        is_scheduled = lease.spec.first_due == math.inf or self.renewer.schedule(lease)
        if not is_scheduled and lease.spec.renew:
            name = lease.spec.name
            raise ConfigurationError(
                f"lock {name!r} cannot be renewed: no thread can be started, as in an atexit "
                "handler; give it renew=False and a ttl that is longer than the work",
                lock=name,
            )
        # Last, so that a fork after this check is a fork after acquire().
        self.check_process(lease.process, lease.spec.name)

    def check_process(self, process: int, name: str, verb: str = "acquire") -> None:
        """Raise NotHeld in a child that was forked, as by a signal handler, during an operation.

        The operation continues in the parent, with the parent's token. So the child sends no
        request: the server would treat it as a retry, and both processes would hold the lock.
        """
        if process != self.port.process():
            raise NotHeld(
                f"this process was forked during {verb}() of {name!r}, which continues in its "
                "parent: acquire the lock here",
                lock=name,
            ) from None

    def check_held_meanwhile(self, ref: LeaseRef) -> None:
        """Check the leases that the call already holds, while it acquires that of `ref`.

        Invariant: a call does not continue to wait after the loss of such a lease. Here: register
        the waiter, then check the leases. `on_lost`, in another thread: the state of the lease has
        changed, then wake the registered waiters.

        Raises:
            LeaseLost: one of them is lost.
        """
        if self.held_meanwhile and ref in self.held_meanwhile:
            for other in self.held_meanwhile[ref][1]:
                lease = other._lease
                if lease is not None and lease.state is LOST:
                    raise lease.loss()

    def end_locally(self, lease: LeaseState) -> None:
        """End a lease in this process, without releasing it on the server."""
        lease.state = RELEASED
        self.forget(lease)

    def forget(self, lease: LeaseState) -> None:
        """Forget a lease that has ended. A newer lease of the same lock is kept."""
        self.renewer.unschedule(lease)
        self.held.remove(lease)
        if lease.pending_downgrade is not None:  # either token may be a holder, or become one
            lease.needs_tombstone = lease.release_may_have_run = True
            _, writer = lease.pending_downgrade
            mode = LOST_TOMBSTONE if lease.state is LOST else lease.tombstone_argument(TOMBSTONE_MS)
            self.cleanups.schedule(lease.spec, writer, mode, longest=lease.longest_ttl)

    def on_lost(self, lease: LeaseState) -> None:
        """Report a loss, and schedule the cleanup on the server."""
        self.forget(lease)
        # The token stays registered until earlier messages have arrived. A grant to an unknown
        # token is released at once, and that release would end the lock delay.
        lease.unregister_waiter(self.port.now())
        for spec, refs in list(self.held_meanwhile.values()):
            if any(ref._lease is lease for ref in refs):
                self.waiters.recheck_all(spec)
        self.report(Event("lost", lease.spec.name, lease.fence, lease.loss().reason))
        # Schedule a release in three cases: the lease was not refused, so an unanswered extension
        # may keep the key; an unanswered request may still arrive; a minority of nodes may have the
        # token.
        refused = lease.reason in {"taken", "key_missing"}
        if not refused or lease.needs_tombstone or self.deployment.is_quorum:
            self.cleanups.schedule_lease(lease, LOST_TOMBSTONE)  # begins the lock delay

    def endpoint_changed(self, _endpoint: object) -> None:
        """Renew all leases, because another server has taken over. Any thread may call this."""
        if self.held:
            self.renewer.renew_all()
