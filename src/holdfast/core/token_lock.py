"""Locks that are identified only by the token in their key, as in redis-py's `Lock`.

Such a lock is never renewed, and another object, thread or process may release it. So a lease is
forgotten as soon as it is granted. Two things are remembered for a while:

- the waiter of the attempt: messages for it may still arrive, and a grant to a token that is not
  registered would be released;
- whether a request got no reply: then the release has to leave a tombstone.

A user may give the token, and even give the same token to two callers. In redis-py the two exclude
each other, but here the same token means the same holder. So a lock is acquired with a generated
token, which is then replaced by the given one. A given token is never released in the background:
by then another caller may hold the lock with it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

from holdfast.core.acquire import acquire
from holdfast.core.cleanup import cancel_token
from holdfast.core.lease_state import LeaseRef, LeaseState
from holdfast.core.retry import RetryResult, retry
from holdfast.core.spec import TOMBSTONE_MS, TTL_MAX, WINDOW_LONGEST, to_ms
from holdfast.core.token import is_holdfast_token
from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.scripts import ADOPT, RELEASE

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.scripts import Script

WINDOW_MS = to_ms(WINDOW_LONGEST)
"""How long the next waiter has the lock before it must confirm the grant. It does not depend on the
ttl of the released lock, which may be very short, and differ from the ttl of the waiter."""

MEMORY = int(TOMBSTONE_MS) / 1000
"""Seconds after which no request of an attempt can still be under way."""


class Acquisition(LeaseRef):
    """One acquisition, with a given token or a generated one. `undo` uses it."""

    __slots__ = ("_given",)

    def __init__(self, given: bytes | None) -> None:
        super().__init__()
        self._given = given

    @property
    def lease(self) -> LeaseState:
        """The lease, once it was granted."""
        if self._lease is None:
            raise RuntimeError("nothing was granted")
        return self._lease

    @property
    def token(self) -> bytes:
        """The value of the lock's key."""
        return self.lease.token.encode() if self._given is None else self._given


class TokenLocks:
    """The locks of this kind, of one client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recent: dict[str, tuple[float, LeaseState]] = {}
        """By generated token: when it was acquired, and its lease."""

    async def acquire(
        self, spec: LockSpec, timeout: float | None, acquisition: Acquisition
    ) -> None:
        """Acquire the lock; if this fails or is interrupted, call `undo`.

        Raises:
            NodeUnavailable: the lock expired before its token was replaced by the given one.
            HoldfastError: as `core.acquire.acquire`.
        """
        session = self._session
        await acquire(session, spec, timeout, acquisition)
        lease = acquisition.lease
        session.end_locally(lease)
        self._remember(lease)
        given = acquisition._given
        if given is None:
            return
        args = cast("str", given), spec.ttl_ms, lease.token, spec.settings  # given: any bytes
        adopted, _ = await self._send(ADOPT, spec, args, lease.process)
        if not adopted or session.port.now() >= lease.deadline:
            message = f"{spec.name!r} expired while it was being acquired: give it a longer timeout"
            raise NodeUnavailable(message, lock=spec.name)

    def undo_in_background(self, spec: LockSpec, acquisition: Acquisition) -> None:
        """Do the same as `undo` in the background, because nothing can be awaited."""
        lease = self._forget(acquisition)
        if lease is not None:
            self._session.cleanups.schedule(spec, lease.token)

    async def undo(self, spec: LockSpec, acquisition: Acquisition) -> None:
        """Release the lock after an acquisition that failed or was interrupted."""
        lease = self._forget(acquisition)
        if lease is None:
            return
        await cancel_token(self._session, spec, lease.token)
        if acquisition._given is not None:
            await self._release_given(spec, acquisition._given)
        lease.unregister_waiter()

    def _forget(self, acquisition: Acquisition) -> LeaseState | None:
        """Forget the lease, and return it; None in a forked child, where it is the parent's."""
        lease = acquisition._lease
        if lease is None or lease.process != self._session.port.process():
            return None
        self._session.end_locally(lease)
        self._recent.pop(lease.token, None)
        return lease

    async def release(self, spec: LockSpec, token: bytes, maybe_released: set[bytes]) -> bool:
        """Release the lock if the token holds it; return whether it did, now or before a retry.

        `maybe_released` has the tokens whose release got no reply, and may have been executed.

        Raises:
            OutcomeUnknown, NodeUnavailable: no reply; the caller may retry. A generated token is
                also released in the background.
        """
        session = self._session
        process = session.process
        is_generated = is_holdfast_token(token)
        name = token.decode() if is_generated else cast("str", token)
        _, lease = self._recent.pop(name, (0.0, None))
        # The reply carries a grant only if this process can pass it to the waiter.
        can_notify = is_generated and session.waiters.can_notify(name, spec.keys.lock)
        tombstone = "0" if can_notify else "0 quiet"
        if lease is not None and lease.needs_tombstone:
            tombstone = TOMBSTONE_MS
        args = name, WINDOW_MS, tombstone, spec.settings
        try:
            sent_at = session.port.now()
            reply, may_have_run = await self._send(RELEASE, spec, args, process)
            released = (
                session.waiters.on_release(reply, sent_at)
                or may_have_run
                or token in maybe_released
            )
            maybe_released.discard(token)
            return released  # noqa: TRY300 - an interrupt may strike here
        except BaseException as error:
            if process != session.port.process():  # a forked child
                raise
            maybe_released.add(token)
            session.waiters.recheck_all(spec)
            can_await = not isinstance(error, (GeneratorExit, HoldfastError))
            if is_generated and not can_await:  # the longest ttl, because it may have been extended
                session.cleanups.schedule(spec, name, longest=TTL_MAX)
            elif is_generated:
                await session.port.shielded(cancel_token(session, spec, name, longest=TTL_MAX))
            elif can_await:
                await session.port.shielded(self._release_given(spec, token))
            raise
        finally:
            if lease is not None:
                lease.unregister_waiter()

    async def _send(
        self, script: Script, spec: LockSpec, args: tuple[str, ...], process: int
    ) -> RetryResult:
        """Send a request, with retries, unless this process is forked in the meantime."""
        session = self._session

        verb = "release" if script is RELEASE else "acquire"

        def on_failure(error: HoldfastError) -> None:
            session.check_process(process, spec.name, verb)
            if isinstance(error, OutcomeUnknown):  # it may have granted the lock to a waiter here
                session.waiters.recheck_all(spec)

        request = script, spec.keys, args, spec.command_timeout
        result = await retry(session.deployment.call, request, on_failure)
        session.check_process(process, spec.name, verb)
        return result

    async def _release_given(self, spec: LockSpec, token: bytes) -> None:
        """Release a given token, once and now. Later another caller may hold the lock with it."""
        session, args = self._session, (cast("str", token), WINDOW_MS, "0 quiet", spec.settings)
        with contextlib.suppress(HoldfastError):
            sent_at = session.port.now()
            call = session.deployment.call
            reply = await call(RELEASE, spec.keys, args, spec.command_timeout)
            session.waiters.on_release(reply, sent_at)

    def _remember(self, lease: LeaseState) -> None:
        now, recent = self._session.port.now(), self._recent
        if lease.waiter is not None or lease.needs_tombstone:
            recent[lease.token] = now, lease
        # Remove old entries, which were released elsewhere or never. If another thread changes the
        # dictionary at the same time, the next acquisition removes them.
        with contextlib.suppress(StopIteration, RuntimeError, KeyError):
            while recent[token := next(iter(recent))][0] < now - MEMORY:
                _, old = recent.pop(token)
                old.unregister_waiter()
