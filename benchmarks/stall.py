# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.stall`: how long a hand-over can hold up an engine's step.

An engine asks its connector on every step what has finished. That question is asked here in a
loop, a millisecond apart, while one long scattered request is handed over in the same process: 80
layers x 8,192 blocks, P tp 4 to D tp 8, 655,360 descriptors. The longest round beyond that
millisecond is the stall: a slow answer, or other threads that do not let the loop run.

    kvferry   a real producer and consumer, bytes moved by `tcp`; the median of several hand-overs,
              because on a busy machine the system alone may stop a loop longer
    vllm      `MooncakeConnectorWorker.get_finished` while its sender loop plans the same request;
              planning alone, nothing is moved
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import make_command, vllm_installed
from benchmarks.plan import VllmSide, prepare_vllm_worker
from benchmarks.report import at_least, tell
from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.host import HostMemory
from kvferry.cli.console import Commands, Json, libraries_to_stderr, refusals
from kvferry.errors import TransferError
from kvferry.handover.consumer import ConsumerRank
from kvferry.handover.describe import engine_info, rank_info
from kvferry.handover.holds import HoldOrder
from kvferry.handover.load import Load
from kvferry.handover.producer import Directory, ProducerRank
from kvferry.handover.ticket import Ticket
from kvferry.layout.model import CacheModel, Component, Group
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.net.rpc import Sockets

LAYERS, HEADS, BLOCK = 80, 8, 16
STEP_SECONDS = 0.001  # between two questions
LOAD_SECONDS = 120.0
TARGET_RATIO = 100  # vLLM's stall to ours
ROUNDS = 5  # hand-overs, of which the median counts
app = Commands()


@dataclass(frozen=True, slots=True)
class StallResult:
    blocks: int
    descriptors: int
    kvferry_ms: float  # the longest stall
    kvferry_seconds: float  # the whole hand-over
    vllm_ms: float | None
    ratio: float | None


@app.command()
def main(
    blocks: Annotated[int, typer.Option(help="Blocks of the request.", min=1)] = 8192,
    as_json: Json = False,
) -> None:
    """The longest that a hand-over holds up an engine's step, beside vLLM's MooncakeConnector."""
    with refusals(), libraries_to_stderr():
        result = run(blocks)
    lines: list[object] = [
        f"{result.descriptors:,} descriptors, handed over in {result.kvferry_seconds:.2f} s",
        f"longest stall of a step: {result.kvferry_ms:.2f} ms",
    ]
    if result.vllm_ms is not None and result.ratio is not None:
        bar = f"vLLM's MooncakeConnector, {result.vllm_ms:.0f} ms"
        lines.append(at_least(bar, result.ratio, TARGET_RATIO, "{:.0f} x as long"))
    else:
        how = make_command("bench-stall")
        lines.append(f"vLLM is not installed here, nothing to compare with: {how}")
    tell(asdict(result), as_json, [], lines)


