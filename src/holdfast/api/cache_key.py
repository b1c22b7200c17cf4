"""The names of a cached function's values.

A name identifies a value in every process and on every machine. So it is built only from what is
the same everywhere. For any other argument the user must give a key.
"""

from __future__ import annotations

import inspect
import sys
from enum import Enum
from pathlib import PurePath
from string import Formatter
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from holdfast.api.codecs import as_bytes
from holdfast.core.value import CacheEntry
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from holdfast.api.codecs import Codec
    from holdfast.core.value import CacheSpec

Key: TypeAlias = "str | Callable[..., str] | None"
"""A format string with the arguments, a function of them, or None for all of them."""

_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_ALSO_PLAIN = {
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "time"),
    ("datetime", "timedelta"),
    ("decimal", "Decimal"),
    ("uuid", "UUID"),
}
"""Types whose `repr` is complete and the same in every process. By name, to avoid imports."""

_ANONYMOUS = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


class CacheKey:
    """The names of a cached function's values, and their codec."""

    def __init__(
        self, function: Callable[..., Any], spec: CacheSpec, key: Key, codec: Codec
    ) -> None:
        self._spec = spec
        self._codec = codec
        self._function = _name_of(function)
        owner, _, _ = getattr(function, "__qualname__", "").rpartition(".")
        self._owner = "" if owner.endswith("<locals>") else owner
        """The class, if the function is a method."""
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise self._wrong(f"wrap it in a function and cache that: {error}") from None
        if not (
            callable(getattr(codec, "dumps", None)) and callable(getattr(codec, "loads", None))
        ):
            raise self._wrong(f"codec={codec!r} has no dumps and loads: use holdfast.JSON")
        if isinstance(key, str):
            self._name = self._formatted(key)
        elif callable(key):
            self._name = self._called(key)
        elif key is None:
            self._check_named_by_arguments(function)
            self._name = self._by_arguments
        else:
            raise self._wrong(f"key={key!r}: give a format string, such as 'user:{{user_id}}'")

    def _check_named_by_arguments(self, function: Callable[..., Any]) -> None:
        """Reject functions whose name and arguments do not determine the result.

        Raises:
            ConfigurationError: the function is such a one.
        """
        inmost = inspect.unwrap(function)
        free = getattr(getattr(inmost, "__code__", None), "co_freevars", ())
        around = [name for name in free if name != inmost.__name__]  # it may be recursive
        if not inspect.isroutine(inmost) or inmost.__name__ == "<lambda>":
            why = "it has no unique name"
        elif inspect.ismethod(inmost):
            why = "its name does not identify the instance"
        elif around:
            why = f"its result also depends on {' and '.join(around)} of the enclosing function"
        else:
            return
        raise self._wrong(f"{why}: give a key, such as 'thing:{{thing_id}}'")

    def entry_for(
        self,
        compute: Callable[[], Awaitable[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> CacheEntry:
        """Describe the value for a call with these arguments.

        Raises:
            TypeError: the function does not accept them.
            ConfigurationError: they do not name a value.
        """
        name = self._name(args, kwargs)
        return CacheEntry(self._spec, name, compute, self._dumps, self._codec.loads)

    def check_instance(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that `invalidate` or `refresh` of a method got the instance.

        `shop.price.invalidate` is the attribute of the function, which does not know `shop`.

        Raises:
            TypeError: the function does not accept these arguments.
            ConfigurationError: the first argument is not an instance of the class.
        """
        first = next(iter(self._signature.parameters), "")
        if not self._owner or first not in {"self", "cls"}:
            return
        given = self._bound(args, kwargs)[first]
        kind = given if isinstance(given, type) else given.__class__
        if all(each.__qualname__ != self._owner for each in kind.__mro__):
            method = self._function.rpartition(".")[2]
            raise self._wrong(
                f"pass the instance, as in {self._owner}.{method}.invalidate({first}, ...)"
            )

    def _dumps(self, value: object) -> bytes:
        try:
            return as_bytes(self._codec.dumps(value))
        except Exception as error:
            raise self._wrong(
                f"the codec cannot encode its result: {error}: return something else, or give a "
                "codec that can encode it, such as holdfast.PICKLE"
            ) from error

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _by_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        words = [
            f"{name}={self._canonical(value, name)}"
            for name, value in self._bound(args, kwargs).items()
        ]
        return f"{self._function}({', '.join(words)})"

    def _formatted(self, text: str) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
        known = self._signature.parameters
        try:
            fields = [field for _, field, _, _ in Formatter().parse(text) if field is not None]
        except ValueError as error:
            raise self._wrong(f"key={text!r} is not a format string: {error}") from None
        for field in fields:
            name = field.partition(".")[0].partition("[")[0]
            if name not in known or known[name].kind in _ANONYMOUS:
                named = [f"{{{each}}}" for each in known if known[each].kind not in _ANONYMOUS]
                among = " and ".join(named) or "no fields"
                raise self._wrong(f"key={text!r}: there is no argument {name!r}: use {among}")
        fill = _KeyFormatter(self._wrong).vformat

        def name_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            return self._checked(fill(text, (), self._bound(args, kwargs)))

        return name_of

    def _called(self, key: Callable[..., str]) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
        return lambda args, kwargs: self._checked(key(*args, **kwargs))

    def _checked(self, name: object) -> str:
        if isinstance(name, str) and name:
            return name
        raise self._wrong(f"its key is {name!r}: return non-empty text that names the value")

    def _canonical(self, value: object, name: str) -> str:
        """Return text that is equal in all processes for equal arguments, and only for these."""
        if is_plain(value):
            return repr(value)
        if isinstance(value, Enum):
            return f"{_name_of(type(value))}.{_member(value)}"
        kind = type(value)
        if isinstance(value, (list, tuple)) and kind in (list, tuple):
            return self._listed(kind, [self._canonical(item, name) for item in value])
        if isinstance(value, (set, frozenset)) and kind in (set, frozenset):
            return self._listed(kind, sorted(self._canonical(item, name) for item in value))
        if isinstance(value, dict) and kind is dict:
            items = [
                f"{self._canonical(key, name)}: {self._canonical(item, name)}"
                for key, item in value.items()
            ]
            return self._listed(kind, sorted(items))
        raise self._wrong(
            f"its argument {name!r}, a {kind.__name__}, has no repr that is the same everywhere: "
            f"give a key, such as 'thing:{{{name}.id}}', or a function of the arguments"
        )

    @staticmethod
    def _listed(kind: type, items: Sequence[str]) -> str:
        return f"{kind.__name__}({', '.join(items)})"

    def _wrong(self, message: str) -> ConfigurationError:
        return ConfigurationError(f"cached {self._function}: {message}", lock=self._function)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the module and qualified name of a function, the same in every process.

    For a program that is run as `__main__`, the name of its file replaces the module.
    """
    module = getattr(function, "__module__", None)
    if module in {"__main__", "__mp_main__"}:
        main = sys.modules.get(module)
        found, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = found.name if found else PurePath(file).stem if file else module
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


def _member(value: Enum) -> str:
    """Return the name of an enum member, or the value of combined flags."""
    return value.name if value.name in type(value).__members__ else repr(value.value)


def is_plain(value: object) -> bool:
    """Return whether the `repr` of a value is complete and the same in every process."""
    kind = type(value)
    return kind in _PLAIN or (kind.__module__, kind.__name__) in _ALSO_PLAIN


class _KeyFormatter(Formatter):
    """Formats a key so that field values cannot be confused with the text between them."""

    def __init__(self, wrong: Callable[[str], ConfigurationError]) -> None:
        self._wrong = wrong

    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401 - as in Formatter
        """Format one field: letters and digits unchanged, everything else as %XX."""
        if isinstance(value, Enum):
            value = _member(value)
        if not is_plain(value):
            raise self._wrong(
                f"a {type(value).__name__} in its key is not the same text in every process: "
                "use a simple attribute of it, such as {user.id}"
            )
        if isinstance(value, bytes):
            value = value.decode("latin-1")
        text = quote(format(value, format_spec), safe="", errors="surrogateescape")
        for mark in "-._~":
            text = text.replace(mark, f"%{ord(mark):02X}")
        return text
