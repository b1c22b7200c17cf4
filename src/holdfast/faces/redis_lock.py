"""redis-py's Lock with holdfast's queue: a `lock_class` for `client.lock(...)`.

The constructor, `local.token`, `owned`, `locked`, `extend`, `reacquire`, the context manager and
the errors are those of redis-py, and a lock is never renewed. Acquiring, waiting and releasing are
holdfast's (`core.token_lock`). They use their own connections, made with the settings of the
redis-py client, and so none of its hidden retries. `extend` and `reacquire` differ in two points:
they raise if the reply arrives after the lock has expired; and they refuse to leave a lock no time,
where redis-py deletes the lock and returns True.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, TypeVar, cast

import redis.asyncio.lock
import redis.exceptions
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

from holdfast.adapters.threads import run
from holdfast.core.spec import LockSpec, describe
from holdfast.core.token_lock import Acquisition
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
)
from holdfast.faces.async_client import AsyncClient
from holdfast.faces.client import Client
from holdfast.faces.redis_lock_runtime import (
    COMMAND_TIMEOUT,
    client_of,
    runtime_of,
    runtime_on_this_loop,
    runtimes_by_loop,
)
from holdfast.keys import keys_of
from holdfast.wire.clock import now

Number: TypeAlias = "float | int"
C = TypeVar("C", Client, AsyncClient)

LEAVE_EARLY = 0.01
"""Seconds set aside for leaving the line, so that the answer is there by `blocking_timeout`."""

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
    LUA_REACQUIRE_SCRIPT: str

    # KEYS[1] lock  ARGV[1] token  ARGV[2] ms to add  ARGV[3] "1" to replace what is left
    # Returns the ms that are left now; 0 if it is not the token's or never expires; -1 if none
    # would be left, and nothing was changed. redis-py's script returns 1 instead of the ms.
    LUA_EXTEND_SCRIPT = """
        local token = redis.call('get', KEYS[1])
        local left = redis.call('pttl', KEYS[1])
        if not token or token ~= ARGV[1] or left < 0 then
            return 0
        end
        if ARGV[3] == '1' then
            left = 0
        end
        left = left + ARGV[2]
        if left < 1 then
            return -1
        end
        redis.call('pexpire', KEYS[1], left)
        return left
    """

    _spec: tuple[Any, Any, LockSpec] | None = None

    def _begin(self) -> None:
        self.local = _Local() if self.thread_local else SimpleNamespace(token=None, fence=None)
        self._unsure: set[bytes] = set()

    @property
    def fence(self) -> int | None:
        """The fencing number of what this lock took last; None before it did.

        It is greater than every earlier one, by this class or by `holdfast.Client`.
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
            keys=keys_of(key),
            command_timeout=COMMAND_TIMEOUT,
            renew_after=math.inf,
            first_due=math.inf,
        )
        if not self.timeout:
            return replace(spec, settings=_FOREVER, validity=math.inf, usable=math.inf)
        px = int(self.timeout * 1000)
        if px < 1:
            raise redis.exceptions.ResponseError(
                f"timeout={self.timeout!r}: give seconds, at least 0.001, or None for no expiry"
            )
        seconds = px / 1000
        return replace(spec, ttl=seconds, ttl_ms=str(px), validity=seconds, usable=seconds)

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

    def _took(self, acquisition: Acquisition) -> None:
        self._unsure.discard(acquisition.token)
        self.local.token, self.local.fence = acquisition.token, acquisition.hold.fence

    def _gave_up(self, acquisition: Acquisition) -> None:
        if acquisition._hold is not None and self.local.token == acquisition.token:  # noqa: SLF001 - its own
            self.local.token = None

    def _token(self) -> bytes:
        token: bytes | None = self.local.token
        if token is None:
            message = "Cannot release a lock that's not owned or is already unlocked."
            raise _named(LockError(message), self.name)
        return token

    def _not_owned(self, verb: str = "release") -> LockError:
        message = f"Cannot {verb} a lock that's no longer owned"
        return _named(LockNotOwnedError(message), self.name)

    def _timeout_ms(self, verb: str) -> int:
        """The lock's timeout, without which it cannot be prolonged. redis-py only refuses None."""
        timeout_ms = int(self.timeout * 1000)
        if timeout_ms < 1:
            raise _named(LockError(f"Cannot {verb} a lock with no timeout"), self.name)
        return timeout_ms

    def _prolonged(self, verb: str, asked_at: float, left_ms: int) -> Literal[True]:
        """Return True if a lock that had `left_ms` at `asked_at`, or later, is held now."""
        if left_ms < 0:
            message = "Cannot extend a lock to have no time left: call release() instead"
            raise _named(LockError(message), self.name)
        if now() >= asked_at + left_ms / 1000:
            raise self._not_owned(verb)
        return True


