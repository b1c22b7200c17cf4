"""The states of one attempt to acquire a lock on one server. No I/O: `core.server_acquire` does it.

| state      | input                                                  | next state             |
|------------|--------------------------------------------------------|------------------------|
| Requesting | the lock is granted, in time                           | Acquired               |
|            | it is granted, too late                                | Ready, Failed          |
|            | it is held, and the token has a place in the queue     | Queued                 |
|            | it is held, and the client may subscribe now           | Ready                  |
|            | it is held, and the client polls; or quarantine        | Paused                 |
|            | the same, and the timeout is over                      | Failed                 |
|            | no reply                                               | Ready, Paused, Failed  |
|            | the token was granted the lock, and then evicted       | Evicted                |
|            | the lock is not needed, or can never be granted        | Failed                 |
| Queued     | a waiter has to request again (`core.line` says when)  | Ready                  |
|            | the timeout is over                                    | Failed                 |
| Paused     | the pause is over                                      | Ready                  |
| Evicted    | another token is drawn                                 | Ready                  |
| Confirming | the server confirms the grant, in time                 | Acquired               |
|            | it does not, or does not reply                         | Ready, Failed          |
| Ready      | a request is sent                                      | Requesting             |
| Failed     | its error is raised                                    | Raised                 |

A pushed grant is looked at after each reply, after a pause, and while queued. It leads to Acquired
or Confirming, unless the state is Acquired, Evicted, or a failure that is final.

A state says what `server_acquire` does next. Each function below takes one kind of input (a reply,
an error, a pushed grant, …) and returns the attempt as it is afterwards.

Rules:

1. A grant in a reply counts from the first request since the last reply (`sent_at`), not from a
   retry. That is stricter than needed: a retry renews the expiry. `core.line` has the rule for
   pushed grants.
2. A request without a reply may still arrive. So the release of its token leaves a tombstone.
3. What is to be removed from the server when the attempt ends follows from the attempt
   (`tombstone`). So it does not matter between which two lines an attempt is interrupted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from holdfast.core.line import Grant
from holdfast.core.messages import Held
from holdfast.core.quarantine import ADVICE, EXPIRY, pause_in
from holdfast.core.retry import TRIES
from holdfast.core.spec import TOMBSTONE_MS, validity_of
from holdfast.core.time_budget import Backoff, TimeBudget
from holdfast.core.token import is_ours, read_holder
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
)
from holdfast.port import Quarantined, Uncopied

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply

POLLING = Backoff(0.002, 0.25)
"""Between two requests of a polling client."""

NO_EXPIRY = 30.0
"""Seconds after which a waiter requests a lock again whose key has no expiry."""

RECHECK = 1.0
"""Seconds between two requests of a queued token, one of whose requests may still arrive."""

LATE_GRANTS = 3
"""After so many grants in a row that arrive too late, the ttl counts as too short."""


class NotNeeded(Exception):  # noqa: N818 - no error: an outcome of `spec.taking`
    """The lock is not needed: `reply` is what the script replied instead of acquiring it."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


class Ready(NamedTuple):
    """A request may be sent."""


class Requesting(NamedTuple):
    """A request is under way."""


class Queued(NamedTuple):
    """The token waits in the server's queue for a message."""

    recheck_after: float
    """A waiter of this client requests again so many seconds after `sent_at`: about when the lease
    of the holder expires."""
    was_put_back: bool
    """The token had lost its place: the server lost the queue, a grant was missed, or an operator
    evicted the token. Other waiters of this client may have lost theirs too."""


class Paused(NamedTuple):
    """The next request is sent after a pause."""

    seconds: float
    why: str = ""
    """The error that is the reason, if any."""


class Evicted(NamedTuple):
    """The token was granted the lock, and evicted before the grant arrived here.

    The server has a tombstone for it. The attempt goes on with another token and the same ticket.
    """


class Confirming(NamedTuple):
    """A grant was pushed that may be old: a renewal confirms it."""


