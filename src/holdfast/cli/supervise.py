"""Supervises the command of `holdfast run`: forwards signals, and ends it before the deadline.

Rules:

1. The command has ended before the deadline of its lease, whatever the server, the network or the
   command does. It receives TERM when a quarter of the ttl is left. Without a failure that never
   happens, because renewals start with two thirds left. It receives KILL with a tenth left. If
   holdfast cannot send that, the dead man's switch (`switch.py`) does with a twentieth left.
2. If a loss is detected before the deadline (a broken lock, for example), the command has up to
   `GRACE` seconds between TERM and KILL.
3. Signals go to the whole process group. After TERM no process of it may survive. If the command
   ends by itself, other processes of its group may continue.
4. While holdfast and the command are stopped (Ctrl-Z), the lease is not renewed. So holdfast
   renews it before the command continues.
5. The command always ends before the lock is released.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast.cli import Interrupted
from holdfast.cli.console import report_line, sanitized
from holdfast.errors import HoldfastError, LeaseLost
from holdfast.wire.clock import now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.api.client import Lease
    from holdfast.api.multi_lock import MultiLease
    from holdfast.cli.child import Child, UnrunnableError
    from holdfast.cli.foreground import Foreground
    from holdfast.cli.switch import Switch

TERM_LEFT, KILL_LEFT, SWITCH_LEFT = 1 / 4, 1 / 10, 1 / 20
"""Fractions of the ttl that are left at TERM, at KILL, and when the switch sends KILL."""

START_LEFT = 3 / 4
"""Fraction of the ttl that must be left at the start; a lease that was handed over has less."""

GRACE = 1.0
"""Longest time between TERM and KILL, in seconds, after the lock was taken."""

POLL_INTERVAL, LONGEST_WAIT = 0.02, 1.0
"""Seconds between checks of the group, and longest wait between checks of the clock: poll(2) does
not count the time for which the machine sleeps."""

CLEANUP_TIME = 5.0
"""Seconds after the signal that ended the waiting in which further signals are ignored. They would
interrupt the cleanup: timeout(1) sends two at once, and people press Ctrl-C again."""

NAME_MAX = 60
"""Longest name of a lock in a message, in characters."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTSTP)
STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def leases_of(lease: Lease | MultiLease, names: Sequence[str]) -> Sequence[Lease]:
    """Return the lease of each lock, in the order of the names."""
    from holdfast.api.multi_lock import MultiLease

    return [lease.leases[name] for name in names] if isinstance(lease, MultiLease) else [lease]


def _environment(leases: Sequence[Lease]) -> dict[str, str]:
    """Return the variables that describe the leases to the command.

    The variables without a number are those of the first lock, so that a command for one lock needs
    no number. The number of locks is set even for one: a command in another command's `holdfast
    run` would otherwise find that of the outer one.
    """
    environment = {"HOLDFAST_LOCKS": str(len(leases))}
    for number, lease in enumerate(leases, 1):
        for suffix in (f"_{number}", "")[: 2 if number == 1 else 1]:
            environment[f"HOLDFAST_LOCK{suffix}"] = lease.name
            environment[f"HOLDFAST_FENCE{suffix}"] = str(lease.fence)
            environment[f"HOLDFAST_TOKEN{suffix}"] = lease.token
    return environment


class CommandEnd(NamedTuple):
    """How the command ended, and why holdfast ended it, if it did.

    The status is -n if signal n ended the command.
    """

    status: int
    forced_by: Literal["lost", "max_hold"] | None
    failure: UnrunnableError | None


