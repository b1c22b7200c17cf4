"""The parts of `client.once(...)` that both clients share: settings and results, without I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from holdfast.api.advice import MissingMethod
from holdfast.api.codecs import as_bytes
from holdfast.api.lease_view import LeaseView
from holdfast.api.values import load
from holdfast.core.once import Result
from holdfast.errors import ConfigurationError, NotHeld

if TYPE_CHECKING:
    from holdfast.api.codecs import Codec
    from holdfast.core.once import Work

L = TypeVar("L", bound=LeaseView)


class OnceView(Generic[L]):
    """The properties of `Once` and `AsyncOnce`."""

    __slots__ = ("_codec", "_lease", "_stored", "_to_store", "_value", "_work")

    _wait = ""

    def __init__(self, work: Work, codec: Codec) -> None:
        if not (
            callable(getattr(codec, "dumps", None)) and callable(getattr(codec, "loads", None))
        ):
            raise ConfigurationError(
                f"once {work.lock.name!r}: codec={codec!r} has no dumps and loads: use "
                "holdfast.JSON",
                lock=work.lock.name,
            )
        self._work = work
        self._codec = codec
        self._lease: L | None = None
        """Set when the block is entered."""
        self._stored: Result | None = None
        self._to_store = Result()
        self._value: Any = None

    @property
    def name(self) -> str:
        """The id of the work."""
        return self._work.lock.name

    @property
    def keep(self) -> float:
        """Seconds for which the result is kept."""
        return self._work.keep

    @property
    def first(self) -> bool:
        """Whether this caller has to do the work: no result is stored.

        Raises:
            NotHeld: the block was not entered.
        """
        self._entered()
        return self._stored is None

    @property
    def lease(self) -> L:
        """The lease under which this caller does the work.

        Raises:
            NotHeld: the work was done before, or the block was not entered.
        """
        if not self.first:
            raise self._done_before()
        return self._entered()

    @property
    def fence(self) -> int:
        """The fencing number of the run: of this one, or of the one whose result is returned.

        Raises:
            NotHeld: the block was not entered.
        """
        lease = self._entered()
        return lease.fence if self._stored is None else self._stored.fence

    @property
    def result(self) -> Any:  # noqa: ANN401 - any value
        """The result of the work, as the codec encodes and decodes it; None if none was set.

        The caller that does the work sets it. It is stored when the block ends without an
        exception. It cannot be set if the work was done before.

        Raises:
            NotHeld: the block was not entered; or the result is set, and the work was done before.
            Exception: from the codec, which cannot encode the result that is set.
        """
        self._entered()
        return self._value

    @result.setter
    def result(self, value: object) -> None:
        if not self.first:
            raise self._done_before()
        payload = as_bytes(self._codec.dumps(value))
        self._value = self._codec.loads(payload)
        self._to_store = Result(payload, is_empty=False)

    def _enter(self, lease: L) -> None:
        """Begin the block. Each object is for one block, because it has one result."""
        if self._lease is not None:
            raise ConfigurationError(
                f"this block for {self.name!r} was entered before: call client.once(...) again for "
                "each block",
                lock=self.name,
            )
        self._lease = lease

    def _read(self, stored: Result | None) -> None:
        """Take the stored result, if there is one.

        Raises:
            WrongValue: the codec cannot decode it.
        """
        self._stored = stored
        self._value = self._decoded(stored, None)

    def _decoded(self, stored: Result | None, default: object) -> Any:  # noqa: ANN401 - any value
        """Return a stored result, or the default if there is none."""
        if stored is None:
            return default
        return None if stored.is_empty else load(self._codec, self.name, stored.payload)

    def _entered(self) -> L:
        if self._lease is None:
            raise NotHeld(
                f"the block for {self.name!r} was not entered: write 'with client.once(...) as "
                "run:', with 'async with' for an AsyncClient",
                lock=self.name,
            )
        return self._lease

    def _done_before(self) -> NotHeld:
        return NotHeld(
            f"the work {self.name!r} was done before, and its result is kept: write "
            "'if run.first:' before the work",
            lock=self.name,
        )

    if not TYPE_CHECKING:  # type checkers must not see it
        __call__ = MissingMethod(
            "it is no decorator: write '{with_} client.once(id) as run:' inside the function"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a run cannot be pickled or copied: pass its id to the other process, and call "
            "client.once(id) there"
        )

    def __repr__(self) -> str:
        state = "not entered"
        if self._lease is not None:
            lease = cast("LeaseView", self._lease)
            state = "done before" if self._stored is not None else f"first, {lease!r}"
        return f"<{type(self).__name__} {self.name!r}, {state}>"
