"""A cache of lock specs: describing the same lock again is a lookup.

Locks are mostly used as `with client.lock(name):` in a loop. Checking the settings each time would
make the loop slower. For a new name with known settings only the keys are made. The caches are
typed: True and 1 are equal, but True is no ttl.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from holdfast.core.spec import LockSpec, describe
from holdfast.errors import ConfigurationError

SPECS_MAX, SETTINGS_MAX = 1000, 100
"""How many specs are kept, of about 2 KB each."""

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
    """The specs of one client. `of_client` are the settings that all its locks share.

    `describe(name, ttl, timeout, …, label)` takes the settings in the order of `_SETTINGS`. It
    raises TypeError if one cannot be hashed. `describe_uncached` takes the same arguments.
    """

    def __init__(self, **of_client: Any) -> None:  # noqa: ANN401 - as `core.spec.describe` takes
        self.of_client = of_client
        self.describe = lru_cache(SPECS_MAX, typed=True)(self._describe)
        self._template = lru_cache(SETTINGS_MAX, typed=True)(self._describe_template)

    def _describe(self, name: str, *settings: Any) -> LockSpec:  # noqa: ANN401 - as given
        if settings[_KEY] is None:  # else the key does not follow from the name
            try:
                return self._template(*settings).with_name(name)
            except ConfigurationError:
                pass  # raised below, with the name of the lock
        return self.describe_uncached(name, *settings)

    def _describe_template(self, *settings: Any) -> LockSpec:  # noqa: ANN401 - as given
        return self.describe_uncached("template", *settings)

    def describe_uncached(self, name: str, *settings: Any) -> LockSpec:  # noqa: ANN401 - as given
        """Return the spec of a lock, without the cache.

        Raises:
            ConfigurationError: a setting is invalid. The message shows what to write instead.
        """
        given = dict(zip(_SETTINGS, settings, strict=True))
        return describe(name, **given, **self.of_client)
