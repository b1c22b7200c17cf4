"""What people who come from other lock clients write, and the error that says what to write here.

The `type: ignore` comments are part of the tests: mypy has to flag these lines too.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import holdfast

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.servers import Server

NOWHERE = "redis://127.0.0.1:1"
CLIENTS: dict[str, Any] = {"threads": holdfast.Client, "asyncio": holdfast.AsyncClient}


RELEASE = {
    "threads": "release the lease: write 'with lock:', or lease = lock.acquire() and "
    "lease.release()",
    "asyncio": "release the lease: write 'async with lock:', or lease = await lock.acquire() and "
    "await lease.release()",
}
EXTEND = {
    "threads": "write lease = lock.acquire() and lease.extend(seconds)",
    "asyncio": "write lease = await lock.acquire() and await lease.extend(seconds)",
}
REACQUIRE = {
    "threads": "a lease is renewed automatically; lease.extend(seconds) sets its time",
    "asyncio": "a lease is renewed automatically; await lease.extend(seconds) sets its time",
}
OWNED = {
    "threads": "write lease = lock.acquire() and lease.held",
    "asyncio": "write lease = await lock.acquire() and lease.held",
}
OF_THE_LEASE = {"release": RELEASE, "extend": EXTEND, "reacquire": REACQUIRE, "owned": OWNED}


@pytest.mark.parametrize("by", CLIENTS)
@pytest.mark.parametrize("name", OF_THE_LEASE)
def test_methods_of_the_lease_are_not_found_on_the_lock(by: str, name: str) -> None:
    lock = CLIENTS[by](NOWHERE).lock("a")
    with pytest.raises(AttributeError) as caught:
        getattr(lock, name)
    missing = f"{type(lock).__name__!r} object has no attribute {name!r}"
    assert str(caught.value) == f"{missing}: {OF_THE_LEASE[name][by]}"
    assert not hasattr(lock, name)


def test_type_checkers_know_no_release_of_a_lock() -> None:
    with pytest.raises(AttributeError):
        holdfast.Client(NOWHERE).lock("a").release()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        holdfast.AsyncClient(NOWHERE).lock("a").release()  # type: ignore[attr-defined]


WAITING = (
    "write timeout={}, the seconds that acquiring waits; how long the server keeps the lock "
    "without news of its holder is ttl="
)
TRY = {
    "threads": "write timeout=0, or lock.try_acquire()",
    "asyncio": "write timeout=0, or await lock.try_acquire()",
}
BY_NAME: list[tuple[dict[str, Any], str, str]] = [
    ({"blocking": True}, "leave it out to wait", "leave it out to wait"),
    ({"blocking_timeout": 5}, WAITING.format(5), WAITING.format(5)),
    ({"expire": 4}, "write ttl=4", "give client.lock() ttl=4"),
    ({"auto_renewal": False}, "write renew=False", "give client.lock() renew=False"),
]


@pytest.mark.parametrize("by", CLIENTS)
def test_arguments_of_other_clients_are_refused_with_what_to_write(by: str) -> None:
    client = CLIENTS[by](NOWHERE)
    lock = client.lock("a")
    for given, of_lock, of_acquire in [*BY_NAME, ({"blocking": False}, TRY[by], TRY[by])]:
        unexpected = f"got an unexpected keyword argument {next(iter(given))!r}"
        assert said(client.lock, "a", **given) == f"lock() {unexpected}: {of_lock}"
        assert said(lock.acquire, **given) == f"acquire() {unexpected}: {of_acquire}"
    unexpected = "got an unexpected keyword argument 'nonsense'"
    assert said(client.lock, "a", nonsense=1) == f"lock() {unexpected}"


@pytest.mark.parametrize("by", CLIENTS)
def test_positional_arguments_of_acquire_are_refused_with_what_to_write(by: str) -> None:
    lock = CLIENTS[by](NOWHERE).lock("a")
    refused = "acquire() takes no positional arguments"
    for given, advice in (
        ((False,), TRY[by]),
        ((True,), "leave it out to wait"),
        ((True, 5), WAITING.format(5)),
        ((5,), WAITING.format(5)),
    ):
        assert said(lock.acquire, *given) == f"{refused}: {advice}"


def said(method: Callable[..., object], *args: object, **given: object) -> str:
    with pytest.raises(TypeError) as caught:
        made = method(*args, **given)
        if inspect.iscoroutine(made):
            asyncio.run(made)
    return str(caught.value)


def test_type_checkers_know_no_arguments_of_other_clients() -> None:
    with pytest.raises(TypeError):
        holdfast.Client(NOWHERE).lock("a", blocking_timeout=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        holdfast.AsyncClient(NOWHERE).lock("a", blocking_timeout=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        holdfast.Client(NOWHERE).lock("a").acquire(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        asyncio.run(holdfast.AsyncClient(NOWHERE).lock("a").acquire(blocking=False))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CLIENTS.values())
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
