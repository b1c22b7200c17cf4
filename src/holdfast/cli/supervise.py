"""Watching over a command that runs under a lease: what is sent to it, and that it ends in time.

The rules:

1. The command is dead before the deadline of its lease, whatever the server, the network or the
   command does. It is asked to end (TERM) when a quarter of the ttl is left, which in health never
   happens: renewals begin with two thirds left. It is killed with a tenth left, and the dead man's
   switch does so with a twentieth left, should we not.
2. A loss that is learnt of, a lock that was broken say, leaves it a moment between the two.
3. It is the whole process group that is asked, killed, or sent what was sent to us. Once it was
   asked to end, nobody of it stays; when the command ends by itself, others may go on.
4. While it is stopped with us (Ctrl-Z) nobody renews. So before it goes on, the server is asked.
5. Whatever happens here, the command has ended before the lock is released.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast.cli import Interrupted
from holdfast.cli.console import plain, say
from holdfast.errors import HoldfastError, LeaseLost
from holdfast.wire.clock import now

if TYPE_CHECKING:
    from holdfast.cli.child import Child, UnrunnableError
    from holdfast.cli.foreground import Foreground
    from holdfast.cli.switch import Switch
    from holdfast.faces.client import Lease

ASKED, KILLED, SWITCHED = 1 / 4, 1 / 10, 1 / 20
"""Parts of the ttl that are left when the command is asked to end, is killed, and is for sure."""

FRESH = 3 / 4
"""Part of the ttl that a lease has when the command begins: one that was handed over has less."""

GRACE = 1.0
"""Seconds, at most, between asking and killing when the lock is another's already."""

LOOK, LONGEST_WAIT = 0.02, 1.0
"""Seconds between two looks at what is left of a group, and between two looks at the clock: waits
do not count a machine's sleep."""

CLEANING = 5.0
"""Seconds after a signal that ended the waiting in which others do not disturb what is left to do:
timeout(1) sends two at once, and people press Ctrl-C again."""

