"""redis-py's `Lock` with holdfast's queue: a `lock_class` for redis-py's `client.lock(...)`.

The constructor, `local.token`, `owned`, `locked`, `extend`, `reacquire`, the context manager and
the errors are those of redis-py, and a lock is never renewed. Acquiring, waiting and releasing are
holdfast's (`core.token_lock`). They use separate connections with the settings of the redis-py
client, and so none of its hidden retries.

`extend` and `reacquire` differ in two points. They raise if the reply arrives after the lock has
expired. They refuse to leave a lock no time, where redis-py deletes the lock and returns True.
"""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, TypeVar, cast

import redis.asyncio.lock
import redis.exceptions
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

from holdfast.adapters.thread_port import run
from holdfast.api.async_client import AsyncClient
from holdfast.api.client import Client
from holdfast.api.redis_lock_runtime import (
    COMMAND_TIMEOUT,
    client_of,
    runtime_of,
    runtime_on_this_loop,
    runtimes_by_loop,
)
from holdfast.core.spec import LockSpec, describe
from holdfast.core.token_lock import Acquisition
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
)
from holdfast.keys import keys_of
from holdfast.scripts import EXTEND_REDIS_LOCK
from holdfast.wire.clock import now
from holdfast.wire.process import generation

Number: TypeAlias = "float | int"
C = TypeVar("C", Client, AsyncClient)

LEAVE_QUEUE_SECONDS = 0.01
"""Seconds reserved for leaving the queue, so that `acquire` returns by `blocking_timeout`."""

