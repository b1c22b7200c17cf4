"""The port: all that the core may ask of the world, and the only things it awaits.

The core runs unchanged in three worlds. Over threads these methods block and never suspend; over
asyncio they await; in a simulation they yield to a scheduler. Two small protocols, because they
are asked by two parties: `Port` by an operation in the caller's thread or task, `Background` by
the one job that keeps a client's leases alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from holdfast.errors import HoldfastError
    from holdfast.scripts import Script

Reply: TypeAlias = Any
"""What a script answered: an int, bytes, or a list of these. Each script's header says which."""

Request: TypeAlias = tuple["Script", tuple[bytes, ...], tuple[str, ...]]
"""A script with its keys and its arguments."""


class Signal(Protocol):
    """A one-time event that one party waits for and another, in any thread, sets."""

    def set(self) -> None:
        """End the wait, also one that has not begun."""


class Job(Protocol):
    """Something that runs in the background until it has nothing left to do."""

    async def run(self) -> None:
        """Work until there is nothing to watch for."""


class Port(Protocol):
    """What one operation on a lock may ask for."""

    def now(self) -> float:
        """Seconds on a clock that never steps and also runs while the machine sleeps."""

    def process(self) -> int:
        """The process this runs in, as a number that is another in every forked child."""

    def actor(self) -> Any:  # noqa: ANN401 - a thread, a task, or a simulation's own kind
        """The thread or task this runs in, the same object every time."""

    def draw_token(self, actor: Any, label: str) -> str:  # noqa: ANN401 - what `actor` gave
        """A token that was never drawn before, naming the actor and carrying `label`."""

    def jitter(self) -> float:
        """A random number, at least 0 and below 1."""

    def call(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        args: tuple[str, ...],
        timeout: float,
    ) -> Awaitable[Reply]:
        """Run a script on the node, once.

        Raises:
            NodeUnavailable: nothing was carried out.
            OutcomeUnknown: it was sent and not answered within `timeout`.
            ConfigurationError: the server will never accept this.
        """

    async def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        """Finish `operation` even when the caller is cancelled meanwhile."""

    def signal(self) -> Signal:
        """Make a signal that `wait` of this port understands."""

    async def wait(self, signal: Signal, timeout: float) -> None:
        """Return when the signal is set, or after `timeout`."""


class Background(Protocol):
    """What the job that keeps leases alive may ask for."""

    def now(self) -> float:
        """The same clock as the port's."""

    async def call_many(
        self,
        requests: Sequence[Request],
        timeout: float,
        meanwhile: Callable[[], float | None],
    ) -> list[Reply | HoldfastError]:
        """Run scripts on the node in one pipeline; an error stands in its own request's place.

        While answers are outstanding, `meanwhile` is called at once and then whenever the time
        it last returned has come.
        """

    def rouse(self, job: Job) -> None:
        """See that the job runs, and end the rest it may be taking. Called from any thread."""

    async def rest(self, until: float) -> None:
        """Return at `until`, or at once when roused, also when roused since the last rest."""
