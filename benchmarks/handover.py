# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.handover`: real engines, prefill to decode, beside vLLM's own connectors.

Each connector has two engines of vLLM's CPU build, with tp 1 and equal blocks, which all connectors
support. All engines are started first. Then the connectors take turns with one prompt each, so that
other programs slow all of them down alike. Engines that wait for their turn are stopped (SIGSTOP),
because some have threads that never rest. Compared for each request:

    first token   from the prefill engine's answer to the decode engine's first streamed token: the
                  load, and one step
    P, D cpu      processor time of all processes of each engine

Compared in separate rounds, in which both engines also decode another request:

    P, D step     the longest time that the connector's calls took of one step of the engine
    gap           the longest time between two tokens of that other request on the decode engine; of
                  all hand-overs, the median

Every answer is compared with the prefill engine's own: a connector that is fast and wrong is shown
as wrong. Planning holds up an engine's steps noticeably only for long prompts on many layers, which
stall.py measures.
"""

from __future__ import annotations

import itertools
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import python_path, require_vllm
from benchmarks.measuring import awake, cpu_seconds, pause
from benchmarks.report import Verdict, at_most, tell
from benchmarks.timed import FILE, Times
from kvferry.cli.console import Commands, Json, err, libraries_to_stderr, refusals
from kvferry.cli.page import TableSheet
from kvferry.errors import KvferryError, TransferError
from tiny_models import llama_config, make_model
from vllm_engines import Engine, free_port, nixl_environment
from vllm_pairs import mooncake_decode, mooncake_prefill, prompt

LAYERS = 8
WARM_UP = 3  # handshake, first plans, first steps
BUSY_ROUNDS = 2
PER_BUSY_ROUND = 3
# Of a noisy machine: medians of alternating requests differ by this much between equal engines.
NOISE = 0.05
LEAST_STALL_MS = 1.0  # what a step does not feel
DECODE_TOKENS = 4
MOST_TOKENS = 1900  # of a request that is decoded meanwhile
BUSY_SECONDS = 0.5
REST_SECONDS = 0.05  # what is left to do on either side belongs to the request
# Of a HandoverResult, by what it is called; and how its samples become one figure.
FIGURES: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "first token": ("first_token_ms", statistics.median),
    "P cpu": ("prefill_cpu_ms", statistics.mean),
    "D cpu": ("decode_cpu_ms", statistics.mean),
    "P step": ("prefill_step_ms", max),
    "D step": ("decode_step_ms", max),
    "gap": ("gap_ms", statistics.median),
}
app = Commands()


@dataclass(frozen=True, slots=True)
class Kind:
    """A connector to compare."""

    name: str
    ours: bool
    transfer: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    transfer_ids: bool = False  # requests name each other by transfer id


KINDS = (
    Kind("kvferry", True, {"kv_connector": "FerryConnector"}),
    Kind("vLLM's NIXL", False, {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}),
    Kind(
        "vLLM's Mooncake",
        False,
        {"kv_connector": "MooncakeConnector"},
        {"mooncake_protocol": "tcp"},
        transfer_ids=True,
    ),
)


@dataclass(frozen=True, slots=True)
class HandoverResult:
    name: str
    ours: bool
    requests: int = 0
    first_token_ms: float = 0.0
    prefill_cpu_ms: float = 0.0
    decode_cpu_ms: float = 0.0
    prefill_step_ms: float = 0.0
    decode_step_ms: float = 0.0
    gap_ms: float = 0.0
    wrong: int = 0
    error: str = ""


@app.command()
def main(
    requests: Annotated[int, typer.Option(help="Measured, for each connector.", min=1)] = 20,
    tokens: Annotated[int, typer.Option(help="Of each prompt.", min=1)] = 1000,
    as_json: Json = False,
) -> None:
    """Prefill to decode between real engines, beside vLLM's own connectors."""
    with refusals(), libraries_to_stderr():
        results = run(requests, tokens, lambda line: err.print(line, style="dim", markup=False))
    broken = [so_far(one) for one in results if one.error]
    told = [asdict(one) for one in results]
    tell(told, as_json, [sheet(results)], (*broken, *verdicts(results)))


