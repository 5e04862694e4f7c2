"""Run the cases that have no result yet, and write the table."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from kvferry.errors import KvferryError
from matrix.cases import Case, covering, pairs
from matrix.engines import run_case

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "matrix"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
NOT_RUN = ("bench/", "cli/", "router/", "carriers/cuda")  # by engines without a GPU

console = Console()


def code_digest() -> str:
    """Results count only for the code that made them: all of it that an engine here can run."""
    digest = hashlib.sha256()
    package = ROOT / "src" / "kvferry"
    for path in sorted(package.rglob("*.py")):
        if str(path.relative_to(package)).startswith(NOT_RUN):
            continue
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def read_results(path: Path, digest: str) -> dict[str, dict[str, Any]]:
    """The last result of each case; those of other code are no results."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["name"]: line for line in lines if line["code"] == digest}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__)
    parser.add_argument("--only", metavar="WORD", help="cases whose description has this word")
    parser.add_argument("--limit", type=int, default=0, help="run at most so many cases")
    parser.add_argument("--again", action="store_true", help="also cases that have a result")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    chosen = parser.parse_args(arguments)
    path, digest = OUT / "results.jsonl", code_digest()
    done = {} if chosen.again else read_results(path, digest)
    every = covering([Case(**result["case"]) for result in done.values() if result["ok"]])
    cases = [case for case in every if not chosen.only or chosen.only in case.describe()]
    if chosen.list:
        for case in cases:
            console.print(f"{case.name}  {case.describe()}", highlight=False)
        return 0
    OUT.mkdir(parents=True, exist_ok=True)
    todo = [c for c in cases if not done.get(c.name, {}).get("ok")][: chosen.limit or None]
    console.print(f"{len(cases)} cases, {len(todo)} to run; results in {path.relative_to(ROOT)}")
    for index, case in enumerate(todo, 1):
        console.print(f"[{index}/{len(todo)}] {case.describe()} ...", highlight=False, end=" ")
        done[case.name] = _run(case, digest)
        with path.open("a") as out:
            out.write(json.dumps(done[case.name]) + "\n")
        said = "ok" if done[case.name]["ok"] else f"FAILED: {done[case.name]['error']}"
        console.print(f"{said} ({done[case.name]['seconds']:.0f} s)", highlight=False)
    if not chosen.only:
        write_page(every, done)
    return 0 if all(done.get(case.name, {}).get("ok") for case in cases) else 1


def _run(case: Case, digest: str) -> dict[str, Any]:
    began = time.monotonic()
    result: dict[str, Any] = {"name": case.name, "code": digest, "case": asdict(case)}
    try:
        result["shown"] = run_case(case, OUT)
        result["ok"], result["error"] = True, ""
    except (KvferryError, AssertionError, OSError, TimeoutError) as error:
        result["ok"], result["error"] = False, f"{type(error).__name__}: {error}"[:400]
    result["seconds"] = time.monotonic() - began
    return result


def write_page(cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the table in docs/compatibility.md."""
    head, rest = PAGE.read_text().split(BEGIN, 1)
    PAGE.write_text(f"{head}{BEGIN}\n{table(cases, results)}\n{END}{rest.split(END, 1)[1]}")


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
