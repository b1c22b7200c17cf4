"""The report of an examination: the servers, the findings, and the exit status."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from holdfast.doctor.checks import checks_for, findings_in
from holdfast.doctor.collect import collect
from holdfast.doctor.findings import LEVELS, Finding

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from holdfast.doctor.facts import Deployment, Node

NO_PROBLEMS, PROBLEMS, NOT_EXAMINED = 0, 1, 3
"""The exit status for a report. 2 means wrong usage, as for all commands."""


@dataclass(frozen=True)
class Report:
    """The findings, the most serious first."""

    deployment: Deployment
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    """The names of the checks that ran and were not skipped."""

    def status(self, *, strict: bool = False) -> int:
        """Return 0 without problems, 1 with problems, 3 if a server could not be examined.

        Errors and warnings are problems. With `strict`, so are hints and unknowns.
        """
        if any(each.failure for each in self.deployment.servers):
            return NOT_EXAMINED
        counts = {"error", "warning", "hint", "unknown"} if strict else {"error", "warning"}
        return PROBLEMS if counts & {finding.level for finding in self.findings} else NO_PROBLEMS

    def as_data(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the report, ready for JSON."""
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
        "appendonly": node.has_aof,
        "appendfsync": node.setting("appendfsync"),
    }


def examine(urls: Sequence[str], *, ttl: float = 30.0, skip: Collection[str] = ()) -> Report:
    """Examine the servers at these URLs. Nothing is changed.

    Args:
        urls: one URL of a server, of sentinels or of a cluster, or one for each node of a quorum;
            "local" is the embedded server, which must be running.
        ttl: the shortest ttl of locks on these servers, in seconds.
        skip: names of checks whose findings are omitted.

    Raises:
        ConfigurationError: the URLs are invalid.
    """
    deployment = collect(urls, ttl=ttl)
    found = [each for each in findings_in(deployment) if each.check not in skip]
    return Report(
        deployment,
        tuple(sorted(found, key=lambda each: LEVELS.index(each.level))),
        tuple(name for name in checks_for(deployment) if name not in skip),
    )
