"""Connections for threads: each thread has one connection per server, until the thread ends.

A thread sends a request and reads its reply on the same connection. If the connection fails, or the
thread is interrupted between the two, the connection is closed: its next reply would belong to the
wrong request. A forked child opens new connections.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING, cast

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.blocking_connection import BlockingConnection, ConnectThread, Packer
from holdfast.wire.clock import now
from holdfast.wire.diagnosis import no_reply_error
from holdfast.wire.echo_framing import run_user_script
from holdfast.wire.error_replies import (
    acl_error,
    atomic_probes,
    is_acl_denial,
    lock_probes,
    suggests_failover,
)
from holdfast.wire.packing import UnexpectedReply, decode_reply, pack, pack_eval, pack_evalsha
from holdfast.wire.process import reset_after_fork
from holdfast.wire.replication import (
    check_replication,
    max_replicas_needed,
    pack_wait,
    replicas_needed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.echo_framing import Step
    from holdfast.wire.target import Endpoint, Target


class BlockingWire:
    """The connections of a client's threads to one node.

    While a thread waits for a reply, its connection is removed from `_thread`. A signal handler or
    a finalizer may run in that thread at the same time, and use the client. On the same connection
    it would receive the reply that the thread is waiting for.
    """

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._can_fail_over = target.longest_ttl < math.inf
        self.closed = False
        target.observe_failover(self)
        self._reset()
        reset_after_fork(self._reset)

    def _reset(self) -> None:
        self._thread = threading.local()
        self._connections: weakref.WeakSet[BlockingConnection] = weakref.WeakSet()
        self._waiting: list[None] = []
        """One entry per thread that waits for a reply."""

    def _connect_now(
        self, timeout: float, instead_of: BlockingConnection | None
    ) -> tuple[BlockingConnection, float]:
        """Open a connection. Return it, and when its first request times out.

        The time to start the embedded server does not count.
        """
        if instead_of is not None and instead_of.stale:
            instead_of.close()
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=self._target.node)
        if self._target.prepare is not None:
            self._target.prepare()
        end = now() + timeout
        return self._register(
            BlockingConnection(self._target, min(timeout, self._timeout), prepare=False)
        ), end

    def _register(self, connection: BlockingConnection) -> BlockingConnection:
        self._connections.add(connection)
        if self.closed:
            connection.stale = True
            connection.close()
        return connection

    def _pop_connection(self) -> BlockingConnection | None:
        """Remove the calling thread's connection from `_thread`. Return it if it is usable."""
        connection: BlockingConnection | None = self._thread.__dict__.pop("connection", None)
        if connection is not None and connection.stale:
            connection.close()
            return None
        return connection

    def drop(self) -> None:
        """Close the calling thread's connection."""
        connection: BlockingConnection | None = self._thread.__dict__.pop("connection", None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close the connections of all threads. A pending request fails."""
        self.closed = True
        for connection in self._all_connections():
            connection.stale = True
            connection.close()

    def endpoint_changed(self, endpoint: Endpoint) -> None:
        """Stop using connections to other servers. Pending requests continue."""
        for connection in self._all_connections():
            connection.stale = connection.stale or connection.endpoint != endpoint

    def _all_connections(self) -> list[BlockingConnection]:
        while True:
            try:
                return list(self._connections)
            except RuntimeError:
                continue

    def _unknown(self, error: BaseException | str) -> OutcomeUnknown:
        return no_reply_error(self._target.node, error)

    def call(self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float) -> Reply:
        """Run a script on the node, once; as `holdfast.port.Call`, blocking."""
        # The hottest path of the client: inlined rather than split into functions.
        waiting = self._waiting
        connection: BlockingConnection | None = self._thread.__dict__.pop("connection", None)
        if connection is None or connection.stale:
            connection, end = self._connect_now(timeout, connection)
            timeout = max(0.0, end - now())
        try:
            if keys.replicas and replicas_needed((script, keys, args)):
                reply = self._call_replicated(
                    connection, (script, keys, args), now() + timeout, pack_evalsha
                )
            else:
                serial = next(connection.serials)
                packed = pack_evalsha(script, keys, args, serial)
                waiting.append(None)
                try:
                    reply = connection.round_trip(packed, timeout, waiting)
                finally:
                    waiting.pop()
                if isinstance(reply, hiredis.ReplyError):
                    reply = self._handle_error_reply(
                        connection, str(reply), (script, keys, args), connection.end
                    )
                else:
                    reply = decode_reply(reply, serial)
        except (OSError, hiredis.HiredisError, UnexpectedReply) as error:
            connection.close()
            raise self._unknown(error) from None
        except BaseException:
            connection.close()
            raise
        if isinstance(reply, HoldfastError):
            connection.stale = connection.stale or (
                self._can_fail_over and suggests_failover(reply)
            )
        # A signal handler may have opened another one.
        if (
            connection.stale
            or self._thread.__dict__.setdefault("connection", connection) is not connection
        ):
            connection.close()
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Reply:
        """Run a script; as `AtomicPort.step`, blocking."""
        connection: BlockingConnection | None = self._thread.__dict__.get("connection")
        if connection is not None and connection.has_unexpected_input():
            self.drop()
        if not script.serial:
            return self._run_framed((script, keys, args), timeout)
        return self.call(script, keys, cast("tuple[str, ...]", args), timeout)

    def _run_framed(self, step: Step, timeout: float, before: bytes = b"") -> Reply:
        connection, end = self.take_connection(), now() + timeout
        if connection is None:
            connection, end = self._connect_now(timeout, None)
        waiting = self._waiting
        try:
            waiting.append(None)
            try:
                reply = connection.run_dialogue(run_user_script(step), end, before, waiting)
            finally:
                waiting.pop()
            if isinstance(reply, hiredis.ReplyError):
                reply = self._error_for(connection, str(reply), step[1], end)
        except (OSError, hiredis.HiredisError, UnexpectedReply) as error:
            connection.close()
            raise self._unknown(error) from None
        except BaseException:
            connection.close()
            raise
        if isinstance(reply, HoldfastError):
            connection.stale = connection.stale or (
                self._can_fail_over and suggests_failover(reply)
            )
        self.return_connection(connection)
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def take_connection(self) -> BlockingConnection | None:
        """Return the calling thread's connection, if it has one, for exclusive use."""
        return self._pop_connection()

    def return_connection(self, connection: BlockingConnection) -> None:
        """Keep the connection for the next request of this thread."""
        # A signal handler may have opened another one.
        if (
            connection.stale
            or self._thread.__dict__.setdefault("connection", connection) is not connection
        ):
            connection.close()

    def _call_replicated(
        self, connection: BlockingConnection, request: Request, end: float, pack: Packer
    ) -> Reply | HoldfastError:
        """Run a script, and wait until enough replicas have its writes."""
        replicas, serial, left = (
            replicas_needed(request),
            next(connection.serials),
            max(0.0, end - now()),
        )
        raw = connection.round_trip(pack(*request, serial) + pack_wait(replicas, left), left)
        acked = connection.read_reply()
        if not isinstance(raw, hiredis.ReplyError):
            node, user = self._target.node, self._target.user
            return check_replication(decode_reply(raw, serial), acked, replicas, node, user)
        connection.confirm_error(end)
        if str(raw).startswith("NOSCRIPT") and pack is pack_evalsha:
            return self._call_replicated(connection, request, end, pack_eval)
        return self._error_for(connection, str(raw), request[1], end)

    def _handle_error_reply(
        self, connection: BlockingConnection, text: str, request: Request, end: float
    ) -> Reply | HoldfastError:
        """Handle the error reply to the last request, once it is confirmed."""
        if text.startswith("NOSCRIPT"):  # the reply to EVAL confirms it: it has a serial
            serial = next(connection.serials)
            raw = connection.round_trip(pack_eval(*request, serial), max(0.0, end - now()))
            if not isinstance(raw, hiredis.ReplyError):
                return decode_reply(raw, serial)
            text = str(raw)
        connection.confirm_error(end)
        return self._error_for(connection, text, request[1], end)

    def _error_for(
        self, connection: BlockingConnection, text: str, keys: Keys, end: float
    ) -> HoldfastError:
        """Return the error to raise for a confirmed error reply."""
        if not is_acl_denial(text):
            return self._target.error_for_reply(text)
        node, user = self._target.node, self._target.user
        commands = atomic_probes(keys) if keys.spare else lock_probes(keys)
        first = connection.round_trip(b"".join(map(pack, commands)), max(0.0, end - now()))
        replies = [first, *(connection.read_reply() for _ in commands[1:])]
        return acl_error(text, replies, keys, node, user)

    def call_many(
        self, requests: Sequence[Request], timeout: float, on_tick: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Run scripts in one pipeline; as `Background.call_many`, blocking."""
        replies = self._call_many(requests, timeout, on_tick, pack_evalsha)
        unknown = [
            index
            for index, reply in enumerate(replies)
            if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")
        ]
        if unknown:
            again = [requests[index] for index in unknown]
            retried = self._call_many(again, timeout, on_tick, pack_eval)
            for index, reply in zip(unknown, retried, strict=True):
                replies[index] = reply
        for index, reply in enumerate(replies):
            if isinstance(reply, hiredis.ReplyError):
                replies[index] = self._target.error_for_reply(str(reply))
        if self._can_fail_over and any(map(suggests_failover, replies)):
            self.drop()
        return replies

    def _call_many(
        self,
        requests: Sequence[Request],
        timeout: float,
        on_tick: Callable[[], float],
        pack: Packer,
    ) -> list[Reply | HoldfastError]:
        replies: list[Reply | HoldfastError] = []
        failure: HoldfastError = self._unknown(f"no reply within {timeout} s")
        connection: BlockingConnection | None = None
        try:
            connection = self._pop_connection()
            if connection is None or self.closed:
                connection = self._register(self._connect_in_background(timeout, on_tick))
            replies = connection.call_many(requests, timeout, on_tick, pack)
        except HoldfastError as error:
            failure = error
        except (OSError, hiredis.HiredisError, UnexpectedReply) as error:
            failure = self._unknown(error)
        expected = len(requests) + (max_replicas_needed(requests) > 0)
        if connection is not None and len(replies) == expected:
            self._thread.connection = connection
        elif connection is not None:
            connection.close()
        replies += [failure] * (expected - len(replies))
        node, user, acked = self._target.node, self._target.user, replies[-1]
        return [
            check_replication(reply, acked, replicas_needed(request), node, user)
            for request, reply in zip(requests, replies, strict=False)
        ]

    def _connect_in_background(
        self, timeout: float, on_tick: Callable[[], float]
    ) -> BlockingConnection:
        if self.closed:
            raise NodeUnavailable("this client is closed", node=self._target.node)
        opening = ConnectThread(self._target, timeout)
        end = now() + timeout
        while now() < end:
            due = on_tick()
            if opening.done.wait(max(0.0, min(end, due) - now())):
                return opening.connection()
        if opening.done.is_set():
            return opening.connection()
        opening.abandon()
        raise self._target.timeout_error()
