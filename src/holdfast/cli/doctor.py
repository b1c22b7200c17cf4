"""`holdfast doctor`: what is wrong with the servers, for a lock, and what mends it."""

from __future__ import annotations

import json
import os
import textwrap
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console
from holdfast.cli.servers import LOCAL, UNASKED, URL_HELP, Local, complain, given, unasked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

    from holdfast.doctor.facts import Kind, Node
    from holdfast.doctor.findings import Finding, Level
    from holdfast.doctor.report import Report

STYLES: dict[Level, str] = {
    "error": "bold red",
    "warning": "yellow",
    "hint": "cyan",
    "unknown": "magenta",
}
LABEL = 9
"""Columns for a level, or for what a line of a finding is about."""

LEAST = 20
"""Columns for the words beside them, however narrow the terminal."""

DEPLOYMENTS: dict[tuple[Kind, ...], str] = {
    (): "every deployment",
    ("quorum", "sentinel", "cluster"): "several servers",
    ("quorum",): "a quorum",
    ("sentinel",): "servers behind Sentinels",
    ("cluster",): "a cluster",
}
"""The deployments that checks are for, and their headings in `--list`."""

WIDE = 100
"""Columns from which on a table of servers has room for all that is known of them."""


def doctor(
    servers: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="The same as --url.", show_default=False),
    ] = None,
    *,
    urls: Annotated[
        list[str] | None,
        typer.Option("--url", "-u", metavar="URL", help=f"{URL_HELP}.", show_default=False),
    ] = None,
    local: Local = False,
    ttl: Annotated[
        float, typer.Option(min=0.01, help="The shortest ttl of locks there, in seconds.")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Count hints, and what could not be looked at, too.")
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="Leave out what this check finds.", show_default=False),
    ] = None,
    list_checks: Annotated[
        bool, typer.Option("--list", help="List the checks, and look at no server.")
    ] = False,
) -> None:
    """Look for what would break locks on these servers, and say what mends it. Changes nothing.

    The status is 0 if locks can be kept there, 1 if something is to be mended (errors, warnings),
    3 if a server could not be examined.

    Example: `holdfast doctor redis://a:6379 redis://b:6379 redis://c:6379`
    """
    from holdfast.doctor.checks import NAMES
    from holdfast.doctor.report import examine
    from holdfast.errors import ConfigurationError

    if list_checks:
        _list_checks()
        return
    if strange := set(skip or ()) - set(NAMES):
        known = ", ".join(sorted(NAMES))
        raise typer.BadParameter(f"no check is called {strange.pop()!r}; there are {known}")
    chosen = _chosen([*(servers or ()), *(urls or ())], local=local)
    try:
        report = examine(chosen, ttl=ttl, skip=skip or ())
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(report.as_data(strict=strict), indent=2))
    else:
        _tell(report, skip or (), strict=strict)
    raise typer.Exit(report.status(strict=strict))


def _chosen(urls: Sequence[str], *, local: bool) -> list[str]:
    """Name the servers to examine; the embedded one only if it was chosen."""
    from holdfast import embedded

    found = given(urls, local=local) or os.environ.get("HOLDFAST_URL", "").split()
    if not found:
        raise typer.BadParameter("give the URL of a server, e.g. redis://localhost:6379/0")
    each = [found] if isinstance(found, str) else [*found]
    if each != [LOCAL]:
        return each
    with unasked():
        if embedded.answers():
            return [f"unix://{embedded.socket_path()}"]
    complain(f"no embedded server runs (it would be at {embedded.socket_path()})")
    raise typer.Exit(UNASKED)


def _list_checks() -> None:
    from holdfast.doctor.checks import NAMES, ONLY_FOR, purpose_of

    console = open_console()
    wide = max(map(len, NAMES)) + 4
    for kinds, heading in DEPLOYMENTS.items():
        console.print(heading, style="bold")
        for name in NAMES:
            if ONLY_FOR.get(name, ()) == kinds:
                text = textwrap.fill(
                    purpose_of(name),
                    max(LEAST + wide, console.width),
                    initial_indent=f"  {name:<{wide - 2}}",
                    subsequent_indent=" " * wide,
                )
                console.print(text, soft_wrap=True)


