"""The states of one attempt to acquire a lock on one server, without I/O.

A state determines what `core.server_acquire` does next. Each function below takes one kind of input
(a reply, an error, a pushed grant, …) and returns the attempt as it is afterwards.

| state      | input                                                       | next state            |
|------------|-------------------------------------------------------------|-----------------------|
| Ready      | a request is sent                                           | Requesting            |
| Requesting | the lock is granted, in time                                | Acquired              |
|            | the lock is granted, too late                               | Ready, Failed         |
|            | the lock is held, and the token has a place in the queue    | Queued                |
|            | the lock is held, and the client can subscribe now          | Ready                 |
|            | the lock is held, and the client polls                      | Paused                |
|            | the server is in quarantine                                 | Paused                |
|            | the lock is held or in quarantine, and the timeout is over  | Failed                |
|            | no reply                                                    | Ready, Paused, Failed |
|            | the token was granted the lock, and then evicted            | Evicted               |
|            | the lock is not needed, or can never be granted             | Failed                |
| Queued     | the waiter has to request again (see `core.waiter_channel`) | Ready                 |
|            | the timeout is over                                         | Failed                |
| Paused     | the pause is over                                           | Ready                 |
| Evicted    | another token is made                                       | Ready                 |
| Confirming | the server confirms the grant, in time                      | Acquired              |
|            | the server does not confirm it, or does not reply           | Ready, Failed         |

A pushed grant is handled after each reply, after a pause, and while queued. It leads to Acquired or
Confirming, even from Failed. It is ignored in Acquired and Evicted, and after a failure because the
lock is not needed or can never be granted.

Rules:

1. The deadline of a grant in a reply is computed from `sent_at`: when the first request since the
   last reply was sent. A retry does not change `sent_at`. The server does renew the expiry at a
   retry, so the key may expire later than the deadline. The rule for pushed grants is in
   `core.waiter_channel`.
2. A request without a reply may still arrive. So the release of its token leaves a tombstone.
3. A confirmation of a pushed grant uses the fence of its reply, not that of the message. Since the
   message, the lock may have been granted to the same token again.
4. The attempt alone determines what has to be removed from the server when it ends (`tombstone`).
   So an attempt may be interrupted between any two lines.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from holdfast.core.messages import HELD_LEAST, Held, NotNeeded
from holdfast.core.permits import describe_use
from holdfast.core.quarantine import ADVICE, EXPIRY, pause_in
from holdfast.core.retry import TRIES
from holdfast.core.spec import TOMBSTONE_MS, validity_of
from holdfast.core.time_budget import Backoff, TimeBudget
from holdfast.core.token import is_holdfast_token, read_holder
from holdfast.core.waiter import Grant
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
)
from holdfast.port import Quarantined, Unreplicated

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply

POLLING = Backoff(0.002, 0.25)
"""The pauses between two requests of a polling client."""

NO_EXPIRY = 30.0
"""Seconds after which a waiter requests again, if the key of the lock has no expiry."""

RECHECK = 1.0
"""Seconds between two requests of a queued token, if an earlier request may still arrive."""

LATE_GRANTS = 3
"""Late grants in a row after which the ttl counts as too short."""


class Ready(NamedTuple):
    """A request may be sent."""


class Requesting(NamedTuple):
    """A request is under way."""


class Queued(NamedTuple):
    """The token waits in the server's queue for a message."""

    recheck_after: float
    """Seconds after `sent_at` at which one waiter of this client, not necessarily this one,
    requests again: about when the lease of the holder expires."""
    place_was_lost: bool
    """The token had lost its place and got it back. The server lost the queue, a grant was missed,
    or an operator evicted the token. Other waiters of this client may have lost theirs too."""


class Paused(NamedTuple):
    """The next request is sent after a pause."""

    seconds: float
    why: str = ""
    """The error that caused the pause, if any."""


class Evicted(NamedTuple):
    """The token was granted the lock, and evicted before the grant arrived here.

    The server has a tombstone for it. The attempt continues with another token and the same ticket.
    """


class Confirming(NamedTuple):
    """A pushed grant may be old. A renewal has to confirm it."""


class Acquired(NamedTuple):
    """The lock is held."""

    grant: Grant
    is_unconfirmed: bool
    """The grant is valid for a short window only, and no request has confirmed it."""


