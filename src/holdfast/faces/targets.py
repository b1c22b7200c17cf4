"""What a client can be made from, for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias


class HasConnectionPool(Protocol):
    """A client of redis-py or valkey-py, for threads or for asyncio."""

    @property
    def connection_pool(self) -> Any: ...  # noqa: ANN401, D102 - a class of theirs


class HasNodesManager(Protocol):
    """A cluster client of redis-py or valkey-py."""

    @property
    def nodes_manager(self) -> Any: ...  # noqa: ANN401, D102 - a class of theirs


class HasConnectionClass(Protocol):
    """A connection pool of redis-py or valkey-py."""

    @property
    def connection_class(self) -> Any: ...  # noqa: ANN401, D102 - a class of theirs


SingleTarget: TypeAlias = str | HasConnectionPool | HasConnectionClass
Target: TypeAlias = SingleTarget | HasNodesManager | Sequence[SingleTarget]
"""A URL, a client of redis-py or valkey-py, or a list of servers that vote."""
