"""`kvferry doctor`: what is installed, permitted and reachable, and which carrier `auto` picks.

Exit status 0 where everything that must work does: the default needs tcp over loopback, and
whatever `--carriers` and `--peer` name. What is merely missing is said, with what to do about it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.cli import checks, tries
from kvferry.cli.checks import Finding, State
from kvferry.errors import DescriptionError, KvferryError
from kvferry.transport import make_carrier
from kvferry.transport.auto import by_cost, connect, select
from kvferry.transport.base import Carrier

PEER_SECONDS = 10.0
STYLES = {"ok": "green", "missing": "yellow", "broken": "bold red", "info": "dim"}


def doctor(
    peer: str | None,
    secret: str | None,
    carriers: Sequence[str],
    between: tuple[str, str] | None,
    as_json: bool,
) -> int:
    """Look at everything, print it, and say whether what must work does."""
    findings = [
        *checks.installed(),
        *checks.permitted(),
        *tries.tried(carriers),
        *tries.tried_libraries(carriers),
        *checks.configured(carriers),
        checks.costs(),
    ]
    if peer is not None:
        findings += look_at_peer(peer, secret, carriers)
    report = {
        "host": checks.host_facts(),
        "findings": [asdict(f) for f in findings],
    }
    if between is not None:
        findings.append(pick_between(*(_report(path, report) for path in between)))
        report["findings"] = [asdict(f) for f in findings]
    healthy = not any(f.state == "broken" for f in findings)
    if as_json:
        sys.stdout.write(json.dumps({**report, "healthy": healthy}) + "\n")
    else:
        _print(findings, healthy)
    return 0 if healthy else 1


def look_at_peer(address: str, secret: str | None, asked: Sequence[str]) -> Iterator[Finding]:
    """Its directory, our secret, and each of its ranks by each carrier that both have."""
    from kvferry.p2p.caller import Caller
    from kvferry.wire.messages import VERSION, Look, Refused, Seen
    from kvferry.wire.sockets import Sockets

    sockets = Sockets(secret)
    caller = Caller(sockets)
    try:
        call = caller.call(address, Look(VERSION), time.monotonic() + PEER_SECONDS)
        reply = call.result(PEER_SECONDS + 5)
    except KvferryError as error:
        yield Finding(
            "peer",
            address,
            "broken",
            str(error),
            "is it the directory's port, and the same secret?",
        )
        return
    finally:
        caller.close()
        sockets.close()
    if isinstance(reply, Refused):
        yield Finding("peer", address, "broken", reply.message, "run the same kvferry on both")
        return
    if not isinstance(reply, Seen):
        yield Finding("peer", address, "broken", f"answered with a {type(reply).__name__}")
        return
    taken = "our secret is accepted" if secret else "without a secret"
    said = f"engine {reply.engine_id} ({reply.model}), {len(reply.ranks)} ranks; {taken}"
    yield Finding("peer", address, "ok", said)
    if not reply.ranks:
        yield Finding("peer", "ranks", "missing", "its workers are still starting", "try again")
    ours: list[Carrier] = []
    try:
        for chosen in select(asked or ["auto"]):
            try:
                if not chosen.why_not:
                    ours.append(make_carrier(chosen.name, secret=secret))
            except Exception as error:  # also a library of a carrier's that does not load
                state: State = "broken" if chosen.name in asked else "missing"
                yield Finding("peer", chosen.name, state, f"cannot be opened: {error}")
        for rank in reply.ranks:
            who = f"rank ({rank.pp_rank}, {rank.tp_rank})"
            offers = ", ".join(rank.carriers) or "nothing"
            for carrier in ours:
                if carrier.name in rank.carriers:
                    yield _connects(who, carrier, rank.carriers[carrier.name])
            try:
                ordered = by_cost(ours) if list(asked) in ([], ["auto"]) else ours
                found, link = connect(
                    rank.carriers, ordered, time.monotonic() + PEER_SECONDS, f"the doctor's {who}"
                )
                found.disconnect(link)
                yield Finding("peer", f"auto, {who}", "ok", f"{found.name} (it offers {offers})")
            except KvferryError as error:
                yield Finding("peer", f"auto, {who}", "broken", str(error), "see above")
    finally:
        for carrier in ours:
            carrier.close()


def _connects(who: str, carrier: Carrier, endpoint: bytes) -> Finding:
    begin = time.perf_counter()
    try:
        link = carrier.connect(endpoint, time.monotonic() + PEER_SECONDS)
    except KvferryError as error:
        return Finding("peer", f"{carrier.name}, {who}", "missing", str(error))
    took = (time.perf_counter() - begin) * 1e3
    detour = getattr(link, "detour", "")
    carrier.disconnect(link)
    if detour:
        return Finding("peer", f"{carrier.name}, {who}", "missing", f"by tcp only: {detour}")
    return Finding("peer", f"{carrier.name}, {who}", "ok", f"connects in {took:.1f} ms")


def pick_between(here: dict[str, Any], there: dict[str, Any]) -> Finding:
    """What `auto` would choose, from two reports."""
    names = f"{here['host']['name']} and {there['host']['name']}"

    def works(name: str) -> bool:
        return all(
            any(f["name"] == name and f["state"] == "ok" for f in report["findings"])
            for report in (here, there)
        )

    one_host = all(here["host"][k] == there["host"][k] for k in ("boot", "pid_namespace"))
    out = []
    if one_host and works("CUDA"):
        return Finding("between", names, "ok", "cuda for caches on GPUs, else local: one host")
    out.append("cuda: " + ("not one host" if not one_host else "no GPU on both"))
    if one_host and works("process_vm_readv"):
        return Finding("between", names, "ok", f"local: one host, and permitted ({'; '.join(out)})")
    out.append("local: " + ("not permitted" if one_host else "not one host"))
    for name in ("nixl", "mooncake"):
        state = "on both; used when configured" if works(name) else "not installed on both"
        out.append(f"{name}: {state}")
    advice = "" if one_host else "give both engines the same secret, and `host` an address"
    return Finding("between", names, "ok", f"tcp ({'; '.join(out)})", advice)


def _report(path: str, own: dict[str, Any]) -> dict[str, Any]:
    """A report of `kvferry doctor --json`; "here" is the one that is being made."""
    if path == "here":
        return own
    try:
        found = json.loads(Path(path).read_text())
        if not {"name", "boot", "pid_namespace"} <= set(found["host"]):
            raise KeyError("host")
        if not all({"name", "state"} <= set(f) for f in found["findings"]):
            raise KeyError("findings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DescriptionError(
            f"{path} is no report of `kvferry doctor --json` ({error!r}); run that on the other "
            'host and copy its output. "here" stands for this host'
        ) from None
    return dict(found)


def _print(findings: Sequence[Finding], healthy: bool) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "state", "found", "what to do"):
        table.add_column(title, overflow="fold")
    section = ""
    for finding in findings:
        table.add_row(
            finding.section if finding.section != section else "",
            Text(finding.name),
            Text(finding.state, STYLES[finding.state]),
            Text(finding.found),
            Text(finding.advice),
        )
        section = finding.section
    console = Console()
    console.print(table)
    console.print(
        "\nWhat must work does." if healthy else "\nSomething that must work does not.",
        style="green" if healthy else "bold red",
    )