class Acquired(NamedTuple):
    """The lock is held."""

    grant: Grant
    is_pushed: bool
    """It is valid for a short window only, and no request confirmed it."""


class Failed(NamedTuple):
    """The attempt is over, without the lock."""

    error: Exception


class Raised(NamedTuple):
    """The error of `Failed` was raised, and is not kept: it refers to the frame that raised it."""


State: TypeAlias = (
    Ready | Requesting | Queued | Paused | Evicted | Confirming | Acquired | Failed | Raised
)


class Moment(NamedTuple):
    """What a transition may depend on besides the attempt and its input."""

    now: float
    jitter: float
    """A random number, at least 0 and below 1."""
    closed: bool
    """The client was closed."""
    can_queue: bool
    """The attempt has no waiter yet, and may subscribe."""


class Attempt(NamedTuple):
    """One attempt to acquire a lock: its state, and what it has learnt so far."""

    budget: TimeBudget
    sent_at: float
    """When the first request since the last reply was sent."""
    replied_at: float
    """When the last reply arrived that was no grant; -inf before the first one. Behind Sentinels it
    begins as the start of the attempt, so that missing replicas are waited for, for one ttl."""
    state: State = Requesting()
    failures: int = 0
    """Requests without a reply, since the last reply."""
    late_grants: int = 0
    """Grants in a row that arrived too late to be used."""
    backoff: Backoff = POLLING
    """Between two requests of a client that polls."""
    ticket: str = "0"
    """The place in the queue that the server gave last, to this token or to the one that was
    evicted; "0" for none."""
    on_server: bool = False
    """As far as is known, the token has the lock or a place in the queue."""
    needs_tombstone: bool = False
    """A request of this token got no reply, and may still be carried out; or it was granted too
    late: it is the holder on the server."""
    uncopied: Uncopied | None = None
    """The last error about missing replicas. It explains a failure better than a later one."""
    holder: tuple[bytes, int] | None = None
    """The last known holder: its token, and the milliseconds that were left."""

    def ready(self) -> Attempt:
        """Return the attempt as it is when it may send a request."""
        return self._replace(state=Ready())

    def sending(self, now: float) -> Attempt:
        """Return the attempt as it is while a request that is sent now is under way."""
        sent_at = self.sent_at if self.failures else now
        return self._replace(state=Requesting(), sent_at=sent_at)

    @property
    def tombstone(self) -> str:
        """How long (ms) the tombstone of its release stays; "" if there is nothing to release."""
        if self.needs_tombstone or isinstance(self.state, Requesting):
            return TOMBSTONE_MS
        return "0" if self.on_server else ""

    def why(self) -> str:
        """Say why the lock is not acquired yet, as far as is known."""
        if isinstance(self.state, Paused) and self.state.why:
            return self.state.why
        return f"held by {read_holder(*self.holder)}" if self.holder else "not granted yet"


def begin(spec: LockSpec, timeout: float | None, sent_at: float) -> Attempt:
    """Return an attempt whose first request was sent at `sent_at`."""
    replied_at = sent_at if _waits_for_failover(spec, timeout) else -math.inf
    return Attempt(TimeBudget.begin(spec, timeout, sent_at), sent_at, replied_at)


def _waits_for_failover(spec: LockSpec, timeout: float | None) -> bool:
    """Whether another server may take over, behind Sentinels, and the caller can wait for it."""
    return spec.longest_ttl < math.inf and timeout != 0


def on_reply(attempt: Attempt, spec: LockSpec, reply: Reply, moment: Moment) -> Attempt:
    """Return the attempt after the reply to a request."""
    now, sent_at = moment.now, attempt.sent_at
    if isinstance(reply, int) and reply:
        if now < sent_at + spec.usable:
            return _acquired(attempt, Grant(reply, spec.ttl, sent_at), is_pushed=False)
        return _on_late_grant(attempt, spec, now)
    attempt = attempt._replace(
        budget=attempt.budget.after_reply(sent_at, now), failures=0, late_grants=0, replied_at=now
    )
    if reply == 0:
        return attempt._replace(state=Evicted(), on_server=False, needs_tombstone=False)
    if len(reply) < len(Held._fields):
        return attempt._replace(state=Failed(NotNeeded(reply)), on_server=False)
    return _on_held(attempt, spec, Held(*reply), moment)


