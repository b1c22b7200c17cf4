"""The parts of the API that both clients share: leases and locks without I/O, argument checks."""

from __future__ import annotations

from enum import Enum
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import ref as weak_ref

from holdfast.api.advice import MissingMethod
from holdfast.core.duration import in_seconds
from holdfast.core.lease_state import LeaseRef
from holdfast.core.release import check_valid
from holdfast.errors import ConfigurationError, NotHeld
from holdfast.keys import lock_key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType
    from typing import Self

    from holdfast.core.duration import Duration
    from holdfast.core.lease_state import LeaseState
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.errors import LossReason
    from holdfast.port import AtomicPort


class Unset(Enum):
    """The type of `UNSET`: the default of an argument for which None has a meaning."""

    UNSET = "the lock's own setting"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET

ALWAYS = object()
"""In `LOCK_DEFAULTS` and `_SHOWN`: no value is omitted."""

LOCK_DEFAULTS = {
    "ttl": ALWAYS,
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
"""The settings of a lock, with the values that its repr omits."""


def checked_command_timeout(given: Duration) -> float:
    """Return a command timeout in seconds.

    Raises:
        ConfigurationError: it is not a finite number above 0.
    """
    seconds = in_seconds(given)
    if isinstance(seconds, (int, float)) and 0 < seconds < float("inf"):
        return float(seconds)
    raise ConfigurationError(f"command_timeout={seconds!r}: give seconds above 0, e.g. 1.0")


def checked_seconds(what: str, given: Duration) -> float:
    """Return the setting `what` in seconds.

    Raises:
        ConfigurationError: it is not a finite number of 0 or more.
    """
    seconds = in_seconds(given)
    if isinstance(seconds, (int, float)) and 0 <= seconds < float("inf"):
        return float(seconds)
    raise ConfigurationError(f"{what}={seconds!r}: give seconds, 0 or more")


def checked_wait(wait: object) -> bool:
    """Return whether waiting clients poll.

    Raises:
        ConfigurationError: `wait` is neither "push" nor "poll".
    """
    if wait in {"push", "poll"}:
        return wait == "poll"
    raise ConfigurationError(f'wait={wait!r}: give "push" or "poll"')


def require_one_server(
    port: AtomicPort | None,
    what: str = "atomic operations run on one server",
    instead: str = ", or use a lock",
) -> AtomicPort:
    """Return the port for atomic operations, or for `what`.

    Raises:
        ConfigurationError: the client uses several independent servers.
    """
    if port is not None:
        return port
    raise ConfigurationError(
        f"{what}, and this client uses several independent servers: create a client for one of "
        f"them{instead}"
    )


class HasSession(Protocol):
    """A `Client` or an `AsyncClient`."""

    _session: Session


class LeaseView(LeaseRef):
    """The properties of a lease that need no request to the server."""

    __slots__ = ("_client", "_entered_by", "_entered_in", "_exiting", "_lost", "_session")

    _entered_by: object
    """The thread or task that entered `with lock`."""
    _entered_in: FrameType | None
    """The frame of that block, while the block is open."""
    _exiting: bool
    """The block has begun to end."""

    def __init__(self, client: HasSession) -> None:
        self._lease = None
        self._client = client
        self._session = client._session  # noqa: SLF001 - within the API
        self._lost: Any = None
        self._exiting = False

    @property
    def _state(self) -> LeaseState:
        """The lease's state.

        Raises:
            NotHeld: the lease was never acquired.
        """
        if self._lease is None:
            raise NotHeld("this lease was never acquired: call lock.acquire() to get a lease")
        return self._lease

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._state.spec.name

    @property
    def fence(self) -> int:
        """The fencing number: greater than that of every earlier lease of this lock.

        Send it with each write, and let the resource reject a number below the highest it has seen.
        Then even a holder that was paused past its deadline cannot overwrite newer data.
        """
        return self._state.fence

    @property
    def exclusive(self) -> bool:
        """Whether this lease excludes all other holders.

        It is False for a reader of an rwlock, and for a lease of a semaphore that leaves permits to
        others. Guards refuse such leases: several of them are valid at once, each with another
        fence.
        """
        return self._state.spec.weight == self._state.spec.limit

    @property
    def after_loss(self) -> bool:
        """Whether the previous lease of this lock ended without a release: it was lost or evicted.

        Its holder crashed, hung or was cut off, and may have left its work half done. Of a
        semaphore or an rwlock: whether that happened to a holder since the last lease was granted.

        False after a release, for the first lease of a lock, and for one whose last lease was
        granted or renewed more than an hour ago (with a ttl of more than 30 minutes: twice the
        ttl). After a fault, a loss may be reported twice.

        Example:
            with client.lock("import") as lease:
                if lease.after_loss:
                    remove_partial_import()
                run_import()
        """
        return self._state.after_loss

    @property
    def token(self) -> str:
        """The unique value of the lock's key while this lease holds it."""
        return self._state.token

    @property
    def held(self) -> bool:
        """Whether this lease certainly holds the lock now. Becomes False at the deadline."""
        port, state = self._session.port, self._state
        return state.is_valid(port.now(), port.process()) and weak_ref(self) in state.refs

    @property
    def _is_unreleased(self) -> bool:
        """Whether the lease was not released yet. It may be held or lost."""
        return weak_ref(self) in self._state.refs

    def remaining(self) -> float:
        """Return the seconds until the deadline, or 0.0 if the lease has ended."""
        return self._state.deadline - self._session.port.now() if self.held else 0.0

    def check(self) -> None:
        """Raise an error if the lease is no longer held. Sends nothing to the server.

        Raises:
            LeaseLost: the lease was lost.
            NotHeld: the lease was released, or belongs to the process that forked this one.
        """
        check_valid(self._session, self)

    def _when_lost(
        self, callback: Callable[[Self, LossReason], object]
    ) -> Callable[[LeaseState], Callable[[], object]]:
        """Return a function that binds a user's callback to a lost lease and its reason.

        The callback does not keep the lease alive, so that a dropped lease is still detected. After
        a drop, the callback receives another object for the same lease.
        """
        mine, kind, client = weak_ref(self), type(self), self._client

        def lost(state: LeaseState) -> Callable[[], object]:
            lease = mine()
            if lease is None:
                lease = kind(client)
                lease._lease = state  # noqa: SLF001 - of the same class
            return partial(callback, lease, state.loss().reason)

        return lost

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lease cannot be pickled or copied: pass the text that lease.export() returns to the "
            "other process, and call client.adopt(text) there"
        )

    def __repr__(self) -> str:
        if self._lease is None:
            return f"<{type(self).__name__}, not acquired>"
        state = f"{self.remaining():.3f} s left" if self.held else "over"
        return f"<{type(self).__name__} of {self.name!r}, fence {self.fence}, {state}>"

    if not TYPE_CHECKING:  # type checkers must not see it
        upgrade = MissingMethod(
            "a reader cannot become a writer, because two of them would wait for each other: "
            "release the lease, then acquire rwlock.write()"
        )


