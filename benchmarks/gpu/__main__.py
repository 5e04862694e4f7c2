# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu [OUT]`: copies, whole plans, staging and checksums on one GPU.

Writes gpu.json and gpu.md to OUT. `scripts/gpu-tests` runs it after the tests that need a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from ctypes import byref, c_int
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu import bench as measure
from benchmarks.gpu import plans
from benchmarks.gpu.bench import TB, Bench
from benchmarks.gpu.owner import start_owner
from benchmarks.gpu.staging import TRANSFERS, staging
from benchmarks.report import Report
from kvferry.carriers.cuda.driver import device, driver
from kvferry.carriers.cuda.kernels import warm
from kvferry.cli.console import Commands, refusals
from kvferry.units import show_bytes

app = Commands()


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Where gpu.json and gpu.md go.")] = Path("out"),
) -> None:
    """What moves between two processes with a GPU, beside its limits."""
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def progress(text: object) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    with refusals():
        result = run(progress)
    about = ("date", "device", "cuda", "peak_tb_s", "nixl")
    report = Report(out / "gpu.json", {name: result[name] for name in about})
    report.say(f"{result['device']}, copy peak {result['peak_tb_s']:.2f} TB/s, read and written")
    for table in (_sizes, _small, _plans, _staging, _checksums):
        table(report, result)
    if result["nixl"] != "yes":
        report.failed("Copies by size", "NIXL", result["nixl"])


