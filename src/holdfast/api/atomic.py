"""Atomic operations, for threads. `api.async_atomic` has the same API for asyncio."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from holdfast.adapters.thread_port import run
from holdfast.api.codecs import JSON
from holdfast.api.values import dump, load, named
from holdfast.core.atomic import AtomicOperations, parse_user_script
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.api.codecs import Codec
    from holdfast.core.atomic import Outcome
    from holdfast.core.duration import Duration
    from holdfast.port import AtomicPort


class Atomic:
    """Operations that the server runs in one step, so that no lock is needed: `client.atomic`.

    Example:
        visits = client.atomic.incr("visits:2024-05-01", expire=86400)
        if client.atomic.take("stock:42", once=order.id):
            ship(order)

    Keys are used exactly as given, without the client's namespace; text is encoded as UTF-8.

    Every operation that changes something takes `once`, an id. For one hour, a call with the same
    id on the same key changes nothing and returns the first result. An id is text or a number: 1 is
    the same id as "1". With an id, the client retries automatically if the reply is lost. Without
    an id, a lost reply raises `OutcomeUnknown`.

    If a call is interrupted by a signal handler, the operation may or may not have been carried
    out.

    All operations raise these errors:

    - OutcomeUnknown: the request was sent and got no reply; it may or may not have been carried
      out;
    - NodeUnavailable: the server does not reply; nothing was changed;
    - WrongValue: the key has a value of the wrong type; nothing was changed;
    - ConfigurationError: an argument is invalid, or the id was used for another operation.
    """

    def __init__(self, port: AtomicPort, timeout: float) -> None:
        self._steps = AtomicOperations(port, timeout)

    def incr(
        self,
        key: str | bytes,
        by: int = 1,
        *,
        expire: Duration | None = None,
        once: str | int | None = None,
    ) -> int:
        """Add to a counter and return its new value. A missing key counts as 0.

        Example:
            visits = client.atomic.incr("visits:2024-05-01", expire=86400)

        Args:
            key: the counter's key.
            by: the number to add; it may be negative.
            expire: seconds after the first use when the counter is deleted. Later calls do not
                prolong this. A counter without an expiry gets one.
            once: an id. A repeated call with the same id on the same key changes nothing.

        Raises:
            OutcomeUnknown, NodeUnavailable, WrongValue, ConfigurationError: see `Atomic`.
        """
        return run(self._steps.incr(key, by, expire, once))

    def take(
        self, key: str | bytes, n: int = 1, *, floor: int = 0, once: str | int | None = None
    ) -> Outcome:
        """Subtract from a number, unless the result would be below `floor`.

        A missing key counts as 0. The key's expiry does not change.

        Example:
            if not client.atomic.take("stock:42", 3):
                raise SoldOut

        Args:
            key: the number's key.
            n: how much to subtract.
            floor: the lowest allowed result.
            once: an id. A repeated call with the same id on the same key changes nothing.

        Returns:
            An `Outcome`: true if it was subtracted; `left` is the number that is there now.

        Raises:
            OutcomeUnknown, NodeUnavailable, WrongValue, ConfigurationError: see `Atomic`.
        """
        return run(self._steps.take(key, n, floor, once))

    def put(
        self,
        key: str | bytes,
        n: int = 1,
        *,
        ceiling: int | None = None,
        once: str | int | None = None,
    ) -> Outcome:
        """Add to a number, unless the result would be above `ceiling`.

        A missing key counts as 0. The key's expiry does not change.

        Example:
            client.atomic.put("stock:42", 3, ceiling=100)

        Args:
            key: the number's key.
            n: how much to add.
            ceiling: the highest allowed result; None for 2**63 - 1.
            once: an id. A repeated call with the same id on the same key changes nothing.

        Returns:
            An `Outcome`: true if it was added; `left` is the number that is there now.

        Raises:
            OutcomeUnknown, NodeUnavailable, WrongValue, ConfigurationError: see `Atomic`.
        """
        return run(self._steps.put(key, n, ceiling, once))

    def compare_and_set(
        self,
        key: str | bytes,
        old: str | bytes | None,
        new: str | bytes,
        *,
        ttl: Duration | None = None,
        once: str | int | None = None,
    ) -> bool:
        """Set the key to `new` if its value is `old`; return whether it was.

        Example:
            paid = client.atomic.compare_and_set("order:42", "new", "paid")

        Args:
            key: the key.
            old: the expected value; None if the key must not exist.
            new: the new value.
            ttl: seconds until the key expires. None keeps the expiry (a new key has none); math.inf
                removes it.
            once: an id. A repeated call with the same id on the same key changes nothing.

        Raises:
            OutcomeUnknown, NodeUnavailable, WrongValue, ConfigurationError: see `Atomic`.
        """
        return run(self._steps.compare_and_set(key, old, new, ttl, once))

    def compare_and_delete(
        self, key: str | bytes, old: str | bytes, *, once: str | int | None = None
    ) -> bool:
        """Delete the key if its value is `old`; return whether it was.

        Example:
            deleted = client.atomic.compare_and_delete("order:42", "cancelled")

        Args:
            key: the key.
            old: the expected value.
            once: an id. A repeated call with the same id on the same key changes nothing.

        Raises:
            OutcomeUnknown, NodeUnavailable, WrongValue, ConfigurationError: see `Atomic`.
        """
        return run(self._steps.compare_and_delete(key, old, once))

    def update(  # noqa: PLR0913 - settings, all optional
        self,
        key: str | bytes,
        fn: Callable[[Any], Any],
        *,
        ttl: Duration | None = None,
        timeout: Duration | None = 10.0,
        codec: Codec = JSON,
        once: str | int | None = None,
    ) -> Any:  # noqa: ANN401 - what the codec returns
        """Replace the value with `fn(value)`, and retry if another client changed it meanwhile.

        An exception from `fn` is passed on, and nothing is written. With `once`, an earlier attempt
        whose reply was lost may still be carried out: repeat the update with the same id to find
        out.

        Example:
            client.atomic.update("cart:7", lambda cart: [*(cart or []), item])

        Args:
            key: the key.
            fn: takes the value, or None if the key does not exist, and returns the new value, which
                must not be None. Each attempt calls it again.
            ttl: seconds until the key expires. None keeps the expiry (a new key has none); math.inf
                removes it.
            timeout: seconds during which it retries; None retries forever, 0 never.
            codec: how values are encoded.
            once: an id. A repeated call with the same id on the same key changes nothing.

        Returns:
            The new value.

        Raises:
            Contended: other clients changed the value until the timeout; nothing was changed.
            OutcomeUnknown, NodeUnavailable, WrongValue, ConfigurationError: see `Atomic`.
        """
        if inspect.iscoroutinefunction(fn):
            message = f"{fn!r} is a coroutine function: use it with holdfast.AsyncClient"
            raise ConfigurationError(message, lock=named(key))

        async def change(data: bytes | None) -> bytes:
            return dump(codec, key, fn(load(codec, key, data)))

        return load(codec, key, run(self._steps.update(key, change, ttl, timeout, once)))

    def script(self, text: str | bytes) -> AtomicScript:
        """Prepare a Lua script. This sends nothing to the server.

        Example:
            append = client.atomic.script("return redis.call('RPUSH', KEYS[1], ARGV[1])")
            length = append(keys=["log"], args=["started"])

        Args:
            text: the script, which reads its arguments from KEYS and ARGV.

        Raises:
            ConfigurationError: `text` is not a script.
        """
        return AtomicScript(self._steps, text)


class AtomicScript:
    """A Lua script that the server runs in one step.

    Example:
        append = client.atomic.script("return redis.call('RPUSH', KEYS[1], ARGV[1])")
        length = append(keys=["log"], args=["started"])
    """

    __slots__ = ("_script", "_steps")

    def __init__(self, steps: AtomicOperations, text: str | bytes) -> None:
        self._steps = steps
        self._script = parse_user_script(text)

    def __call__(
        self,
        *,
        keys: Sequence[str | bytes] = (),
        args: Sequence[str | bytes | float] = (),
        once: str | int | None = None,
    ) -> Any:  # noqa: ANN401 - what the script returns
        """Run the script and return its reply: bytes, an integer, None, or a list of these.

        If the call is interrupted by a signal handler, the script may or may not have run: see
        `Atomic`.

        Args:
            keys: all keys that the script uses. In a cluster, one node must have all of them.
            args: the other arguments.
            once: an id. A repeated call with the same id does not run the script again, and returns
                or raises the same as the first one.

        Raises:
            ScriptFailed: the script ended with an error; what it wrote before that stays.
            OutcomeUnknown, NodeUnavailable, ConfigurationError: see `Atomic`.
        """
        return run(self._steps.run(self._script, keys, args, once))
