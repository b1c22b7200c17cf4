"""S16: an abandoned request has no effect, even if it arrives later.

A client that gives up a request cannot know whether it will arrive. So it releases the token with a
tombstone, which makes the server refuse the request. A plain release is enough only if the request
has arrived before. A token that was granted the lock, but that its client never held, must be
released.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.sim.script_run import ScriptRun

TAKING = frozenset(("acquire", "acquire_all", "vote", "adopt"))
"""The scripts that acquire the lock or a place in the queue."""

_TOMBSTONE, _EXPORTED, _WAITER = 2, 2, 4  # arguments of release, adopt and vote


class AbandonCheck:
    """By token and server, the requests under way and the tombstones."""

    def __init__(self) -> None:
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._tombstones: set[tuple[str, str]] = set()
        self._taken: dict[tuple[str, str], None] = {}
        """Tokens that were granted the lock in a reply, and were not released since."""
        self._released_early: dict[tuple[str, str], None] = {}
        """Tokens that were released without a tombstone while a request was under way."""

    def sent(self, script: str, args: Sequence[str], server: str) -> None:
        """A client sends a request."""
        for token in _taking(script, args):
            self._under_way[token, server] += 1

    def arrived(self, script: str, args: Sequence[str], server: str) -> None:
        """A request arrives at a server."""
        for token in _taking(script, args):
            self._under_way[token, server] -= 1

    def refused(self, script: str, args: Sequence[str], server: str) -> None:
        """A server refused a request with an error, so it has no effect."""
        for token in _taking(script, args):
            if not self._under_way[token, server]:
                self._released_early.pop((token, server), None)

    def answered(self, script: str, args: Sequence[str], server: str) -> None:
        """A client receives a reply, so it knows what it must release."""
        for token in _taking(script, args):
            self._released_early.pop((token, server), None)

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script."""
        script, args, token, server = run.script, run.args, run.args[0], run.server.name
        if script in TAKING:
            self._taken.pop((token, server), None)  # an earlier grant may have expired
            if isinstance(run.reply, int) and run.reply > 0:
                self._taken[token, server] = None
        if script == "adopt":
            self.tombstone_added(args[_EXPORTED], server)
        elif script == "release":
            self._taken.pop((token, server), None)
            life = "".join(args[_TOMBSTONE : _TOMBSTONE + 1]).split(" ")[0]
            if life not in {"", "0"}:
                self.tombstone_added(token, server)
            elif self._under_way[token, server] > 0:
                self._released_early[token, server] = None

    def tombstone_added(self, token: str, server: str) -> None:
        """A server has a tombstone of a token, and refuses its requests."""
        self._tombstones.add((token, server))
        self._taken.pop((token, server), None)

    def kept(self, doubled: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the granted tokens that were not released since, and their servers.

        Tokens in `doubled` are omitted: a second delivery may arrive after the release.
        """
        yield from (place for place in self._taken if place[0] not in doubled)

    def left(self, doubled: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the tokens of which a request may still have an effect, and their servers.

        For tokens in `doubled`, a second release may have overtaken the request.
        """
        under_way = {place: None for place, number in self._under_way.items() if number > 0}
        early = {place: None for place in self._released_early if place[0] not in doubled}
        for place in {**early, **under_way}:
            if place not in self._tombstones:
                yield place


def _taking(script: str, args: Sequence[str]) -> list[str]:
    if script not in TAKING:
        return []
    waiter = args[_WAITER] if script == "vote" else ""
    return [args[0], waiter] if waiter else [args[0]]
