"""The keys of a lock: their names, and their hash slot.

The key of a lock is `holdfast:{name}`, in a namespace `holdfast:in:<namespace>:{name}`, or what the
user gave as `key=`. That of a semaphore is `holdfast:{name}:semaphore`, that of an rwlock
`holdfast:{name}:rwlock`; barriers and latches have their kind at the end too. The other keys of the
lock are derived from it. All keys of a lock are in one hash slot, so that one script can use them
in a cluster.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

NAME_MAX_BYTES, NAMESPACE_MAX = 1024, 100
SLOTS = 16_384  # in every cluster
_NAMED, _KEYED, _TAGGED, _ODD = (
    re.compile(form, re.DOTALL)
    for form in (
        rb"(holdfast:(?:in:[^{}:]+:)?\{.*)",
        rb"holdfast:key:\{(.*)\}",
        rb"holdfast:tag:(.*)",
        rb"holdfast:odd:\{\d+\}:(.*)",
    )
)
CACHE, ELECTION, ONCE, PERIODIC, RATE = "cache", "election", "once", "periodic", "rate"
SEMAPHORE, RWLOCK = "semaphore", "rwlock"
KINDS = (
    CACHE,
    ELECTION,
    ONCE,
    PERIODIC,
)
"""The kinds of locks that are not created with `client.lock`. In their keys, `tag_for` encodes the
name."""

OBSERVERS = "observers"
"""The record of an election: the queue of its observers, who acquire nothing (`core.election`)."""

SHARED_KINDS = SEMAPHORE, RWLOCK
"""The kinds of locks with several holders. Their keys end with the kind, after the exact name."""

BARRIER, LATCH = "barrier", "latch"
WAITED_KINDS = BARRIER, LATCH
"""The kinds that are waited for and never held. Their keys end with the kind."""

_NAME = re.compile(
    rb"holdfast:(?:in:([^{}:]+):)?\{(.+)\}(?::(%b))?"
    % "|".join((*SHARED_KINDS, *WAITED_KINDS, RATE)).encode(),
    re.DOTALL,
)
_OF_KIND = re.compile(
    rb"holdfast:(?:in:([^{}:]+):)?\{([^{}]+)\}:(%b)" % "|".join(KINDS).encode(), re.DOTALL
)
TAG_MAX_BYTES = 300
"""A longer hash tag is replaced by its beginning and a digest."""


class lazy(Generic[T]):  # noqa: N801 - as property
    """A property that is computed once per object, without a mutex.

    `functools.cached_property` of Python 3.11 uses a mutex. In a child that is forked while another
    thread computes a property, that mutex would stay locked.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: object, _: type) -> T:
        value = instance.__dict__[self._compute.__name__] = self._compute(instance)
        return value


@dataclass(frozen=True)
class Keys:
    """The keys of one request, in the order of its script, and where the request is sent."""

    names: tuple[bytes, ...]
    replicas: int = 0
    """How many replicas must have the writes of acquire, renew and adopt before they count."""
    node: int | None = None
    """The only node to which the request is sent, if several nodes keep the lock."""
    spare: bytes = b""
    """For an atomic operation: an unused key in the same slot. Commands on it show which ACL
    permission is missing (`wire.error_replies`)."""

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

    @property
    def lock(self) -> bytes:
        """The key of the lock, which is the first of its keys."""
        return self.names[0]

    def at(self, node: int) -> Keys:
        """Return the same keys for a request to one node."""
        return replace(self, node=node)

    @lazy
    def packed(self) -> bytes:
        """Their number and names, in the Redis protocol (RESP)."""
        words = b"%d" % len(self.names), *self.names
        return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])

    @lazy
    def slot(self) -> int:
        """The hash slot of the first key."""
        return slot_of(self.names[0])


def keys_of(lock_key: bytes, *, holds: bool = False, replicas: int = 0) -> Keys:
    """Return all keys of a lock; with `holds`, also the key for the holds of an owner."""
    siblings = siblings_of(lock_key)
    names = lock_key, siblings + b":fence", siblings + b":queue"
    return Keys((*names, siblings + b":holds") if holds else names, replicas)


def siblings_of(key: bytes) -> bytes:
    """Return the prefix of the keys that belong to this key, and are in its hash slot."""
    if key.startswith(b"holdfast:{") and key.find(b"}") > len(b"holdfast:{"):
        return key  # made from a name, and has a hash tag
    if tag_of(key):
        return key if is_named(key) else b"holdfast:tag:" + key
    if b"}" in key:  # it would end the hash tag too early
        return b"holdfast:odd:{%b}:%b" % (_tag_like(slot_of(key)), key)
    return b"holdfast:key:{%b}" % key


def lock_key_of(name: str, key: str | None = None, namespace: str = "") -> bytes:
    """Return the key of the lock with this name in its namespace; or `key`, if that is given.

    Raises:
        ConfigurationError: the name or the key is invalid.
    """
    encoded = encoded_name("name", name)
    return prefix_of(namespace) + b"{" + encoded + b"}" if key is None else encoded_name("key", key)


def tag_for(name: str) -> bytes:
    """Encode a name so that it can be the hash tag of a key."""
    text = name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    encoded = text.encode("utf-8", "surrogateescape")
    if len(encoded) <= TAG_MAX_BYTES:
        return encoded
    digest = sha256(encoded).hexdigest().encode()
    return encoded[: TAG_MAX_BYTES - len(digest)] + digest


def keys_of_kind(kind: str, name: str, namespace: str, record: str) -> Keys:
    """Return the keys of a lock of one of KINDS, and of its record, which is not named like a lock.

    Raises:
        ConfigurationError: the name is invalid.
    """
    lock_key = key_of_kind(kind, name, namespace)
    return Keys((*keys_of(lock_key), record_key_of(lock_key, record)))


