"""`holdfast run` with real commands, signals, a terminal and a shell.

A command prints a line when it has started, so that tests need not guess. Tests read the token in
the lock's key directly from the server.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import holdfast
from holdfast.cli.console import sanitized
from kit.contention import waiters
from kit.runtimes import has_ended
from kit.servers import ONE_KIND, Server, claim_port, programs
from kit.terminal import (
    CTRL_C,
    CTRL_Z,
    HOLDFAST,
    PATIENCE,
    Screen,
    Terminal,
    environment,
    on_a_terminal,
)
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from typing import Self

NAME = "nightly"
KEY = f"holdfast:{{{NAME}}}"
QUEUE = f"{KEY}:queue"
TTL = "1"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
with_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with jobs")
one_kind = pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
one_kind_dedicated = pytest.mark.parametrize("own_server", ONE_KIND, indirect=True)

WRITE_TIMES = """
import os, signal, sys, time
out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
signal.signal(signal.SIGTERM, lambda *_: os.write(out, b"TERM\\n"))
while True:
    os.write(out, b"%f\\n" % time.time())
    time.sleep(0.002)
"""
"""A command that ignores TERM and records how long it lives."""

REPORT_SIGNALS = """
import signal, sys
numbers = [signal.Signals[name] for name in sys.argv[1:]]
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("begun", flush=True)
while True:
    print(signal.sigwait(numbers).name, flush=True)
"""

COUNT = """
import time
while True:
    print("one", flush=True)
    time.sleep(0.01)
"""
"""Not a shell loop: a shell that is stopped while it starts a process may hang."""

ALONE = """
if mkdir inside; then echo "$HOLDFAST_TOKEN" >> order; rmdir inside; else echo two >> order; fi
"""

CONCURRENT_RUNS = """
import contextlib, ctypes, os, sys
import holdfast.cli.supervise, holdfast.cli.switch, holdfast.api.client
from holdfast.cli import app, main
with contextlib.suppress(Exception):
    app.app(["run", "--ttl", "0", "too short", "true"], standalone_mode=False)
processes = range(int(sys.argv.pop(1)))
for _ in processes:
    if os.fork() == 0:
        main()
print(*[os.waitstatus_to_exitcode(os.wait()[1]) for _ in processes])
"""
"""Forks processes that all run the same command. Slow imports are done before the fork."""

SLOW = """
import os
from holdfast.cli import child, main
begin = child.Child.begin
def begin_slowly(self, environment):
    begin(self, environment)
    os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
