"""Reads all locks of a deployment.

Rules:

- Nothing is changed. A client's connections run a guard behind Sentinels and on several servers,
  and the guard writes a restart marker; these connections do not run it.
- Keys are found with SCAN, never with KEYS, on every server that keeps locks.
- Each lock is read by one short script (`overview.lua`). The scripts for a page of keys are
  pipelined, so that many locks take few round trips and no server is blocked for long.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import hiredis

from holdfast import embedded
from holdfast.core.rounds import without_name
from holdfast.errors import HoldfastError, NodeUnavailable, NoQuorum
from holdfast.keys import SLOTS, Keys, is_named, keys_of, lock_key_in
from holdfast.overview.kinds import kind_of
from holdfast.overview.views import (
    NO_KEY,
    NO_READING,
    LockReading,
    LockView,
    Survey,
    merge_readings,
)
from holdfast.scripts import OVERVIEW, READ_CACHED
from holdfast.wire.blocking_connection import BlockingConnection
from holdfast.wire.cluster import Cluster
from holdfast.wire.cluster_blocking import ClusterWire
from holdfast.wire.error_replies import acl_error, is_acl_denial, read_probes
from holdfast.wire.packing import UnexpectedReply, pack, pack_eval, pack_evalsha
from holdfast.wire.parallel import run_in_parallel
from holdfast.wire.wiring import parse_deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.port import Request
    from holdfast.wire.blocking_connection import Packer
    from holdfast.wire.target import Target

P = ParamSpec("P")
T = TypeVar("T")

REPLY_TIMEOUT = 2.0
"""Seconds to wait for one reply."""

PAGE_SIZE = 1000
"""How many keys one SCAN examines, and how many locks are read per round trip."""

ALL = -1
"""Value of `waiters`: list every waiter."""

_LONGEST_TTL = 60.0  # required by parse_deployment, and not used here
_REDIRECTIONS = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")
_NO_LOCK = ("WRONGTYPE", *_REDIRECTIONS)
"""Error replies that mean: this server has no lock under this key now."""

_CONNECTED = {1: True, 0: False, -1: None}
"""Whether a waiter's client is connected, by the reply of `overview.lua`."""


