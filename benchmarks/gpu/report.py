# SPDX-License-Identifier: Apache-2.0
"""The result of `python -m benchmarks.gpu` as a section of a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def size(count: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count // unit} {name}"
    return f"{count} B"


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def number(value: float | None, form: str = "{:,.0f}") -> str:
    return "-" if value is None else form.format(value)


def markdown(result: dict[str, Any]) -> str:
    return "\n".join(_lines(result))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    peak = result["peak_tb_s"]
    yield "## GPU"
    yield ""
    yield (
        f"`scripts/gpu-tests`: two processes, one {result['device']}, CUDA {result['cuda']}, "
        f"{result['staging']['cpus']} cores, {result['date']}. Copy peak {peak:.2f} TB/s, bytes "
        "read plus bytes written."
    )
    yield ""
    yield from _sizes(result, peak)
    yield from _latency(result)
    yield from _parts(result)
    yield from _plans(result, peak)
    yield from _staging(result)
    yield from _checksums(result)


def _sizes(result: dict[str, Any], peak: float) -> Iterator[str]:
    rows = []
    for r in result["sizes"]:
        nixl = r.get("nixl_gb_s")
        rows.append(
            [
                size(r["bytes"]),
                f"{r['kernel_arrays_tb_s']:.2f} ({r['kernel_arrays_tb_s'] / peak:.0%})",
                f"{r['kernel_strided_tb_s']:.2f} ({r['kernel_strided_tb_s'] / peak:.0%})",
                number(r["arrays_gb_s"]),
                f"{r['strided_gb_s']:,.0f} ({2 * r['strided_gb_s'] / 1e3 / peak:.0%})",
                number(r["copies_gb_s"], "{:,.1f}"),
                number(nixl, "{:,.2f}"),
                f"{r['same_gb_s'] / nixl:,.0f} x" if nixl else "-",
                "yes" if r["right"] else "NO",
            ]
        )
    yield from table(
        [
            "run",
            "kernel, arrays TB/s (of peak)",
            "kernel, strided",
            "transfer, arrays GB/s",
            "transfer, strided (of peak)",
            "a copy each GB/s",
            "NIXL GB/s",
            "ratio",
            "right",
        ],
        rows,
    )
    if result["nixl"] != "yes":
        yield f"NIXL was not measured: {result['nixl']}."
        yield ""


def _latency(result: dict[str, Any]) -> Iterator[str]:
    told = ", ".join(f"{what}: {us:.1f}" for what, us in result["latency_us"].items())
    yield f"Latency, microseconds (`read` to the end of `wait`; *kernel*: on the device): {told}."
    yield ""


def _parts(result: dict[str, Any]) -> Iterator[str]:
    names = [name for name in result["kernels"][0] if name != "bytes"]
    yield "The kernel by how slots lie (2 GiB in 64 rows; *apart*: every fourth slot), of the peak:"
    yield ""
    rows = [[size(r["bytes"]), *(f"{r[n]:.1%}" for n in names)] for r in result["kernels"]]
    yield from table(["run", *names], rows)
    yield "A transfer by the clock, microseconds from the call of `read`:"
    yield ""
    names = [name for name in result["around"][0] if name != "bytes"]
    rows = [[size(r["bytes"]), *(f"{r[n]:,.0f}" for n in names)] for r in result["around"]]
    yield from table(["run", *names[:-1], "kernel alone"], rows)


def _checksums(result: dict[str, Any]) -> Iterator[str]:
    yield "Checksums of device memory, GB/s: xxh3 on the host, `mix128` by a kernel."
    yield ""
    names = ("xxh3", "mix128 a message", "mix128")
    rows = [[size(r["bytes"]), *(f"{r[n]:,.0f}" for n in names)] for r in result["checksums"]]
    yield from table(["run", "xxh3, 64 MiB", "mix128, 32,768 runs", "mix128, 1 GiB"], rows)


def _plans(result: dict[str, Any], peak: float) -> Iterator[str]:
    rows = []
    for r in result["plans"]:
        direct, arrays = r["direct"], r.get("arrays")
        rows.append(
            [
                f"{r['order']}, {r['tokens'] >> 10}k tokens",
                f"{r['gb']:.2f}",
                f"{r['copies']:,} x {size(r['run_bytes'])}",
                f"{r['plan_ms']:.0f}",
                f"{direct['ms']:.2f}",
                f"{direct['gb_s']:,.0f} ({2 * direct['gb_s'] / 1e3 / peak:.0%})",
                f"{direct['bind_share']:.0%}",
                f"{r['rank']['ms']:.2f} ({r['rank']['bind_share']:.0%})",
                f"{arrays['ms']:.0f}" if arrays else "-",
                "yes" if r["right"] else "NO",
            ]
        )
    yield "Whole plans, Llama 70B, 80 layers, tp 4 to tp 8, all twelve ranks on this GPU:"
    yield ""
    yield from table(
        [
            "order and length",
            "GB",
            "copies",
            "plan ms (once)",
            "direct ms",
            "GB/s (of peak)",
            "binding's share",
            "one rank alone ms (binding)",
            "as arrays ms",
            "right",
        ],
        rows,
    )


def _staging(result: dict[str, Any]) -> Iterator[str]:
    found = result["staging"]
    yield (
        f"Staging over `tcp` on loopback, four streams a transfer. Limits in the same run: pinned "
        f"copy {found['pinned_out_gb_s']:.1f} GB/s out, {found['pinned_in_gb_s']:.1f} in; plain "
        "sockets, with rings of buffers as staging has them, "
        + ", ".join(f"{4 * n} streams {found[f'socket_{n}_gb_s']:.1f}" for n in (1, 2, 4))
        + "; from memory that no cache holds "
        + ", ".join(f"{found[f'cold_{n}_gb_s']:.1f}" for n in (1, 2, 4))
        + " GB/s. In brackets: of both kinds of sockets with as many streams."
    )
    yield ""
    limit = min(found["pinned_out_gb_s"], found["pinned_in_gb_s"])
    rows = []
    for r in found["rows"]:
        rates = {n: r[f"tcp_{n}_gb_s"] for n in (1, 2, 4)}
        rows.append(
            [
                size(r["bytes"]),
                f"{r['gather_gb_s']:.1f} ({r['gather_gb_s'] / found['pinned_out_gb_s']:.0%})",
                f"{r['scatter_gb_s']:.1f} ({r['scatter_gb_s'] / found['pinned_in_gb_s']:.0%})",
                *(
                    f"{v:.1f} ({v / found[f'socket_{n}_gb_s']:.0%}, "
                    f"{v / found[f'cold_{n}_gb_s']:.0%})"
                    for n, v in rates.items()
                ),
                f"{max(rates.values()) / limit:.0%}",
            ]
        )
    yield from table(
        [
            "run",
            "gather GB/s (of pinned)",
            "scatter (of pinned)",
            "tcp, 1 transfer",
            "2",
            "4",
            "best of pinned",
        ],
        rows,
    )
