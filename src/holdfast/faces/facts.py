"""What both faces have in common: a lease's facts, none of which needs a server."""

from __future__ import annotations

import inspect
from enum import Enum
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import ref

from holdfast.core.duration import in_seconds
from holdfast.core.hold import Grip
from holdfast.core.release import check
from holdfast.errors import ConfigurationError, NotHeld
from holdfast.keys import lock_key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from holdfast.core.duration import Duration
    from holdfast.core.hold import Hold
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.errors import LossReason
    from holdfast.port import StepPort


class Unset(Enum):
    """The absence of an argument for which None has a meaning."""

    UNSET = "the lock's own setting"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET

_USUAL = {
    "ttl": None,  # always shown
    "timeout": None,
    "renew": True,
    "max_hold": None,
    "reentrant": False,
    "owner": None,
    "fair": True,
    "lock_delay": 0.0,
    "replicas": 0,
    "label": None,
}
"""The settings of a lock, and the values that its repr leaves out."""


def checked_command_timeout(given: Duration) -> float:
    """Refuse a command timeout that is no length of time."""
    seconds = in_seconds(given)
    if isinstance(seconds, (int, float)) and 0 < seconds < float("inf"):
        return float(seconds)
    raise ConfigurationError(f"command_timeout={seconds!r}: give seconds above 0, e.g. 1.0")


def checked_seconds(what: str, given: Duration) -> float:
    """Refuse what is no length of time."""
    seconds = in_seconds(given)
    if isinstance(seconds, (int, float)) and 0 <= seconds < float("inf"):
        return float(seconds)
    raise ConfigurationError(f"{what}={seconds!r}: give seconds, 0 or more")


def checked_wait(wait: object) -> bool:
    """Say whether waiting is to poll."""
    if wait in {"push", "poll"}:
        return wait == "poll"
    raise ConfigurationError(f'wait={wait!r}: give "push" or "poll"')


def checked_port(port: StepPort | None) -> StepPort:
    """Refuse atomic operations where there are several servers."""
    if port is not None:
        return port
    raise ConfigurationError(
        "an atomic operation is one step on one server, and this client has several that know "
        "nothing of each other: make a client of one of them, or use a lock"
    )


def generator_advice(function: Callable[..., object]) -> str:
    """Say why a generator function cannot be decorated."""
    why = f"{function.__name__} is a generator function, whose body runs after the call"
    if inspect.isasyncgenfunction(function):
        return f"{why}: write 'async with lock:' inside it, with a lock of holdfast.AsyncClient"
    return f"{why}: write 'with lock:' inside it, with a lock of holdfast.Client"


def refuse(
    method: str, unknown: Mapping[str, object], positional: tuple[object, ...] = (), wait: str = ""
) -> NoReturn:
    """Say what to write instead of arguments that other lock clients have; `wait`: "await ".

    Raises:
        TypeError: always, as Python itself does.
    """
    if positional:  # as of threading.Lock: blocking, timeout
        value = positional[1] if positional[0] is True and positional[1:] else positional[0]
        name = "blocking" if isinstance(value, bool) else "blocking_timeout"
        message = f"{method}() takes no positional arguments"
    else:
        name, value = next(iter(unknown.items()))
        message = f"{method}() got an unexpected keyword argument {name!r}"
    setting = "write {}" if method == "lock" else "give client.lock() {}"
    advice = {
        "blocking": "leave it out to wait"
        if value
        else f"write timeout=0, or {wait}lock.try_acquire()",
        "blocking_timeout": f"write timeout={value!r}, the seconds that acquiring waits; how long "
        "the server keeps the lock without news of its holder is ttl=",
        "expire": setting.format(f"ttl={value!r}"),
        "auto_renewal": setting.format(f"renew={value!r}"),
        "sleep": "leave it out: a waiting client is notified, and does not poll",
        "thread_local": "leave it out: each lease is an object, and acquire() returns it",
    }.get(name)
    raise TypeError(f"{message}: {advice}" if advice else message)


