"""The port: all that the core may ask of the world, and the only things it awaits.

The core runs unchanged in three worlds. Over threads these methods block and never suspend; over
asyncio they await; in a simulation they yield to a scheduler. Two small protocols, because they
are asked by two parties: `Port` by an operation in the caller's thread or task, `Background` by
the one job that keeps a client's leases alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from holdfast.errors import NodeUnavailable, OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from contextlib import AbstractContextManager

    from holdfast.errors import HoldfastError
    from holdfast.keys import Keys
    from holdfast.scripts import Script

Reply: TypeAlias = Any
"""What a script answered: an int, bytes, or a list of these. Each script's header says which."""

L = TypeVar("L", bound="Listener")

Command: TypeAlias = tuple[bytes, ...]
"""A command of a push connection, with its arguments."""

Request: TypeAlias = tuple["Script", "Keys", tuple[str, ...]]
"""A script with its keys and its arguments."""


Post: TypeAlias = "tuple[Sequence[int], Request]"
"""A request, and the numbers of the nodes it is for."""

Heard: TypeAlias = "Callable[[int, int, Reply | HoldfastError], bool]"
"""Told which post was answered by which node, and how; says whether enough is known."""


class Quarantined(NodeUnavailable):
    """The server grants no lock for `seconds` more: it may have lost locks that are still held."""

    def __init__(
        self, message: str, *, lock: str = "", node: str = "", seconds: float = 0.0
    ) -> None:
        super().__init__(message, lock=lock, node=node)
        self.seconds = seconds


class Unconnected(NodeUnavailable):
    """One of several nodes is being connected to, and nobody waits for that."""


class Interrupted(OutcomeUnknown):
    """Whoever was to read the answer was interrupted; that says nothing about the node."""


class Uncopied(OutcomeUnknown):
    """It was carried out, but fewer replicas than it needs have it yet."""


class Signal(Protocol):
    """What one party waits for and another, in any thread, sets."""

    def set(self) -> None:
        """End the wait, or the next one if nobody waits just now."""


class Listener(Protocol):
    """Whoever listens on a push connection. All but `listening` is for the connection's owner."""

    channel: bytes

    @property
    def listening(self) -> bool:
        """The channel is subscribed to, as far as is known."""

    def opened(self, sent_at: float, rouse: Callable[[], None]) -> None:
        """The channel is subscribed to, by a request sent at `sent_at`; `rouse` ends a rest."""

    def heard(self, message: object, now: float) -> None:
        """Take in one message; ValueError says that it cannot be one."""

    def tick(self, now: float) -> tuple[Sequence[Command], float]:
        """Return what there is to send, PINGs for the most part, and when to call again.

        TimeoutError says that the connection is dead.
        """

    def cut(self, now: float) -> None:
        """The connection has ended."""

    @property
    def idle(self) -> bool:
        """Nobody needs the connection."""


class Job(Protocol):
    """Something that runs in the background until it has nothing left to do."""

    async def run(self) -> None:
        """Work until there is nothing to watch for."""


class Call(Protocol):
    """A function that runs a script where a lock is kept, once."""

    def __call__(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float, /
    ) -> Awaitable[Reply]:
        """Return the reply.

        Raises:
            NodeUnavailable: nothing was carried out.
            OutcomeUnknown: there was no reply within `timeout`, or it was carried out and too few
                replicas have it.
            ConfigurationError: the server will never accept this.
        """


