"""The command line. Its dependencies are imported only when it runs."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

__all__ = ["Interrupted", "end_on_ctrl_c", "ignore_unawaited_warnings", "main"]

CLI_PACKAGES = {"click", "lupa", "rich", "typer"}
"""Import names of the packages that the extra `cli` installs."""

RAISE_AGAIN_AFTER = 0.01
"""Seconds after which an `Interrupted` that Python discarded is raised again."""

OUTPUT_FAILED = 74
"""Exit status if the disk is full and the output cannot be written."""


class Interrupted(SystemExit):
    """Ends the program after a signal: without a message, with status 128 + signal number."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(128 + number)
        self.number = number


def ignore_unawaited_warnings() -> None:
    """Ignore warnings about coroutines that never ran: simulated crashes drop some."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


def end_on_ctrl_c() -> None:
    """Have Ctrl-C raise `Interrupted`, unless the process ignores SIGINT (`command &` in a script).

    Python discards an exception that is raised in a finalizer, in a weak reference callback (every
    import has some), or in `sys.unraisablehook`. A timer (SIGALRM) then raises `Interrupted` again
    after `RAISE_AGAIN_AFTER`.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    in_hook = False

    def interrupt(*_: object) -> None:
        if in_hook:
            signal.setitimer(signal.ITIMER_REAL, RAISE_AGAIN_AFTER)
        else:
            raise Interrupted

    def on_discarded(discarded: UnraisableHookArgs) -> None:
        nonlocal in_hook
        in_hook = True
        try:
            if isinstance(discarded.exc_value, Interrupted):
                signal.setitimer(signal.ITIMER_REAL, RAISE_AGAIN_AFTER)
            else:
                sys.__unraisablehook__(discarded)
        finally:
            in_hook = False

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = on_discarded


def main() -> None:
    """Run the command line."""
    ignore_unawaited_warnings()
    end_on_ctrl_c()
    try:
        from holdfast.cli.app import app

        app(prog_name="holdfast")
    except ModuleNotFoundError as missing:
        if missing.name not in CLI_PACKAGES:
            raise
        sys.exit(f"holdfast: {missing.name} is not installed: pip install 'holdfast[cli]'")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        message = f"holdfast: cannot write the output: {error.strerror}\n"
        for stream, words in ((sys.stderr, message), (sys.stdout, "")):
            with contextlib.suppress(OSError, AttributeError):  # disk full, or no such stream
                stream.write(words)
                stream.flush()
            with contextlib.suppress(OSError, AttributeError):
                stream.close()  # otherwise Python writes again at exit, and prints an error
        sys.exit(OUTPUT_FAILED)