class RedisLock(_Shared, redis.lock.Lock):
    """redis-py's Lock, first come, first served: `client.lock(name, lock_class=RedisLock)`.

    Arguments, methods and errors are those of `redis.lock.Lock`, and a plain one on the same name
    is excluded and excludes. What is different: who waits stands in line, and is woken when it is
    its turn (`sleep` has no use); releasing hands the lock over; a lost answer neither takes the
    lock from everybody nor fails; and each acquisition has a `fence`.

    As in redis-py, a lock with `timeout=None` or `timeout=0` never expires; a timeout below 0 is
    refused when the lock is acquired. `extend` and `reacquire` raise LockNotOwnedError if the reply
    arrives after the lock's time is over, and LockError if they would leave it no time.

    Raises:
        ConfigurationError: the client is not one of a single server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - whatever redis-py's takes
        super().__init__(*args, **kwargs)
        self._begin()
        self._runtime = runtime_of(self._pool)

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
            token: what is to stand in the key, instead of a token that is drawn. It is never taken
                back in the background: without a timeout it may stay if the server is not heard.

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
        spec, acquisition = self._described(), Acquisition(given)
        try:
            run(self._runtime.locks.acquire(spec, timeout, acquisition))
            self._took(acquisition)
            return True  # noqa: TRY300 - an interrupt may strike here
        except AcquireTimeout:
            return False
        except BaseException as error:
            self._gave_up(acquisition)
            run(self._runtime.locks.undo(spec, acquisition))
            if isinstance(error, HoldfastError):
                raise _translated(error) from None
            raise

    def do_extend(self, additional_time: Number, replace_ttl: bool) -> Literal[True]:  # noqa: FBT001 - redis-py's own
        """Carry out `extend`: raises LockNotOwnedError even if the reply arrives too late."""
        self._timeout_ms("extend")
        args = [self.local.token, int(additional_time * 1000), "1" if replace_ttl else "0"]
        asked_at = now()
        left_ms = self.lua_extend(keys=[self.name], args=args, client=self.redis)
        return self._prolonged("extend", asked_at, left_ms)

    def do_reacquire(self) -> Literal[True]:
        """Carry out `reacquire`: raises LockNotOwnedError even if the reply arrives too late."""
        timeout_ms = self._timeout_ms("reacquire")
        args, asked_at = [self.local.token, timeout_ms], now()
        kept = self.lua_reacquire(keys=[self.name], args=args, client=self.redis)
        return self._prolonged("reacquire", asked_at, timeout_ms if kept else 0)

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
            released = run(self._runtime.locks.release(self._described(), token, self._unsure))
        except HoldfastError as error:
            raise _translated(error) from None
        if not released:
            raise self._not_owned()


class AsyncRedisLock(_Shared, redis.asyncio.lock.Lock):
    """redis-py's Lock, first come, first served: `client.lock(name, lock_class=AsyncRedisLock)`.

    Arguments, methods and errors are those of `redis.asyncio.lock.Lock`, and a plain one on the
    same name is excluded and excludes. What is different: who waits stands in line, and is woken
    when it is its turn (`sleep` has no use); releasing hands the lock over; a lost answer neither
    takes the lock from everybody nor fails; and each acquisition has a `fence`.

    As in redis-py, a lock with `timeout=None` or `timeout=0` never expires; a timeout below 0 is
    refused when the lock is acquired. `extend` and `reacquire` raise LockNotOwnedError if the reply
    arrives after the lock's time is over, and LockError if they would leave it no time.

    Raises:
        ConfigurationError: the client is not one of a single server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - whatever redis-py's takes
        super().__init__(*args, **kwargs)
        self._begin()
        if self._pool not in runtimes_by_loop:
            client_of(AsyncClient, self._pool)  # or say at once that it cannot be had

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
            token: what is to stand in the key, instead of a token that is drawn. It is never taken
                back in the background: without a timeout it may stay if the server is not heard.

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
        runtime = await runtime_on_this_loop(self._pool)
        spec, acquisition = self._described(), Acquisition(given)
        try:
            await runtime.locks.acquire(spec, timeout, acquisition)
            self._took(acquisition)
            return True  # noqa: TRY300 - symmetrical with its twin
        except AcquireTimeout:
            return False
        except GeneratorExit:
            runtime.locks.abandon(spec, acquisition)
            raise
        except BaseException as error:
            await runtime.port.shielded(runtime.locks.undo(spec, acquisition))
            if isinstance(error, HoldfastError):
                raise _translated(error) from None
            raise

    async def do_extend(self, additional_time: Number, replace_ttl: bool) -> Literal[True]:  # noqa: FBT001 - redis-py's own
        """Carry out `extend`: raises LockNotOwnedError even if the reply arrives too late."""
        self._timeout_ms("extend")
        args = [self.local.token, int(additional_time * 1000), "1" if replace_ttl else "0"]
        asked_at = now()
        left_ms = await self.lua_extend(keys=[self.name], args=args, client=self.redis)
        return self._prolonged("extend", asked_at, left_ms)

    async def do_reacquire(self) -> Literal[True]:
        """Carry out `reacquire`: raises LockNotOwnedError even if the reply arrives too late."""
        timeout_ms = self._timeout_ms("reacquire")
        args, asked_at = [self.local.token, timeout_ms], now()
        kept = await self.lua_reacquire(keys=[self.name], args=args, client=self.redis)
        return self._prolonged("reacquire", asked_at, timeout_ms if kept else 0)

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
        runtime = await runtime_on_this_loop(self._pool)
        try:
            released = await runtime.locks.release(self._described(), token, self._unsure)
        except HoldfastError as error:
            raise _translated(error) from None
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
