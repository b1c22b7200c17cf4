"""The immutable description of a lock: its settings, checked, and all that follows from them.

What can be computed once a lock is computed here, so that acquiring computes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from holdfast.core.duration import in_seconds
from holdfast.core.token import encode, suffix_of
from holdfast.errors import ConfigurationError
from holdfast.keys import Keys, encoded_name, keys_of, lazy, lock_key_of, prefix_of, to_bytes
from holdfast.scripts import ACQUIRE, Script

if TYPE_CHECKING:
    from holdfast.core.duration import Duration

DRIFT = 0.01
"""How far the rates of the holder's and the server's clocks may differ."""

MARGIN = 0.001
"""Seconds by which a deadline is early, for the server's millisecond clock."""

RENEWALS_A_TTL = 3
"""A lease is renewed when one of so many parts of its time has passed; two remain for retries."""

WINDOW_LONGEST = 1.0  # as in the scripts
"""Seconds for which a lock is handed over to a waiter, at most: it has to be heard from by then."""

TOMBSTONE_MS = "60000"
"""How long a given-up token stays refused: longer than a request may be under way."""

LOST_TOMBSTONE = f"{TOMBSTONE_MS} lost"
"""The same for the release of a lost lease, which begins the lock delay."""

TTL_MIN, TTL_MAX = 0.01, 365 * 86_400.0
LABEL_MAX = 200
REPLICAS_MAX = 1000


@dataclass(frozen=True)
class LockSpec:
    """One lock, as its user described it (first block) and as the core needs it (second)."""

    name: str
    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float  # infinite when there is no cap
    reentrant: bool
    owner: str | None
    fair: bool
    lock_delay: float
    replicas: int
    label: str | None

    prefix: bytes  # of its key, from the namespace
    keys: Keys  # of every script: lock, fence, queue, and an owner's holds
    suffix: str  # the end of every token: the label, the lock delay, and the owner
    settings: str  # what few locks have, as the scripts read it
    ttl_ms: str
    validity: float
    usable: float  # of that, how long an answer may take for the lease to be given
    renew_after: float
    first_due: float  # how long after the grant the renewer has something to do
    command_timeout: float
    longest_ttl: float  # that any lock may have here
    taking: Script = ACQUIRE  # or one that takes it only where it is needed
    asked: tuple[str, ...] = ()  # what that one wants to know besides

    def named(self, name: str) -> LockSpec:
        """The lock with another name and the same settings, which are not checked again.

        Raises:
            ConfigurationError: no lock can have this name.
        """
        lock_key = self.prefix + b"{" + encoded_name("name", name) + b"}"
        keys = keys_of(lock_key, holds=self.owner is not None, replicas=self.replicas)
        fields = self.__dict__.copy()  # far cheaper than setting each of them
        fields.pop("kept_keys", None)
        fields["name"], fields["keys"] = str.__str__(name), keys
        spec = object.__new__(LockSpec)
        object.__setattr__(spec, "__dict__", fields)
        return spec

    @lazy
    def kept_keys(self) -> Keys:
        """The keys of renewing: without an owner, just those that exist while it is held."""
        if self.owner is not None:
            return self.keys
        return Keys(self.keys[:2], self.keys.replicas)


