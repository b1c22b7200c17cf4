"""Several locks that are acquired together: their order, and the keys of one request for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.keys import Keys, lazy
from holdfast.scripts import ACQUIRE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.core.spec import LockSpec


LOCKS_MAX = 1000
"""How many locks one set has at most: `scripts/acquire_all.lua` passes all keys to one command."""


@dataclass(frozen=True)
class LockSet:
    """Several locks, in the order in which all callers acquire them: by the bytes of their keys."""

    specs: tuple[LockSpec, ...]

    @lazy
    def names(self) -> str:
        """Their names, for messages."""
        return ", ".join(repr(spec.name) for spec in self.specs)

    @lazy
    def keys(self) -> Keys:
        """The keys of one request for all locks: lock, counter and queue of each."""
        return Keys(tuple(key for spec in self.specs for key in spec.keys[:3]))

    @lazy
    def fits_one_script(self) -> bool:
        """Whether `scripts/acquire_all.lua` can grant these locks, if one server has all keys.

        It knows no owners, and no WAIT follows it.
        """
        return all(
            spec.acquire_script is ACQUIRE and spec.owner is None and not spec.replicas
            for spec in self.specs
        )

    @lazy
    def is_in_one_slot(self) -> bool:
        """Whether a cluster keeps all these locks in one hash slot."""
        return len({spec.keys.slot for spec in self.specs}) == 1

    @lazy
    def command_timeout(self) -> float:
        """The seconds to wait for one reply: those of the lock with the shortest ttl."""
        return min(spec.command_timeout for spec in self.specs)

    @lazy
    def usable(self) -> float:
        """The seconds after a request for all locks from which its reply is too late."""
        return min(spec.usable for spec in self.specs)


def lock_set(specs: Iterable[LockSpec]) -> LockSet:
    """Return the set of these locks.

    Raises:
        ConfigurationError: there is none, or one is given twice, or there are too many.
    """
    ordered = tuple(sorted(specs, key=lambda spec: spec.keys.lock))
    if not ordered:
        raise ConfigurationError("lock_all needs at least one lock: give a list of names")
    if len(ordered) > LOCKS_MAX:
        raise ConfigurationError(f"lock_all takes at most {LOCKS_MAX} locks, not {len(ordered)}")
    known: set[str | bytes] = set()
    for spec in ordered:
        if spec.keys.lock in known or spec.name in known:
            raise ConfigurationError(
                f"lock {spec.name!r} is given twice: name each lock once, e.g. with "
                "lock_all(set(names))",
                lock=spec.name,
            )
        known |= {spec.keys.lock, spec.name}
    return LockSet(ordered)