class OfTheLease:
    """A method that locks of other clients have, and that here belongs to the lease.

    The advice has `{with_}` and `{wait}` where the client for asyncio needs `async` and `await`.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, lock: LockFacts | None, kind: type) -> Self:
        if lock is None:
            return self
        wait = lock._wait  # noqa: SLF001 - within the faces
        advice = self._advice.format(with_="async with" if wait else "with", wait=wait)
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}: {advice}")


class HasSession(Protocol):
    """A client, of either face."""

    _session: Session


class LeaseFacts(Grip):
    """What is known of a lease without asking anybody."""

    __slots__ = ("_client", "_entered_by", "_lost", "_session")

    _entered_by: object  # the thread or task, of a lease within a `with lock`

    def __init__(self, client: HasSession) -> None:
        self._hold = None
        self._client = client
        self._session = client._session  # noqa: SLF001 - one face in several classes
        self._lost: Any = None

    @property
    def _held(self) -> Hold:
        """The hold, which every lease that was handed out has."""
        if self._hold is None:
            raise NotHeld("this lease was never acquired: lock.acquire() makes leases")
        return self._hold

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._held.spec.name

    @property
    def fence(self) -> int:
        """The fencing number: greater than that of every lease of this lock granted before.

        Send it along with each write, and let the resource refuse a number below the highest it
        has seen: then even a holder that was paused past its deadline can do no harm.
        """
        return self._held.fence

    @property
    def token(self) -> str:
        """The unique value that stands in the lock's key while this lease holds it."""
        return self._held.token

    @property
    def held(self) -> bool:
        """Whether the lock is certainly ours at this moment. Turns False by itself."""
        port, hold = self._session.port, self._held
        return hold.alive(port.now(), port.process()) and ref(self) in hold.grips

    @property
    def _gripping(self) -> bool:
        """Whether it was not released yet, be it held or lost."""
        return ref(self) in self._held.grips

    def remaining(self) -> float:
        """Return the seconds until the deadline, 0.0 when the lease is over."""
        return self._held.deadline - self._session.port.now() if self.held else 0.0

    def check(self) -> None:
        """Do nothing while the lease is held.

        Raises:
            LeaseLost: it was lost.
            NotHeld: it was released, or was taken by the process this one was forked from.
        """
        check(self._session, self)

    def _when_lost(
        self, callback: Callable[[Self, LossReason], object]
    ) -> Callable[[Hold], Callable[[], object]]:
        """Return what makes, of a lost hold, the call of a user's callback.

        The callback keeps no lease alive, so that a lease that was dropped is still detected. It
        is then called with another object for the same lease.
        """
        mine, kind, client = ref(self), type(self), self._client

        def lost(hold: Hold) -> Callable[[], object]:
            lease = mine()
            if lease is None:
                lease = kind(client)
                lease._hold = hold  # noqa: SLF001 - of the same class
            return partial(callback, lease, hold.loss().reason)

        return lost

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lease cannot be pickled or copied: pass on the text that lease.export() returns, "
            "and call client.adopt(text) with it"
        )

    def __repr__(self) -> str:
        state = f"{self.remaining():.3f} s left" if self.held else "over"
        return f"<{type(self).__name__} of {self.name!r}, fence {self.fence}, {state}>"


class LockFacts:
    """What is known of a lock without asking anybody."""

    __slots__ = ("_spec",)

    _spec: LockSpec
    _wait = ""
    """What stands before a call that talks to the server."""

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._spec.name

    @property
    def ttl(self) -> float:
        """Seconds for which the server keeps the lock without a renewal."""
        return self._spec.ttl

    @property
    def timeout(self) -> float | None:
        """Seconds that acquiring waits at most; None for ever."""
        return self._spec.timeout

    @property
    def renew(self) -> bool:
        """Whether a lease is renewed until it is released."""
        return self._spec.renew

    @property
    def max_hold(self) -> float | None:
        """Seconds after which a lease is no longer renewed; None if it always is."""
        return None if self._spec.max_hold == inf else self._spec.max_hold

    @property
    def reentrant(self) -> bool:
        """Whether the thread or task that holds it may acquire it again."""
        return self._spec.reentrant

    @property
    def owner(self) -> str | None:
        """The name under which several processes may hold it."""
        return self._spec.owner

    @property
    def fair(self) -> bool:
        """Whether waiters are granted it in the order in which they asked."""
        return self._spec.fair

    @property
    def lock_delay(self) -> float:
        """Seconds for which it is not granted after its holder was lost."""
        return self._spec.lock_delay

    @property
    def replicas(self) -> int:
        """How many replicas must have a lease before it is granted."""
        return self._spec.replicas

    @property
    def key(self) -> str:
        """The key on the server."""
        return self._spec.keys[0].decode("utf-8", "surrogateescape")

    @property
    def label(self) -> str | None:
        """What is shown to anyone who asks for its holder."""
        return self._spec.label

    if not TYPE_CHECKING:  # type checkers must not see these
        release = OfTheLease(
            "release the lease: write '{with_} lock:', or lease = {wait}lock.acquire() and "
            "{wait}lease.release()"
        )
        extend = OfTheLease("write lease = {wait}lock.acquire() and {wait}lease.extend(seconds)")
        reacquire = OfTheLease(
            "a lease is renewed automatically; {wait}lease.extend(seconds) sets its time"
        )
        owned = OfTheLease("write lease = {wait}lock.acquire() and lease.held")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lock cannot be pickled or copied: pass on its name, and write client.lock(name) "
            "where it is used"
        )

    def __repr__(self) -> str:
        settings = [
            f"{name}={getattr(self, name)!r}"
            for name, usual in _USUAL.items()
            if getattr(self, name) != usual
        ]
        if self._spec.keys[0] != lock_key_of(self.name):
            settings.append(f"key={self.key!r}")
        return f"<{type(self).__name__} {', '.join([repr(self.name), *settings])}>"
