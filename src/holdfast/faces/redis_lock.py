"""redis-py's own Lock, waiting in holdfast's line: a `lock_class` for `client.lock(...)`.

What is redis-py's stays as it is: the constructor, `local.token`, `owned`, `locked`, `extend`,
`reacquire`, the context manager, the errors, and that a lock is never renewed. Only taking, waiting
and releasing are holdfast's. They use connections of holdfast's own, made with the settings of the
redis-py client, and so none of its hidden retries.

Who takes a lock here is known by the token in its key, as in redis-py, and by nothing else: it may
be released by another lock object, in another thread, in another process. So the core's hold is let
go of as soon as it was granted. What must be kept of it, and for how long, `_Home` says.

**A token that the user gives** may be given twice. redis-py takes the lock only if the key is not
there, and so two who give the same token still exclude one another; for holdfast the same token
means the same holder. So a lock is always taken under a token drawn for it, and is then renamed.
Nothing in the background ever touches a given token: it may be somebody else's by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import weakref
from dataclasses import replace
from types import AsyncGeneratorType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import redis.asyncio.lock
import redis.exceptions
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

from holdfast.adapters.threads import run
from holdfast.core.acquire import TRIES, acquire, take_back
from holdfast.core.hold import Grip, Hold
from holdfast.core.renewer import taking_back
from holdfast.core.spec import TOMBSTONE_MS, LockSpec, describe, keys_of
from holdfast.core.token import is_ours
from holdfast.errors import (
    AcquireTimeout,
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

    from holdfast.port import Reply
    from holdfast.scripts import Script

Number: TypeAlias = "float | int"
C = TypeVar("C", Client, AsyncClient)

LEAVE_EARLY = 0.01
"""Seconds set aside for leaving the line, so that the answer is there by `blocking_timeout`."""

COMMAND_TIMEOUT = 1.0
"""Seconds to wait for one answer, however short the lock's `timeout` is: nothing is renewed."""

WINDOW_MS = "3000"
"""How long a released lock is the next waiter's before it is heard from, however short-lived the
one before was."""

MEMORY = int(TOMBSTONE_MS) / 1000
"""Seconds after which nothing that was sent about a taking can be under way any more."""

_RENEWED_NEVER = describe(
    "a lock of redis-py",
    ttl=30.0,
    timeout=None,
    renew=False,
    max_hold=None,
    reentrant=False,
    owner=None,
    fair=True,
    lock_delay=0.0,
    key=None,
    label=None,
    command_timeout=COMMAND_TIMEOUT,
)
_FOREVER = "0 forever "


class _Taking(Grip):
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


