"""Acquiring: one script and one round trip when the lock is free.

What an attempt keeps to:

- One token for the whole attempt. A request without an answer is sent again under it, and the
  server answers as it did, or would have done, the first time.
- The deadline counts from the first of the sendings that were not answered.
- An attempt that ends without the lock, while some request of it may still be carried out, takes
  its token back: at once when it was interrupted, in the background when the server is silent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from holdfast.core.hold import Grip, Hold
from holdfast.core.renewer import taking_back
from holdfast.core.token import read_holder
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
    WouldDeadlock,
)
from holdfast.scripts import ACQUIRE, RELEASE

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder
    from holdfast.port import Reply

G = TypeVar("G", bound=Grip)

PAUSE_FIRST, PAUSE_LONGEST = 0.002, 0.25
"""Seconds between two askings for a held lock: doubled each time, up to the longest."""

TRIES = 3
"""Sendings of a request before the server counts as away: a connection that was closed while idle
may cost one, and an answer lost on the way another."""

LATE_GRANTS = 3
"""So many answers that outlive their own lease, and the ttl is too short for this server."""


async def acquire(session: Session, spec: LockSpec, timeout: float | None, grip: G) -> G:
    """Take the lock into `grip`, waiting up to `timeout` seconds (None: for ever, 0: not at all).

    Raises:
        AcquireTimeout: it was held by others all the while.
        WouldDeadlock: the caller holds it, it is not reentrant, and the caller would wait.
        NodeUnavailable: the server does not answer; nothing is held.
        ConfigurationError: the server will never grant it.
    """
    mine = session.mine(spec)
    if mine is not None and (spec.reentrant or timeout != 0):
        return _reenter(mine, spec, grip)
    port = session.port
    actor = port.actor()
    token = port.draw_token(actor, spec.encoded_label)
    tombstone = spec.tombstone_prefix + token.encode()
    keys, args = (spec.key, spec.fence_key, tombstone), (token, spec.ttl_ms, spec.fence_life_ms)
    attempt: _Attempt | None = None
    asked_at, limit = port.now(), spec.command_timeout
    try:
        while True:
            try:
                reply = await port.call(ACQUIRE, keys, args, limit)
            except (OutcomeUnknown, NodeUnavailable) as error:
                reply = error
            now = port.now()
            if isinstance(reply, int) and reply > 0 and now < asked_at + spec.validity:
                tainted = attempt is not None and attempt.abandoned
                hold = Hold(spec, token, tombstone, reply, asked_at, actor, session, grip, tainted)
                grip._hold = hold
                session.took(hold)
                return grip
            if attempt is None:
                attempt = _Attempt(spec, timeout, asked_at)
            wait = attempt.in_vain(reply, now, port.jitter())
            if wait:
                await port.sleep(wait)
            asked_at, limit = attempt.ask_again(port.now())
    except GeneratorExit:
        raise
    except BaseException as error:
        if grip._hold is not None:  # interrupted between the grant and its being handed over
            session.disown(grip._hold)
        # A refusal is an answer: that request was not carried out.
        asking = not isinstance(error, ConfigurationError)
        await _undo(session, spec, token, attempt, asking=asking)
        raise


async def _undo(
    session: Session, spec: LockSpec, token: str, attempt: _Attempt | None, *, asking: bool
) -> None:
    """Leave nothing behind of an attempt that ended without the lock."""
    if attempt is not None:
        asking = (asking and attempt.asking) or attempt.abandoned
    if asking and attempt is not None and attempt.silent:
        session.renewer.clean_up(spec, token)
    elif asking:
        await session.port.shielded(take_back(session, spec, token))


def _reenter(hold: Hold, spec: LockSpec, grip: G) -> G:
    if spec.reentrant:
        grip._hold = hold
        hold.grips.add(grip)
        return grip
    raise WouldDeadlock(
        f"{spec.name!r} is held by this very thread or task, which would wait for itself: "
        "give the lock reentrant=True, or release it first",
        lock=spec.name,
    )


class _Attempt:
    """What an attempt keeps in mind once its first asking was in vain."""

    def __init__(self, spec: LockSpec, timeout: float | None, began_at: float) -> None:
        self._spec = spec
        self._timeout = timeout
        self._give_up = math.inf if timeout is None else began_at + timeout
        # Whatever happens, the caller gets its answer by its timeout and one command's.
        self._end = self._give_up + spec.command_timeout
        self._asked_at: float | None = began_at
        self._answered_at = -math.inf
        self._failures = self._late = 0
        self._pause = PAUSE_FIRST
        self.asking = True
        """A request is under way."""
        self.abandoned = False
        """Some request will never be answered, and may still be carried out."""
        self.silent = False
        """The server did not answer the last request: waiting for it once more is in vain."""

    def ask_again(self, now: float) -> tuple[float, float]:
        """Begin another asking: say since when it counts, and how long to wait for its answer."""
        self.asking = True
        if self._asked_at is None:
            self._asked_at = now
        return self._asked_at, max(0.0, min(self._spec.command_timeout, self._end - now))

    def in_vain(self, reply: Reply | HoldfastError, now: float, jitter: float) -> float:
        """Take in what was not a grant; say how long to wait before asking again, or give up."""
        self.silent = isinstance(reply, HoldfastError)
        if isinstance(reply, HoldfastError):
            return self._unanswered(reply, now, jitter)
        self._asked_at = None
        if isinstance(reply, int):
            return self._too_late(now)
        self.asking = False
        self._failures, self._answered_at = 0, now
        return self._held_by(read_holder(*reply), now, jitter)

    def _unanswered(self, error: HoldfastError, now: float, jitter: float) -> float:
        self.asking = False
        self.abandoned = self.abandoned or isinstance(error, OutcomeUnknown)
        self._failures += 1
        # An outage is sat out by those who wait in line, for as long as what they know is fresh.
        given_up = self._failures >= TRIES and now > self._answered_at + self._spec.ttl
        if given_up or now >= self._end:
            name, node = self._spec.name, getattr(error, "node", "")
            message = f"{name!r} was not acquired: {error}"
            raise NodeUnavailable(message, lock=name, node=node) from error
        return 0.0 if self._failures < TRIES else PAUSE_LONGEST * jitter

    def _too_late(self, now: float) -> float:
        """The grant is too old to be worth anything. Asking again renews it, and counts anew."""
        self._late += 1
        if self._late < LATE_GRANTS and now < self._end:
            return 0.0
        raise NodeUnavailable(
            f"{self._spec.name!r} was not acquired: the server's answers take longer than the "
            f"lock's ttl of {self._spec.ttl} s: give it a longer ttl",
            lock=self._spec.name,
        )

    def _held_by(self, holder: Holder, now: float, jitter: float) -> float:
        if now >= self._give_up:
            raise AcquireTimeout(
                f"{self._spec.name!r} was not acquired within {self._timeout} s: held by {holder}",
                lock=self._spec.name,
                holder=holder,
            )
        wait = self._pause * (0.5 + 0.5 * jitter)
        self._pause = min(self._pause * 2, PAUSE_LONGEST)
        if holder.remaining is not None:
            wait = min(wait, holder.remaining + 0.001)
        return min(wait, self._give_up - now)


async def take_back(session: Session, spec: LockSpec, token: str) -> None:
    """Take a token back whatever became of it; in the background if it does not work at once."""
    done = False
    try:
        await session.port.call(RELEASE, *taking_back(spec, token), spec.command_timeout)
        done = True
    except HoldfastError:
        pass
    finally:
        if not done:
            session.renewer.clean_up(spec, token)
