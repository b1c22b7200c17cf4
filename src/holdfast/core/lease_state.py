"""The state of one lease, from the grant to its end.

| state     | input                                                         | next state |
|-----------|---------------------------------------------------------------|------------|
| HELD      | the program calls `release()`                                 | RELEASING  |
|           | it is exported, or its acquire is interrupted                 | RELEASED   |
|           | its deadline passes, or the server refuses a renewal          | LOST       |
| RELEASING | the server replies, or an interrupted release is cleaned up   | RELEASED   |
|           | the server refuses the release                                | LOST       |
|           | no reply: the caller may retry                                | RELEASING  |

The rules on which everything else relies:

1. A lease is valid only while it is HELD, before its deadline, in the process that acquired it. No
   thread has to watch the deadline: `is_valid` compares it with the clock.
2. A grant's deadline is computed from a time read before the first request that may have caused
   it. The deadline of a renewal or an extension is computed from a time read before the request
   that got the reply.
3. Only a reply that arrives while the lease is valid moves its deadline. LOST is final.
4. A lease keeps its token and its fence. One exception: a downgrade of a writer's lease replaces
   the token (`core.downgrade`).
5. This module sends no request. The operations (`acquire`, `release`, `extend`) and the renewer
   send them.

The threads of the program and the renewer use a lease at the same time. `HeldLeases.mutex` guards
`refs` and the start of a release. The mutex is reentrant, so it does not stop a signal handler in
the thread that has it. `claim_release` does: only its first caller sends the release. Nothing else
needs a mutex:

- The server has confirmed every deadline that is written, so the order of the writes does not
  matter. Exception: a renewal that is under way may undo an `extend` to a shorter time. That is
  safe, because the server never shortens an expiry: the lease only lasts longer.
- A callback is removed from the list by `pop`, so only one thread calls it.

A loss has these steps, in this order: the state changes; `lease.lost` is set, and the body of an
`async with` is cancelled; the event is reported, and the cleanup on the server is scheduled; the
callbacks of the user are called. A callback that raises does not prevent the others.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING
from weakref import ref as weak_ref

from holdfast.core.fence import is_after_loss
from holdfast.core.spec import RENEWALS_PER_TTL, to_ms, validity_of
from holdfast.errors import HoldfastError, LeaseLost, LossReason
from holdfast.scripts import DOWNGRADE

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.core.waiter import Grant, Waiter
    from holdfast.port import Reply, Request

_WHY: dict[LossReason, str] = {
    "expired": "its time ran out",
    "taken": "another client has acquired the lock, or an operator evicted this holder",
    "key_missing": "the server no longer has the lock's key, because it restarted without its "
    "data, or the key was deleted or evicted",
    "unreachable": "it was not renewed in time, because the server could not be reached, or "
    "rejected the renewals",
}


RENEW_WINDOW_AFTER = 0.1
"""Seconds after which a lease that was granted for a short window is renewed for its full ttl."""


class State(Enum):
    """The state of a lease. The docstring of the module has the transitions."""

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"
    LOST = "lost"


HELD, RELEASING, RELEASED, LOST = State


class LeaseRef:
    """One reference to a lease: the base class of the leases that users see.

    A lock that is acquired at several levels has one lease, with one reference for each level. The
    reference exists before the first request. So an operation that is interrupted at any moment
    finds here what it has to release.
    """

    __slots__ = ("__weakref__", "_lease")

    _lease: LeaseState | None

    def __init__(self) -> None:
        self._lease = None

    def _mark_unseen(self) -> None:
        """Note that no user has had the lease: its acquire has failed or was interrupted.

        At an inner level of a reentrant lock, the user has the lease already.
        """
        lease = self._lease
        if lease is not None and lease.refs == {weak_ref(self)}:
            lease.is_seen = False

    def _cancel_body(self) -> None:
        """Cancel the code that runs under the lock, if that is possible.

        Called when the lease is lost, in any thread.
        """


class LeaseState:
    """One lease of one lock. It has one reference for each level at which the lock is held."""

    state = HELD
    reason: LossReason | None = None
    last_renewal_failed = False
    """The last renewal failed: no reply, or an error."""
    release_may_have_run = False
    """The server may have executed an earlier release. Then a refusal does not mean a loss."""
    due: float
    """When the renewer handles it next. Only the renewer writes this."""
    needs_tombstone = False
    """A request with this token may still arrive. So the release leaves a tombstone."""
    is_abandoned: Callable[[], bool] | None = None
    """Set by `core.cache`: returns whether the event loop that would release it is closed. The
    renewer calls this before each renewal, and stops renewing when it returns True."""
    waiter: Waiter | None = None
    """The waiter that was granted it. Messages for its token may still arrive."""
    pending_downgrade: tuple[str, str] | None = None
    """The token of the reader, and that of the writer that it replaces, until a reply confirms the
    downgrade (`core.downgrade`)."""
    is_seen = True
    """A user has received the lease. Only then does its release mark the previous loss as handled,
    so that the next lease is not `after_loss`."""
    reported_dropped = False
    """The event `not_released` was sent."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a grant; positional, for speed
        self,
        spec: LockSpec,
        token: str,
        fence: int,
        sent_at: float,
        actor: object,
        process: int,
        session: Session,
        ref: LeaseRef,
    ) -> None:
        self.refs = {weak_ref(ref)}
        """Weak references, so that `is_dropped` detects one that was garbage-collected. A finalizer
        is no alternative: Python ignores a KeyboardInterrupt that is raised in one."""
        self.spec = spec
        self.token = token
        self.fence = fence
        self.actor: object | None = actor
        """The thread or task that acquired it. The renewer sets it to None when a task is done."""
        self.process = process
        """The process in which the attempt began. In a forked child the lease is not valid."""
        self.deadline = sent_at + spec.validity
        self.renew_at = sent_at + spec.renew_after
        self.renew_until = sent_at + spec.max_hold
        self.renewing = spec.renew
        self.longest_ttl = spec.ttl
        """The longest ttl that was ever requested. The server keeps the key for at most this time,
        plus the lock delay."""
        self._on_loss: list[Callable[[LeaseState], object]] = [session.on_lost]
        self._release_claims = [None]  # `list.pop` is atomic: one caller gets the element

    def is_valid(self, now: float, process: int) -> bool:
        """Whether the lease is valid now."""
        return self.state is HELD and now < self.deadline and self.process == process

    @property
    def after_loss(self) -> bool:
        """Whether the previous lease of the lock ended without a release."""
        return is_after_loss(self.fence)

    def tombstone_argument(self, tombstone: str) -> str:
        """Return argument 3 of release.lua for a tombstone that is kept for `tombstone` ms.

        A " seen" follows if this lease has reported a loss to the user.
        """
        return f"{tombstone} seen" if self.after_loss and self.is_seen else tombstone

    def unregister_waiter(self, drain_from: float | None = None) -> None:
        """Unregister the waiter that was granted this lease, as `WaiterChannel.unregister`."""
        if self.waiter is not None:
            self.waiter.unregister(drain_from)

    def claim_release(self) -> bool:
        """Return True to the first caller only, which then sends the release.

        A second release would be refused, and the refusal would count as a loss.
        """
        try:
            self._release_claims.pop()
        except IndexError:
            return False
        return True

    @property
    def is_dropped(self) -> bool:
        """Whether a reference was garbage-collected without being released."""
        return any(ref() is None for ref in tuple(self.refs))

    @property
    def is_scheduled(self) -> bool:
        """Whether the renewer still has to handle it."""
        return self.state is HELD

    @property
    def reply_timeout(self) -> float:
        """Seconds to wait for the reply to a renewal before the renewer retries."""
        return self.spec.command_timeout

    def next_due(self) -> float:
        """Return when the renewer has to renew it, to stop renewing it, or to declare it lost."""
        if not self.renewing:
            return self.deadline
        return min(self.renew_at, self.renew_until)

    def begin_window(self, grant: Grant, now: float) -> None:
        """Set the deadlines of a pushed grant, which is valid for a short window only.

        So the first renewal follows soon, and in time if little of the window is left. `max_hold`
        counts from now on.
        """
        self.deadline = grant.since + validity_of(grant.seconds)
        self.renew_until = now + self.spec.max_hold
        if grant.seconds < self.spec.ttl:
            self.renew_at = min(now + RENEW_WINDOW_AFTER, (now + self.deadline) / 2)

    def apply_renewal(
        self, sent_at: float, ttl: float, now: float, *, exactly: bool = False
    ) -> bool:
        """Apply the reply to a renewal for `ttl` that was sent at `sent_at`.

        The deadline never moves back, except with `exactly`. Returns False, and changes nothing, if
        the reply came after the deadline.
        """
        if now >= self.deadline:
            return False
        validity = validity_of(ttl)
        self.renew_at = sent_at + validity / RENEWALS_PER_TTL
        self.deadline = sent_at + validity if exactly else max(sent_at + validity, self.deadline)
        self.last_renewal_failed = False
        return True

    def lose(self, reason: LossReason) -> None:
        """Declare the lease lost, and call each callback once."""
        if self.state is HELD or self.state is RELEASING:
            self.reason = reason
            self.state = LOST
            try:
                for ref in [reference() for reference in tuple(self.refs)]:
                    if ref is not None:
                        ref._cancel_body()
            finally:
                self._call_on_loss()

    def expiry_reason(self) -> LossReason:
        """Return the reason of a loss at the deadline."""
        return "unreachable" if self.last_renewal_failed else "expired"

    def refusal_reason(self, reply: Reply, now: float) -> LossReason:
        """Return the reason of a loss when the server refuses a renewal or a release."""
        if now >= self.deadline:
            return self.expiry_reason()
        # The scripts reply {} if the key of the lock does not exist, and no script removed it.
        return "key_missing" if reply == [] else "taken"

    def on_loss(self, callback: Callable[[LeaseState], object], *, last: bool = False) -> None:
        """Call `callback`, which must not block, when the lease is lost, or now if it is lost.

        Internal callbacks run first, the newest first. Those with `last` start code of the user.
        They run afterwards, in the order in which they were added.
        """
        if last:
            self._on_loss.insert(0, callback)
        else:
            self._on_loss.append(callback)
        if self.state is LOST:
            self._call_on_loss()

    def _call_on_loss(self) -> None:
        """Call the callbacks, the last one first. One that raises does not stop the others."""
        while self._on_loss:
            try:
                callback = self._on_loss.pop()
            except IndexError:  # another thread has taken the last one
                return
            try:
                callback(self)
            except BaseException:
                self._call_on_loss()
                raise

    def loss(self) -> LeaseLost:
        """Return the error that explains the loss."""
        reason = self.reason or self.expiry_reason()
        return LeaseLost(
            f"the lease of {self.spec.name!r} (fence {self.fence}) was lost: {_WHY[reason]}",
            lock=self.spec.name,
            reason=reason,
            fence=self.fence,
        )

    def renewal_request(self, ttl: float) -> Request:
        """Return the request that renews the lease for `ttl` seconds."""
        # Invariant: the token of a reader is renewed only after its downgrade. Here: read the
        # token, then `pending_downgrade`. `core.downgrade`, in another thread: set
        # `pending_downgrade`, then the token. In the other order, the server would refuse the
        # renewal.
        token, pending = self.token, self.pending_downgrade
        if pending is not None:
            reader, writer = pending
            return DOWNGRADE, self.spec.keys, (reader, to_ms(ttl), writer, self.spec.settings)
        args = token, to_ms(ttl), self.spec.settings, str(self.fence)
        return self.spec.kind.renew, self.spec.renewal_keys, args

    def note_downgrade(self, request: Request, reply: Reply | HoldfastError) -> None:
        """Note that a downgrade was carried out, if this is the reply that confirms it."""
        if reply and request[0] is DOWNGRADE and not isinstance(reply, HoldfastError):
            self.pending_downgrade = None

    def is_outdated(self, request: Request, reply: Reply | HoldfastError) -> bool:
        """Whether the server refused a renewal of the writer's token, which was replaced since."""
        return not reply and request[2][0] != self.token