def key_of_kind(kind: str, name: str, namespace: str = "") -> bytes:
    """Return the key of the lock of this kind with this name; `kind` is "lock" for a plain one.

    Raises:
        ConfigurationError: the name is invalid.
    """
    plain = lock_key_of(name, None, namespace)
    if kind in KINDS:
        return b"%b{%b}:%b" % (prefix_of(namespace), tag_for(name), kind.encode())
    return plain if kind == "lock" else b"%b:%b" % (plain, kind.encode())


def record_key_of(lock_key: bytes, record: str) -> bytes:
    """Return the key of the record beside a lock of one of KINDS: "result", "last" or "value"."""
    found = _OF_KIND.fullmatch(lock_key)
    assert found is not None  # noqa: S101 - the callers know the kind
    within = b"%b:" % found[1] if found[1] else b""
    return b"holdfast:%b:%b{%b}" % (record.encode(), within, found[2])


def is_observers(key: bytes) -> bool:
    """Whether a key is the queue of the observers of an election."""
    return key.startswith(b"holdfast:%b:" % OBSERVERS.encode())


def lock_key_in(key: bytes) -> bytes | None:
    """Return the key of the lock to which a key under `holdfast:` belongs; None if to no lock.

    It is the inverse of `keys_of`, for the lock's key, its counter, its queue and its holds. The
    key of a rate (`core.rate`) belongs to no lock.
    """
    siblings, colon, kind = key.rpartition(b":")
    if colon and kind in (b"fence", b"queue", b"holds"):
        for form in (_NAMED, _KEYED, _TAGGED, _ODD):
            found = form.fullmatch(siblings)
            if found and keys_of(found[1])[1] == siblings + b":fence":
                return found[1]
    if kind == b"rate" and _NAME.fullmatch(siblings):
        return None
    return key if is_named(key) else None


def is_named(key: bytes) -> bool:
    """Whether a key has the form of one that was made from the name of a lock."""
    return _NAMED.fullmatch(key) is not None


def name_in(lock_key: bytes) -> str | None:
    """Return the name of the lock with this key; None if the key was not made from a name."""
    found = _NAME.fullmatch(lock_key)
    if found:
        return found[2].decode("utf-8", "surrogateescape")
    found = _OF_KIND.fullmatch(lock_key)
    if found is None:
        return None
    tag = found[2].replace(b"%7B", b"{").replace(b"%7D", b"}").replace(b"%25", b"%")
    return tag.decode("utf-8", "surrogateescape")


def kind_in(lock_key: bytes) -> str:
    """Return the kind of a key, as it ends; "" for that of a lock."""
    found = _NAME.fullmatch(lock_key) or _OF_KIND.fullmatch(lock_key)
    return found[3].decode() if found and found[3] else ""


def namespace_in(lock_key: bytes) -> str:
    """Return the namespace of the lock with this key; "" for none."""
    found = _NAME.fullmatch(lock_key) or _OF_KIND.fullmatch(lock_key)
    return found[1].decode("utf-8", "surrogateescape") if found and found[1] else ""


def prefix_of(namespace: str) -> bytes:
    """Return the prefix of the keys of locks in a namespace, up to the {tag}.

    A namespace has no colon and no braces. So two namespaces never share a key, and no lock outside
    a namespace has a key in one.
    """
    return b"holdfast:in:%b:" % namespace.encode() if namespace else b"holdfast:"


def checked_namespace(namespace: object) -> str:
    """Return a valid namespace; "" for None.

    Raises:
        ConfigurationError: the namespace is invalid.
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
        f"namespace={namespace!r} is not valid: give 1 to {NAMESPACE_MAX} printable characters "
        "other than : { and }, e.g. 'shop.production'"
    )


def tag_of(key: bytes) -> bytes:
    """Return the hash tag of a key, which is between braces; empty if it has none."""
    start = key.find(b"{") + 1
    end = key.find(b"}", start)
    return key[start:end] if start and end > start else b""


def slot_of(key: bytes) -> int:
    """Return the hash slot of a key in a cluster."""
    return crc_hqx(tag_of(key) or key, 0) % SLOTS


@lru_cache(maxsize=1024)
def _tag_like(slot: int) -> bytes:
    """Return a hash tag in this slot: the smallest number that is in it."""
    return next(tag for tag in (b"%d" % number for number in count()) if slot_of(tag) == slot)


def encoded_name(what: str, value: object) -> bytes:
    """Return a name as bytes. `what` names the argument in errors.

    Raises:
        ConfigurationError: the name is invalid.
    """
    if not isinstance(value, str):
        raise _wrong(f"{what}={value!r}: give a string; for bytes, .decode() them")
    encoded = to_bytes(what, value)
    if 0 < len(encoded) <= NAME_MAX_BYTES:
        return encoded
    if not encoded:
        raise _wrong(f"the {what} is empty: name the resource that the lock protects")
    raise _wrong(
        f"the {what} has {len(encoded)} bytes, and at most {NAME_MAX_BYTES} are allowed: "
        "use a shorter one, for example a digest of it",
        value[:40],
    )


def to_bytes(what: str, value: str) -> bytes:
    """Return a text as bytes.

    Raises:
        ConfigurationError: the text cannot be encoded.
    """
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _wrong(f"the {what} is not text: {error}") from None


def _wrong(message: str, lock: str = "") -> ConfigurationError:
    return ConfigurationError(message if not lock else f"lock {lock!r}: {message}", lock=lock)
