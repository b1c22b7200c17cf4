"""Leader election: one of several candidates leads, and the others know who it is.

The rules:

1. **A term is a lease.** The election has an ordinary lock, so what holds for leases holds for
   terms: a leader stops to consider itself one at its deadline, before the server can grant the
   lock to another candidate. The number of a term is its fence. Candidates wait in the queue.
2. **The script that changes the leader notifies the observers** (`scripts/_announce.lua`). They
   wait in a separate queue, and each of them then reads who leads. An observation is an attempt to
   acquire (`core.server_acquire`) that never acquires anything: its script returns the leader if it
   differs from the one that the observer knows, and otherwise joins that queue.
3. **A message may be lost, and the end of a lease sends none.** So an observer also requests again
   when the lease of the leader should be over, as a waiter does.

On a quorum no server knows the leader, and a candidate has won when it has counted the votes. So
there an observer reads the holder from a majority once per second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.acquire import acquire
from holdfast.core.inspect import holder
from holdfast.core.kind import ELECTION, OBSERVERS
from holdfast.core.lease_state import LOST, LeaseRef
from holdfast.core.messages import NotNeeded
from holdfast.core.token import read_holder
from holdfast.errors import LeaseLost, NodeUnavailable
from holdfast.keys import ELECTION as KIND
from holdfast.keys import OBSERVERS as RECORD
from holdfast.keys import Keys, keys_of_kind
from holdfast.scripts import CAMPAIGN, OBSERVE

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder

READ_EVERY = 1.0
"""Seconds between two reads of an observer, on a quorum."""

RETRY_AFTER = 1.0
"""The longest pause of a candidate after its servers were unavailable."""

NOTHING, NO_LEADER = "", "-"
"""What an observer knows: nothing yet, or that there is no leader. Otherwise, its token."""


class ElectionSpec(NamedTuple):
    """An election: its lock, and the lock that stands for its observers."""

    lock: LockSpec
    observers: LockSpec


class Observation(NamedTuple):
    """What an observer has read."""

    leader: Holder | None
    known: str
    """The argument of the next `observe`."""


def describe_election(spec: LockSpec, namespace: str, *, quorum: bool) -> ElectionSpec:
    """Return the election whose lock has the name and the settings of `spec`."""
    keys = replace(keys_of_kind(KIND, spec.name, namespace, RECORD), replicas=spec.replicas)
    lock_key, fence, queue, observers = keys
    lock = replace(spec, keys=keys, acquire_script=CAMPAIGN, kind=ELECTION)
    if quorum:  # no server notifies observers
        lock = replace(spec, keys=Keys((lock_key, fence, queue)))
    observing = replace(
        spec, keys=Keys((observers, lock_key, fence)), acquire_script=OBSERVE, kind=OBSERVERS
    )
    return ElectionSpec(lock, observing)


def is_leading(session: Session, election: ElectionSpec) -> bool:
    """Whether this client leads now, in this process."""
    lease = session.held.newest.get(election.lock.keys.lock)
    return lease is not None and lease.is_valid(session.port.now(), session.port.process())


async def campaign(session: Session, election: ElectionSpec, ref: LeaseRef) -> None:
    """Acquire the lock, however long the servers are unavailable.

    If this is interrupted, nothing is held.

    Raises:
        NodeUnavailable: the client is closed.
        WouldDeadlock, ConfigurationError, NotHeld: as `acquire`.
    """
    while True:
        try:
            await acquire(session, election.lock, None, ref)
        except NodeUnavailable:
            if session.closed:
                raise
            await session.port.sleep(RETRY_AFTER * session.port.jitter())
        else:
            return


def ended_by_loss(ref: LeaseRef, error: LeaseLost) -> bool:
    """Whether an error reports that this term was lost, and not another lease."""
    lease = ref._lease
    if lease is None or lease.state is not LOST:
        return False
    return (error.lock, error.fence) == (lease.spec.name, lease.fence)


async def observe(session: Session, election: ElectionSpec, known: str) -> Observation:
    """Wait until the leader differs from the known one, and return the new one.

    If this is interrupted, no observer is left on the server.

    Raises:
        NodeUnavailable: the server does not reply.
        ConfigurationError: the server refuses the request.
        NotHeld: this process was forked during the call.
    """
    if session.deployment.is_quorum:
        return await _read_repeatedly(session, election, known)
    lock = replace(election.observers, extra_args=(known,))
    try:
        await acquire(session, lock, None, LeaseRef())
    except NotNeeded as found:
        token, left_ms, fence = found.reply
        if not token:
            return Observation(None, NO_LEADER)
        leader = read_holder(token, left_ms, fence)
        return Observation(leader, leader.token)
    except NodeUnavailable as error:
        name = lock.name
        why = str(error).removeprefix(f"{name!r} was not acquired: ")
        message = f"the leader of {name!r} is not known: {why}"
        raise NodeUnavailable(message, lock=name, node=error.node) from None
    raise AssertionError("unreachable: an observation never acquires its lock")


async def _read_repeatedly(session: Session, election: ElectionSpec, known: str) -> Observation:
    while True:
        leader = await holder(session, election.lock)
        found = NO_LEADER if leader is None else leader.token
        if found != known:
            return Observation(leader, found)
        await session.port.sleep(READ_EVERY)
