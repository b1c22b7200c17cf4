"""Distributed locks on Redis and Valkey, whose leases report when they are lost.

    import holdfast

    client = holdfast.Client("redis://localhost")  # or a redis-py or valkey-py client
    with client.lock("invoice:42") as lease:
        save(invoice, fence=lease.fence)

Names are imported on first use, so that `import holdfast` alone is fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers treat it as true; importing typing would be slow

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast import guards
    from holdfast.api.async_atomic import AsyncAtomic, AsyncAtomicScript
    from holdfast.api.async_barrier import AsyncBarrier
    from holdfast.api.async_cached import AsyncCached
    from holdfast.api.async_client import AsyncClient, AsyncLease, AsyncLock
    from holdfast.api.async_election import AsyncCampaign, AsyncElection, AsyncTerm
    from holdfast.api.async_latch import AsyncLatch
    from holdfast.api.async_multi_lock import AsyncMultiLease, AsyncMultiLock
    from holdfast.api.async_once import AsyncOnce
    from holdfast.api.async_periodic import AsyncPeriodic
    from holdfast.api.async_rate import AsyncRate
    from holdfast.api.async_shared import (
        AsyncReadLock,
        AsyncRWLock,
        AsyncSemaphore,
        AsyncWriteLease,
        AsyncWriteLock,
    )
    from holdfast.api.atomic import Atomic, AtomicScript
    from holdfast.api.barrier import Barrier
    from holdfast.api.broken_barrier import BrokenBarrier
    from holdfast.api.cached import Cached
    from holdfast.api.client import Client, Lease, Lock
    from holdfast.api.codecs import JSON, PICKLE, RAW, Codec
    from holdfast.api.election import Campaign, Election, Term
    from holdfast.api.latch import Latch
    from holdfast.api.lease_view import UNSET, Unset
    from holdfast.api.multi_lock import MultiLease, MultiLock
    from holdfast.api.once import Once
    from holdfast.api.periodic import Periodic
    from holdfast.api.periodic_run import PeriodicRun
    from holdfast.api.rate import Rate
    from holdfast.api.redis_lock import AsyncRedisLock, RedisLock
    from holdfast.api.shared import ReadLock, RWLock, Semaphore, WriteLease, WriteLock
    from holdfast.api.targets import (
        HasConnectionClass,
        HasConnectionPool,
        HasNodesManager,
        SingleTarget,
        Target,
    )
    from holdfast.core.atomic import Outcome
    from holdfast.core.barrier import BreakReason
    from holdfast.core.duration import Duration
    from holdfast.core.events import Event, EventKind
    from holdfast.core.periodic import LastRun, Skipped
    from holdfast.core.rate import Verdict
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
        RateLimited,
        ScriptFailed,
        StaleFence,
        WouldDeadlock,
        WrongValue,
    )
    from holdfast.holder import Holder

__all__ = [
    "JSON",
    "PICKLE",
    "RAW",
    "UNSET",
    "AcquireTimeout",
    "AsyncAtomic",
    "AsyncAtomicScript",
    "AsyncBarrier",
    "AsyncCached",
    "AsyncCampaign",
    "AsyncClient",
    "AsyncElection",
    "AsyncLatch",
    "AsyncLease",
    "AsyncLock",
    "AsyncMultiLease",
    "AsyncMultiLock",
    "AsyncOnce",
    "AsyncPeriodic",
    "AsyncRWLock",
    "AsyncRate",
    "AsyncReadLock",
    "AsyncRedisLock",
    "AsyncSemaphore",
    "AsyncTerm",
    "AsyncWriteLease",
    "AsyncWriteLock",
    "Atomic",
    "AtomicScript",
    "Barrier",
    "BreakReason",
    "BrokenBarrier",
    "Cached",
    "Campaign",
    "Client",
    "Codec",
    "ConfigurationError",
    "Contended",
    "Duration",
    "Election",
    "Event",
    "EventKind",
    "HasConnectionClass",
    "HasConnectionPool",
    "HasNodesManager",
    "Holder",
    "HoldfastError",
    "LastRun",
    "Latch",
    "Lease",
    "LeaseLost",
    "Lock",
    "LossReason",
    "MultiLease",
    "MultiLock",
    "NoQuorum",
    "NodeUnavailable",
    "NotHeld",
    "Once",
    "Outcome",
    "OutcomeUnknown",
    "Periodic",
    "PeriodicRun",
    "RWLock",
    "Rate",
    "RateLimited",
    "ReadLock",
    "RedisLock",
    "ScriptFailed",
    "Semaphore",
    "SingleTarget",
    "Skipped",
    "StaleFence",
    "Target",
    "Term",
    "Unset",
    "Verdict",
    "WouldDeadlock",
    "WriteLease",
    "WriteLock",
    "WrongValue",
    "guards",
]

_MODULES = {
    "AsyncCached": "holdfast.api.async_cached",
    "AsyncAtomic": "holdfast.api.async_atomic",
    "AsyncAtomicScript": "holdfast.api.async_atomic",
    "AsyncClient": "holdfast.api.async_client",
    "AsyncLease": "holdfast.api.async_client",
    "AsyncLock": "holdfast.api.async_client",
    "AsyncRate": "holdfast.api.async_rate",
    "AsyncMultiLease": "holdfast.api.async_multi_lock",
    "AsyncMultiLock": "holdfast.api.async_multi_lock",
    "AsyncOnce": "holdfast.api.async_once",
    "AsyncRedisLock": "holdfast.api.redis_lock",
    "AsyncBarrier": "holdfast.api.async_barrier",
    "AsyncLatch": "holdfast.api.async_latch",
    "Barrier": "holdfast.api.barrier",
    "BreakReason": "holdfast.core.barrier",
    "BrokenBarrier": "holdfast.api.broken_barrier",
    "Cached": "holdfast.api.cached",
    "Atomic": "holdfast.api.atomic",
    "AtomicScript": "holdfast.api.atomic",
    "Client": "holdfast.api.client",
    "Codec": "holdfast.api.codecs",
    "Duration": "holdfast.core.duration",
    "Event": "holdfast.core.events",
    "EventKind": "holdfast.core.events",
    "HasConnectionClass": "holdfast.api.targets",
    "HasConnectionPool": "holdfast.api.targets",
    "HasNodesManager": "holdfast.api.targets",
    "Holder": "holdfast.holder",
    "JSON": "holdfast.api.codecs",
    "LastRun": "holdfast.core.periodic",
    "Latch": "holdfast.api.latch",
    "Lease": "holdfast.api.client",
    "Lock": "holdfast.api.client",
    "MultiLease": "holdfast.api.multi_lock",
    "MultiLock": "holdfast.api.multi_lock",
    "Once": "holdfast.api.once",
    "Outcome": "holdfast.core.atomic",
    "PICKLE": "holdfast.api.codecs",
    "AsyncPeriodic": "holdfast.api.async_periodic",
    "Periodic": "holdfast.api.periodic",
    "PeriodicRun": "holdfast.api.periodic_run",
    "RAW": "holdfast.api.codecs",
    "Rate": "holdfast.api.rate",
    "RedisLock": "holdfast.api.redis_lock",
    "SingleTarget": "holdfast.api.targets",
    "Skipped": "holdfast.core.periodic",
    "Target": "holdfast.api.targets",
    "RWLock": "holdfast.api.shared",
    "ReadLock": "holdfast.api.shared",
    "Semaphore": "holdfast.api.shared",
    "WriteLease": "holdfast.api.shared",
    "WriteLock": "holdfast.api.shared",
    "AsyncRWLock": "holdfast.api.async_shared",
    "AsyncReadLock": "holdfast.api.async_shared",
    "AsyncSemaphore": "holdfast.api.async_shared",
    "AsyncWriteLease": "holdfast.api.async_shared",
    "AsyncWriteLock": "holdfast.api.async_shared",
    "Campaign": "holdfast.api.election",
    "Election": "holdfast.api.election",
    "Term": "holdfast.api.election",
    "AsyncCampaign": "holdfast.api.async_election",
    "AsyncElection": "holdfast.api.async_election",
    "AsyncTerm": "holdfast.api.async_election",
    "UNSET": "holdfast.api.lease_view",
    "Unset": "holdfast.api.lease_view",
    "Verdict": "holdfast.core.rate",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - imported on first use

    if name == "guards":
        return import_module("holdfast.guards")
    value = getattr(import_module(_MODULES.get(name, "holdfast.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