class Signals:
    """Signals sent to holdfast.

    Until `start_recording` they raise `Interrupted`; from then on `read` returns them. Signals that
    holdfast inherited as ignored stay ignored.
    """

    def __init__(self) -> None:
        # With `stty tostop`, a write from the background stops the process. holdfast must be able
        # to report why it ends the command. New threads inherit this mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        self.ready, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.set_blocking(self.ready, False)
        self._recording = False
        self._ignore_until = 0.0
        for number in ENDING:
            self._handle(number)

    def _handle(self, number: signal.Signals) -> None:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if not self._recording and now() >= self._ignore_until:
            self._ignore_until = now() + CLEANUP_TIME
            raise Interrupted(number)

    def start_recording(self) -> None:
        """Record signals from now on, instead of raising `Interrupted`."""
        # Invariant: no signal gets lost. In this order, a signal that arrives between the two lines
        # is recorded and raised. In the other order, it would be neither.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._recording = True
        for number in (*FORWARDED, signal.SIGCONT):
            self._handle(number)
        signal.signal(signal.SIGCHLD, self._on_signal)  # even if it was ignored: waitpid needs it

    def wake(self) -> None:
        """Make `ready` readable. May be called from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def read(self) -> list[int]:
        """Return the signals recorded since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self.ready, 65536) if number]
        return []

    def stop_self(self, number: signal.Signals) -> bool:
        """Stop this process by that signal; return False if that had no effect (no shell)."""
        earlier = self.read()
        before = signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.signal(number, before)
        poll = select.poll()
        poll.register(self.ready, select.POLLIN)
        poll.poll(POLL_INTERVAL * 1000)
        received = self.read()
        others = [each for each in (*earlier, *received) if each != signal.SIGCONT]
        os.write(self._writer, bytes(others))
        return signal.SIGCONT in received