class ServerReader:
    """Reads the locks of one server, over one connection that it keeps open."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._connection: BlockingConnection | None = None

    def check(self) -> None:
        """Check that the embedded server runs, if this is it. It is not started.

        Raises:
            NodeUnavailable: it does not run, or hangs.
        """
        is_embedded = self.target.prepare is not None
        if self._connection is None and is_embedded and not embedded.is_running():
            raise NodeUnavailable(
                f"{self.target.node} is not running: start it with holdfast run, or give --url",
                node=self.target.node,
            )

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def survey(self, matches: Callable[[bytes], bool], waiters: int) -> dict[bytes, LockReading]:
        """Return all locks that are held or waited for, by key.

        Args:
            matches: selects the locks by key.
            waiters: how many waiters to list per lock.

        Raises:
            NodeUnavailable: the server does not reply, or refuses the request.
            ConfigurationError: the user lacks permissions, or the server lacks commands.
        """
        if self.target.longest_ttl < math.inf:
            self.close()  # reconnect: another server may be the primary by now
        seen: set[bytes] = set()
        readings: dict[bytes, LockReading] = {}
        cursor = b"0"
        self.check()
        while True:
            size = str(PAGE_SIZE)
            cursor, found = self._request("SCAN", cursor, "MATCH", "holdfast:*", "COUNT", size)
            # The order of the reply is kept, so that the locks of a page stay together.
            new = [key for key in map(_lock_key_of, found) if key is not None]
            new = [key for key in dict.fromkeys(new) if key not in seen and matches(key)]
            seen.update(new)
            readings |= self.read_locks(new, waiters)
            if cursor == b"0":
                return readings

    def read_locks(self, keys: Iterable[bytes], waiters: int) -> dict[bytes, LockReading]:
        """Read the locks with these keys; omit those that are neither held nor waited for.

        Raises:
            NodeUnavailable, ConfigurationError: as `survey`.
        """
        requests = [_request(key, waiters) for key in keys]
        readings: dict[bytes, LockReading] = {}
        for first in range(0, len(requests), PAGE_SIZE):
            page = requests[first : first + PAGE_SIZE]
            readings |= {
                lock[0]: reading
                for (_, lock, _), reading in zip(page, self._read(page), strict=True)
                if reading is not None and (reading.exists or reading.waiting)
            }
        return readings

    def read_lock(self, key: bytes) -> LockReading:
        """Read one lock, even if it is free, and its record.

        Raises:
            NodeUnavailable: the server does not reply, or refuses the request.
            ConfigurationError: the key has another type, or as `survey`.
        """
        self.check()
        requests = _requests(key)
        replies = self._replies(requests)
        for reply, (_, keys, _) in zip(replies, requests, strict=True):
            if isinstance(reply, hiredis.ReplyError):
                raise self._refused(str(reply), keys)
        return _parse_all(key, replies)

    def _connected(self) -> BlockingConnection:
        if self._connection is None:
            alone = (
                not getattr(self.target, "quarantine", 0) and self.target.longest_ttl == math.inf
            )
            self._connection = BlockingConnection(
                self.target, REPLY_TIMEOUT, prepare=False, verify=alone
            )
        return self._connection

    def _request(self, *words: bytes | str) -> Any:  # noqa: ANN401 - any reply
        reply = self._exchange(words)
        if isinstance(reply, hiredis.ReplyError):
            raise self._refused(str(reply), Keys((b"holdfast:{}",)))
        return reply

    def _exchange(self, words: tuple[bytes | str, ...]) -> Any:  # noqa: ANN401 - any reply
        try:
            return self._connected().round_trip(pack(words), REPLY_TIMEOUT)
        except HoldfastError:
            raise
        except (OSError, hiredis.HiredisError) as error:
            raise self._unavailable(error) from None

    def _read(self, requests: list[Request]) -> list[LockReading | None]:
        readings: list[LockReading | None] = []
        for (_, keys, _), reply in zip(requests, self._replies(requests), strict=True):
            if not isinstance(reply, hiredis.ReplyError):
                readings.append(_parse_reading(reply))
            elif any(sign in str(reply) for sign in _NO_LOCK):
                readings.append(None)
            else:
                raise self._refused(str(reply), keys)
        return readings

    def _replies(self, requests: list[Request]) -> list[Any]:
        replies = self._send(requests, pack_evalsha)
        unknown = [number for number, each in enumerate(replies) if _is_noscript(each)]
        if unknown:  # EVAL loads each script for the EVALSHAs that follow
            missing = {requests[number][0].sha: requests[number] for number in unknown}
            self._send(list(missing.values()), pack_eval)
            again = self._send([requests[number] for number in unknown], pack_evalsha)
            for number, reply in zip(unknown, again, strict=True):
                replies[number] = reply
        return replies

    def _send(self, requests: list[Request], packer: Packer) -> list[Any]:
        try:
            replies = self._connected().call_many(requests, REPLY_TIMEOUT, lambda: math.inf, packer)
        except HoldfastError:
            raise
        except (OSError, hiredis.HiredisError, UnexpectedReply) as error:
            raise self._unavailable(error) from None
        if len(replies) < len(requests):
            raise self._unavailable(TimeoutError())
        return replies

    def _unavailable(self, error: Exception) -> NodeUnavailable:
        self.close()
        late = isinstance(error, (BlockingIOError, TimeoutError))
        why = f" within {REPLY_TIMEOUT:g} s" if late else f": {error}"
        return NodeUnavailable(f"{self.target.node} did not reply{why}", node=self.target.node)

    def _refused(self, text: str, keys: Keys) -> HoldfastError:
        if is_acl_denial(text):
            # The error reply does not name all commands that the user may not run.
            replies = [self._exchange(probe) for probe in read_probes(keys)]
            return acl_error(text, replies, keys, self.target.node, self.target.user)
        return self.target.error_for_reply(text)


class Overview:
    """Reads all locks of one deployment.

    Args:
        given: a target, as for `Client`.

    Raises:
        ConfigurationError: `given` is not a server.
    """

    def __init__(self, given: object = None) -> None:
        where, targets = parse_deployment(given, _LONGEST_TTL)
        self._cluster = ClusterWire(where, REPLY_TIMEOUT) if isinstance(where, Cluster) else None
        if not targets and not isinstance(where, Cluster) and where is not None:
            targets = [where]
        self._readers = {each.node: ServerReader(each) for each in targets}
        self._majority = len(targets) // 2 + 1

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the servers; one name for a cluster."""
        cluster = self._cluster
        return tuple(self._readers) if cluster is None else (cluster.cluster.name,)

    def check(self) -> None:
        """Check that the embedded server runs, if the overview reads it.

        Raises:
            NodeUnavailable: it does not run, or hangs.
        """
        for reader in self._readers.values():
            reader.check()

    def close(self) -> None:
        """Close all connections."""
        for reader in self._readers.values():
            reader.close()
        if self._cluster is not None:
            self._cluster.close()

    def survey(self, matches: Callable[[bytes], bool], *, waiters: int = 1) -> Survey:
        """Find all locks that are held or waited for.

        The result names the servers that could not be read, possibly all of them.

        Args:
            matches: selects the locks by key.
            waiters: how many waiters to list per lock.

        Raises:
            HoldfastError: the nodes of a cluster could not be found.
        """
        readers = list(self._current_readers().values())
        several = self._cluster is None and len(readers) > 1
        limit = ALL if several else waiters  # the order may differ between servers
        found = run_in_parallel(
            [partial(_catch_errors, each, each.survey, matches, limit) for each in readers]
        )
        failures = {
            reader.target.node: str(each)
            for reader, each in zip(readers, found, strict=True)
            if isinstance(each, HoldfastError)
        }
        replies = [each for each in found if not isinstance(each, HoldfastError)]
        if several:
            locks = _merge(replies, self._majority)
            return Survey(locks, failures, complete=len(replies) >= self._majority)
        readings = {key: reading for each in replies for key, reading in each.items()}
        views = tuple(merge_readings(key, [reading]) for key, reading in readings.items())
        return Survey(views, failures, complete=not failures)

    def read_lock(self, lock_key: bytes) -> LockView:
        """Read the lock with this key.

        Raises:
            NodeUnavailable: the server does not reply.
            NoQuorum: of several servers, fewer than a majority reply.
            ConfigurationError: the key has another type, or the user lacks permissions.
        """
        if self._cluster is not None:
            call = self._cluster.call
            replies = [call(*request, REPLY_TIMEOUT) for request in _requests(lock_key)]
            return merge_readings(lock_key, [_parse_all(lock_key, replies)])
        readers = list(self._readers.values())
        found = run_in_parallel(
            [partial(_catch_errors, each, each.read_lock, lock_key) for each in readers]
        )
        replies = [each for each in found if not isinstance(each, HoldfastError)]
        if len(replies) >= self._majority:
            return merge_readings(lock_key, replies, self._majority)
        failed = [each for each in found if isinstance(each, HoldfastError)]
        if len(readers) == 1:
            raise failed[0]
        names = [each.target.node for each in readers]
        nodes = {
            name: without_name(str(reply), name) if isinstance(reply, HoldfastError) else "replied"
            for name, reply in zip(names, found, strict=True)
        }
        raise NoQuorum("; ".join(map(str, failed)), nodes=nodes)

    def _current_readers(self) -> Mapping[str, ServerReader]:
        """Return the readers of all servers; in a cluster, of the nodes that serve slots now."""
        wire = self._cluster
        if wire is None:
            return self._readers
        cluster = wire.cluster
        for address in cluster.nodes:
            cluster.suspect(address)  # makes `locate` refresh the slots
        wire.locate(SLOTS - 1, REPLY_TIMEOUT)
        before = self._readers
        targets = [cluster.node(address) for address in sorted(cluster.nodes)]
        self._readers = {each.node: before.pop(each.node, ServerReader(each)) for each in targets}
        for gone in before.values():
            gone.close()
        return self._readers