class Failed(NamedTuple):
    """The attempt is over, without the lock."""

    error: Exception


State: TypeAlias = Ready | Requesting | Queued | Paused | Evicted | Confirming | Acquired | Failed


class Moment(NamedTuple):
    """What a transition depends on, besides the attempt and its input."""

    now: float
    jitter: float
    """A random number, at least 0 and below 1."""
    closed: bool
    """The client was closed."""
    should_subscribe: bool
    """The attempt has no waiter yet, and may subscribe."""


class Attempt(NamedTuple):
    """One attempt to acquire a lock: its state, and what the replies so far have shown."""

    budget: TimeBudget
    sent_at: float
    """When the first request since the last reply was sent."""
    replied_at: float
    """When the last reply other than a grant arrived; -inf before the first. Behind Sentinels it
    begins as the start of the attempt: if every reply is "too few replicas", the attempt still
    retries for one ttl."""
    state: State = Requesting()
    failures: int = 0
    """Requests without a reply, since the last reply."""
    late_grants: int = 0
    """Grants in a row that arrived too late to be used."""
    backoff: Backoff = POLLING
    """The pauses between two requests while the client polls."""
    ticket: str = "0"
    """The last place in the queue, of this token or of the one that was evicted; "0" for none."""
    on_server: bool = False
    """As far as is known, the token has the lock or a place in the queue."""
    needs_tombstone: bool = False
    """A request of this token got no reply, and may still arrive. A later reply "held by another"
    changes nothing: the earlier request may arrive after that one. Only an eviction resets it."""
    unreplicated: Unreplicated | None = None
    """The last error about missing replicas, since the last reply that was no grant. It explains a
    failure better than later errors."""
    holder: tuple[bytes, int] | None = None
    """The last known holder: its token, and the milliseconds that were left."""
    used: int = 0
    """Of a semaphore or an rwlock, the permits in use at the last refusal."""

    def ready(self) -> Attempt:
        """Return the attempt in the state Ready."""
        return self._replace(state=Ready())

    def sending(self, now: float) -> Attempt:
        """Return the attempt with a request under way that is sent now."""
        sent_at = self.sent_at if self.failures else now
        return self._replace(state=Requesting(), sent_at=sent_at)

    @property
    def tombstone(self) -> str:
        """How long (ms) the tombstone of its release is kept; "" if there is nothing to release."""
        if self.needs_tombstone or isinstance(self.state, Requesting):
            return TOMBSTONE_MS
        return "0" if self.on_server else ""

    def why(self, spec: LockSpec) -> str:
        """Describe why the lock is not acquired yet, as far as is known."""
        if isinstance(self.state, Paused) and self.state.why:
            return self.state.why
        return spec.kind.awaits or self.held_by(spec)

    def held_by(self, spec: LockSpec) -> str:
        """Describe the holder, as far as is known."""
        if self.holder is None:
            return "not granted yet"
        holder = read_holder(*self.holder)
        return describe_use(spec, self.used, holder) if spec.limit else f"held by {holder}"


def begin(spec: LockSpec, timeout: float | None, sent_at: float) -> Attempt:
    """Return an attempt whose first request was sent at `sent_at`."""
    replied_at = sent_at if _waits_for_failover(spec, timeout) else -math.inf
    return Attempt(TimeBudget.begin(spec, timeout, sent_at), sent_at, replied_at)


def _waits_for_failover(spec: LockSpec, timeout: float | None) -> bool:
    """Whether the lock is behind Sentinels, and the caller can wait for a failover.

    Only behind Sentinels is the ttl of a lock on one server limited. A party of a barrier does not
    wait: meanwhile the server may forget its generation, and a retry would arrive a second time.
    """
    return spec.longest_ttl < math.inf and timeout != 0 and not spec.kind.is_party


def on_reply(attempt: Attempt, spec: LockSpec, reply: Reply, moment: Moment) -> Attempt:
    """Return the attempt after the reply to a request."""
    now, sent_at = moment.now, attempt.sent_at
    if isinstance(reply, int) and reply:
        if now < sent_at + spec.usable:
            return _acquired(attempt, Grant(reply, spec.ttl, sent_at), is_unconfirmed=False)
        return _on_late_grant(attempt, spec, now)
    budget = attempt.budget.after_reply(sent_at, now)
    attempt = attempt._replace(
        budget=budget, failures=0, late_grants=0, replied_at=now, unreplicated=None
    )
    if reply == 0:
        return attempt._replace(state=Evicted(), on_server=False, needs_tombstone=False)
    if len(reply) < HELD_LEAST:  # not "held": the wait is over without the lock
        return attempt._replace(state=Failed(NotNeeded(reply)), on_server=False)
    return _on_held(attempt, spec, Held(*reply), moment)


