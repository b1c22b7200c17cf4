"""Which tests `make test` runs with which client on which server; `make long` runs the others."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from kit.apis import AnotherThread, Tasks, Threads
from kit.servers import programs

if TYPE_CHECKING:
    from collections.abc import Iterable

PROGRAMS = programs()
CLIENTS: dict[Any, str] = {Threads: "threads", AnotherThread: "threads", Tasks: "asyncio"}
MATRIX = {"threads": "valkey", "asyncio": "redis", "": "valkey"}
"""The server on which `make test` runs the tests of each client; "" is for tests without a client.

`make long` runs the other pairs. Marks change this: `every_pair` runs a test in `make test` with
each client on each server; `only_client("asyncio")` runs it with that client only."""


def with_one_client_each(values: Iterable[Any]) -> list[Any]:
    """Parameters of which `make test` runs each with one client: threads, asyncio, threads…"""
    clients = itertools.cycle(("threads", "asyncio"))
    return [pytest.param(each, marks=pytest.mark.only_client(next(clients))) for each in values]


def is_in_matrix(item: pytest.Function) -> bool:
    """Whether `make test` runs a test with this client and this server."""
    if item.get_closest_marker("every_pair"):
        return True
    given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    client = CLIENTS.get(given.get("api"), "")
    only = item.get_closest_marker("only_client")
    if only and client and client not in only.args:
        return False
    servers = {each for each in given.values() if isinstance(each, str) and each in PROGRAMS}
    return len(PROGRAMS) == 1 or servers <= {MATRIX[client]}
