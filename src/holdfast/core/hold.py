"""The life of one holding of a lock, from the grant to its end.

    HELD ──release──▶ RELEASING ──answered──▶ RELEASED
      └──deadline passed, or learnt from the server──▶ LOST

The rules, which everything else relies on:

1. A hold is believed in only while HELD, before its deadline, in the process that acquired it. The
   deadline needs nobody to notice it: `alive` compares it with the clock.
2. The deadline is counted from a moment before the first sending of the request that the server
   granted, never from its answer.
3. The deadline moves only by an answer that arrives while the hold is alive. LOST is final.
4. Nothing here talks to a server. Verbs (`acquire`, `release`, `extend`) and the renewer do.

Several threads touch a hold: its users, and the renewer. No lock guards it. Every deadline ever
written was confirmed by the server, so they may be written in any order. A grip is taken out before
one looks whether it was the last, so that of two at once at least one sees that it was. The right
to send the release, and each watcher, is taken off a list by `pop`: one thread gets it.

A loss is reported in this order: the state; `lease.lost` and the cancellation of an async body; the
event and the clean-up on the server; and only then the callbacks of the user. An exception in one
callback does not keep the others from being called.
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

    from holdfast.core.line import Waiter
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


SETTLE = 0.1
"""Seconds after which a lease that was handed over is renewed for its full ttl."""


class State(Enum):
    """Where a hold is in its life; the module's docstring draws it."""

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"
    LOST = "lost"


HELD, RELEASING, RELEASED, LOST = State


class Grip:
    """One caller's grip on a hold: what a lease of either face is to the core.

    It exists before the lock is asked for. So whoever is interrupted, at whatever moment, can tell
    from it what there is to give back.
    """

    __slots__ = ("__weakref__", "_hold")

    _hold: Hold | None

    def __init__(self) -> None:
        self._hold = None

    def _cancel_body(self) -> None:
        """Cancel what the caller does under the lock, where that is possible.

        Called when the hold is lost, in any thread.
        """


class Hold:
    """One holding of one lock, shared by the grips of all levels of a re-entered lock."""

    state = HELD
    reason: LossReason | None = None
    unanswered = False
    """The last renewal got no answer."""
    unsure = False
    """A release was sent and not answered: the server may have carried it out."""
    due: float
    """When the renewer will look at this. Written by the renewer alone."""
    tainted = False
    """A request of this token was abandoned and may yet arrive: its end leaves a tombstone."""
    forsaken: Callable[[], bool] | None = None
    """Says whether nobody will ever release it. Asked before each renewal."""
    waiter: Waiter | None = None
    """Who stood in line for it: the server may have more to say to them."""
    reported_dropped = False

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
        """The thread or task that acquired it; None once that task is done (see the renewer)."""
        self.process = process
        """Where the attempt began: in a child forked since then this lease is not valid."""
        self.deadline = asked_at + spec.validity
        self.renew_at = asked_at + spec.renew_after
        self.renew_until = asked_at + spec.max_hold
        self.renewing = spec.renew
        self.longest_ttl = spec.ttl
        """The most that was ever asked for: so long the server may keep it at worst."""
        self._watchers: list[Callable[[Hold], object]] = [session.lost]
        self._release_claims = [None]

    def alive(self, now: float, process: int) -> bool:
        """Whether its holder may believe in it at this moment."""
        return self.state is HELD and now < self.deadline and self.process == process

    def forget_waiter(self) -> None:
        """Forget the waiter that was granted this lease: a later message for it is returned."""
        if self.waiter is not None:
            self.waiter.forget()

    def claim_release(self) -> bool:
        """Return True to the first caller only: to the thread that sends the release.

        Two threads that release the last two levels at the same moment may both find no level left.
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
        """Whether the renewer still has to care for it."""
        return self.state is HELD

    @property
    def patience(self) -> float:
        """Seconds to wait for the answer to a renewal before it is tried again."""
        return self.spec.command_timeout

    def next_due(self) -> float:
        """When the renewer has something to do: renew it, end its renewal, or declare it lost."""
        if not self.renewing:
            return self.deadline
        return min(self.renew_at, self.renew_until)

    def begin(self, since: float, seconds: float, now: float) -> float:
        """Count a grant for `seconds` from `since` on; return when there is something to do.

        What was handed over is held for a short window only: unless it is released at once, it is
        soon renewed for its full ttl.
        """
        self.deadline = since + validity_of(seconds)
        self.renew_until = now + self.spec.max_hold
        if seconds < self.spec.ttl:
            self.renew_at = now + SETTLE
        return self.next_due()

    def prolong(self, asked_at: float, ttl: float, now: float, *, exactly: bool = False) -> bool:
        """Take in the server's word that a request sent at `asked_at` keeps it for `ttl` more.

        The deadline only grows, unless it is to be `exactly` this one. Returns False, and changes
        nothing, when the word came too late to be believed.
        """
        if now >= self.deadline:
            return False
        validity = validity_of(ttl)
        self.renew_at = asked_at + validity / RENEWALS_A_TTL
        self.deadline = asked_at + validity if exactly else max(asked_at + validity, self.deadline)
        self.unanswered = False
        return True

    def lose(self, reason: LossReason) -> None:
        """End it: it is over, and its watchers are told, each once."""
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
        """Why it is lost when its deadline passes now."""
        return "unreachable" if self.unanswered else "expired"

    def refusal(self, reply: Reply, now: float) -> LossReason:
        """Why it is lost when the server refuses a renewal or a release."""
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
        """Make the error that says that and why it was lost."""
        reason = self.reason or self.overdue()
        return LeaseLost(
            f"the lease of {self.spec.name!r} (fence {self.fence}) was lost: {_WHY[reason]}",
            lock=self.spec.name,
            reason=reason,
            fence=self.fence,
        )

    def renewal(self, ttl: float) -> Request:
        """Make the request that keeps it for `ttl` more."""
        args = self.token, to_ms(ttl), self.spec.settings, str(self.fence)
        return RENEW, self.spec.kept_keys, args


def forked(name: str, verb: str = "acquire") -> NotHeld:
    """Make the error for a child that was forked, as by a signal handler, amid an operation.

    The operation goes on in the parent, under the parent's token. So the child sends nothing more:
    the server would take it for a retry, and parent and child would both hold the lock.
    """
    message = (
        f"this process was forked in the middle of {verb}() of {name!r}, which goes on in its "
        "parent: acquire the lock here"
    )
    return NotHeld(message, lock=name)
