"""The types of a client's `target` argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias


class HasConnectionPool(Protocol):
    """A redis-py or valkey-py client, for threads or for asyncio."""

    @property
    def connection_pool(self) -> Any:  # noqa: ANN401 - a class of redis-py
        """The connection pool, whose settings are copied."""


class HasNodesManager(Protocol):
    """A redis-py or valkey-py cluster client."""

    @property
    def nodes_manager(self) -> Any:  # noqa: ANN401 - a class of redis-py
        """The nodes of the cluster, whose settings are copied."""


class HasConnectionClass(Protocol):
    """A redis-py or valkey-py connection pool."""

    @property
    def connection_class(self) -> Any:  # noqa: ANN401 - a class of redis-py
        """The class of its connections."""


SingleTarget: TypeAlias = str | HasConnectionPool | HasConnectionClass
Target: TypeAlias = SingleTarget | HasNodesManager | Sequence[SingleTarget]
"""A URL, a redis-py or valkey-py client, or a list of independent servers (a quorum)."""
