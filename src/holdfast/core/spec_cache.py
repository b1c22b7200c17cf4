"""The specs of the locks that a client described last, so that describing one again is a look-up.

Locks are mostly used as `with client.lock(name):` in a loop. To check the settings of a lock each
time, and to compute what follows from them, would make the loop slower. For a new name with known
settings only its keys are made. The caches are typed: True and 1 are equal, but True is no ttl.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from holdfast.core.spec import LockSpec, describe
from holdfast.errors import ConfigurationError

SPECS_MAX, SETTINGS_MAX = 1000, 100
"""How many specs are kept, about 2 KB each."""

_SETTINGS = (
    "ttl",
    "timeout",
    "renew",
    "max_hold",
    "reentrant",
    "owner",
    "fair",
    "lock_delay",
    "replicas",
    "key",
    "label",
)
_KEY = _SETTINGS.index("key")


class SpecCache:
    """Describes the locks of one client; `of_client` are the settings that all of them share.

    `describe(name, ttl, timeout, …, label)` takes the settings in the order of `_SETTINGS`. It
    raises TypeError if one cannot be hashed: `describe_uncached` takes the same.
    """

    def __init__(self, **of_client: Any) -> None:  # noqa: ANN401 - as `core.spec.describe` takes
        self._of_client = of_client
        self.describe = lru_cache(SPECS_MAX, typed=True)(self._describe)
        self._template = lru_cache(SETTINGS_MAX, typed=True)(self._describe_template)

    def _describe(self, name: str, *settings: Any) -> LockSpec:  # noqa: ANN401 - as given
        if settings[_KEY] is None:  # else the key does not follow from the name
            try:
                return self._template(*settings).named(name)
            except ConfigurationError:
                pass  # said below, with the name of the lock
        return self.describe_uncached(name, *settings)

    def _describe_template(self, *settings: Any) -> LockSpec:  # noqa: ANN401 - as given
        return self.describe_uncached("template", *settings)

    def describe_uncached(self, name: str, *settings: Any) -> LockSpec:  # noqa: ANN401 - as given
        """Describe a lock without remembering it.

        Raises:
            ConfigurationError: at the first setting that cannot work, saying what to write instead.
        """
        given = dict(zip(_SETTINGS, settings, strict=True))
        return describe(name, **given, **self._of_client)
