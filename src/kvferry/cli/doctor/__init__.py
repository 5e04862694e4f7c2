"""`kvferry doctor`: what is installed, permitted and reachable, and which carrier is chosen.

    checks   installed, permitted: versions, GPUs, RDMA devices, limits, the address of `--host`
    tries    reachable: every carrier moves bytes between two processes of this host
    choice   chosen: the carrier between engines of this host, or of two hosts (`--between`)
    peer     the same for a running engine: each rank, by each carrier that it offers (`--peer`)

The exit status is 0 if everything required works: tcp on this host, and all that `--carriers`,
`--options`, `--host`, `--peer` and `--between` name. Optional parts that are missing are reported
with advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import msgspec

from kvferry.cli.doctor import checks, choice, tries
from kvferry.cli.doctor.checks import Finding, Settings

STYLES = {"ok": "green", "missing": "yellow", "broken": "bold red", "info": "dim"}


def doctor(
    settings: Settings, peer: str | None, between: tuple[str, str] | None, as_json: bool
) -> int:
    """Print a table of findings, or JSON with this host's facts. Returns the exit status."""
    # Imported here, because child processes import this package too.
    from kvferry.cli.console import print_json
    from kvferry.cli.doctor.peer import look_at_peer, require_address

    if peer is not None:
        require_address(peer)
    reports = [choice.load_host(path) for path in between or ()]
    tried = tries.try_host(settings)
    host = choice.Host.here(settings, tried)
    sections = {
        "installed": [*checks.installed()],
        "permitted": [*checks.permitted(settings)],
        "reachable": [*tries.reachable(settings, tried)],
        "chosen": [*choice.for_each_memory(host, host)],
        "peer": [*look_at_peer(peer, settings, host)] if peer else [],
        "between": [*choice.between(*(one or host for one in reports))] if reports else [],
    }
    healthy = all(row.state != "broken" for rows in sections.values() for row in rows)
    if as_json:
        said = [{"section": name} | asdict(row) for name, rows in sections.items() for row in rows]
        print_json({"host": msgspec.to_builtins(host), "findings": said, "healthy": healthy})
    else:
        _print(sections, healthy)
    return 0 if healthy else 1


def _print(sections: Mapping[str, Sequence[Finding]], healthy: bool) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    last = Column("found, and what to do", overflow="fold", ratio=1)
    table = Table("", "what", "state", last, box=None, pad_edge=False)
    for section, rows in sections.items():
        for number, row in enumerate(rows):
            said = Text(row.found).append(f"\n→ {row.advice}" if row.advice else "", "cyan")
            state = Text(row.state, STYLES[row.state])
            table.add_row("" if number else section, Text(row.name, overflow="fold"), state, said)
    verdict = "Everything required works." if healthy else "Something required does not work."
    Console().print(table, Text(f"\n{verdict}", STYLES["ok" if healthy else "broken"]), sep="\n")
