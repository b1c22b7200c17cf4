"""The immutable description of a lock: its checked settings, and the values derived from them.

Everything that can be computed once per lock is computed here, and not when it is acquired.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from holdfast.core.duration import in_seconds
from holdfast.core.kind import EXCLUSIVE, Kind
from holdfast.core.token import encode, suffix_of
from holdfast.errors import ConfigurationError
from holdfast.keys import Keys, encoded_name, keys_of, lazy, lock_key_of, prefix_of, to_bytes
from holdfast.scripts import ACQUIRE, Script

if TYPE_CHECKING:
    from holdfast.core.duration import Duration

DRIFT = 0.01
"""How much the rates of the clocks of the holder and the server may differ."""

MARGIN = 0.001
"""Seconds by which a deadline is early, because the clock of the server counts milliseconds."""

RENEWALS_PER_TTL = 3
"""A lease is renewed after a third of its validity. Two thirds remain for retries."""

WINDOW_LONGEST = 1.0  # as in the scripts
"""The longest window, in seconds. Within it the holder of a pushed grant must send a request."""

TOMBSTONE_MS = "60000"
"""How long (ms) a tombstone makes the server refuse a token: longer than a request is under way."""

LOST_TOMBSTONE = f"{TOMBSTONE_MS} lost"
"""The same, for the release of a lost lease, which begins the lock delay."""

TTL_MIN, TTL_MAX = 0.01, 365 * 86_400.0
LABEL_MAX = 200
REPLICAS_MAX = 1000


@dataclass(frozen=True)
class LockSpec:
    """One lock: the settings of the user (first block), and what follows from them (second)."""

    name: str
    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float  # infinite if there is no limit
    reentrant: bool
    owner: str | None
    fair: bool
    lock_delay: float
    replicas: int
    label: str | None

    prefix: bytes  # the prefix of its key, from the namespace
    keys: Keys  # the keys of the lock, the fence, the queue, and the holds of an owner
    suffix: str  # the end of every token: the label, the lock delay, and the owner
    settings: str  # less common settings, as the scripts read them
    ttl_ms: str
    validity: float  # the seconds from the request to the deadline
    usable: float  # validity minus min_validity; a later reply is too late
    renew_after: float
    first_due: float  # the seconds after which the renewer first handles the lease
    command_timeout: float
    longest_ttl: float  # the longest ttl that any lock of this client may have
    is_shared: bool  # several leases may be valid at once, even in one process
    acquire_script: Script = ACQUIRE  # or a script that acquires the lock only if it is needed
    extra_args: tuple[str, ...] = ()  # the additional arguments of such a script
    kind: Kind = EXCLUSIVE
    weight: int = 0  # of a semaphore or an rwlock: the permits that a lease takes
    limit: int = 0  # and at most how many are in use then; 0 for a lock

    def with_name(self, name: str) -> LockSpec:
        """Return a lock with another name and the same settings, which are not checked again.

        Raises:
            ConfigurationError: the name is invalid.
        """
        lock_key = self.prefix + b"{" + encoded_name("name", name) + b"}"
        keys = keys_of(lock_key, holds=self.owner is not None, replicas=self.replicas)
        fields = self.__dict__.copy()  # much faster than `dataclasses.replace`
        fields.pop("renewal_keys", None)
        fields["name"], fields["keys"] = str.__str__(name), keys
        spec = object.__new__(LockSpec)
        object.__setattr__(spec, "__dict__", fields)
        return spec

    @lazy
    def renewal_keys(self) -> Keys:
        """The keys of a renewal: without an owner, only the keys that exist while it is held."""
        if self.owner is not None:
            return self.keys
        return Keys(self.keys[:2], self.keys.replicas)


def describe(  # noqa: PLR0913 - the settings of a lock
    name: str,
    *,
    ttl: Duration,
    timeout: Duration | None,
    renew: bool,
    max_hold: Duration | None,
    reentrant: bool,
    owner: str | None,
    fair: bool,
    lock_delay: Duration,
    key: str | None,
    label: str | None,
    command_timeout: float,
    replicas: int = 0,
    longest_ttl: float = math.inf,
    min_validity: float = 0.0,
    quorum: bool = False,
    namespace: str = "",
) -> LockSpec:
    """Check the settings of a lock; return its spec.

    Raises:
        ConfigurationError: a setting is invalid. The message shows what to write instead.
    """
    lock_key = lock_key_of(name, key, namespace)
    ttl, timeout = in_seconds(ttl), in_seconds(timeout)
    max_hold, lock_delay = in_seconds(max_hold), in_seconds(lock_delay)
    check_ttl(ttl, lock=name, longest=longest_ttl)
    check_timeout(timeout, lock=name)
    if max_hold is not None:
        if not is_number(max_hold) or not 0 < max_hold < math.inf:
            raise _wrong(f"max_hold={max_hold!r}: give seconds above 0, or None for no limit", name)
        if not renew:
            raise _wrong("max_hold needs renew=True: remove it, or remove renew=False", name)
    if not is_number(lock_delay) or not 0 <= lock_delay <= TTL_MAX:
        raise _wrong(f"lock_delay={lock_delay!r}: give seconds, 0 for none", name)
    if type(replicas) is not int or not 0 <= replicas <= REPLICAS_MAX:
        raise _wrong(f"replicas={replicas!r}: give the number of replicas, 0 for none", name)
    _check_text("label", label, name)
    if owner is not None:
        _check_owner(owner, name, reentrant=reentrant, quorum=quorum)
    if quorum and replicas:
        raise _wrong("a quorum uses no replicas: remove replicas=", name)
    keys = keys_of(lock_key, holds=owner is not None, replicas=replicas)
    owner_suffix = "" if owner is None else f"&{encode(owner)}"
    delay_ms = int(to_ms(lock_delay))
    validity = validity_of(ttl)
    if not is_number(min_validity) or not 0 <= min_validity < validity:
        raise _wrong(f"min_validity={min_validity!r}: give seconds below the ttl of {ttl}", name)
    return LockSpec(
        name=str.__str__(name),
        ttl=float(ttl),
        timeout=timeout,
        renew=bool(renew),
        max_hold=math.inf if max_hold is None else float(max_hold),
        reentrant=bool(reentrant),
        owner=owner,
        fair=bool(fair),
        lock_delay=float(lock_delay),
        replicas=replicas,
        label=label,
        prefix=prefix_of(namespace),
        keys=keys,
        suffix=suffix_of(label, delay_ms, owner_suffix),
        settings=settings_of(
            delay_ms,
            owner_suffix,
            fair=fair and not quorum,
            guarded=longest_ttl < math.inf and not quorum,
        ),
        ttl_ms=to_ms(ttl),
        validity=validity,
        usable=validity - min_validity,
        renew_after=validity / RENEWALS_PER_TTL,
        first_due=min(validity / RENEWALS_PER_TTL, max_hold or math.inf) if renew else validity,
        command_timeout=min(command_timeout, ttl / (10 if quorum else 4)),
        longest_ttl=longest_ttl,
        is_shared=owner is not None,
    )


def settings_of(
    delay_ms: int, owner_suffix: str, *, fair: bool = True, guarded: bool = False
) -> str:
    """Encode the less common settings for the scripts; "" if there are none.

    `owner_suffix` is the end of the tokens of an owner. `guarded` means that another server may
    take over, so that the scripts check for a quarantine.
    """
    if fair and not delay_ms and not owner_suffix and not guarded:
        return ""
    return f"{delay_ms} {'fair' if fair else 'barge'}{'+guard' if guarded else ''} {owner_suffix}"


def delay_in(settings: str) -> int:
    """Return the lock delay (ms) in the result of `settings_of`."""
    return int(settings.partition(" ")[0] or 0)


def checked_longest_ttl(given: Duration) -> float:
    """Return the `longest_ttl` of a client in seconds.

    Raises:
        ConfigurationError: it is invalid.
    """
    seconds = in_seconds(given)
    if is_number(seconds) and 0 < seconds <= TTL_MAX:
        return float(seconds)
    raise ConfigurationError(
        f"longest_ttl={seconds!r}: give seconds above 0, up to {TTL_MAX:.0f}, e.g. 60.0"
    )


def validity_of(ttl: float) -> float:
    """Return the seconds for which a lease with `ttl` is valid, counted from its request."""
    return ttl * (1 - DRIFT) - MARGIN


def ttl_of(validity: float) -> float:
    """Return the ttl to request for this validity: the inverse of `validity_of`."""
    return (validity + MARGIN) / (1 - DRIFT)


def to_ms(seconds: float) -> str:
    """Return milliseconds, rounded up, so that the server never expires a key too early."""
    return str(math.ceil(seconds * 1000))


def check_ttl(  # noqa: PLR0913 - the last three are for other durations
    ttl: object,
    *,
    lock: str,
    longest: float = math.inf,
    least: float = TTL_MIN,
    name: str = "ttl",
    of: str = "lock",
    example: int = 30,
) -> None:
    """Raise ConfigurationError for a ttl that is out of range, or above `longest`.

    It names the setting `name` of the kind `of`.
    """
    if not is_number(ttl) or not least <= ttl <= TTL_MAX:
        advice = f"give seconds from {least} to {TTL_MAX:.0f}, e.g. {example}"
        raise _wrong(f"{name}={ttl!r}: {advice}", lock, of)
    if ttl > longest:
        raise _wrong(
            f"{name}={ttl!r} exceeds longest_ttl={longest:.12g} of this client: after a failover, "
            "servers wait only that long before they grant locks. Give all clients "
            f"longest_ttl={ttl!r}, or the lock a shorter ttl",
            lock,
        )


def check_timeout(timeout: object, *, lock: str, of: str = "lock") -> None:
    """Raise ConfigurationError for an invalid timeout."""
    if timeout is None:
        return
    if not is_number(timeout) or not 0 <= timeout < math.inf:
        message = f"timeout={timeout!r}: give seconds, 0 not to wait, None for no limit"
        raise _wrong(message, lock, of)


def _check_owner(owner: object, lock: str, *, reentrant: bool, quorum: bool) -> None:
    _check_text("owner", owner, lock)
    if not owner:
        raise _wrong("owner='' is empty, as from an unset variable: give a name, or None", lock)
    if reentrant:
        raise _wrong("an owner may acquire it in any thread or task: remove reentrant=True", lock)
    if quorum:
        raise _wrong("an owner needs a single server: remove owner=, or give one server", lock)


def _check_text(what: str, text: object, lock: str) -> None:
    if text is None:
        return
    if not isinstance(text, str) or len(text) > LABEL_MAX:
        raise _wrong(f"{what}: give a string of at most {LABEL_MAX} characters, or None", lock)
    to_bytes(what, text)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(message: str, lock: str, of: str = "lock") -> ConfigurationError:
    return ConfigurationError(message if not lock else f"{of} {lock!r}: {message}", lock=lock)
