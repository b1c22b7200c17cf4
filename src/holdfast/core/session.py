"""What one client knows in one process: its port, its renewer, and the holds it has.

A forked child inherits the object but none of that: `begin` is called there before any of the
child's code runs. So a child never renews or releases what its parent holds.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from holdfast.core.events import Event
from holdfast.core.hold import RELEASED, forked
from holdfast.core.line import Line, channel_of, read_message
from holdfast.core.renewer import Renewer, taking_back_blindly
from holdfast.core.spec import LOST_TOMBSTONE, TOMBSTONE_MS, TTL_MAX, delay_in, to_ms
from holdfast.core.token import client_in
from holdfast.errors import ConfigurationError
from holdfast.scripts import RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.hold import Hold
    from holdfast.core.line import Waiter
    from holdfast.core.quorum import Quorum
    from holdfast.core.spec import LockSpec
    from holdfast.port import Background, Keys, Port, Reply, Request

NAMED = 100
"""Leases that an event names at most."""


class Session:
    """The state that the verbs of the core share."""

    def __init__(  # noqa: PLR0913 - what a client is put together from
        self,
        port: Port,
        make_background: Callable[[], Background],
        report: Callable[[Event], None],
        *,
        polls: bool,
        longest_ttl: float = math.inf,
        quorum: Quorum | None = None,
    ) -> None:
        self.port = port
        self.longest_ttl = longest_ttl
        """The server may be replaced by another; then it counts on no ttl being longer than this.
        Infinite: it cannot, and is alone."""
        self.quorum = quorum
        """The nodes, where there are several: the port calls them as one."""
        self.closed = False
        self.polls = polls
        """Who waits asks again and again, and is not spoken to."""
        self._make_background = make_background
        self.report = report
        self.begin()

    def begin(self) -> None:
        """Hold nothing: in a new client, and in each forked child of its process."""
        self.process = self.port.process()
        self.renewer = Renewer(self._make_background(), self.report, self.port.has_ended)
        self.held: dict[bytes, Hold] = {}
        """The newest hold of each key without an owner. By exclusion, no older one is alive."""
        self.co_held: dict[tuple[bytes, Any], list[Hold]] = {}
        """The holds with an owner, of which a key may have several, by key and actor."""
        self._lines: WeakValueDictionary[bytes, Line] = WeakValueDictionary()
        """Those of all loops, by their channel; the port keeps them."""
        if self.quorum is not None:
            self.quorum.begin(self._clean_up, self.renewer.later, self.longest_ttl)
        self.has_waited = False
        """Somebody stood in line, so that whoever asks next had better do so at once."""

    def line(self, keys: Keys) -> Line:
        """The line that the caller would stand in for this lock."""
        self.has_waited = True
        return self.port.line(self._make_line, keys)

    def _make_line(self, channel: bytes) -> Line:
        line = self._lines[channel] = Line(channel, self._hand_back, self._leave_queue)
        return line

    def granted(self, message: bytes, asked_at: float) -> None:
        """Take in a grant to another of this client, which came with the answer to a request.

        It may be for another loop's: a lease may be released on another one than acquired it.
        """
        *_, delay, token, key = read_message(message)
        line = self._lines.get(channel_of(client_in(token), key))
        if line is not None:
            line.answered(message, asked_at, self.port.now())
        else:  # of a loop that is gone
            self._hand_back(key, token, delay)

    def hears(self, token: str, lock_key: bytes) -> bool:
        """Whether the client that drew the token is here, so that an answer can tell it."""
        return channel_of(client_in(token), lock_key) in self._lines

    def waiter(self, spec: LockSpec, token: str, now: float) -> Waiter | None:
        """Be ready to stand in line, if whoever asks has long been listening."""
        line = self.line(spec.keys)
        ear = line.ear
        if ear is None or not ear.counted:
            return None
        waiter = line.enter(token, spec.keys[0], self.port.signal(), now)
        # Known first, looked at second: a connection that is lost does these two the other way.
        if line.ear is ear:
            return waiter
        waiter.forget()
        return None

    def released(self, reply: Reply, asked_at: float) -> bool:
        """Take in the answer to a release; say whether it was ours."""
        if isinstance(reply, int) or not reply:
            return reply == 1
        mine, message = reply
        self.granted(message, asked_at)
        return bool(mine)

    def rally(self, spec: LockSpec) -> None:
        """Have those who wait here for this lock ask: a release of ours may have granted it."""
        # `valuerefs` copies in one step. `items` and `values` run Python code between two entries,
        # and fail when another thread adds one there.
        for reference in self._lines.valuerefs():
            line = reference()
            if line is not None:
                line.rally_soon(spec.keys[0])

    def _hand_back(self, key: bytes, token: str, delay_ms: int) -> None:
        """Give back what was granted to nobody here."""
        guarded = self.longest_ttl < math.inf
        request = taking_back_blindly(key, token, delay_ms, guarded=guarded)
        self.renewer.clean_up(key.decode(errors="replace"), request, fence=0)

    def _leave_queue(self, key: bytes, token: str, delay_ms: int) -> None:
        """Remove from the queue a token with which no attempt here waits.

        Not on a quorum: there a message of one node may arrive after its waiter was granted the
        lock by other nodes, and waiters do not depend on messages.
        """
        if self.quorum is None:
            guarded = self.longest_ttl < math.inf
            request = taking_back_blindly(key, token, delay_ms, "0 leave", guarded=guarded)
            self.renewer.clean_up(key.decode(errors="replace"), request, fence=0)

    def moved(self, _seat: object) -> None:
        """Look at once whether what is held here is known to the server that took another's place.

        Called from any thread.
        """
        if self.held or self.co_held:
            self.renewer.look_again()

    def _clean_up(self, request: Request) -> None:
        """For a quorum, take a token back on one node, or leave it to expire there."""
        _, keys, (token, ttl_ms, _, settings, *_) = request
        seconds = (int(ttl_ms) + delay_in(settings)) / 1000
        name = keys[0].decode(errors="replace")
        self.renewer.clean_up(name, request, fence=0, ttl=seconds, forget=self._forget(token))

    def ending(self, spec: LockSpec, token: str, tombstone: str, longest: float = 0.0) -> Request:
        """Make the request that ends a token, wherever it is.

        Of several nodes one that fails is seen to for the ttl that stands in it. So that is the
        `longest` that was ever asked for.
        """
        extended = self.quorum is not None and longest > spec.ttl
        ttl_ms = to_ms(longest) if extended else spec.ttl_ms
        return RELEASE, spec.keys, (token, ttl_ms, tombstone, spec.settings)

    def see_to(
        self,
        spec: LockSpec,
        token: str,
        tombstone: str = TOMBSTONE_MS,
        *,
        longest: float = 0.0,
        fence: int = 0,
    ) -> None:
        """Have the background take a token back, for as long as it may be there."""
        request = self.ending(spec, token, tombstone, longest)
        forever = min(spec.validity, TTL_MAX)  # where it is there until it is taken back
        ttl, forget = max(spec.ttl, forever, longest) + spec.lock_delay, self._forget(token)
        self.renewer.clean_up(spec.name, request, fence=fence, ttl=ttl, forget=forget)

    def clean_up_after(self, hold: Hold, tombstone: str = TOMBSTONE_MS) -> None:
        """See to what may be left of a hold."""
        longest, fence = hold.longest_ttl, hold.fence
        self.see_to(hold.spec, hold.token, tombstone, longest=longest, fence=fence)

    def _forget(self, token: str) -> Callable[[], None] | None:
        """What is to be done when nothing more is done about a token."""
        quorum = self.quorum
        return None if quorum is None else partial(quorum.whereabouts.forget, token)

    def close(self) -> None:
        """Renew nothing from now on, notify waiters to stop, and report what is still held."""
        if not self.closed:
            self._report_held()
        self.closed = True
        if self.quorum is not None:
            self.quorum.close()
        self.renewer.close()

    def _report_held(self) -> None:
        now, process = self.port.now(), self.port.process()
        holds = [*self.held.values(), *chain(*list(self.co_held.values()))]
        held = [hold for hold in holds if hold.alive(now, process)]
        if not held:
            return
        names = [f"{hold.spec.name!r} (fence {hold.fence})" for hold in held[:NAMED]]
        if len(held) > NAMED:
            names.append(f"{len(held) - NAMED} more")
        detail = f"the client was closed while it held {', '.join(names)}: no longer renewed"
        self.report(Event("closed_while_held", detail=detail))

    def mine(self, spec: LockSpec) -> Hold | None:
        """The hold on this lock that the calling thread or task is within, if any."""
        key, actor = spec.keys[0], self.port.actor()
        newest = self.held.get(key)
        holds = [] if newest is None or newest.actor is not actor else [newest]
        holds += self.co_held.get((key, actor), [])
        for hold in holds:
            if spec.owner is not None and hold.spec.owner == spec.owner:
                return None  # the server counts the holds of an owner
            if hold.alive(self.port.now(), self.process):
                return hold
        return None

    def is_blocked_by_waiting(self, spec: LockSpec) -> bool:
        """Whether a holder of this lock could not release it while the caller waits for it."""
        key, now = spec.keys[0], self.port.now()
        newest = self.held.get(key)
        holds = [] if newest is None else [newest]
        for place, others in list(self.co_held.items()):
            if place[0] == key:
                holds += others
        return any(
            hold.alive(now, self.process)
            and self.port.blocks(hold.actor)
            and (spec.owner is None or hold.spec.owner != spec.owner)
            for hold in holds
        )

    def took(self, hold: Hold, due: float) -> None:
        """Remember and renew what was just granted; the renewer looks at it when it is `due`.

        Raises:
            ConfigurationError: it is to be renewed, and cannot be.
            NotHeld: it is the parent's, and this is a child forked since the attempt began.
        """
        if hold.spec.owner is None:
            self.held[hold.spec.keys[0]] = hold
        else:
            self.co_held.setdefault((hold.spec.keys[0], hold.actor), []).append(hold)
        # Without renewal the background only announces the deadline, which holds by itself.
        if not self.renewer.watch(hold, due) and hold.spec.renew:
            name = hold.spec.name
            raise ConfigurationError(
                f"lock {name!r} cannot be renewed: no thread can be started, as in an atexit "
                "handler; give it renew=False and a ttl that is longer than the work",
                lock=name,
            )
        if hold.process != self.process:  # last: a fork after this is one after the acquire
            raise forked(hold.spec.name)

    def disown(self, hold: Hold) -> None:
        """End a hold that its caller never got to see."""
        hold.state = RELEASED
        self.forget(hold)

    def forget(self, hold: Hold) -> None:
        """Drop a hold that has ended, unless a newer one stands in its place."""
        self.renewer.handed_in.pop(hold, None)
        if hold.spec.owner is not None:
            self._forget_co_hold(hold)
        elif self.held.get(hold.spec.keys[0]) is hold:
            self.held.pop(hold.spec.keys[0], None)

    def _forget_co_hold(self, hold: Hold) -> None:
        # If another thread releases the actor's only hold at the moment when the actor takes the
        # next, that one may be forgotten too. It stays held, but no WouldDeadlock is raised if the
        # actor then waits for itself.
        place = hold.spec.keys[0], hold.actor
        holds = self.co_held.get(place, [])
        if hold in holds:
            holds.remove(hold)
        if not holds:
            self.co_held.pop(place, None)

    def lost(self, hold: Hold) -> None:
        """See that a loss is reported, and that nothing of the lease stays on the server."""
        self.forget(hold)
        if hold.waiter is not None:  # a late push for it must not end the lock delay
            hold.waiter.outlive(self.port.now())
        reason = hold.reason or hold.overdue()
        self.report(Event("lost", hold.spec.name, hold.fence, reason))
        # An extension whose answer was lost may keep the key long beyond the deadline, and a
        # request that was abandoned may still arrive. Of several nodes some may have it still.
        gone = reason in {"taken", "key_missing"}
        if not gone or hold.tainted or self.quorum is not None:
            self.clean_up_after(hold, LOST_TOMBSTONE)  # and now the lock delay begins