class _Home:
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

    async def take(self, spec: LockSpec, timeout: float | None, taking: _Taking) -> None:
        """Take the lock, and have it stand in its key as it is to.

        Interrupted or failed, it needs `undo`.
        """
        session = self.session
        await acquire(session, spec, timeout, taking)
        hold = taking.hold
        session.disown(hold)
        self._remember(hold)
        if taking.given is not None:
            name = cast("str", taking.given)  # any bytes; what packs it takes both
            args = name, spec.ttl_ms, hold.token, spec.settings
            self._check(hold, *await self._insist(ADOPT, spec, args))

    async def undo(self, spec: LockSpec, taking: _Taking) -> None:
        """Leave nothing behind of a taking that failed."""
        hold = taking._hold  # noqa: SLF001 - its own
        if hold is None:
            return
        self.session.disown(hold)
        self._recent.pop(hold.token, None)
        await take_back(self.session, spec, hold.token, TOMBSTONE_MS)
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
        session.begin_in_this_process()
        name = token.decode() if is_ours(token) else cast("str", token)
        _, hold = self._recent.pop(name, (0.0, None))
        tombstone = "0" if is_ours(token) and session.hears(name) else "0 quiet"
        if hold is not None and hold.tainted:
            tombstone = TOMBSTONE_MS
        args = name, WINDOW_MS, tombstone, spec.settings
        try:
            asked_at = session.port.now()
            reply, repeated = await self._insist(RELEASE, spec, args)
            released = session.released(reply, asked_at) or repeated or token in unsure
            unsure.discard(token)
            return released  # noqa: TRY300 - an interrupt may strike here
        except GeneratorExit:
            raise
        except BaseException as error:
            unsure.add(token)
            session.rally(spec)
            if not is_ours(token):
                if not isinstance(error, HoldfastError):
                    await session.port.shielded(self._end_given(spec, token))
            elif isinstance(error, HoldfastError):
                session.renewer.clean_up(spec.name, taking_back(spec, name), ttl=spec.ttl)
            else:
                await session.port.shielded(take_back(session, spec, name, TOMBSTONE_MS))
            raise
        finally:
            if hold is not None and hold.waiter is not None:
                hold.waiter.forget()

    async def _insist(
        self, script: Script, spec: LockSpec, args: tuple[str, ...]
    ) -> tuple[Reply, bool]:
        """Ask until there is an answer, but not for ever; all these scripts may be run twice.

        Returns the answer, and whether an earlier sending may have been carried out too.
        """
        repeated = False
        for left in reversed(range(TRIES)):
            try:
                call = self.session.port.call
                answer = await call(script, spec.keys, args, spec.command_timeout)
                break
            except (OutcomeUnknown, NodeUnavailable) as error:
                if isinstance(error, OutcomeUnknown):
                    repeated = True
                    self.session.rally(spec)  # it may have been granted to somebody else of ours
                if not left:
                    raise
        return answer, repeated

    def _check(self, hold: Hold, kept: Reply, _: object) -> None:
        if not kept or self.session.port.now() >= hold.deadline:
            name = hold.spec.name
            message = f"{name!r} ran out while it was being taken: give it a longer timeout"
            raise NodeUnavailable(message, lock=name)

    async def _end_given(self, spec: LockSpec, token: bytes) -> None:
        """Release a token that the user gave; once, and only now: later it may be another's."""
        args = cast("str", token), WINDOW_MS, "0 quiet", spec.settings
        with contextlib.suppress(HoldfastError):
            asked_at, call = self.session.port.now(), self.session.port.call
            reply = await call(RELEASE, spec.keys, args, spec.command_timeout)
            self.session.released(reply, asked_at)

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


_homes: weakref.WeakKeyDictionary[object, _Home] = weakref.WeakKeyDictionary()
"""By the pool of connections, which several redis-py clients may share."""

_homes_by_loop: weakref.WeakKeyDictionary[object, dict[asyncio.AbstractEventLoop, _Home]]
_homes_by_loop = weakref.WeakKeyDictionary()


def _client(kind: type[C], pool: object) -> C:
    try:
        return kind(pool, command_timeout=COMMAND_TIMEOUT)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"holdfast's lock_class cannot serve this client: {error}"
        ) from None


def _home_of(pool: object) -> _Home:
    """The home of the locks of redis-py clients with this pool. It ends with the pool."""
    home = _homes.get(pool)
    if home is None:
        client = _client(Client, pool)
        made = _Home(client)
        home = _homes.setdefault(pool, made)
        if home is made:
            end = weakref.finalize(pool, _close, client, generation())
            end.atexit = False  # the end of the process is also the end of its connections
    return home


def _close(client: Client, made_in: int) -> None:
    if made_in == generation():  # a forked child leaves its parent's alone
        client.close()