def _on_late_grant(attempt: Attempt, spec: LockSpec, now: float) -> Attempt:
    """The grant arrived after its own deadline. The attempt requests again.

    That request renews the grant, and its send time is the new start. The token holds the lock on
    the server, even if that request gets no reply.
    """
    late = attempt.late_grants + 1
    attempt = attempt._replace(failures=0, late_grants=late, on_server=True, state=Ready())
    if late < LATE_GRANTS and now < attempt.budget.end:
        return attempt
    message = (
        f"{spec.name!r} was not acquired: the replies of the server take longer than the lock's "
        f"ttl of {spec.ttl} s: give the lock a longer ttl"
    )
    return attempt._replace(state=Failed(NodeUnavailable(message, lock=spec.name)))


def _on_held(attempt: Attempt, spec: LockSpec, held: Held, moment: Moment) -> Attempt:
    has_place = held.ticket != b"0"
    # The token keeps a place that it got before, even if this request did not ask for one.
    ticket = held.ticket.decode() if has_place else attempt.ticket
    attempt = attempt._replace(ticket=ticket, holder=(held.holder, held.left_ms), used=held.used)
    attempt = attempt._replace(on_server=ticket != "0" or spec.kind.is_party)
    if moment.now >= (give_up := attempt.budget.give_up):
        return on_timeout(attempt, spec)
    if moment.should_subscribe:
        return attempt._replace(state=Ready())
    pause = attempt.backoff.pause(moment.jitter)
    recheck_after = NO_EXPIRY if held.left_ms < 0 else held.left_ms / 1000 + EXPIRY
    if not is_holdfast_token(held.holder):
        recheck_after = min(recheck_after, pause)  # other libraries notify no waiter
    state: State = Queued(recheck_after, bool(held.place_was_lost))
    if not has_place:
        state = Paused(min(pause, recheck_after, give_up - moment.now))
    return attempt._replace(state=state, backoff=attempt.backoff.doubled())


def on_error(attempt: Attempt, spec: LockSpec, error: HoldfastError, moment: Moment) -> Attempt:
    """Return the attempt after a request that got no reply, or a refusal."""
    if isinstance(error, ConfigurationError):
        message = f"{spec.name!r} was not acquired: {error}"
        return attempt._replace(state=Failed(ConfigurationError(message, lock=spec.name)))
    if isinstance(error, Quarantined):
        return _on_quarantine(attempt, spec, error, moment)
    if isinstance(error, OutcomeUnknown):
        unreplicated = error if isinstance(error, Unreplicated) else attempt.unreplicated
        attempt = attempt._replace(needs_tombstone=True, unreplicated=unreplicated)
    attempt = attempt._replace(failures=attempt.failures + 1)
    now, budget = moment.now, attempt.budget
    if moment.closed or now >= budget.end:
        return _fail_unavailable(attempt, spec, error, moment)
    if attempt.failures < TRIES:
        return attempt.ready()
    # The server is unreachable. Retry while the last reply is younger than one ttl. Behind
    # Sentinels, retry until the timeout instead, unless replicas are missing: then the token may
    # hold the lock, and only the end of this attempt releases it.
    replied_lately = now <= attempt.replied_at + spec.ttl
    waits_for_failover = _waits_for_failover(spec, budget.timeout) and attempt.unreplicated is None
    if not replied_lately and not waits_for_failover:
        return _fail_unavailable(attempt, spec, error, moment)
    pause = min(POLLING.longest * moment.jitter, budget.end - now)
    return attempt._replace(state=Paused(pause, str(error)))