child.Child.begin = begin_slowly
main()
"""
"""Checks the command for the first time after it has ended."""

BARE = """
import pathlib
from holdfast.cli import main, switch
switch.OPEN_FILES = pathlib.Path("/nonesuch")
main()
"""
"""Runs without access to the list of open files of a process."""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


class Running:
    """A `holdfast run` process and its command."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def read_line(self) -> str:
        """Return the next line that the command writes; empty at the end of its output."""
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            ready = select.select([self.process.stdout], [], [], PATIENCE)[0]
            assert ready, f"nothing after {line!r}"
            received = self.process.stdout.read(1)
            if not received:
                break
            line += received
        return line.decode().rstrip("\n")

    def end(self) -> Ended:
        """Wait for its end; return the status and the output."""
        out, err = self.process.communicate(timeout=PATIENCE)
        assert b"Traceback" not in err, err.decode()
        return Ended(self.process.returncode, out.decode(errors="replace"), err.decode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with suppress(ValueError):  # `end` has closed the pipes
            self.process.communicate()


class RunFolder(NamedTuple):
    """A folder in which to run commands, and a server."""

    folder: Path
    url: str

    def start(self, *words: str, name: str | bytes = NAME) -> Running:
        """Run a command under the lock; words before `--` are options."""
        cut = words.index("--")
        process = subprocess.Popen(
            [*HOLDFAST, "run", *words[:cut], name, *words[cut:]],
            cwd=self.folder,
            env=environment(HOLDFAST_URL=self.url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        return Running(process)

    def run(self, *words: str, name: str | bytes = NAME) -> Ended:
        """Run a command under the lock and wait for its end."""
        with self.start(*words, name=name) as running:
            return running.end()

    def shell(self) -> AbstractContextManager[Screen]:
        """An interactive shell on a terminal, with `hf` for `holdfast run`."""
        return _shell(self)


@contextmanager
def _shell(place: RunFolder) -> Iterator[Screen]:
    command = " ".join([*HOLDFAST, "run"])
    env = environment(HOLDFAST_URL=place.url, PS1="ready> ", hf=command)
    bash = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
    with on_a_terminal(bash, cwd=place.folder, env=env) as screen:
        screen.until("ready> ")
        yield screen
        screen.enter("exit")
        screen.wait_for_end()


def status_in(screen: Screen) -> int:
    """Return `$?` of the shell."""
    screen.enter("echo status=$?")
    return int(screen.until(r"status=(\d+)\r\nready> ")[1])


@pytest.fixture
def place(tmp_path: Path, server: Server) -> RunFolder:
    return RunFolder(tmp_path, server.url)


@pytest.fixture
def own_place(tmp_path: Path, own_server: Server) -> RunFolder:
    return RunFolder(tmp_path, own_server.url)


def beats(file: Path) -> list[str]:
    return file.read_text().splitlines()


# ---- environment, input and exit status of the command


def test_the_command_holds_the_lock_while_it_runs(place: RunFolder, server: Server) -> None:
    result = 'echo "$HOLDFAST_LOCK $HOLDFAST_FENCE"; echo "$HOLDFAST_TOKEN"; read -r _; exit 7'
    with place.start("--", "sh", "-c", result) as running:
        name, fence = running.read_line().split()
        assert name == NAME
        assert server.command("GET", f"{KEY}:fence") == fence.encode()
        assert server.command("GET", KEY) == running.read_line().encode()
        assert running.end() == (7, "", "")
    assert server.command("EXISTS", KEY) == 0


@one_kind
def test_a_command_killed_by_a_signal_exits_with_128_plus_the_signal(place: RunFolder) -> None:
    assert place.run("--", "sh", "-c", "kill -KILL $$").status == 128 + signal.SIGKILL


@one_kind
def test_standard_input_reaches_the_command(place: RunFolder) -> None:
    with place.start("--", "sort") as running:
        out, _ = running.process.communicate(b"b\na\n", timeout=PATIENCE)
    assert out == b"a\nb\n"


@one_kind
def test_the_other_end_of_a_pipe_sees_the_command_close_it(place: RunFolder) -> None:
    with place.start(
        "--", "sh", "-c", "exec <&- >&-; while [ ! -e seen ]; do sleep 0.01; done"
    ) as it:
        assert it.read_line() == ""
        (place.folder / "seen").touch()
        assert it.end().status == 0


@one_kind
@on_linux
def test_the_command_gets_signals_and_environment_as_if_run_directly(place: RunFolder) -> None:
    signals = "while read -r line; do case $line in Sig[IBC]*) echo $line;; esac; done"
    look = ["sh", "-c", f"{signals} </proc/$$/status; env"]
    env = environment(HOLDFAST_URL=place.url, LANG="C")
    del env["PYTHONUTF8"]
    # As in a background job (&) of a script.
    ignoring = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh"]
    direct, under = (
        subprocess.run(each, cwd=place.folder, env=env, capture_output=True, check=True).stdout
        for each in ([*ignoring, *look], [*ignoring, *HOLDFAST, "run", NAME, *look])
    )
    added = {line.partition(b"=")[0] for line in {*under.splitlines()} - {*direct.splitlines()}}
    each = {b"HOLDFAST_LOCK", b"HOLDFAST_FENCE", b"HOLDFAST_TOKEN"}
    assert added == {*each, *(name + b"_1" for name in each), b"HOLDFAST_LOCKS"}
    assert {*direct.splitlines()} < {*under.splitlines()}


@pytest.mark.long
@one_kind
@on_linux
def test_closed_file_descriptors_stay_closed(place: RunFolder, server: Server) -> None:
    look = f"{' '.join(HOLDFAST)} run {NAME} ls -l /proc/self/fd <&- 2>&-"
    shown = subprocess.run(
        ["sh", "-c", look],
        env=environment(HOLDFAST_URL=server.url),
        cwd=place.folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    ).stdout
    # `ls` opens the folder with the first free file descriptor.
    assert re.findall(r"(\d+) -> (\S+)", shown)[0][1].startswith("/proc")
    assert "null" not in shown


@one_kind
def test_a_script_without_an_interpreter_line_runs_in_the_shell(place: RunFolder) -> None:
    script = place.folder / "script"
    script.write_text("echo from $0 $1\n")
    script.chmod(0o755)
    assert place.run("--", "./script", "here").out == "from ./script here\n"


@one_kind
def test_a_command_that_cannot_run_is_reported_without_acquiring_the_lock(
    place: RunFolder, server: Server
) -> None:
    (place.folder / "letter").write_text("Dear")
    assert place.run("--", "nonesuch") == (127, "", "holdfast: nonesuch: command not found\n")
    assert place.run("--", "./nonesuch").status == 127
    assert place.run("--", "./letter") == (126, "", "holdfast: ./letter: Permission denied\n")
    assert place.run("--", "./") == (126, "", "holdfast: ./: Is a directory\n")
    assert server.command("DBSIZE") == 0


@pytest.mark.long
@one_kind
def test_a_command_that_disappears_while_waiting_is_reported(
    place: RunFolder, server: Server
) -> None:
    script = place.folder / "script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    with holdfast.Client(server.url) as client, client.lock(NAME) as lease:
        running = place.start("--", "./script")
        eventually(lambda: waiters(server, QUEUE), within=PATIENCE)
        script.unlink()
        lease.release()
        assert running.end() == (127, "", "holdfast: ./script: command not found\n")
    assert server.command("EXISTS", KEY) == 0


@one_kind
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs waitid with WNOWAIT")
def test_the_reason_for_a_failed_start_is_reported_even_if_the_child_has_ended(
    place: RunFolder,
) -> None:
    script = place.folder / "script"
    script.write_text("#!/nonesuch\n")
    script.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "-c", SLOW, "run", NAME, "./script"],
        cwd=place.folder,
        env=environment(HOLDFAST_URL=place.url),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    why = "holdfast: ./script: its interpreter does not exist\n"
    assert (result.returncode, result.stderr) == (127, why)


@one_kind
def test_options_must_precede_the_name(place: RunFolder) -> None:
    result = place.run("--", "--ttl", "5")
    assert result.status == 2
    assert "NAME -- COMMAND" in result.err


# ---- waiting


def test_run_waits_for_a_held_lock_at_most_its_timeout(place: RunFolder, server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock(NAME, label="first"):
        skipped = place.run("--no-wait", "--", "touch", "x")
        silent = place.run("-n", "-E", "0", "--", "touch", "x")
        late = place.run("-v", "-w", "1", "-E", "42", "--", "touch", "x")
    assert late.status == 42
    assert (skipped.status, skipped.out) == (1, "")
    assert silent == (0, "", "")  # for cron
    *_, last = late.err.splitlines()  # a report of the long wait may precede it
    for line in last, skipped.err.removesuffix("\n"):
        assert re.fullmatch(r"holdfast: 'nightly' is held by .*, pid \d+ \(first\), .*", line)
    assert not (place.folder / "x").exists()
    assert waiters(server, QUEUE) == 0


@pytest.mark.parametrize("many", [6, pytest.param(50, marks=pytest.mark.long)])
def test_concurrent_runs_execute_one_at_a_time_in_fifo_order(
    place: RunFolder, server: Server, many: int
) -> None:
    words = [str(many), "run", "--ttl", "10", NAME, "--", "sh", "-c", ALONE]
    processes = [sys.executable, "-c", CONCURRENT_RUNS, *words]
    with holdfast.Client(server.url) as client, client.lock(NAME) as lease:
        running = subprocess.Popen(
            processes,
            cwd=place.folder,
            env=environment(HOLDFAST_URL=server.url),
            stdout=subprocess.PIPE,
        )
        eventually(
            lambda: server.command("ZCARD", QUEUE) == many, within=PATIENCE, what="the queue"
        )
        queue = [token.decode() for token in server.command("ZRANGE", QUEUE, 0, -1)]
        lease.release()
        out, _ = running.communicate(timeout=PATIENCE)
    assert set(out.split()) == {b"0"}
    assert (place.folder / "order").read_text().splitlines() == queue


@one_kind
@with_bash
def test_ctrl_c_ends_the_wait_and_leaves_the_queue(place: RunFolder, server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock(NAME, label="first"):
        with place.shell() as screen:
            screen.enter(f"$hf {NAME} -- touch x")
            screen.until(r"holdfast: waiting for 'nightly', held by .*, pid \d+ \(first\)")
            screen.press(CTRL_C)
            screen.until("ready> ")
            assert status_in(screen) == 130
        assert waiters(server, QUEUE) == 0
    assert not (place.folder / "x").exists()


@one_kind_dedicated
@with_bash
def test_waiting_on_a_terminal_reports_an_unreachable_server(
    own_place: RunFolder, own_server: Server
) -> None:
    with holdfast.Client(own_server.url) as client:
        lease = client.lock(NAME, label="first").acquire()
        with own_place.shell() as screen:
            screen.enter(f"$hf {NAME} -- echo done")
            screen.until(r"waiting for 'nightly', held by .* \(first\)")
            own_server.freeze()
            screen.until(r"waiting for 'nightly': cannot reach")
            own_server.thaw()
            lease.release()
            screen.until("done")


@one_kind
def test_sigterm_ends_the_wait_and_leaves_the_queue(place: RunFolder, server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock(NAME):
        with place.start("--", "touch", "x") as running:
            eventually(lambda: waiters(server, QUEUE), within=PATIENCE)
            running.process.terminate()
            assert running.end() == (128 + signal.SIGTERM, "", "")
        assert waiters(server, QUEUE) == 0


# ---- signals and the terminal


@one_kind
def test_signals_are_forwarded_to_the_command(place: RunFolder) -> None:
    names = ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGQUIT", "SIGWINCH"]
    with place.start("--", sys.executable, "-S", "-c", REPORT_SIGNALS, *names) as running:
        assert running.read_line() == "begun"
        for name in names:
            running.process.send_signal(signal.Signals[name])
            assert running.read_line() == name
        running.process.terminate()
        assert running.end() == (128 + signal.SIGTERM, "", "")


@one_kind
@with_bash
def test_ctrl_c_is_handled_by_the_command(place: RunFolder, server: Server) -> None:
    with place.shell() as screen:
        screen.enter(f"$hf {NAME} -- sh -c 'echo be\"\"gun; exec sleep 60'")
        screen.until("begun")
        screen.press(CTRL_C)
        screen.until("ready> ")
        assert status_in(screen) == 130
        assert server.command("EXISTS", KEY) == 0
        # An interactive shell handles Ctrl-C itself.
        screen.enter(f"$hf {NAME} -- bash --norc --noprofile --noediting -i")
        screen.until("ready> ")
        screen.press(CTRL_C)
        screen.until("ready> ")
        screen.enter("echo in$((1+1)); exit 5")
        screen.until("in2")
        screen.until("ready> ")
        assert status_in(screen) == 5


@one_kind
@with_bash
def test_ctrl_z_stops_the_job_and_fg_and_bg_continue_it(place: RunFolder, server: Server) -> None:
    (place.folder / "count.py").write_text(COUNT)
    with place.shell() as screen:
        screen.enter(f"$hf {NAME} -- {sys.executable} -S count.py")
        screen.until("\none")
        screen.press(CTRL_Z)
        screen.until("Stopped")
        screen.until("ready> ")
        token = server.command("GET", KEY)
        screen.enter("fg")
        screen.until("\none")
        screen.press(CTRL_Z)
        screen.until("Stopped")
        screen.enter("bg")
        screen.until("\none")
        screen.enter("fg")
        screen.wait_for_foreground_job()
        screen.press(CTRL_C)
        screen.until("ready> ")
        assert status_in(screen) == 130
    assert token
    assert server.command("EXISTS", KEY) == 0


@one_kind
@with_bash
def test_a_command_stopped_longer_than_the_lease_is_killed(
    place: RunFolder, server: Server
) -> None:
    (place.folder / "beat.py").write_text(WRITE_TIMES)
    with place.shell() as screen:
        screen.enter(f"$hf --ttl {TTL} {NAME} -- {sys.executable} -S beat.py beats")
        eventually((place.folder / "beats").exists, within=PATIENCE)
        screen.press(CTRL_Z)
        screen.until("Stopped")
        with holdfast.Client(server.url) as client, client.lock(NAME):
            before = beats(place.folder / "beats")
            screen.enter("fg")
            screen.until(
                "holdfast: the lease of 'nightly' .* was lost: .* while .* stopped: .*killed"
            )
            screen.until("ready> ")
            assert status_in(screen) == 75
            assert beats(place.folder / "beats") == before


@pytest.mark.long
@one_kind
@with_bash
def test_other_commands_of_a_pipeline_keep_the_terminal(place: RunFolder) -> None:
    written = "echo begun; while [ ! -e answered ]; do sleep 0.01; done; echo written"
    pager = "read -r _; echo asks; read -r answer < /dev/tty; touch $answer; cat"
    with place.shell() as screen:
        screen.enter(f"$hf {NAME} -- sh -c '{written}' | sh -c '{pager}'")
        screen.until("\nasks")
        screen.enter("answered")
        screen.until("\nwritten")
        screen.until("ready> ")
        # The command gets the terminal when it needs it.
        screen.enter(f"$hf {NAME} -- sh -c 'echo asks; read -r answer; echo $answer' | cat")
        screen.until("\nasks")
        screen.enter("good")
        screen.until("\ngood")
        screen.until("ready> ")
        # An interrupted script ends completely.
        screen.enter(f"sh -c '$hf {NAME} -- sh -c \"echo begun; exec sleep 60\"; echo on'")
        screen.until("\nbegun")
        screen.press(CTRL_C)
        screen.until("ready> ")
        assert status_in(screen) == 130


@pytest.mark.long
@one_kind
@with_bash
def test_ctrl_c_also_ends_the_surrounding_shell_loop(place: RunFolder, server: Server) -> None:
    with place.shell() as screen:
        screen.enter(f"while :; do $hf {NAME} -- sh -c 'echo be\"\"gun; exec sleep 60'; done")
        screen.until("\nbegun")
        screen.press(CTRL_C)
        screen.until("ready> ")
        assert status_in(screen) == 130
        # A script that waits for the lock.
        server.command("SET", KEY, "another's")
        screen.enter(f"bash -c '$hf {NAME} -- true; echo status $?'")
        screen.until("\nholdfast: waiting")
        screen.press(CTRL_C)
        screen.until("ready> ")
        assert status_in(screen) == 130


@pytest.mark.long
@one_kind
def test_repeated_signals_do_not_prevent_leaving_the_queue(
    place: RunFolder, server: Server
) -> None:
    with holdfast.Client(server.url) as client, client.lock(NAME):
        with place.start("--", "true") as running:
            eventually(lambda: waiters(server, QUEUE), within=PATIENCE)
            give_up_at = time.monotonic() + PATIENCE
            while running.process.poll() is None:
                assert time.monotonic() < give_up_at, "the process does not end"
                running.process.send_signal(signal.SIGINT)
            assert running.end() == (-signal.SIGINT, "", "")
        assert waiters(server, QUEUE) == 0


@pytest.mark.long
@one_kind
@with_bash
def test_a_killed_command_leaves_the_terminal_usable(place: RunFolder) -> None:
    with place.shell() as screen:
        screen.enter("before=$(stty -g)")
        screen.enter(
            f"$hf {NAME} -- sh -c 'stty raw -echo; kill -KILL $$'; [ $(stty -g) = $before ]"
        )
        screen.until("ready> ")
        assert status_in(screen) == 0


# ---- lost locks


def test_if_the_server_hangs_the_command_is_killed_before_the_lock_expires(
    own_place: RunFolder, own_server: Server
) -> None:
    (own_place.folder / "beat.py").write_text(WRITE_TIMES)
    pair = f"{sys.executable} -S beat.py first & exec {sys.executable} -S beat.py second"
    files = [own_place.folder / "first", own_place.folder / "second"]
    with own_place.start("--ttl", "2", "--", "sh", "-c", pair) as running:
        eventually(lambda: all(file.exists() for file in files), within=PATIENCE)
        before = own_server.command("PEXPIRETIME", KEY)
        # The lease was just renewed, so no renewal happens before the freeze.
        eventually(lambda: own_server.command("PEXPIRETIME", KEY) > before)
        expires = own_server.command("PEXPIRETIME", KEY) / 1000
        own_server.freeze()
        ended = running.end()
        lived = [beats(file) for file in files]
        own_server.thaw()
    assert ended.status == 75
    assert re.fullmatch(
        r"holdfast: the lease of 'nightly' \(fence \d+\) is about to be lost: the server has not "
        r"renewed it: the command (receives TERM, and KILL after 0\.\d s|is killed)\n",
        ended.err,
    )
    for each in lived:
        assert "TERM" in each or "asked" not in ended.err
        assert float(each[-1]) < expires
    assert own_place.run("--timeout", "5", "--", "true").status == 0


def test_if_the_lock_is_evicted_the_command_and_its_children_are_ended(
    place: RunFolder, server: Server
) -> None:
    (place.folder / "beat.py").write_text(WRITE_TIMES)
    pair = f"{sys.executable} -S beat.py beats & echo $!; trap 'exit 0' TERM; wait"
    with place.start("--ttl", TTL, "--", "sh", "-c", pair) as running:
        grandchild = int(running.read_line())
        eventually((place.folder / "beats").exists, within=PATIENCE)
        server.command("SET", KEY, "another's")
        ended = running.end()
        assert ended.status == 75
        assert ended.err.count("\n") == 1
        assert "was lost: another client has acquired the lock, or an operator" in ended.err
        assert has_ended(grandchild)
    assert server.command("GET", KEY) == b"another's"


@one_kind
def test_max_hold_ends_the_command(place: RunFolder, server: Server) -> None:
    with place.start("-v", "--ttl", TTL, "--max-hold", "0.1", "--", "sleep", "60") as running:
        ended = running.end()
    assert ended.status == 124
    acquired, ending = ended.err.splitlines()
    assert re.fullmatch(r"holdfast: acquired 'nightly', fence \d+", acquired)
    assert "has been held for 0.1 s: the command receives TERM" in ending
    assert server.command("EXISTS", KEY) == 0


@one_kind
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_the_command_does_not_outlive_a_killed_or_stopped_holdfast(
    how: signal.Signals, place: RunFolder, server: Server
) -> None:
    (place.folder / "beat.py").write_text(WRITE_TIMES)
    pair = f"{sys.executable} -S beat.py beats & echo $!; echo $$; wait"
    # With a stopped holdfast, a twentieth of the ttl is left to kill the command.
    ttl = TTL if how is signal.SIGKILL else "3"
    with place.start("--ttl", ttl, "--", "sh", "-c", pair) as running:
        pids = [int(running.read_line()) for _ in range(2)]
        eventually((place.folder / "beats").exists, within=PATIENCE)
        running.process.send_signal(how)
        with holdfast.Client(server.url) as client, client.lock(NAME):
            assert all(map(has_ended, pids))
        running.process.send_signal(signal.SIGCONT)
        ended = running.end()
    if how is signal.SIGKILL:
        assert ended.err == "holdfast: the holdfast process has ended: the command is killed\n"
    else:
        assert ended.status == 75
        assert re.search(r"was lost: its time ran out|was about to be lost", ended.err)


@pytest.mark.long
@one_kind
def test_no_output_is_lost_if_open_files_cannot_be_listed(place: RunFolder) -> None:
    # For example in a chroot without /proc. Then the run ends when the output is closed.
    result = subprocess.run(
        [sys.executable, "-c", BARE, "run", NAME, "--", "echo", "hi"],
        env=environment(HOLDFAST_URL=place.url),
        capture_output=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"hi\n", b"")


@one_kind
@on_linux
def test_the_kernel_kills_the_command_if_holdfast_and_its_guard_are_killed(
    place: RunFolder,
) -> None:
    with place.start("--", "sh", "-c", "echo $$; exec sleep 60") as running:
        command = int(running.read_line())
        ours = f"/proc/{running.process.pid}/task/{running.process.pid}/children"
        for pid in Path(ours).read_text().split():
            if int(pid) != command:
                os.kill(int(pid), signal.SIGKILL)
        running.process.kill()
        eventually(lambda: has_ended(command))


@one_kind
def test_a_background_process_of_the_command_is_left_running(place: RunFolder) -> None:
    with place.start("--", "sh", "-c", "sleep 60 >&- 2>&- & echo $!") as running:
        left = int(running.read_line())
        assert running.end().status == 0
    assert not has_ended(left)
    os.kill(left, signal.SIGKILL)


@one_kind_dedicated
def test_a_failed_release_is_reported_and_the_status_is_kept(
    own_place: RunFolder, own_server: Server
) -> None:
    with own_place.start("--", "sh", "-c", "echo begun; read -r _; exit 4") as running:
        running.read_line()
        own_server.kill()
        ended = running.end()
    assert ended.status == 4
    assert re.fullmatch(r"holdfast: 'nightly' .* not released.*\n", ended.err)


# ---- servers


def test_run_without_a_server_reports_it(tmp_path: Path) -> None:
    port, claim = claim_port()
    with claim:
        result = RunFolder(tmp_path, f"redis://127.0.0.1:{port}").run("--", "touch", "x")
    assert result.status == 69
    assert re.fullmatch(r"holdfast: 'nightly' was not acquired: cannot reach .*\n", result.err)
    assert not (tmp_path / "x").exists()


@one_kind
def test_run_with_no_wait_names_the_holder_on_a_terminal(place: RunFolder, server: Server) -> None:
    with place.start("--label", "first", "--", "sh", "-c", "echo; read -r _") as running:
        running.read_line()
        with Terminal(*HOLDFAST, "run", "-n", NAME, "true", HOLDFAST_URL=server.url) as terminal:
            terminal.shows(f"holdfast: '{NAME}' is held by ", ", pid ", "(first)")
            assert terminal.ends() == 1


@pytest.mark.usefixtures("runtime")
def test_run_warns_once_that_the_embedded_server_is_local_unless_chosen() -> None:
    for options, url in (([], ""), (["--local"], ""), (["--url", "local"], ""), ([], "local")):
        result = subprocess.run(
            [*HOLDFAST, "run", *options, NAME, "printenv", "HOLDFAST_LOCK"],
            env=environment(HOLDFAST_URL=url),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert (result.returncode, result.stdout) == (0, f"{NAME}\n")
        if options or url:
            assert result.stderr == ""
        else:
            assert result.stderr.count("\n") == 1
            assert "exclude only processes of this user on this machine" in result.stderr
            assert "HOLDFAST_URL" in result.stderr


def test_url_and_local_exclude_each_other() -> None:
    words = [*HOLDFAST, "run", "--local", "--url", "redis://x", NAME, "true"]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--url or --local" in " ".join(result.stderr.split())


@pytest.mark.parametrize("kind", programs())
def test_a_wrong_password_is_reported(kind: str, tmp_path: Path) -> None:
    with Server.start(programs()[kind], "--requirepass", "right") as server:
        wrong = server.url.replace("//", "//:wrong@")
        result = RunFolder(tmp_path, wrong).run("--", "touch", "x")
    assert result.status == 78
    assert "refuses this user and password" in result.err
    assert result.err.count("\n") == 1


@one_kind
def test_run_accepts_the_url_option(tmp_path: Path, server: Server) -> None:
    result = RunFolder(tmp_path, "redis://127.0.0.1:1").run("--url", server.url, "--", "true")
    assert result == (0, "", "")


def test_run_accepts_the_longest_ttl_option(tmp_path: Path) -> None:
    place = RunFolder(tmp_path, "redis://127.0.0.1:1 redis://127.0.0.1:2 redis://127.0.0.1:3")
    result = place.run("--ttl", "120", "--", "true")
    assert result.status == 78
    assert "longest_ttl=120" in result.err
    assert place.run("--ttl", "120", "--longest-ttl", "120", "-n", "--", "true").status == 69


@one_kind
def test_run_keeps_the_lock_delay(place: RunFolder, server: Server) -> None:
    with place.start("--lock-delay", "9", "--", "sh", "-c", "echo; read -r _; exit 0") as running:
        running.read_line()
        assert server.command("PTTL", KEY) > 31_000
        assert running.end() == (0, "", "")


@one_kind
def test_run_without_the_required_replicas_acquires_nothing(place: RunFolder) -> None:
    result = place.run("--replicas", "1", "--no-wait", "--", "touch", "x")
    assert result.status == 69
    assert result.err.count("\n") == 1
    remedy = "only 0 of 1 replicas have it: restore the replicas, or give a lower --replicas\n"
    assert result.err.endswith(remedy)
    assert not (place.folder / "x").exists()


@pytest.mark.long
@one_kind
def test_a_wait_for_replicas_is_not_reported_as_a_wait_for_itself(place: RunFolder) -> None:
    result = place.run("-v", "--replicas", "1", "--ttl", "3", "--", "touch", "x")
    assert result.status == 69
    first, *_ = result.err.splitlines()
    assert first == "holdfast: waiting for 'nightly': granted, but not yet on the replicas"
    assert "held by" not in result.err


@one_kind
def test_verbose_reports_each_event_with_its_lock(place: RunFolder, server: Server) -> None:
    with place.start("-v", "--ttl", TTL, "--", "sh", "-c", "echo; exec sleep 60") as running:
        running.read_line()
        server.command("SET", KEY, "another's")
        result = running.end()
    assert result.status == 75
    assert re.search(r"^holdfast: lost 'nightly' \(fence \d+\): taken$", result.err, re.MULTILINE)


# ---- unusual names


@pytest.mark.parametrize("name", ["two\nlines \x1b[31m \u202e".encode() + b"\xff\xfe", b"x" * 1024])
@one_kind
def test_an_unusual_name_reaches_the_command_and_is_escaped_in_messages(
    name: bytes, place: RunFolder, server: Server
) -> None:
    command = ("sh", "-c", "printenv HOLDFAST_LOCK; read -r _")
    with place.start("-v", "--", *command, name=name) as running:
        eventually(lambda: server.command("EXISTS", b"holdfast:{%b}" % name), within=PATIENCE)
        out, result = running.process.communicate(b"\n", timeout=PATIENCE)
    assert out == name + b"\n"
    assert result.count(b"\n") == 1
    assert result.decode()[:-1].isprintable()
    assert len(result) < 200


def test_text_of_other_clients_is_escaped_in_messages() -> None:
    assert sanitized("é 漢 'a' \\") == "é 漢 'a' \\"
    assert sanitized("\n\x1b\x7f\x9b") == "\\n\\e\\x7f\\x9b"
    assert sanitized(b"\xff".decode(errors="surrogateescape")) == "\\xff"
    assert sanitized("\ud800\u202e\u2028\U000e0001") == "\\ud800\\u202e\\u2028\\U000e0001"
    assert sanitized("abcdef", 4) == "abc…"
