"""Checks of clocks, and of how long servers pause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.doctor.facts import Deployment, Node, TimeSample

MAX_SKEW = 0.5
"""Seconds by which synchronized clocks never differ."""

MAX_STEP = 0.01
"""Seconds that no clock gains or loses during an examination."""

SYNCHRONISE = "on its machine: timedatectl set-ntp true (or once: chronyc makestep)"


def offset(samples: Sequence[TimeSample]) -> tuple[float, float] | None:
    """Return how far a server's clock is ahead of this machine's: at least, and at most.

    Each sample bounds the offset, because the server read its clock between sending and receiving.
    None if no offset fits all samples: then the clock has jumped.
    """
    least = max(server_time - received for _, received, server_time in samples)
    most = min(server_time - sent for sent, _, server_time in samples)
    return (least, most) if least <= most + MAX_STEP else None


def clock_jump(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server's clock did not jump during the examination."""
    if node.times and offset(node.times) is None:
        yield Finding(
            "error",
            what="the server's clock has just jumped",
            why="locks expire by the server's clock: a jump forward ends held locks, a jump back "
            "keeps the locks of crashed clients",
            fix="slew the clock instead of stepping it: makestep 0 0 in chrony.conf",
        )


def client_clock(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """The clocks of the server and of this machine agree."""
    bounds = offset(node.times) if node.times else None
    if bounds is None:
        return
    ahead = _distance(bounds, (deployment.clock_here, deployment.clock_here))
    if abs(ahead) >= MAX_SKEW:
        yield Finding(
            "hint",
            what=f"the server's clock is {abs(ahead):.1f} s "
            f"{'ahead of' if ahead > 0 else 'behind'} this machine's",
            why="one of the two is not synchronized, and may jump when it is; locks expire by the "
            "server's clock",
            fix=SYNCHRONISE,
        )


def clock_skew(deployment: Deployment) -> Iterator[Finding]:
    """The clocks of all servers agree."""
    known = [(node, offset(node.times)) for node in deployment.examined if node.times]
    bounds = [(node, each) for node, each in known if each is not None]
    if not bounds:
        return
    slow = min(bounds, key=lambda each: each[1][1])
    fast = max(bounds, key=lambda each: each[1][0])
    apart = _distance(fast[1], slow[1])
    if apart >= MAX_SKEW:
        yield Finding(
            "warning",
            what=f"the server's clock is {apart:.1f} s ahead of the clock of {slow[0].name}",
            why="after a loss of data or a failover, fences are based on the clocks: a later "
            "holder could get a lower fence than an earlier one",
            fix=SYNCHRONISE,
            node=fast[0].name,
        )


def _distance(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return how far `one` is certainly ahead of `other`; negative if behind."""
    if one[0] > other[1]:
        return one[0] - other[1]
    return min(one[1] - other[0], 0.0)


def fork_time(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """Saving data does not pause the server for long."""
    took = (node.count("latest_fork_usec") or 0) / 1_000_000
    if took >= deployment.pause:
        yield Finding(
            "warning",
            what=f"the server paused for {_format_seconds(took)} in its last fork (to save its "
            "data)",
            why=f"no lease is renewed meanwhile, and that is more than a tenth of a ttl "
            f"of {deployment.ttl:g} s",
            fix="echo never > /sys/kernel/mm/transparent_hugepage/enabled, or less data on this "
            "server, or a longer ttl",
        )


def slow_commands(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """No slow commands block the server."""
    threshold = node.limit("slowlog-log-slower-than")
    if threshold is not None and not 0 <= threshold <= deployment.pause * 1_000_000:
        yield Finding(
            "unknown",
            what=f"the slow log is set to {threshold} µs, and omits commands that are too slow",
            why="no lease is renewed during a command, which must take less than a tenth of the "
            "ttl",
            fix=f"CONFIG SET slowlog-log-slower-than {min(10_000, int(deployment.pause * 1e6))}",
        )
    if slow := [each for each in node.slow if each.seconds >= deployment.pause]:
        worst = max(slow, key=lambda each: each.seconds)
        yield Finding(
            "warning",
            what=f"{len(slow)} commands took {_format_seconds(deployment.pause)} or more: "
            f"{worst.command} took {_format_seconds(worst.seconds)}",
            why=f"no lease is renewed meanwhile, and that is more than a tenth of a ttl "
            f"of {deployment.ttl:g} s",
            fix="find the clients with SLOWLOG GET; run SLOWLOG RESET once it is fixed",
        )


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