SHOWN = 60
"""Characters of a lock's name in a message."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTSTP)
STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


class CommandEnd(NamedTuple):
    """How the command ended, and whether it had to: because the lease was lost, or of max_hold.

    The status is -n if it was ended by signal n.
    """

    status: int
    had_to: Literal["lost", "max_hold"] | None
    failure: UnrunnableError | None


class Signals:
    """The signals that are sent to us: until `noted` they end us, from then on they are read here.

    Those that we were told to ignore are left alone.
    """

    def __init__(self) -> None:
        # A terminal may be set to stop whoever writes to it from the background: not us, who then
        # could not say why a command is ended. Threads to come have it from this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        self.ready, self._noted = os.pipe()
        os.set_blocking(self._noted, False)
        os.set_blocking(self.ready, False)
        self._note = False
        self._unmoved_until = 0.0
        for number in ENDING:
            self._handle(number)

    def _handle(self, number: signal.Signals) -> None:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, self._strike)

    def _strike(self, number: int, _frame: object) -> None:
        if not self._note and now() >= self._unmoved_until:
            self._unmoved_until = now() + CLEANING
            raise Interrupted(number)

    def noted(self) -> None:
        """Let nothing interrupt us any more."""
        # Noted first, not raised second: what comes in between is both, and not neither.
        signal.set_wakeup_fd(self._noted, warn_on_full_buffer=False)
        self._note = True
        for number in (*PASSED_ON, signal.SIGCONT):
            self._handle(number)
        signal.signal(signal.SIGCHLD, self._strike)  # also if ignored: then nobody could wait

    def rouse(self) -> None:
        """Have whoever waits for `ready` look about. Called from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._noted, b"\0")

    def read(self) -> list[int]:
        """Return what has come since the last time."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self.ready, 65536) if number]
        return []

    def stop_us(self, number: signal.Signals) -> bool:
        """Stop this process as that signal does; False if there is nobody who could continue it."""
        earlier = self.read()
        before = signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.signal(number, before)
        poll = select.poll()
        poll.register(self.ready, select.POLLIN)
        poll.poll(LOOK * 1000)
        meanwhile = self.read()
        others = [each for each in (*earlier, *meanwhile) if each != signal.SIGCONT]
        os.write(self._noted, bytes(others))
        return signal.SIGCONT in meanwhile


class Supervisor:
    """Watches over one command, from its beginning to its end."""

    def __init__(  # noqa: PLR0913 - all that has to do with it
        self,
        lease: Lease,
        child: Child,
        *,
        signals: Signals,
        switch: Switch,
        terminal: Foreground,
        ttl: float,
        max_hold: float | None,
    ) -> None:
        self._lease = lease
        self._child = child
        self._signals = signals
        self._switch = switch
        self._terminal = terminal
        self._ttl = ttl
        self._max_hold = max_hold
        self._hold_until = float("inf") if max_hold is None else now() + max_hold
        self._kill_at = float("inf")
        self._had_to: Literal["lost", "max_hold"] | None = None
        self._stopped = False
        self._poll = select.poll()
        self._poll.register(signals.ready, select.POLLIN)

    def run(self) -> CommandEnd:
        """Begin the command, and return when it has ended.

        Raises:
            HoldfastError: the lease could not be kept; the command was not begun.
        """
        if self._lease.remaining() < FRESH * self._ttl:
            self._lease.extend(self._ttl)
        self._lease.on_lost(lambda *_: self._signals.rouse())
        self._hold_off(now(), self._lease.remaining())
        if self._terminal.wanted:
            self._terminal.lend(self._child.pid)
        try:
            self._child.begin(
                {
                    "HOLDFAST_LOCK": self._lease.name,
                    "HOLDFAST_FENCE": str(self._lease.fence),
                    "HOLDFAST_TOKEN": self._lease.token,
                }
            )
            _let_go_of_input_and_output()
            status = self._watch()
            if self._switch.disarm() and self._had_to is None:  # we were stopped, say
                self._end("lost", "was about to be lost", 0.0)
        finally:
            self._child.end()
            self._terminal.take_back(mend=True)
        return CommandEnd(status, self._had_to, self._child.failure())

    def _watch(self) -> int:
        while (status := self._look()) is None:
            self._keep()
            self._wait()
        while self._kill_at < float("inf") and self._child.has_company:
            self._keep()
            self._poll.poll(LOOK * 1000)
            self._signals.read()
        return status

    # The lease

    def _keep(self) -> None:
        """End the command when it is time to."""
        at, left = now(), self._lease.remaining()
        if self._had_to is None:
            if left <= 0:
                self._lost()
            elif left < ASKED * self._ttl:
                why = "is about to be lost: the server has not renewed it"
                self._end("lost", why, left - KILLED * self._ttl)
            elif at >= self._hold_until:
                why = f"has been held for {self._max_hold:g} s"
                self._end("max_hold", why, (ASKED - KILLED) * self._ttl)
            else:
                self._hold_off(at, left)
        if at >= self._kill_at:
            self._kill()

    def _hold_off(self, at: float, left: float) -> None:
        """Keep the switch from killing the command for as long as the lease is valid."""
        self._switch.hold_off(at + left - SWITCHED * self._ttl)

    def _lost(self) -> None:
        reason, why = "expired", "was lost"
        try:
            self._lease.check()
        except LeaseLost as error:
            reason, why = error.reason, f"was lost: {str(error).rpartition(': ')[2]}"
        # Learnt in time, it is another's, or soon; at its end, it may be another's since long.
        in_time = reason in {"taken", "key_missing"}
        grace = min(GRACE, (ASKED - KILLED) * self._ttl) if in_time else 0.0
        self._end("lost", why, 0.0 if self._stopped else grace)

    def _end(self, had_to: Literal["lost", "max_hold"], why: str, grace: float) -> None:
        self._had_to = had_to
        self._kill_at = now() + max(0.0, grace)
        while_stopped = " while the command was stopped" if self._stopped else ""
        name = f"'{plain(self._lease.name, SHOWN)}' (fence {self._lease.fence})"
        if grace > 0:
            self._child.signal(signal.SIGTERM)
            self._child.signal(signal.SIGCONT)
            what = f"asked to end, and killed after {grace:.1f} s"
        else:
            self._kill()
            what = "killed"
        say(f"the lease of {name} {why}{while_stopped}: the command is {what}")

    def _kill(self) -> None:
        self._kill_at = float("inf")
        if not self._child.signal(signal.SIGKILL):
            say("the command is another user's and cannot be killed: it may go on without the lock")

    # The command

    def _look(self) -> int | None:
        """Take in what became of the command; return its status if it has ended."""
        while (status := self._child.look()) is not None:
            if os.WIFSTOPPED(status):
                self._has_stopped(os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                self._stopped = False
            else:
                return os.waitstatus_to_exitcode(status)
        return None

    def _has_stopped(self, number: int) -> None:
        self._stopped = True
        needs_terminal = number in {signal.SIGTTIN, signal.SIGTTOU}
        if needs_terminal and self._terminal.lend(self._child.pid):
            self._terminal.wanted = True
            self._child.signal(signal.SIGCONT)
        elif self._terminal.lent or (self._terminal.exists and number in STOPS):
            self._terminal.wanted = self._terminal.wanted or self._terminal.lent
            self._terminal.take_back()
            # Whoever started us sees a job that has stopped, and why.
            stops_us = signal.SIGTTIN if needs_terminal else signal.SIGTSTP
            if not self._signals.stop_us(stops_us) and needs_terminal:
                self._child.signal(signal.SIGHUP)  # nobody will ever give it the terminal
            self._go_on()

    def _go_on(self) -> None:
        """Renew the lease, which nobody did while we were stopped, and let the command go on.

        If it was lost, the command never goes on: killing it while it is stopped is as good as
        having killed it before the deadline.
        """
        if not self._stopped and self._lease.remaining() >= ASKED * self._ttl:
            return
        try:
            self._lease.extend(self._ttl)
        except LeaseLost:
            self._keep()
            return
        except HoldfastError:
            pass  # the deadline stands, and is kept
        if self._stopped:
            if self._terminal.wanted:
                self._terminal.lend(self._child.pid)
            self._child.signal(signal.SIGCONT)

    def _wait(self) -> None:
        """Wait until something happens or is due, and pass on what was sent to us."""
        due = min(
            self._kill_at - now(),
            float("inf") if self._had_to else self._hold_until - now(),
            LONGEST_WAIT if self._had_to else self._lease.remaining() - ASKED * self._ttl,
            LONGEST_WAIT,
        )
        self._poll.poll(max(0.0, due) * 1000 + 1)
        for number in self._signals.read():
            if number in PASSED_ON:
                self._child.signal(number)
            elif number == signal.SIGCONT:
                self._go_on()


def _let_go_of_input_and_output() -> None:
    """Have the command alone hold what it reads and writes: whoever is at the other end sees."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    os.close(nothing)