class AnyLockSettings:
    """The settings that all kinds of locks have. Reading them sends nothing to the server."""

    __slots__ = ("_spec",)

    _spec: LockSpec
    _session: Session
    _MADE_BY = "lock(name)"
    """The call that makes such a lock."""
    _SHOWN: Mapping[str, object] = {
        "ttl": ALWAYS,
        "timeout": None,
        "renew": True,
        "max_hold": None,
        "replicas": 0,
        "label": None,
    }
    """The settings, with the values that the repr omits."""
    _wait = ""
    """Prefix, in messages, of a call that sends a request: "await " for asyncio."""

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
        """Seconds to wait in `acquire`; None waits forever."""
        return self._spec.timeout

    @property
    def renew(self) -> bool:
        """Whether a lease is renewed in the background until it is released."""
        return self._spec.renew

    @property
    def max_hold(self) -> float | None:
        """Seconds after which a lease is no longer renewed; None for no limit."""
        return None if self._spec.max_hold == inf else self._spec.max_hold

    @property
    def replicas(self) -> int:
        """Number of replicas that must have a lease before it is granted."""
        return self._spec.replicas

    @property
    def key(self) -> str:
        """The key on the server."""
        return self._spec.keys.lock.decode("utf-8", "surrogateescape")

    @property
    def label(self) -> str | None:
        """Text that is shown for this holder, or None."""
        return self._spec.label

    if not TYPE_CHECKING:  # type checkers must not see these
        release = MissingMethod(
            "release the lease: write '{with_} lock:', or lease = {wait}lock.acquire() and "
            "{wait}lease.release()"
        )
        extend = MissingMethod("write lease = {wait}lock.acquire() and {wait}lease.extend(seconds)")
        reacquire = MissingMethod(
            "a lease is renewed automatically; {wait}lease.extend(seconds) sets its time"
        )
        owned = MissingMethod("write lease = {wait}lock.acquire() and lease.held")
        held = MissingMethod("write lease = {wait}lock.acquire() and lease.held")
        fence = MissingMethod("write lease = {wait}lock.acquire() and lease.fence")
        check = MissingMethod("write lease = {wait}lock.acquire() and lease.check()")
        remaining = MissingMethod("write lease = {wait}lock.acquire() and lease.remaining()")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lock cannot be pickled or copied: pass its name to the other process, and call "
            f"client.{self._MADE_BY} there"
        )

    def __repr__(self) -> str:
        settings = [
            f"{name}={getattr(self, name)!r}"
            for name, usual in self._SHOWN.items()
            if getattr(self, name) != usual
        ]
        is_lock = self._MADE_BY == AnyLockSettings._MADE_BY
        if is_lock and self._spec.keys.lock != lock_key_of(self.name):
            settings.append(f"key={self.key!r}")
        return f"<{type(self).__name__} {', '.join([repr(self.name), *settings])}>"


class LockSettings(AnyLockSettings):
    """The settings of a lock. Reading them sends nothing to the server."""

    __slots__ = ()

    _SHOWN: Mapping[str, object] = LOCK_DEFAULTS

    @property
    def reentrant(self) -> bool:
        """Whether the thread or task that holds the lock may acquire it again."""
        return self._spec.reentrant

    @property
    def owner(self) -> str | None:
        """The name under which several clients may hold the lock at once, or None."""
        return self._spec.owner

    @property
    def fair(self) -> bool:
        """Whether the lock is granted first come, first served."""
        return self._spec.fair

    @property
    def lock_delay(self) -> float:
        """Seconds for which the lock is not granted after a lease was lost."""
        return self._spec.lock_delay
