"""A primary with two replicas and three Sentinels, each a real process.

This module starts and stops them and triggers failovers. The tests run the clients.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING

from kit.cuttable_proxy import CuttableProxy
from kit.servers import ReplyError, Server
from kit.waiting import eventually

if TYPE_CHECKING:
    from typing import Self

SERVICE = "orders"
REPLICAS, SENTINELS, QUORUM = 2, 3, 2
DOWN_AFTER_MS = 600
FAILOVER_TIMEOUT_MS = 3000
"""Sentinels abort a stalled failover after this time, and retry after twice this time."""

SLOW = 20.0
"""Seconds that a failover may take on a busy machine."""


class Sentinel(Server):
    """One Sentinel: the server program in Sentinel mode, which needs a configuration file."""

    def _settings(self) -> list[str]:
        path = self.folder / "sentinel.conf"
        path.write_text(
            f"bind {self.host}\nport {self.port}\nunixsocket {self.unix_path}\n"
            f"dir {self.folder}\ndaemonize no\n"
        )
        return [str(path), "--sentinel"]


class Sentinels:
    """The servers of one service. `servers` are the primary and the replicas.

    With `proxied`, all connections to the first primary go through `proxy`.
    """

    def __init__(self, program: str, *settings: str, proxied: bool = False) -> None:
        self._ends = contextlib.ExitStack()
        self.servers: list[Server] = []
        self.sentinels: list[Sentinel] = []
        with contextlib.ExitStack() as begun:
            primary = begun.enter_context(Server.start(program, *_QUICK, *settings))
            self.servers.append(primary)
            self.proxy = begun.enter_context(CuttableProxy(primary.port))
            self._at = {primary.port: self.proxy.port} if proxied else {}
            follow = ("--replicaof", f"{primary.host} {self._port_of(primary)}")
            for _ in range(REPLICAS):
                server = Server.start(program, *_QUICK, *settings, *follow)
                self.servers.append(begun.enter_context(server))
            for _ in range(SENTINELS):
                self.sentinels.append(begun.enter_context(Sentinel.start(program)))
            for sentinel in self.sentinels:
                _watch(sentinel, primary.host, self._port_of(primary))
            self.wait_until_stable()
            self._ends = begun.pop_all()

    @property
    def url(self) -> str:
        """The URL for clients."""
        hosts = ",".join(f"{each.host}:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    @property
    def primary(self) -> Server:
        """The primary, according to the Sentinels."""
        known = [_address(sentinel) for sentinel in self.sentinels if sentinel.alive]
        return next(each for each in self.servers if self._port_of(each) == known[0])

    def _port_of(self, server: Server) -> int:
        """Return the port under which the other servers know it."""
        return self._at.get(server.port, server.port)

    @property
    def replicas(self) -> list[Server]:
        """The servers that run and are not the primary."""
        primary = self.primary
        return [each for each in self.servers if each is not primary and each.alive]

    def wait_until_stable(self) -> None:
        """Wait until all running servers agree, and every replica is up to date."""
        eventually(self._agree, within=SLOW, what="a settled primary")
        mark = uuid.uuid4().hex
        self.primary.command("SET", "settled", mark)
        copies = {mark.encode()}
        eventually(  # a connected replica is not yet up to date
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
        """Order a failover and wait for it; return the old primary.

        The Sentinels abort a failover that stalls. Then this orders another one.
        """
        old, order_at = self.primary, time.monotonic()

        def is_done() -> bool:
            nonlocal order_at
            stands = _address(self.sentinels[0]) == self._port_of(old)
            if stands and time.monotonic() >= order_at:
                # NOGOODSLAVE: no recent reply of a replica; INPROG: the last one is not aborted yet
                with contextlib.suppress(ReplyError):
                    self.sentinels[0].command("SENTINEL", "FAILOVER", SERVICE)
                    order_at = time.monotonic() + 2 * FAILOVER_TIMEOUT_MS / 1000
            return self._is_another_than(old)

        eventually(is_done, within=SLOW, what="another primary")
        return old

    def wait_for_new_primary(self, old: Server) -> Server:
        """Wait until a server other than `old` is primary, and all Sentinels know it."""
        eventually(lambda: self._is_another_than(old), within=SLOW, what="another primary")
        return self.primary

    def _is_another_than(self, old: Server) -> bool:
        known = {_address(each) for each in self.sentinels if each.alive}
        if len(known) != 1 or self._port_of(old) in known:
            return False
        return bool(self.primary.command("ROLE")[0] == b"master")

    def stop(self) -> None:
        """Stop all processes."""
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
    "ping-period": 300,  # a replica is not promoted after five periods without a reply
    "ask-period": 100,
    "publish-period": 200,
    "election-timeout": 1000,
    "min-link-reconnect-period": 200,
    "tilt-period": 1000,  # a Sentinel does nothing for this time if it was scheduled late
}
"""Periods of a Sentinel in ms. The defaults are about ten times as long."""


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
    """Whether a Sentinel has found its peers and the replicas."""
    fields = sentinel.command("SENTINEL", "MASTER", SERVICE)
    about = dict(zip(fields[::2], fields[1::2], strict=True))
    return (
        int(about[b"num-other-sentinels"]) == SENTINELS - 1
        and int(about[b"num-slaves"]) >= len(all_of_them.replicas)
        and b"down" not in about[b"flags"]
    )
