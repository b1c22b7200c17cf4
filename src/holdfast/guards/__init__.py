"""Guards check the fence at the resource, in one step with the write: a late write is refused.

`SQL` is for databases, `Redis` and `AsyncRedis` are for keys of Redis and Valkey. A guard uses the
connection of the caller, and needs no client of holdfast. Rules that all guards keep:

- A guard stores the newest fence for each resource beside the data that it protects.
- A lease with an older fence is refused with `StaleFence`. The newest lease may write many times.
- The fence and the write are stored together or not at all.
"""

from __future__ import annotations

from holdfast.guards.connections import Connection
from holdfast.guards.fence import HasFence
from holdfast.guards.redis import AsyncRedis, Fields, HasEval, Key, Redis, Value
from holdfast.guards.sql import SQL

__all__ = [
    "SQL",
    "AsyncRedis",
    "Connection",
    "Fields",
    "HasEval",
    "HasFence",
    "Key",
    "Redis",
    "Value",
]