def _on_late_grant(attempt: Attempt, spec: LockSpec, now: float) -> Attempt:
    """The grant is too old to be valid. Another request renews it, and counts from its own start.

    The token is the holder on the server, even if that request gets no reply.
    """
    late = attempt.late_grants + 1
    attempt = attempt._replace(failures=0, late_grants=late, needs_tombstone=True, state=Ready())
    if late < LATE_GRANTS and now < attempt.budget.end:
        return attempt
    message = (
        f"{spec.name!r} was not acquired: the server's answers take longer than the lock's ttl of "
        f"{spec.ttl} s: give it a longer ttl"
    )
    return attempt._replace(state=Failed(NodeUnavailable(message, lock=spec.name)))


def _on_held(attempt: Attempt, spec: LockSpec, held: Held, moment: Moment) -> Attempt:
    has_place = held.ticket != b"0"
    if has_place:
        attempt = attempt._replace(ticket=held.ticket.decode())
    # A place that it got before is kept, even if this request did not ask for one.
    holder = held.holder, held.left_ms
    attempt = attempt._replace(on_server=attempt.ticket != "0", holder=holder)
    give_up = attempt.budget.give_up
    if moment.now >= give_up:
        return on_timeout(attempt, spec)
    if moment.can_queue:
        return attempt._replace(state=Ready())
    pause = attempt.backoff.pause(moment.jitter)
    left = NO_EXPIRY if held.left_ms < 0 else held.left_ms / 1000 + EXPIRY
    if not is_ours(held.holder):
        left = min(left, pause)  # a foreign client does not hand the lock over
    state: State = Queued(left, bool(held.was_put_back))
    if not has_place:
        state = Paused(min(pause, left, give_up - moment.now))
    return attempt._replace(state=state, backoff=attempt.backoff.doubled())


def on_error(attempt: Attempt, spec: LockSpec, error: HoldfastError, moment: Moment) -> Attempt:
    """Return the attempt after a request that got no reply, or a refusal."""
    if isinstance(error, ConfigurationError):
        if not error.lock:
            error = ConfigurationError(f"{spec.name!r} was not acquired: {error}", lock=spec.name)
        return attempt._replace(state=Failed(error))
    if isinstance(error, Quarantined):
        return _on_quarantine(attempt, spec, error, moment)
    if isinstance(error, OutcomeUnknown):
        uncopied = error if isinstance(error, Uncopied) else attempt.uncopied
        attempt = attempt._replace(needs_tombstone=True, uncopied=uncopied)
    attempt = attempt._replace(failures=attempt.failures + 1)
    now, budget = moment.now, attempt.budget
    if moment.closed or now >= budget.end:
        return _fail_unavailable(attempt, spec, error, moment)
    if attempt.failures < TRIES:
        return attempt.ready()
    # An attempt that has had a reply waits through an outage until one ttl after it. Behind
    # Sentinels every attempt waits until its timeout. But if replicas are missing, its token may
    # have the lock, and prevent other clients from acquiring it: then not longer than the ttl.
    replied_lately = now <= attempt.replied_at + spec.ttl
    waits_for_failover = _waits_for_failover(spec, budget.timeout) and attempt.uncopied is None
    if not replied_lately and not waits_for_failover:
        return _fail_unavailable(attempt, spec, error, moment)
    pause = min(POLLING.longest * moment.jitter, budget.end - now)
    return attempt._replace(state=Paused(pause, str(error)))


