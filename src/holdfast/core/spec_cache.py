"""The specs of the locks that a client described last, so that describing one again is a look-up.

Locks are mostly used as `with client.lock(name):` in a loop. To check the settings of a lock each
time, and to compute what follows from them, would make the loop slower. So a spec is kept under
all the arguments that describe it. For a new name with known settings only its keys are made.

The types of the numbers are part of the key: True, 1 and 1.0 are equal, but True is no ttl.

Threads share the cache. Each change is one operation on a dictionary; if two threads describe the
same lock at the same moment, either spec may be kept.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from holdfast.core.spec import LockSpec, describe

SPECS_MAX, SETTINGS_MAX = 1000, 100
"""How many specs are kept, about 2 KB each. A full cache is emptied: to describe a lock again costs
little, and to keep track of what was used last would cost more."""

Given: TypeAlias = tuple[Any, ...]
"""The name and the settings of a lock in the order of `SpecCache.describe`, then the types of its
numbers."""

_KEY = 10  # the index of `key` in `Given`


class SpecCache(dict[Given, LockSpec]):
    """Describes the locks of one client: `specs[given]` is the spec.

    A setting that cannot be hashed raises TypeError; call `specs.describe(given)` for those.
    """

    def __init__(
        self,
        *,
        command_timeout: float,
        longest_ttl: float,
        min_validity: float,
        quorum: bool,
        namespace: str,
    ) -> None:
        self._command_timeout = command_timeout
        self._longest_ttl = longest_ttl
        self._min_validity = min_validity
        self._quorum = quorum
        self._namespace = namespace
        self._by_settings: dict[Given, LockSpec] = {}

    def __missing__(self, given: Given) -> LockSpec:
        settings = given[1:]
        known = self._by_settings.get(settings)
        if known is not None:
            spec = known.named(given[0])
        else:
            spec = self.describe(given)
            if given[_KEY] is None:  # otherwise the key does not follow from the name
                if len(self._by_settings) >= SETTINGS_MAX:
                    self._by_settings.clear()
                self._by_settings[settings] = spec
        if len(self) >= SPECS_MAX:
            self.clear()
        self[given] = spec
        return spec

    def describe(self, given: Given) -> LockSpec:
        """Describe a lock without remembering it.

        Raises:
            ConfigurationError: at the first setting that cannot work, saying what to write instead.
        """
        name, ttl, timeout, renew, max_hold, reentrant, owner, fair, delay, replicas, *rest = given
        key, label, *_ = rest
        return describe(
            name,
            ttl=ttl,
            timeout=timeout,
            renew=renew,
            max_hold=max_hold,
            reentrant=reentrant,
            owner=owner,
            fair=fair,
            lock_delay=delay,
            replicas=replicas,
            key=key,
            label=label,
            command_timeout=self._command_timeout,
            longest_ttl=self._longest_ttl,
            min_validity=self._min_validity,
            quorum=self._quorum,
            namespace=self._namespace,
        )
