"""Calls in the style of other lock clients raise errors that show what to write instead.

The `type: ignore` comments are part of the tests: mypy must flag these lines too.
"""

from __future__ import annotations

import asyncio
import contextlib
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
CHECK = {
    "threads": "write lease = lock.acquire() and lease.check()",
    "asyncio": "write lease = await lock.acquire() and lease.check()",
}
REMAINING = {by: advice.replace("check()", "remaining()") for by, advice in CHECK.items()}
HELD = {by: advice.replace("check()", "held") for by, advice in CHECK.items()}
FENCE = {by: advice.replace("check()", "fence") for by, advice in CHECK.items()}
OF_THE_LEASE = {
    "release": RELEASE,
    "extend": EXTEND,
    "reacquire": REACQUIRE,
    "owned": OWNED,
    "check": CHECK,
    "remaining": REMAINING,
    "held": HELD,
    "fence": FENCE,
}


@pytest.mark.parametrize("by", CLIENTS)
@pytest.mark.parametrize("name", OF_THE_LEASE)
def test_methods_of_a_lease_on_a_lock_raise_an_error_that_shows_what_to_write(
    by: str, name: str
) -> None:
    lock = CLIENTS[by](NOWHERE).lock("a")
    with pytest.raises(AttributeError) as caught:
        getattr(lock, name)
    missing = f"{type(lock).__name__!r} object has no attribute {name!r}"
    assert str(caught.value) == f"{missing}: {OF_THE_LEASE[name][by]}"
    assert not hasattr(lock, name)


def test_type_checkers_reject_release_on_a_lock() -> None:
    with pytest.raises(AttributeError):
        holdfast.Client(NOWHERE).lock("a").release()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        holdfast.AsyncClient(NOWHERE).lock("a").release()  # type: ignore[attr-defined]