def _on_quarantine(attempt: Attempt, spec: LockSpec, error: Quarantined, moment: Moment) -> Attempt:
    """It is a reply, and nothing was carried out."""
    now, give_up = moment.now, attempt.budget.give_up
    attempt = attempt._replace(failures=0, replied_at=now)
    if moment.closed or now >= give_up:
        return _fail_unavailable(attempt, spec, error, moment)
    pause = min(pause_in(error, moment.jitter), give_up - now)
    return attempt._replace(state=Paused(pause, str(error)))


def _fail_unavailable(
    attempt: Attempt, spec: LockSpec, error: HoldfastError, moment: Moment
) -> Attempt:
    error = attempt.uncopied or error
    why = "this client was closed" if moment.closed else str(error)
    if isinstance(error, Quarantined) and not moment.closed:
        why = f"{why}: {ADVICE}"
    message, node = f"{spec.name!r} was not acquired: {why}", getattr(error, "node", "")
    return attempt._replace(state=Failed(NodeUnavailable(message, lock=spec.name, node=node)))


def on_timeout(attempt: Attempt, spec: LockSpec) -> Attempt:
    """Return the attempt when its timeout is over and another client holds the lock."""
    holder = attempt.holder and read_holder(*attempt.holder)
    timeout = attempt.budget.timeout
    message = f"{spec.name!r} was not acquired within {timeout} s: held by {holder}"
    return attempt._replace(state=Failed(AcquireTimeout(message, lock=spec.name, holder=holder)))


def on_wake(attempt: Attempt, spec: LockSpec, now: float, *, must_request: bool) -> Attempt:
    """Return a queued attempt when its waiter was woken, or when `wake_at` has come.

    A request without a reply may still arrive and be granted, without a message. So after one the
    attempt requests again every second.
    """
    if must_request:
        return attempt.ready()
    if now >= attempt.budget.give_up:
        return on_timeout(attempt, spec)
    return attempt.ready() if now >= wake_at(attempt) else attempt


def wake_at(attempt: Attempt) -> float:
    """Return when a queued attempt has something to do, if no message arrives before."""
    give_up = attempt.budget.give_up
    return min(give_up, attempt.replied_at + RECHECK) if attempt.needs_tombstone else give_up


def on_grant(attempt: Attempt, spec: LockSpec, grant: Grant, now: float) -> Attempt:
    """Return the attempt after a pushed grant, which counts more than a failure.

    A grant that may be old is to be confirmed. So is a grant of a lock with replicas, because the
    connection of another client wrote it, and of a lock that is not renewed, because the grant is
    for a short window only.
    """
    match attempt.state:
        case Acquired() | Evicted() | Failed(NotNeeded() | ConfigurationError()):
            return attempt
    if spec.renew and not spec.replicas:
        # The window follows the ttl of the client that released: it may exceed this lock's.
        grant = grant._replace(seconds=min(grant.seconds, spec.ttl))
        min_validity = spec.validity - spec.usable
        least = max(grant.seconds / 2, min_validity)
        if now + least < grant.since + validity_of(grant.seconds):
            return _acquired(attempt, grant, is_pushed=True)
    return attempt._replace(state=Confirming(), on_server=True)


def on_confirmation(
    attempt: Attempt, spec: LockSpec, reply: Reply | HoldfastError, sent_at: float, moment: Moment
) -> Attempt:
    """Return the attempt after the renewal that was to confirm a grant.

    The fence is the one of this reply: the push may be older than a later grant to this token.
    """
    if isinstance(reply, ConfigurationError):
        return on_error(attempt, spec, reply, moment)
    if isinstance(reply, HoldfastError) or not reply or moment.now >= sent_at + spec.usable:
        return attempt.ready()
    return _acquired(attempt, Grant(reply, spec.ttl, sent_at), is_pushed=False)


def on_holder(attempt: Attempt, token: bytes, left_ms: int) -> Attempt:
    """Return the attempt after a look at the queue, which names the holder."""
    return attempt._replace(holder=(token, left_ms)) if token else attempt


def _acquired(attempt: Attempt, grant: Grant, *, is_pushed: bool) -> Attempt:
    return attempt._replace(state=Acquired(grant, is_pushed), on_server=True)
