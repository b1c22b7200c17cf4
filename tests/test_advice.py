"""What people who come from other lock clients write, and the error that says what to write here.

The `type: ignore` comments are part of the tests: mypy has to flag these lines too.
"""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import holdfast

if TYPE_CHECKING:
    from kit.servers import Server

NOWHERE = "redis://127.0.0.1:1"
CLIENTS = [holdfast.Client, holdfast.AsyncClient]


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("release", r"lease\.release\(\)"),
        ("extend", r"lease\.extend\("),
        ("reacquire", r"lease\.extend\("),
        ("owned", r"lease\.held"),
    ],
)
def test_methods_of_the_lease_are_not_found_on_the_lock(kind: Any, name: str, advice: str) -> None:
    lock = kind(NOWHERE).lock("a")
    with pytest.raises(AttributeError, match=advice) as caught:
        getattr(lock, name)
    assert f"{type(lock).__name__!r} object has no attribute {name!r}" in str(caught.value)
    assert not hasattr(lock, name)


def test_type_checkers_know_no_release_of_a_lock() -> None:
    with pytest.raises(AttributeError):
        holdfast.Client(NOWHERE).lock("a").release()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        holdfast.AsyncClient(NOWHERE).lock("a").release()  # type: ignore[attr-defined]


def test_arguments_of_other_clients_are_refused_with_what_to_write() -> None:
    client, aio = holdfast.Client(NOWHERE), holdfast.AsyncClient(NOWHERE)
    with pytest.raises(TypeError, match=r"lock\(\) .*'blocking_timeout': write timeout=5"):
        client.lock("a", blocking_timeout=5)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"lock\(\) .*'blocking': write timeout=0, or lock\.try_acq"
    ):
        client.lock("a", blocking=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"acquire\(\) .*'blocking': write timeout=0"):
        client.lock("a").acquire(blocking=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"acquire\(\) .*'blocking_timeout': write timeout=2"):
        client.lock("a").acquire(blocking_timeout=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lock\(\) .*'blocking_timeout': write timeout=5"):
        aio.lock("a", blocking_timeout=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"acquire\(\) .*'blocking': write timeout=0"):
        _ = aio.lock("a").acquire(blocking=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nonsense'$"):
        client.lock("a", nonsense=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CLIENTS)
def test_pickling_a_client_or_a_lock_says_what_to_pass_on_instead(kind: Any) -> None:
    client = kind(NOWHERE)
    for wanted, thing in (("Pass on the URL", client), (r"client\.lock\(name\)", client.lock("a"))):
        with pytest.raises(TypeError, match=wanted):
            pickle.dumps(thing)
        with pytest.raises(TypeError, match=wanted):
            copy.deepcopy(thing)


def test_pickling_a_lease_says_to_export_it(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lease = client.lock("a").acquire()
        with pytest.raises(TypeError, match=r"lease\.export\(\).*client\.adopt"):
            pickle.dumps(lease)
        lease.release()


def test_a_client_for_asyncio_says_that_it_is_for_asyncio() -> None:
    """As trio does it: a coroutine is run, and there is no event loop of asyncio."""
    client = holdfast.AsyncClient(NOWHERE)

    @client.cached(60)
    async def value() -> int:
        return 1

    async def enter() -> None:
        async with client.lock("a"):
            pass

    for operation in (
        enter(),
        client.lock("a").acquire(),
        client.lock("a").try_acquire(),
        client.lock("a").holder(),
        client.atomic.incr("n"),
        value(),
    ):
        with pytest.raises(holdfast.ConfigurationError, match=r"trio.*holdfast\.Client"):
            operation.send(None)
