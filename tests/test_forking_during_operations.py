"""A signal handler forks during an operation: the operation belongs to the parent.

The child sends no request with the parent's token, whether it returns from the handler or exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from kit.contention import waiters
from kit.processes import Process
from kit.quorum_servers import init_for_quorum
from kit.runtimes import has_ended
from kit.servers import ONE_KIND, Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROGRAM = next(iter(programs().values()))
LIMIT = 60.0

DURING_OPERATION = """
import collections, os, signal, socket, sys, threading, time, warnings
import holdfast, redis

# Counts the connections of this process. Some are opened in the background, at any time.
class Counted(socket.socket):
    made = collections.Counter()

    def connect(self, address):
        self.made[address[1]] += 1
        super().connect(address)

socket.socket = Counted
warnings.simplefilter("ignore")
pids, urls, exits = list(map(int, sys.argv[1].split())), sys.argv[2].split(), sys.argv[3] == "exits"
client = holdfast.Client(urls[0] if len(urls) == 1 else urls, command_timeout=30)
lock = client.lock("a", ttl=60, timeout=60)
servers = [redis.Redis.from_url(url) for url in urls]
children = []

def foreign_connections():
    return [
        server.info("stats")["total_connections_received"]
        - Counted.made[server.connection_pool.connection_kwargs["port"]]
        for server in servers
    ]

def majority(replies):
    return 2 * sum(replies) > len(servers)

def fork(*_):
    child = os.fork()
    if child:
        children.append(child)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    elif exits:
        sys.exit(7)

def send_signal():
    # Until the main thread is within the wire; the server is stopped, so it stays there.
    while True:
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and "/holdfast/wire/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            return os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.001)

def stop():
    global before
    before = foreign_connections()
    signal.signal(signal.SIGUSR1, fork)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    threading.Thread(target=send_signal, daemon=True).start()

def operation():
{operation}

{setup}
result = None
try:
    result = operation()
except Exception as error:
    if children:
        raise
    message = "forked" in str(error)
    print("child", type(error).__name__, message, flush=True)
if not children:
    time.sleep(0.5)  # time for background tasks
    os._exit(0)
os.waitpid(children[0], 0)
for _ in range(1000):  # a server may not have accepted one yet
    if foreign_connections() == before:
        break
    time.sleep(0.01)
print("parent", foreign_connections() == before, flush=True)
{check}
os._exit(0)
"""

WARM = """
with client.lock("warm"):
    pass
"""

OPERATIONS = {
    "acquire": ("return lock.acquire()", WARM + "stop()"),
    "adopt": ("return client.adopt(text)", "text = lock.acquire().export()\nstop()"),
    "redis_lock": (
        "made.acquire()\nreturn made",
        """
made = redis.Redis.from_url(urls[0]).lock("a", timeout=60, lock_class=holdfast.RedisLock)
made.acquire()
made.release()
stop()
""",
    ),
    "redis_lock_release": (
        "made.release()",
        """
made = redis.Redis.from_url(urls[0]).lock("a", timeout=60, lock_class=holdfast.RedisLock)
made.acquire()
stop()
""",
    ),
    "release": ("lease.release()", "lease = lock.acquire()\nstop()"),
    "store": (
        "return value()",
        WARM
        + """
@client.cached(60, key="a", lock_ttl=120)
def value():
    stop()  # the next request stores the value
    return 1
