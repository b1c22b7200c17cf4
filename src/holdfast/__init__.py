"""Distributed locks on Redis and Valkey that tell their holder the truth.

    import holdfast

    client = holdfast.Client("redis://localhost")  # or your redis-py or valkey-py client
    with client.lock("invoice:42") as lease:
        save(invoice, fence=lease.fence)

Names are imported when they are first used: `import holdfast` alone costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what type checkers take for true; importing typing would cost the most

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast.core.atomic import Outcome
    from holdfast.core.duration import Duration
    from holdfast.core.events import Event, EventKind
    from holdfast.errors import (
        AcquireTimeout,
        ConfigurationError,
        Contended,
        HoldfastError,
        LeaseLost,
        LossReason,
        NodeUnavailable,
        NoQuorum,
        NotHeld,
        OutcomeUnknown,
        ScriptFailed,
        WouldDeadlock,
        WrongValue,
    )
    from holdfast.faces.async_atomic import AsyncAtomic, AsyncAtomicScript
    from holdfast.faces.async_cached import AsyncCached
    from holdfast.faces.async_client import AsyncClient, AsyncLease, AsyncLock
    from holdfast.faces.atomic import Atomic, AtomicScript
    from holdfast.faces.cached import Cached
    from holdfast.faces.client import Client, Lease, Lock
    from holdfast.faces.codecs import JSON, PICKLE, RAW, Codec
    from holdfast.faces.facts import UNSET, Unset
    from holdfast.faces.redis_lock import AsyncRedisLock, RedisLock
    from holdfast.faces.targets import Target
    from holdfast.holder import Holder

__all__ = [
    "JSON",
    "PICKLE",
    "RAW",
    "UNSET",
    "AcquireTimeout",
    "AsyncAtomic",
    "AsyncAtomicScript",
    "AsyncCached",
    "AsyncClient",
    "AsyncLease",
    "AsyncLock",
    "AsyncRedisLock",
    "Atomic",
    "AtomicScript",
    "Cached",
    "Client",
    "Codec",
    "ConfigurationError",
    "Contended",
    "Duration",
    "Event",
    "EventKind",
    "Holder",
    "HoldfastError",
    "Lease",
    "LeaseLost",
    "Lock",
    "LossReason",
    "NoQuorum",
    "NodeUnavailable",
    "NotHeld",
    "Outcome",
    "OutcomeUnknown",
    "RedisLock",
    "ScriptFailed",
    "Target",
    "Unset",
    "WouldDeadlock",
    "WrongValue",
]

_HOMES = {
    "AsyncCached": "holdfast.faces.async_cached",
    "AsyncAtomic": "holdfast.faces.async_atomic",
    "AsyncAtomicScript": "holdfast.faces.async_atomic",
    "AsyncClient": "holdfast.faces.async_client",
    "AsyncLease": "holdfast.faces.async_client",
    "AsyncLock": "holdfast.faces.async_client",
    "AsyncRedisLock": "holdfast.faces.redis_lock",
    "Cached": "holdfast.faces.cached",
    "Atomic": "holdfast.faces.atomic",
    "AtomicScript": "holdfast.faces.atomic",
    "Client": "holdfast.faces.client",
    "Codec": "holdfast.faces.codecs",
    "Duration": "holdfast.core.duration",
    "Event": "holdfast.core.events",
    "EventKind": "holdfast.core.events",
    "Holder": "holdfast.holder",
    "JSON": "holdfast.faces.codecs",
    "Lease": "holdfast.faces.client",
    "Lock": "holdfast.faces.client",
    "Outcome": "holdfast.core.atomic",
    "PICKLE": "holdfast.faces.codecs",
    "RAW": "holdfast.faces.codecs",
    "RedisLock": "holdfast.faces.redis_lock",
    "Target": "holdfast.faces.targets",
    "UNSET": "holdfast.faces.facts",
    "Unset": "holdfast.faces.facts",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - as late as the rest

    value = getattr(import_module(_HOMES.get(name, "holdfast.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