def _on_quarantine(attempt: Attempt, spec: LockSpec, error: Quarantined, moment: Moment) -> Attempt:
    """A quarantine is a reply: the server ran nothing, and the next request is no retry."""
    now, give_up = moment.now, attempt.budget.give_up
    attempt = attempt._replace(failures=0, replied_at=now)
    if moment.closed or now >= give_up:
        return _fail_unavailable(attempt, spec, error, moment)
    pause = min(pause_in(error, moment.jitter), give_up - now)
    return attempt._replace(state=Paused(pause, str(error)))


def _fail_unavailable(
    attempt: Attempt, spec: LockSpec, error: HoldfastError, moment: Moment
) -> Attempt:
    error = attempt.unreplicated or error
    why = "this client was closed: create a new client" if moment.closed else str(error)
    if isinstance(error, Quarantined) and not moment.closed:
        why = f"{why}: {ADVICE}"
    message, node = f"{spec.name!r} was not acquired: {why}", getattr(error, "node", "")
    return attempt._replace(state=Failed(NodeUnavailable(message, lock=spec.name, node=node)))


def on_timeout(attempt: Attempt, spec: LockSpec) -> Attempt:
    """Return the attempt when its timeout is over and another client holds the lock."""
    holder = attempt.holder and read_holder(*attempt.holder)
    timeout, why = attempt.budget.timeout, attempt.held_by(spec)
    message = f"{spec.name!r} was not acquired within {timeout} s: {why}"
    return attempt._replace(state=Failed(AcquireTimeout(message, lock=spec.name, holder=holder)))


def on_wake(attempt: Attempt, spec: LockSpec, now: float, *, must_request: bool) -> Attempt:
    """Return a queued attempt after its waiter was woken, or after `wake_at`."""
    if must_request:
        return attempt.ready()
    if now >= attempt.budget.give_up:
        return on_timeout(attempt, spec)
    return attempt.ready() if now >= wake_at(attempt, spec) else attempt


def wake_at(attempt: Attempt, spec: LockSpec) -> float:
    """Return when a queued attempt has something to do, unless a message arrives before.

    A request without a reply may still arrive, and be granted without a message. So after such a
    request the attempt requests again every second. A party of a barrier renews its lease.
    """
    give_up = attempt.budget.give_up
    if spec.kind.is_party:
        give_up = min(give_up, attempt.sent_at + spec.renew_after)
    return min(give_up, attempt.replied_at + RECHECK) if attempt.needs_tombstone else give_up


def on_grant(attempt: Attempt, spec: LockSpec, grant: Grant, now: float) -> Attempt:
    """Return the attempt after a pushed grant. The grant overrides a failure.

    A renewal has to confirm the grant in three cases: it may be old; the lock has replicas (WAIT
    covers only the writes of this connection, and another client wrote the grant); the lock is
    not renewed (the grant lasts only one window).
    """
    match attempt.state:
        case Acquired() | Evicted() | Failed(NotNeeded() | ConfigurationError()):
            return attempt
    if spec.renew and not spec.replicas:
        # The window depends on the ttl of the client that released, which may exceed this ttl.
        if grant.seconds > spec.ttl:
            grant = grant._replace(seconds=spec.ttl)
        min_validity = spec.validity - spec.usable
        least = max(grant.seconds / 2, min_validity)
        if now + least < grant.since + validity_of(grant.seconds):
            return _acquired(attempt, grant, is_unconfirmed=True)
    return attempt._replace(state=Confirming(), on_server=True)


def on_confirmation(
    attempt: Attempt, spec: LockSpec, reply: Reply | HoldfastError, sent_at: float, moment: Moment
) -> Attempt:
    """Return the attempt after the renewal that had to confirm a grant.

    The fence is the one in this reply. The push may be older than a later grant to this token.
    """
    if isinstance(reply, ConfigurationError):
        return on_error(attempt, spec, reply, moment)
    if isinstance(reply, HoldfastError) or not reply or moment.now >= sent_at + spec.usable:
        return attempt.ready()
    return _acquired(attempt, Grant(reply, spec.ttl, sent_at), is_unconfirmed=False)


def on_holder(attempt: Attempt, token: bytes, left_ms: int) -> Attempt:
    """Return the attempt after a query for its position, which also names the holder."""
    return attempt._replace(holder=(token, left_ms)) if token else attempt


def _acquired(attempt: Attempt, grant: Grant, *, is_unconfirmed: bool) -> Attempt:
    return attempt._replace(state=Acquired(grant, is_unconfirmed), on_server=True)
