# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.handover`: real engines, prefill to decode, beside vLLM's own connectors.

For each connector, two engines of vLLM's CPU build (tp 1, equal blocks, which all of them take).
All are started first; then they hand prompts over one after another, taking turns, so that what the
machine does besides hits all alike; those whose turn it is not are stopped (SIGSTOP), because some
have threads that never rest. Compared per request:

    first token   from the prefill engine's answer to the decode engine's first streamed token: the
                  load, and one step
    P, D cpu      processor time of all processes of each engine

and, in rounds of their own in which both engines also decode another request, of all rounds

    P, D step     the longest that the connector's calls kept one step of the engine
    gap           the longest between two tokens of that other request on the decode engine; of all
                  hand-overs, the median

Every answer is compared with the prefill engine's own: a connector that is fast and wrong is shown
as wrong. An engine whose steps are held up by planning needs a long prompt on many layers to show
it: see stall.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import python_path, require_vllm
from benchmarks.timed import FILE, Times
from kvferry.cli.console import Commands, Json, err, libraries_to_stderr, print_json, refusals
from kvferry.errors import DescriptionError, KvferryError, TransferError
from tiny_models import llama_config, make_model
from vllm_engines import Engine, free_port

LAYERS = 8
WARM_UP = 3  # handshake, first plans, first steps
BUSY_ROUNDS = 2
PER_BUSY_ROUND = 3
# Of a noisy machine: medians of alternating requests differ by this much between equal engines.
NOISE = 0.05
LEAST_STALL_MS = 1.0  # what a step does not feel
COLUMNS = ("first token", "P cpu", "D cpu", "P step", "D step", "gap", "wrong")
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
DECODE_TOKENS = 4
MOST_TOKENS = 1900  # of a request that is decoded meanwhile
BUSY_SECONDS = 0.5
REST_SECONDS = 0.05  # what is left to do on either side belongs to the request
OURS = {"kv_connector_module_path": "benchmarks.timed.ours"}
THEIRS = {"kv_connector_module_path": "benchmarks.timed.vllm"}
app = Commands()


@dataclass(frozen=True, slots=True)
class Kind:
    """A connector to compare."""

    name: str
    ours: bool
    transfer: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    transfer_ids: bool = False  # requests name each other by transfer id
    environment: Mapping[str, str] = field(default_factory=dict)


