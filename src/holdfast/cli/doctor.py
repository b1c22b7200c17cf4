"""`holdfast doctor`: check whether servers are suitable for locks, and how to fix them."""

from __future__ import annotations

import json
import os
import textwrap
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import open_console
from holdfast.cli.servers import (
    LOCAL,
    UNREACHABLE,
    URL_HELP,
    Local,
    chosen_servers,
    exit_if_unreachable,
    print_stderr,
)

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
LABEL_WIDTH = 9
"""Width of the labels before the text of a finding."""

TEXT_MIN_WIDTH = 20
"""Least width of the text of a finding."""

DEPLOYMENTS: dict[tuple[Kind, ...], str] = {
    (): "every deployment",
    ("quorum", "sentinel", "cluster"): "several servers",
    ("quorum",): "a quorum",
    ("sentinel",): "servers behind Sentinels",
    ("cluster",): "a cluster",
}
"""The deployments to which checks apply, and their headings in `--list`."""

WIDE = 100
"""Width from which the table of servers has all columns."""


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
        float,
        typer.Option(min=0.01, metavar="SECONDS", help="Shortest ttl of the locks."),
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail on hints and unknowns too.")
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="Ignore what this check finds.", show_default=False),
    ] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks and exit.")] = False,
) -> None:
    """Check whether servers are suitable for locks. Changes nothing.

    Example: `holdfast doctor redis://a:6379 redis://b:6379 redis://c:6379`

    Reports each problem, its consequence, and how to fix it.

    Exit status:

    * 0: suitable for locks

    * 1: something must be fixed (errors or warnings)

    * 2: wrong usage, or no server is given

    * 3: a server could not be examined
    """
    from holdfast.doctor.checks import NAMES
    from holdfast.doctor.report import examine
    from holdfast.errors import ConfigurationError

    if list_checks:
        _list_checks()
        return
    if unknown := set(skip or ()) - set(NAMES):
        known = ", ".join(sorted(NAMES))
        raise typer.BadParameter(f"unknown check {unknown.pop()!r}; the checks are {known}")
    chosen = _servers_to_check([*(servers or ()), *(urls or ())], local=local)
    try:
        report = examine(chosen, ttl=ttl, skip=skip or ())
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(report.as_data(strict=strict), indent=2))
    else:
        _print_report(report, skip or (), strict=strict)
    raise typer.Exit(report.status(strict=strict))


def _servers_to_check(urls: Sequence[str], *, local: bool) -> list[str]:
    """Return the servers to examine; the embedded server only if it was chosen."""
    from holdfast import embedded

    found = chosen_servers(urls, local=local) or os.environ.get("HOLDFAST_URL", "").split()
    if not found:
        raise typer.BadParameter("give the URL of a server, e.g. redis://localhost:6379/0")
    each = [found] if isinstance(found, str) else [*found]
    if each != [LOCAL]:
        return each
    with exit_if_unreachable():
        if embedded.is_running():
            return [LOCAL]
    print_stderr(
        f"no embedded server is running (its socket would be {embedded.socket_path()}): start it "
        "with holdfast run --local"
    )
    raise typer.Exit(UNREACHABLE)


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
                    max(TEXT_MIN_WIDTH + wide, console.width),
                    initial_indent=f"  {name:<{wide - 2}}",
                    subsequent_indent=" " * wide,
                )
                console.print(text, soft_wrap=True)


def _print_report(report: Report, skip: Sequence[str], *, strict: bool) -> None:
    console = open_console()
    deployment = report.deployment
    names = {"single": "one server", "quorum": f"a quorum of {len(deployment.nodes)} servers"}
    names |= {"sentinel": f"{deployment.service}, behind Sentinels", "cluster": "a cluster"}
    console.print(f"{names[deployment.kind]}, for locks with a ttl of {deployment.ttl:g} s or more")
    console.print()
    if deployment.nodes:
        console.print(_server_table(report, wide=console.width >= WIDE))
        console.print()
    for finding, nodes in _group_by_server(report.findings):
        _print_finding(console, finding, nodes, alone=len(deployment.nodes) == 1)
    _print_verdict(console, report, skip, strict=strict)


def _server_table(report: Report, *, wide: bool) -> Table:
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
    if node.has_aof is None:
        return "?"
    if node.has_aof:
        return f"log, fsync {node.setting('appendfsync') or '?'}"
    return "snapshots" if node.setting("save") else "nothing"


def _group_by_server(findings: Sequence[Finding]) -> Iterable[tuple[Finding, list[str]]]:
    """Group findings that are the same on several servers."""
    groups: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for each in findings:
        same = (each.level, each.check, each.what, each.why, each.fix)
        groups.setdefault(same, (each, []))[1].append(each.node)
    return groups.values()


def _print_finding(
    console: Console, finding: Finding, nodes: Sequence[str], *, alone: bool
) -> None:
    from rich.text import Text

    where = ", ".join(node for node in nodes if node and not alone)
    place = f"{finding.check}, on {where}" if where else finding.check
    width = max(TEXT_MIN_WIDTH, console.width - LABEL_WIDTH)
    for label, style, words, words_style in (
        (finding.level, STYLES[finding.level], finding.what, "bold"),
        ("", "", place, "dim"),
        ("why", "dim", finding.why, ""),
    ):
        for line in textwrap.wrap(words, width):
            console.print(Text.assemble((f"{label:<{LABEL_WIDTH}}", style), (line, words_style)))
            label = ""  # noqa: PLW2901 - only before the first line
    # Commands are not wrapped, so that they can be copied and pasted.
    fix = [
        piece
        for line in finding.fix.splitlines()
        for piece in (textwrap.wrap(line, width) if line[:1].islower() else [line])
    ]
    for label, line in zip_longest(["fix"], fix, fillvalue=""):
        console.print(
            Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), (line, "green")), soft_wrap=True
        )
    console.print()


def _counts(findings: Iterable[Finding]) -> list[str]:
    levels = [finding.level for finding in findings]
    return [
        f"{levels.count(level)} {level}{'s' * (levels.count(level) > 1 and level != 'unknown')}"
        for level in STYLES
        if level in levels
    ]


def _print_verdict(console: Console, report: Report, skip: Sequence[str], *, strict: bool) -> None:
    from holdfast.doctor.checks import checks_for

    counts = ", ".join(_counts(report.findings)) or "nothing found"
    skipped = [name for name in checks_for(report.deployment) if name in skip]
    skipped_text = f" (skipped: {', '.join(skipped)})" if skipped else ""
    verdicts = {
        0: ("suitable for locks", "green"),
        1: ("fix this before using locks here", "bold red"),
        3: ("not all servers could be examined", "bold red"),
    }
    words, style = verdicts[report.status(strict=strict)]
    checks = f"{len(report.checks)} check{'s' * (len(report.checks) != 1)}{skipped_text}"
    console.print(f"{checks}, {counts}: {words}", style=style, soft_wrap=True)
    if any("CONFIG SET" in finding.fix for finding in report.findings):
        console.print(
            "run CONFIG REWRITE to keep settings of CONFIG SET after a restart", style="dim"
        )