async def _home_on_this_loop(pool: object) -> _Home:
    """The home of the locks of asyncio clients with this pool. It ends with the loop, or the pool.

    It is an asynchronous generator that closes it: a loop that is shut down ends those that were
    begun on it, and so does the loop for one that nobody has any more.
    """
    loop = asyncio.get_running_loop()
    homes = _homes_by_loop.setdefault(pool, {})
    home = homes.get(loop)
    if home is None or home.closing is None or home.closing.ag_frame is None:
        for gone in [known for known in homes if known.is_closed()]:
            del homes[gone]
        client = _client(AsyncClient, pool)
        home = homes[loop] = _Home(client)
        home.closing = cast("AsyncGeneratorType[None, None]", _closes_in_the_end(client))
        await home.closing.__anext__()
    return home


async def _closes_in_the_end(client: AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.close()


class _Local(threading.local):
    """redis-py's thread-local place, which is empty in threads that never took the lock."""

    token: bytes | None = None
    fence: int | None = None


class _Shared:
    """What both locks have in common: their settings, in redis-py's words and in ours."""

    redis: Any
    name: Any
    timeout: Any
    sleep: Any
    blocking: Any
    blocking_timeout: Any
    thread_local: bool
    local: Any

    LUA_RELEASE_SCRIPT: str
    LUA_EXTEND_SCRIPT: str
    LUA_REACQUIRE_SCRIPT: str

    _spec: tuple[Any, Any, LockSpec] | None = None

    def _begin(self) -> None:
        self.local = _Local() if self.thread_local else SimpleNamespace(token=None, fence=None)
        self._unsure: set[bytes] = set()

    @property
    def fence(self) -> int | None:
        """The fencing number of what this lock took last; None before it did.

        It is greater than that of every taking before, by this class or by `holdfast.Client`.
        """
        fence: int | None = self.local.fence
        return fence

    def register_scripts(self) -> None:
        """Make ready the scripts of redis-py, for this object's own client.

        redis-py shares them among all clients, and they keep the first of them alive.
        """
        register = self.redis.register_script
        self.lua_release = register(self.LUA_RELEASE_SCRIPT)
        self.lua_extend = register(self.LUA_EXTEND_SCRIPT)
        self.lua_reacquire = register(self.LUA_REACQUIRE_SCRIPT)

    @property
    def _pool(self) -> Any:  # noqa: ANN401 - of redis-py or valkey-py
        return getattr(self.redis, "connection_pool", self.redis)

    def _encoded(self, text: object) -> bytes:
        return cast("bytes", self._pool.get_encoder().encode(text))

    def _described(self) -> LockSpec:
        """The lock as the core knows it; name and timeout may be changed at any time."""
        if self._spec is None or self._spec[:2] != (self.name, self.timeout):
            self._spec = self.name, self.timeout, self._describe()
        return self._spec[2]

    def _describe(self) -> LockSpec:
        key = self._encoded(self.name)
        spec = replace(
            _RENEWED_NEVER,
            name=key.decode(errors="replace"),
            keys=keys_of(key)[: len(_RENEWED_NEVER.keys)],
            command_timeout=COMMAND_TIMEOUT,
            renew_after=math.inf,
            first_due=math.inf,
        )
        if not self.timeout:
            return replace(spec, settings=_FOREVER, validity=math.inf)
        px = int(self.timeout * 1000)
        if px < 1:
            raise redis.exceptions.ResponseError(
                f"timeout={self.timeout!r}: give seconds, at least 0.001, or None for no expiry"
            )
        return replace(spec, ttl=px / 1000, ttl_ms=str(px), validity=px / 1000)

    def _patience(
        self, sleep: Number | None, blocking: object, blocking_timeout: Number | None
    ) -> float | None:
        """Seconds to wait: None for ever, 0 not at all."""
        if blocking is None:
            blocking = self.blocking
        if not blocking:
            return 0.0
        if blocking_timeout is None:
            blocking_timeout = self.blocking_timeout
        if blocking_timeout is None or blocking_timeout == math.inf:
            return None
        longest = float(blocking_timeout)
        early = min(float(self.sleep if sleep is None else sleep), LEAVE_EARLY, longest / 10)
        return max(0.0, longest - max(0.0, early))

    def _took(self, taking: _Taking) -> None:
        self._unsure.discard(taking.token)
        self.local.token, self.local.fence = taking.token, taking.hold.fence

    def _gave_up(self, taking: _Taking) -> None:
        if taking._hold is not None and self.local.token == taking.token:  # noqa: SLF001 - its own
            self.local.token = None

    def _token(self) -> bytes:
        token: bytes | None = self.local.token
        if token is None:
            message = "Cannot release a lock that's not owned or is already unlocked."
            raise _named(LockError(message), self.name)
        return token

    def _not_owned(self) -> LockError:
        message = "Cannot release a lock that's no longer owned"
        return _named(LockNotOwnedError(message), self.name)


class RedisLock(_Shared, redis.lock.Lock):
    """redis-py's Lock, first come, first served: `client.lock(name, lock_class=RedisLock)`.

    Arguments, methods and errors are those of `redis.lock.Lock`, and a plain one on the same name
    is excluded and excludes. What is different: who waits stands in line, and is woken when it is
    its turn (`sleep` has no use); releasing hands the lock over; a lost answer neither takes the
    lock from everybody nor fails; and each taking has a `fence`.

    Raises:
        ConfigurationError: the client is not one of a single server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - whatever redis-py's takes
        super().__init__(*args, **kwargs)
        self._begin()
        self._home = _home_of(self._pool)

    def acquire(
        self,
        sleep: Number | None = None,
        blocking: bool | None = None,  # noqa: FBT001 - redis-py's own
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Take the lock: True once it is ours, False when it was others' all the while.

        Interrupted at any moment, it leaves nothing held.

        Args:
            sleep: of no use here: nobody polls.
            blocking: False not to wait, instead of the lock's own setting.
            blocking_timeout: seconds to wait at most, instead of the lock's own setting.
            token: what is to stand in the key, instead of a token that is drawn.

        Raises:
            redis.exceptions.ConnectionError: the server does not answer; nothing is held.
            redis.exceptions.ResponseError: the server will never grant it.
        """
        given = None if token is None else self._encoded(token)
        return self._take(given, self._patience(sleep, blocking, blocking_timeout))

    def do_acquire(self, token: str | bytes) -> bool:
        """Take the lock under this token if it is free, without waiting; as `acquire`."""
        return self._take(self._encoded(token), 0.0)

    def _take(self, given: bytes | None, timeout: float | None) -> bool:
        spec, taking = self._described(), _Taking(given)
        try:
            run(self._home.take(spec, timeout, taking))
            self._took(taking)
            return True  # noqa: TRY300 - an interrupt may strike here
        except AcquireTimeout:
            return False
        except BaseException as error:
            self._gave_up(taking)
            run(self._home.undo(spec, taking))
            if isinstance(error, HoldfastError):
                raise _translated(error) from error
            raise

    def release(self) -> None:
        """Give the lock back, and hand it to whoever waits longest.

        Interrupted, it still gives the lock back before the interruption is passed on.

        Raises:
            redis.exceptions.LockError: this lock, in this thread, took nothing.
            redis.exceptions.LockNotOwnedError: it was no longer ours.
            redis.exceptions.TimeoutError: the server did not answer, and it may be released or
                not. It may be tried again, here; a token drawn here is also tried in the
                background.
            redis.exceptions.ConnectionError: the server cannot be reached; likewise.
        """
        token = self._token()
        try:
            self.do_release(token)
        except LockNotOwnedError:
            self.local.token = None
            raise
        self.local.token = None

    def do_release(self, expected_token: str | bytes) -> None:
        """Give back a lock that was taken under this token; as `release`."""
        token = self._encoded(expected_token)
        try:
            released = run(self._home.give_back(self._described(), token, self._unsure))
        except HoldfastError as error:
            raise _translated(error) from error
        if not released:
            raise self._not_owned()


class AsyncRedisLock(_Shared, redis.asyncio.lock.Lock):
    """redis-py's Lock, first come, first served: `client.lock(name, lock_class=AsyncRedisLock)`.

    Arguments, methods and errors are those of `redis.asyncio.lock.Lock`, and a plain one on the
    same name is excluded and excludes. What is different: who waits stands in line, and is woken
    when it is its turn (`sleep` has no use); releasing hands the lock over; a lost answer neither
    takes the lock from everybody nor fails; and each taking has a `fence`.

    Raises:
        ConfigurationError: the client is not one of a single server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - whatever redis-py's takes
        super().__init__(*args, **kwargs)
        self._begin()
        if self._pool not in _homes_by_loop:
            _client(AsyncClient, self._pool)  # or say at once that it cannot be had

    async def acquire(
        self,
        blocking: bool | None = None,  # noqa: FBT001 - redis-py's own
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Take the lock: True once it is ours, False when it was others' all the while.

        Cancelled at any moment, it leaves nothing held.

        Args:
            blocking: False not to wait, instead of the lock's own setting.
            blocking_timeout: seconds to wait at most, instead of the lock's own setting.
            token: what is to stand in the key, instead of a token that is drawn.

        Raises:
            redis.exceptions.ConnectionError: the server does not answer; nothing is held.
            redis.exceptions.ResponseError: the server will never grant it.
        """
        given = None if token is None else self._encoded(token)
        return await self._take(given, self._patience(None, blocking, blocking_timeout))

    async def do_acquire(self, token: str | bytes) -> bool:
        """Take the lock under this token if it is free, without waiting; as `acquire`."""
        return await self._take(self._encoded(token), 0.0)

    async def _take(self, given: bytes | None, timeout: float | None) -> bool:
        home = await _home_on_this_loop(self._pool)
        spec, taking = self._described(), _Taking(given)
        try:
            await home.take(spec, timeout, taking)
            self._took(taking)
            return True  # noqa: TRY300 - symmetrical with its twin
        except AcquireTimeout:
            return False
        except GeneratorExit:
            raise
        except BaseException as error:
            await home.session.port.shielded(home.undo(spec, taking))
            if isinstance(error, HoldfastError):
                raise _translated(error) from error
            raise

    async def release(self) -> None:
        """Give the lock back, and hand it to whoever waits longest.

        Cancelled, it still gives the lock back before the cancellation is passed on.

        Raises:
            redis.exceptions.LockError: this lock, in this thread, took nothing.
            redis.exceptions.LockNotOwnedError: it was no longer ours.
            redis.exceptions.TimeoutError: the server did not answer, and it may be released or
                not. It may be tried again, here; a token drawn here is also tried in the
                background.
            redis.exceptions.ConnectionError: the server cannot be reached; likewise.
        """
        token = self._token()
        try:
            await self.do_release(token)
        except LockNotOwnedError:
            self.local.token = None
            raise
        self.local.token = None

    async def do_release(self, expected_token: str | bytes) -> None:
        """Give back a lock that was taken under this token; as `release`."""
        token = self._encoded(expected_token)
        home = await _home_on_this_loop(self._pool)
        try:
            released = await home.give_back(self._described(), token, self._unsure)
        except HoldfastError as error:
            raise _translated(error) from error
        if not released:
            raise self._not_owned()


def _translated(error: HoldfastError) -> redis.exceptions.RedisError:
    """Say in redis-py's words what went wrong."""
    if isinstance(error, NodeUnavailable):
        return redis.exceptions.ConnectionError(str(error))
    if isinstance(error, OutcomeUnknown):
        return redis.exceptions.TimeoutError(str(error))
    if isinstance(error, ConfigurationError):
        return redis.exceptions.ResponseError(str(error))
    return LockError(str(error))


def _named(error: LockError, name: Any) -> LockError:  # noqa: ANN401 - redis-py takes any key
    error.lock_name = name  # the oldest redis-py that is supported takes no second argument
    return error
