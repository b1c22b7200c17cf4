"""A primary with two replicas, watched by three Sentinels: real ones, each a process of its own.

This module owns their beginning, the ways to bring about a failover, and their end. What clients do
meanwhile is the business of the tests.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING

from kit.cable import Cable
from kit.servers import ReplyError, Server
from kit.waiting import eventually

if TYPE_CHECKING:
    from typing import Self

SERVICE = "orders"
REPLICAS, SENTINELS, QUORUM = 2, 3, 2
DOWN_AFTER_MS = 600
FAILOVER_TIMEOUT_MS = 3000
"""A failover that stalls is given up after this, and tried again after twice this."""

SLOW = 20.0
"""Seconds that a failover may take on a busy machine."""


class Sentinel(Server):
    """One Sentinel: the same program in another mode, which wants its settings in a file."""

    def _settings(self) -> list[str]:
        path = self.folder / "sentinel.conf"
        path.write_text(
            f"bind {self.host}\nport {self.port}\nunixsocket {self.unix_path}\n"
            f"dir {self.folder}\ndaemonize no\n"
        )
        return [str(path), "--sentinel"]


class Sentinels:
    """The servers of one service. `servers` are those that keep data, in whatever role.

    With `cabled`, whatever goes to the first primary, of whomever, goes through `cable`.
    """

    def __init__(self, program: str, *settings: str, cabled: bool = False) -> None:
        self._ends = contextlib.ExitStack()
        self.servers: list[Server] = []
        self.sentinels: list[Sentinel] = []
        with contextlib.ExitStack() as begun:
            primary = begun.enter_context(Server.start(program, *_QUICK, *settings))
            self.servers.append(primary)
            self.cable = begun.enter_context(Cable(primary.port))
            self._at = {primary.port: self.cable.port} if cabled else {}
            follow = ("--replicaof", f"{primary.host} {self._port_of(primary)}")
            for _ in range(REPLICAS):
                server = Server.start(program, *_QUICK, *settings, *follow)
                self.servers.append(begun.enter_context(server))
            for _ in range(SENTINELS):
                self.sentinels.append(begun.enter_context(Sentinel.start(program)))
            for sentinel in self.sentinels:
                _watch(sentinel, primary.host, self._port_of(primary))
            self.settle()
            self._ends = begun.pop_all()

    @property
    def url(self) -> str:
        """What a client is given."""
        hosts = ",".join(f"{each.host}:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    @property
    def primary(self) -> Server:
        """The server that the Sentinels call the primary."""
        known = [_address(sentinel) for sentinel in self.sentinels if sentinel.alive]
        return next(each for each in self.servers if self._port_of(each) == known[0])

    def _port_of(self, server: Server) -> int:
        """The port under which the others know it."""
        return self._at.get(server.port, server.port)

    @property
    def replicas(self) -> list[Server]:
        """The other servers that are alive."""
        primary = self.primary
        return [each for each in self.servers if each is not primary and each.alive]

    def settle(self) -> None:
        """Wait until all who are alive agree, and every replica keeps up."""
        eventually(self._agree, within=SLOW, what="a settled primary")
        mark = uuid.uuid4().hex
        self.primary.command("SET", "settled", mark)
        copies = {mark.encode()}
        eventually(  # connected is not yet up to date
            lambda: {server.command("GET", "settled") for server in self.replicas} <= copies,
            within=SLOW,
            what="replicas that are up to date",
        )

    def _agree(self) -> bool:
        try:
            primary, followers = self.primary, self.replicas
            role = primary.command("ROLE")
            return (
                len({_address(each) for each in self.sentinels if each.alive}) == 1
                and role[0] == b"master"
                and len(role[2]) == len(followers)
                and all(_follows(server, self._port_of(primary)) for server in followers)
                and all(_knows(each, self) for each in self.sentinels if each.alive)
            )
        except (OSError, ReplyError, StopIteration):
            return False

    def fail_over(self) -> Server:
        """Have the Sentinels make another the primary, in good order; return the old one.

        An ordered failover that stalls is given up by them, and ordered again here.
        """
        old, order_at = self.primary, time.monotonic()

        def is_done() -> bool:
            nonlocal order_at
            stands = _address(self.sentinels[0]) == self._port_of(old)
            if stands and time.monotonic() >= order_at:
                # NOGOODSLAVE: not heard of for a moment; INPROG: not given up yet
                with contextlib.suppress(ReplyError):
                    self.sentinels[0].command("SENTINEL", "FAILOVER", SERVICE)
                    order_at = time.monotonic() + 2 * FAILOVER_TIMEOUT_MS / 1000
            return self._is_another_than(old)

        eventually(is_done, within=SLOW, what="another primary")
        return old

    def await_another(self, old: Server) -> Server:
        """Wait until another than `old` is the primary, takes writes, and is known to all."""
        eventually(lambda: self._is_another_than(old), within=SLOW, what="another primary")
        return self.primary

    def _is_another_than(self, old: Server) -> bool:
        known = {_address(each) for each in self.sentinels if each.alive}
        if len(known) != 1 or self._port_of(old) in known:
            return False
        return bool(self.primary.command("ROLE")[0] == b"master")

    def stop(self) -> None:
        """End all of them."""
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_QUICK = (
    *("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"),
    *("--repl-timeout", "5"),
)


_HURRY = {
    "info-period": 200,
    "ping-period": 300,  # a replica not heard of for five of them is not promoted
    "ask-period": 100,
    "publish-period": 200,
    "election-timeout": 1000,
    "min-link-reconnect-period": 200,
    "tilt-period": 1000,  # for which it does nothing, if it was not woken in time
}
"""What a Sentinel waits for, in ms: everyday it is ten times as long, and nothing happens."""


def _watch(sentinel: Server, host: str, port: int) -> None:
    for name, value in _HURRY.items():
        sentinel.command("SENTINEL", "DEBUG", name, value)
    sentinel.command("SENTINEL", "MONITOR", SERVICE, host, port, QUORUM)
    for name, value in (
        ("down-after-milliseconds", DOWN_AFTER_MS),
        ("failover-timeout", FAILOVER_TIMEOUT_MS),
        ("parallel-syncs", REPLICAS),
    ):
        sentinel.command("SENTINEL", "SET", SERVICE, name, value)


def _address(sentinel: Server) -> int:
    return int(sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])


def _follows(server: Server, port: int) -> bool:
    role = server.command("ROLE")
    return bool(role[0] == b"slave" and role[2] == port and role[3] == b"connected")


def _knows(sentinel: Server, all_of_them: Sentinels) -> bool:
    """Whether it has found its peers, and those who could be promoted."""
    facts = sentinel.command("SENTINEL", "MASTER", SERVICE)
    about = dict(zip(facts[::2], facts[1::2], strict=True))
    return (
        int(about[b"num-other-sentinels"]) == SENTINELS - 1
        and int(about[b"num-slaves"]) >= len(all_of_them.replicas)
        and b"down" not in about[b"flags"]
    )
