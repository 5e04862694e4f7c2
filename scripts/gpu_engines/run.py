"""Run cells, several at a time, within a total deadline; one line as each ends."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gpu_engines.cells import CELLS, CPU_BLOCKS, Cell, Side
from gpu_engines.checks import Pair, run_checks
from gpu_engines.engine import serve
from gpu_engines.pair import COMMAND, Engine, EngineLost

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "gpu-engines"
CELL_SECONDS = {"cuda": 260.0, "cpu": 900.0}
START_SECONDS = {"cuda": 180.0, "cpu": 400.0}
CALL_SECONDS = {"cuda": 120.0, "cpu": 180.0}
LEAST_SECONDS = 60.0  # a cell that has less left is not begun
MODELS_SECONDS = 240.0
SHARED_MEMORY = Path("/dev/shm")
POOL_BYTES = 256 << 20
LEASE_SECONDS = 30.0  # longer than blocks may take to come back: a lease that runs out is noticed
MAKERS = {"eagle": "make_eagle", "mla-mtp": "make_mtp"}  # of tiny_models; others: make_model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-engines", description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=OUT, help="where results go")
    parser.add_argument("--only", metavar="GLOB", default="*", help="cells of these names")
    parser.add_argument("--jobs", type=int, default=5, help="cells at a time")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all cells")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: a dry run")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument("--engine", type=int, metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.engine is not None:
        return serve(chosen.engine)
    if chosen.models:
        return make_models(chosen.out, chosen.models)
    cells = [cell for cell in CELLS if any(fnmatch(cell.name, g) for g in chosen.only.split(","))]
    if chosen.list:
        for cell in cells:
            print(f"{cell.name:20} {cell.backend:11} {cell.blocks:8} {cell.proves}")
        return 0
    device = chosen.device or ("cuda" if _has_gpu() else "cpu")
    return run_cells(cells, chosen.out.absolute(), device, chosen.jobs, chosen.seconds)


def run_cells(cells: Sequence[Cell], out: Path, device: str, jobs: int, seconds: float) -> int:
    began = time.monotonic()
    deadline = began + seconds
    out.mkdir(parents=True, exist_ok=True)
    todo = [cell for cell in cells if device == "cuda" or cell.cpu is not None]
    _make_models_first(todo, out / "models", deadline)
    print(f"models are there ({time.monotonic() - began:.0f} s); {len(todo)} cells on {device}")
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        tasks = {pool.submit(_run_cell, cell, out, device, deadline): cell for cell in todo}
        for task in as_completed(tasks):
            result = task.result()
            results[tasks[task].name] = result
            _write(out, todo, results, device)
            word = {"pass": "pass", "fail": "FAIL"}.get(result["result"], result["result"])
            print(f"{word:8} {result['cell']:20} {result['seconds']:5.0f} s  {result['reason']}")
    passed = sum(result["result"] == "pass" for result in results.values())
    spent = time.monotonic() - began
    print(f"{passed} of {len(todo)} cells passed in {spent:.0f} s; see {out / 'results.json'}")
    return 0 if passed == len(todo) else 1


def _run_cell(cell: Cell, out: Path, device: str, deadline: float) -> dict[str, Any]:
    began = time.monotonic()
    told: dict[str, Any] = {"cell": cell.name, "proves": cell.proves, "checks": []}
    if deadline - began < LEAST_SECONDS:
        return {**told, "result": "not run", "seconds": 0.0, "reason": "no time was left"}
    changes = dict(cell.cpu or {}) if device == "cpu" else {}
    dtype = "float32" if device == "cpu" and cell.model != "qwen3-next" else cell.dtype
    cell_deadline = min(deadline, began + CELL_SECONDS[device])
    # the store's memory is a file that engines map; shared memory is small in some containers
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 16 * POOL_BYTES
    pool = Path(tempfile.mkdtemp(prefix="kvferry-cell-", dir=SHARED_MEMORY if roomy else None))
    engines: list[Engine] = []
    reason = ""
    try:
        for name, side in (("p", cell.p), ("d", cell.d)):
            options, environment = engine_options(cell, name, side, out, pool, device, changes)
            options["dtype"] = dtype
            log = out / "logs" / f"{cell.name}-{name}.log"
            engines.append(
                Engine(name, log, options, environment, cell_deadline, CALL_SECONDS[device])
            )
        for engine in engines:
            engine.wait_ready(START_SECONDS[device])
            told[engine.name] = engine.told
        told["start_seconds"] = round(time.monotonic() - began, 1)
        pair = Pair(
            engines[0],
            engines[1],
            dtype,
            exact=cell.exact and dtype == "float32",
            tokens=changes.get("tokens", True),
            hits=changes.get("hits", cell.hits),
            pool=changes.get("pool", cell.pool),
            grows=cell.grows,
            samples=changes.get("samples", True),
        )
        for outcome in run_checks(pair):
            told["checks"].append(asdict(outcome))
        told["tolerance"] = pair.tolerance
    except EngineLost as error:
        reason = str(error)
    except Exception as error:  # one cell's trouble is not another's
        reason = f"{type(error).__name__}: {error}"[:400]
        told["trace"] = traceback.format_exc()
    failed = [one for one in told["checks"] if not one["ok"]]
    if failed and not reason:
        reason = "; ".join(f"{one['name']}: {one['said']}" for one in failed)
    if reason:
        told["logs"] = {engine.name: engine.tail() for engine in engines}
    for engine in engines:
        engine.leave()
    for engine in engines:
        engine.stop()
    shutil.rmtree(pool, ignore_errors=True)
    result = "fail" if reason else "pass"
    if reason and time.monotonic() > deadline:
        result, reason = "not run", f"the time was over; {reason}"
    if not reason:
        reason = ", ".join(
            one["name"] + (f" ({one['said']})" if one["said"] else "") for one in told["checks"]
        )
    seconds = round(time.monotonic() - began, 1)
    return {**told, "result": result, "seconds": seconds, "reason": reason}


def engine_options(
    cell: Cell,
    name: str,
    side: Side,
    out: Path,
    pool: Path,
    device: str,
    changes: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments of vLLM's `EngineArgs`, and the environment."""
    gpu = device == "cuda"
    options: dict[str, Any] = {
        "model": str(out / "models" / cell.model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,  # longer prompts come in chunks
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": 128 << 20,
        "seed": 0,
        "kv_transfer_config": {
            "kv_connector": "ProbedConnector",
            "kv_connector_module_path": "gpu_engines.probe",
            # a consumer saves nothing: what it finds in the pool is the other engine's
            "kv_role": "kv_both" if name == "p" else "kv_consumer",
            "engine_id": f"{cell.name}-{name}",
            "kv_connector_extra_config": {
                "lease_seconds": LEASE_SECONDS,
                "load_seconds": 60.0,
                "pool": {"path": str(pool / "store"), "size": POOL_BYTES},
                **cell.connector,
            },
        },
        **cell.options,
    }
    block = side.block if gpu else changes.get("block", CPU_BLOCKS[side.block])
    if block:
        options["block_size"] = block
    if gpu:
        options |= {**side.options, "gpu_memory_utilization": 0.04}
        options["attention_config"] = {"backend": cell.backend}
    else:
        options |= changes.get("options", {})
        if "backend" in changes:
            options["attention_config"] = {"backend": changes["backend"]}
    if cell.draft:
        drafted = {**options["speculative_config"], "model": str(out / "models" / cell.draft)}
        options["speculative_config"] = drafted
    environment = dict(side.environment) if gpu else {}
    if gpu and side.layout:
        environment["VLLM_KV_CACHE_LAYOUT"] = side.layout
    if gpu and cell.dtype == "float32" and cell.exact:
        environment["TRITON_F32_DEFAULT"] = "ieee"  # Triton multiplies fp32 in TF32 otherwise
    return options, environment


def make_models(folder: Path, names: Sequence[str]) -> int:
    """In a process of its own: the harness's threads need neither torch nor transformers."""
    import tiny_models

    for name in names:
        if (folder / name / "done").exists():
            continue
        if name in MAKERS:
            getattr(tiny_models, MAKERS[name])(folder / name)
        else:
            tiny_models.make_model(folder / name, tiny_models.TINY[name])
        (folder / name / "done").touch()
    return 0


def _make_models_first(cells: Sequence[Cell], folder: Path, deadline: float) -> None:
    names = sorted({cell.model for cell in cells} | {cell.draft for cell in cells if cell.draft})
    missing = [name for name in names if not (folder / name / "done").exists()]
    if missing:
        command = [*COMMAND, str(folder), "--models"]
        seconds = min(MODELS_SECONDS, max(1.0, deadline - time.monotonic()))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run([*command, *missing], check=True, timeout=seconds, env=environment)


def _has_gpu() -> bool:
    from kvferry.carriers.cuda.driver import device_count
    from kvferry.errors import TransferError

    try:
        return device_count() > 0
    except TransferError:
        return False


def _write(
    out: Path, cells: Sequence[Cell], results: Mapping[str, Mapping[str, Any]], device: str
) -> None:
    """What is known so far, for machines and for docs/compatibility.md."""
    told = [results.get(c.name, {"cell": c.name, "result": "not run"}) for c in cells]
    document = {"device": device, "cells": told}
    (out / "results.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    lines = ["| cell | backend | blocks | what it shows | result |", "|---|---|---|---|---|"]
    for cell in cells:
        result = results.get(cell.name, {}).get("result", "not run")
        lines.append(
            f"| `{cell.name}` | {cell.backend} | {cell.blocks} | {cell.proves} | {result} |"
        )
    (out / "results.md").write_text("\n".join(lines) + "\n")
