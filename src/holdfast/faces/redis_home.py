"""What the locks of one redis-py client share: a client of holdfast, and what it must remember.

Who takes a lock is known by the token in its key, and by nothing else, so the core's hold is let go
of as soon as it was granted. A home lives as long as the pool of connections it was made for, and
under asyncio no longer than its loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from holdfast.core.acquire import acquire
from holdfast.core.cleanup import cancel_token
from holdfast.core.hold import Grip, Hold, forked
from holdfast.core.retry import Answer, retry
from holdfast.core.spec import TOMBSTONE_MS, TTL_MAX, WINDOW_LONGEST, LockSpec, to_ms
from holdfast.core.token import is_ours
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
)
from holdfast.faces.async_client import AsyncClient
from holdfast.faces.client import Client
from holdfast.scripts import ADOPT, RELEASE
from holdfast.wire.process import generation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import AsyncGeneratorType

    from holdfast.port import Reply
    from holdfast.scripts import Script

Number: TypeAlias = "float | int"
C = TypeVar("C", Client, AsyncClient)

COMMAND_TIMEOUT = 1.0
"""Seconds to wait for one answer, however short the lock's `timeout` is: nothing is renewed."""

WINDOW_MS = to_ms(WINDOW_LONGEST)
"""How long a released lock is the next waiter's before it is heard from, however short-lived the
one before was."""

MEMORY = int(TOMBSTONE_MS) / 1000
"""Seconds after which nothing that was sent about a taking can be under way any more."""


class Taking(Grip):
    """One taking of a lock: what there is to give back, at whatever moment it is interrupted."""

    __slots__ = ("given",)

    def __init__(self, given: bytes | None) -> None:
        super().__init__()
        self.given = given

    @property
    def hold(self) -> Hold:
        """What was granted; only after it was."""
        if self._hold is None:
            raise RuntimeError("nothing was granted")
        return self._hold

    @property
    def token(self) -> bytes:
        """What stands in the lock's key."""
        return self.hold.token.encode() if self.given is None else self.given


class Home:
    """What all locks made by one redis-py client share: a client of holdfast.

    Of what was taken it remembers two things, for as long as they matter: who stood in line, for
    whom a push may still be on its way (unknown here, it would be handed back, and the lock with
    it); and whether some request was abandoned, so that releasing has to leave a tombstone.
    """

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client
        self.session = client._session  # noqa: SLF001 - a face of the same house
        self.closing: AsyncGeneratorType[None, None] | None = None
        self._recent: dict[str, tuple[float, Hold]] = {}

    async def take(self, spec: LockSpec, timeout: float | None, taking: Taking) -> None:
        """Take the lock, and have it stand in its key as it is to.

        Interrupted or failed, it needs `undo`.
        """
        session = self.session
        await acquire(session, spec, timeout, taking)
        hold = taking.hold
        session.abandon(hold)
        self._remember(hold)
        if taking.given is not None:
            name = cast("str", taking.given)  # any bytes; what packs it takes both
            args = name, spec.ttl_ms, hold.token, spec.settings
            self._check(hold, *await self._insist(ADOPT, spec, args, hold.process))

    def abandon(self, spec: LockSpec, taking: Taking) -> None:
        """As `undo`, but in the background, because nothing can be awaited."""
        hold = taking._hold  # noqa: SLF001 - its own
        if hold is not None and hold.process == self.session.port.process():
            self.session.abandon(hold)
            self._recent.pop(hold.token, None)
            self.session.cleanups.schedule(spec, hold.token)

    async def undo(self, spec: LockSpec, taking: Taking) -> None:
        """Leave nothing behind of a taking that failed."""
        hold = taking._hold  # noqa: SLF001 - its own
        if hold is None or hold.process != self.session.port.process():  # or a forked child
            return
        self.session.abandon(hold)
        self._recent.pop(hold.token, None)
        await cancel_token(self.session, spec, hold.token)
        if taking.given is not None:
            await self._end_given(spec, taking.given)
        if hold.waiter is not None:
            hold.waiter.forget()

    async def give_back(self, spec: LockSpec, token: bytes, unsure: set[bytes]) -> bool:
        """Release the lock if it is this token's; say whether it was, now or at an earlier try.

        `unsure` keeps the tokens whose release was sent and not answered.

        Raises:
            OutcomeUnknown, NodeUnavailable: the server was not heard, and may be asked again. A
                token that was drawn here is also taken back in the background.
        """
        session = self.session
        process = session.process
        name = token.decode() if is_ours(token) else cast("str", token)
        _, hold = self._recent.pop(name, (0.0, None))
        tombstone = (
            "0" if is_ours(token) and session.waiters.can_notify(name, spec.keys[0]) else "0 quiet"
        )
        if hold is not None and hold.tainted:
            tombstone = TOMBSTONE_MS
        args = name, WINDOW_MS, tombstone, spec.settings
        try:
            asked_at = session.port.now()
            reply, repeated = await self._insist(RELEASE, spec, args, process)
            released = session.waiters.on_release(reply, asked_at) or repeated or token in unsure
            unsure.discard(token)
            return released  # noqa: TRY300 - an interrupt may strike here
        except BaseException as error:
            if process != session.port.process():  # closed in a forked child
                raise
            unsure.add(token)
            session.waiters.recheck_all(spec)
            if not is_ours(token):
                if not isinstance(error, (GeneratorExit, HoldfastError)):
                    await session.port.shielded(self._end_given(spec, token))
            elif isinstance(error, (GeneratorExit, HoldfastError)):
                session.cleanups.schedule(spec, name, longest=TTL_MAX)  # it may have been extended
            else:
                await session.port.shielded(cancel_token(session, spec, name, longest=TTL_MAX))
            raise
        finally:
            if hold is not None and hold.waiter is not None:
                hold.waiter.forget()

    async def _insist(
        self, script: Script, spec: LockSpec, args: tuple[str, ...], process: int
    ) -> Answer:
        """Send a request until there is a reply, unless this process is forked meanwhile."""
        session = self.session

        def check_process() -> None:
            if process != session.port.process():
                raise forked(spec.name, "release" if script is RELEASE else "acquire") from None

        def on_failure(error: HoldfastError) -> None:
            check_process()
            if isinstance(error, OutcomeUnknown):
                session.waiters.recheck_all(
                    spec
                )  # it may have granted the lock to another waiter here

        send = partial(session.deployment.call, script, spec.keys, args, spec.command_timeout)
        answer = await retry(send, on_failure)
        check_process()
        return answer

    def _check(self, hold: Hold, kept: Reply, _: object) -> None:
        if not kept or self.session.port.now() >= hold.deadline:
            name = hold.spec.name
            message = f"{name!r} ran out while it was being taken: give it a longer timeout"
            raise NodeUnavailable(message, lock=name)

    async def _end_given(self, spec: LockSpec, token: bytes) -> None:
        """Release a token that the user gave; once, and only now: later it may be another's."""
        args = cast("str", token), WINDOW_MS, "0 quiet", spec.settings
        with contextlib.suppress(HoldfastError):
            asked_at, call = self.session.port.now(), self.session.deployment.call
            reply = await call(RELEASE, spec.keys, args, spec.command_timeout)
            self.session.waiters.on_release(reply, asked_at)

    def _remember(self, hold: Hold) -> None:
        now, recent = self.session.port.now(), self._recent
        if hold.waiter is not None or hold.tainted:
            recent[hold.token] = now, hold
        # Those that were released elsewhere, or not at all. If another thread comes in between,
        # the next one does it.
        with contextlib.suppress(StopIteration, RuntimeError, KeyError):
            while recent[token := next(iter(recent))][0] < now - MEMORY:
                _, old = recent.pop(token)
                if old.waiter is not None:
                    old.waiter.forget()


