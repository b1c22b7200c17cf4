"""Looking at all locks of a deployment.

Rules: nothing is changed, so the guards that greet a client's connections behind Sentinels and to
several servers, which leave marks, are not asked. Keys are found by SCAN, never by KEYS, on every
server that keeps locks. Each lock is one short script (`overview.lua`), and those of a page of keys
go out at once: a server is never busy with us for long, and many locks take few round trips.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import hiredis

from holdfast import embedded
from holdfast.errors import HoldfastError, NodeUnavailable, NoQuorum
from holdfast.keys import SLOTS, Keys, is_named, keys_of, lock_key_in
from holdfast.overview.views import NOTHING, LockView, Sight, Survey, view_of
from holdfast.scripts import OVERVIEW
from holdfast.wire.at_once import at_once
from holdfast.wire.cluster import Cluster
from holdfast.wire.clustered import ClusterWire
from holdfast.wire.given import is_undecided
from holdfast.wire.link import Link
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, pack
from holdfast.wire.refusals import denial, is_denial, probes_of_look
from holdfast.wire.wiring import one_or_several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.port import Request
    from holdfast.wire.link import Packer
    from holdfast.wire.target import Target

P = ParamSpec("P")
T = TypeVar("T")

ANSWER = 2.0
"""Seconds to wait for one answer."""

PAGE = 1000
"""Keys that are looked through at once, and locks that are asked for at once."""

ALL = -1
"""Waiters to tell of: every one."""

_LONGEST_TTL = 60.0  # that clients would be given; nobody is told of it here
_ELSEWHERE = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")
_NO_LOCK = ("WRONGTYPE", *_ELSEWHERE)
"""Signs that there is no lock to be seen under a key, here and now."""

_LISTENING = {1: True, 0: False, -1: None}
"""What `overview.lua` returns about a waiter's client."""


