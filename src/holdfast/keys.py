"""The keys of a lock: how they are named, and what is derived from their names.

All keys of a lock share one hash slot, so that one script can use them in a cluster.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

NAME_MAX_BYTES, NAMESPACE_MAX = 1024, 100
SLOTS = 16_384  # of every cluster
_NAMED, _KEYED, _TAGGED, _ODD = (
    re.compile(form, re.DOTALL)
    for form in (
        rb"(holdfast:(?:in:[^{}:]+:)?\{.*)",
        rb"holdfast:key:\{(.*)\}",
        rb"holdfast:tag:(.*)",
        rb"holdfast:odd:\{\d+\}:(.*)",
    )
)
_NAME = re.compile(rb"holdfast:(?:in:([^{}:]+):)?\{(.+)\}", re.DOTALL)


class lazy(Generic[T]):  # noqa: N801 - as property
    """A property that is computed once per object, without a lock.

    `functools.cached_property` of Python 3.11 has one. It would stay locked in a child that is
    forked while another thread computes.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: object, _: type) -> T:
        value = instance.__dict__[self._compute.__name__] = self._compute(instance)
        return value


@dataclass(frozen=True)
class Keys:
    """The keys of one request, in the order of its script, and where to send it."""

    names: tuple[bytes, ...]
    replicas: int = 0
    """Replicas that must have what acquire, renew and adopt write, before it counts."""
    node: int | None = None
    """The only node to be asked, of several that keep the lock."""
    spare: bytes = b""
    """Of an atomic operation: an unused key of the same slot. Commands on it show which right is
    missing (`wire.refusals`)."""

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[bytes, ...]: ...

    def __getitem__(self, index: int | slice) -> bytes | tuple[bytes, ...]:
        return self.names[index]

    def at(self, node: int) -> Keys:
        """Return the same keys, on one node."""
        return replace(self, node=node)

    @lazy
    def packed(self) -> bytes:
        """Their number and names, as a request of the Redis protocol has them."""
        words = b"%d" % len(self.names), *self.names
        return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])

    @lazy
    def slot(self) -> int:
        """The slot of the first one in a cluster."""
        return slot_of(self.names[0])


def keys_of(lock_key: bytes, *, holds: bool = False, replicas: int = 0) -> Keys:
    """Return the keys of the lock with this key, with those of its owner's holds if it has one."""
    siblings = siblings_of(lock_key)
    names = lock_key, siblings + b":fence", siblings + b":queue"
    return Keys((*names, siblings + b":holds") if holds else names, replicas)


def siblings_of(key: bytes) -> bytes:
    """How keys begin that belong to this one, and share its hash slot."""
    if key.startswith(b"holdfast:{") and key.find(b"}") > len(b"holdfast:{"):
        return key  # made from a name, and with a tag
    if tag_of(key):
        return key if is_named(key) else b"holdfast:tag:" + key
    if b"}" in key:  # which would end the tag too soon
        return b"holdfast:odd:{%b}:%b" % (_tag_like(slot_of(key)), key)
    return b"holdfast:key:{%b}" % key


def lock_key_of(name: str, key: str | None = None, namespace: str = "") -> bytes:
    """The key of the lock with this name in its namespace, unless it is given its `key`.

    Raises:
        ConfigurationError: it is no name, or no key, saying what to give instead.
    """
    encoded = encoded_name("name", name)
    return prefix_of(namespace) + b"{" + encoded + b"}" if key is None else encoded_name("key", key)


def lock_key_in(key: bytes) -> bytes | None:
    """The lock that a key under `holdfast:` belongs to, by the lock's key; None if it is of none.

    `keys_of` the other way round: from the lock's own key, its counter, its queue or its holds.
    """
    siblings, colon, kind = key.rpartition(b":")
    if colon and kind in (b"fence", b"queue", b"holds"):
        for form in (_NAMED, _KEYED, _TAGGED, _ODD):
            found = form.fullmatch(siblings)
            if found and keys_of(found[1])[1] == siblings + b":fence":
                return found[1]
    return key if is_named(key) else None


def is_named(key: bytes) -> bool:
    """Whether a key begins as those that are made from the name of a lock."""
    return _NAMED.fullmatch(key) is not None


def name_in(lock_key: bytes) -> str | None:
    """The name of the lock with this key; None if it was given the key itself."""
    found = _NAME.fullmatch(lock_key)
    return found[2].decode("utf-8", "surrogateescape") if found else None


def namespace_in(lock_key: bytes) -> str:
    """The namespace of the lock with this key; "" for none."""
    found = _NAME.fullmatch(lock_key)
    return found[1].decode("utf-8", "surrogateescape") if found and found[1] else ""


def prefix_of(namespace: str) -> bytes:
    """How the keys of locks in a namespace begin, up to the {tag}.

    A namespace has no colon and no braces. So no two of them, nor a lock without one, share a key.
    """
    return b"holdfast:in:%b:" % namespace.encode() if namespace else b"holdfast:"


def checked_namespace(namespace: object) -> str:
    """Return a namespace, "" for none.

    Raises:
        ConfigurationError: it cannot be a namespace; the message says what to give instead.
    """
    if namespace is None:
        return ""
    if (
        isinstance(namespace, str)
        and 0 < len(namespace) <= NAMESPACE_MAX
        and namespace.isprintable()
        and not any(mark in namespace for mark in ":{}")
    ):
        return str.__str__(namespace)
    raise _wrong(
        f"namespace={namespace!r}: give 1 to {NAMESPACE_MAX} printable characters other than : {{ "
        "and }, e.g. 'shop.production'"
    )


def tag_of(key: bytes) -> bytes:
    """The {tag} by which a key names its own hash slot; empty if it has none."""
    start = key.find(b"{") + 1
    end = key.find(b"}", start)
    return key[start:end] if start and end > start else b""


def slot_of(key: bytes) -> int:
    """Return the slot of a key in a cluster."""
    return crc_hqx(tag_of(key) or key, 0) % SLOTS


@lru_cache(maxsize=1024)
def _tag_like(slot: int) -> bytes:
    """Find a tag for this slot: the least number that is one."""
    return next(tag for tag in (b"%d" % number for number in count()) if slot_of(tag) == slot)


def encoded_name(what: str, value: object) -> bytes:
    """Return a name as bytes; `what` it is is said in errors.

    Raises:
        ConfigurationError: it is no name, saying what to give instead.
    """
    if not isinstance(value, str):
        raise _wrong(f"{what}={value!r}: give a string; for bytes, .decode() them")
    encoded = to_bytes(what, value)
    if 0 < len(encoded) <= NAME_MAX_BYTES:
        return encoded
    if not encoded:
        raise _wrong(f"the {what} is empty: give the thing that is locked a name")
    raise _wrong(
        f"the {what} has {len(encoded)} bytes and may have {NAME_MAX_BYTES}: "
        "use a shorter one, for example a digest of it",
        value[:40],
    )


def to_bytes(what: str, value: str) -> bytes:
    """Return a text as bytes.

    Raises:
        ConfigurationError: it cannot be encoded.
    """
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _wrong(f"the {what} is not text: {error}") from None


def _wrong(message: str, lock: str = "") -> ConfigurationError:
    return ConfigurationError(message if not lock else f"lock {lock!r}: {message}", lock=lock)
