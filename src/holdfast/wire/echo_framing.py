"""Framing for replies without a serial: the scripts of the user.

A PING with the serial as its payload follows each script, in the same write. If the next reply is
that payload, the reply before it belongs to the script. If not, a reply was lost or duplicated on
the way, and neither is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import ConfigurationError, ScriptFailed
from holdfast.wire.error_replies import is_acl_denial, is_server_error
from holdfast.wire.packing import UnexpectedReply

if TYPE_CHECKING:
    from collections.abc import Generator

    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script
    from holdfast.wire.packing import Command

Dialogue: TypeAlias = "Generator[Command, Any, Reply]"
"""A generator that yields commands, receives their replies, and returns the reply of the script.

An error reply is sent into it as an exception object. It yields another command only after one that
was rejected without any effect.
"""

Step: TypeAlias = "tuple[Script, Keys, tuple[str | bytes, ...]]"
"""An atomic operation: a script with its keys and arguments."""

_UNKNOWN_SCRIPT = "NOSCRIPT No matching script"  # a script of the user may return NOSCRIPT too


def pack_echo(serial: bytes) -> bytes:
    """Pack a PING whose reply is the serial."""
    return b"*2\r\n$4\r\nPING\r\n$3\r\n%b\r\n" % serial


def check_echo(reply: object, serial: bytes) -> None:
    """Check that a reply is the echoed serial, so that the reply before it can be used.

    Raises:
        UnexpectedReply: it is another reply.
        ConfigurationError: the server denies PING.
    """
    if reply == serial:
        return
    if is_acl_denial(str(reply)):
        raise ConfigurationError(
            "it is unknown whether the script was executed: the server denies PING, by which "
            f"holdfast matches replies to requests: grant +ping ({reply})"
        )
    raise UnexpectedReply


def run_user_script(step: Step) -> Dialogue:
    """Run a script of the user. Return its error, if any, as `ScriptFailed`."""
    script, keys, args = step
    reply = yield ("EVALSHA", script.sha, str(len(keys)), *keys, *args)
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(_UNKNOWN_SCRIPT):
        reply = yield ("EVAL", script.text, str(len(keys)), *keys, *args)
    if isinstance(reply, hiredis.ReplyError) and not is_server_error(str(reply)):
        return ScriptFailed(f"the script failed: {reply}")
    return reply