def run(blocks: int = 8192) -> StallResult:
    src, dst = EngineShape(tp=4, block_size=BLOCK), EngineShape(tp=8, block_size=BLOCK)
    components = tuple(Component(name, HEADS, (2,), 1) for name in "kv")  # small, so that it fits
    model = CacheModel("stall", (Group("attention", tuple(range(LAYERS)), components),))
    rng = np.random.default_rng(0)
    ids = [1 + rng.permutation(2 * blocks - 1)[:blocks] for _ in range(2)]
    ours, theirs = [], []
    for _ in range(ROUNDS):  # in turns: the machine's speed changes
        ours.append(_ours(model, src, dst, ids, blocks))
        if vllm_installed():
            theirs.append(_theirs(ids, blocks))
    kvferry_ms, seconds, descriptors = sorted(ours)[ROUNDS // 2]
    vllm_ms = median(theirs) if theirs else None
    ratio = vllm_ms / kvferry_ms if vllm_ms is not None else None
    return StallResult(blocks, descriptors, kvferry_ms, seconds, vllm_ms, ratio)


def longest(question: Callable[[], object], over: Callable[[], bool]) -> float:
    """Milliseconds of the longest round beyond its pause, until it is over."""
    worst = 0.0
    deadline = time.monotonic() + LOAD_SECONDS
    while not over():
        if time.monotonic() > deadline:
            raise TransferError(f"the hand-over did not end within {LOAD_SECONDS:.0f} s")
        start = time.perf_counter()
        question()
        time.sleep(STEP_SECONDS)
        worst = max(worst, time.perf_counter() - start - STEP_SECONDS)
    return worst * 1e3


def _ours(
    model: CacheModel, src: EngineShape, dst: EngineShape, ids: list[Any], blocks: int
) -> tuple[float, float, int]:
    """All ranks of the producer that the first consumer rank speaks to, in this process."""
    sockets = Sockets()
    told = engine_info("p", "1", model, src, {})
    directory = Directory(sockets, told)
    memory, producers, carriers, ranks = [], [], [], []
    for rank in src.ranks:
        layout = RankLayout.build(model, src, rank, 2 * blocks)
        held = np.zeros(layout.total_bytes if rank == Rank(0, 0) else 1, dtype=np.uint8)
        carrier = make_carrier("tcp")
        carrier.register([MemoryRegion(held.ctypes.data, held.nbytes)])
        producer = ProducerRank(sockets, "1")
        producer.start()
        producer.open_hold(HoldOrder("h", "r", "d", blocks * BLOCK, [ids[0].tolist()]))
        address = f"127.0.0.1:{producer.port}"
        endpoints = {"tcp": carrier.endpoint()}
        ranks.append(rank_info(layout, [held.ctypes.data], address, "1", endpoints))
        memory.append(held)
        producers.append(producer)
        carriers.append(carrier)
    directory.start()
    directory.set_engine(told, ranks)
    layout = RankLayout.build(model, dst, Rank(0, 0), 2 * blocks)
    landing = np.zeros(layout.total_bytes, dtype=np.uint8)
    region = MemoryRegion(landing.ctypes.data, landing.nbytes)
    reader = make_carrier("tcp")
    reader.register([region])
    consumer = ConsumerRank(
        sockets,
        engine_info("d", "1", model, dst, {}),
        model,
        layout,
        [region.address],
        [reader],
        zero=HostMemory([region]).zero,
    )
    ticket = Ticket("p", "1", "h", "d", blocks * BLOCK, "127.0.0.1", directory.port, "r")
    done: list[Any] = []

    def question() -> None:
        done.extend(consumer.take_done())
        for producer in producers:
            producer.take_closed()

    began = time.perf_counter()
    consumer.start(Load("r", ticket, (tuple(ids[1].tolist()),), 0, LOAD_SECONDS))
    try:
        stall = longest(question, lambda: bool(done))
    finally:
        for part in (consumer, directory, *producers, reader, *carriers, sockets):
            part.close()  # type: ignore[attr-defined]
    if not done[0].ok:
        raise TransferError(f"the hand-over failed: {done[0].error}")
    return stall, time.perf_counter() - began, done[0].descriptors


def _theirs(ids: list[Any], blocks: int) -> float:
    """The in-tree worker's own `get_finished`, beside its own planner on its own event loop."""
    page = BLOCK * 4 * 2  # two heads
    bases = [tuple(range(1 << 40, (1 << 40) + LAYERS * page * 2 * blocks, page * 2 * blocks))] * 2
    src = VllmSide(0, 4, page, bases[0])
    dst = VllmSide(0, 8, page // 2, bases[1])
    worker, plan = prepare_vllm_worker(src, dst, HEADS, ids[0].tolist(), ids[1].tolist())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    worker.__dict__.update(
        is_kv_producer=True,
        is_kv_consumer=False,
        sender_loop=loop,
        finished_sending_reqs=set(),
        reqs_need_send={},
        xfer_stats=SimpleNamespace(),
    )
    try:
        planning = asyncio.run_coroutine_threadsafe(plan(), loop)
        return longest(worker.get_finished, planning.done)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


if __name__ == "__main__":
    app()