def _catch_errors(
    reader: ServerReader, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | HoldfastError:
    try:
        return read(*args, **kwargs)
    except HoldfastError as error:
        return error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        node = reader.target.node
        return NodeUnavailable(f"{node} sent an invalid reply: {error!r}", node=node)


def _merge(replies: list[dict[bytes, LockReading]], majority: int) -> tuple[LockView, ...]:
    """Merge the replies of several servers, which may not all have each lock."""
    keys = dict.fromkeys(key for each in replies for key in each)
    return tuple(
        merge_readings(key, [each.get(key, NO_READING) for each in replies], majority)
        for key in keys
    )


def _lock_key_of(key: bytes) -> bytes | None:
    """Return the key of the lock that a key belongs to, or None to ignore the key.

    A fence counter outlives its lock by an hour. So it is ignored, unless SCAN would not find the
    lock's key itself.
    """
    if is_named(key) and key.endswith((b":fence", b":holds")):
        return key if lock_key_in(key) == key else None
    return lock_key_in(key)


def _request(key: bytes, waiters: int) -> Request:
    """Return the request that reads a lock of any kind, without its record."""
    script = kind_of(key).script or OVERVIEW
    return script, keys_of(key, holds=script is OVERVIEW), (str(waiters),)


def _requests(key: bytes) -> list[Request]:
    """Return the requests that read a lock with all its waiters, and its record."""
    kind = kind_of(key)
    requests = [] if kind.script is None else [_request(key, ALL)]
    if kind.record_key is not None:
        requests.append((READ_CACHED, Keys((kind.record_key(key),)), ()))
    return requests


def _is_noscript(reply: object) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def _parse_all(key: bytes, replies: list[Any]) -> LockReading:
    """Parse the replies to `_requests`."""
    kind = kind_of(key)
    reading = NO_READING if kind.script is None else _parse_reading(replies[0])
    if kind.record_key is None or not replies[-1]:
        return reading
    record, left_ms = replies[-1]
    return reading._replace(record=record, record_left_ms=left_ms)


def _parse_reading(reply: list[Any]) -> LockReading:
    if isinstance(reply[0], list):  # of a semaphore or an rwlock; or of a barrier or a latch
        holders, fence, time, *rest = reply
        exists = holders or b" " in fence  # the progress of a latch or a barrier
        reply = [b"", 0 if exists else NO_KEY, fence, time, holders, *rest]
    token, left_ms, fence, time, holds, waiting, gone, waiters = reply
    return LockReading(
        token,
        left_ms,
        fence,
        int(time) / 1_000_000,
        tuple(zip(holds[::2], map(float, holds[1::2]), strict=True)),
        waiting,
        gone,
        tuple(
            (waiter, float(ticket), _CONNECTED[connected])
            for waiter, ticket, connected in zip(*(iter(waiters),) * 3, strict=True)
        ),
    )
