"""Locks that are known by the token in their key alone, as those of redis-py are.

Such a lock is never renewed, and may be released by another object, thread or process. So a lease
is forgotten as soon as it was granted. Two things are remembered for a while: the waiter of the
attempt, because a message for it may still arrive, and an unknown token's grant is returned; and
whether a request got no reply, because the release must leave a tombstone then.

A user may give the token, even the same one twice. In redis-py two such callers exclude one
another; here the same token is the same holder. So a lock is acquired with a token that was drawn,
which is then replaced by the given one. A given token is never released in the background: it may
be another caller's by then.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, cast

from holdfast.core.acquire import acquire
from holdfast.core.cleanup import cancel_token
from holdfast.core.hold import Grip, Hold
from holdfast.core.retry import Answer, retry
from holdfast.core.spec import TOMBSTONE_MS, TTL_MAX, WINDOW_LONGEST, to_ms
from holdfast.core.token import is_ours
from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.scripts import ADOPT, RELEASE

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.scripts import Script

WINDOW_MS = to_ms(WINDOW_LONGEST)
"""How long the next waiter has the lock before its client must confirm. Not the ttl of the lock
that is released: that may be very short, and other waiters may have given another one."""

MEMORY = int(TOMBSTONE_MS) / 1000
"""Seconds after which no request of an attempt can be under way any more."""


class Acquisition(Grip):
    """One acquisition, with a given token or a drawn one; what is to be undone follows from it."""

    __slots__ = ("_given",)

    def __init__(self, given: bytes | None) -> None:
        super().__init__()
        self._given = given

    @property
    def hold(self) -> Hold:
        """What was granted; only after it was."""
        if self._hold is None:
            raise RuntimeError("nothing was granted")
        return self._hold

    @property
    def token(self) -> bytes:
        """The value of the lock's key."""
        return self.hold.token.encode() if self._given is None else self._given


class TokenLocks:
    """The locks of this kind of one client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recent: dict[str, tuple[float, Hold]] = {}
        """By drawn token: when it was acquired, and what has to be remembered."""

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
        hold = acquisition.hold
        session.abandon(hold)
        self._remember(hold)
        given = acquisition._given
        if given is None:
            return
        args = cast("str", given), spec.ttl_ms, hold.token, spec.settings  # given: any bytes
        kept, _ = await self._send(ADOPT, spec, args, hold.process)
        if not kept or session.port.now() >= hold.deadline:
            message = f"{spec.name!r} expired while it was being acquired: give it a longer timeout"
            raise NodeUnavailable(message, lock=spec.name)

    def abandon(self, spec: LockSpec, acquisition: Acquisition) -> None:
        """As `undo`, but in the background, because nothing can be awaited."""
        hold = self._forget(acquisition)
        if hold is not None:
            self._session.cleanups.schedule(spec, hold.token)

    async def undo(self, spec: LockSpec, acquisition: Acquisition) -> None:
        """Release what an acquisition got that failed or was interrupted."""
        hold = self._forget(acquisition)
        if hold is None:
            return
        await cancel_token(self._session, spec, hold.token)
        if acquisition._given is not None:
            await self._release_given(spec, acquisition._given)
        hold.forget_waiter()

    def _forget(self, acquisition: Acquisition) -> Hold | None:
        """Forget what was granted, and return it; None in a forked child: it is the parent's."""
        hold = acquisition._hold
        if hold is None or hold.process != self._session.port.process():
            return None
        self._session.abandon(hold)
        self._recent.pop(hold.token, None)
        return hold

    async def release(self, spec: LockSpec, token: bytes, unsure: set[bytes]) -> bool:
        """Release the lock if the token has it; return whether it had it, now or before a retry.

        `unsure` keeps the tokens whose release got no reply.

        Raises:
            OutcomeUnknown, NodeUnavailable: no reply; the caller may try again. A token that was
                drawn is also released in the background.
        """
        session = self._session
        process = session.process
        drawn = is_ours(token)
        name = token.decode() if drawn else cast("str", token)
        _, hold = self._recent.pop(name, (0.0, None))
        # The reply carries a grant only if this process can pass it to the waiter.
        can_notify = drawn and session.waiters.can_notify(name, spec.keys[0])
        tombstone = "0" if can_notify else "0 quiet"
        if hold is not None and hold.needs_tombstone:
            tombstone = TOMBSTONE_MS
        args = name, WINDOW_MS, tombstone, spec.settings
        try:
            sent_at = session.port.now()
            reply, uncertain = await self._send(RELEASE, spec, args, process)
            released = session.waiters.on_release(reply, sent_at) or uncertain or token in unsure
            unsure.discard(token)
            return released  # noqa: TRY300 - an interrupt may strike here
        except BaseException as error:
            if process != session.port.process():  # closed in a forked child
                raise
            unsure.add(token)
            session.waiters.recheck_all(spec)
            can_await = not isinstance(error, (GeneratorExit, HoldfastError))
            if drawn and not can_await:  # with any ttl: it may have been extended
                session.cleanups.schedule(spec, name, longest=TTL_MAX)
            elif drawn:
                await session.port.shielded(cancel_token(session, spec, name, longest=TTL_MAX))
            elif can_await:
                await session.port.shielded(self._release_given(spec, token))
            raise
        finally:
            if hold is not None:
                hold.forget_waiter()

    async def _send(
        self, script: Script, spec: LockSpec, args: tuple[str, ...], process: int
    ) -> Answer:
        """Send a request until there is a reply, unless this process is forked meanwhile."""
        session = self._session

        verb = "release" if script is RELEASE else "acquire"

        def on_failure(error: HoldfastError) -> None:
            session.check_process(process, spec.name, verb)
            if isinstance(error, OutcomeUnknown):  # it may have granted the lock to another here
                session.waiters.recheck_all(spec)

        send = partial(session.deployment.call, script, spec.keys, args, spec.command_timeout)
        answer = await retry(send, on_failure)
        session.check_process(process, spec.name, verb)
        return answer

    async def _release_given(self, spec: LockSpec, token: bytes) -> None:
        """Release a given token, once and now: later it may be another caller's."""
        session, args = self._session, (cast("str", token), WINDOW_MS, "0 quiet", spec.settings)
        with contextlib.suppress(HoldfastError):
            sent_at = session.port.now()
            call = session.deployment.call
            reply = await call(RELEASE, spec.keys, args, spec.command_timeout)
            session.waiters.on_release(reply, sent_at)

    def _remember(self, hold: Hold) -> None:
        now, recent = self._session.port.now(), self._recent
        if hold.waiter is not None or hold.needs_tombstone:
            recent[hold.token] = now, hold
        # Others were released elsewhere, or never. If another thread changes the dictionary
        # meanwhile, the next acquisition removes them.
        with contextlib.suppress(StopIteration, RuntimeError, KeyError):
            while recent[token := next(iter(recent))][0] < now - MEMORY:
                _, old = recent.pop(token)
                old.forget_waiter()