def run(requests: int, tokens: int, say: Callable[[str], None]) -> list[HandoverResult]:
    """Compare all connectors in one run."""
    require_vllm("bench-handover")
    # engines are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        model = make_model(Path(folder) / "tiny", llama_config(num_hidden_layers=LAYERS))
        pairs = [make_pair(kind, model, Path(folder)) for kind in KINDS]
        try:
            return _compare(pairs, requests, tokens, say)
        finally:
            for engine in (engine for pair in pairs for engine in pair.engines):
                engine.kill()  # at once: nothing of theirs is wanted any more


def _compare(
    pairs: list[Pair], requests: int, tokens: int, say: Callable[[str], None]
) -> list[HandoverResult]:
    for pair in pairs:
        pair.start()
        say(f"{pair.kind.name}: {_last_line(pair.error) or 'started'}")
    seeds = itertools.count(1)
    for number in range(WARM_UP + requests):
        for pair in pairs:
            pair.attempt(partial(pair.hand_over, prompt(next(seeds), tokens)))
            if number < WARM_UP:
                pair.samples.clear()
    for pair in pairs:
        say(so_far(pair.result()))
    for _ in range(BUSY_ROUNDS):
        for pair in pairs:
            handed = [prompt(next(seeds), tokens) for _ in range(PER_BUSY_ROUND)]
            pair.attempt(partial(pair.hold_up, handed, prompt(next(seeds), 32)))
    return [pair.result() for pair in pairs]


def so_far(result: HandoverResult) -> str:
    """One line of progress, before the rounds with another request; the table has all of it."""
    if result.error:
        return f"{result.name}: did not run: {_last_line(result.error)}"
    wrong = f", {result.wrong} answered wrong" if result.wrong else ""
    return (
        f"{result.name}: {result.requests} hand-overs{wrong}; first token after "
        f"{result.first_token_ms:.1f} ms, processor time {result.prefill_cpu_ms:.1f} ms on P, "
        f"{result.decode_cpu_ms:.1f} ms on D"
    )


def _last_line(text: str) -> str:
    """Of an error, which may come with the end of an engine's log."""
    return text.strip().rpartition("\n")[2]


def verdicts(results: Sequence[HandoverResult]) -> Iterator[Verdict]:
    """Not slower than each of vLLM's connectors, to within what equal engines differ by."""
    ran = [one for one in results if not one.error]
    for ours in (one for one in ran if one.ours):
        for theirs in (one for one in ran if not one.ours):
            for what, (name, _) in FIGURES.items():
                most = getattr(theirs, name) * (1 + NOISE)
                if "step" in what:
                    most = max(most, LEAST_STALL_MS)
                bar = f"{what}, beside {theirs.name}"
                yield at_most(bar, getattr(ours, name), most, "{:.1f} ms")


def sheet(results: Sequence[HandoverResult]) -> TableSheet:
    rows = [
        [one.name, *(f"{getattr(one, name):.1f}" for name, _ in FIGURES.values()), f"{one.wrong}"]
        for one in results
        if not one.error
    ]
    return TableSheet("Hand-over, milliseconds", ["", *FIGURES, "wrong"], rows)


# Two engines with one connector


