"""The life of one lease, from the grant to its end.

    HELD ──release()──▶ RELEASING ──a reply, or cleaned up after an interruption──▶ RELEASED
     │ │                    ├──refused──▶ LOST
     │ │                    └──no reply: it stays RELEASING, and the caller may retry
     │ └──exported, or abandoned by an interrupted acquire──▶ RELEASED
     └──deadline passed, or refused by the server──▶ LOST

The rules on which everything else relies:

1. A lease is valid only while it is HELD, before its deadline, in the process that acquired it. The
   deadline needs no thread to notice it: `alive` compares it with the clock.
2. The deadline of a grant counts from before the first request that may have caused it. That of a
   renewal or an extension counts from before the request that got the reply.
3. The deadline moves only by a reply that arrives while the lease is valid. LOST is final.
4. Nothing here sends a request. The operations (`acquire`, `release`, `extend`) and the renewer do.

Several threads use a hold: those of the program, and the renewer. No mutex guards it:

- Every deadline that is ever written was confirmed by the server, so their order does not matter.
  A renewal that is under way may undo an extension to a shorter time.
- A thread removes its grip before it looks whether others are left. Of two threads that release the
  last two levels at once, at least one finds none left; `claim_release` selects one of them.
- Each watcher is taken off a list by `pop`, so one thread calls it.

A loss is reported in this order: the state; `lease.lost` and the cancellation of an async body; the
event and the clean-up on the server; the callbacks of the user. A watcher that raises does not
prevent the others.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING
from weakref import ref

from holdfast.core.spec import RENEWALS_A_TTL, to_ms, validity_of
from holdfast.errors import LeaseLost, LossReason, NotHeld
from holdfast.scripts import RENEW

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.line import Grant, Waiter
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply, Request

_WHY: dict[LossReason, str] = {
    "expired": "its time ran out",
    "taken": "the server says that it is no longer ours",
    "key_missing": "the server no longer has the lock's key, because it restarted without its "
    "data, or the key was deleted or evicted",
    "unreachable": "the server could not be reached, or refused, to renew it in time",
}


RENEW_WINDOW_AFTER = 0.1
"""Seconds after which a lease that was granted for a short window is renewed for its full ttl."""


class State(Enum):
    """The module's docstring shows the transitions."""

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"
    LOST = "lost"


HELD, RELEASING, RELEASED, LOST = State


class Grip:
    """One level of a hold: the base class of the leases that users see.

    It exists before the first request. So an operation that is interrupted at any moment finds here
    what it has to release.
    """

    __slots__ = ("__weakref__", "_hold")

    _hold: Hold | None

    def __init__(self) -> None:
        self._hold = None

    def _cancel_body(self) -> None:
        """Cancel the code of the caller that needs the lock, where that is possible.

        Called when the hold is lost, in any thread.
        """


