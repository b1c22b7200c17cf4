"""Errors for calls that holdfast does not have. They show what to write instead.

Many such calls are right with another lock library, or with the other client of holdfast.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, NoReturn

from holdfast.errors import ConfigurationError
from holdfast.keys import kind_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from holdfast.core.spec import LockSpec

_CLIENTS = {"Client", "AsyncClient"}
_OF_A_SERVER = {"host", "port", "db", "username", "password", "ssl", "url", "unix_socket_path"}
"""Arguments with which redis-py and other libraries identify a server."""
_FIELD = re.compile(r"\{([^\W\d]\w*)")
"""A field of a format string that begins with the name of an argument."""


def refuse(
    method: str, unknown: Mapping[str, object], positional: tuple[object, ...] = (), wait: str = ""
) -> NoReturn:
    """Raise an error that names the replacement for an argument of other lock libraries.

    Args:
        method: the method that was called, or the class.
        unknown: the unknown keyword arguments.
        positional: the positional arguments, of which none is allowed.
        wait: "await " in the API for asyncio.

    Raises:
        TypeError: always, as Python does for unknown arguments.
    """
    if positional:
        message, advice = _of_positional(method, positional, wait)
    else:
        name, value = next(iter(unknown.items()))
        message = f"{method}() got an unexpected keyword argument {name!r}"
        advice = _of_keyword(method, name, value, wait)
    raise TypeError(f"{message}: {advice}" if advice else message)


def _of_positional(method: str, given: tuple[object, ...], wait: str) -> tuple[str, str]:
    if method in _CLIENTS:
        message = f"{method}() takes one positional argument, the servers"
        return message, f'write {method}("redis://host:port/db"); several servers are a list'
    if method in _SECOND_ARGUMENT:
        first = {"lock_all": "the locks", "once": "the id"}.get(method, "the name")
        message = f"{method}() takes one positional argument, {first}"
        return message, _SECOND_ARGUMENT[method].format(given[0])
    # as in threading.Lock.acquire(blocking, timeout)
    value = given[1] if given[0] is True and given[1:] else given[0]
    name = "blocking" if isinstance(value, bool) else "blocking_timeout"
    return f"{method}() takes no positional arguments", _of_keyword(method, name, value, wait)


_TTL_AND_TIMEOUT = (
    "ttl= is how long the server keeps the lock without a renewal, timeout= the seconds to wait "
    "for the lock"
)
_SECOND_ARGUMENT = {
    "lock": f"write ttl={{0!r}} or timeout={{0!r}}; {_TTL_AND_TIMEOUT}",
    "rwlock": f"write ttl={{0!r}} or timeout={{0!r}}; {_TTL_AND_TIMEOUT}",
    "lock_all": "write all names as one list, and every setting with its name",
    "semaphore": "write limit={0!r}, the number of permits",
    "rate": "write limit={0!r}, and the seconds as per=",
    "barrier": "write parties={0!r}, the number of parties",
    "latch": "write count={0!r}, the number of ids that open it",
    "election": "write ttl={0!r}, the seconds that a term lasts without a renewal; the seconds to "
    "wait for a term are lead(timeout={0!r})",
    "once": "write keep={0!r}, the seconds for which the result is kept, or timeout={0!r}",
    "periodic": "write every={0!r}, the seconds of a period",
}
"""What to write for a second positional argument."""


def _of_keyword(method: str, name: str, value: object, wait: str) -> str:
    if method in _CLIENTS:
        return f'write {method}("redis://host:port/db")' if name in _OF_A_SERVER else ""
    if method == "try_acquire":
        waits = {"timeout", "blocking_timeout"}
        return f"it does not wait: write {wait}lock.acquire(timeout={value!r})" * (name in waits)
    makes = method in {"lock", "lock_all", "semaphore", "rwlock"}
    setting = "write {}" if makes else "give client.lock() {}"
    return {
        "blocking": "leave it out to wait"
        if value
        else f"write timeout=0, or {wait}lock.try_acquire()",
        "blocking_timeout": f"write timeout={value!r}, the seconds to wait for the lock; ttl= is "
        "how long the server keeps the lock without a renewal",
        "expire": setting.format(f"ttl={value!r}"),
        "auto_renewal": setting.format(f"renew={value!r}"),
        "sleep": "leave it out: a waiting client is notified, and does not poll",
        "thread_local": "leave it out: each lease is an object, and acquire() returns it",
    }.get(name, "")


def check_plain_function(function: Callable[..., object], advice: str, lock: str = "") -> None:
    """Check that a decorator of a `Client` gets a function whose body runs during the call.

    Args:
        function: the decorated function.
        advice: what to write for a coroutine function.
        lock: the name of the lock, for the error.

    Raises:
        ConfigurationError: it is a coroutine function, a generator function, or no function.
    """
    _check_body_runs(function, lock)
    if _is_coroutine_function(function):
        message = f"{_name_of(function)} is a coroutine function: {advice}"
        raise ConfigurationError(message, lock=lock)


def check_coroutine_function(function: Callable[..., object], advice: str, lock: str = "") -> None:
    """Check that a decorator of an `AsyncClient` gets a coroutine function.

    The arguments are those of `check_plain_function`.

    Raises:
        ConfigurationError: it is another function, or no function.
    """
    _check_body_runs(function, lock)
    if not _is_coroutine_function(function):
        message = f"{_name_of(function)} is not a coroutine function: {advice}"
        raise ConfigurationError(message, lock=lock)


def _check_body_runs(function: Callable[..., object], lock: str) -> None:
    name = _name_of(function)
    if not callable(function):
        message = f"{name} is not a function: wrap it in a function"
        raise ConfigurationError(message, lock=lock)
    is_async = inspect.isasyncgenfunction(function)
    if is_async or inspect.isgeneratorfunction(function):
        message = f"{name} is a generator function: its body runs after the call returns; " + (
            "write 'async with lock:' inside it, with a lock of holdfast.AsyncClient"
            if is_async
            else "write 'with lock:' inside it, with a lock of holdfast.Client"
        )
        raise ConfigurationError(message, lock=lock)


def _is_coroutine_function(function: Callable[..., object]) -> bool:
    called = getattr(type(function), "__call__", None)  # noqa: B004 - of an object that is called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", None) or repr(function)


def check_name_of_decorator(spec: LockSpec, function: Callable[..., object], with_: str) -> None:
    """Check that the name of a decorator's lock has no field with an argument of the function.

    The name of a lock is used as it is, unlike the `key` of a cached function.

    Args:
        spec: of the lock.
        function: the decorated function.
        with_: "with", or "async with" in the API for asyncio.

    Raises:
        ConfigurationError: the name has such a field.
    """
    fields, kind = _FIELD.findall(spec.name), kind_in(spec.keys.lock) or "lock"
    if not fields:
        return
    try:
        arguments = inspect.signature(function).parameters
    except (TypeError, ValueError):  # Python cannot show them
        return
    for field in fields:
        if field in arguments:
            raise ConfigurationError(
                f"every call would hold the same lock {spec.name!r}: its name is not a format "
                f"string; write '{with_} client.{kind}(f\"{spec.name}\"):' inside "
                f"{getattr(function, '__name__', 'the function')}",
                lock=spec.name,
            )


def check_takes_the_run(function: Callable[..., object], lock: str) -> None:
    """Check that the function of a periodic job is no method, whose first argument is its object.

    Raises:
        ConfigurationError: its first argument is named `self` or `cls`.
    """
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # Python cannot show them
        return
    if first in ("self", "cls"):
        name = _name_of(function)
        raise ConfigurationError(
            f"{name} is a method, and would receive the run as {first!r}: decorate the bound "
            f"method, as in client.periodic(...)({first}.{name})",
            lock=lock,
        )


def check_ttl_is_no_function(ttl: object) -> None:
    """Check that `cached` was called with a ttl.

    Raises:
        ConfigurationError: it got the function, as a decorator without parentheses does.
    """
    if callable(ttl):
        raise ConfigurationError("cached needs a ttl in seconds: write @client.cached(60)")


class MissingMethod:
    """A method that a class does not have, although callers expect it.

    Accessing it raises an AttributeError with advice. In the advice, `{with_}` and `{wait}` stand
    for "async with" and "await " in the API for asyncio.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, kind: type) -> Self:
        if instance is None:
            return self
        wait = getattr(instance, "_wait", "")
        advice = self._advice.format(with_="async with" if wait else "with", wait=wait)
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}: {advice}")
