"""S16: a request that may still arrive has no effect once its client has given it up.

A client that gives up a request, or goes on without its reply, cannot know whether the request will
arrive. So it releases the token with a tombstone, which makes the server refuse the request.
Only if the request has arrived before, a plain release is enough. And a token that a server granted
the lock, but that its client never held, is released there.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.sim.script_run import ScriptRun

TAKING = frozenset(("acquire", "vote", "adopt"))
"""The scripts that take the lock, or a place in the queue."""

_TOMBSTONE, _EXPORTED, _WAITER = 2, 2, 4  # arguments of release, adopt and vote


class AbandonCheck:
    """By token and server: how many requests are under way, and whether there is a tombstone."""

    def __init__(self) -> None:
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._buried: set[tuple[str, str]] = set()
        self._taken: dict[tuple[str, str], None] = {}
        """Tokens that were granted the lock by the reply to a request, and not released since."""
        self._released_early: dict[tuple[str, str], None] = {}
        """Tokens that were released, without a tombstone, while a request was under way."""

    def sent(self, script: str, args: Sequence[str], server: str) -> None:
        """A client sends a request."""
        for token in _taking(script, args):
            self._under_way[token, server] += 1

    def arrived(self, script: str, args: Sequence[str], server: str) -> None:
        """A request arrives at a server, which may refuse it."""
        for token in _taking(script, args):
            self._under_way[token, server] -= 1

    def refused(self, script: str, args: Sequence[str], server: str) -> None:
        """A server refused a request with an error, so that it has no effect."""
        for token in _taking(script, args):
            if not self._under_way[token, server]:
                self._released_early.pop((token, server), None)

    def answered(self, script: str, args: Sequence[str], server: str) -> None:
        """A client receives the reply to a request, and so knows what it has to release."""
        for token in _taking(script, args):
            self._released_early.pop((token, server), None)

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script."""
        script, args, token, server = run.script, run.args, run.args[0], run.server.name
        if script in TAKING:
            self._taken.pop((token, server), None)  # what it took before may have expired
            if isinstance(run.reply, int) and run.reply > 0:
                self._taken[token, server] = None
        if script == "adopt":
            self.buried(args[_EXPORTED], server)
        elif script == "release":
            self._taken.pop((token, server), None)
            life = "".join(args[_TOMBSTONE : _TOMBSTONE + 1]).split(" ")[0]
            if life not in {"", "0"}:
                self.buried(token, server)
            elif self._under_way[token, server] > 0:
                self._released_early[token, server] = None

    def buried(self, token: str, server: str) -> None:
        """A server refuses all requests of a token from now on."""
        self._buried.add((token, server))
        self._taken.pop((token, server), None)

    def kept(self, doubled: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the tokens that took something and were not released since, and the servers.

        Not those of which a request was `doubled`: it may have arrived after the release.
        """
        yield from (place for place in self._taken if place[0] not in doubled)

    def left(self, doubled: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the tokens of which a request may still have an effect, and the servers.

        A `doubled` release may have overtaken the request of its token.
        """
        under_way = {place: None for place, number in self._under_way.items() if number > 0}
        early = {place: None for place in self._released_early if place[0] not in doubled}
        for place in {**early, **under_way}:
            if place not in self._buried:
                yield place


def _taking(script: str, args: Sequence[str]) -> list[str]:
    if script not in TAKING:
        return []
    waiter = args[_WAITER] if script == "vote" else ""
    return [args[0], waiter] if waiter else [args[0]]