KINDS = (
    Kind("kvferry", True, {"kv_connector": "FerryConnector", **OURS}),
    Kind(
        "vLLM's NIXL",
        False,
        {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", **THEIRS},
        environment={"UCX_NET_DEVICES": "lo"},
    ),
    Kind(
        "vLLM's Mooncake",
        False,
        {"kv_connector": "MooncakeConnector", **THEIRS},
        {"mooncake_protocol": "tcp"},
        True,
    ),
    Kind("kvferry for NIXL", True, {"kv_connector": "NixlConnector", **OURS}),
    Kind("kvferry for Mooncake", True, {"kv_connector": "MooncakeConnector", **OURS}, {}, True),
)
USUAL = ("kvferry", "vLLM's NIXL", "vLLM's Mooncake")


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is compared with one of vLLM's connectors, and how it came out."""

    what: str
    ours_ms: float
    theirs: str
    theirs_ms: float
    limit: float  # of ours / theirs

    floor_ms: float = 0.0  # below it, all are alike

    @property
    def met(self) -> bool:
        return self.ours_ms <= max(self.theirs_ms * self.limit, self.floor_ms)


@app.command()
def main(
    requests: Annotated[int, typer.Option(help="Measured, for each connector.", min=1)] = 20,
    tokens: Annotated[int, typer.Option(help="Of each prompt.", min=1)] = 1000,
    only: Annotated[list[str] | None, typer.Option(help="Names of connectors.")] = None,
    as_json: Json = False,
) -> None:
    """Prefill to decode between real engines, beside vLLM's own connectors."""
    with refusals(), libraries_to_stderr():
        results = run(
            requests, tokens, only or (), lambda line: err.print(line, style="dim", markup=False)
        )
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        print_handover(results)


def run(
    requests: int = 20,
    tokens: int = 1000,
    kinds: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> list[HandoverResult]:
    """Compare connectors, all in one run."""
    names = [kind.name for kind in KINDS]
    if unknown := set(kinds) - set(names):
        raise DescriptionError(f"no connectors {sorted(unknown)}; there are {names}")
    require_vllm("bench-handover")
    # engines are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        model = make_model(Path(folder) / "tiny", llama_config(num_hidden_layers=LAYERS))
        pairs = [
            make_pair(kind, model, Path(folder)) for kind in KINDS if kind.name in (kinds or USUAL)
        ]
        try:
            return _compare([_Runner(pair.kind, pair) for pair in pairs], requests, tokens, tell)
        finally:
            for engine in (engine for pair in pairs for engine in pair.engines):
                engine.kill()  # at once: nothing of theirs is wanted any more


def _compare(
    runners: list[_Runner], requests: int, tokens: int, tell: Callable[[str], None]
) -> list[HandoverResult]:
    for runner in runners:
        runner.start()
        tell(f"{runner.kind.name}: {_last_line(runner.error) or 'started'}")
    seeds = iter(range(1, 1_000_000))
    for number in range(WARM_UP + requests):
        for runner in runners:
            runner.measure(_prompt(next(seeds), tokens))
            if number < WARM_UP:
                runner.costs.clear()
    for runner in runners:
        tell(so_far(runner.result()))
    for _ in range(BUSY_ROUNDS):
        for runner in runners:
            prompts = [_prompt(next(seeds), tokens) for _ in range(PER_BUSY_ROUND)]
            runner.stall(prompts, _prompt(next(seeds), 32))
    return [runner.result() for runner in runners]


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


def verdicts(results: Sequence[HandoverResult]) -> list[Verdict]:
    """Every target, for the first of ours beside each of vLLM's."""
    ours = next((one for one in results if one.ours and not one.error), None)
    if ours is None:
        return []
    return [
        Verdict(
            what,
            getattr(ours, name),
            theirs.name,
            getattr(theirs, name),
            1 + NOISE,
            LEAST_STALL_MS if "step" in name else 0.0,
        )
        for theirs in results
        if not theirs.ours and not theirs.error
        for what, name in (
            ("first token", "first_token_ms"),
            ("processor time on P", "prefill_cpu_ms"),
            ("processor time on D", "decode_cpu_ms"),
            ("longest step on P", "prefill_step_ms"),
            ("longest step on D", "decode_step_ms"),
            ("longest gap between tokens on D", "gap_ms"),
        )
    ]


def print_handover(results: Sequence[HandoverResult]) -> None:
    print(f"{'milliseconds':22}" + "".join(f"{title:>12}" for title in COLUMNS))
    for one in results:
        if one.error:
            print(f"{one.name:22}did not run: {one.error.splitlines()[-1]}")
            continue
        figures = (
            one.first_token_ms,
            one.prefill_cpu_ms,
            one.decode_cpu_ms,
            one.prefill_step_ms,
            one.decode_step_ms,
            one.gap_ms,
        )
        print(f"{one.name:22}" + "".join(f"{x:12.1f}" for x in figures) + f"{one.wrong:12}")
    print(
        f"\nnot slower (to within {NOISE:.0%}, what equal engines differ by; steps below "
        f"{LEAST_STALL_MS:.0f} ms are alike):"
    )
    for target in verdicts(results):
        print(
            f"  {'yes' if target.met else 'NO':4}{target.what}: {target.ours_ms:.1f} ms, "
            f"{target.theirs} {target.theirs_ms:.1f} ms"
        )


def _prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + i * (37 + seed % 400)) % 500 + 3 for i in range(tokens)]


@dataclass(slots=True)
class _Runner:
    kind: Kind
    pair: Pair | None
    costs: list[Cost] = field(default_factory=list)
    stalls: list[Stalls] = field(default_factory=list)
    error: str = ""

    def start(self) -> None:
        assert self.pair is not None
        try:
            for engine in self.pair.engines:
                engine.start()
            for engine in self.pair.engines:
                engine.wait_ready()
            self.pair.signal(signal.SIGSTOP)
        except KvferryError as error:
            self.error = f"{error}"[-2000:]
            self.pair = None

    def attempt(self, action: Callable[[Pair], object]) -> None:
        """A connector that fails is out; the others go on."""
        if self.pair is None:
            return
        try:
            with self.pair.awake():
                action(self.pair)
        except (KvferryError, OSError, KeyError) as error:
            self.error = f"{type(error).__name__}: {error}"[-2000:]
            self.pair = None

    def measure(self, prompt: list[int]) -> None:
        self.attempt(lambda pair: self.costs.append(pair.hand_over(prompt)))

    def stall(self, prompts: list[list[int]], busy: list[int]) -> None:
        self.attempt(lambda pair: self.stalls.append(pair.stalls(prompts, busy)))

    def result(self) -> HandoverResult:
        if self.pair is None:
            return HandoverResult(self.kind.name, self.kind.ours, error=self.error)
        gaps = [gap for one in self.stalls for gap in one.gaps]
        return HandoverResult(
            self.kind.name,
            self.kind.ours,
            len(self.costs),
            statistics.median(cost.first_token_seconds for cost in self.costs) * 1e3,
            statistics.mean(cost.prefill_cpu_seconds for cost in self.costs) * 1e3,
            statistics.mean(cost.decode_cpu_seconds for cost in self.costs) * 1e3,
            max((one.prefill_step for one in self.stalls), default=0.0) * 1e3,
            max((one.decode_step for one in self.stalls), default=0.0) * 1e3,
            statistics.median(gaps) * 1e3 if gaps else 0.0,
            self.pair.wrong,
        )


