"""Signals that arrive while a client works. Their handlers raise, or only take time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from kit.servers import ONE_KIND
from kit.waiting import eventually

if TYPE_CHECKING:
    from kit.servers import Server


LIMIT = 60.0
"""Seconds for a process that takes one or two on an idle machine."""


def python(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process until it ends."""
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(text), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


HANGS = """
import os, signal, sys
import holdfast

url, pid = sys.argv[1], int(sys.argv[2])
client = holdfast.Client(url, command_timeout=0.5)
with client.lock("a"):
    pass
os.kill(pid, signal.SIGSTOP)  # the server hangs
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
try:
    {request}
except (holdfast.NodeUnavailable, holdfast.OutcomeUnknown) as error:
    print(type(error).__name__)
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.parametrize("own_server", ONE_KIND, indirect=True)
@pytest.mark.parametrize(
    "request_",
    [
        pytest.param('client.lock("a").acquire(timeout=1)', id="receiving"),
        pytest.param('client.atomic.compare_and_set("k", None, b"x" * 2**26)', id="sending"),
    ],
)
def test_timeouts_hold_even_if_signals_arrive_more_often(own_server: Server, request_: str) -> None:
    # The server hangs as long as the process lives. Without its timeout the process would never
    # end.
    try:
        ended = python(HANGS.format(request=request_), own_server.url, str(own_server.pid))
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert ended.stdout.strip() in {"NodeUnavailable", "OutcomeUnknown"}, ended.stderr


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_an_interrupted_process_ends_by_itself_and_leaves_nothing_locked(server: Server) -> None:
    # The first argument of EVALSHA is a number. hiredis must not convert it.
    ended = python(
        """
        import itertools, random, signal, sys, time
        import holdfast

        class Interrupted(Exception):
            pass

        def interrupt(*_):
            raise Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        client = holdfast.Client(sys.argv[1])
        interrupted = 0
        for number in itertools.count():
            if interrupted == 2000:
                break
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00002, 0.0005))
                lock = client.lock(f"{number}", ttl=1, renew=False, fair=False)
                lock.acquire(timeout=1).release()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        client.close()
        """,
        server.url,
    )
    assert ended.returncode == 0, ended.stderr
    # A signal between acquire and release interrupts the user's code. That lock stays until its
    # ttl.
    eventually(
        lambda: server.command("KEYS", "holdfast:*}") == [], what="nothing is locked", within=LIMIT
    )


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_hiredis_packs_bytes_and_strings_only(server: Server) -> None:
    ended = python(
        """
        import sys
        import hiredis

        packs, words_seen = hiredis.pack_command, []

        def pack_checked(words):
            words_seen.append(words)
            assert all(isinstance(word, (bytes, str)) for word in words), words
            return packs(words)

        hiredis.pack_command = pack_checked
        import holdfast

        with holdfast.Client(sys.argv[1].removesuffix("0") + "1") as client:  # SELECT 1
            with client.lock("a", fair=False, owner="me"):
                pass
            assert not client.lock("a", owner="me").locked()
            with client.lock("b"):
                assert client.lock("b").locked()
            client.lock("c").acquire().extend(3)
        assert [words[0] for words in words_seen].count("SELECT") > 0, words_seen
        """,
        server.url,
    )
    assert ended.returncode == 0, ended.stderr