class Port(Protocol):
    """What one operation on a lock may ask for."""

    def now(self) -> float:
        """Seconds on a clock that never steps and also runs while the machine sleeps."""

    def process(self) -> int:
        """The process this runs in, as a number that is another in every forked child."""

    def actor(self) -> Any:  # noqa: ANN401 - a thread, a task, or a simulation's own kind
        """The thread or task this runs in, the same object every time."""

    def is_gone(self, actor: Any) -> bool:  # noqa: ANN401 - what `actor` gave
        """Whether nothing goes on any more where it ran: its event loop is closed."""

    def blocks(self, actor: Any) -> bool:  # noqa: ANN401 - what `actor` gave
        """Whether that actor cannot run while the caller waits: waiting blocks its event loop."""

    def has_ended(self, actor: Any) -> bool:  # noqa: ANN401 - what `actor` gave
        """Whether it is a task that is done, and only kept by those who refer to it."""

    def draw_token(self, actor: Any, suffix: str) -> str:  # noqa: ANN401 - what `actor` gave
        """A token that was never drawn before, naming the client and the actor."""

    def new_mutex(self) -> AbstractContextManager[object]:
        """Make a mutex. A thread that has it may enter it again.

        So a signal handler may release a lease, whatever it interrupts.
        """

    def wall_clock(self) -> int:
        """Microseconds since the epoch, as far as this machine knows."""

    def jitter(self) -> float:
        """A random number, at least 0 and below 1."""

    async def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        """Finish `operation` even when the caller is cancelled meanwhile."""

    def signal(self) -> Signal:
        """Make a signal that `wait` of this port understands."""

    async def wait(self, signal: Signal, timeout: float) -> bool:
        """Return True when the signal is set, and unset it; False after `timeout`."""

    def line(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """The listener that serves the caller for this lock, the same one for as long as it exists.

        It is made from its channel (`core.messages.channel_of`), of the client whose name is in the
        tokens that are drawn here.
        """

    async def listen(self, listener: Listener, timeout: float, keys: Keys) -> None:
        """Have the listener's channel subscribed to, where a lock with these keys is.

        Whoever else asks for it joins in.

        The connection stays until it fails, the client is closed, or nobody has waited for long.

        Raises:
            NodeUnavailable: it cannot be had now.
            ConfigurationError: the server will never allow it.
        """


class StepPort(Port, Protocol):
    """What an operation may ask for that is one atomic step on one server."""

    def step(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        timeout: float,
    ) -> Awaitable[Reply]:
        """Run a script once, where its keys are.

        As `Call`, but for those who cannot simply ask again: it goes out on a connection that was
        alive just before. A script of the user's is answered by what it answers.

        Raises:
            NodeUnavailable: nothing was carried out.
            OutcomeUnknown: it was sent and not answered within `timeout`.
            ScriptFailed: a script of the user's ended with an error.
            ConfigurationError: the server will never accept this.
        """


class Nodes(Protocol):
    """Several nodes that are asked at once."""

    def new_locations_mutex(self) -> AbstractContextManager[object]:
        """Make a mutex for what is known of these nodes; as `Port.new_mutex`."""

    @property
    def names(self) -> Sequence[str]:
        """What each is called in messages."""

    async def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        heard: Heard,
        meanwhile: Callable[[], float] | None = None,
    ) -> None:
        """Send every request at once, and tell `heard` what came of each, and by which node.

        Returns when `heard` says that it knows enough, when all is told, or when `timeout` has
        passed: then those without an answer are told as `OutcomeUnknown`. What is still to come
        when it returns is told later, by whoever reads or asks next, which may be another thread.
        With a `timeout` of 0 it returns when all is sent, or about to be, and everything is told
        later.

        Requests of one caller to one node are carried out in order, unless told otherwise: as
        unknown (it may yet be carried out, later than others) or unavailable (it never will be).
        One whose script the node has forgotten is sent again, behind those sent meanwhile.

        While answers are outstanding, `meanwhile` is called as by `Background.call_many`.
        """


class Background(Protocol):
    """What the job that keeps leases alive may ask for."""

    def now(self) -> float:
        """The same clock as the port's."""

    async def call_many(
        self,
        requests: Sequence[Request],
        timeout: float,
        meanwhile: Callable[[], float],
    ) -> list[Reply | HoldfastError]:
        """Run scripts in one go, on all nodes concerned; an error stands in its request's place.

        While answers are outstanding, `meanwhile` is called at once and then whenever the time
        it last returned has come.
        """

    def rouse(self, job: Job) -> bool:
        """Make sure that the job runs, and wake it if it sleeps. Called from any thread.

        False if it cannot run: no thread can be started, as at the end of the interpreter.
        """

    async def rest(self, until: float) -> None:
        """Return at `until`, or at once when roused, also when roused since the last rest."""
