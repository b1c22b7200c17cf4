"""S2 where a lease begins: it counts from its first request, and has time left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.spec import WINDOW_LONGEST
from holdfast.core.token import client_in

if TYPE_CHECKING:
    from holdfast.core.hold import Hold
    from holdfast.port import Reply
    from holdfast.sim.checks.record import Record
    from holdfast.sim.client import SimClient


class LeaseStartCheck:
    """When each token was first asked for."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._sent_since: dict[str, int] = {}
        """Of each token, its first request without an answer."""
        self._granted_since: dict[str, int] = {}
        """The same of the request that was granted."""
        self.answered_at: dict[str, int] = {}
        """When the last request of each token was answered."""

    def sent(self, token: str) -> None:
        """A client asks for the lock."""
        self._sent_since.setdefault(token, self._record.world.now)

    def answered(self, token: str, reply: Reply) -> None:
        """A client received the answer to such a request: a list if it has to wait."""
        since = self._sent_since.pop(token, self._record.world.now)
        self.answered_at[token] = self._record.world.now
        if isinstance(reply, list):
            self._granted_since.pop(token, None)
        else:
            self._granted_since[token] = since

    def confirmed(self, token: str) -> None:
        """A client received the answer to a renewal, from which a lease counts as well."""
        self._granted_since.pop(token, None)

    def awaits_answer(self, client: str) -> bool:
        """Whether a request for the lock was sent by this client, and not answered yet."""
        return any(client_in(token) == client for token in self._sent_since)

    def took(self, client: SimClient, hold: Hold) -> None:
        """A lease begins: it is not over before it is given to the caller."""
        fail, sentinel = self._record.fail, self._record.settings.sentinel
        least = hold.spec.validity - hold.spec.usable
        short = hold.deadline - client.now() < least - 1e-6
        since = self._granted_since.get(hold.token)
        if since is not None and not sentinel:  # there a refusal is an answer
            late = hold.deadline - hold.spec.validity - client.machine.local_time(since)
            handed_over = hold.deadline - client.now() <= WINDOW_LONGEST  # by a push, meanwhile
            if late > 1e-3 and not handed_over:  # noqa: PLR2004 - a millisecond
                fail("S2", f"{hold.token} counts from {late:.3f} s after its first sending")
        if hold.process == client.generation and short:
            fail("S2", f"{hold.token} was taken with less than min_validity left")
        if hold.process == client.generation and not hold.alive(client.now(), client.generation):
            fail("S2", f"{hold.token} was taken when its time was up")