class Lookout:
    """One server that is looked at, over a connection that is kept from one look to the next."""

    def __init__(self, target: Target, *, undecided: bool = False) -> None:
        self.target = target
        self._undecided = undecided
        self._link: Link | None = None

    def check(self) -> None:
        """Make sure that the embedded server runs, if this looks at it. It is not started.

        Raises:
            NodeUnavailable: it does not run, or hangs.
        """
        if self._link is None and self.target.prepare is not None and not embedded.answers():
            why = "no URL was given, and " if self._undecided else ""
            raise NodeUnavailable(
                f"{why}{self.target.node} does not run: give --url or set HOLDFAST_URL to look at "
                f"another server",
                node=self.target.node,
            )

    def close(self) -> None:
        """Hang up."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def survey(self, wanted: Callable[[bytes], bool], waiters: int) -> dict[bytes, Sight]:
        """Find all locks, by their keys, that are held or waited for.

        Raises:
            NodeUnavailable: the server does not answer, or refuses to work.
            ConfigurationError: the server will never tell.
        """
        if self.target.longest_ttl < math.inf:
            self.close()  # another may have taken its place, and this one need not say so
        seen: set[bytes] = set()
        sights: dict[bytes, Sight] = {}
        cursor = b"0"
        self.check()
        while True:
            cursor, found = self._ask("SCAN", cursor, "MATCH", "holdfast:*", "COUNT", str(PAGE))
            # In the order of the server's, so that a page's locks stay together.
            fresh = [key for key in map(_lock_to_look_at, found) if key is not None]
            fresh = [key for key in dict.fromkeys(fresh) if key not in seen and wanted(key)]
            seen.update(fresh)
            sights |= self.look_at(fresh, waiters)
            if cursor == b"0":
                return sights

    def look_at(self, keys: Iterable[bytes], waiters: int) -> dict[bytes, Sight]:
        """Look at the locks with these keys; leave out those that nobody holds or waits for.

        Raises:
            NodeUnavailable, ConfigurationError: as `survey`.
        """
        requests: list[Request] = [
            (OVERVIEW, keys_of(key, holds=True), (str(waiters),)) for key in keys
        ]
        sights: dict[bytes, Sight] = {}
        for first in range(0, len(requests), PAGE):
            page = requests[first : first + PAGE]
            sights |= {
                lock[0]: sight
                for (_, lock, _), sight in zip(page, self._run(page), strict=True)
                if sight is not None and (sight.there or sight.waiting)
            }
        return sights

    def look(self, keys: Keys) -> Sight:
        """Look at one lock, whatever there is of it.

        Raises:
            NodeUnavailable: the server does not answer, or refuses to work.
            ConfigurationError: the key is in use for something else, or it will never tell.
        """
        self.check()
        answer = self._answers([(OVERVIEW, keys, (str(ALL),))])[0]
        if isinstance(answer, hiredis.ReplyError):
            raise self._refusal(str(answer), keys)
        return _sight(answer)

    def _connected(self) -> Link:
        if self._link is None:
            alone = not getattr(self.target, "silence", 0) and self.target.longest_ttl == math.inf
            self._link = Link(self.target, ANSWER, prepare=False, judged=alone)
        return self._link

    def _ask(self, *words: bytes | str) -> Any:  # noqa: ANN401 - any answer
        answer = self._exchange(words)
        if isinstance(answer, hiredis.ReplyError):
            raise self._refusal(str(answer), Keys((b"holdfast:{}",)))
        return answer

    def _exchange(self, words: tuple[bytes | str, ...]) -> Any:  # noqa: ANN401 - any answer
        try:
            return self._connected().exchange(pack(words), ANSWER)
        except HoldfastError:
            raise
        except (OSError, hiredis.HiredisError) as error:
            raise self._silence(error) from None

    def _run(self, requests: list[Request]) -> list[Sight | None]:
        sights: list[Sight | None] = []
        for (_, keys, _), answer in zip(requests, self._answers(requests), strict=True):
            if not isinstance(answer, hiredis.ReplyError):
                sights.append(_sight(answer))
            elif any(sign in str(answer) for sign in _NO_LOCK):
                sights.append(None)
            else:
                raise self._refusal(str(answer), keys)
        return sights

    def _answers(self, requests: list[Request]) -> list[Any]:
        answers = self._send(requests, by_sha)
        unknown = [number for number, each in enumerate(answers) if _is_unknown(each)]
        if unknown:  # told once, it is known to those behind it
            self._send([requests[unknown[0]]], by_text)
            again = self._send([requests[number] for number in unknown], by_sha)
            for number, answer in zip(unknown, again, strict=True):
                answers[number] = answer
        return answers

    def _send(self, requests: list[Request], packer: Packer) -> list[Any]:
        try:
            answers = self._connected().call_many(requests, ANSWER, lambda: math.inf, packer)
        except HoldfastError:
            raise
        except (OSError, hiredis.HiredisError, StrayAnswer) as error:
            raise self._silence(error) from None
        if len(answers) < len(requests):
            raise self._silence(TimeoutError())
        return answers

    def _silence(self, error: Exception) -> NodeUnavailable:
        self.close()
        late = isinstance(error, (BlockingIOError, TimeoutError))
        why = f"no answer within {ANSWER:g} s" if late else str(error)
        return NodeUnavailable(f"{self.target.node} did not answer: {why}", node=self.target.node)

    def _refusal(self, text: str, keys: Keys) -> HoldfastError:
        if is_denial(text):
            # What a script was denied is not always said, and never all of it.
            answers = [self._exchange(probe) for probe in probes_of_look(keys)]
            return denial(text, answers, keys, self.target.node, self.target.user)
        return self.target.refusal(text)


class Overview:
    """All locks of one deployment; `given` is what a client is given.

    Raises:
        ConfigurationError: `given` is no server.
    """

    def __init__(self, given: object = None) -> None:
        where, targets = one_or_several(given, _LONGEST_TTL)
        self._cluster = ClusterWire(where, ANSWER) if isinstance(where, Cluster) else None
        if not targets and not isinstance(where, Cluster) and where is not None:
            targets = [where]
        undecided = is_undecided(given)
        self._lookouts = {target.node: Lookout(target, undecided=undecided) for target in targets}
        self._majority = len(targets) // 2 + 1

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the servers that are looked at; one name for a cluster."""
        cluster = self._cluster
        return tuple(self._lookouts) if cluster is None else (cluster.cluster.name,)

    def check(self) -> None:
        """Make sure that the embedded server runs, if it is what is looked at.

        Raises:
            NodeUnavailable: it does not run, or hangs.
        """
        for lookout in self._lookouts.values():
            lookout.check()

    def close(self) -> None:
        """Close all connections."""
        for lookout in self._lookouts.values():
            lookout.close()
        if self._cluster is not None:
            self._cluster.close()

    def survey(self, wanted: Callable[[bytes], bool], *, waiters: int = 1) -> Survey:
        """Look for all locks that are held or waited for, of those whose keys are `wanted`.

        So many `waiters` of each are told of. A server that cannot be asked is named in what is
        returned; it may be all of them.

        Raises:
            HoldfastError: the servers of a cluster are not known.
        """
        lookouts = list(self._posted().values())
        several = self._cluster is None and len(lookouts) > 1
        told = ALL if several else waiters  # they may stand in another order at each
        found = at_once([partial(_tried, each, each.survey, wanted, told) for each in lookouts])
        failures = {
            lookout.target.node: str(each)
            for lookout, each in zip(lookouts, found, strict=True)
            if isinstance(each, HoldfastError)
        }
        heard = [each for each in found if not isinstance(each, HoldfastError)]
        if several:
            locks = _merged(heard, self._majority)
            return Survey(locks, failures, complete=len(heard) >= self._majority)
        sights = {key: sight for each in heard for key, sight in each.items()}
        views = tuple(view_of(key, [sight]) for key, sight in sights.items())
        return Survey(views, failures, complete=not failures)

    def look(self, lock_key: bytes) -> LockView:
        """Look at the lock with this key.

        Raises:
            NodeUnavailable: the server does not answer, or too few of several do.
            ConfigurationError: the key is in use for something else, or the server never tells.
        """
        keys = keys_of(lock_key, holds=True)
        if self._cluster is not None:
            answer = self._cluster.call(OVERVIEW, keys, (str(ALL),), ANSWER)
            return view_of(lock_key, [_sight(answer)])
        lookouts = list(self._lookouts.values())
        found = at_once([partial(_tried, each, each.look, keys) for each in lookouts])
        heard = [each for each in found if not isinstance(each, HoldfastError)]
        if len(heard) >= self._majority:
            return view_of(lock_key, heard, self._majority)
        failed = [each for each in found if isinstance(each, HoldfastError)]
        if len(lookouts) == 1:
            raise failed[0]
        nodes = {each.target.node: str(said) for each, said in zip(lookouts, found, strict=True)}
        raise NoQuorum("; ".join(map(str, failed)), nodes=nodes)

    def _posted(self) -> Mapping[str, Lookout]:
        """The servers to be looked at; of a cluster, those that serve slots now."""
        wire = self._cluster
        if wire is None:
            return self._lookouts
        cluster = wire.cluster
        for address in cluster.nodes:
            cluster.suspect(address)  # so that it is asked again who they are
        wire.locate(SLOTS - 1, ANSWER)
        before = self._lookouts
        targets = [cluster.node(address) for address in sorted(cluster.nodes)]
        self._lookouts = {each.node: before.pop(each.node, Lookout(each)) for each in targets}
        for gone in before.values():
            gone.close()
        return self._lookouts