_BASE_SPEC = describe(
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
_NO_EXPIRY = "0 forever "


class _Local(threading.local):
    """redis-py's thread-local state. Threads that never acquired the lock have no token."""

    token: bytes | None = None
    fence: int | None = None


class _LockMixin:
    """What both locks share: their settings, and the `LockSpec` that these give."""

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

    LUA_EXTEND_SCRIPT = EXTEND_REDIS_LOCK
    """Replaces redis-py's script, which returns 1 instead of the time that is left."""

    _spec: tuple[Any, Any, LockSpec] | None = None

    def _begin(self) -> None:
        self.local = _Local() if self.thread_local else SimpleNamespace(token=None, fence=None)
        self._unconfirmed: set[bytes] = set()

    @property
    def fence(self) -> int | None:
        """The fencing number of the last acquisition; None before the first.

        It is greater than every earlier one, by this class or by `holdfast.Client`.
        """
        fence: int | None = self.local.fence
        return fence

    def register_scripts(self) -> None:
        """Register redis-py's scripts with this object's client.

        redis-py shares the scripts among all clients, and so keeps the first client alive.
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

    def _current_spec(self) -> LockSpec:
        """Return the spec; `name` and `timeout` may change at any time."""
        if self._spec is None or self._spec[:2] != (self.name, self.timeout):
            self._spec = self.name, self.timeout, self._describe()
        return self._spec[2]

    def _describe(self) -> LockSpec:
        key = self._encoded(self.name)
        spec = replace(
            _BASE_SPEC,
            name=key.decode(errors="replace"),
            keys=keys_of(key),
            command_timeout=COMMAND_TIMEOUT,
            renew_after=math.inf,
            first_due=math.inf,
        )
        if not self.timeout:
            return replace(spec, settings=_NO_EXPIRY, validity=math.inf, usable=math.inf)
        px = int(self.timeout * 1000)
        if px < 1:
            raise redis.exceptions.ResponseError(
                f"timeout={self.timeout!r}: give seconds, at least 0.001, or None for no expiry"
            )
        seconds = px / 1000
        return replace(spec, ttl=seconds, ttl_ms=str(px), validity=seconds, usable=seconds)

    def _seconds_to_wait(
        self, sleep: Number | None, blocking: object, blocking_timeout: Number | None
    ) -> float | None:
        """Return how long to wait: None forever, 0 not at all."""
        if blocking is None:
            blocking = self.blocking
        if not blocking:
            return 0.0
        if blocking_timeout is None:
            blocking_timeout = self.blocking_timeout
        if blocking_timeout is None or blocking_timeout == math.inf:
            return None
        longest = float(blocking_timeout)
        early = min(
            float(self.sleep if sleep is None else sleep), LEAVE_QUEUE_SECONDS, longest / 10
        )
        return max(0.0, longest - max(0.0, early))

    def _record(self, acquisition: Acquisition) -> None:
        self._unconfirmed.discard(acquisition.token)
        self.local.token, self.local.fence = acquisition.token, acquisition.lease.fence

    def _clear_token(self, acquisition: Acquisition) -> None:
        if acquisition._lease is not None and self.local.token == acquisition.token:  # noqa: SLF001 - within the API
            self.local.token = None

    def _token(self) -> bytes:
        token: bytes | None = self.local.token
        if token is None:
            message = "Cannot release a lock that's not owned or is already unlocked."
            raise _with_lock_name(LockError(message), self.name)
        return token

    def _not_owned(self, verb: str = "release") -> LockError:
        message = f"Cannot {verb} a lock that's no longer owned"
        return _with_lock_name(LockNotOwnedError(message), self.name)

    def _timeout_ms(self, verb: str) -> int:
        """Return the lock's timeout. Without one the lock cannot be extended."""
        timeout_ms = int(self.timeout * 1000)
        if timeout_ms < 1:
            raise _with_lock_name(LockError(f"Cannot {verb} a lock with no timeout"), self.name)
        return timeout_ms

    def _check_extended(self, verb: str, sent_at: float, left_ms: int) -> Literal[True]:
        """Return True if a lock that had `left_ms` when the request was sent has not expired."""
        if left_ms < 0:
            message = "Cannot extend a lock to have no time left: call release() instead"
            raise _with_lock_name(LockError(message), self.name)
        if now() >= sent_at + left_ms / 1000:
            raise self._not_owned(verb)
        return True


class RedisLock(_LockMixin, redis.lock.Lock):
    """redis-py's `Lock`, granted first come, first served.

    Example:
        lock = redis_client.lock("invoice:42", timeout=30, lock_class=holdfast.RedisLock)
        with lock:
            ...

    Arguments, methods and errors are those of `redis.lock.Lock`. Locks of both classes with the
    same name exclude each other. The differences:

    - Waiters queue, and are notified when it is their turn; `sleep` has no effect.
    - `release` hands the lock to the first waiter.
    - A lost reply neither leaves the lock held nor fails the call: the client retries.
    - Each acquisition has a `fence`.
    - `extend` and `reacquire` raise LockNotOwnedError if the reply arrives after the lock has
      expired, and LockError if they would leave it no time.

    As in redis-py, a lock with `timeout=None` or `timeout=0` never expires. `acquire` rejects a
    timeout below 0.

    Raises:
        ConfigurationError: the client is not a client of a single server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the arguments of redis-py's Lock
        super().__init__(*args, **kwargs)
        self._begin()
        self._runtime = runtime_of(self._pool)

    def acquire(
        self,
        sleep: Number | None = None,
        blocking: bool | None = None,  # noqa: FBT001 - as in redis-py
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the lock; return False if other clients held it all the time.

        If the call is interrupted by a signal handler at any point, the lock is not left held.

        Args:
            sleep: ignored: waiters do not poll.
            blocking: False does not wait; None uses the lock's setting.
            blocking_timeout: seconds to wait; None uses the lock's setting.
            token: the value of the key, instead of a random token. A given token is never removed
                in the background: without a timeout it may stay if the server does not reply.

        Raises:
            redis.exceptions.ConnectionError: the server does not reply; nothing is held.
            redis.exceptions.ResponseError: the server will never grant the lock: a setting or its
                configuration is wrong.
        """
        given = None if token is None else self._encoded(token)
        return self._take(given, self._seconds_to_wait(sleep, blocking, blocking_timeout))

    def do_acquire(self, token: str | bytes) -> bool:
        """Acquire the lock with this token if it is free, without waiting. Raises as `acquire`."""
        return self._take(self._encoded(token), 0.0)

    def _take(self, given: bytes | None, timeout: float | None) -> bool:
        spec, acquisition = self._current_spec(), Acquisition(given)
        try:
            run(self._runtime.locks.acquire(spec, timeout, acquisition))
            self._record(acquisition)
            return True  # noqa: TRY300 - an interrupt here must be caught too
        except AcquireTimeout:
            return False
        except BaseException as error:
            self._clear_token(acquisition)
            run(self._runtime.locks.undo(spec, acquisition))
            if isinstance(error, HoldfastError):
                raise _to_redis_error(error) from None
            raise

    def extend(self, additional_time: Number, replace_ttl: bool = False) -> Literal[True]:  # noqa: FBT001, FBT002 - as in redis-py
        """Add to the time that the lock has left, or replace it.

        The redis-py client sends the request. If the client retries after a lost reply, the time
        may be added twice. If the call is interrupted by a signal handler, the lock may or may not
        be extended.

        Args:
            additional_time: seconds.
            replace_ttl: True to set the time that is left, instead of adding to it.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock expired, even before the reply arrived, or
                another client holds it.
            redis.exceptions.LockError: this object did not acquire the lock, or not in this thread;
                the lock has no timeout, or would have no time left.
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: the server did not
                reply; the lock may or may not be extended.
        """
        return super().extend(additional_time, replace_ttl)

    def reacquire(self) -> Literal[True]:
        """Set the time that the lock has left to its `timeout`.

        The redis-py client sends the request. If the call is interrupted by a signal handler, the
        time may or may not be set.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock expired, even before the reply arrived, or
                another client holds it.
            redis.exceptions.LockError: this object did not acquire the lock, or not in this thread;
                or the lock has no timeout.
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: the server did not
                reply; the time may or may not be set.
        """
        return super().reacquire()

    def locked(self) -> bool:
        """Return whether any client holds the lock. The redis-py client sends the request.

        Raises:
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: the server did not
                reply.
        """
        return super().locked()

    def do_extend(self, additional_time: Number, replace_ttl: bool) -> Literal[True]:  # noqa: FBT001 - as in redis-py
        """Implement `extend`: raise LockNotOwnedError even if the reply arrives too late."""
        self._timeout_ms("extend")
        args = [self.local.token, int(additional_time * 1000), "1" if replace_ttl else "0"]
        sent_at = now()
        left_ms = self.lua_extend(keys=[self.name], args=args, client=self.redis)
        return self._check_extended("extend", sent_at, left_ms)

    def do_reacquire(self) -> Literal[True]:
        """Implement `reacquire`: raise LockNotOwnedError even if the reply arrives too late."""
        timeout_ms = self._timeout_ms("reacquire")
        args, sent_at = [self.local.token, timeout_ms], now()
        kept = self.lua_reacquire(keys=[self.name], args=args, client=self.redis)
        return self._check_extended("reacquire", sent_at, timeout_ms if kept else 0)

    def release(self) -> None:
        """Release the lock and hand it to the first waiter.

        If the call is interrupted by a signal handler, it still releases the lock before it passes
        on the interruption.

        Raises:
            redis.exceptions.LockError: this object did not acquire the lock, or not in this thread.
            redis.exceptions.LockNotOwnedError: the lock expired, or another client holds it.
            redis.exceptions.TimeoutError: the server did not reply; the lock may or may not be
                released. You may call `release` again. For a random token, the client also retries
                in the background.
            redis.exceptions.ConnectionError: the server cannot be reached. Retries as above.
        """
        process = generation()
        try:
            self.do_release(self._token())
        except LockNotOwnedError:
            self.local.token = None
            raise
        except redis.exceptions.RedisError:
            raise
        except BaseException:  # interrupted: complete it, but not in a forked child
            token = self.local.token
            if token is not None and process == generation():
                with contextlib.suppress(redis.exceptions.RedisError):
                    self.do_release(token)
            raise
        self.local.token = None

    def do_release(self, expected_token: str | bytes) -> None:
        """Release a lock that was acquired with this token. Raises as `release`."""
        token = self._encoded(expected_token)
        try:
            released = run(
                self._runtime.locks.release(self._current_spec(), token, self._unconfirmed)
            )
        except HoldfastError as error:
            raise _to_redis_error(error) from None
        if not released:
            raise self._not_owned()


class AsyncRedisLock(_LockMixin, redis.asyncio.lock.Lock):
    """redis-py's `Lock`, granted first come, first served.

    Example:
        lock = redis_client.lock("invoice:42", timeout=30, lock_class=holdfast.AsyncRedisLock)
        async with lock:
            ...

    Arguments, methods and errors are those of `redis.asyncio.lock.Lock`. Locks of both classes with
    the same name exclude each other. The differences:

    - Waiters queue, and are notified when it is their turn; `sleep` has no effect.
    - `release` hands the lock to the first waiter.
    - A lost reply neither leaves the lock held nor fails the call: the client retries.
    - Each acquisition has a `fence`.
    - `extend` and `reacquire` raise LockNotOwnedError if the reply arrives after the lock has
      expired, and LockError if they would leave it no time.

    As in redis-py, a lock with `timeout=None` or `timeout=0` never expires. `acquire` rejects a
    timeout below 0.

    Raises:
        ConfigurationError: the client is not a client of a single server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the arguments of redis-py's Lock
        super().__init__(*args, **kwargs)
        self._begin()
        if self._pool not in runtimes_by_loop:
            client_of(AsyncClient, self._pool)  # raises ConfigurationError early

    async def acquire(
        self,
        blocking: bool | None = None,  # noqa: FBT001 - as in redis-py
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the lock; return False if other clients held it all the time.

        If the call is cancelled at any point, the lock is not left held.

        Args:
            blocking: False does not wait; None uses the lock's setting.
            blocking_timeout: seconds to wait; None uses the lock's setting.
            token: the value of the key, instead of a random token. A given token is never removed
                in the background: without a timeout it may stay if the server does not reply.

        Raises:
            redis.exceptions.ConnectionError: the server does not reply; nothing is held.
            redis.exceptions.ResponseError: the server will never grant the lock: a setting or its
                configuration is wrong.
        """
        given = None if token is None else self._encoded(token)
        return await self._take(given, self._seconds_to_wait(None, blocking, blocking_timeout))

    async def do_acquire(self, token: str | bytes) -> bool:
        """Acquire the lock with this token if it is free, without waiting. Raises as `acquire`."""
        return await self._take(self._encoded(token), 0.0)

    async def _take(self, given: bytes | None, timeout: float | None) -> bool:
        runtime = await runtime_on_this_loop(self._pool)
        spec, acquisition = self._current_spec(), Acquisition(given)
        try:
            await runtime.locks.acquire(spec, timeout, acquisition)
            self._record(acquisition)
            return True  # noqa: TRY300 - as in RedisLock
        except AcquireTimeout:
            return False
        except GeneratorExit:
            runtime.locks.undo_in_background(spec, acquisition)
            raise
        except BaseException as error:
            await runtime.port.shielded(runtime.locks.undo(spec, acquisition))
            if isinstance(error, HoldfastError):
                raise _to_redis_error(error) from None
            raise

    async def extend(
        self,
        additional_time: Number,
        replace_ttl: bool = False,  # noqa: FBT001, FBT002 - as in redis-py
    ) -> Literal[True]:
        """Add to the time that the lock has left, or replace it.

        The redis-py client sends the request. If the client retries after a lost reply, the time
        may be added twice. If the call is cancelled, the lock may or may not be extended.

        Args:
            additional_time: seconds.
            replace_ttl: True to set the time that is left, instead of adding to it.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock expired, even before the reply arrived, or
                another client holds it.
            redis.exceptions.LockError: this object did not acquire the lock, or not in this thread;
                the lock has no timeout, or would have no time left.
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: the server did not
                reply; the lock may or may not be extended.
        """
        return await super().extend(additional_time, replace_ttl)

    async def reacquire(self) -> Literal[True]:
        """Set the time that the lock has left to its `timeout`.

        The redis-py client sends the request. If the call is cancelled, the time may or may not be
        set.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock expired, even before the reply arrived, or
                another client holds it.
            redis.exceptions.LockError: this object did not acquire the lock, or not in this thread;
                or the lock has no timeout.
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: the server did not
                reply; the time may or may not be set.
        """
        return await super().reacquire()

    async def locked(self) -> bool:
        """Return whether any client holds the lock. The redis-py client sends the request.

        Raises:
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: the server did not
                reply.
        """
        return await super().locked()

    async def do_extend(self, additional_time: Number, replace_ttl: bool) -> Literal[True]:  # noqa: FBT001 - as in redis-py
        """Implement `extend`: raise LockNotOwnedError even if the reply arrives too late."""
        self._timeout_ms("extend")
        args = [self.local.token, int(additional_time * 1000), "1" if replace_ttl else "0"]
        sent_at = now()
        left_ms = await self.lua_extend(keys=[self.name], args=args, client=self.redis)
        return self._check_extended("extend", sent_at, left_ms)

    async def do_reacquire(self) -> Literal[True]:
        """Implement `reacquire`: raise LockNotOwnedError even if the reply arrives too late."""
        timeout_ms = self._timeout_ms("reacquire")
        args, sent_at = [self.local.token, timeout_ms], now()
        kept = await self.lua_reacquire(keys=[self.name], args=args, client=self.redis)
        return self._check_extended("reacquire", sent_at, timeout_ms if kept else 0)

    async def release(self) -> None:
        """Release the lock and hand it to the first waiter.

        If the call is cancelled, it still releases the lock before it passes on the cancellation.

        Raises:
            redis.exceptions.LockError: this object did not acquire the lock, or not in this thread.
            redis.exceptions.LockNotOwnedError: the lock expired, or another client holds it.
            redis.exceptions.TimeoutError: the server did not reply; the lock may or may not be
                released. You may call `release` again. For a random token, the client also retries
                in the background.
            redis.exceptions.ConnectionError: the server cannot be reached. Retries as above.
        """
        token = self._token()
        try:
            await self.do_release(token)
        except LockNotOwnedError:
            self.local.token = None
            raise
        self.local.token = None

    async def do_release(self, expected_token: str | bytes) -> None:
        """Release a lock that was acquired with this token. Raises as `release`."""
        token = self._encoded(expected_token)
        runtime = await runtime_on_this_loop(self._pool)
        try:
            released = await runtime.locks.release(self._current_spec(), token, self._unconfirmed)
        except HoldfastError as error:
            raise _to_redis_error(error) from None
        if not released:
            raise self._not_owned()


def _to_redis_error(error: HoldfastError) -> redis.exceptions.RedisError:
    """Return the redis-py error for an error of holdfast."""
    if isinstance(error, NodeUnavailable):
        return redis.exceptions.ConnectionError(str(error))
    if isinstance(error, OutcomeUnknown):
        return redis.exceptions.TimeoutError(str(error))
    if isinstance(error, ConfigurationError):
        return redis.exceptions.ResponseError(str(error))
    return LockError(str(error))


def _with_lock_name(error: LockError, name: Any) -> LockError:  # noqa: ANN401 - redis-py takes any key
    error.lock_name = name  # the oldest supported redis-py takes no second argument
    return error
