# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu [OUT]`: copies, whole plans, staging and checksums on one GPU.

Writes gpu.json and gpu.md to OUT. `scripts/gpu-tests` runs it after the tests that need a GPU.
"""

from __future__ import annotations

import time
from ctypes import byref, c_int
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu import bench as measure
from benchmarks.gpu import plans
from benchmarks.gpu.bench import TB, Bench
from benchmarks.gpu.owner import start_owner
from benchmarks.gpu.staging import staging
from benchmarks.report import Report
from kvferry.carriers.cuda.driver import device, driver
from kvferry.carriers.cuda.kernels import warm
from kvferry.cli.console import Commands, refusals

app = Commands()


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Where gpu.json and gpu.md go.")] = Path("out"),
) -> None:
    """What moves between two processes with a GPU, beside its limits."""
    out.mkdir(parents=True, exist_ok=True)
    with refusals():
        run(Report(out / "gpu.json", {"date": time.strftime("%Y-%m-%d")}))


def run(report: Report) -> None:
    on, version = device(0), c_int()
    warm(on)  # compiling beside what is measured would slow it down
    driver().call("cuDriverGetVersion", byref(version))
    peak = measure.copy_peak(on)
    report.about |= {
        "device": on.name,
        "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "peak_tb_s": peak / TB,
    }
    report.say(f"{on.name}, copy peak {peak / TB:.2f} TB/s, read and written")
    with start_owner() as owner:
        for order, tokens in plans.CASES:
            plans.measure(owner, report, peak, order, tokens)
        bench = Bench(owner, peak)
        measure.by_size(bench, report)
        measure.latency(bench, report)
        measure.checksums(bench, report)
        staging(bench, report)
        measure.beside_nixl(bench, report)
        for carrier, _ in (bench.cuda, bench.copies, bench.tcp):
            carrier.close()


if __name__ == "__main__":
    app()
