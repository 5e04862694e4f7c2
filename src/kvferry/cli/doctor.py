"""`kvferry doctor`: what is installed, permitted and reachable, and which carrier `auto` picks.

    checks, tries   this host: what is there, and what moves bytes when it is tried
    between         what engines of this host would use, or those of two hosts, by their reports
    peers           a running engine: what it offers, and what of that reaches it from here

Exit status 0 where everything that must work does: the default needs tcp over loopback, and
whatever `--carriers`, `--options`, `--peer` and `--between` name. What is merely missing is said,
with what to do about it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.cli import checks, tries, tries_gpu
from kvferry.cli.asked import Asked
from kvferry.cli.between import Host, load_host, pick_between, picked_here
from kvferry.cli.checks import Finding
from kvferry.cli.peers import look_at_peer
from kvferry.wire.messages import VERSION

STYLES = {"ok": "green", "missing": "yellow", "broken": "bold red", "info": "dim"}


def doctor(
    asked: Asked,
    peer: str | None = None,
    between: tuple[str, str] | None = None,
    as_json: bool = False,
) -> int:
    """Look at everything, print it, and say whether what must work does."""
    libraries: dict[str, dict[str, str]] = {}
    findings = [
        *checks.installed(),
        *checks.permitted(),
        *tries.tried(asked),
        *tries.tried_libraries(asked, libraries),
        *tries_gpu.tried(asked),
        *checks.configured(asked),
    ]
    report: dict[str, Any] = {
        "host": {
            **checks.host_facts(),
            "protocol": VERSION,
            "carriers": list(asked.carriers),
            "libraries": {name: libraries.get(name, {}) for name in asked.named},
        },
        "findings": [asdict(f) for f in findings],
    }
    findings += picked_here(Host.of(report, "here"), checks.rdma_devices())
    if peer is not None:
        findings += look_at_peer(peer, asked)
    if between is not None:
        findings += pick_between(*(load_host(path, report) for path in between))
    report["findings"] = [asdict(f) for f in findings]
    healthy = not any(f.state == "broken" for f in findings)
    if as_json:
        sys.stdout.write(json.dumps({**report, "healthy": healthy}) + "\n")
    else:
        _print(findings, healthy)
    return 0 if healthy else 1


def _print(findings: Sequence[Finding], healthy: bool) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "state"):
        table.add_column(title, overflow="fold")
    table.add_column("found, and what to do", overflow="fold", ratio=1)
    section = ""
    for finding in findings:
        said = Text(finding.found)
        if finding.advice:
            said.append(f"\n→ {finding.advice}", "cyan")
        table.add_row(
            finding.section if finding.section != section else "",
            Text(finding.name),
            Text(finding.state, STYLES[finding.state]),
            said,
        )
        section = finding.section
    console = Console()
    console.print(table)
    console.print(
        "\nWhat must work does." if healthy else "\nSomething that must work does not.",
        style="green" if healthy else "bold red",
    )
