"""The table in docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matrix.cases import Case, pairs

BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


def table(cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]]) -> str:
    ok = [case for case in cases if results.get(case.name, {}).get("ok")]
    every = set().union(*(pairs(case) for case in cases))
    shown = set().union(*(pairs(case) for case in ok)) if ok else set()
    lines = [
        f"{len(ok)} of {len(cases)} cases passed; {len(shown)} of {len(every)} pairs of values "
        "were shown (`make matrix`).",
        "",
        "| model | prefill → decode | blocks | prefix on D | mode | carrier | style | result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        result = results.get(case.name)
        if result is None:
            said = "not run"
        else:
            said = f"{result['shown']}" if result["ok"] else f"**failed**: {result['error'][:80]}"
        blocks = f"{case.prefill_block or '·'} → {case.decode_block or '·'}"
        lines.append(
            f"| {case.architecture} | {case.prefill} → {case.decode} | {blocks} | {case.prefix} | "
            f"{case.mode} | `{case.carrier}` | {case.style} | {said} |"
        )
    return "\n".join(lines)


def write_page(page: Path, cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace what stands between the two marks."""
    text = page.read_text()
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    page.write_text(f"{head}{BEGIN}\n{table(cases, results)}\n{END}{tail}")
