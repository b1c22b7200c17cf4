"""The public API: its names, sync and async variants, types, and the cost of importing it."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.api import targets

ROOT = Path(__file__).parents[1]
PAIRS = [
    (holdfast.Client, holdfast.AsyncClient),
    (holdfast.Lock, holdfast.AsyncLock),
    (holdfast.Lease, holdfast.AsyncLease),
    (holdfast.MultiLock, holdfast.AsyncMultiLock),
    (holdfast.MultiLease, holdfast.AsyncMultiLease),
    (holdfast.Semaphore, holdfast.AsyncSemaphore),
    (holdfast.RWLock, holdfast.AsyncRWLock),
    (holdfast.ReadLock, holdfast.AsyncReadLock),
    (holdfast.WriteLock, holdfast.AsyncWriteLock),
    (holdfast.WriteLease, holdfast.AsyncWriteLease),
    (holdfast.Cached, holdfast.AsyncCached),
    (holdfast.Once, holdfast.AsyncOnce),
    (holdfast.Election, holdfast.AsyncElection),
    (holdfast.Campaign, holdfast.AsyncCampaign),
    (holdfast.Term, holdfast.AsyncTerm),
    (holdfast.Barrier, holdfast.AsyncBarrier),
    (holdfast.Latch, holdfast.AsyncLatch),
    (holdfast.Periodic, holdfast.AsyncPeriodic),
    (holdfast.Atomic, holdfast.AsyncAtomic),
    (holdfast.AtomicScript, holdfast.AsyncAtomicScript),
    (holdfast.Rate, holdfast.AsyncRate),
    (holdfast.guards.Redis, holdfast.guards.AsyncRedis),
]
# Their docstrings differ: callbacks run in different places, and different functions are decorated
# or called.
DIFFERENT_DOCS = {"on_lost", "__call__", "run"}


def names(kind: type) -> set[str]:
    found = {name for name in dir(kind) if not name.startswith("_") or name == "__call__"}
    own = set() if is_protocol(kind) else {"__init__"}
    return found | {name for name in own if name in vars(kind)}


def is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))  # its __init__ comes from typing


def test_the_exported_names_do_not_change() -> None:
    assert set(holdfast.__all__) == {
        "AcquireTimeout",
        "WriteLock",
        "WriteLease",
        "AsyncCampaign",
        "AsyncElection",
        "AsyncTerm",
        "Campaign",
        "Election",
        "Term",
        "Semaphore",
        "ReadLock",
        "RWLock",
        "AsyncWriteLock",
        "AsyncWriteLease",
        "AsyncSemaphore",
        "AsyncReadLock",
        "AsyncRWLock",
        "AsyncBarrier",
        "AsyncCached",
        "AsyncLatch",
        "Barrier",
        "BreakReason",
        "BrokenBarrier",
        "Latch",
        "AsyncAtomic",
        "AsyncAtomicScript",
        "AsyncClient",
        "AsyncLease",
        "AsyncLock",
        "AsyncRate",
        "AsyncMultiLease",
        "AsyncMultiLock",
        "AsyncOnce",
        "AsyncRedisLock",
        "Cached",
        "Atomic",
        "AtomicScript",
        "Client",
        "Codec",
        "ConfigurationError",
        "Contended",
        "Duration",
        "Event",
        "EventKind",
        "HasConnectionClass",
        "HasConnectionPool",
        "HasNodesManager",
        "Holder",
        "HoldfastError",
        "JSON",
        "LastRun",
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
        "PICKLE",
        "AsyncPeriodic",
        "Periodic",
        "PeriodicRun",
        "RAW",
        "Rate",
        "RateLimited",
        "RedisLock",
        "ScriptFailed",
        "SingleTarget",
        "Skipped",
        "StaleFence",
        "Target",
        "UNSET",
        "Unset",
        "Verdict",
        "WouldDeadlock",
        "WrongValue",
        "guards",
    }
    aliases = {"Duration", "EventKind", "LossReason", "SingleTarget", "Target", "UNSET", "guards"}
    aliases.add("BreakReason")
    for name in set(holdfast.__all__) - aliases:
        assert getattr(holdfast, name).__name__ == name
    assert set(holdfast.__all__) <= set(dir(holdfast))
    with pytest.raises(AttributeError, match="nonsense"):
        holdfast.nonsense  # noqa: B018 - the access is the test


def test_the_names_of_the_guards_do_not_change() -> None:
    assert set(holdfast.guards.__all__) == {
        "SQL",
        "AsyncRedis",
        "Connection",
        "Fields",
        "HasEval",
        "HasFence",
        "Key",
        "Redis",
        "Value",
    }
    assert names(holdfast.guards.SQL) == {"__init__", "check", "create_table"}
    assert names(holdfast.guards.Redis) == {"__init__", "check", "eval", "hset", "set"}


def test_the_types_in_public_signatures_are_exported_and_documented() -> None:
    not_ours = {"Any", "Callable", "Coroutine", "Literal", "Mapping", "Never", "None", "P", "R"}
    not_ours |= {
        "AsyncIterator",
        "Concatenate",
        "Iterable",
        "Iterator",
        "L",
        "M",
        "R_co",
        "Self",
        "Sequence",
        "True",
    }
    exported = {*holdfast.__all__, *holdfast.guards.__all__}
    public = [getattr(holdfast, name) for name in holdfast.__all__ if name != "guards"]
    public += [getattr(holdfast.guards, name) for name in holdfast.guards.__all__]
    not_made_by_users = {kind.__name__ for pair in PAIRS[1:-1] for kind in pair}
    not_made_by_users |= {"PeriodicRun", "Skipped"}
    as_in_redis_py = {"Number"}
    shown = set[str]()
    for kind in filter(inspect.isclass, public):
        for name in names(kind) if kind.__module__.startswith("holdfast") else ():
            found = inspect.getattr_static(kind, name)
            function = found.fget if isinstance(found, property) else found
            if inspect.isfunction(function) and function.__module__.startswith("holdfast"):
                if name == "__init__" and kind.__name__ in not_made_by_users:
                    continue
                for annotation in function.__annotations__.values():
                    shown.update(re.findall(r"\b[A-Z]\w*", re.sub("'.*?'", "", str(annotation))))
    assert shown - not_ours - as_in_redis_py <= exported
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    types = {"UNSET", "Unset", "EventKind", "LossReason", "BreakReason", *vars(targets)} & exported
    assert not [name for name in types if f"`holdfast.{name}`" not in pages]


@pytest.mark.parametrize(("sync", "aio"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_apis_have_the_same_names(sync: type, aio: type) -> None:
    assert names(sync) == names(aio) - {"aclose"}


@pytest.mark.parametrize(("sync", "aio"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_apis_take_the_same_arguments(sync: type, aio: type) -> None:
    for name in names(sync) - {"__call__", "__init__", "run"}:
        ours, theirs = inspect.getattr_static(sync, name), inspect.getattr_static(aio, name)
        if not inspect.isfunction(ours):
            continue
        a, b = inspect.signature(ours), inspect.signature(theirs)
        assert list(a.parameters) == list(b.parameters), name
        for one, other in zip(a.parameters.values(), b.parameters.values(), strict=True):
            assert (one.kind, one.default, str(one.annotation)) == (
                other.kind,
                other.default,
                str(other.annotation).replace("AsyncLock", "Lock"),
            ), name


@pytest.mark.parametrize(("sync", "aio"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_apis_have_the_same_docstrings(sync: type, aio: type) -> None:
    for name in names(sync) - DIFFERENT_DOCS:
        ours = inspect.getdoc(inspect.getattr_static(sync, name)) or ""
        theirs = inspect.getdoc(inspect.getattr_static(aio, name)) or ""
        assert ours or name == "__init__", f"{sync.__name__}.{name} has no docstring"
        assert translated(ours) == translated(theirs), name
    assert translated(inspect.getdoc(sync) or "") == translated(inspect.getdoc(aio) or "")


def translated(text: str) -> str:
    text = " ".join(text.split())
    for ours, theirs in (
        ("await ", ""),
        ("async with", "with"),
        ("__a", "__"),
        ("async def", "def"),
        ("async for", "for"),
        ("AsyncClient", "Client"),
        ("interrupted by a signal handler", "cancelled"),
        ("the interruption", "the cancellation"),
        ("client for threads", "client for asyncio"),
        ("AsyncRedis", "Redis"),
        ("AsyncRate", "Rate"),
        ("redis.asyncio.Redis", "redis.Redis"),
        ("It is for one thread.", "It is for one task."),
        ("All threads may share", "All tasks may share"),
        ("threads may share it", "tasks may share it"),
        ("the thread that holds the lock", "the task that holds the lock"),
        (" (in an event loop, the task)", ""),
        (" RuntimeError: no event loop is running.", ""),
        ("in a separate thread, with", "in a separate task, with"),
        ("get one command timeout to finish", "are cancelled"),
        ("A `threading.Event`", "An `asyncio.Event`"),
        ("A loss does not interrupt a `with` block: use `check`, `lost` or `on_lost`.", ""),
        ("A loss cancels the `with` block, which then raises `LeaseLost`.", ""),
    ):
        text = text.replace(ours, theirs)
    return text


@pytest.mark.parametrize("kind", [kind for pair in PAIRS for kind in pair])
def test_every_optional_argument_is_keyword_only_and_typed(kind: type) -> None:
    for name in names(kind):
        method = inspect.getattr_static(kind, name)
        if not inspect.isfunction(method):
            continue
        for parameter in inspect.signature(method).parameters.values():
            if parameter.name in ("self", "target", "by", "n", "cost"):
                continue
            assert parameter.annotation is not parameter.empty, f"{name}({parameter.name})"
            if parameter.default is not parameter.empty:
                assert parameter.kind is parameter.KEYWORD_ONLY, f"{name}({parameter.name})"


def imported_by(code: str) -> set[str]:
    report = f"import sys, json; before = set(sys.modules); {code}; "
    report += "print(json.dumps(sorted(set(sys.modules) - before)))"
    output = subprocess.run(
        [sys.executable, "-c", report], check=True, capture_output=True, text=True
    ).stdout
    return set(json.loads(output))


def test_importing_holdfast_imports_no_other_module_of_it() -> None:
    modules = imported_by("import holdfast")
    assert not {"asyncio", "redis", "hiredis", "threading", "logging", "typer", "rich"} & modules
    ours = {module for module in modules if module.startswith("holdfast")}
    assert ours == {"holdfast"}


def test_importing_the_guards_imports_no_driver_and_no_lock() -> None:
    modules = imported_by("import holdfast; holdfast.guards.SQL('fences'); holdfast.StaleFence")
    assert not {"asyncio", "redis", "valkey", "sqlite3", "sqlalchemy", "django"} & modules
    ours = {module for module in modules if module.startswith("holdfast")}
    assert ours == {"holdfast", "holdfast.errors", "holdfast.keys"} | {
        module for module in ours if module.startswith("holdfast.guards")
    }


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(holdfast.__file__).parent / "py.typed").exists()


def test_the_error_for_decorating_the_wrong_kind_of_function_names_the_remedy() -> None:
    sync = holdfast.Client("redis://127.0.0.1:1").lock("a")
    aio: Any = holdfast.AsyncClient("redis://127.0.0.1:1").lock("a")

    async def coroutine() -> None: ...

    def generator() -> Any:
        yield

    async def async_generator() -> Any:
        yield

    def plain() -> None: ...

    with pytest.raises(holdfast.ConfigurationError, match="AsyncClient"):
        sync(coroutine)
    for lock in (sync, aio):
        with pytest.raises(holdfast.ConfigurationError, match=r" 'with lock:'.*holdfast\.Client$"):
            lock(generator)
        with pytest.raises(holdfast.ConfigurationError, match=r"'async with lock:'.*AsyncClient$"):
            lock(async_generator)
    with pytest.raises(holdfast.ConfigurationError, match=r"holdfast\.Client"):
        aio(plain)


def test_the_error_for_leaving_a_lock_that_was_not_entered_names_the_remedy() -> None:
    lock = holdfast.Client("redis://127.0.0.1:1").lock("a")
    with pytest.raises(holdfast.NotHeld, match=r"write 'with lock\.acquire\(\) as lease'"):
        lock.__exit__(None, None, None)


def test_the_repr_of_clients_and_locks_shows_their_settings() -> None:
    client = holdfast.Client("redis://:secret@127.0.0.1:1")
    assert repr(client) == "<Client of redis://127.0.0.1:1/0>"
    lock = client.lock("a", ttl=5)
    assert repr(lock) == "<Lock 'a', ttl=5.0>"
    lock = client.lock("a", timeout=timedelta(seconds=9), max_hold=60, replicas=2, label="x")
    assert repr(lock) == ("<Lock 'a', ttl=30.0, timeout=9.0, max_hold=60.0, replicas=2, label='x'>")
    assert repr(client.lock("a", key="b")) == "<Lock 'a', ttl=30.0, key='b'>"
    nodes = [f"redis://127.0.0.1:{number}" for number in (1, 2, 3)]
    assert repr(holdfast.AsyncClient(nodes)) == (
        "<AsyncClient of redis://127.0.0.1:1/0, redis://127.0.0.1:2/0, redis://127.0.0.1:3/0>"
    )


def test_the_settings_of_a_lock_are_attributes() -> None:
    given = {
        "name": "a",
        "ttl": 5.0,
        "timeout": 9.0,
        "renew": False,
        "max_hold": None,
        "reentrant": False,
        "owner": "us",
        "fair": False,
        "lock_delay": 1.5,
        "replicas": 2,
        "key": "a key",
        "label": "nightly",
    }
    for client in (holdfast.Client, holdfast.AsyncClient):
        lock = client("redis://127.0.0.1:1").lock(**given)  # type: ignore[arg-type]  # any of them
        assert {name: getattr(lock, name) for name in given} == given
        assert client("redis://127.0.0.1:1").lock("b").key == "holdfast:{b}"


def test_coroutine_methods_are_coroutine_functions() -> None:
    kinds: tuple[type, ...] = (
        *(holdfast.AsyncClient, holdfast.AsyncLock, holdfast.AsyncLease),
        *(holdfast.AsyncSemaphore, holdfast.AsyncRWLock, holdfast.AsyncWriteLease),
    )
    methods = [
        getattr(kind, name)
        for kind in kinds
        for name in names(kind) | ({"__aexit__"} & {*dir(kind)})
    ]
    io_methods = {
        "acquire",
        "release",
        "try_acquire",
        "locked",
        "holder",
        "evict",
        "adopt",
        "downgrade",
        "export",
        "holders",
    }
    io_methods |= {"extend", "aclose", "close", "__aexit__"}
    found = {each.__name__ for each in methods if inspect.iscoroutinefunction(each)}
    assert found == io_methods - {"close"}, "close is another name for aclose"


def test_every_method_of_an_async_class_that_waits_is_a_coroutine_function() -> None:
    kinds = [getattr(holdfast, name) for name in holdfast.__all__ if name.startswith("Async")]
    found = {
        f"{kind.__name__}.{name}"
        for kind in (*kinds, holdfast.guards.AsyncRedis)
        for name in names(kind) - {"__init__"}
        if inspect.isfunction(method := inspect.getattr_static(kind, name))
        and not inspect.iscoroutinefunction(method)
    }
    assert found == {
        "AsyncAtomic.script",
        "AsyncCampaign.__call__",
        "AsyncClient.cached",
        "AsyncClient.election",
        "AsyncClient.barrier",
        "AsyncClient.latch",
        "AsyncClient.lock",
        "AsyncClient.lock_all",
        "AsyncClient.once",
        "AsyncClient.periodic",
        "AsyncClient.rate",
        "AsyncClient.rwlock",
        "AsyncClient.semaphore",
        "AsyncElection.lead",
        "AsyncElection.watch",
        "AsyncLease.check",
        "AsyncLease.on_lost",
        "AsyncLease.remaining",
        "AsyncLock.__call__",
        "AsyncMultiLease.check",
        "AsyncMultiLease.on_lost",
        "AsyncMultiLease.remaining",
        "AsyncMultiLock.__call__",
        "AsyncRWLock.read",
        "AsyncRWLock.write",
        "AsyncReadLock.__call__",
        "AsyncRedisLock.register_scripts",
        "AsyncSemaphore.__call__",
        "AsyncTerm.check",
        "AsyncTerm.on_lost",
        "AsyncTerm.remaining",
        "AsyncWriteLease.check",
        "AsyncWriteLease.on_lost",
        "AsyncWriteLease.remaining",
        "AsyncWriteLock.__call__",
    }, "these send nothing"


def test_a_target_of_another_kind_fails_in_type_checkers() -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError):
            kind(42)  # type: ignore[arg-type]  # that it is flagged is the test


def test_an_event_that_is_about_no_lease_has_no_fence() -> None:
    event = holdfast.Event("node_back", detail="it answers again")
    assert (event.lock, event.fence) == ("", 0)