_homes: weakref.WeakKeyDictionary[object, Home] = weakref.WeakKeyDictionary()
"""By the pool of connections, which several redis-py clients may share."""

homes_by_loop: weakref.WeakKeyDictionary[object, dict[asyncio.AbstractEventLoop, Home]]
homes_by_loop = weakref.WeakKeyDictionary()


def client_of(kind: type[C], pool: Any) -> C:  # noqa: ANN401 - a class of redis-py
    """Make a client of holdfast with the settings of this pool.

    Raises:
        ConfigurationError: it is not one of a single server.
    """
    try:
        client = kind(pool, command_timeout=COMMAND_TIMEOUT)
        if client._session.deployment.longest_ttl < math.inf:  # noqa: SLF001 - a face of the same house
            advice = "its servers change places: use a lock of holdfast.Client(...), with its ttl"
            raise ConfigurationError(advice)  # noqa: TRY301 - said below, for all
        return client  # noqa: TRY300 - the only way out
    except ConfigurationError as error:
        raise ConfigurationError(
            f"holdfast's lock_class cannot serve this client: {error}"
        ) from None


def home_of(pool: object) -> Home:
    """The home of the locks of redis-py clients with this pool. It ends with the pool."""
    home = _homes.get(pool)
    if home is None:
        client = client_of(Client, pool)
        made = Home(client)
        home = _homes.setdefault(pool, made)
        if home is made:
            end = weakref.finalize(pool, _close, client, generation())
            end.atexit = False  # the end of the process is also the end of its connections
    return home


def _close(client: Client, made_in: int) -> None:
    if made_in == generation():  # a forked child leaves its parent's alone
        client.close()


async def home_on_this_loop(pool: object) -> Home:
    """The home of the locks of asyncio clients with this pool. It ends with the loop, or the pool.

    It is an asynchronous generator that closes it: a loop that is shut down ends those that were
    begun on it, and so does the loop for one that nobody has any more.
    """
    loop = asyncio.get_running_loop()
    homes = homes_by_loop.setdefault(pool, {})
    home = homes.get(loop)
    if home is None or home.closing is None or home.closing.ag_frame is None:
        for known in list(homes):  # a copy: loops of other threads come and go meanwhile
            if known.is_closed():
                homes.pop(known, None)
        client = client_of(AsyncClient, pool)
        home = homes[loop] = Home(client)
        home.closing = cast("AsyncGeneratorType[None, None]", _closes_in_the_end(client))
        await home.closing.__anext__()
    return home


async def _closes_in_the_end(client: AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.close()
