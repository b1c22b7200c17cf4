"""What must hold, checked from outside: on the server after each script, and at each client.

Each check has the name that SAFETY gives it in the tests: S for what must never happen, L for what
must happen in the end. They know nothing of how a lock works: only what is in the lock's key, what
its holders believe, and the numbers they were given.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from holdfast.core.hold import HELD, LOST
from holdfast.core.spec import TOMBSTONE_MS, WINDOW_LONGEST, keys_of
from holdfast.errors import LeaseLost
from holdfast.sim.abandon_check import AbandonCheck
from holdfast.sim.evict_check import Evictions, is_shown
from holdfast.sim.settings import LONGER
from holdfast.sim.watch_check import RetryCheck, WatchCheck
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.sim.cached_check import CachedCheck
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import World

SLACK = 2_000
"""Microseconds by which a server may be early: it counts milliseconds."""

FREE_AT_MOST = 1_500_000
"""Microseconds for which a lock may be free, once all is well, while somebody waits in line."""

MARKS = 1e16
"""The least score of what is in a queue and no waiter."""

_PLAIN = 2  # arguments of a plain lock's requests

OWNED = 3
"""Which key has the holds of an owner."""

CLEANED_UP = 5_000_000
"""Microseconds after which a clean-up is through, once all is well."""

RETRIED_WITHIN = 2.2
"""Seconds after which a renewal without an answer is tried again: a timeout, and a pause."""

DOWN_AT_MOST = 15.0
"""Seconds for which a server may be down before its quarantine begins."""

BATCH_WITHIN = 1.0
"""Seconds that the renewer waits for the answers of a batch, at most."""

TOLD_WITHIN = 0.15
"""Seconds after its deadline by which a loss has to be told, in a process that runs."""


class Violated(BaseException):
    """Something happened that must never happen, or did not that must."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check
        self.detail = detail


