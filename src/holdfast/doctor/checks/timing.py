"""Clocks that agree and do not jump, and servers that answer in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.doctor.facts import Deployment, Node, TimeSample

SKEW = 0.5
"""Seconds by which clocks that are kept in step never differ."""

STEP = 0.01
"""Seconds that no clock gains or loses in the time of an examination."""

SYNCHRONISE = "on its machine: timedatectl set-ntp true (or chronyc makestep, once)"


def offset(samples: Sequence[TimeSample]) -> tuple[float, float] | None:
    """How far a server's clock is ahead of ours: at least, and at most.

    Each sample bounds it, by the moments between which the server read its clock. None if no
    offset fits them all: the clock has stepped.
    """
    least = max(told - answered for _, answered, told in samples)
    most = min(told - sent for sent, _, told in samples)
    return (least, most) if least <= most + STEP else None


def clock_step(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server's clock did not jump during the examination."""
    if node.times and offset(node.times) is None:
        yield Finding(
            "error",
            what="its clock has just jumped",
            why="a server ends locks by its clock: a jump forward ends those that are held, one "
            "back keeps those of the dead",
            fix="let its clock be slewed, not stepped: makestep 0 0 in chrony.conf",
        )


def clock_here(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """The clocks of the server and of this machine agree."""
    bounds = offset(node.times) if node.times else None
    if bounds is None:
        return
    ahead = _distance(bounds, (deployment.clock_here, deployment.clock_here))
    if abs(ahead) >= SKEW:
        yield Finding(
            "hint",
            what=f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} ours",
            why="one of the two is not kept in step, and will jump when it is: a server ends "
            "locks by its clock",
            fix=SYNCHRONISE,
        )


def clocks_apart(deployment: Deployment) -> Iterator[Finding]:
    """The clocks of all servers agree."""
    known = [(node, offset(node.times)) for node in deployment.examined if node.times]
    bounds = [(node, each) for node, each in known if each is not None]
    if not bounds:
        return
    slow = min(bounds, key=lambda each: each[1][1])
    fast = max(bounds, key=lambda each: each[1][0])
    apart = _distance(fast[1], slow[1])
    if apart >= SKEW:
        yield Finding(
            "warning",
            what=f"its clock is {apart:.1f} s ahead of that of {slow[0].name}",
            why="fences follow the clocks where a server has lost its data, or another takes over: "
            "a late holder could be given a lower number than an earlier one",
            fix=SYNCHRONISE,
            node=fast[0].name,
        )


def _distance(one: tuple[float, float], other: tuple[float, float]) -> float:
    """How far `one` is certainly ahead of the other, or behind if below 0."""
    if one[0] > other[1]:
        return one[0] - other[1]
    return min(one[1] - other[0], 0.0)


def forks(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """Saving data does not stop the server for long."""
    took = (node.count("latest_fork_usec") or 0) / 1_000_000
    if took >= deployment.pause:
        yield Finding(
            "warning",
            what=f"it stood still for {_seconds(took)} when it last saved its data (fork)",
            why=f"nobody can renew meanwhile, and that is more than a tenth of a ttl "
            f"of {deployment.ttl:g} s",
            fix="echo never > /sys/kernel/mm/transparent_hugepage/enabled, or less data on this "
            "server, or a longer ttl",
        )


def slow_commands(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """No slow commands keep the server from answering."""
    threshold = node.limit("slowlog-log-slower-than")
    if threshold is not None and not 0 <= threshold <= deployment.pause * 1_000_000:
        yield Finding(
            "unknown",
            what=f"its slow log is set to {threshold} µs, and leaves out what would be too long",
            why="a command that takes longer than a tenth of the ttl keeps all from renewing",
            fix=f"CONFIG SET slowlog-log-slower-than {min(10_000, int(deployment.pause * 1e6))}",
        )
    if slow := [each for each in node.slow if each.seconds >= deployment.pause]:
        worst = max(slow, key=lambda each: each.seconds)
        yield Finding(
            "warning",
            what=f"{len(slow)} in its slow log took {_seconds(deployment.pause)} or more: "
            f"{worst.command} took {_seconds(worst.seconds)}",
            why=f"nobody can renew meanwhile, and that is more than a tenth of a ttl "
            f"of {deployment.ttl:g} s",
            fix="SLOWLOG GET shows who sent what; SLOWLOG RESET once it is mended",
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