def describe(  # noqa: PLR0913 - the settings of a lock, as the user gives them
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
    """Check a lock's settings and work out what follows from them.

    Raises:
        ConfigurationError: at the first setting that cannot work, saying what to write instead.
    """
    lock_key = lock_key_of(name, key, namespace)
    ttl, timeout = in_seconds(ttl), in_seconds(timeout)
    max_hold, lock_delay = in_seconds(max_hold), in_seconds(lock_delay)
    check_ttl(ttl, lock=name, longest=longest_ttl)
    check_timeout(timeout, lock=name)
    if max_hold is not None:
        if not is_number(max_hold) or not 0 < max_hold < math.inf:
            raise _wrong(f"max_hold={max_hold!r}: give seconds above 0, or None for no cap", name)
        if not renew:
            raise _wrong("max_hold caps renewal and means nothing with renew=False: drop it", name)
    if not is_number(lock_delay) or not 0 <= lock_delay <= TTL_MAX:
        raise _wrong(f"lock_delay={lock_delay!r}: give seconds, 0 for none", name)
    if type(replicas) is not int or not 0 <= replicas <= REPLICAS_MAX:
        raise _wrong(f"replicas={replicas!r}: give how many replicas there are, 0 for none", name)
    _check_text("label", label, name)
    _check_text("owner", owner, name)
    if owner is not None and reentrant:
        raise _wrong("an owner may take it again in any thread or task: drop reentrant=True", name)
    if quorum and owner is not None:
        raise _wrong("an owner's holds are kept by one server: drop owner=, or give one", name)
    if quorum and replicas:
        raise _wrong("a majority of servers needs no replicas: drop replicas=", name)
    keys = keys_of(lock_key, holds=owner is not None, replicas=replicas)
    group = "" if owner is None else f"&{encode(owner)}"
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
        suffix=suffix_of(label, delay_ms, group),
        settings=settings_of(
            delay_ms,
            group,
            fair=fair and not quorum,
            guarded=longest_ttl < math.inf and not quorum,
        ),
        ttl_ms=to_ms(ttl),
        validity=validity,
        usable=validity - min_validity,
        renew_after=validity / RENEWALS_A_TTL,
        first_due=min(validity / RENEWALS_A_TTL, max_hold or math.inf) if renew else validity,
        command_timeout=min(command_timeout, ttl / (10 if quorum else 4)),
        longest_ttl=longest_ttl,
    )


def settings_of(delay_ms: int, group: str, *, fair: bool = True, guarded: bool = False) -> str:
    """Write what few locks have as the scripts read it; `group` is the end of an owner's tokens.

    `guarded`: the server may be replaced by another.
    """
    if fair and not delay_ms and not group and not guarded:
        return ""
    return f"{delay_ms} {'fair' if fair else 'barge'}{'+guard' if guarded else ''} {group}"


def delay_in(settings: str) -> int:
    """The delay (ms) that `settings_of` wrote."""
    return int(settings.partition(" ")[0] or 0)


def checked_longest_ttl(given: Duration) -> float:
    """Return a client's `longest_ttl` in seconds.

    Raises:
        ConfigurationError: no lock can have such a ttl.
    """
    seconds = in_seconds(given)
    if is_number(seconds) and 0 < seconds <= TTL_MAX:
        return float(seconds)
    raise ConfigurationError(
        f"longest_ttl={seconds!r}: give seconds above 0, up to {TTL_MAX:.0f}, e.g. 60.0"
    )


def validity_of(ttl: float) -> float:
    """How long after the sending of a request for `ttl` its sender may believe in it."""
    return ttl * (1 - DRIFT) - MARGIN


def ttl_of(validity: float) -> float:
    """The ttl that is to be asked for by a sender who believes in it for so long."""
    return (validity + MARGIN) / (1 - DRIFT)


def to_ms(seconds: float) -> str:
    """Whole milliseconds, rounded up: the server never forgets sooner than the holder."""
    return str(math.ceil(seconds * 1000))


def check_ttl(
    ttl: object, *, lock: str, longest: float = math.inf, least: float = TTL_MIN, name: str = "ttl"
) -> None:
    """Refuse a ttl that a server could not keep, or longer than others count on."""
    if not is_number(ttl) or not least <= ttl <= TTL_MAX:
        raise _wrong(f"{name}={ttl!r}: give seconds from {least} to {TTL_MAX:.0f}, e.g. 30", lock)
    if ttl > longest:
        raise _wrong(
            f"{name}={ttl!r}: this client says that no lock has more than "
            f"longest_ttl={longest:.12g} s, and who takes a server's place counts on that: give "
            f"all clients longest_ttl={ttl!r}",
            lock,
        )


def check_timeout(timeout: object, *, lock: str) -> None:
    """Refuse a timeout that is no length of time."""
    if timeout is None:
        return
    if not is_number(timeout) or not 0 <= timeout < math.inf:
        raise _wrong(f"timeout={timeout!r}: give seconds, 0 not to wait, or None for ever", lock)


def _check_text(what: str, text: object, lock: str) -> None:
    if text is None:
        return
    if not isinstance(text, str) or len(text) > LABEL_MAX:
        raise _wrong(f"{what}: give a string of at most {LABEL_MAX} characters, or None", lock)
    to_bytes(what, text)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(message: str, lock: str) -> ConfigurationError:
    return ConfigurationError(message if not lock else f"lock {lock!r}: {message}", lock=lock)
