"""The command line. What it needs beyond the library is imported when it runs."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

__all__ = ["Interrupted", "end_on_ctrl_c", "main", "quietly"]

NEEDED = {"click", "lupa", "rich", "typer"}
"""What the extra `cli` installs, by the names under which it is imported."""

AGAIN = 0.01
"""Seconds after which an interruption that Python discarded is raised again."""

UNWRITTEN = 74
"""The status when there is no room for the output: no command has it as an answer."""


class Interrupted(SystemExit):
    """A signal ends the program, as Ctrl-C does: silently, with the status that shells expect."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(128 + number)
        self.number = number


def quietly() -> None:
    """Say nothing of work that was never begun: that of simulated crashes, and of who is ended."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


def end_on_ctrl_c() -> None:
    """Have Ctrl-C raise `Interrupted`, unless the process ignores it, as a script's `command &`.

    Python discards an exception that is raised in a finalizer, in the callback of a weak reference
    (every import has some), or in the hook that is called for these. Then `Interrupted` is raised
    again a moment later: a timer sends SIGALRM.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    in_hook = False

    def interrupt(*_: object) -> None:
        if in_hook:
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            raise Interrupted

    def on_discarded(discarded: UnraisableHookArgs) -> None:
        nonlocal in_hook
        in_hook = True
        try:
            if isinstance(discarded.exc_value, Interrupted):
                signal.setitimer(signal.ITIMER_REAL, AGAIN)
            else:
                sys.__unraisablehook__(discarded)
        finally:
            in_hook = False

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = on_discarded


def main() -> None:
    """Run the command line."""
    quietly()
    end_on_ctrl_c()
    try:
        from holdfast.cli.app import app

        app(prog_name="holdfast")
    except ModuleNotFoundError as missing:
        if missing.name not in NEEDED:
            raise
        sys.exit(f"holdfast: {missing.name} is not installed: pip install 'holdfast[cli]'")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        message = f"holdfast: what was to be told could not be written: {error.strerror}\n"
        for stream, words in ((sys.stderr, message), (sys.stdout, "")):
            with contextlib.suppress(OSError, AttributeError):  # no room there either, or none
                stream.write(words)
                stream.flush()
            with contextlib.suppress(OSError, AttributeError):
                stream.close()  # else Python tries once more in the end, and says so
        sys.exit(UNWRITTEN)