""",
    ),
}
RAISING = [name for name in OPERATIONS if name != "store"]  # a computed value is returned


def with_quick(operations: Iterable[str], *quick: str) -> list[Any]:
    """Parameters of which `make test` runs the quick ones, and `make long` all others."""
    return [
        pytest.param(each, marks=() if each in quick else pytest.mark.long) for each in operations
    ]


HAS_IT = (
    "result.held and majority(server.get('holdfast:{a}') == result.token.encode() "
    "for server in servers)"
)
HELD = {
    "acquire": HAS_IT,
    "adopt": HAS_IT,
    "redis_lock": "result.owned()",
    "release": "majority(not server.exists('holdfast:{a}') for server in servers)",
    "redis_lock_release": "not servers[0].exists('a')",
    "store": "servers[0].exists('holdfast:value:{a}') == 1",
}


def forked_during(operation: str, servers: Sequence[Server], how: str) -> list[str]:
    """Fork during an operation, and return what parent and child print."""
    body, setup = OPERATIONS[operation]
    text = DURING_OPERATION.format_map(
        {
            "operation": textwrap.indent(body, "    "),
            "setup": setup,
            "check": f"print('parent', {HELD[operation]}, flush=True)",
        }
    )
    pids = " ".join(str(server.pid) for server in servers)
    command = [sys.executable, "-c", text, pids, " ".join(each.url for each in servers), how]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    finally:
        for server in servers:
            os.kill(server.pid, signal.SIGCONT)
    assert ended.stdout, ended.stderr
    return sorted(ended.stdout.splitlines())


PARENT = ["parent True", "parent True"]


@pytest.mark.parametrize("own_server", ONE_KIND, indirect=True)
@pytest.mark.parametrize("operation", with_quick(RAISING, "acquire", "redis_lock_release"))
def test_a_child_forked_during_an_operation_raises_and_sends_nothing(
    own_server: Server, operation: str
) -> None:
    output = forked_during(operation, [own_server], "returns")
    assert output[1:] == PARENT
    assert output[0] in {"child NotHeld True", "child LockError True"}


@pytest.mark.parametrize("own_server", ONE_KIND, indirect=True)
@pytest.mark.parametrize("operation", with_quick(OPERATIONS, "release", "store"))
def test_a_child_forked_during_an_operation_exits_without_sending_anything(
    own_server: Server, operation: str
) -> None:
    assert forked_during(operation, [own_server], "exits") == PARENT


@pytest.mark.parametrize("own_server", ONE_KIND, indirect=True)
def test_a_child_forked_while_storing_a_value_leaves_that_to_its_parent(own_server: Server) -> None:
    assert forked_during("store", [own_server], "returns") == PARENT


@pytest.mark.parametrize("how", ["returns", pytest.param("exits", marks=pytest.mark.long)])
@pytest.mark.parametrize("operation", with_quick(["acquire", "release"], "release"))
def test_a_child_forked_during_an_operation_on_a_quorum_sends_nothing(
    operation: str, how: str
) -> None:
    durable = "--appendonly", "yes", "--appendfsync", "always"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(PROGRAM, *durable)) for _ in range(3)]
        for server in servers:
            init_for_quorum(server)
        output = forked_during(operation, servers, how)
    assert output[-2:] == PARENT
    assert output[:-2] == (["child NotHeld True"] if how == "returns" else [])


# While the parent waits in the queue

WAITS = {
    "threads": """
        lease = client.lock("a", ttl=60).acquire()
        report()
        """,
    "asyncio": """
        import asyncio

        async def main():
            global lease
            lease = await holdfast.AsyncClient(URL).lock("a", ttl=60).acquire()
            report()

        asyncio.run(main())
        """,
}

FORKS = """
        import signal

        parent = os.getpid()

        def fork(*_):
            child = os.fork()
            if child == 0:
                if EXITS:
                    sys.exit(0)
                return
            print(child, flush=True)

        def report():
            print("held", lease.held, flush=True)
            time.sleep(60)

        signal.signal(signal.SIGUSR1, fork)
        print(parent, flush=True)
        """


@pytest.mark.parametrize("by", WAITS)
def test_a_child_forked_by_a_waiter_does_not_change_its_place_in_the_queue(
    server: Server, by: str
) -> None:
    text = (FORKS + WAITS[by]).replace("URL", repr(server.url)).replace("EXITS", "True")
    with holdfast.Client(server.url) as client, contextlib.ExitStack() as stack:
        lease = client.lock("a", ttl=60).acquire()
        waiter = stack.enter_context(Process(server, text))
        pid = int(waiter.read_line())
        eventually(lambda: waiters(server) == 1, within=LIMIT)
        os.kill(pid, signal.SIGUSR1)
        child = int(waiter.read_line())
        eventually(lambda: has_ended(child), within=LIMIT)
        assert waiters(server) == 1
        lease.release()
        assert waiter.read_line() == "held True"


def test_a_child_forked_by_a_waiter_stops_waiting(server: Server) -> None:
    text = (FORKS + WAITS["threads"]).replace("EXITS", "False")
    with holdfast.Client(server.url) as client, contextlib.ExitStack() as stack:
        lease = client.lock("a", ttl=60).acquire()
        waiter = stack.enter_context(Process(server, text))
        pid = int(waiter.read_line())
        eventually(lambda: waiters(server) == 1, within=LIMIT)
        os.kill(pid, signal.SIGUSR1)
        child = int(waiter.read_line())
        eventually(lambda: has_ended(child), within=LIMIT)
        lease.release()
        assert waiter.read_line() == "held True"


JOINS = """
        import signal, threading

        begun, go, parent = threading.Event(), threading.Event(), os.getpid()

        @client.cached(60, key="a", timeout=30)
        def value():
            begun.set()
            go.wait()
            return "computed"

        def fork(*_):
            if os.fork():
                go.set()

        def send_signal():
            flights = client._caching._cache.flights
            while not any(flight.waiting for flight in list(flights.values())):
                time.sleep(0.01)
            os.kill(parent, signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, fork)
        threading.Thread(target=value, daemon=True).start()
        begun.wait()
        threading.Thread(target=send_signal, daemon=True).start()
        print(value(), "in the", "parent" if os.getpid() == parent else "child", flush=True)
        time.sleep(60 if os.getpid() == parent else 0)
        """


def test_a_child_forked_by_a_caller_of_a_cached_function_does_not_wait_for_a_parent_thread(
    server: Server,
) -> None:
    with Process(server, JOINS) as process:
        output = {process.read_line(), process.read_line()}
    assert output == {"computed in the parent", "computed in the child"}
