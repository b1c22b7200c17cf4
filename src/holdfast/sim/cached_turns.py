"""The calls of a cached function with which clients begin some of their turns."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.core.cache import Cache, get, invalidate, refresh
from holdfast.core.value import CacheEntry, describe_cache
from holdfast.errors import ConfigurationError, HoldfastError, WouldDeadlock
from holdfast.sim.checks.cached import CachedCheck, Call, Failed
from holdfast.sim.client import COMMAND_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from typing import TypeVar

    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.settings import Settings

    T = TypeVar("T")

NAMES = ("value", "value {1} of 100 %", "value " * 100)
"""Possible names of the value; the name is part of its keys."""

USUAL: Mapping[str, Any] = {
    "ttl": 1.0,
    "stale": None,
    "early": None,
    "lock_ttl": 4.0,
    "timeout": None,
    "command_timeout": COMMAND_TIMEOUT,
    "quorum": False,
}
MISUSES: Sequence[Mapping[str, Any]] = [
    *({"ttl": given} for given in (0.0, None, True, "1")),
    *({"stale": given} for given in (-0.1, math.inf, True, "1")),
    *({"early": given} for given in (-0.1, math.inf, True, "1")),
    *({"lock_ttl": given} for given in (0.49, None)),
    *({"timeout": given} for given in (-0.1, True)),
    {"quorum": True},
]
"""Invalid settings of a cached function."""


class _Cache(Cache):
    """A cache that reports its events to the check."""

    def __init__(self, client: SimClient, check: CachedCheck) -> None:
        self._client = client
        self._check = check
        super().__init__(client.session, self._spawn)
        client.after_fork.append(self.begin)

    def _spawn(self, operation: Coroutine[Any, Any, None]) -> bool:
        client = self._client
        if client.closed:
            return False
        client.machine.spawn(operation, "background")
        return True

    def on_server_up(self) -> None:
        """Note that the server replied, and report it."""
        self._check.server_answered(self._client)
        super().on_server_up()

    def on_server_down(self, entry: CacheEntry, error: HoldfastError) -> None:
        """Note that the server did not reply, and report it."""
        self._check.unanswered(self._client, self._client.actor())
        super().on_server_down(entry, error)


class CachedTurns:
    """The calls of all clients for one cached value, in one run."""

    def __init__(self, settings: Settings, checks: Checks) -> None:
        self._choices = checks.sim.choices
        self._caches: dict[SimClient, _Cache] = {}
        if settings.cached:
            self._set_up(settings, checks)

    def _set_up(self, settings: Settings, checks: Checks) -> None:
        """Draw the settings of the cached function, and check that invalid ones are rejected."""
        for misuse in MISUSES:
            if not _is_rejected(misuse):
                checks.fail("CACHE", f"{misuse} was accepted")
        drawn = {
            "ttl": self._one_of("cache ttl", (1.0, 0.3, 5.0)),
            "stale": self._one_of("stale", (None, 1.0, 10.0)),
            "early": self._one_of("early", (None, 1.0, 3.0)),
            "lock_ttl": self._one_of("lock_ttl", (4.0, 0.5, 1.5)),
            "timeout": self._one_of("cache timeout", (None, None, 0.0, 0.5)),
        }
        self._spec = describe_cache(**{**USUAL, **drawn})
        self._name = self._one_of("name", NAMES)
        self._takes = self._one_of("computing", (0.05, 0.0, 0.6))
        lock = self._wanted(None).lock()  # type: ignore[arg-type]  # it is not computed
        self.check = checks.cached = CachedCheck(settings, checks, self._spec, lock)
        checks.beside |= dict.fromkeys((lock.keys[0], lock.keys[3]), self.check)

    def _one_of(self, kind: str, values: Sequence[T]) -> T:
        return values[self._choices.pick(kind, [1] * len(values))]

    def _wanted(self, call: Call) -> CacheEntry:
        return CacheEntry(self._spec, self._name, partial(self._compute, call), _dumps, _loads)

    def _cache(self, client: SimClient) -> _Cache:
        if client not in self._caches:
            self._caches[client] = _Cache(client, self.check)
        return self._caches[client]

    async def turn(self, client: SimClient) -> None:
        """Get, invalidate or refresh the value."""
        for _ in range(self._one_of("calls", (1, 2, 4))):
            kind = ("get", "invalidate", "refresh")[self._choices.pick("call", (7, 2, 1))]
            await self._begin(kind, client)

    async def _begin(self, kind: str, client: SimClient, *, nested: bool = False) -> None:
        call = Call(kind, client, nested=nested)
        self.check.begin(call)
        try:
            await self._call(call)
        except (HoldfastError, Failed) as error:
            self.check.raised(call, error)
        finally:
            self.check.end(call)
        task = call.invalidation_task
        while task is not None and not (task.result.done or task.process.crashed):
            await client.sleep(0.1)

    async def _invalidate_and_get(self, client: SimClient) -> None:
        """Invalidate the value while it is being stored, then get it."""
        await client.sleep(0.0002)
        await self._begin("invalidate", client, nested=True)
        await self._begin("get", client, nested=True)

    async def _call(self, call: Call) -> None:
        cache, wanted = self._cache(call.client), self._wanted(call)
        if call.kind == "invalidate":
            await invalidate(cache, wanted)
            self.check.invalidated(call)
        else:
            value = await (get if call.kind == "get" else refresh)(cache, wanted)
            self.check.returned(call, value)

    async def _compute(self, call: Call) -> int:
        """Compute the value: take some time, sometimes fail, sometimes call `get` recursively."""
        made = self.check.computes(call)
        failed = True
        try:
            how = self._choices.pick("computes", (12, 2, 1))
            if how == 2 and call.kind == "get" and not made.in_background:  # noqa: PLR2004 - one in 15
                await self._get_recursively(call)
            takes = (1.0, 0.0, 5.0)[self._choices.pick("takes", (4, 2, 1))] * self._takes
            await call.client.sleep(takes)
            if how == 1:
                raise Failed(made.number)
            failed = False
            if not (call.over or call.nested) and self._choices.pick("forgets", (3, 1)):
                nested = self._invalidate_and_get(call.client)
                call.invalidation_task = call.client.machine.spawn(nested, "forgets")
        finally:
            self.check.computed(made, failed=failed)
        return made.number

    async def _get_recursively(self, call: Call) -> None:
        try:
            await get(self._cache(call.client), self._wanted(call))
        except WouldDeadlock:
            self.check.reached["a cached function that called itself"] += 1
            return
        if (
            call.client.generation == call.generation
        ):  # a child does not know the call of its parent
            self.check.fail("FLIGHT", f"{call.task.name} waited for itself")


def _is_rejected(settings: Mapping[str, Any]) -> bool:
    try:
        describe_cache(**{**USUAL, **settings})
    except ConfigurationError:
        return True
    return False


def _dumps(number: int) -> bytes:
    return b"%d" % number


def _loads(payload: bytes) -> tuple[str, int]:
    return "read", int(payload)
