"""The command line. What it needs beyond the library is imported when it runs."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import warnings

__all__ = ["Interrupted", "main", "quietly"]

NEEDED = {"click", "lupa", "rich", "typer"}
"""What the extra `cli` installs, by the names under which it is imported."""

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


def main() -> None:
    """Run the command line."""
    quietly()

    def interrupt(*_: object) -> None:
        raise Interrupted

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a script's `command &` has it
        signal.signal(signal.SIGINT, interrupt)
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
