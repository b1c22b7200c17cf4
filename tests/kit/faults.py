"""The faults a test orders, and the plan that follows from them for each request.

This module owns the rules: which request they wait for and what they change for it and its reply.
It touches no socket: `kit.proxy` asks it for a plan per request and carries the plan out.
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
"""Says whether a rule concerns a request."""


def script_calls(args: Args) -> bool:
    """Match what a lock does, and nothing of what a client library does to set up a connection."""
    return args[0].upper() in {b"EVALSHA", b"EVAL"}


def says(command: str) -> Matching:
    """Match one command, such as "PING"."""
    return lambda args: args[0].upper() == command.encode()


def every_request(args: Args) -> bool:
    """Match all requests, the set-up of a connection (HELLO, CLIENT, SELECT) included."""
    return bool(args)


class Held:
    """A request or a reply that stays at the proxy until the test lets it go.

    `arrived` is set once the proxy has it, `released` once it is on its way; for a request that is
    when the server has executed it.
    """

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.released = threading.Event()
        self._release_once = threading.Lock()
        self._send: Callable[[], None] = lambda: None

    def keep(self, send: Callable[[], None] | None = None) -> None:
        """Say that it is here now, and what `release` must do besides setting `released`."""
        self._send = send or self._send
        self.arrived.set()

    def release(self) -> None:
        """Let it go. A request goes on a connection of its own, so its client may be long gone."""
        if not self.arrived.wait(PATIENCE):
            raise AssertionError("nothing to release: no matching request or reply has come")
        with self._release_once:
            if not self.released.is_set():
                self._send()
                self.released.set()


@dataclass(frozen=True)
class Plan:
    """What becomes of one request and of the reply to it."""

    times_forwarded: int = 1
    sent_apart: Held | None = None
    reply_held: Held | None = None
    reply_delivered: bool = True
    reset_after_reply: bool = False
    times_delivered: int = 1


@dataclass
class _Rule:
    """A change to the plan of the request that is `countdown` matching requests away."""

    countdown: int
    matching: Matching
    changes: dict[str, Any]


class Faults:
    """What a test has ordered and what has been seen so far; safe to use from any thread.

    A rule waits for the `k`-th next matching request, counted from now over all connections (1 is
    the very next), and applies once. Several rules may meet in one request.
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
        """How many rules still wait for their request; 0 shows that every fault has happened."""
        return len(self._rules) + len(self._message_rules)

    def swallow_reply(
        self, k: int = 1, *, close: bool = False, matching: Matching = script_calls
    ) -> None:
        """Lose the reply but not the request; with `close`, reset the connection instead."""
        self._add_rule(k, matching, reply_delivered=False, reset_after_reply=close)

    def lose_message(self, k: int = 1, *, close: bool = False) -> None:
        """Lose the k-th next message that is pushed; with `close`, its connection with it."""
        self._add_message_rule(k, reply_delivered=False, reset_after_reply=close)

    def double_message(self, k: int = 1) -> None:
        """Deliver the k-th next message that is pushed twice."""
        self._add_message_rule(k, times_delivered=2)

    def hold_message(self, k: int = 1) -> Held:
        """Keep the k-th next message, and all behind it on its connection, until released."""
        held = Held()
        self._add_message_rule(k, reply_held=held)
        return held

    def double_reply(self, k: int = 1, *, matching: Matching = script_calls) -> None:
        """Deliver the reply twice, though the request was executed once."""
        self._add_rule(k, matching, times_delivered=2)

    def drop_request(self, k: int = 1, *, matching: Matching = script_calls) -> None:
        """Lose the request: the server never sees it and the client hears nothing."""
        self._add_rule(k, matching, times_forwarded=0)

    def hold_request(self, k: int = 1, *, matching: Matching = script_calls) -> Held:
        """Keep the request from the server until it is released; its reply is lost."""
        held = Held()
        self._add_rule(k, matching, times_forwarded=0, sent_apart=held)
        return held

    def hold_reply(self, k: int = 1, *, matching: Matching = script_calls) -> Held:
        """Keep the reply, and those behind it on its connection, until it is released."""
        held = Held()
        self._add_rule(k, matching, reply_held=held)
        return held

    def duplicate_request(
        self,
        k: int = 1,
        *,
        later: float | threading.Event | None = None,
        matching: Matching = script_calls,
    ) -> None:
        """Have the server execute the request twice, and lose the second reply.

        The copy follows at once, or `later`: so many seconds after the request, or once the event
        is set. A late copy goes on a connection of its own, even when the client is long gone.
        """
        if later is None:
            self._add_rule(k, matching, times_forwarded=2)
            return
        copy = Held()
        self._add_rule(k, matching, sent_apart=copy)
        thread = threading.Thread(target=self._release_later, args=(copy, later), daemon=True)
        self._late_copies.append(thread)
        thread.start()

    def delay(self, seconds: float) -> None:
        """Deliver each reply from now on so much after it came, in the order they came."""
        self.reply_delay = seconds

    def refuse(self) -> None:
        """Close new connections at once."""
        self.refusing = True

    def accept(self) -> None:
        """Take new connections again."""
        self.refusing = False

    def blackhole(self) -> None:
        """Lose all requests and replies, on old and new connections, and keep these open."""
        self.blackholed = True

    def heal(self) -> None:
        """End the blackhole; what it has swallowed stays lost."""
        self.blackholed = False

    def plan_for(self, args: Args) -> Plan:
        """Count a request and apply the rules whose turn it is."""
        with self._lock:
            self.requests += 1
            self.log.append(args)
            if self.blackholed:
                return Plan(times_forwarded=0)
            return _applied(self._rules, args)

    def plan_for_message(self) -> Plan:
        """Apply the rules for pushed messages whose turn it is."""
        with self._lock:
            return _applied(self._message_rules, ())

    def count_reply(self) -> None:
        """Count a reply that came from the server, whatever becomes of it."""
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

    def _release_later(self, copy: Held, later: float | threading.Event) -> None:
        if not self._comes(copy.arrived):
            return
        if isinstance(later, threading.Event):
            in_time = self._comes(later)
        else:
            in_time = not self._stopped.wait(later)
        if in_time:
            with contextlib.suppress(OSError, EOFError):  # With no server, the copy is lost too.
                copy.release()

    def _comes(self, event: threading.Event) -> bool:
        """Wait for the event; False if the proxy stops first."""
        while not event.wait(POLL_INTERVAL):
            if self._stopped.is_set():
                return False
        return True


def _applied(rules: list[_Rule], args: Args) -> Plan:
    """Make the plan that the rules give, and drop those that are done."""
    plan = Plan()
    for rule in rules:
        if rule.matching(args):
            rule.countdown -= 1
            if rule.countdown == 0:
                plan = replace(plan, **rule.changes)
    rules[:] = [rule for rule in rules if rule.countdown]
    return plan