def _tried(
    lookout: Lookout, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | HoldfastError:
    try:
        return look(*args, **kwargs)
    except HoldfastError as error:
        return error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        node = lookout.target.node
        return NodeUnavailable(f"{node} answers as no server does: {error!r}", node=node)


def _merged(heard: list[dict[bytes, Sight]], majority: int) -> tuple[LockView, ...]:
    """Put together what several servers say, each of which may not know of a lock."""
    keys = dict.fromkeys(key for each in heard for key in each)
    return tuple(view_of(key, [each.get(key, NOTHING) for each in heard], majority) for key in keys)


def _lock_to_look_at(key: bytes) -> bytes | None:
    """The lock by whose key, or by what there is beside it, this key was found.

    A lock's counter outlives it by an hour. If its own key is among those that are looked through,
    it is no reason to look.
    """
    if is_named(key) and key.endswith((b":fence", b":holds")):
        return key if lock_key_in(key) == key else None
    return lock_key_in(key)


def _is_unknown(answer: object) -> bool:
    return isinstance(answer, hiredis.ReplyError) and str(answer).startswith("NOSCRIPT")


def _sight(answer: list[Any]) -> Sight:
    token, left_ms, fence, time, holds, waiting, gone, waiters = answer
    return Sight(
        token,
        left_ms,
        fence,
        int(time) / 1_000_000,
        tuple(zip(holds[::2], map(float, holds[1::2]), strict=True)),
        waiting,
        gone,
        tuple(
            (waiter, float(ticket), _LISTENING[listens])
            for waiter, ticket, listens in zip(*(iter(waiters),) * 3, strict=True)
        ),
    )
