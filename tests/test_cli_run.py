"""`holdfast run`, as people use it: real commands, real signals, a real terminal and shell.

Commands say that they have begun by a line, so that nobody has to guess. Servers are looked at from
outside, by the token in the lock's key.
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
from holdfast.cli.console import plain
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
one_kind_of_its_own = pytest.mark.parametrize("own_server", ONE_KIND, indirect=True)

BEAT = """
import os, signal, sys, time
out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
signal.signal(signal.SIGTERM, lambda *_: os.write(out, b"TERM\\n"))
while True:
    os.write(out, b"%f\\n" % time.time())
    time.sleep(0.002)
"""
"""A command that does not want to end, and writes down how long it lives."""

TELL = """
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
"""Not a loop of the shell's: one that is stopped while it starts another process may hang."""

ALONE = """
if mkdir inside; then echo "$HOLDFAST_TOKEN" >> order; rmdir inside; else echo two >> order; fi
"""

CROWD = """
import contextlib, ctypes, os, sys
import holdfast.cli.supervise, holdfast.cli.switch, holdfast.faces.client
from holdfast.cli import app, main
with contextlib.suppress(Exception):
    app.app(["run", "--ttl", "0", "too short", "true"], standalone_mode=False)
crowd = range(int(sys.argv.pop(1)))
for _ in crowd:
    if os.fork() == 0:
        main()
print(*[os.waitstatus_to_exitcode(os.wait()[1]) for _ in crowd])
"""
"""So many processes that run the same command at once; what takes long is imported before."""

SLOW = """
import os
from holdfast.cli import child, main
begin = child.Child.begin
def begin_and_dawdle(self, environment):
    begin(self, environment)
    os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
child.Child.begin = begin_and_dawdle
main()
"""
"""Looks at the command for the first time when it has ended."""

BARE = """
import pathlib
from holdfast.cli import main, switch
switch.OPEN_FILES = pathlib.Path("/nonesuch")
main()
"""
"""Where nobody can list a process's open files."""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


