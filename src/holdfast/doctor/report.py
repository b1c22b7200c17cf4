"""The report of an examination: what was looked at, what was found, and what it comes to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from holdfast.doctor.checks import checks_for, findings_in
from holdfast.doctor.findings import LEVELS, Finding
from holdfast.doctor.gathering import gather

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from holdfast.doctor.facts import Deployment, Node

FIT, TO_MEND, NOT_EXAMINED = 0, 1, 3
"""The status of a report; 2 is what programs end with that were called in a wrong way."""


@dataclass(frozen=True)
class Report:
    """What was found, the worst first."""

    deployment: Deployment
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    """The names of the checks that ran and were not skipped."""

    def status(self, *, strict: bool = False) -> int:
        """0 if locks can be kept here, 1 if something is to be mended, 3 if a server is not there.

        Hints, and what could not be looked at, count only if `strict`.
        """
        if any(each.failure for each in self.deployment.servers):
            return NOT_EXAMINED
        counts = {"error", "warning", "hint", "unknown"} if strict else {"error", "warning"}
        return TO_MEND if counts & {finding.level for finding in self.findings} else FIT

    def as_data(self, *, strict: bool = False) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "deployment": self.deployment.kind,
            "ttl": self.deployment.ttl,
            "status": self.status(strict=strict),
            "checks": list(self.checks),
            "servers": [_summary(node) for node in self.deployment.nodes],
            "sentinels": [each.name for each in self.deployment.sentinels],
            "findings": [asdict(finding) for finding in self.findings],
        }


def _summary(node: Node) -> dict[str, Any]:
    return {
        "node": node.name,
        "examined": not node.failure,
        "version": node.version,
        "role": "" if node.failure else "replica" if node.is_replica else "primary",
        "maxmemory-policy": node.setting("maxmemory-policy"),
        "appendonly": node.keeps_a_log,
        "appendfsync": node.setting("appendfsync"),
    }


def examine(urls: Sequence[str], *, ttl: float = 30.0, skip: Collection[str] = ()) -> Report:
    """Look at the servers at these URLs, and change nothing there.

    Args:
        urls: one of a server, of sentinels or of a cluster, or one for each node of a quorum.
        ttl: the shortest that locks there have, in seconds.
        skip: names of checks whose findings are left out.

    Raises:
        ConfigurationError: the URLs cannot be read.
    """
    deployment = gather(urls, ttl=ttl)
    found = [each for each in findings_in(deployment) if each.check not in skip]
    return Report(
        deployment,
        tuple(sorted(found, key=lambda each: LEVELS.index(each.level))),
        tuple(name for name in checks_for(deployment) if name not in skip),
    )
