"""Immediate renewals, so that tests can use a ttl that a busy machine does not exceed."""

from __future__ import annotations

from typing import Any


def renew_now(client: Any, lease: Any) -> None:
    """Make the renewer renew a lease now, instead of after a third of its ttl."""
    lease._lease.renew_at -= lease._lease.spec.ttl
    client._session.renewer.schedule(lease._lease)