def run(progress: Callable[[object], None]) -> dict[str, Any]:
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
    warm(device(0))  # compiling beside what is measured would slow it down
    with start_owner() as owner:
        result["plans"] = []
        for order, tokens in plans.CASES:
            result["plans"].append(plans.measure(owner, order, tokens))
            progress(result["plans"][-1])
        bench = Bench(owner)
        result["device"], result["peak_tb_s"] = bench.on.name, bench.peak / TB
        version = c_int()
        driver().call("cuDriverGetVersion", byref(version))
        result["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
        progress(f"{bench.on.name}, copy peak {bench.peak / TB:.2f} TB/s")
        result["sizes"] = []
        for row in measure.by_size(bench):
            result["sizes"].append(row)
            progress(row)
        result["latency"] = measure.latency(bench)
        result["kernels"] = measure.kernels(bench)
        result["around"] = [measure.around(bench, size) for size in (256, 1 << 10, 16 << 10)]
        result["checksums"] = measure.checksums(bench)
        progress([result[name] for name in ("latency", "kernels", "around", "checksums")])
        result["staging"] = staging(bench)
        progress(result["staging"])
        result["nixl"] = measure.beside_nixl(bench, result["sizes"])
        for carrier, _ in (bench.cuda, bench.copies, bench.tcp):
            carrier.close()
    return result


def _sizes(report: Report, result: dict[str, Any]) -> None:
    peak = result["peak_tb_s"]
    for r in result["sizes"]:
        nixl = r.get("nixl_gb_s")
        report.row(
            "Copies by size; in brackets: of the copy peak",
            r,
            run=show_bytes(r["bytes"]),
            kernel_arrays_TB_s=_of(r["kernel_arrays_tb_s"], peak, ".2f"),
            kernel_strided_TB_s=_of(r["kernel_strided_tb_s"], peak, ".2f"),
            transfer_arrays_GB_s=f"{r['arrays_gb_s']:,.0f}",
            transfer_strided_GB_s=_of(r["strided_gb_s"], 1e3 * peak / 2),
            a_copy_each_GB_s=r["copies_gb_s"],
            NIXL_GB_s=nixl and f"{nixl:.2f}",
            ratio=nixl and f"{r['same_gb_s'] / nixl:,.0f} x",
            right=_yes(r["right"]),
        )


def _small(report: Report, result: dict[str, Any]) -> None:
    """Where the time of short copies goes."""
    for r in result["latency"]:
        report.row(
            "Latency, microseconds",
            run=f"{r['copies']:,} x {show_bytes(r['bytes'])}",
            read_to_the_end_of_wait=r["read_us"],
            kernel=r["kernel_us"],
        )
    for r in result["kernels"]:
        shares = {name: f"{share:.1%}" for name, share in r.items() if name != "bytes"}
        report.row(
            "The kernel by how slots lie (2 GiB in 64 rows; apart: every fourth slot), of the peak",
            r,
            run=show_bytes(r["bytes"]),
            **shares,
        )
    for r in result["around"]:
        times = {name: f"{us:,.0f}" for name, us in r.items() if name != "bytes"}
        report.row(
            "A transfer by the clock, microseconds from the call of `read`",
            r,
            run=show_bytes(int(r["bytes"])),
            **times,
        )


def _plans(report: Report, result: dict[str, Any]) -> None:
    for r in result["plans"]:
        direct, rank, arrays = r["direct"], r["rank"], r.get("arrays")
        report.row(
            "Whole plans, Llama 70B, 80 layers, tp 4 to tp 8, all twelve ranks on this GPU",
            r,
            order_and_length=f"{r['order']}, {r['tokens'] >> 10}k tokens",
            GB=f"{r['gb']:.2f}",
            copies=f"{r['copies']:,} x {show_bytes(r['run_bytes'])}",
            plan_ms_once=f"{r['plan_ms']:.0f}",
            direct_ms=f"{direct['ms']:.2f}",
            GB_s_of_peak=_of(direct["gb_s"], 1e3 * result["peak_tb_s"] / 2),
            bindings_share=f"{direct['bind_share']:.0%}",
            one_rank_alone_ms_binding=f"{rank['ms']:.2f} ({rank['bind_share']:.0%})",
            as_arrays_ms=arrays and f"{arrays['ms']:.0f}",
            right=_yes(r["right"] and r.get("arrays_right", True)),
        )


def _staging(report: Report, result: dict[str, Any]) -> None:
    found = result["staging"]
    out, back = found["pinned_out_gb_s"], found["pinned_in_gb_s"]
    limits = {"pinned copy, out": out, "pinned copy, in": back}
    for n in TRANSFERS:
        limits[f"plain sockets, {4 * n} streams"] = found[f"socket_{n}_gb_s"]
        limits[f"the same, from memory that no cache holds, {4 * n} streams"] = found[
            f"cold_{n}_gb_s"
        ]
    for name, rate in limits.items():
        report.row(f"Staging's limits, {found['cpus']} cores", limit=name, GB_s=rate)
    for r in found["rows"]:
        rates = {n: r[f"tcp_{n}_gb_s"] for n in TRANSFERS}
        of_sockets = {
            f"tcp_{n}_at_a_time": f"{rate:.1f} ({rate / found[f'socket_{n}_gb_s']:.0%}, "
            f"{rate / found[f'cold_{n}_gb_s']:.0%})"
            for n, rate in rates.items()
        }
        report.row(
            "Staging over `tcp`, four streams a transfer, GB/s; in brackets: of its limits",
            r,
            run=show_bytes(r["bytes"]),
            gather=_of(r["gather_gb_s"], out, ".1f"),
            scatter=_of(r["scatter_gb_s"], back, ".1f"),
            **of_sockets,
            best_of_pinned=f"{max(rates.values()) / min(out, back):.0%}",
        )


def _checksums(report: Report, result: dict[str, Any]) -> None:
    for r in result["checksums"]:
        report.row(
            "Checksums of device memory, GB/s: xxh3 on the host, `mix128` by a kernel",
            r,
            run=show_bytes(r["bytes"]),
            xxh3_64_MiB=f"{r['xxh3']:,.0f}",
            mix128_32768_runs=f"{r['mix128 a message']:,.0f}",
            mix128_1_GiB=f"{r['mix128']:,.0f}",
        )


def _of(value: float, limit: float, form: str = ",.0f") -> str:
    return f"{value:{form}} ({value / limit:.0%})"


def _yes(right: bool) -> str:
    return "yes" if right else "NO"


if __name__ == "__main__":
    app()
