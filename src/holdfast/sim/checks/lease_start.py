"""S2 at the start of a lease: its time counts from its first request, and it is still valid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.spec import WINDOW_LONGEST
from holdfast.core.token import client_in

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseState
    from holdfast.port import Reply
    from holdfast.sim.checks.record import Record
    from holdfast.sim.client import SimClient


class LeaseStartCheck:
    """When the first request of each token was sent."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._sent_since: dict[str, int] = {}
        """By token, when its first request without a reply was sent."""
        self._granted_since: dict[str, int] = {}
        """The same for the request that was granted."""
        self.answered_at: dict[str, int] = {}
        """By token, when its last reply arrived."""

    def sent(self, token: str) -> None:
        """A client sent a request for the lock."""
        self._sent_since.setdefault(token, self._record.sim.now)

    def answered(self, token: str, reply: Reply) -> None:
        """A client received the reply to such a request: a list if it must wait."""
        since = self._sent_since.pop(token, self._record.sim.now)
        self.answered_at[token] = self._record.sim.now
        if isinstance(reply, list):
            self._granted_since.pop(token, None)
        else:
            self._granted_since[token] = since

    def confirmed(self, token: str) -> None:
        """A client received the reply to a renewal, from which a lease may count too."""
        self._granted_since.pop(token, None)

    def awaits_answer(self, client: str) -> bool:
        """Whether a client has sent a request for the lock without a reply yet."""
        return any(client_in(token) == client for token in self._sent_since)

    def took(self, client: SimClient, lease: LeaseState) -> None:
        """A lease begins. Check that it counts from its first request, and is valid (S2)."""
        fail, sentinel = self._record.fail, self._record.settings.sentinel
        least = lease.spec.validity - lease.spec.usable
        short = lease.deadline - client.now() < least - 1e-6
        since = self._granted_since.get(lease.token)
        if since is not None and not sentinel:  # there a refusal is also a reply
            late = lease.deadline - lease.spec.validity - client.machine.local_time(since)
            handed_over = lease.deadline - client.now() <= WINDOW_LONGEST  # by a push message
            if late > 1e-3 and not handed_over:  # noqa: PLR2004 - a millisecond
                fail("S2", f"{lease.token} counts from {late:.3f} s after its first request")
        if lease.process == client.generation and short:
            fail("S2", f"{lease.token} began with less than min_validity left")
        if lease.process == client.generation and not lease.is_valid(
            client.now(), client.generation
        ):
            fail("S2", f"{lease.token} began after its deadline")
