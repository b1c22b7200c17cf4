"""Requests whose answers carry no serial: scripts of the user's, and commands of the server's own.

Behind each goes a PING with a serial, in the same write. Its answer is the seal of the one before:
if an answer was lost or doubled on the way, the seal is not where it should be, and neither is
believed.

What is said to the server is a generator, as when a connection is opened: it yields commands, is
sent their answers (an error reply as the exception that it is), and returns what the script would
have answered. So it is written once, for threads and for loops. Another command follows only one
that was refused, and so has changed nothing.

Which commands a server has is found out by trying them, once a connection, on a key that nobody
uses. The server that has the command answers that the key is not there. One that has not says so,
and the script is run instead; so it is after whatever else the command is refused with, and where
a proxy hangs up for it. So servers of one client may be of different versions, and change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import ConfigurationError, ScriptFailed
from holdfast.scripts import COMPARE_AND_DELETE, COMPARE_AND_SET
from holdfast.wire.packing import StrayAnswer, opened
from holdfast.wire.refusals import is_denial, is_of_server

if TYPE_CHECKING:
    from collections.abc import Generator

    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script
    from holdfast.wire.packing import Command

Said: TypeAlias = "Generator[Command, Any, Reply]"
Step: TypeAlias = "tuple[Script, Keys, tuple[str | bytes, ...]]"

NATIVE = True
"""Whether commands of the server's own are used. Tests turn it off."""

_INNER = b"000"  # the serial of a script that is sealed anyway
_NOT_THERE = ("ERR", "NOPERM")
_UNKNOWN_SCRIPT = "NOSCRIPT No matching script"  # the first word alone may be a script's own


class Talk:
    """What is said for one step, command by command.

    `found` is what is known of the server at the end of this connection: which commands it has.
    `shunned` are those that are not to be tried, on any connection of this client.
    """

    def __init__(self, step: Step, found: dict[str, bool], shunned: set[str]) -> None:
        script = step[0]
        self._found = found
        self._shunned = shunned
        self._trying = ""
        self._said = _TALKS[script.name](self, step) if script.serial else _own(step)

    def begin(self) -> Command:
        """Return the first command to send."""
        return next(self._said)

    def go_on(self, answer: object) -> Command:
        """Take in the answer to the last command, and return the next.

        Raises:
            StopIteration: there is none, and its value is the answer to the step.
            StrayAnswer: it cannot be the answer to that command.
        """
        return self._said.send(answer)

    def broken_off(self) -> bool:
        """Take in the end of the connection; say whether it came with a trial.

        Then nothing was changed. Such a trial is not made again.
        """
        if self._trying:
            self._shunned.add(self._trying)
        return bool(self._trying)

    def has(self, name: str, trial: Command, absent: object) -> Generator[Command, Any, bool]:
        """Say whether the server has a command that, tried like this, answers `absent`."""
        found = self._found
        if name in self._shunned:
            return False
        if name not in found:
            self._trying = name
            answer = yield trial
            self._trying = ""
            if isinstance(answer, hiredis.ReplyError) and not str(answer).startswith(_NOT_THERE):
                return False  # the server cannot tell just now
            found[name] = type(answer) is type(absent) and answer == absent
        return found[name]


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


def needs_seal(script: Script, keys: Keys) -> bool:
    """Whether a script has to be talked about; otherwise it is simply called."""
    return not script.serial or (NATIVE and len(keys) == 1 and script.name in _TALKS)


def _own(step: Step) -> Said:
    answer = yield from _run(step)
    if isinstance(answer, hiredis.ReplyError) and not is_of_server(str(answer)):
        return ScriptFailed(f"the script failed: {answer}")
    return answer


def _run(step: Step) -> Said:
    script, keys, args = step
    answer = yield ("EVALSHA", script.sha, str(len(keys)), *keys, *args)
    if isinstance(answer, hiredis.ReplyError) and str(answer).startswith(_UNKNOWN_SCRIPT):
        answer = yield ("EVAL", script.text, str(len(keys)), *keys, *args)
    return answer


def _by_script(step: Step) -> Said:
    script, keys, args = step
    answer = yield from _run((script, keys, (*args, _INNER)))
    return answer if isinstance(answer, hiredis.ReplyError) else opened(answer, _INNER)


def _compare_and_set(talk: Talk, step: Step) -> Said:
    _, keys, (expected, new, expiry, *_) = step
    key, trial = keys[0], ("SET", keys.spare, "", "IFEQ", "", "PX", "1")
    lasting = ("PX", expiry) if expiry not in ("", "0") else ()
    if not expected:
        answer = yield ("SET", key, new, "NX", *lasting)
    elif (yield from talk.has("SET IFEQ", trial, None)):
        keeping = ("KEEPTTL",) if expiry == "" else lasting
        answer = yield ("SET", key, new, "IFEQ", expected[1:], *keeping)
    else:
        return (yield from _by_script(step))
    if answer is None or answer == b"OK":
        return [int(answer is not None), b""]
    return (yield from _otherwise(step, answer))


def _compare_and_delete(talk: Talk, step: Step) -> Said:
    _, keys, (old, *_) = step
    key, spare = keys[0], keys.spare
    if (yield from talk.has("DELIFEQ", ("DELIFEQ", spare, ""), 0)):
        answer = yield ("DELIFEQ", key, old)
    elif (yield from talk.has("DELEX", ("DELEX", spare, "IFEQ", ""), 0)):
        answer = yield ("DELEX", key, "IFEQ", old)
    else:
        return (yield from _by_script(step))
    if type(answer) is int:
        return [answer, b""]
    return (yield from _otherwise(step, answer))


def _otherwise(step: Step, answer: object) -> Said:
    """Go on after an error reply: it says that nothing was changed."""
    if not isinstance(answer, hiredis.ReplyError):
        raise StrayAnswer
    text = str(answer)
    if text.startswith("WRONGTYPE"):
        return [b"wrong", text.encode()]
    return (yield from _by_script(step)) if text.startswith(_NOT_THERE) else answer


_TALKS = {
    COMPARE_AND_SET.name: _compare_and_set,
    COMPARE_AND_DELETE.name: _compare_and_delete,
}
