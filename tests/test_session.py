"""The leases of a client, and what it reports about them."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.events import Event
from holdfast.core.lease_state import LOST, RELEASED
from holdfast.core.spec import TOMBSTONE_MS
from holdfast.errors import ConfigurationError, NotHeld
from kit.fake_nodes import ClockedPort, session_of
from kit.interrupts import AtLine
from kit.sessions import KEY, START, TOKEN, FakeQuorum, SessionWithLeases

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.lease_state import LeaseState
    from holdfast.core.session import Session


# Active leases


def test_a_new_client_holds_nothing_and_has_its_settings() -> None:
    for polls in (True, False):
        port, events = ClockedPort(), list[Event]()
        session = session_of(port, events.append, polls=polls)
        assert (session.polls, session.closed, session.deployment.longest_ttl) == (
            polls,
            False,
            60.0,
        )
        assert (session.process, session.waiters.has_waited, session.held.newest) == (1, False, {})
        assert session.renewer._has_ended == port.has_ended
        session.renewer._report(Event("polling"))
        assert events == [Event("polling")]


def test_the_newest_lease_of_a_key_is_known_until_it_is_forgotten() -> None:
    setup = SessionWithLeases()
    older, newer = setup.take(), setup.take()
    assert setup.session.held.newest == {KEY: newer}
    assert not setup.session.held.shared
    assert list(setup.session.renewer.inbox) == [older, newer]
    setup.session.forget(older)
    assert setup.session.held.newest == {KEY: newer}
    assert list(setup.session.renewer.inbox) == [newer]
    setup.session.forget(newer)
    setup.session.forget(newer)
    assert not setup.session.held.newest


def test_a_lease_that_another_thread_adds_while_an_older_one_is_removed_is_kept() -> None:
    """The renewer removes a lost lease: between its look-up and the removal, a thread acquires."""
    setup = SessionWithLeases()
    older, newer = setup.take(fence=4), setup.take(fence=5)
    held = setup.session.held
    held.mutex = threading.RLock()  # the port of this test has none
    held.newest = AddsDuringGet({KEY: older}, lambda: held.add(newer))
    held.remove(older)
    held.newest.thread.join()
    assert held.newest == {KEY: newer}


class AddsDuringGet(dict[bytes, "LeaseState"]):
    """The newest leases, of which another thread adds one while this thread looks one up."""

    def __init__(self, leases: dict[bytes, LeaseState], add: Callable[[], None]) -> None:
        super().__init__(leases)
        self.thread = threading.Thread(target=add)

    def get(self, key: bytes, default: Any = None) -> Any:
        """Return the lease, after the other thread has added its own, or waits for the mutex."""
        found = super().get(key, default)
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(0.1)
        return found


def test_an_older_lease_that_comes_late_does_not_replace_a_newer_one() -> None:
    """An operator evicted it while its thread waited for replicas, and another one acquired."""
    setup = SessionWithLeases()
    newer, older = setup.take(fence=5), setup.take(fence=4)
    assert setup.session.held.newest == {KEY: newer}
    setup.session.forget(older)
    assert setup.session.held.newest == {KEY: newer}


def test_all_leases_of_owners_are_known() -> None:
    setup = SessionWithLeases()
    first, second = setup.take(owner="us"), setup.take(owner="them")
    setup.port.caller = "another"
    third = setup.take(owner="us")
    assert setup.session.held.all() == [first, second, third]
    assert not setup.session.held.newest
    for lease in (first, first, third):
        setup.session.forget(lease)
    assert setup.session.held.all() == [second]
    setup.session.forget(second)
    assert not setup.session.held.shared, "a key without leases is kept"
    setup.session.forget(second)


@pytest.mark.parametrize("adds", [True, False], ids=["add", "remove"])
def test_a_signal_handler_may_add_and_remove_leases_of_the_same_owner_at_any_line(
    adds: bool,
) -> None:
    for at in itertools.count(1):
        setup = SessionWithLeases()
        first = setup.take(owner="us")
        held: list[LeaseState] = []

        remove = partial(setup.session.held.remove, first)

        def add(setup: SessionWithLeases = setup, held: list[LeaseState] = held) -> None:
            held.append(setup.take(owner="us"))

        action, handler = (add, remove) if adds else (remove, add)
        with AtLine(at, ("core/held.py",), handler) as interrupt:
            action()
        if interrupt.position is None:
            break
        assert setup.session.held.all() == held, interrupt.position
    assert at > 3


def test_a_lease_that_its_caller_never_received_is_released() -> None:
    setup = SessionWithLeases()
    lease = setup.take()
    setup.session.end_locally(lease)
    assert lease.state is RELEASED
    assert not setup.session.held.newest


@pytest.mark.parametrize("verb", ["acquire", "extend"])
def test_the_error_in_a_child_forked_during_an_operation_names_the_operation(verb: str) -> None:
    session = SessionWithLeases().session
    session.check_process(session.process, "a", verb)
    message = rf"^this process was forked during {verb}\(\) of 'a', "
    with pytest.raises(NotHeld, match=message) as raised:
        session.check_process(session.process + 1, "a", verb)
    assert raised.value.lock == "a"


@pytest.mark.parametrize("renew", [True, False])
def test_a_lease_that_cannot_be_renewed_is_refused(renew: bool) -> None:
    setup = SessionWithLeases()
    setup.port.can_run = False
    if not renew:
        assert setup.take(renew=False)
        return
    with pytest.raises(ConfigurationError, match=r"lock 'a' cannot be renewed: no thread") as error:
        setup.take()
    assert error.value.lock == "a"
    setup.session.renewer._wake_at = START + 3
    assert setup.take()


def test_a_lease_of_the_parent_is_refused_in_a_forked_child() -> None:
    setup = SessionWithLeases()
    setup.port.number = 2
    with pytest.raises(NotHeld, match="forked during") as error:
        setup.take()
    assert error.value.lock == "a"


def test_a_forked_child_holds_nothing() -> None:
    quorum = FakeQuorum()
    setup = SessionWithLeases(quorum=quorum)
    setup.take()
    setup.waiter()
    before = setup.session.renewer
    setup.port.number = 2
    setup.session.begin()
    session: Session = setup.session
    assert session.process == 2
    assert session.renewer is not before
    assert not session.held.newest
    assert not session.held.shared
    assert not session.waiters.has_waited
    assert not session.waiters.can_notify(TOKEN, KEY)
    assert quorum.begun == [session, session]


# Reentrancy, and callers that would wait for themselves


def test_a_valid_lease_is_found_for_the_actor_that_holds_it() -> None:
    setup = SessionWithLeases()
    lease, spec = setup.take(), setup.spec()
    assert setup.session.held.held_by_caller(spec) is lease
    assert setup.session.held.held_by_caller(setup.spec("b")) is None
    setup.port.caller = "another"
    assert setup.session.held.held_by_caller(spec) is None
    setup.port.caller = "main"
    setup.port.time = lease.deadline
    assert setup.session.held.held_by_caller(spec) is None
    setup.port.time = START
    setup.port.number = 2
    assert setup.session.held.held_by_caller(spec) is None


def test_an_owner_that_acquires_again_gets_another_lease() -> None:
    setup = SessionWithLeases()
    lease = setup.take(owner="us")
    assert setup.session.held.held_by_caller(setup.spec(owner="us")) is None
    assert setup.session.held.held_by_caller(setup.spec(owner="them")) is lease
    assert setup.session.held.held_by_caller(setup.spec()) is lease
    setup.port.caller = "another"
    assert setup.session.held.held_by_caller(setup.spec()) is None


def test_of_several_leases_of_an_actor_a_valid_one_is_found() -> None:
    setup = SessionWithLeases()
    ended, alive = setup.take(owner="us"), setup.take(owner="them")
    ended.state = LOST
    assert setup.session.held.held_by_caller(setup.spec()) is alive


@pytest.mark.parametrize("owner", [None, "us"])
def test_waiting_would_block_a_holder_on_the_same_event_loop(owner: str | None) -> None:
    setup = SessionWithLeases()
    lease = setup.take(owner=owner)
    blocks = setup.session.held.is_blocked_by_waiting
    assert not blocks(setup.spec())
    setup.port.blocked = {"main"}
    assert blocks(setup.spec())
    assert blocks(setup.spec(owner="them"))
    assert blocks(setup.spec(owner="us")) is (owner is None)
    assert not blocks(setup.spec("b"))
    setup.port.time = lease.deadline
    assert not blocks(setup.spec())
    setup.port.time = START
    setup.port.number = 2
    assert not blocks(setup.spec())


def test_waiting_would_block_if_one_of_several_holders_is_on_the_same_loop() -> None:
    setup = SessionWithLeases()
    setup.take(owner="us")
    setup.port.caller = "another"
    setup.take(owner="us")
    setup.port.blocked = {"another"}
    assert setup.session.held.is_blocked_by_waiting(setup.spec())


# Losses and closing


@pytest.mark.parametrize(
    ("reason", "needs_tombstone", "several", "cleans_up"),
    [
        ("taken", False, False, False),
        ("key_missing", False, False, False),
        ("taken", True, False, True),
        ("taken", False, True, True),
        ("expired", False, False, True),
        ("unreachable", False, False, True),
        (None, False, False, True),
    ],
)
def test_a_loss_is_reported_and_cleaned_up_if_the_key_may_still_exist(
    reason: Any, needs_tombstone: bool, several: bool, cleans_up: bool
) -> None:
    setup = SessionWithLeases(quorum=FakeQuorum() if several else None)
    lease = setup.take(lock_delay=0.25)
    lease.needs_tombstone, lease.reason, lease.longest_ttl = needs_tombstone, reason, 90.0
    waiter = lease.waiter = setup.waiter() if reason else None
    setup.session.on_lost(lease)
    assert setup.events == [Event("lost", "a", 3, reason or "expired")]
    assert not setup.session.held.newest
    assert waiter is None or list(waiter.channel._draining) == [(TOKEN, START)]
    ttl = "90000" if several else "10000"
    args = TOKEN, ttl, f"{TOMBSTONE_MS} lost", lease.spec.settings
    assert setup.requests == ([args] if cleans_up else [])
    assert [each.deadline for each in setup.cleanups] == [START + 90.25] * cleans_up


@pytest.mark.parametrize("count", [1, 100, 100 + 2])
def test_closing_a_client_reports_the_leases_that_it_holds(count: int) -> None:
    setup = SessionWithLeases()
    for number in range(count - 1):
        setup.take(f"n{number}")
    setup.take("owned", owner="us")
    setup.take("ended").state = LOST
    setup.session.close()
    assert len(setup.events) == 1
    setup.session.close()
    names = [f"'n{number}' (fence 3)" for number in range(count - 1)] + ["'owned' (fence 3)"]
    if count > 100:
        names = [*names[:100], "2 more"]
    held = f"the client was closed while it held {', '.join(names)}"
    detail = f"{held}: no longer renewed; release leases before you close the client"
    assert setup.events == [Event("closed_while_held", detail=detail)]
    assert setup.session.closed
    assert setup.session.renewer._closed


def test_closing_a_client_whose_leases_have_expired_reports_nothing() -> None:
    quorum = FakeQuorum()
    setup = SessionWithLeases(quorum=quorum)
    assert not setup.session.closed
    lease = setup.take()
    setup.port.time = lease.deadline
    setup.session.close()
    assert not setup.events
    assert quorum.closed


def test_leases_are_checked_again_after_a_failover() -> None:
    for owner in (None, "us"):
        setup = SessionWithLeases()
        setup.session.endpoint_changed(object())
        assert not setup.session.renewer._renews_all
        setup.take(owner=owner)
        setup.session.endpoint_changed(object())
        assert setup.session.renewer._renews_all
