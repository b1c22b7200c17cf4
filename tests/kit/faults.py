"""The faults that a test injects, and the resulting plan for each request.

This module owns the rules: which request a rule applies to, and what it changes for the request and
its reply. It uses no socket: `kit.proxy` gets a plan per request from it and executes the plan.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from kit.waiting import PATIENCE, POLL_INTERVAL

if TYPE_CHECKING:
    from collections.abc import Callable

Args: TypeAlias = tuple[bytes, ...]
"""The words of a request, the command first."""

Matching: TypeAlias = "Callable[[Args], bool]"
"""Returns whether a rule applies to a request."""


def script_calls(args: Args) -> bool:
    """Match script calls, but not the commands that set up a connection."""
    return args[0].upper() in {b"EVALSHA", b"EVAL"}


def command_is(command: str) -> Matching:
    """Match one command, such as "PING"."""
    return lambda args: args[0].upper() == command.encode()


def every_request(args: Args) -> bool:
    """Match all requests, the set-up of a connection (HELLO, CLIENT, SELECT) included."""
    return bool(args)


class HeldMessage:
    """A request or a reply that the proxy holds until the test releases it.

    `arrived` is set once the proxy has received it. `released` is set once it was passed on: for a
    request, once the server has executed it.
    """

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.released = threading.Event()
        self._release_once = threading.Lock()
        self._send: Callable[[], None] = lambda: None

    def keep(self, send: Callable[[], None] | None = None) -> None:
        """Set `arrived`; `release` will call `send`."""
        self._send = send or self._send
        self.arrived.set()

    def release(self) -> None:
        """Pass it on. A request uses a new connection, so its client may be gone."""
        if not self.arrived.wait(PATIENCE):
            raise AssertionError("nothing to release: no matching request or reply has arrived")
        with self._release_once:
            if not self.released.is_set():
                self._send()
                self.released.set()


@dataclass(frozen=True)
class Plan:
    """What the proxy does with one request and its reply."""

    times_forwarded: int = 1
    sent_apart: HeldMessage | None = None
    reply_held: HeldMessage | None = None
    reply_delivered: bool = True
    reset_after_reply: bool = False
    times_delivered: int = 1


@dataclass
class _Rule:
    """A change to the plan of the `countdown`-th next matching request."""

    countdown: int
    matching: Matching
    changes: dict[str, Any]


class Faults:
    """The active rules and the traffic seen so far; safe to use from any thread.

    A rule applies once, to the `k`-th next matching request, counted from now over all connections
    (1 is the very next). Several rules may apply to one request.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.replies = 0
        self.connections = 0
        self.log: list[Args] = []
        self.reply_delay = 0.0
        self.refusing = False
        self.blackholed = False
        self._rules: list[_Rule] = []
        self._message_rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._late_copies: list[threading.Thread] = []

    @property
    def rules_left(self) -> int:
        """The number of rules that have not applied yet; 0 once every fault has happened."""
        return len(self._rules) + len(self._message_rules)

    def drop_reply(
        self, k: int = 1, *, close: bool = False, matching: Matching = script_calls
    ) -> None:
        """Drop the reply but not the request; with `close`, also reset the connection."""
        self._add_rule(k, matching, reply_delivered=False, reset_after_reply=close)

    def drop_message(self, k: int = 1, *, close: bool = False) -> None:
        """Drop the k-th next pushed message; with `close`, also reset its connection."""
        self._add_message_rule(k, reply_delivered=False, reset_after_reply=close)

    def double_message(self, k: int = 1) -> None:
        """Deliver the k-th next pushed message twice."""
        self._add_message_rule(k, times_delivered=2)

    def hold_message(self, k: int = 1) -> HeldMessage:
        """Hold the k-th next message, and all later ones on its connection, until released."""
        held = HeldMessage()
        self._add_message_rule(k, reply_held=held)
        return held

    def double_reply(self, k: int = 1, *, matching: Matching = script_calls) -> None:
        """Deliver the reply twice, although the request is executed once."""
        self._add_rule(k, matching, times_delivered=2)

    def drop_request(self, k: int = 1, *, matching: Matching = script_calls) -> None:
        """Drop the request: the server never receives it, and the client receives no reply."""
        self._add_rule(k, matching, times_forwarded=0)

    def hold_request(self, k: int = 1, *, matching: Matching = script_calls) -> HeldMessage:
        """Hold the request until it is released; its reply is lost."""
        held = HeldMessage()
        self._add_rule(k, matching, times_forwarded=0, sent_apart=held)
        return held

    def hold_reply(self, k: int = 1, *, matching: Matching = script_calls) -> HeldMessage:
        """Hold the reply, and all later ones on its connection, until it is released."""
        held = HeldMessage()
        self._add_rule(k, matching, reply_held=held)
        return held

    def duplicate_request(
        self,
        k: int = 1,
        *,
        later: float | threading.Event | None = None,
        matching: Matching = script_calls,
    ) -> None:
        """Make the server execute the request twice, and drop the second reply.

        The copy follows immediately, or `later`: that many seconds after the request, or once the
        event is set. A late copy uses a new connection, even if the client is gone.
        """
        if later is None:
            self._add_rule(k, matching, times_forwarded=2)
            return
        copy = HeldMessage()
        self._add_rule(k, matching, sent_apart=copy)
        thread = threading.Thread(target=self._release_later, args=(copy, later), daemon=True)
        self._late_copies.append(thread)
        thread.start()

    def delay(self, seconds: float) -> None:
        """Delay each reply from now on by `seconds`, in order."""
        self.reply_delay = seconds

    def refuse(self) -> None:
        """Close new connections immediately."""
        self.refusing = True

    def accept(self) -> None:
        """Accept new connections again."""
        self.refusing = False

    def blackhole(self) -> None:
        """Drop all requests and replies on old and new connections, and keep these open."""
        self.blackholed = True

    def heal(self) -> None:
        """End the blackhole; the traffic that it dropped stays lost."""
        self.blackholed = False

    def plan_for(self, args: Args) -> Plan:
        """Count a request and apply the rules that are due."""
        with self._lock:
            self.requests += 1
            self.log.append(args)
            if self.blackholed:
                return Plan(times_forwarded=0)
            return _applied(self._rules, args)

    def plan_for_message(self) -> Plan:
        """Apply the rules for pushed messages that are due."""
        with self._lock:
            return _applied(self._message_rules, ())

    def count_reply(self) -> None:
        """Count a reply from the server, even if it is dropped later."""
        with self._lock:
            self.replies += 1

    def _add_rule(self, k: int, matching: Matching, **changes: object) -> None:
        if k < 1:
            raise ValueError(f"k counts requests to come, so it starts at 1, not {k}")
        with self._lock:
            self._rules.append(_Rule(k, matching, changes))

    def _add_message_rule(self, k: int, **changes: object) -> None:
        if k < 1:
            raise ValueError(f"k counts messages to come, so it starts at 1, not {k}")
        with self._lock:
            self._message_rules.append(_Rule(k, lambda _: True, changes))

    def _release_later(self, copy: HeldMessage, later: float | threading.Event) -> None:
        if not self._comes(copy.arrived):
            return
        if isinstance(later, threading.Event):
            in_time = self._comes(later)
        else:
            in_time = not self._stopped.wait(later)
        if in_time:
            with contextlib.suppress(OSError, EOFError):  # Without a server, the copy is lost.
                copy.release()

    def _comes(self, event: threading.Event) -> bool:
        """Wait for the event; return False if the proxy stops first."""
        while not event.wait(POLL_INTERVAL):
            if self._stopped.is_set():
                return False
        return True


def _applied(rules: list[_Rule], args: Args) -> Plan:
    """Apply the rules to a new plan, and remove the rules that are done."""
    plan = Plan()
    for rule in rules:
        if rule.matching(args):
            rule.countdown -= 1
            if rule.countdown == 0:
                plan = replace(plan, **rule.changes)
    rules[:] = [rule for rule in rules if rule.countdown]
    return plan
