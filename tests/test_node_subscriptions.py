"""The subscriptions of a pub/sub connection to a cluster node, when it ends."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING

from holdfast.wire.node_subscriptions import NodeSubscriptions, SubscriptionRequest
from kit.interrupts import AtLine

if TYPE_CHECKING:
    from collections.abc import Callable

NODE_ID = b"n" * 40


class Channel:
    """A listener that records whether it is subscribed."""

    idle = False

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.is_subscribed = False

    def on_subscribed(self, *_: object) -> None:
        self.is_subscribed = True

    def on_disconnect(self, _: float) -> None:
        self.is_subscribed = False

    def on_message(self, *_: object) -> None: ...

    def tick(self, now: float) -> tuple[list[tuple[bytes, ...]], float]:
        return [], now + 60.0


def connect(node: NodeSubscriptions, channel: Channel, woken: list[None]) -> SubscriptionRequest:
    """Open a connection and subscribe a channel, as the thread that owns the connection does."""
    node.on_subscribed(0.0, lambda: woken.append(None))
    request = SubscriptionRequest(channel, subscribe=True)
    node.submit(request)
    node.tick(0.0)
    node.on_message(NODE_ID, 0.0)
    if request.error is None:
        node.on_message([b"ssubscribe", channel.name, 1], 0.0)
    return request


def in_another_thread(action: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()

    return run


def check_reconnect_at(at: int) -> tuple[str | None, bool]:
    """Reconnect in another thread at a line of `on_disconnect`, as soon as it is allowed.

    Returns the line, and whether it was allowed there.
    """
    node, old, new = NodeSubscriptions(lambda: None), Channel(b"old"), Channel(b"new")
    woken: list[None] = []
    requests: list[SubscriptionRequest] = []
    connect(node, old, woken)

    def reconnect() -> None:
        if not node.is_subscribed:
            requests.append(connect(node, new, woken))

    with AtLine(at, (f"wire{os.sep}node_subscriptions",), in_another_thread(reconnect)) as line:
        node.on_disconnect(1.0)
    assert not old.is_subscribed
    for request in requests:
        assert request.error is None, line.position
        assert node.is_subscribed
        assert node.contains(new), line.position
        assert new.is_subscribed, line.position
        woken.clear()
        node.submit(SubscriptionRequest(new, subscribe=False))
        assert woken, f"{line.position}: nothing wakes the owner of the new connection"
        assert node.tick(1.0)[0] == [(b"SUNSUBSCRIBE", b"new")]
    return line.position, bool(requests)


def test_a_reader_that_ends_late_does_not_reset_the_next_connection() -> None:
    reconnected = False
    for at in itertools.count(1):
        position, allowed = check_reconnect_at(at)
        reconnected = reconnected or allowed
        if position is None:
            break
    assert reconnected