class Hold:
    """One lease of one lock, with a grip for each level of a re-entered lock."""

    state = HELD
    reason: LossReason | None = None
    unanswered = False
    """The last renewal got no reply."""
    unsure = False
    """An earlier release of this token may have been carried out: a refusal is no loss."""
    due: float
    """When the renewer looks at it next. Only the renewer writes this."""
    needs_tombstone = False
    """A request with this token may still be carried out: the release leaves a tombstone."""
    forsaken: Callable[[], bool] | None = None
    """Set by `core.cache`: whether the thread or task that would release it has ended. The renewer
    calls this before each renewal, and then stops renewing."""
    waiter: Waiter | None = None
    """The waiter that was granted it. Late messages for its token may still arrive."""
    reported_dropped = False
    """The event `not_released` was sent."""

    def __init__(  # noqa: PLR0913, PLR0917 - what is known of a grant, all at once, and often
        self,
        spec: LockSpec,
        token: str,
        fence: int,
        asked_at: float,
        actor: object,
        process: int,
        session: Session,
        grip: Grip,
    ) -> None:
        self.grips = {ref(grip)}
        """Weak, so that `is_dropped` can detect a lease that the program dropped. There is no
        finalizer: Python swallows a Ctrl-C that arrives in one."""
        self.spec = spec
        self.token = token
        self.fence = fence
        self.actor: object | None = actor
        """The thread or task that acquired it; the renewer sets None once a task is done."""
        self.process = process
        """Where the attempt began. In a child that was forked since, this lease is not valid."""
        self.deadline = asked_at + spec.validity
        self.renew_at = asked_at + spec.renew_after
        self.renew_until = asked_at + spec.max_hold
        self.renewing = spec.renew
        self.longest_ttl = spec.ttl
        """The longest ttl that was ever requested. The server keeps the key for at most this time
        and the lock delay."""
        self._watchers: list[Callable[[Hold], object]] = [session.lost]
        self._release_claims = [None]

    def alive(self, now: float, process: int) -> bool:
        """Whether it is valid at this moment."""
        return self.state is HELD and now < self.deadline and self.process == process

    def forget_waiter(self, drain_from: float | None = None) -> None:
        """Unregister the waiter that was granted this lease: a later grant to it is released.

        With `drain_from`, once every message that was sent before that time has arrived.
        """
        if self.waiter is None:
            return
        if drain_from is None:
            self.waiter.forget()
        else:
            self.waiter.forget_after_drain(drain_from)

    def claim_release(self) -> bool:
        """Return True to the first caller only: to the thread that sends the release.

        The reply to a second release would be taken for a loss.
        """
        try:
            self._release_claims.pop()
        except IndexError:
            return False
        return True

    @property
    def is_dropped(self) -> bool:
        """Whether a lease of it was garbage-collected without being released."""
        return any(grip() is None for grip in tuple(self.grips))

    @property
    def live(self) -> bool:
        """Whether the renewer still watches it."""
        return self.state is HELD

    @property
    def patience(self) -> float:
        """Seconds to wait for the reply to a renewal before it is sent again."""
        return self.spec.command_timeout

    def next_due(self) -> float:
        """Return when the renewer has to renew it, to end its renewal, or to declare it lost."""
        if not self.renewing:
            return self.deadline
        return min(self.renew_at, self.renew_until)

    def begin_window(self, grant: Grant, now: float) -> None:
        """Count a grant that was pushed: it is valid for a short window only.

        So it is renewed soon, unless it is released at once. The caller has it from now on.
        """
        self.deadline = grant.since + validity_of(grant.seconds)
        self.renew_until = now + self.spec.max_hold
        if grant.seconds < self.spec.ttl:
            self.renew_at = now + RENEW_WINDOW_AFTER

    def prolong(self, asked_at: float, ttl: float, now: float, *, exactly: bool = False) -> bool:
        """Apply the reply to a renewal for `ttl` that was sent at `asked_at`.

        The deadline only grows, unless it is to be `exactly` this one. Returns False, and changes
        nothing, if the reply came after the deadline.
        """
        if now >= self.deadline:
            return False
        validity = validity_of(ttl)
        self.renew_at = asked_at + validity / RENEWALS_A_TTL
        self.deadline = asked_at + validity if exactly else max(asked_at + validity, self.deadline)
        self.unanswered = False
        return True

    def lose(self, reason: LossReason) -> None:
        """Declare it lost, and call each watcher once."""
        if self.state is HELD or self.state is RELEASING:
            self.reason = reason
            self.state = LOST
            try:
                for grip in [reference() for reference in tuple(self.grips)]:
                    if grip is not None:
                        grip._cancel_body()
            finally:
                self._tell()

    def overdue(self) -> LossReason:
        """Return why it is lost when its deadline passes now."""
        return "unreachable" if self.unanswered else "expired"

    def refusal(self, reply: Reply, now: float) -> LossReason:
        """Return why it is lost when the server refuses a renewal or a release."""
        if now >= self.deadline:
            return self.overdue()
        return "key_missing" if reply == [] else "taken"

    def watch(self, watcher: Callable[[Hold], object]) -> None:
        """Call `watcher`, which must not block, when it is lost; at once when it is already."""
        self._watchers.append(watcher)
        if self.state is LOST:
            self._tell()

    def watch_last(self, watcher: Callable[[Hold], object]) -> None:
        """Call `watcher`, which starts the user's code, after the session and all of `watch`."""
        self._watchers.insert(0, watcher)
        if self.state is LOST:
            self._tell()

    def _tell(self) -> None:
        """Call the watchers, the last of the list first; one that raises stops no other."""
        while self._watchers:
            try:
                watcher = self._watchers.pop()
            except IndexError:  # another thread was quicker
                return
            try:
                watcher(self)
            except BaseException:
                self._tell()
                raise

    def loss(self) -> LeaseLost:
        """Make the error that says why it was lost."""
        reason = self.reason or self.overdue()
        return LeaseLost(
            f"the lease of {self.spec.name!r} (fence {self.fence}) was lost: {_WHY[reason]}",
            lock=self.spec.name,
            reason=reason,
            fence=self.fence,
        )

    def renewal(self, ttl: float) -> Request:
        """Make the request that renews it for `ttl`."""
        args = self.token, to_ms(ttl), self.spec.settings, str(self.fence)
        return RENEW, self.spec.kept_keys, args


def forked(name: str, verb: str = "acquire") -> NotHeld:
    """Make the error for a child that was forked, as by a signal handler, during an operation.

    The operation goes on in the parent, with the parent's token. So the child sends no request: the
    server would take it for a retry, and parent and child would both hold the lock.
    """
    message = (
        f"this process was forked in the middle of {verb}() of {name!r}, which goes on in its "
        "parent: acquire the lock here"
    )
    return NotHeld(message, lock=name)