def _tell(report: Report, skip: Sequence[str], *, strict: bool) -> None:
    console = open_console()
    deployment = report.deployment
    names = {"single": "one server", "quorum": f"a quorum of {len(deployment.nodes)} servers"}
    names |= {"sentinel": f"{deployment.service}, watched by sentinels", "cluster": "a cluster"}
    console.print(f"{names[deployment.kind]}, for locks with a ttl of {deployment.ttl:g} s or more")
    console.print()
    if deployment.nodes:
        console.print(_servers(report, wide=console.width >= WIDE))
        console.print()
    for finding, nodes in _together(report.findings):
        _tell_finding(console, finding, nodes, alone=len(deployment.nodes) == 1)
    _tell_verdict(console, report, skip, strict=strict)


def _servers(report: Report, *, wide: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("server", overflow="fold")
    for name in ("version", "role", *(("when full", "on disk") if wide else ()), "found"):
        table.add_column(name)
    for node in report.deployment.nodes:
        found = [each for each in report.findings if each.node == node.name]
        style = STYLES[found[0].level] if found else "green"
        facts = [node.version or "?", _role(node)]
        if wide:
            facts += [node.setting("maxmemory-policy") or "?", _on_disk(node)]
        if node.failure:
            facts = ["?" for _ in facts]
        counted = ", ".join(_counts(found)) or "nothing"
        table.add_row(*map(Text, (node.name, *facts)), Text(counted, style))
    return table


def _role(node: Node) -> str:
    if node.mode == "sentinel":
        return "sentinel"
    return "replica" if node.is_replica else "primary"


def _on_disk(node: Node) -> str:
    if node.keeps_a_log is None:
        return "?"
    if node.keeps_a_log:
        return f"log, fsync {node.setting('appendfsync') or '?'}"
    return "snapshots" if node.setting("save") else "nothing"


def _together(findings: Sequence[Finding]) -> Iterable[tuple[Finding, list[str]]]:
    """Tell once what was found on several servers."""
    groups: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for each in findings:
        same = (each.level, each.check, each.what, each.why, each.fix)
        groups.setdefault(same, (each, []))[1].append(each.node)
    return groups.values()


def _tell_finding(console: Console, finding: Finding, nodes: Sequence[str], *, alone: bool) -> None:
    from rich.text import Text

    where = ", ".join(node for node in nodes if node and not alone)
    place = f"{finding.check}, on {where}" if where else finding.check
    for label, style, words, words_style in (
        (finding.level, STYLES[finding.level], finding.what, "bold"),
        ("", "", place, "dim"),
        ("why", "dim", finding.why, ""),
    ):
        for line in textwrap.wrap(words, max(LEAST, console.width - LABEL)):
            console.print(Text.assemble((f"{label:<{LABEL}}", style), (line, words_style)))
            label = ""  # noqa: PLW2901 - it stands before the first line only
    for label, line in zip_longest(["fix"], finding.fix.splitlines(), fillvalue=""):
        # Not wrapped, so that it can be copied.
        console.print(Text.assemble((f"{label:<{LABEL}}", "dim"), (line, "green")), soft_wrap=True)
    console.print()


def _counts(findings: Iterable[Finding]) -> list[str]:
    levels = [finding.level for finding in findings]
    return [
        f"{levels.count(level)} {level}{'s' * (levels.count(level) > 1 and level != 'unknown')}"
        for level in STYLES
        if level in levels
    ]


def _tell_verdict(console: Console, report: Report, skip: Sequence[str], *, strict: bool) -> None:
    from holdfast.doctor.checks import checks_for

    counts = ", ".join(_counts(report.findings)) or "nothing found"
    skipped = [name for name in checks_for(report.deployment) if name in skip]
    left_out = f" (left out: {', '.join(skipped)})" if skipped else ""
    verdicts = {
        0: ("locks can be kept here", "green"),
        1: ("to be mended before locks are kept here", "bold red"),
        3: ("not all servers could be examined", "bold red"),
    }
    words, style = verdicts[report.status(strict=strict)]
    checks = f"{len(report.checks)} check{'s' * (len(report.checks) != 1)}{left_out}"
    console.print(f"{checks}, {counts}: {words}", style=style, soft_wrap=True)
    if any("CONFIG SET" in finding.fix for finding in report.findings):
        console.print("CONFIG REWRITE keeps what CONFIG SET has set, over a restart", style="dim")
