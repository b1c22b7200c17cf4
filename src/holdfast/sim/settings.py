"""What a simulated world is like: how many take part, what they do, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """One kind of world. Times are in seconds, probabilities for each time it could happen."""

    clients: int = 3
    tasks: int = 1  # of each client, which share its connection for pushes
    turns: int = 3  # of each task
    ttl: float = 2.0
    timeout: float | None = None
    renew: bool = True
    fair: bool = True
    lock_delay: float = 0.0
    owner: bool = False  # all clients give the same owner, so that they hold it together
    reentrant: bool = False
    polls: bool = False
    hold: float = 0.3  # how long a turn takes, about
    drift: float = 0.005  # by which a clock may run fast or slow

    # What may happen to a message
    slow: float = 0.0
    reset: float = 0.0
    half_open: float = 0.0
    doubled: float = 0.0

    # What may happen to a client, at each of its waits
    pause: float = 0.0
    crash: float = 0.0
    cancel: float = 0.0

    # What may happen to the server, once in about `fault_every` seconds
    fault_every: float = 2.0
    partition: float = 0.0
    freeze: float = 0.0
    restart: float = 0.0  # with its data
    script_flush: float = 0.0
    full: float = 0.0

    # What breaks the assumptions: exclusion is not demanded, that fences hold is
    wipe: float = 0.0  # a restart without its data
    evict: float = 0.0
    clock_jump: float = 0.0
    failover: float = 0.0  # to a replica that lags behind

    @property
    def calm(self) -> bool:
        """Whether nothing goes wrong from the beginning."""
        return not any(getattr(self, fault) for fault in FAULTS)

    @property
    def trusts(self) -> bool:
        """Whether the assumptions hold under which nobody may believe beside another."""
        return not (self.wipe or self.evict or self.clock_jump or self.failover)


FAULTS = (
    *("slow", "reset", "half_open", "doubled", "pause", "crash", "cancel"),
    *("partition", "freeze", "restart", "script_flush", "full"),
    *("wipe", "evict", "clock_jump", "failover"),
)
"""The settings that are probabilities of something going wrong."""

CALM = Settings()
STORMY = Settings(
    slow=0.03,
    reset=0.01,
    half_open=0.005,
    doubled=0.02,
    pause=0.01,
    crash=0.002,
    cancel=0.01,
    partition=0.1,
    freeze=0.1,
    restart=0.05,
    script_flush=0.05,
    full=0.05,
)