@dataclass(slots=True)
class Pair:
    kind: Kind
    prefill: Engine
    decode: Engine
    bootstrap: int
    prefill_times: Times
    decode_times: Times
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by field
    wrong: int = 0  # answers that differ from the prefill engine's own
    count: int = 0
    error: str = ""

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def start(self) -> None:
        try:
            for engine in self.engines:
                engine.start()
            for engine in self.engines:
                engine.wait_ready()
            pause(self.engines)
        except KvferryError as error:
            self.error = f"{error}"[-2000:]

    def attempt(self, action: Callable[[], object]) -> None:
        """Let its engines run for this; before and after, they are stopped. A connector that fails
        is out; the others go on."""
        if self.error:
            return
        try:
            with awake(self.engines):
                time.sleep(REST_SECONDS)
                action()
        except (KvferryError, OSError, KeyError) as error:
            self.error = f"{type(error).__name__}: {error}"[-2000:]

    def note(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self.samples[f"{name}_ms"].append(value * 1e3)

    def result(self) -> HandoverResult:
        if self.error:
            return HandoverResult(self.kind.name, self.kind.ours, error=self.error)
        count = len(self.samples["first_token_ms"])
        figures: dict[str, Any] = {
            name: one_of(self.samples[name] or [0.0]) for name, one_of in FIGURES.values()
        }
        return HandoverResult(self.kind.name, self.kind.ours, count, wrong=self.wrong, **figures)

    def hand_over(self, asked: list[int], *, alone: bool = True) -> None:
        """Hand one prompt over. What it takes counts if the engines do nothing else."""
        self.count += 1
        name = f"xfer-{self.kind.name}-{self.count}"
        ticket: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.kind.transfer_ids:
            ticket = mooncake_prefill(name)
        before = [cpu_seconds({engine.pid}) for engine in self.engines]
        told = self.prefill.complete(asked, max_tokens=1, kv_transfer_params=ticket)
        answered = time.perf_counter()
        params = told.get("kv_transfer_params") or {}
        if self.kind.transfer_ids:
            params = mooncake_decode(name, self.bootstrap, self.prefill.name)
        times, tokens = stream(self.decode, asked, DECODE_TOKENS, params)
        time.sleep(REST_SECONDS)
        after = [cpu_seconds({engine.pid}) for engine in self.engines]
        right = self.prefill.complete(asked, max_tokens=DECODE_TOKENS)
        self.wrong += tokens != right["choices"][0]["token_ids"]
        if alone:
            prefill_cpu, decode_cpu = after[0] - before[0], after[1] - before[1]
            first_token = times[0] - answered
            self.note(first_token=first_token, prefill_cpu=prefill_cpu, decode_cpu=decode_cpu)

    def hold_up(self, prompts: list[list[int]], busy: list[int]) -> None:
        """Hand prompts over while both engines decode another request (`busy`), so that no step is
        empty."""
        times: dict[str, list[float]] = {}
        over = threading.Event()

        def decode(engine: Engine) -> None:
            times[engine.name] = stream(engine, busy, MOST_TOKENS, {}, over)[0]

        threads = [threading.Thread(target=decode, args=(engine,)) for engine in self.engines]
        for thread in threads:
            thread.start()
        moments = []
        try:
            time.sleep(BUSY_SECONDS)  # until they decode
            self.prefill_times.clear()
            self.decode_times.clear()
            for asked in prompts:
                begun = time.perf_counter()
                self.hand_over(asked, alone=False)
                moments.append((begun, time.perf_counter()))
            prefill_step, decode_step = self.prefill_times.longest(), self.decode_times.longest()
            if not all(thread.is_alive() for thread in threads):
                raise TransferError("the other request ended before the hand-overs did")
        finally:
            over.set()
            for thread in threads:
                thread.join()
        pairs = list(itertools.pairwise(times[self.decode.name]))
        self.note(prefill_step=prefill_step, decode_step=decode_step)
        for start, end in moments:
            self.note(gap=max(b - a for a, b in pairs if b > start and a < end))


def stream(
    engine: Engine,
    asked: list[int],
    tokens: int,
    params: Mapping[str, Any],
    over: threading.Event | None = None,
) -> tuple[list[float], list[int]]:
    """When each token came, and all of them, until it is `over`."""
    body = {"model": "tiny", "prompt": asked, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    if params:
        body["kv_transfer_params"] = dict(params)
    request = urllib.request.Request(
        f"{engine.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    times: list[float] = []
    found: list[int] = []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                found += json.loads(line[6:])["choices"][0].get("token_ids") or []
            if over is not None and over.is_set():
                break
    if not times:
        raise TransferError(f"engine {engine.name} gave no token:\n{engine.tail()}")
    return times, found


def make_pair(kind: Kind, model: Path, logs: Path) -> Pair:
    """Its engines, not started yet."""
    bootstrap = free_port()
    short = kind.name.replace(" ", "-").replace("'", "")

    def engine(name: str, role: str, port: int) -> Engine:
        made = Engine(f"{name}-{short}", model, logs / f"{name}-{short}.log")
        made.connector = dict(kind.extra)
        made.transfer = {
            **kind.transfer,
            "kv_connector_module_path": f"benchmarks.timed.{'ours' if kind.ours else 'vllm'}",
            # In-tree MooncakeConnector wants roles apart; the others take them as well.
            "kv_role": role if kind.transfer_ids else "kv_both",
        }
        made.environment = {
            **nixl_environment(),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
            "PYTHONPATH": python_path(),
            FILE: str(logs / f"{name}-{short}.times"),
        }
        return made

    prefill = engine("p", "kv_producer", bootstrap)
    decode = engine("d", "kv_consumer", free_port())
    times = [Times(Path(one.environment[FILE])) for one in (prefill, decode)]
    return Pair(kind, prefill, decode, bootstrap, times[0], times[1])


if __name__ == "__main__":
    app()