class Running:
    """A `holdfast run`, and the command in it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def says(self) -> str:
        """Wait for the next line that the command writes; empty when it writes no more."""
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
        """Wait for its end."""
        out, err = self.process.communicate(timeout=PATIENCE)
        assert b"Traceback" not in err, err.decode()
        return Ended(self.process.returncode, out.decode(errors="replace"), err.decode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with suppress(ValueError):  # it was waited for
            self.process.communicate()


class Place(NamedTuple):
    """A folder to run commands in, with a server."""

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
        """The same, to its end."""
        with self.start(*words, name=name) as running:
            return running.end()

    def shell(self) -> AbstractContextManager[Screen]:
        """An interactive shell on a terminal, with `hf` for `holdfast run`."""
        return _shell(self)


@contextmanager
def _shell(place: Place) -> Iterator[Screen]:
    command = " ".join([*HOLDFAST, "run"])
    env = environment(HOLDFAST_URL=place.url, PS1="ready> ", hf=command)
    bash = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
    with on_a_terminal(bash, cwd=place.folder, env=env) as screen:
        screen.until("ready> ")
        yield screen
        screen.enter("exit")
        screen.to_the_end()


def status_in(screen: Screen) -> int:
    """The status that the shell has."""
    screen.enter("echo status=$?")
    return int(screen.until(r"status=(\d+)\r\nready> ")[1])


@pytest.fixture
def place(tmp_path: Path, server: Server) -> Place:
    return Place(tmp_path, server.url)


@pytest.fixture
def own_place(tmp_path: Path, own_server: Server) -> Place:
    return Place(tmp_path, own_server.url)


def beats(file: Path) -> list[str]:
    return file.read_text().splitlines()


# ---- what the command gets, and what is made of its end


def test_the_command_holds_the_lock_while_it_runs(place: Place, server: Server) -> None:
    told = 'echo "$HOLDFAST_LOCK $HOLDFAST_FENCE"; echo "$HOLDFAST_TOKEN"; read -r _; exit 7'
    with place.start("--", "sh", "-c", told) as running:
        name, fence = running.says().split()
        assert name == NAME
        assert server.command("GET", f"{KEY}:fence") == fence.encode()
        assert server.command("GET", KEY) == running.says().encode()
        assert running.end() == (7, "", "")
    assert server.command("EXISTS", KEY) == 0


@one_kind
def test_a_signal_that_ends_it_is_told_as_shells_do(place: Place) -> None:
    assert place.run("--", "sh", "-c", "kill -KILL $$").status == 128 + signal.SIGKILL


@one_kind
def test_what_is_piped_in_arrives(place: Place) -> None:
    with place.start("--", "sort") as running:
        out, _ = running.process.communicate(b"b\na\n", timeout=PATIENCE)
    assert out == b"a\nb\n"


@one_kind
def test_who_is_at_the_other_end_of_a_pipe_sees_the_command_close_it(place: Place) -> None:
    with place.start(
        "--", "sh", "-c", "exec <&- >&-; while [ ! -e seen ]; do sleep 0.01; done"
    ) as it:
        assert it.says() == ""
        (place.folder / "seen").touch()
        assert it.end().status == 0


@one_kind
@on_linux
def test_it_finds_signals_and_environment_as_if_run_directly(place: Place) -> None:
    signals = "while read -r line; do case $line in Sig[IBC]*) echo $line;; esac; done"
    look = ["sh", "-c", f"{signals} </proc/$$/status; env"]
    env = environment(HOLDFAST_URL=place.url, LANG="C")
    del env["PYTHONUTF8"]
    # As interrupts are in what a script runs with &.
    ignoring = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh"]
    direct, under = (
        subprocess.run(each, cwd=place.folder, env=env, capture_output=True, check=True).stdout
        for each in ([*ignoring, *look], [*ignoring, *HOLDFAST, "run", NAME, *look])
    )
    added = {line.partition(b"=")[0] for line in {*under.splitlines()} - {*direct.splitlines()}}
    assert added == {b"HOLDFAST_LOCK", b"HOLDFAST_FENCE", b"HOLDFAST_TOKEN"}
    assert {*direct.splitlines()} < {*under.splitlines()}


@one_kind
@on_linux
def test_what_was_closed_stays_closed(place: Place, server: Server) -> None:
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
    # ls opens the folder, by the first number that is free.
    assert re.findall(r"(\d+) -> (\S+)", shown)[0][1].startswith("/proc")
    assert "null" not in shown


@one_kind
def test_a_script_without_an_interpreter_is_the_shells(place: Place) -> None:
    script = place.folder / "script"
    script.write_text("echo from $0 $1\n")
    script.chmod(0o755)
    assert place.run("--", "./script", "here").out == "from ./script here\n"


@one_kind
def test_a_command_that_cannot_be_run_is_told_without_asking_for_the_lock(
    place: Place, server: Server
) -> None:
    (place.folder / "letter").write_text("Dear")
    assert place.run("--", "nonesuch") == (127, "", "holdfast: nonesuch: command not found\n")
    assert place.run("--", "./nonesuch").status == 127
    assert place.run("--", "./letter") == (126, "", "holdfast: ./letter: Permission denied\n")
    assert place.run("--", "./") == (126, "", "holdfast: ./: Is a directory\n")
    assert server.command("DBSIZE") == 0


@one_kind
def test_a_command_that_is_gone_when_its_turn_comes_is_told_too(
    place: Place, server: Server
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
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs to wait without taking note")
def test_why_it_cannot_be_run_is_told_also_if_it_has_ended_before_we_look(place: Place) -> None:
    script = place.folder / "script"
    script.write_text("#!/nonesuch\n")
    script.chmod(0o755)
    told = subprocess.run(
        [sys.executable, "-c", SLOW, "run", NAME, "./script"],
        cwd=place.folder,
        env=environment(HOLDFAST_URL=place.url),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    why = "holdfast: ./script: its interpreter does not exist\n"
    assert (told.returncode, told.stderr) == (127, why)


@one_kind
def test_options_stand_before_the_name(place: Place) -> None:
    told = place.run("--", "--ttl", "5")
    assert told.status == 2
    assert "NAME -- COMMAND" in told.err


# ---- waiting


def test_a_lock_that_others_hold_is_not_waited_for_longer_than_wanted(
    place: Place, server: Server
) -> None:
    with holdfast.Client(server.url) as client, client.lock(NAME, label="first"):
        assert place.run("--no-wait", "--", "touch", "x") == (1, "", "")
        late = place.run("-v", "-w", "1", "-E", "42", "--", "touch", "x")
    assert late.status == 42
    *_, last = late.err.splitlines()  # a long wait is reported before
    assert re.fullmatch(r"holdfast: 'nightly' is locked: .*, pid \d+ \(first\), .*", last)
    assert not (place.folder / "x").exists()
    assert waiters(server, QUEUE) == 0


@pytest.mark.parametrize("many", [12, pytest.param(50, marks=pytest.mark.long)])
def test_many_at_once_run_one_after_the_other_in_the_order_of_the_queue(
    place: Place, server: Server, many: int
) -> None:
    words = [str(many), "run", "--ttl", "10", NAME, "--", "sh", "-c", ALONE]
    crowd = [sys.executable, "-c", CROWD, *words]
    with holdfast.Client(server.url) as client, client.lock(NAME) as lease:
        running = subprocess.Popen(
            crowd,
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
def test_ctrl_c_ends_the_waiting_and_nothing_stays_in_line(place: Place, server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock(NAME, label="first"):
        with place.shell() as screen:
            screen.enter(f"$hf {NAME} -- touch x")
            screen.until(r"holdfast: waiting for 'nightly': .*, pid \d+ \(first\)")
            screen.press(CTRL_C)
            screen.until("ready> ")
            assert status_in(screen) == 130
        assert waiters(server, QUEUE) == 0
    assert not (place.folder / "x").exists()


@one_kind_of_its_own
@with_bash
def test_who_waits_at_a_terminal_is_told_when_the_server_is_away(
    own_place: Place, own_server: Server
) -> None:
    with holdfast.Client(own_server.url) as client:
        lease = client.lock(NAME, label="first").acquire()
        with own_place.shell() as screen:
            screen.enter(f"$hf {NAME} -- echo done")
            screen.until(r"waiting for 'nightly': .* \(first\)")
            own_server.freeze()
            screen.until(r"waiting for 'nightly': cannot reach")
            own_server.thaw()
            lease.release()
            screen.until("done")


@one_kind
def test_sigterm_ends_the_waiting_too(place: Place, server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock(NAME):
        with place.start("--", "touch", "x") as running:
            eventually(lambda: waiters(server, QUEUE), within=PATIENCE)
            running.process.terminate()
            assert running.end() == (128 + signal.SIGTERM, "", "")
        assert waiters(server, QUEUE) == 0


# ---- signals and the terminal


@one_kind
def test_signals_sent_to_us_are_the_commands(place: Place) -> None:
    names = ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGQUIT", "SIGWINCH"]
    with place.start("--", sys.executable, "-S", "-c", TELL, *names) as running:
        assert running.says() == "begun"
        for name in names:
            running.process.send_signal(signal.Signals[name])
            assert running.says() == name
        running.process.terminate()
        assert running.end() == (128 + signal.SIGTERM, "", "")


@one_kind
@with_bash
def test_ctrl_c_is_the_commands(place: Place, server: Server) -> None:
    with place.shell() as screen:
        screen.enter(f"$hf {NAME} -- sh -c 'echo be\"\"gun; exec sleep 60'")
        screen.until("begun")
        screen.press(CTRL_C)
        screen.until("ready> ")
        assert status_in(screen) == 130
        assert server.command("EXISTS", KEY) == 0
        # A shell that reads has its own opinion of Ctrl-C.
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
def test_ctrl_z_stops_the_job_and_fg_and_bg_go_on_with_it(place: Place, server: Server) -> None:
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
        screen.hand_to_a_job()
        screen.press(CTRL_C)
        screen.until("ready> ")
        assert status_in(screen) == 130
    assert token
    assert server.command("EXISTS", KEY) == 0


@one_kind
@with_bash
def test_a_command_that_was_stopped_for_too_long_never_goes_on(
    place: Place, server: Server
) -> None:
    (place.folder / "beat.py").write_text(BEAT)
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


@one_kind
@with_bash
def test_others_of_a_pipeline_keep_the_terminal(place: Place) -> None:
    written = "echo begun; while [ ! -e answered ]; do sleep 0.01; done; echo written"
    pager = "read -r _; echo asks; read -r answer < /dev/tty; touch $answer; cat"
    with place.shell() as screen:
        screen.enter(f"$hf {NAME} -- sh -c '{written}' | sh -c '{pager}'")
        screen.until("\nasks")
        screen.enter("answered")
        screen.until("\nwritten")
        screen.until("ready> ")
        # And the command has it when it needs it.
        screen.enter(f"$hf {NAME} -- sh -c 'echo asks; read -r answer; echo $answer' | cat")
        screen.until("\nasks")
        screen.enter("good")
        screen.until("\ngood")
        screen.until("ready> ")
        # A script that is interrupted ends as a whole.
        screen.enter(f"sh -c '$hf {NAME} -- sh -c \"echo begun; exec sleep 60\"; echo on'")
        screen.until("\nbegun")
        screen.press(CTRL_C)
        screen.until("ready> ")
        assert status_in(screen) == 130


@one_kind
@with_bash
def test_ctrl_c_ends_the_loop_around_it_too(place: Place, server: Server) -> None:
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


@one_kind
def test_more_of_the_same_does_not_disturb_its_leaving_the_line(
    place: Place, server: Server
) -> None:
    with holdfast.Client(server.url) as client, client.lock(NAME):
        with place.start("--", "true") as running:
            eventually(lambda: waiters(server, QUEUE), within=PATIENCE)
            give_up_at = time.monotonic() + PATIENCE
            while running.process.poll() is None:
                assert time.monotonic() < give_up_at, "it does not end"
                running.process.send_signal(signal.SIGINT)
            assert running.end() == (-signal.SIGINT, "", "")
        assert waiters(server, QUEUE) == 0


@one_kind
@with_bash
def test_a_killed_command_leaves_the_terminal_usable(place: Place) -> None:
    with place.shell() as screen:
        screen.enter("before=$(stty -g)")
        screen.enter(
            f"$hf {NAME} -- sh -c 'stty raw -echo; kill -KILL $$'; [ $(stty -g) = $before ]"
        )
        screen.until("ready> ")
        assert status_in(screen) == 0


# ---- when the lock cannot be kept


def test_when_the_server_hangs_all_are_dead_before_the_lock_is_anybodys(
    own_place: Place, own_server: Server
) -> None:
    (own_place.folder / "beat.py").write_text(BEAT)
    pair = f"{sys.executable} -S beat.py first & exec {sys.executable} -S beat.py second"
    files = [own_place.folder / "first", own_place.folder / "second"]
    with own_place.start("--ttl", "2", "--", "sh", "-c", pair) as running:
        eventually(lambda: all(file.exists() for file in files), within=PATIENCE)
        before = own_server.command("PEXPIRETIME", KEY)
        # Just renewed: it will not be before we have frozen it.
        eventually(lambda: own_server.command("PEXPIRETIME", KEY) > before)
        expires = own_server.command("PEXPIRETIME", KEY) / 1000
        own_server.freeze()
        ended = running.end()
        lived = [beats(file) for file in files]
        own_server.thaw()
    assert ended.status == 75
    assert re.fullmatch(
        r"holdfast: the lease of 'nightly' \(fence \d+\) is about to be lost: the server has not "
        r"renewed it: the command is (asked to end, and killed after 0\.\d s|killed)\n",
        ended.err,
    )
    for each in lived:
        assert "TERM" in each or "asked" not in ended.err
        assert float(each[-1]) < expires
    assert own_place.run("--timeout", "5", "--", "true").status == 0


def test_when_the_lock_is_taken_away_all_are_ended(place: Place, server: Server) -> None:
    (place.folder / "beat.py").write_text(BEAT)
    pair = f"{sys.executable} -S beat.py beats & echo $!; trap 'exit 0' TERM; wait"
    with place.start("--ttl", TTL, "--", "sh", "-c", pair) as running:
        grandchild = int(running.says())
        eventually((place.folder / "beats").exists, within=PATIENCE)
        server.command("SET", KEY, "another's")
        ended = running.end()
        assert ended.status == 75
        assert ended.err.count("\n") == 1
        assert "was lost: the server says that it is no longer ours" in ended.err
        assert has_ended(grandchild)
    assert server.command("GET", KEY) == b"another's"


@one_kind
def test_max_hold_ends_the_command(place: Place, server: Server) -> None:
    with place.start("--ttl", TTL, "--max-hold", "0.1", "--", "sleep", "60") as running:
        ended = running.end()
    assert ended.status == 124
    assert "has been held for 0.1 s: the command is asked to end" in ended.err
    assert server.command("EXISTS", KEY) == 0


@one_kind
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_command_does_not_outlive_a_holdfast_that_is_killed_or_stopped(
    how: signal.Signals, place: Place, server: Server
) -> None:
    (place.folder / "beat.py").write_text(BEAT)
    pair = f"{sys.executable} -S beat.py beats & echo $!; echo $$; wait"
    # Of a holdfast that is stopped a twentieth is left for killing, on a machine that is busy.
    ttl = TTL if how is signal.SIGKILL else "3"
    with place.start("--ttl", ttl, "--", "sh", "-c", pair) as running:
        pids = [int(running.says()) for _ in range(2)]
        eventually((place.folder / "beats").exists, within=PATIENCE)
        running.process.send_signal(how)
        with holdfast.Client(server.url) as client, client.lock(NAME):
            assert all(map(has_ended, pids))
        running.process.send_signal(signal.SIGCONT)
        ended = running.end()
    if how is signal.SIGKILL:
        assert ended.err == "holdfast: it was killed itself: the command is killed too\n"
    else:
        assert ended.status == 75
        assert re.search(r"was lost: its time ran out|was about to be lost", ended.err)


@one_kind
def test_nothing_is_lost_where_open_files_cannot_be_listed(place: Place) -> None:
    # In a chroot without /proc, say. That nobody keeps the output open ends the run.
    told = subprocess.run(
        [sys.executable, "-c", BARE, "run", NAME, "--", "echo", "hi"],
        env=environment(HOLDFAST_URL=place.url),
        capture_output=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (told.returncode, told.stdout, told.stderr) == (0, b"hi\n", b"")


@one_kind
@on_linux
def test_the_kernel_kills_the_command_should_nobody_else_be_left_to(place: Place) -> None:
    with place.start("--", "sh", "-c", "echo $$; exec sleep 60") as running:
        command = int(running.says())
        ours = f"/proc/{running.process.pid}/task/{running.process.pid}/children"
        for pid in Path(ours).read_text().split():
            if int(pid) != command:
                os.kill(int(pid), signal.SIGKILL)
        running.process.kill()
        eventually(lambda: has_ended(command))


@one_kind
def test_a_command_that_outlives_its_parent_is_left_alone(place: Place) -> None:
    with place.start("--", "sh", "-c", "sleep 60 >&- 2>&- & echo $!") as running:
        left = int(running.says())
        assert running.end().status == 0
    assert not has_ended(left)
    os.kill(left, signal.SIGKILL)


@one_kind_of_its_own
def test_a_lock_that_cannot_be_released_is_told_and_the_status_stays(
    own_place: Place, own_server: Server
) -> None:
    with own_place.start("--", "sh", "-c", "echo begun; read -r _; exit 4") as running:
        running.says()
        own_server.kill()
        ended = running.end()
    assert ended.status == 4
    assert re.fullmatch(r"holdfast: 'nightly' .* not released.*\n", ended.err)


# ---- servers


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    port, claim = claim_port()
    with claim:
        told = Place(tmp_path, f"redis://127.0.0.1:{port}").run("--", "touch", "x")
    assert told.status == 69
    assert re.fullmatch(r"holdfast: 'nightly' was not acquired: cannot reach .*\n", told.err)
    assert not (tmp_path / "x").exists()


@one_kind
def test_run_without_waiting_says_on_a_terminal_who_holds_the_lock(
    place: Place, server: Server
) -> None:
    with place.start("--label", "first", "--", "sh", "-c", "echo; read -r _") as running:
        running.says()
        with Terminal(*HOLDFAST, "run", "-n", NAME, "true", HOLDFAST_URL=server.url) as terminal:
            terminal.shows(f"holdfast: '{NAME}' is locked: ", ", pid ", "(first)")
            assert terminal.ends() == 1


@pytest.mark.usefixtures("runtime")
def test_run_says_once_that_the_embedded_server_is_local_unless_it_was_chosen() -> None:
    for options, url in (([], ""), (["--local"], ""), (["--url", "local"], ""), ([], "local")):
        told = subprocess.run(
            [*HOLDFAST, "run", *options, NAME, "printenv", "HOLDFAST_LOCK"],
            env=environment(HOLDFAST_URL=url),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert (told.returncode, told.stdout) == (0, f"{NAME}\n")
        if options or url:
            assert told.stderr == ""
        else:
            assert told.stderr.count("\n") == 1
            assert "exclude processes of this user on this machine only" in told.stderr
            assert "HOLDFAST_URL" in told.stderr


def test_a_server_is_named_once() -> None:
    words = [*HOLDFAST, "run", "--local", "--url", "redis://x", NAME, "true"]
    told = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "--url or --local" in " ".join(told.stderr.split())


@pytest.mark.parametrize("kind", programs())
def test_a_wrong_password_is_told(kind: str, tmp_path: Path) -> None:
    with Server.start(programs()[kind], "--requirepass", "right") as server:
        wrong = server.url.replace("//", "//:wrong@")
        told = Place(tmp_path, wrong).run("--", "touch", "x")
    assert told.status == 78
    assert "refuses this user and password" in told.err
    assert told.err.count("\n") == 1


@one_kind
def test_the_server_can_be_given_as_an_option(tmp_path: Path, server: Server) -> None:
    told = Place(tmp_path, "redis://127.0.0.1:1").run("--url", server.url, "--", "true")
    assert told == (0, "", "")


def test_settings_that_all_must_agree_on_can_be_given(tmp_path: Path) -> None:
    place = Place(tmp_path, "redis://127.0.0.1:1 redis://127.0.0.1:2 redis://127.0.0.1:3")
    told = place.run("--ttl", "120", "--", "true")
    assert told.status == 78
    assert "longest_ttl=120" in told.err
    assert place.run("--ttl", "120", "--longest-ttl", "120", "-n", "--", "true").status == 69


@one_kind
def test_a_lock_delay_is_kept(place: Place, server: Server) -> None:
    with place.start("--lock-delay", "9", "--", "sh", "-c", "echo; read -r _; exit 0") as running:
        running.says()
        assert server.command("PTTL", KEY) > 31_000
        assert running.end() == (0, "", "")


@one_kind
def test_without_the_replicas_that_must_have_it_nobody_has_it(place: Place) -> None:
    told = place.run("--replicas", "1", "--no-wait", "--", "touch", "x")
    assert told.status == 69
    assert told.err.count("\n") == 1
    assert not (place.folder / "x").exists()


# ---- odd names


@pytest.mark.parametrize("name", ["two\nlines \x1b[31m \u202e".encode() + b"\xff\xfe", b"x" * 1024])
@one_kind
def test_an_odd_name_arrives_as_it_is_and_breaks_no_line(
    name: bytes, place: Place, server: Server
) -> None:
    command = ("sh", "-c", "printenv HOLDFAST_LOCK; read -r _")
    with place.start("-v", "--", *command, name=name) as running:
        eventually(lambda: server.command("EXISTS", b"holdfast:{%b}" % name), within=PATIENCE)
        out, told = running.process.communicate(b"\n", timeout=PATIENCE)
    assert out == name + b"\n"
    assert told.count(b"\n") == 1
    assert told.decode()[:-1].isprintable()
    assert len(told) < 200


def test_what_others_wrote_is_shown_on_one_line_and_does_nothing() -> None:
    assert plain("é 漢 'a' \\") == "é 漢 'a' \\"
    assert plain("\n\x1b\x7f\x9b") == "\\n\\e\\x7f\\x9b"
    assert plain(b"\xff".decode(errors="surrogateescape")) == "\\xff"
    assert plain("\ud800\u202e\u2028\U000e0001") == "\\ud800\\u202e\\u2028\\U000e0001"
    assert plain("abcdef", 4) == "abc…"
