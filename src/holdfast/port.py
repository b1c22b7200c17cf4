"""The port: every input and output that the core uses, and the only things that it awaits.

The core runs unchanged over three implementations. The one for threads blocks and never suspends.
The one for asyncio awaits. The one of the simulator yields to a scheduler with virtual time.

An operation uses `Port`, in the thread or task of its caller. The renewer, the background job of a
client, uses `Background`. It runs in a thread, under asyncio too. A quorum uses `Nodes`.
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
"""The reply of a script: an int, bytes, or a list of these. The header of each script has its
replies."""

L = TypeVar("L", bound="Listener")

Command: TypeAlias = tuple[bytes, ...]
"""A command that is sent on a pub/sub connection, with its arguments."""

Request: TypeAlias = tuple["Script", "Keys", tuple[str, ...]]
"""A script with its keys and its arguments."""


Post: TypeAlias = "tuple[Sequence[int], Request]"
"""A request, and the numbers of the nodes to which it goes."""

OnReply: TypeAlias = "Callable[[int, int, Reply | HoldfastError], bool]"
"""Called with the index of a post, the number of a node, and the reply or error of that node.
Returns whether the caller needs no further reply."""


class Quarantined(NodeUnavailable):
    """The server grants no lock for `seconds`: it may have lost locks that are still held.

    A script replies this. On a quorum the client refuses the node on connecting.
    """

    def __init__(
        self, message: str, *, lock: str = "", node: str = "", seconds: float = 0.0
    ) -> None:
        super().__init__(message, lock=lock, node=node)
        self.seconds = seconds


class Unconnected(NodeUnavailable):
    """There is no connection to this node yet, and the caller does not wait for one."""


class Interrupted(OutcomeUnknown):
    """The thread that was to read the reply was interrupted. The node may be fine."""


class Unreplicated(OutcomeUnknown):
    """The request was carried out, but fewer replicas than required have it yet."""


class Signal(Protocol):
    """An event for one waiting thread or task. Any thread may set it."""

    def set(self) -> None:
        """Wake the waiting actor. If none waits, the next wait returns at once."""


class Listener(Protocol):
    """The receiver of the messages on one pub/sub channel.

    The reader of the connection calls its methods, in one thread or event loop. Any thread may read
    `is_subscribed`.
    """

    name: bytes
    """The name of the channel."""

    @property
    def is_subscribed(self) -> bool:
        """Whether the channel is subscribed to, as far as is known."""

    def on_subscribed(self, sent_at: float, wake: Callable[[], None]) -> None:
        """Note that the channel is subscribed to, by a request that was sent at `sent_at`.

        `wake` makes the reader of the connection call `tick` now.
        """

    def on_message(self, message: object, now: float) -> None:
        """Handle one message.

        Raises:
            ValueError: it is no message of holdfast.
        """

    def tick(self, now: float) -> tuple[Sequence[Command], float]:
        """Return the commands to send now, mostly PINGs, and when to call this again.

        Raises:
            TimeoutError: the server does not reply to PINGs. The connection counts as lost.
        """

    def on_disconnect(self, now: float) -> None:
        """Note that the connection is lost."""

    @property
    def idle(self) -> bool:
        """Whether the connection is not needed now."""


class Job(Protocol):
    """A job that runs in the background until it has nothing left to do."""

    async def run(self) -> None:
        """Work until there is nothing left to do."""


class Call(Protocol):
    """A function that runs a script once, on the server that keeps the lock."""

    def __call__(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float, /
    ) -> Awaitable[Reply]:
        """Return the reply.

        Raises:
            NodeUnavailable: the script was not run.
            OutcomeUnknown: there was no reply within `timeout`, or the script was run and too few
                replicas have its writes.
            ConfigurationError: the server will never accept this request.
        """


class Port(Protocol):
    """What an operation on a lock uses."""

    def now(self) -> float:
        """Return seconds, by a clock that never steps and that runs while the machine sleeps."""

    def process(self) -> int:
        """Return a number for this process. Every forked child has a different one."""

    def actor(self) -> Any:  # noqa: ANN401 - a thread, a task, or a simulation's own kind
        """Return the current thread or task, as the same object every time."""

    def is_gone(self, actor: Any) -> bool:  # noqa: ANN401 - what `actor` gave
        """Whether the actor never runs again, because its event loop is closed."""

    def blocks(self, actor: Any) -> bool:  # noqa: ANN401 - what `actor` gave
        """Whether the actor cannot run while the caller waits: that blocks the actor's loop."""

    def has_ended(self, actor: Any) -> bool:  # noqa: ANN401 - what `actor` gave
        """Whether the actor is a task that is done."""

    def new_token(self, actor: Any, suffix: str) -> str:  # noqa: ANN401 - what `actor` gave
        """Return a new unique token, which names the client and the actor."""

    def new_mutex(self) -> AbstractContextManager[object]:
        """Return a new reentrant mutex.

        It is reentrant because a signal handler may release a lease while its thread has the mutex.
        """

    def wall_clock(self) -> int:
        """Return the microseconds since the epoch, by the clock of this machine."""

    def jitter(self) -> float:
        """Return a random number, at least 0 and below 1."""

    async def sleep(self, seconds: float) -> None:
        """Suspend or block the caller for `seconds`."""

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        """Run `operation` to its end, even if the caller is cancelled."""

    def signal(self) -> Signal:
        """Return a new signal for `wait` of this port."""

    async def wait(self, signal: Signal, timeout: float) -> bool:
        """Wait for the signal, and clear it. Return False if `timeout` is over first."""

    def channel(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """Return the listener for messages to the caller about this lock.

        It is the same one as long as it exists. Otherwise `make` creates it, from the name of the
        channel (`core.messages.channel_of`).
        """

    async def listen(self, listener: Listener, timeout: float, keys: Keys) -> None:
        """Subscribe to the listener's channel, on the server that keeps a lock with these keys.

        Callers that subscribe at the same time share one attempt. The connection stays open until
        it fails, the client is closed, or the listener has been idle for some time.

        Raises:
            NodeUnavailable: the server cannot be reached now.
            ConfigurationError: the server will never allow the subscription.
        """


class AtomicPort(Port, Protocol):
    """What an atomic operation on one server uses."""

    def step(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        timeout: float,
    ) -> Awaitable[Reply]:
        """Run a script once, on the server that has its keys.

        Unlike `Call` it is for requests that must not be carried out twice. So it checks first that
        the connection is still open. The reply of a script of the user is returned unchanged.

        Raises:
            NodeUnavailable: the script was not run.
            OutcomeUnknown: the request was sent, and there was no reply within `timeout`.
            ScriptFailed: a script of the user ended with an error.
            ConfigurationError: the server will never accept this request.
        """


class Nodes(Protocol):
    """Several nodes, to which requests are sent at the same time."""

    def new_locations_mutex(self) -> AbstractContextManager[object]:
        """Return a new mutex for `core.token_locations`; as `Port.new_mutex`."""

    @property
    def names(self) -> Sequence[str]:
        """The name of each node in messages."""

    async def send_all(
        self,
        posts: Sequence[Post],
        timeout: float,
        on_reply: OnReply,
        on_tick: Callable[[], float] | None = None,
    ) -> None:
        """Send all requests at the same time; call `on_reply` with each reply or error.

        Returns when `on_reply` returns True, when there is a result for every request, or when
        `timeout` is over. At the timeout `on_reply` is called with `OutcomeUnknown` for each
        missing reply. A reply that arrives after this method has returned is passed to `on_reply`
        by the next caller that reads, perhaps in another thread. With a `timeout` of 0 this method
        only sends, and every reply arrives later.

        A node carries out the requests of one caller in the order in which they were sent. There
        are three exceptions. A request with `OutcomeUnknown` may be carried out later than others.
        One with `NodeUnavailable` is never carried out. One whose script is not in the node's
        script cache is sent again, after requests that were sent in the meantime.

        While replies are outstanding, `on_tick` is called as by `Background.call_many`.
        """


class Background(Protocol):
    """What the renewer uses, the background job of a client."""

    def now(self) -> float:
        """Return the time; as `Port.now`."""

    async def call_many(
        self,
        requests: Sequence[Request],
        timeout: float,
        on_tick: Callable[[], float],
    ) -> list[Reply | HoldfastError]:
        """Run scripts in one pipeline per node; return a reply or an error for each request.

        While replies are outstanding, `on_tick` is called at once, and then each time that the
        moment which it returned has come.
        """

    def wake(self, job: Job) -> bool:
        """Start the job, or wake it if it sleeps. Any thread may call this.

        Returns False if no thread can be started, as when the interpreter exits.
        """

    async def sleep_until(self, until: float) -> None:
        """Return at `until`, or earlier if `wake` is called or was called since the last sleep."""