class Supervisor:
    """Supervises one command, from its start to its end."""

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        lease: Lease | MultiLease,
        leases: Sequence[Lease],
        child: Child,
        *,
        signals: Signals,
        switch: Switch,
        terminal: Foreground,
        ttl: float,
        max_hold: float | None,
    ) -> None:
        self._lease = lease
        self._leases = leases
        self._child = child
        self._signals = signals
        self._switch = switch
        self._terminal = terminal
        self._ttl = ttl
        self._max_hold = max_hold
        self._hold_until = float("inf") if max_hold is None else now() + max_hold
        self._kill_at = float("inf")
        self._forced_by: Literal["lost", "max_hold"] | None = None
        self._stopped = False
        self._poll = select.poll()
        self._poll.register(signals.ready, select.POLLIN)

    def run(self) -> CommandEnd:
        """Start the command, and return when it has ended.

        Raises:
            HoldfastError: the lease could not be extended; the command was not started.
        """
        if self._lease.remaining() < START_LEFT * self._ttl:
            self._lease.extend(self._ttl)
        self._lease.on_lost(lambda *_: self._signals.wake())
        self._set_switch(now(), self._lease.remaining())
        if self._terminal.wanted:
            self._terminal.lend(self._child.pid)
        try:
            self._child.begin(_environment(self._leases))
            _detach_input_and_output()
            status = self._watch()
            # The switch may have killed it, if holdfast was stopped.
            if self._switch.disarm() and self._forced_by is None:
                self._end("lost", "was about to be lost", 0.0, [self._first_to_end()])
        finally:
            self._child.end()
            self._terminal.reclaim(restore=True)
        return CommandEnd(status, self._forced_by, self._child.failure())

    def _watch(self) -> int:
        while (status := self._poll_child()) is None:
            self._enforce_deadlines()
            self._wait()
        while self._kill_at < float("inf") and self._child.group_exists:
            self._enforce_deadlines()
            self._poll.poll(POLL_INTERVAL * 1000)
            self._signals.read()
        return status

    # Deadlines of the lease

    def _enforce_deadlines(self) -> None:
        """Send TERM or KILL to the command when they are due."""
        at, left = now(), self._lease.remaining()
        if self._forced_by is None:
            if left <= 0:
                self._on_lost()
            elif left < TERM_LEFT * self._ttl:
                why = "is about to be lost: the server has not renewed it"
                self._end("lost", why, left - KILL_LEFT * self._ttl, [self._first_to_end()])
            elif at >= self._hold_until:
                why = f"has been held for {self._max_hold:g} s"
                self._end("max_hold", why, (TERM_LEFT - KILL_LEFT) * self._ttl, self._leases)
            else:
                self._set_switch(at, left)
        if at >= self._kill_at:
            self._kill()

    def _set_switch(self, at: float, left: float) -> None:
        """Move the deadline of the switch to shortly before the lease ends."""
        self._switch.set_deadline(at + left - SWITCH_LEFT * self._ttl)

    def _on_lost(self) -> None:
        reason, why, lost = "expired", "was lost", [self._first_to_end()]
        try:
            self._lease.check()
        except LeaseLost as error:
            reason, why = error.reason, f"was lost: {str(error).rpartition(': ')[2]}"
            lost = [each for each in self._leases if each.name == error.lock]
        # A loss that the server reports is recent. At the deadline, another client may hold the
        # lock already.
        in_time = reason in {"taken", "key_missing"}
        grace = min(GRACE, (TERM_LEFT - KILL_LEFT) * self._ttl) if in_time else 0.0
        self._end("lost", why, 0.0 if self._stopped else grace, lost)

    def _first_to_end(self) -> Lease:
        return min(self._leases, key=lambda lease: lease.remaining())

    def _end(
        self,
        forced_by: Literal["lost", "max_hold"],
        why: str,
        grace: float,
        leases: Sequence[Lease],
    ) -> None:
        self._forced_by = forced_by
        self._kill_at = now() + max(0.0, grace)
        while_stopped = " while the command was stopped" if self._stopped else ""
        name = " and ".join(
            f"'{sanitized(lease.name, NAME_MAX)}' (fence {lease.fence})" for lease in leases
        )
        if grace > 0:
            self._child.signal(signal.SIGTERM)
            self._child.signal(signal.SIGCONT)
            what = f"receives TERM, and KILL after {grace:.1f} s"
        else:
            self._kill()
            what = "is killed"
        report_line(f"the lease of {name} {why}{while_stopped}: the command {what}")

    def _kill(self) -> None:
        self._kill_at = float("inf")
        if not self._child.signal(signal.SIGKILL):
            report_line(
                "the command runs as another user and cannot be killed: it may continue without "
                "the lock"
            )

    # The command

    def _poll_child(self) -> int | None:
        """Handle stops of the command; return its exit status if it has ended."""
        while (status := self._child.poll()) is not None:
            if os.WIFSTOPPED(status):
                self._on_stopped(os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                self._stopped = False
            else:
                return os.waitstatus_to_exitcode(status)
        return None

    def _on_stopped(self, number: int) -> None:
        self._stopped = True
        needs_terminal = number in {signal.SIGTTIN, signal.SIGTTOU}
        if needs_terminal and self._terminal.lend(self._child.pid):
            self._terminal.wanted = True
            self._child.signal(signal.SIGCONT)
        elif self._terminal.lent or (self._terminal.exists and number in STOPS):
            self._terminal.wanted = self._terminal.wanted or self._terminal.lent
            self._terminal.reclaim()
            # The shell that started holdfast sees a stopped job, and the reason.
            stops_us = signal.SIGTTIN if needs_terminal else signal.SIGTSTP
            if not self._signals.stop_self(stops_us) and needs_terminal:
                self._child.signal(signal.SIGHUP)  # no shell can move it to the foreground
            self._resume()

    def _resume(self) -> None:
        """Renew the lease, which was not renewed during the stop, and continue the command.

        If the lease was lost, the command is killed while it is stopped, and does not run again.
        That is as safe as killing it before the deadline.
        """
        if not self._stopped and self._lease.remaining() >= TERM_LEFT * self._ttl:
            return
        try:
            self._lease.extend(self._ttl)
        except LeaseLost:
            self._enforce_deadlines()
            return
        except HoldfastError:
            pass  # the old deadline still applies
        if self._stopped:
            if self._terminal.wanted:
                self._terminal.lend(self._child.pid)
            self._child.signal(signal.SIGCONT)

    def _wait(self) -> None:
        """Wait for a signal or the next deadline, and forward signals to the command."""
        due = min(
            self._kill_at - now(),
            float("inf") if self._forced_by else self._hold_until - now(),
            LONGEST_WAIT if self._forced_by else self._lease.remaining() - TERM_LEFT * self._ttl,
            LONGEST_WAIT,
        )
        self._poll.poll(max(0.0, due) * 1000 + 1)
        for number in self._signals.read():
            if number in FORWARDED:
                self._child.signal(number)
            elif number == signal.SIGCONT:
                self._resume()


def _detach_input_and_output() -> None:
    """Close stdin and stdout, so that the other ends of pipes detect the end of the command."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    os.close(nothing)
