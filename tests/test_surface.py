"""The public surface: its names, its twins, its types, and what importing it costs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast

TWINS = [
    (holdfast.Client, holdfast.AsyncClient),
    (holdfast.Lock, holdfast.AsyncLock),
    (holdfast.Lease, holdfast.AsyncLease),
    (holdfast.Cached, holdfast.AsyncCached),
    (holdfast.Atomic, holdfast.AsyncAtomic),
    (holdfast.AtomicScript, holdfast.AsyncAtomicScript),
]
# Where callbacks run, and what can be decorated, differs in the world and so in words.
OWN_WORDS = {"on_lost", "__call__"}


def names(kind: type) -> set[str]:
    found = {name for name in dir(kind) if not name.startswith("_")}
    own = {"__call__"} if is_protocol(kind) else {"__call__", "__init__"}
    return found | {name for name in own if name in vars(kind)}


def is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))  # whose __init__ is not of our making


def test_the_exported_names_are_these() -> None:
    assert set(holdfast.__all__) == {
        "AcquireTimeout",
        "AsyncCached",
        "AsyncAtomic",
        "AsyncAtomicScript",
        "AsyncClient",
        "AsyncLease",
        "AsyncLock",
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
        "Holder",
        "HoldfastError",
        "JSON",
        "Lease",
        "LeaseLost",
        "Lock",
        "LossReason",
        "NoQuorum",
        "NodeUnavailable",
        "NotHeld",
        "Outcome",
        "OutcomeUnknown",
        "PICKLE",
        "RAW",
        "RedisLock",
        "ScriptFailed",
        "Target",
        "UNSET",
        "Unset",
        "WouldDeadlock",
        "WrongValue",
    }
    aliases = {"Duration", "EventKind", "LossReason", "Target", "UNSET"}
    for name in set(holdfast.__all__) - aliases:
        assert getattr(holdfast, name).__name__ == name
    assert set(holdfast.__all__) <= set(dir(holdfast))
    with pytest.raises(AttributeError, match="nonsense"):
        holdfast.nonsense  # noqa: B018 - asking for it is the test


@pytest.mark.parametrize(("sync", "aio"), TWINS, ids=lambda kind: kind.__name__)
def test_the_faces_have_the_same_names(sync: type, aio: type) -> None:
    assert names(sync) == names(aio) - {"aclose"}


@pytest.mark.parametrize(("sync", "aio"), TWINS, ids=lambda kind: kind.__name__)
def test_the_faces_take_the_same_arguments(sync: type, aio: type) -> None:
    for name in names(sync) - {"__call__", "__init__"}:
        ours, theirs = inspect.getattr_static(sync, name), inspect.getattr_static(aio, name)
        if not inspect.isfunction(ours):
            continue
        a, b = inspect.signature(ours), inspect.signature(theirs)
        assert list(a.parameters) == list(b.parameters), name
        for one, other in zip(a.parameters.values(), b.parameters.values(), strict=True):
            assert (one.kind, one.default, one.annotation) == (
                other.kind,
                other.default,
                other.annotation,
            ), name


@pytest.mark.parametrize(("sync", "aio"), TWINS, ids=lambda kind: kind.__name__)
def test_the_faces_make_the_same_promises(sync: type, aio: type) -> None:
    for name in names(sync) - OWN_WORDS:
        ours = inspect.getdoc(inspect.getattr_static(sync, name)) or ""
        theirs = inspect.getdoc(inspect.getattr_static(aio, name)) or ""
        assert ours or name == "__init__", f"{sync.__name__}.{name} promises nothing"
        assert translated(ours) == translated(theirs), name
    assert translated(inspect.getdoc(sync) or "") == translated(inspect.getdoc(aio) or "")


def translated(text: str) -> str:
    for ours, theirs in (
        ("Interrupted", "Cancelled"),
        ("interruption", "cancellation"),
        ("all threads", "all tasks"),
        ("shared by threads", "shared by tasks"),
        ("again; in an event loop, the task.", "again."),
        ("the thread that holds it", "the task that holds it"),
        ("in a thread of its own", "in a task of its own"),
        ("are waited for, but no longer than for a command", "are given up"),
    ):
        text = text.replace(ours, theirs)
    return text


@pytest.mark.parametrize("kind", [kind for twins in TWINS for kind in twins])
def test_every_optional_argument_is_by_keyword_and_typed(kind: type) -> None:
    for name in names(kind):
        method = inspect.getattr_static(kind, name)
        if not inspect.isfunction(method):
            continue
        for parameter in inspect.signature(method).parameters.values():
            if parameter.name in ("self", "target", "by", "n"):
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


def test_importing_holdfast_imports_next_to_nothing() -> None:
    modules = imported_by("import holdfast")
    assert not {"asyncio", "redis", "hiredis", "threading", "logging", "typer", "rich"} & modules
    ours = {module for module in modules if module.startswith("holdfast")}
    assert ours == {"holdfast"}


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(holdfast.__file__).parent / "py.typed").exists()


def test_decorating_the_wrong_kind_of_function_says_what_to_do() -> None:
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


def test_leaving_a_lock_that_was_not_entered_says_what_to_do() -> None:
    lock = holdfast.Client("redis://127.0.0.1:1").lock("a")
    with pytest.raises(holdfast.NotHeld, match=r"lease\.release"):
        lock.__exit__(None, None, None)


def test_things_show_what_they_are() -> None:
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


def test_a_lock_shows_its_settings() -> None:
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
    kinds = holdfast.AsyncClient, holdfast.AsyncLock, holdfast.AsyncLease
    methods = [getattr(kind, name) for kind in kinds for name in names(kind) | {"__aexit__"}]
    talking = {"acquire", "release", "try_acquire", "locked", "holder", "evict", "adopt", "export"}
    talking |= {"extend", "aclose", "close", "__aexit__"}
    found = {each.__name__ for each in methods if inspect.iscoroutinefunction(each)}
    assert found == talking - {"close"}, "close is another name for aclose"


def test_a_target_of_another_kind_fails_in_type_checkers() -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError):
            kind(42)  # type: ignore[arg-type]  # that it is flagged is the test


def test_an_event_that_is_about_no_lease_has_no_fence() -> None:
    event = holdfast.Event("node_back", detail="it answers again")
    assert (event.lock, event.fence) == ("", 0)
