"""Requests whose replies carry no serial: scripts of the user.

A PING with a serial follows each, in the same write. Its reply is the seal of the one before: if
a reply was lost or doubled on the way, the seal is not where it should be, and neither counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import ConfigurationError, ScriptFailed
from holdfast.wire.packing import StrayAnswer
from holdfast.wire.refusals import is_denial, is_of_server

if TYPE_CHECKING:
    from collections.abc import Generator

    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script
    from holdfast.wire.packing import Command

Dialogue: TypeAlias = "Generator[Command, Any, Reply]"
"""Yields the commands to send, is sent their replies (an error reply as an exception), and returns
the reply of the script. Another command follows only one that was refused, and changed nothing."""

Step: TypeAlias = "tuple[Script, Keys, tuple[str | bytes, ...]]"

_UNKNOWN_SCRIPT = "NOSCRIPT No matching script"  # the first word alone may be a script's own


def seal(serial: bytes) -> bytes:
    """Pack the command whose answer is the serial."""
    return b"*2\r\n$4\r\nPING\r\n$3\r\n%b\r\n" % serial


def check_seal(answer: object, serial: bytes) -> None:
    """See that an answer is the seal, so that the one before it may be believed.

    Raises:
        StrayAnswer: it is not.
        ConfigurationError: the server makes no seals.
    """
    if answer == serial:
        return
    if is_denial(str(answer)):
        raise ConfigurationError(
            "it cannot be known whether this was carried out: the server denies PING, which tells "
            f"one's own answer from another's: grant +ping ({answer})"
        )
    raise StrayAnswer


def run_script(step: Step) -> Dialogue:
    """Run a script of the user; its error is returned as `ScriptFailed`."""
    script, keys, args = step
    answer = yield ("EVALSHA", script.sha, str(len(keys)), *keys, *args)
    if isinstance(answer, hiredis.ReplyError) and str(answer).startswith(_UNKNOWN_SCRIPT):
        answer = yield ("EVAL", script.text, str(len(keys)), *keys, *args)
    if isinstance(answer, hiredis.ReplyError) and not is_of_server(str(answer)):
        return ScriptFailed(f"the script failed: {answer}")
    return answer
