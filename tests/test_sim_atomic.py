"""The simulator's model of atomic operations behaves as real servers do."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast.adapters.thread_port import run
from holdfast.errors import HoldfastError
from holdfast.sim.atomic_model import (
    LEAST,
    MOST,
    CompareAndDelete,
    CompareAndSet,
    Incr,
    Operation,
    Put,
    Script,
    Take,
)
from holdfast.sim.atomic_turns import NUMBERS
from holdfast.sim.keyspace import Entry

if TYPE_CHECKING:
    from kit.servers import Server

KEY = "it"
AMOUNTS = (1, 2**53, MOST)
OPERATIONS: list[Operation] = [
    *(Incr(KEY, None, by, None) for by in (*AMOUNTS, -7, LEAST)),
    Incr(KEY, None, 1, 100.0),
    *(Take(KEY, None, n, floor) for n, floor in product(AMOUNTS, (0, 10, LEAST, MOST))),
    *(Put(KEY, None, n, ceiling) for n, ceiling in product(AMOUNTS, (None, 11, LEAST, MOST))),
    *(CompareAndSet(KEY, None, b"10", b"new", ttl) for ttl in (None, math.inf, 100.0)),
    CompareAndSet(KEY, None, None, b"new", None),
    CompareAndDelete(KEY, None, b"10"),
    *(Script(KEY, None, 1, ending) for ending in Script.ENDINGS),
]


@pytest.mark.parametrize("once", [None, "order 7"])
def test_a_real_server_behaves_as_the_model(server: Server, once: str | None) -> None:
    numbers = NUMBERS if once is None else (None, 10, MOST - 4, "x")
    values = [None if number is None else str(number).encode() for number in numbers]
    with holdfast.Client(server.url) as client:
        for number, (operation, value) in enumerate(product(OPERATIONS, [*values, "member"])):
            if isinstance(operation, Script) and value not in {None, b"10", b"x", "member"}:
                continue  # Lua holds only 53 bits
            if isinstance(operation, Script) and operation.ending == "error({})" and not once:
                continue  # Redis 7.0 crashes when a script raises that
            key = f"{KEY}{number}"
            if value == "member":
                server.command("ZADD", key, 1, "member")
            elif value is not None:
                server.command("SET", key, value)
            entry = Entry(((1.0, b"member"),), None) if value == "member" else None
            before = Entry(value, None) if isinstance(value, bytes) else entry
            tried = type(operation)(**{**vars(operation), "key": key, "once": once})
            for _ in range(1 if once is None else 2):
                effect = tried.effect(before, 0)
                assert answer_of(client, tried) == effect.result, (tried, value)
                if isinstance(before, Entry) and not isinstance(before.value, bytes):
                    assert server.command("TYPE", key) == b"zset"
                    continue
                after = None if effect.entry is None else effect.entry.value
                assert server.command("GET", key) == after, (tried, value)
                lasting = effect.entry is None or effect.entry.expires is None
                assert (server.command("PTTL", key) < 0) == lasting, (tried, value)


def answer_of(client: holdfast.Client, operation: Operation) -> object:
    try:
        return run(operation.call(client.atomic._steps))
    except HoldfastError as error:
        return type(error)