# Two engines with one connector


@dataclass(slots=True)
class Cost:
    """What one hand-over took."""

    first_token_seconds: float
    prefill_cpu_seconds: float
    decode_cpu_seconds: float


@dataclass(slots=True)
class Stalls:
    """Seconds that hand-overs held up another request."""

    prefill_step: float  # the connector's longest in one step
    decode_step: float
    gaps: list[float]  # for each hand-over, the longest between two tokens on the decode engine


@dataclass(slots=True)
class Pair:
    kind: Kind
    prefill: Engine
    decode: Engine
    bootstrap: int
    prefill_times: Times
    decode_times: Times
    wrong: int = 0  # answers that differ from the prefill engine's own
    count: int = 0

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Its engines run; before and after they are stopped, for some never rest."""
        self.signal(signal.SIGCONT)
        time.sleep(REST_SECONDS)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        for engine in self.engines:
            os.killpg(engine.pid, number)

    def hand_over(self, prompt: list[int]) -> Cost:
        self.count += 1
        name = f"xfer-{self.kind.name}-{self.count}"
        asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.kind.transfer_ids:
            asked["transfer_id"] = name
        before = cpu_seconds(self.prefill.pid), cpu_seconds(self.decode.pid)
        told = self.prefill.complete(prompt, max_tokens=1, kv_transfer_params=asked)
        answered = time.perf_counter()
        params = told.get("kv_transfer_params") or {}
        if self.kind.transfer_ids:
            params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name}
            params["remote_engine_id"] = self.prefill.name
            params["remote_bootstrap_addr"] = f"http://127.0.0.1:{self.bootstrap}"
        times, tokens = stream(self.decode, prompt, DECODE_TOKENS, params)
        time.sleep(REST_SECONDS)
        after = cpu_seconds(self.prefill.pid), cpu_seconds(self.decode.pid)
        alone = self.prefill.complete(prompt, max_tokens=DECODE_TOKENS)
        self.wrong += tokens != alone["choices"][0]["token_ids"]
        return Cost(times[0] - answered, after[0] - before[0], after[1] - before[1])

    def stalls(self, prompts: list[list[int]], busy: list[int]) -> Stalls:
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
            for prompt in prompts:
                begun = time.perf_counter()
                self.hand_over(prompt)
                moments.append((begun, time.perf_counter()))
            steps = self.prefill_times.read()[0], self.decode_times.read()[0]
            if not all(thread.is_alive() for thread in threads):
                raise TransferError("the other request ended before the hand-overs did")
        finally:
            over.set()
            for thread in threads:
                thread.join()
        pairs = list(itertools.pairwise(times[self.decode.name]))
        gaps = [max(b - a for a, b in pairs if b > start and a < end) for start, end in moments]
        return Stalls(*steps, gaps)


def stream(
    engine: Engine,
    prompt: list[int],
    tokens: int,
    params: Mapping[str, Any],
    over: threading.Event | None = None,
) -> tuple[list[float], list[int]]:
    """When each token came, and all of them, until it is `over`."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
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


def cpu_seconds(group: int) -> float:
    """Processor time that an engine's processes have used, all of them."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_SECONDS


def make_pair(kind: Kind, model: Path, logs: Path) -> Pair:
    """Its engines, not started yet."""
    bootstrap = free_port()
    short = kind.name.replace(" ", "-").replace("'", "")

    def engine(name: str, role: str, port: int) -> Engine:
        made = Engine(f"{name}-{short}", model, logs / f"{name}-{short}.log")
        made.connector = dict(kind.extra)
        made.transfer = {**kind.transfer, "kv_role": role}
        made.environment = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
            "PYTHONPATH": python_path(),
            FILE: str(logs / f"{name}-{short}.times"),
            **kind.environment,
        }
        return made

    # In-tree MooncakeConnector wants roles apart; the others take them as well.
    prefill = engine("p", "kv_producer" if kind.transfer_ids else "kv_both", bootstrap)
    decode = engine("d", "kv_consumer" if kind.transfer_ids else "kv_both", free_port())
    times = [Times(Path(one.environment[FILE])) for one in (prefill, decode)]
    return Pair(kind, prefill, decode, bootstrap, times[0], times[1])


if __name__ == "__main__":
    app()