WAITING = (
    "write timeout={}, the seconds to wait for the lock; ttl= is how long the server keeps the "
    "lock without a renewal"
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
        assert error_message(client.lock, "a", **given) == f"lock() {unexpected}: {of_lock}"
        assert error_message(lock.acquire, **given) == f"acquire() {unexpected}: {of_acquire}"
    unexpected = "got an unexpected keyword argument 'nonsense'"
    assert error_message(client.lock, "a", nonsense=1) == f"lock() {unexpected}"


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
        assert error_message(lock.acquire, *given) == f"{refused}: {advice}"


@pytest.mark.parametrize("by", CLIENTS)
def test_an_argument_of_try_acquire_is_refused_with_what_to_write(by: str) -> None:
    lock = CLIENTS[by](NOWHERE).lock("a")
    wait = "await " if by == "asyncio" else ""
    advice = f"it does not wait: write {wait}lock.acquire(timeout=3)"
    unexpected = "try_acquire() got an unexpected keyword argument"
    assert error_message(lock.try_acquire, timeout=3) == f"{unexpected} 'timeout': {advice}"
    assert error_message(lock.try_acquire, nonsense=3) == f"{unexpected} 'nonsense'"
    refused = "try_acquire() takes no positional arguments"
    assert error_message(lock.try_acquire, 3) == f"{refused}: {advice}"


@pytest.mark.parametrize("by", CLIENTS)
def test_a_second_positional_argument_of_lock_is_refused_with_what_to_write(by: str) -> None:
    assert error_message(CLIENTS[by](NOWHERE).lock, "a", 30) == (
        "lock() takes one positional argument, the name: write ttl=30 or timeout=30; ttl= is how "
        "long the server keeps the lock without a renewal, timeout= the seconds to wait for the "
        "lock"
    )


@pytest.mark.parametrize("kind", CLIENTS.values())
def test_arguments_of_a_redis_py_client_are_refused_with_the_url_to_write(kind: Any) -> None:
    name = kind.__name__
    url = f'write {name}("redis://host:port/db")'
    assert error_message(kind, "localhost", 6379) == (
        f"{name}() takes one positional argument, the servers: {url}; several servers are a list"
    )
    unexpected = f"{name}() got an unexpected keyword argument"
    assert error_message(kind, host="localhost") == f"{unexpected} 'host': {url}"
    assert error_message(kind, nonsense=1) == f"{unexpected} 'nonsense'"
    message = error_message(kind, password="a-secret")  # noqa: S106 - not of any server
    assert "a-secret" not in message


def test_with_and_async_with_of_the_other_client_raise_with_what_to_write() -> None:
    sync: Any = holdfast.Client(NOWHERE)
    aio: Any = holdfast.AsyncClient(NOWHERE)

    async def enter_in_a_coroutine(thing: Any) -> None:
        async with thing:
            pass

    for thing, advice in (
        (aio, "write 'async with', or use holdfast.Client"),
        (aio.lock("a"), "write 'async with lock:', or use a lock of holdfast.Client"),
    ):
        with pytest.raises(AttributeError) as caught, thing:
            pass
        assert str(caught.value).endswith(f": {advice}")
        assert not hasattr(thing, "__enter__")
        assert not isinstance(thing, contextlib.AbstractContextManager)
    for thing, advice in (
        (sync, "write 'with', or use holdfast.AsyncClient in coroutines"),
        (sync.lock("a"), "write 'with lock:', or use a lock of holdfast.AsyncClient in coroutines"),
    ):
        with pytest.raises(AttributeError) as caught:
            asyncio.run(enter_in_a_coroutine(thing))
        assert str(caught.value).endswith(f": {advice}")
        assert not hasattr(thing, "__aenter__")
        assert not isinstance(thing, contextlib.AbstractAsyncContextManager)


async def order(order_id: int) -> int:
    return order_id


DECORATED: dict[str, Any] = {"threads": lambda order_id: order_id, "asyncio": order}


@pytest.mark.parametrize("by", CLIENTS)
@pytest.mark.parametrize("name", ["order:{order_id}", "{order_id.year}", "{tag}{order_id[0]!r}"])
def test_a_decorators_lock_that_is_named_after_an_argument_is_refused(by: str, name: str) -> None:
    lock = CLIENTS[by](NOWHERE).lock(name)
    write = "async with" if by == "asyncio" else "with"
    with pytest.raises(holdfast.ConfigurationError) as caught:
        lock(DECORATED[by])
    assert f"write '{write} client.lock(f\"{name}\"):' inside" in str(caught.value)
    assert caught.value.lock == name


@pytest.mark.parametrize("by", CLIENTS)
@pytest.mark.parametrize("name", ["order_id", "{tag}:order_id", "{", "{}", "{order_id_2}", "{0}"])
def test_a_decorators_lock_may_have_braces_in_its_name(by: str, name: str) -> None:
    assert callable(CLIENTS[by](NOWHERE).lock(name)(DECORATED[by]))


def test_a_decorator_accepts_a_function_without_a_signature() -> None:
    lock = holdfast.Client(NOWHERE).lock("{key}")
    assert callable(lock(dict.pop))
    assert callable(lock(type))


@pytest.mark.parametrize("by", CLIENTS)
def test_cached_without_parentheses_is_refused_with_what_to_write(by: str) -> None:
    with pytest.raises(holdfast.ConfigurationError, match=r"write @client\.cached\(60\)$"):
        CLIENTS[by](NOWHERE).cached(DECORATED[by])


def error_message(method: Callable[..., object], *args: object, **given: object) -> str:
    with pytest.raises(TypeError) as caught:
        made = method(*args, **given)
        if inspect.iscoroutine(made):
            asyncio.run(made)
    return str(caught.value)


def test_type_checkers_reject_arguments_of_other_clients() -> None:
    with pytest.raises(TypeError):
        holdfast.Client(NOWHERE).lock("a", blocking_timeout=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        holdfast.AsyncClient(NOWHERE).lock("a", blocking_timeout=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        holdfast.Client(NOWHERE).lock("a").acquire(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        asyncio.run(holdfast.AsyncClient(NOWHERE).lock("a").acquire(blocking=False))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        holdfast.Client(NOWHERE).lock("a").try_acquire(timeout=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        holdfast.Client("localhost", 6379)  # type: ignore[arg-type]
    with pytest.raises(AttributeError), holdfast.AsyncClient(NOWHERE).lock("a"):  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize("kind", CLIENTS.values())
def test_pickling_a_client_or_a_lock_raises_with_what_to_pass_instead(kind: Any) -> None:
    client = kind(NOWHERE)
    for wanted, thing in (("Pass the URL", client), (r"client\.lock\(name\)", client.lock("a"))):
        with pytest.raises(TypeError, match=wanted):
            pickle.dumps(thing)
        with pytest.raises(TypeError, match=wanted):
            copy.deepcopy(thing)


ENTERED: dict[str, tuple[str, str]] = {
    "threads": (
        "__aenter__",
        "write 'with client.once(...) as run:', or use holdfast.AsyncClient in coroutines",
    ),
    "asyncio": (
        "__enter__",
        "write 'async with client.once(...) as run:', or use holdfast.Client",
    ),
}


@pytest.mark.parametrize("by", CLIENTS)
def test_work_that_is_entered_as_with_the_other_client_raises_with_what_to_write(by: str) -> None:
    name, advice = ENTERED[by]
    with pytest.raises(AttributeError) as caught:
        getattr(CLIENTS[by](NOWHERE).once("a"), name)
    assert str(caught.value).endswith(f": {advice}")


@pytest.mark.parametrize("by", CLIENTS)
def test_once_as_a_decorator_raises_with_what_to_write(by: str) -> None:
    with pytest.raises(AttributeError) as caught:
        CLIENTS[by](NOWHERE).once("a")(DECORATED[by])
    write = "async with" if by == "asyncio" else "with"
    assert str(caught.value).endswith(
        f"write '{write} client.once(id) as run:' inside the function"
    )


@pytest.mark.parametrize("by", CLIENTS)
@pytest.mark.parametrize("name", ["__enter__", "__aenter__"])
def test_a_rate_as_a_context_manager_raises_with_what_to_write(by: str, name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(CLIENTS[by](NOWHERE).rate("a", limit=1), name)
    wait = "await " if by == "asyncio" else ""
    assert f"nothing to release: write {wait}rate.acquire() before" in str(caught.value)


@pytest.mark.parametrize("by", CLIENTS)
def test_positional_settings_are_refused_with_what_to_write(by: str) -> None:
    client = CLIENTS[by](NOWHERE)
    for method, given, advice in (
        (client.once, {}, "write keep=5, the seconds for which the result is kept, or timeout=5"),
        (client.rate, {"limit": 5}, "write limit=5, and the seconds as per="),
        (client.periodic, {"every": 5}, "write every=5, the seconds of a period"),
        (client.barrier, {"parties": 5}, "write parties=5, the number of parties"),
        (client.latch, {"count": 5}, "write count=5, the number of ids that open it"),
    ):
        assert error_message(method, "a", 5, **given).endswith(f": {advice}")
    assert "write ttl=5, the seconds that a term lasts" in error_message(client.election, "a", 5)
    for method, needed in ((client.rate, "limit"), (client.barrier, "parties")):
        assert error_message(method, "a", 5).endswith(f"keyword-only argument: '{needed}'")


@pytest.mark.parametrize("kind", CLIENTS.values())
def test_upgrade_of_a_reader_raises_with_what_to_do(kind: Any) -> None:
    reader = kind(NOWHERE).rwlock("a").read()
    with pytest.raises(AttributeError, match=r"release the lease, then acquire rwlock\.write\(\)"):
        reader._new_lease().upgrade()


def test_pickling_a_lease_raises_with_advice_to_export_it(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lease = client.lock("a").acquire()
        with pytest.raises(TypeError, match=r"lease\.export\(\).*client\.adopt"):
            pickle.dumps(lease)
        lease.release()


def test_an_async_client_without_an_asyncio_loop_raises_a_clear_error() -> None:
    """Run a coroutine without an asyncio event loop, as trio does."""
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
