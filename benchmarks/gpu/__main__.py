# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu [OUT]`: copies, whole plans, staging and checksums on one GPU.

Writes gpu.json and gpu.md to OUT. `scripts/gpu-tests` runs it after the tests that need a GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_int
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu import bench as measure
from benchmarks.gpu import plans, report
from benchmarks.gpu.bench import SIZES, TB, Bench
from benchmarks.gpu.owner import start_owner
from benchmarks.gpu.staging import staging
from kvferry.carriers.cuda.driver import device, driver
from kvferry.carriers.cuda.kernels import warm
from kvferry.cli.console import Commands, refusals

app = Commands()


def run(progress: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
    warm(device(0))  # compiling beside what is measured would slow it down
    with start_owner() as owner:
        result["plans"] = []
        for plan in plans.run(owner, quick=quick):
            result["plans"].append(plan)
            progress(str(plan))
        bench = Bench(owner)
        result["device"], result["peak_tb_s"] = bench.on.name, bench.peak / TB
        version = c_int()
        driver().call("cuDriverGetVersion", byref(version))
        result["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
        progress(f"{bench.on.name}, copy peak {bench.peak / TB:.2f} TB/s")
        result["sizes"] = []
        for row in measure.by_size(bench, SIZES[:3] if quick else SIZES):
            result["sizes"].append(row)
            progress(str(row))
        result["latency_us"] = measure.latency(bench)
        progress(str(result["latency_us"]))
        result["kernels"] = measure.kernels(bench)
        result["around"] = [measure.around(bench, size) for size in (256, 1 << 10, 16 << 10)]
        result["checksums"] = measure.checksums(bench)
        progress(str([result[name] for name in ("kernels", "around", "checksums")]))
        result["staging"] = staging(bench)
        progress(str(result["staging"]))
        result["nixl"] = measure.beside_nixl(bench, result["sizes"])
        for carrier, _ in (bench.cuda, bench.copies, bench.tcp):
            carrier.close()
    return result


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Where gpu.json and gpu.md go.")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer plans and sizes.")] = False,
) -> None:
    """What moves between two processes with a GPU, beside its limits."""
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    with refusals():
        result = run(progress, quick=quick)
    (out / "gpu.json").write_text(json.dumps(result, indent=1))
    text = report.markdown(result)
    (out / "gpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    app()