class Resource:
    """What the lock guards: it takes a write only with a fence as high as any it has seen."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._highest = 0
        self.value = 0
        self.accepted = 0

    def read(self, who: str, fence: int) -> int | None:
        """The value, or None if the reader comes too late."""
        if fence < self._highest:
            self._world.note("refused", "resource", who, fence)
            return None
        self._highest = fence
        return self.value

    def write(self, who: str, fence: int, value: int) -> bool:
        """Take the value unless the writer comes too late."""
        if fence < self._highest:
            self._world.note("refused", "resource", who, fence)
            return False
        self._highest = fence
        self.value = value
        self.accepted += 1
        self._world.note("accepted", "resource", who, fence)
        return True


class _Exported(NamedTuple):
    """A lease that was handed off, to how many, and when."""

    hold: Hold
    takers: int
    at: int


class Checks:
    """Everything that is checked in one world, about one lock."""

    def __init__(  # noqa: PLR0915 - all that is checked
        self, world: World, settings: Settings, key: bytes
    ) -> None:
        self.world = world
        self.settings = settings
        self.reached: Counter[str] = Counter()
        self.resource = Resource(world)
        self._key = key
        self._holds: list[tuple[SimClient, Hold]] = []
        self._ended: set[Hold] = set()
        self._releasing: set[Hold] = set()
        self._fences: dict[int, str] = {}  # to which token the server granted each
        self._highest = 0
        self._highest_believed = 0
        self._last_holder = b""
        self._last_name = ""
        self._gone: set[str] = set()  # names of clients
        self._closed: set[str] = set()  # the same
        self._before: tuple[bytes | None, bytes | None] = (None, None)
        self._line: list[bytes] = []
        self._left = -2
        self._given_back: set[str] = set()  # tokens whose holder released them
        self._over: set[str] = set()  # tokens that were released, or taken out of the queue
        self._kept: dict[str, tuple[SimClient, Hold]] = {}  # the last hold of each token
        self._exported: dict[str, _Exported] = {}  # by their tokens
        self._passed: defaultdict[str, set[str]] = defaultdict(set)  # to whom, at the server
        self._ran_out: set[str] = set()  # of what was exported, what the server then gave anew
        self._adopted: dict[str, str] = {}  # what each had exported who adopted it, and believed
        self._same_since: tuple[bytes | None, int] = (None, 0)
        self._free_since = 0
        self._granted_at: dict[str, int] = {}  # by the answer to a request of the token
        self.untrusted = not settings.trusts
        self._watch = WatchCheck()
        self._retries = RetryCheck(self)
        self._abandoned = AbandonCheck()
        self._evictions = Evictions()
        self._co_holds: list[bytes] = []  # of the owner, before the script that runs
        self._renewable_until: dict[Hold, int] = {}  # where max_hold ends renewal
        self._renewable_left: dict[str, int] = {}  # the same of what was exported
        self._limit_told: set[tuple[str, int]] = set()  # clients and fences that max_hold ended
        self._tickets: dict[str, bytes] = {}  # the last that each waiter received
        self._without_place: Counter[str] = Counter()  # requests of each token outside the queue
        self._with_ticket: dict[str, tuple[Sequence[str], bytes]] = {}
        self._last_renewal: dict[str, int] = {}  # when each token's was last tried
        self._renewing: set[str] = set()  # tokens whose last renewal has no answer yet
        self._refused: set[str] = set()  # tokens whose last renewal was refused
        self._failed_over = False
        self._nobodys_since: dict[str, tuple[int, str]] = {}
        self._reported: set[tuple[str, int]] = set()  # clients and fences of dropped leases
        self._freed: set[Hold] = set()  # what was released while it was held
        self._sent_since: dict[str, int] = {}  # each token's first request without an answer
        self._granted_since: dict[str, int] = {}  # the same of the request that was granted
        self.cached: CachedCheck | None = None
        """What is checked of a cached value, whose lock is another one."""
        self._forgetful = self.untrusted or settings.failover > 0
        """What nobody waits for, a release or a leaving, may be undone by a failover."""

    def fail(self, check: str, detail: str) -> None:
        """Say that it does not hold."""
        self.world.note("violation", check, detail)
        self.world.failure = Violated(check, detail)
        raise self.world.failure

    # At the server

    def before(self, server: Server, keys: Sequence[bytes]) -> None:
        """Look at lock and fence."""
        if keys[0] == self._key:
            self._before = look(server, keys)
            self._line = _line(server, keys)
            self._left = server.data.left(keys[0])
            self._watch.begin()
            if self.settings.owner and len(keys) > OWNED:
                found = server.data.run("ZRANGE", keys[OWNED], 0, -1)
                self._co_holds = cast("list[bytes]", found)

    def published(self, message: bytes) -> None:
        """A script published this."""
        self._watch.published(message)

    def after(
        self,
        server: Server,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[str],
        reply: Any,  # noqa: ANN401 - any answer
    ) -> None:
        """Compare."""
        if keys[0] == self._key and script.name not in {"inspect", "position", "probe"}:
            self._compare(server, script, keys, args, reply)
        elif self.cached is not None:
            self.cached.after(server, script, keys, args, reply)

    def _compare(
        self,
        server: Server,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[str],
        reply: Any,  # noqa: ANN401 - any answer
    ) -> None:
        holder, fence = look(server, keys)
        earlier, earlier_fence = self._before
        self._abandoned.executed(script.name, args, server.name, reply)
        self._note_reached(script, args, reply, earlier)
        kept = earlier == args[0].encode() and isinstance(reply, int) and reply > 0
        if kept and script.name != "release":
            self._not_in_the_delay(script.name)
        if script.name == "evict":
            self._evicts(server, args, reply)
        elif script.name == "acquire":
            self._keeps_its_place(args, reply)
        self._not_after_its_end(script.name, args, reply)
        self._keeps_its_time(server, script, holder)
        if holder != earlier:
            self.world.note("holder", server.name, holder, fence)
            self._given_up(script, args, earlier)
            if script.name == "adopt" and holder is not None:
                self._passed_on(server, keys, args)
            elif holder is not None:
                self._went_to(server, holder, script, args)
                self._in_order(holder, _line(server, keys), script, args)
        elif holder is not None and fence != earlier_fence and script.name != "evict":
            self._fence_changed(script.name, holder, fence)
        ends = script.name == "release" or (script.name == "evict" and reply)
        if holder is None and ends and self.settings.fair:
            self._handed_over(server, _line(server, keys))
        self._is_watched(server, keys, args[0], reply)
        self._believers_are_kept(server)

    def _given_up(self, script: Script, args: Sequence[str], earlier: bytes | None) -> None:
        """Only its own holder's request takes a lock from somebody, or what that one exported."""
        token = args[0].encode()
        if self._may_adopt(script, args, earlier) or script.name == "evict":
            return
        if earlier is not None and earlier != token and not self._joined(earlier, token):
            self.fail("S4", f"{script.name} of {token!r} took the lock from {earlier!r}")
        exported = args[0] in self._exported and args[0] not in self._ran_out
        if earlier == token and exported and not self.untrusted:
            self.fail("S4", f"{script.name} ended {earlier!r}, which was exported")
        if earlier == token and script.name == "release" and "lost" not in "".join(args[2:3]):
            self._given_back.add(args[0])

    def _went_to(self, server: Server, holder: bytes, script: Script, args: Sequence[str]) -> None:
        """Only an acquire or a release gives it to somebody."""
        if script.name == "renew":
            self.fail("S5", "a renewal made a lock that was not there")
        self._server_granted(holder, look(server, [self._key, self._key + b":fence"])[1])
        asking = "" if script.name == "evict" else args[0].split(":")[1]
        self._may_have_it(server, holder, asking.encode())

    def _evicts(
        self,
        server: Server,
        args: Sequence[str],
        reply: Any,  # noqa: ANN401 - any answer
    ) -> None:
        """An eviction is of the holder that was shown, and of no other."""
        earlier, _ = self._before
        shown = is_shown(earlier, args[0])
        if not reply:
            self.reached["an operator came too late to evict"] += 1
            if shown or look(server, [self._key, self._key])[0] != earlier:
                self.fail("S4", f"an operator was refused, and the lock was {earlier!r}")
            return
        if earlier is None or not shown:
            self.fail("S4", f"an operator evicted {earlier!r}, and was shown another")
            return
        self.world.note("evicted by", "operator", earlier)
        self._abandoned.buried(earlier.decode(), server.name)
        if self.settings.owner and self.untrusted:
            # A clock that is set back makes a lock delay look like a lease, which the owner joins.
            fence = look(server, [self._key, self._key + b":fence"])[1]
            self._fences.setdefault(int(fence or 0), earlier.decode())
        self.reached["an operator evicted the holder"] += 1
        delay = int(self.settings.lock_delay * 1000)
        over = isinstance(self._left, int) and 0 <= self._left <= delay and delay > 0
        others = [token for token in self._co_holds if not token.startswith(b"=")]
        self._evictions.note(earlier, others, self.world.now, over=over)
        if self.settings.prompt and self.settings.renew and not self._forgetful:
            soon = LONGER * self.settings.ttl / 3 + 1.0
            token = earlier.decode()
            self.world.after(int(soon * SECOND), lambda: self._knows_of_its_eviction(token))

    def _knows_of_its_eviction(self, token: str) -> None:
        for client, hold in self._holds:
            if hold.token == token and self.alive(client, hold) and hold.renewing:
                self.fail("EVICT", f"{token} was evicted, and does not know")

    def _keeps_its_time(self, server: Server, script: Script, holder: bytes | None) -> None:
        """Only the end of a lease shortens the time of a lock that does not change hands."""
        if holder is None or holder != self._before[0] or script.name in {"release", "evict"}:
            return
        left = server.data.left(self._key)
        if 0 <= left < self._left:
            shorter = self._left - left
            self.fail("S2", f"{script.name} shortened the time of {holder!r} by {shorter} ms")

    def _not_after_its_end(self, name: str, args: Sequence[str], reply: Any) -> None:  # noqa: ANN401 - any answer
        """What was released or given up gets neither the lock nor a place in the queue."""
        if name == "release" and "leave" not in "".join(args[2:3]):
            self._over.add(args[0])
        if name != "acquire" or args[0] not in self._over:
            return
        got = reply[2] != b"0" if isinstance(reply, list) else reply > 0
        if got and not self.world.doubled and not self._forgetful:
            self.fail("S10", f"a request of {args[0]} was granted or queued after its end")

    def _may_adopt(self, script: Script, args: Sequence[str], earlier: bytes | None) -> bool:
        """Whether it is the adoption of what is there, and was exported."""
        return script.name == "adopt" and args[2].encode() == earlier and args[2] in self._exported

    def _passed_on(self, server: Server, keys: Sequence[bytes], args: Sequence[str]) -> None:
        """An adoption takes over what is there, with its fence, for one who has not given it up."""
        name, holder, (earlier, earlier_fence) = args[0], args[0].encode(), self._before
        fence = look(server, keys)[1]
        if earlier is None:
            self.fail("S5", "an adoption made a lock that was not there")
        if fence != earlier_fence:
            self._fence_changed("adopt", holder, fence)
        if server.data.run("ZSCORE", keys[2], b"+" + holder) is not None:
            self.fail("S10", f"{name} adopted the lock after it had given up")
        self._passed[args[2]].add(name)
        self._last_holder, self._last_name = holder, name

    def _not_in_the_delay(self, name: str) -> None:
        """Nobody keeps, or gets back, what is there for the sake of the delay alone."""
        delay = int(self.settings.lock_delay * 1000)
        if delay and 0 <= self._left <= delay:
            self.fail("S5", f"{name} brought a lease back in its delay")

    def _may_have_it(self, server: Server, holder: bytes, asking: bytes) -> None:
        """It went to somebody who is there, did not give it up, and not before the delay."""
        name = holder.decode()
        client = holder.split(b":")[1]
        self._not_after_its_eviction(name)
        if name in self._exported:  # by a request of its exporter's that came late
            self._ran_out.add(name)
        if client != asking:
            self._hears_of_it(server, name)
        if name in self._given_back and not self.world.doubled and not self._forgetful:
            self.fail("S10", f"{name} got the lock after it had given it back")
        if name in self._adopted.values() and not self._forgetful:
            self.fail("S10", f"{name} got the lock after it was exported and adopted")
        last = self._kept.get(self._last_name)
        self._last_name = name
        if last is None or self.untrusted or not self.settings.lock_delay or self._failed_over:
            return
        who, hold = last
        delay = server.true_span(int(self.settings.lock_delay * SECOND))
        until = who.machine.true_time(hold.deadline) + delay
        if hold.token in self._evictions:
            evicted = self._evictions.delay_from(hold.token)
            until = 0 if evicted is None else evicted + delay
        lost = hold not in self._freed and not self._joined(holder, hold.token.encode())
        if lost and hold.token != name and self.world.now < until - SLACK:
            early = (until - self.world.now) / 1000
            self.fail("DELAY", f"{name} got the lock {early:.0f} ms before the delay was over")

    def _not_after_its_eviction(self, token: str) -> None:
        if self._evictions.is_buried(token) and not self._forgetful:
            self.fail("S10", f"{token} got the lock after it was evicted")
        self._evictions.granted_again(token)

    def _hears_of_it(self, server: Server, token: str) -> None:
        """Who is granted the lock by another's request is there to hear of it, as far as known."""
        if self.settings.uncounted:
            self.reached["granted to a waiter that the server does not count"] += 1
        elif not server.hears(b"holdfast:push:" + token.split(":")[1].encode()):
            self.fail("L3", f"{token} got the lock, and its client is gone")

    def _keeps_its_place(self, args: Sequence[str], reply: Any) -> None:  # noqa: ANN401 - any answer
        """A waiter that comes back with its ticket is not put behind those who came later."""
        sent, ticket = self._with_ticket.get(args[0], ((), b""))
        if sent is args and isinstance(reply, list):
            self.reached["a waiter that came back to its place"] += reply[3] == 1
            if reply[2] != b"0" and int(reply[2]) > int(ticket):
                self.fail("FIFO", f"{args[0]} had ticket {ticket!r}, and has {reply[2]!r} now")

    def _in_order(
        self, holder: bytes, line: list[bytes], script: Script, args: Sequence[str]
    ) -> None:
        """Nobody who stood before the new holder stands there still."""
        if not self.settings.fair:
            return
        came_back = script.name == "acquire" and args[0].encode() == holder and len(args) > _PLAIN
        if holder in self._line:
            passed_over = set(self._line[: self._line.index(holder)]) & set(line)
        else:
            passed_over = set() if came_back and args[2].strip("!") not in {"", "0"} else set(line)
            passed_over &= set(self._line)
        if passed_over and not self._joined_any(holder, passed_over):
            self.fail("FIFO", f"{holder!r} came before {sorted(passed_over)!r}")

    def _is_watched(
        self,
        server: Server,
        keys: Sequence[bytes],
        token: str,
        reply: Any,  # noqa: ANN401 - any answer
    ) -> None:
        """A lock that was handed over is watched by the first in the queue."""
        holder = look(server, keys)[0]
        if holder != self._before[0]:
            soon = 1000 + int(self.settings.lock_delay * 1000)  # the longest window (ms)
            long_held = self._left > soon
            handed_over = holder != token.encode()
            self._watch.changed_hands(handed_over=handed_over, long_held=long_held)
        if isinstance(reply, list):
            self._watch.replied(token)
        waiter = self._watch.uninformed(holder, _line(server, keys))
        if waiter and self.settings.fair and not self._forgetful:
            self.fail("L3", f"{waiter} does not know that the lock was handed to {holder!r}")

    def _joined_any(self, holder: bytes, others: set[bytes]) -> bool:
        return any(self._joined(holder, other) for other in others)

    def _handed_over(self, server: Server, line: list[bytes]) -> None:
        """A lock that was given back is not left free while somebody is there to have it."""
        for waiter in () if server.quarantined else line:
            if server.hears(b"holdfast:push:" + waiter.split(b":")[1]):
                self.fail("L2", f"the lock was left free, and {waiter!r} waits")

    def failed_over(self) -> None:
        """A server was replaced by another, which is in quarantine."""
        self._failed_over = True
        self.reached["a server replaced by one in quarantine"] += 1

    def refused(self, client: SimClient, script: str, why: str) -> None:
        """A script ended with an error: in quarantine, or on a full server, and never else."""
        if why.startswith("QUARANTINE"):
            self.reached["a renewal refused in quarantine"] += script == "renew"
            self.reached["a lock refused in quarantine"] += script == "acquire"
        elif "OOM" not in why:
            self.fail("ERROR", f"{script} of {client.machine.name} failed: {why}")

    def all_is_well(self) -> None:
        """Nothing goes wrong from now on."""
        self._free_since = self.world.now
        self._nobodys_since.clear()

    def is_somebodys(self, server: Server) -> None:
        """Called again and again once all is well: no client that runs keeps a lock for nobody."""
        holder = look(server, [self._key, self._key])[0]
        name = "" if holder is None else holder.decode()
        since, before = self._nobodys_since.get(server.name, (0, ""))
        client = name.split(":")[1] if name else ""
        excused = self.is_left(client) or self.world.doubled or self._forgetful
        shared = self.settings.owner  # the holds of others keep it under this name
        held = any(
            (shared or hold.token == name) and self.alive(who, hold) for who, hold in self._holds
        )
        if not name or name != before or held or excused or self._is_passed_on(holder or b""):
            self._nobodys_since[server.name] = self.world.now, name
        elif self.world.now - since > CLEANED_UP + self.settings.lock_delay * SECOND:
            self.fail("S10", f"{name} has {server.name}, and no client holds or wants it")

    def taken_up(self, server: Server, keys: Sequence[bytes], tokens: set[str]) -> None:
        """Called again and again once all is well: nobody of those waits long for a free lock."""
        waiting = [waiter for waiter in _line(server, keys) if waiter.decode() in tokens]
        holder = look(server, keys)[0]
        passed_on = holder is not None and self._is_passed_on(holder)
        held = passed_on or any(self.alive(*each) for each in self._holds)
        if holder != self._same_since[0] or held:
            self._same_since = holder, self.world.now
        elif self._is_unaware(holder) and self.world.now - self._same_since[1] > FREE_AT_MOST:
            self.fail("L3", f"{holder!r} does not know that it has the lock")
        if holder is not None or not waiting or server.quarantined:
            self._free_since = self.world.now
        elif self.world.now - self._free_since > self._patience() and not self.settings.clock_jump:
            self.fail("L1", f"the lock is free, and {waiting!r} wait")

    def _is_unaware(self, holder: bytes | None) -> bool:
        """Whether nothing goes wrong, and the client to which it was granted never held it.

        A grant counts only when all replicas have it, and they may lag behind.
        """
        prompt = self.settings.calm and not self.settings.replicas
        name = "" if holder is None else holder.decode()
        return bool(prompt and name) and name not in self._kept and not self.is_left(_client(name))

    def _patience(self) -> int:
        """Return for how many microseconds the lock may be free while a client waits.

        Two waiters in a row that do not receive what they are sent cost up to a ttl, as the README
        says, and a lock delay. A server that does not count its listeners never passes over a dead
        one: each costs as much. After an eviction or a restart without data waiters still wait as
        long as they were told: until the lease that is gone would have been over, and its lock
        delay. A message that a lock delay begins may arrive when the delay is over.
        """
        gone = len(self._gone)
        deaf = 1 if self.settings.half_open or gone > 1 else 0
        if self.settings.uncounted:
            deaf = max(deaf, len(self._gone | self._closed))
        told = 0.0 if self.settings.prompt else self.settings.lock_delay
        if self.settings.evict or self.settings.wipe:
            told = LONGER * self.settings.ttl + self.settings.lock_delay
        lasts = self.settings.ttl + self.settings.lock_delay
        return FREE_AT_MOST + int((deaf * lasts + told) * SECOND)

    def _fence_changed(self, name: str, holder: bytes, fence: bytes | None) -> None:
        if not self.untrusted:
            self.fail("S8", f"{name} changed the fence of a lock that did not change hands")
        self._server_granted(holder, fence)  # the counter was lost: it begins anew, above

    @staticmethod
    def _joined(holder: bytes, token: bytes) -> bool:
        owner = holder.rpartition(b":")[2]
        return owner.startswith(b"&") and token.endswith(owner)

    def _server_granted(self, holder: bytes, fence: bytes | None) -> None:
        number = int(fence or 0)
        if number <= self._highest:
            self.fail("S6", f"fence {number} was given after {self._highest}")
        self._highest = number
        self._fences[number] = holder.decode()
        self.reached["granted after a quarantine"] += self._failed_over
        if self._last_holder:
            self.reached["a holder that never released, followed"] += (
                self._last_holder.split(b":")[1].decode() in self._gone
            )
        self._last_holder = holder

    def _believers_are_kept(self, server: Server) -> None:
        """The server keeps the lock for each client that considers itself the holder, and as long.

        Not where a server in quarantine took another's place: it may not know of the lease, and
        keeps it for nobody else.
        """
        if self.untrusted or self._failed_over:
            return
        for client, hold in self._holds:
            if not self.alive(client, hold) or hold.token in self._evictions:
                continue
            holder = server.data.string(self._key)
            token = hold.token.encode()
            if holder != token and not (holder and self._joined(holder, token)):
                self.fail("S1", f"{hold.token} believes, and the lock is {holder!r}")
            expiry = server.true_expiry(self._key, int(self.settings.lock_delay * 1000))
            deadline = client.machine.true_time(hold.deadline)
            if expiry is not None and deadline > expiry + SLACK:
                late = (deadline - expiry) / 1000
                self.fail("S2", f"{hold.token} would believe {late:.0f} ms longer than the server")

    def _note_reached(
        self,
        script: Script,
        args: Sequence[str],
        reply: Any,  # noqa: ANN401 - any answer
        earlier: bytes | None,
    ) -> None:
        reached, mine = self.reached, earlier == args[0].encode()
        if script.name == "acquire":
            reached["a request that found its tombstone"] += reply == 0
            reached["a retry that found its own token"] += isinstance(reply, int) and mine
            waits = isinstance(reply, list)
            reached["stood in line"] += waits and reply[2] != b"0"
            ticket = args[2].strip("!") if len(args) > _PLAIN else ""
            reached["a waiter that asked again with its ticket"] += waits and ticket not in {
                "",
                "0",
            }
            self._note_late_grant(args[0], reply)
        self._note_loss(script, args, earlier)
        self._note_adoption(script, args, reply, earlier)

    def _note_late_grant(self, token: str, reply: Any) -> None:  # noqa: ANN401 - any answer
        """A client that was granted it asks again, because the answer came too late."""
        now, granted = self.world.now, isinstance(reply, int) and reply > 0
        since = now - self._granted_at.get(token, now)
        self.reached["a grant that came too late, asked for again"] += (
            since > self.settings.ttl * SECOND
        )
        if granted:
            self._granted_at[token] = now

    def _note_loss(self, script: Script, args: Sequence[str], earlier: bytes | None) -> None:
        lost = script.name == "release" and "lost" in "".join(args[2:3])
        delays = lost and self.settings.lock_delay and earlier == args[0].encode()
        self.reached["a lock delay begun by a loss"] += bool(delays)

    def _note_adoption(
        self,
        script: Script,
        args: Sequence[str],
        reply: Any,  # noqa: ANN401 - any answer
        earlier: bytes | None,
    ) -> None:
        mine = earlier == args[0].encode()
        if script.name == "adopt":
            self.reached["an adoption that found its own token"] += mine and reply != 0
        elif script.name == "release" and mine and args[0] not in self._kept:
            adopters = set().union(*self._passed.values())
            self.reached["an adoption given back"] += args[0] in adopters

    # At a client

    def alive(self, client: SimClient, hold: Hold) -> bool:
        """Whether its holder believes; what was over stays over."""
        alive = not client.machine.crashed and hold.alive(client.now(), client.generation)
        if not alive:
            self._ended.add(hold)
        elif hold in self._ended:
            self.fail("S5", f"{hold.token} came back to life")
        return alive

    def granted(self, client: SimClient, hold: Hold) -> None:
        """A client goes on with the lock."""
        self.world.note("believes", client.machine.name, hold.token, hold.fence)
        granted = self._fences.get(hold.fence)
        newest = max((n for n, who in self._fences.items() if who == hold.token), default=0)
        old = not self.untrusted and not self.settings.owner and hold.fence != newest
        if old or (granted != hold.token and not (granted is not None and self.settings.owner)):
            self.fail("S9", f"fence {hold.fence} was not granted to {hold.token}")
        if not self.untrusted:
            for other, held in self._holds:
                if held is not hold and self.alive(other, held) and not self._share(held, hold):
                    self._only_if_evicted(held, hold)
            late = hold.token in self._evictions or self.settings.owner
            if not self._is_above(hold, self._highest_believed) and not late:
                self.fail("S7", f"fence {hold.fence} is held after {self._highest_believed}")
        self._remember(client, hold)

    def _only_if_evicted(self, held: Hold, hold: Hold) -> None:
        """Two may hold at once only if an operator evicted one of them."""
        if held.token not in self._evictions and hold.token not in self._evictions:
            self.fail("S1", f"{held.token} and {hold.token} both believe")

    def _is_above(self, hold: Hold, fence: int) -> bool:
        """Whether it comes after that fence; what was adopted has it from its exporter."""
        return hold.fence >= fence if hold.token in self._adopted else hold.fence > fence

    def exported(self, client: SimClient, hold: Hold, takers: int) -> None:
        """A client has handed a lease to so many: from now on it does not believe."""
        self.world.note("exports", client.machine.name)
        self._releasing.add(hold)
        self._exported[hold.token] = _Exported(hold, takers, self.world.now)
        left = self._renewable_until.get(hold, 0) - self.world.now
        self._renewable_left[hold.token] = max(0, left)
        self.reached["exported, and adopted by nobody"] += not takers
        self.ended(client, hold, "export")

    def adopted(self, client: SimClient, hold: Hold, exported: str) -> None:
        """A client goes on with what another had exported, and is the only one who does."""
        self.reached["a lease adopted"] += 1
        fence = self._exported[exported].hold.fence
        if exported in self._adopted.values() and not self.untrusted:
            self.fail("S4", f"{hold.token} adopted {exported}, as somebody else had")
        if hold.fence != fence:
            self.fail("S8", f"{hold.token} adopted fence {fence} as {hold.fence}")
        if self._fences[fence] in {exported, *self._passed[exported]}:
            self._fences[fence] = hold.token
        self._adopted[hold.token] = exported
        self.granted(client, hold)

    def not_adopted(self, exported: str, error: BaseException) -> None:
        """A client could not have what another had exported."""
        self.reached["adopted by another, or over"] += isinstance(error, LeaseLost)
        _, takers, at = self._exported[exported]
        soon = self.world.now < at + self.settings.ttl * SECOND / 2
        prompt = self.settings.calm and not self.settings.replicas  # which may lag behind
        if prompt and soon and takers == 1:
            self.fail("ADOPT", f"nobody else wanted {exported}, and it was not to be had: {error}")

    def _is_passed_on(self, holder: bytes) -> bool:
        """Whether it was exported, and nobody has adopted it."""
        name = holder.decode()
        return name in self._exported and name not in self._adopted.values()

    def _remember(self, client: SimClient, hold: Hold) -> None:
        self._highest_believed = max(self._highest_believed, hold.fence)
        self._holds = [(who, held) for who, held in self._holds if held.state is HELD]
        self._holds.append((client, hold))
        self._kept[hold.token] = client, hold
        most = int(self.settings.max_hold * SECOND)
        exported = self._adopted.get(hold.token, "")
        self._renewable_until[hold] = self.world.now + self._renewable_left.get(exported, most)
        self._look_again(client, hold)

    def _look_again(self, client: SimClient, hold: Hold) -> None:
        """Note when its holder ceases to believe because its deadline has come."""
        if self.alive(client, hold):
            due = client.machine.true_time(hold.deadline) + 1
            self.world.at(due, lambda: self._look_again(client, hold))
            self._within_its_limit(client, hold)
        elif hold not in self._releasing and not client.machine.crashed:
            self.world.note("doubts", client.machine.name, hold.token)
            if hold.state is HELD:
                due = int(TOLD_WITHIN * SECOND)
                self.world.after(due, lambda: self._is_told(client, hold))

    def _is_told(self, client: SimClient, hold: Hold) -> None:
        """Soon after its deadline a lease is lost, and not only over."""
        stopped = client.machine.crashed or client.was_stopped_since(hold.deadline)
        stopped = stopped or hold.process != client.generation  # it is nobody's any more
        if hold.state is HELD and hold not in self._releasing and not stopped:
            self.fail("S3", f"nobody was told of the loss of {hold.token}")

    def _within_its_limit(self, client: SimClient, hold: Hold) -> None:
        """No client holds for longer than max_hold and what the last renewal gave."""
        most = self._renewable_until[hold] + int((self.settings.ttl + 0.02) * SECOND)
        if self.settings.max_hold and client.machine.true_time(hold.deadline) > most:
            self.fail("MAX_HOLD", f"{hold.token} is held for longer than max_hold and a ttl")

    def extended(self, client: SimClient, hold: Hold, ttl: float) -> None:
        """A client extended its lease, and goes on with it."""
        self.world.note("extended", client.machine.name, hold.token, ttl)
        if hold.token in self._refused:
            self.fail("S5", f"{hold.token} was extended, and the server said that it is not theirs")
        until = self.world.now + int((ttl - self.settings.ttl) * SECOND)
        self._renewable_until[hold] = max(self._renewable_until[hold], until)

    @staticmethod
    def _share(one: Hold, other: Hold) -> bool:
        return one.spec.owner is not None and one.spec.owner == other.spec.owner

    def releasing(self, client: SimClient, hold: Hold) -> None:
        """A client begins to release: from now on it does not believe."""
        self.world.note("through", client.machine.name, hold.token)
        if self.alive(client, hold):
            self._freed.add(hold)
        self._releasing.add(hold)
        self.reached["a release while a renewal is under way"] += hold.token in self._renewing

    def ended(self, client: SimClient, hold: Hold, how: str) -> None:
        """A client is through with the lock."""
        self.world.note("ended", client.machine.name, hold.token, how)
        if self.alive(client, hold):
            self.fail("S12", f"{hold.token} believes after its {how}")
        taken = how == "loss" and hold.reason in {"taken", "key_missing"}
        given_back = hold.token in self._given_back and hold.token not in self._evictions
        # A clock that jumps may end the lease, and its release then only ends the lock delay. A
        # server that is full may evict the lock, so that too few nodes have it when it is released.
        steady = not (self.world.doubled or self.settings.clock_jump or self.settings.evict)
        if taken and given_back and steady:
            self.fail("S9", f"{hold.token} was released, and is said to be lost")

    def told(self, client: SimClient, event: Event) -> None:
        """An event was reported."""
        self.world.note("event", client.machine.name, event.kind, event.detail)
        if self.cached is not None and event.lock == self.cached.name:
            self.cached.told(client, event)
            return
        # Behind Sentinels a full server that was restarted or promoted refuses new connections: it
        # cannot write down since when it serves.
        refused = event.kind == "renewal_failed" and "OOM" in event.detail
        if refused and not self.settings.sentinel:
            self.fail("L8", "a full server refused a renewal")
        if client.closed and event.kind in {"not_released", "max_hold"}:
            self.fail("CLOSE", f"{event.kind} is reported of a client that renews nothing any more")
        if event.kind == "not_released":
            self.reached["a dropped lease was reported"] += 1
            self._reported.add((client.machine.name, event.fence))
        if event.kind == "renewal_failed":
            self._is_renewed(client, event.fence)
        if event.kind == "max_hold":
            self.reached["a lease that max_hold ended"] += 1
            self._limit_told.add((client.machine.name, event.fence))
        if event.kind == "lost":
            self.reached[f"a lease lost: {event.detail}"] += 1
            # Of an owner's holds only one is named by the fence.
            exact = not self.settings.owner and not self._forgetful
            evicted = self._fences.get(event.fence, "") in self._evictions
            if evicted and exact and event.detail == "key_missing":
                self.fail("EVICT", f"fence {event.fence} was evicted, and is said to be missing")

    def _is_renewed(self, client: SimClient, fence: int) -> None:
        """Nothing is reported of the renewal of a lease that is over."""
        mine = [hold for who, hold in self._holds if who is client and hold.fence == fence]
        if mine and all(hold.state is not HELD for hold in mine):
            self.fail("S5", f"a renewal of fence {fence} failed, which is not held any more")

    def took(self, client: SimClient, hold: Hold) -> None:
        """A lease begins: it is not over before it is given to anybody."""
        if self.cached is not None and hold.spec.keys[0] != self._key:
            self.cached.took(hold)
            return
        least = hold.spec.validity - hold.spec.usable
        short = hold.deadline - client.now() < least - 1e-6
        since = self._granted_since.get(hold.token)
        if since is not None and not self.settings.sentinel:  # there a refusal is an answer
            late = hold.deadline - hold.spec.validity - client.machine.local_time(since)
            handed_over = hold.deadline - client.now() <= WINDOW_LONGEST  # by a push, meanwhile
            if late > 1e-3 and not handed_over:  # noqa: PLR2004 - a millisecond
                self.fail("S2", f"{hold.token} counts from {late:.3f} s after its first sending")
        if hold.process == client.generation and short:
            self.fail("S2", f"{hold.token} was taken with less than min_validity left")
        if hold.process == client.generation and not hold.alive(client.now(), client.generation):
            self.fail("S2", f"{hold.token} was taken when its time was up")

    def lost(self, client: SimClient, hold: Hold) -> None:
        """A client learns that a hold is lost."""
        if hold.spec.keys[0] != self._key:
            return
        late = client.now() - hold.deadline
        granted = any(held is hold for _, held in self._holds)
        believed = granted and hold not in self._releasing
        if believed and late > TOLD_WITHIN and not client.was_stopped_since(hold.deadline):
            self.fail("S3", f"the loss of {hold.token} was told {late:.3f} s late")
        if believed and not client.was_stopped_since(hold.deadline - hold.spec.ttl):
            self._was_renewed_to_the_end(client, hold)

    def _was_renewed_to_the_end(self, client: SimClient, hold: Hold) -> None:
        """A lease runs out only while renewals fail, or because of max_hold, which is reported."""
        left = hold.deadline - client.machine.local_time(self._last_renewal.get(hold.token, 0))
        limited = self.settings.max_hold and self.world.now > self._renewable_until[hold]
        if hold.reason == "expired" and limited and hold.renewing is False:
            if (client.machine.name, hold.fence) not in self._limit_told:
                self.fail("MAX_HOLD", f"max_hold ended the renewal of {hold.token}, untold")
        elif hold.reason != "unreachable" or not hold.renewing or client.closed:
            return
        elif left > RETRIED_WITHIN:
            self.fail("RENEW", f"{hold.token} was lost {left:.3f} s after its last renewal")

    def forked(self, client: SimClient, parent: str) -> None:
        """A client goes on in a child of its process, and the parent is no more."""
        holding = False
        for who, hold in self._holds:
            if who is client:
                if hold.alive(client.now(), client.generation):
                    self.fail("S13", f"a forked child holds {hold.token}, which is its parent's")
                holding = holding or hold.alive(client.now(), client.generation - 1)
        self.reached["forked while holding" if holding else "forked while waiting"] += 1
        self._gone.add(parent)

    def closed(self, client: SimClient) -> None:
        """A client was closed: what it left on the server expires."""
        holding = any(who is client and self.alive(who, hold) for who, hold in self._holds)
        self.reached["closed while holding" if holding else "closed while waiting"] += 1
        self._closed.add(client.machine.name)

    def dropped(self, client: SimClient, hold: Hold) -> None:
        """A client drops a lease, and does not release it."""
        self.world.note("drops", client.machine.name, hold.token)

    def reported(self, client: SimClient, hold: Hold) -> None:
        """A lease was dropped a while ago: if it was renewed, that is reported."""
        renewed = self.alive(client, hold) and hold.renewing and self.settings.prompt
        told = (client.machine.name, hold.fence) in self._reported
        if renewed and not told and not self.settings.owner:
            self.fail("DROP", f"{hold.token} was dropped, is renewed, and nobody was told")

    def is_left(self, client: str) -> bool:
        """Whether nobody cleans up any more what this client left on the server."""
        if self.settings.owner and (self._gone or self._closed):  # one of its holds may be theirs
            return True
        return client in self._gone or client in self._closed

    def arrived(self, request: Request, server: str) -> None:
        """A request arrives at a server."""
        if request[1][0] == self._key:
            self._abandoned.arrived(request[0].name, request[2], server)

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A client sends a request: none of what it has from the process it was forked from."""
        script, keys, args = request
        if self.settings.fork and args and args[0].startswith("hf1:"):
            parent = args[0].split(":")[1] + "+"
            # What a parent exported belongs to the client that adopts it.
            if client.machine.name.startswith(parent) and args[0] not in self._exported:
                self.fail("S13", f"a forked child sent {script.name} of {args[0]}, its parent's")
        if self.cached is not None and keys[0] != self._key:
            self.cached.sent(client, request)
            return
        self._abandoned.sent(script.name, args, server)
        if script.name in {"acquire", "position", "release"}:  # one that is due may ask, or leave
            self._retries.forget(client)
        if script.name == "acquire":
            self._asks_for_a_place(args)
            self._is_wanted(args[0])
            self._sent_since.setdefault(args[0], self.world.now)
            if args[0] in self._tickets:
                self._with_ticket[args[0]] = args, self._tickets[args[0]]

    def _is_wanted(self, token: str) -> None:
        """Note that a lock is wanted: replicas may lag behind, and its client asks again."""
        for server, (_, name) in self._nobodys_since.items():
            if name == token:
                self._nobodys_since[server] = self.world.now, name

    def _asks_for_a_place(self, args: Sequence[str]) -> None:
        """Where nothing goes wrong, a waiter asks at most once without a place in the queue."""
        settings = self.settings
        if not "".join(args[2:3]):
            self._without_place[args[0]] += 1
            polls = self._without_place[args[0]] > 1
            if polls and settings.calm and not settings.polls and settings.timeout is None:
                self.fail("POLL", f"{args[0]} polls, and could wait in the queue")

    def awaits_answer(self, client: str) -> bool:
        """Whether a request for the lock was sent by this client, and not answered yet."""
        return any(token.split(":")[1] == client for token in self._sent_since)

    def renews(self, client: SimClient, request: Request) -> None:
        """A client tries to renew a lease: not, if it was closed."""
        token = request[2][0]
        if client.closed:
            self.fail("CLOSE", f"{token} is renewed, and its client is closed")
        self._last_renewal[token] = self.world.now
        self._renewing.add(token)

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A server's answer has reached a client."""
        script, keys, args = request
        if keys[0] != self._key:
            if self.cached is not None:
                self.cached.answered(request, reply)
            return
        self._abandoned.answered(script.name, args, server)
        if script.name == "release" and isinstance(reply, list):
            self.reached["granted by another's answer"] += 1
            self._retries.forget(client)
        if script.name == "acquire":
            self._granted_since[args[0]] = self._sent_since.pop(args[0], self.world.now)
            if isinstance(reply, list) and reply[2] != b"0":
                self._tickets[args[0]] = reply[2]
            if isinstance(reply, list):
                del self._granted_since[args[0]]
        if script.name == "renew":
            self._renewal_answered(client, args[0], reply)
        if script.name == "renew" and reply:
            believed = any(hold.token == args[0] for _, hold in self._holds)
            self.reached["a grant confirmed by a renewal"] += not believed
        if script.name == "renew":
            self._note_renewal(client, args[0], reply)

    def unanswered(self, client: SimClient, request: Request) -> None:
        """A caller goes on without the answer to its request, which may grant another waiter."""
        script, keys, args = request
        plain = script.name == "release" and "".join(args[2:3]) in {"", "0"}
        prompt = replace(self.settings, reset=0.0).prompt
        if plain and keys[0] == self._key and prompt and client.waiting():
            self._retries.expect_after(client, 0.0, "ignores a release without an answer")

    def _note_renewal(self, client: SimClient, token: str, reply: Reply) -> None:
        self._renewing.discard(token)
        who, hold = self._kept.get(token, (None, None))
        if who is not client or hold is None:
            return
        reached, late = self.reached, client.now() >= hold.deadline
        valid = hold.state is HELD and not late
        reached["a renewal answered after the deadline"] += late
        reached["a renewal answered after the loss"] += hold.state is LOST
        reached["a renewal refused while its lease was valid"] += valid and not reply
        reached["a renewal retried in time"] += valid and bool(reply) and hold.unanswered

    def rallied(self, client: SimClient) -> None:
        """A release was not answered, so that waiters of the same client have to ask again."""
        self.reached["waiters made to retry by a release without an answer"] += bool(
            client.waiting()
        )

    def _renewal_answered(self, client: SimClient, token: str, reply: Reply) -> None:
        """Take in the answer to a renewal or an extend."""
        self._granted_since.pop(token, None)  # it was pushed, and is confirmed by this
        if reply:
            self._refused.discard(token)
            return
        self._refused.add(token)
        self.reached["an evicted holder was refused a renewal"] += token in self._evictions
        task = self.world.task
        # An extend may be cancelled before it sees the answer; the renewer sees it.
        if task is not None and task.name.endswith(".request"):
            at = client.now()
            # The renewer takes in the answers of a batch together, and one of them may be late.
            within = TOLD_WITHIN if self.settings.prompt else TOLD_WITHIN + BATCH_WITHIN
            due = int(within * SECOND)
            self.world.after(due, lambda: self._takes_it_in(client, token, at))

    def _takes_it_in(self, client: SimClient, token: str, at: float) -> None:
        """Who was told by the server that it is not theirs does not hold it any more."""
        for who, hold in self._holds:
            mine = who is client and hold.token == token
            if mine and self.alive(client, hold) and not client.was_stopped_since(at):
                self.fail("S5", f"{token} is held, and the server said that it is not theirs")

    def handed_back(self, client: SimClient, token: str) -> None:
        """A grant was for nobody."""
        self.world.note("hands back", client.machine.name, token)
        self.reached["a grant for nobody, handed back"] += 1

    def pushed(self, client: SimClient, message: bytes) -> None:
        """The server spoke to a client."""
        if not message.endswith(self._key):
            return
        self._retries.forget(client)
        if message.startswith(b"G") and not client.machine.crashed:
            self.reached["granted by a push"] += 1
        if message.startswith(b"W") and client.waiting():
            self._retries.expect(client, message)

    def deaf(self, client: SimClient) -> None:
        """A client's push connection was lost while somebody waited."""
        self.world.note("deaf", client.machine.name)
        self._retries.forget(client)
        self.reached["the push connection lost while waiting"] += 1

    def too_young(self, client: SimClient) -> None:
        """One server is asked whatever it lost."""

    def busy(self, client: SimClient) -> None:
        """A background job sends requests without end, and no time passes."""
        self.fail("BUSY", f"the background job of {client.machine.name} never pauses")

    def crashed(self, client: SimClient) -> None:
        """A client is no more."""
        holds = any(who is client and self.alive(who, hold) for who, hold in self._holds)
        self.reached["crashed while holding" if holds else "crashed while waiting"] += 1
        self._gone.add(client.machine.name)

    # At the end

    def tidied(self, server: Server, keys: Sequence[bytes]) -> None:
        """All are through, and who could clean up has: only who crashed may have left something."""
        holder = look(server, keys)[0]
        name = holder and holder.split(b":")[1].decode()
        kept = self.untrusted or self.world.doubled or self.settings.lock_delay
        left_some = bool(self._gone or self._closed)
        kept = kept or (self.settings.owner and left_some)  # then a co-holder has it
        left = name is not None and self.is_left(str(name))
        if holder and not left and not kept and not self._is_passed_on(holder):
            self.fail("S10", f"{holder!r} has the lock, and nobody holds it")

    def finished(self, server: Server, keys: Sequence[bytes]) -> None:
        """All are through, and all clean-up has had its time: nothing may be left."""
        holder = server.data.string(keys[0])
        if holder is not None:
            self.fail("S10", f"the lock is still {holder!r}")
        left = [waiter for waiter in _line(server, keys) if not self._excused(waiter)]
        if left and not self._forgetful:
            self.fail("S10", f"still in line: {left!r}")
        if self.resource.value != self.resource.accepted and not self.settings.owner:
            self.fail("S6", "an accepted write was overwritten")

    def given_up(self, stopped: set[str]) -> None:
        """All clean-up has had its time: what was given up and may still arrive is refused.

        Not by a node that lost its data, and is not asked for longer than a clean-up is tried; nor
        where the client was `stopped` meanwhile.
        """
        settings = self.settings
        tried = max(int(TOMBSTONE_MS) / 1000, settings.ttl + settings.lock_delay)
        if self._forgetful or (settings.wipe and settings.quarantine + DOWN_AT_MOST > tried):
            return
        for token, server in self._abandoned.kept(doubled=self.world.doubled):
            if not self._is_excused(token, stopped) and token not in self._kept:
                self.fail("S16", f"{token} took {server}, was never held, and is not released")
        for token, server in self._abandoned.left(doubled=self.world.doubled):
            if not self._is_excused(token, stopped):
                self.fail(
                    "S16", f"{server} has no tombstone of {token}, of which a request may arrive"
                )

    def _is_excused(self, token: str, stopped: set[str]) -> bool:
        name = _client(token)
        return self.is_left(name) or name in stopped or token in self._exported

    def forgot(self, client: SimClient) -> None:
        """No task of a client waits or holds: it keeps no waiter in memory."""
        left = client.registered()
        if left:
            self.fail("LEAK", f"{client.machine.name} keeps {left}, and nothing waits")

    def _excused(self, waiter: bytes) -> bool:
        """Whether its client is no more, or never sent the request that put it there.

        An abandoned request of one who exported the lease may come when that has run out: if it is
        granted the lock, it hands it back.
        """
        _, client, number, _ = waiter.decode().split(":", 3)
        if self.is_left(client) or self._is_passed_on(waiter):
            return True
        what = f"acquire {client}:{number}"
        return any(note[1] == "doubled" and note[3] == what for note in self.world.trace)


def _client(token: str) -> str:
    """Return the name of the client that drew a token."""
    return token.split(":")[1]


def look(server: Server, keys: Sequence[bytes]) -> tuple[bytes | None, bytes | None]:
    """The lock's holder, and the last fence."""
    return server.data.string(keys[0]), server.data.string(keys[1])


def _line(server: Server, keys: Sequence[bytes]) -> list[bytes]:
    """Those who wait, in order, without the marks."""
    queue = keys_of(keys[0])[2]
    return [waiter.lstrip(b"!") for waiter in server.data.members(queue, MARKS)]
