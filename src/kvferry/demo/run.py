"""The demo itself: two engines of unlike shape, every rank a process, every byte checked.

Producer ranks fill the blocks of a few hundred requests; consumer ranks plan for themselves and
pull each request out of the producers' memory; then every byte that arrived is compared with what
it logically is, and every byte that nothing should have written with what it was.

How bytes move is the *method*:

    vm      process_vm_readv on the producers' private memory
    shared  producers keep their cache in shared memory, which consumers map, and copy themselves
    auto    vm where the system permits it, else shared
    NAME    a carrier (`transport`): consumers read through it. "auto" there is what engines with
            their caches in host memory do: the carriers of transport/auto.py, by what they cost on
            this machine. `cuda` moves between caches on a GPU

However the demo ends, its processes end with it. Shared memory has no name, so none can be left.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from kvferry.demo.crew import Crew
from kvferry.demo.memory import SharedFile
from kvferry.demo.orders import Checked, Greeting, Link, Order, Pulled
from kvferry.demo.work import DEMO_FROM, DEMO_MODEL, DEMO_TO, Work, find_model, make_work
from kvferry.errors import DescriptionError, PermissionDenied, TransferError
from kvferry.layout.shape import EngineShape, Rank
from kvferry.transport.auto import AUTO, select
from kvferry.transport.registry import CARRIERS
from kvferry.units import show_bytes

METHODS = ("auto", "vm", "shared")
# The null carrier stays in one process.
TRANSPORTS = (AUTO, *(name for name in CARRIERS if name != "null"))
MEMORY_PART = 0.8  # of the memory that is free may be used


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a run moved and found.

    `gb_per_s` is `bytes` over `transfer_seconds`: the wall time from the order to pull until the
    last consumer rank had all its requests, binding each request included. `copy_gb_per_s` is
    over the time that the busiest consumer rank spent copying. `method` is how bytes moved: "local,
    by tcp" where a carrier did not go its own way.
    """

    requests: int
    bytes: int
    mismatched_bytes: int
    gb_per_s: float
    method: str
    why: str  # the method
    asked: str  # method or transport
    seconds: float  # in all, with starting processes, filling and checking
    transfer_seconds: float
    copy_gb_per_s: float
    descriptors: int
    checked_bytes: int  # arrived, and compared with their own values
    guarded_bytes: int  # had to be zero or unchanged
    tokens: int
    skipped_tokens: int
    model: str
    src: str
    dst: str
    src_ranks: int
    dst_ranks: int

    @property
    def ok(self) -> bool:
        return self.mismatched_bytes == 0 and 0 < self.checked_bytes <= self.bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


class Watch(Protocol):
    """Who wants to see a demo run."""

    def say(self, text: str) -> None: ...
    def phase(self, name: str, total_bytes: int) -> None: ...
    def advance(self, done_bytes: int) -> None: ...


class Silent:
    def say(self, text: str) -> None:
        pass

    def phase(self, name: str, total_bytes: int) -> None:
        pass

    def advance(self, done_bytes: int) -> None:
        pass


def run_demo(
    model_name: str = DEMO_MODEL,
    from_shape: str = DEMO_FROM,
    to_shape: str = DEMO_TO,
    *,
    min_bytes: int = 1 << 30,
    requests: int = 300,
    seed: int = 0,
    method: str = "auto",
    transport: str = "",
    progress: Watch | None = None,
    fault: str = "",
) -> DemoResult:
    """Run the whole demo, and say what it found.

    `fault` breaks the first consumer rank, for tests: "flip" damages three bytes that arrived,
    "stray" three that nothing may write, "die" ends it while it pulls.
    """
    if method not in METHODS:
        raise DescriptionError(f"method must be one of {', '.join(METHODS)}, found {method!r}")
    if transport and (method != "auto" or transport not in TRANSPORTS):
        raise DescriptionError(
            f"transport must be one of {', '.join(TRANSPORTS)}, without a method; found "
            f"{transport!r} and method {method!r}"
        )
    _require_library(transport)
    watch = progress or Silent()
    started = time.monotonic()
    _require_memory(2 * min_bytes)  # before block tables are made for it
    src, dst = EngineShape.parse(from_shape), EngineShape.parse(to_shape)
    work = make_work(
        find_model(model_name), src, dst, min_bytes=min_bytes, requests=requests, seed=seed
    )
    _require_memory(_needed_memory(work))
    held_bytes = _held_bytes(work)
    watch.say(
        f"{len(src.ranks)} producer ranks ({src.describe()}) and {len(dst.ranks)} consumer ranks "
        f"({dst.describe()}), each a process; {len(work.requests)} requests"
    )
    with ExitStack() as stack, Crew() as crew:
        files = [_shared_file(stack) for _ in src.ranks] if method != "vm" and not transport else []
        crew.start(work, fault, files)
        peers = crew.ask(crew.producers, Order("greet"), watch.advance)
        crew.ask(crew.consumers, Order("greet"), watch.advance)
        way, why = (transport, "") if transport else _choose(crew, method, peers)
        everyone = [*crew.producers, *crew.consumers]
        greetings: list[Greeting] = crew.ask(everyone, Order("set_up", (way,)), watch.advance)
        order = Order("link", (greetings[: len(peers)],))
        links: list[list[Link]] = crew.ask(crew.consumers, order, watch.advance)
        if transport:
            way, why = _reached(transport, [link for some in links for link in some])
        watch.say(f"method {way}: {why}")
        watch.phase("fill", held_bytes)
        crew.ask(everyone, Order("fill"), watch.advance)
        watch.phase("move", work.bytes)
        begun = time.monotonic()
        pulled: list[Pulled] = crew.ask(crew.consumers, Order("pull"), watch.advance)
        transfer_seconds = time.monotonic() - begun
        watch.phase("check", work.bytes)
        checked: list[Checked] = crew.ask(crew.consumers, Order("check"), watch.advance)
    moved = sum(p.bytes for p in pulled)
    return DemoResult(
        requests=len(work.requests),
        bytes=moved,
        mismatched_bytes=sum(c.wrong_bytes for c in checked),
        gb_per_s=moved / transfer_seconds / 1e9,
        method=way,
        why=why,
        asked=transport or method,
        seconds=time.monotonic() - started,
        transfer_seconds=transfer_seconds,
        copy_gb_per_s=moved / max(p.copy_seconds for p in pulled) / 1e9,
        descriptors=sum(p.descriptors for p in pulled),
        checked_bytes=sum(c.arrived_bytes for c in checked),
        guarded_bytes=sum(c.guarded_bytes for c in checked),
        tokens=sum(r.tokens for r in work.requests),
        skipped_tokens=sum(r.skip for r in work.requests),
        model=work.model.name,
        src=src.describe(),
        dst=dst.describe(),
        src_ranks=len(src.ranks),
        dst_ranks=len(dst.ranks),
    )


def _choose(crew: Crew, method: str, peers: list[Greeting]) -> tuple[str, str]:
    """The method to use, and why."""
    if method == "shared":
        return "shared", "asked for; consumers map the producers' memory and copy themselves"
    reasons = crew.ask(crew.consumers, Order("probe", (peers,)), lambda _: None)
    reason = next(filter(None, reasons), "")
    if not reason:
        asked = "asked for" if method == "vm" else "chosen"
        return "vm", f"{asked}; consumers may read the producers' memory (process_vm_readv)"
    if method == "vm":
        raise PermissionDenied(reason)
    return "shared", f"chosen, because {reason}"


def _reached(transport: str, links: list[Link]) -> tuple[str, str]:
    """How carriers move bytes, in truth, and why so: of each way, by the first that goes it."""
    ways: dict[str, list[str]] = {}
    for link in links:
        way = f"{link.method}, by tcp" if link.detour else link.method
        ways.setdefault(way, [reason for reason in (link.why, link.detour) if reason])
    reasons = [reason for some in ways.values() for reason in some]
    if transport == AUTO:
        out = [f"{c.name}: {c.why_not}" for c in select([AUTO]) if c.why_not]
        reasons.append(f"not opened: {'; '.join(out)}")
    if not reasons:
        reasons = [f"asked for; consumers read through the carrier {transport}"]
    return " and ".join(ways) or transport, ". ".join(reasons)


def _require_library(transport: str) -> None:
    """Say that it is missing before anything is filled."""
    if transport == "mooncake":
        from kvferry.transport.mooncake_engine import engine_class

        engine_class()
    elif transport == "nixl":
        from kvferry.transport.nixl_agent import api

        api()
    elif transport == "cuda":
        from kvferry.transport.cuda_driver import device_count

        if device_count() == 0:
            raise TransferError("this process sees no GPU (CUDA_VISIBLE_DEVICES?)")


def _shared_file(stack: ExitStack) -> SharedFile:
    descriptor = os.memfd_create("kvferry-demo")
    stack.callback(os.close, descriptor)
    return SharedFile(descriptor)


def _held_bytes(work: Work) -> int:
    """Bytes of all blocks that producers fill."""
    null = work.src.null_block or 0
    total = 0
    for rank in work.src.ranks:
        for index, block in enumerate(_block_bytes(work, work.src, rank)):
            total += block * sum(int((r.src_tables[index] != null).sum()) for r in work.requests)
    return total


def _block_bytes(work: Work, shape: EngineShape, rank: Rank) -> list[int]:
    """Bytes of one block of each group on one rank, over its layers."""
    return [
        len(shape.layers(work.model, group, rank.pp))
        * shape.entries(group)[0]
        * sum(shape.units(group, c, rank.tp).size * c.unit_bytes for c in group.components)
        for group in work.model.groups
    ]


def _needed_memory(work: Work) -> int:
    """Bytes of all blocks in the pools of both engines."""
    needed = 0
    for shape, pools in ((work.src, work.src_pools), (work.dst, work.dst_pools)):
        for rank in shape.ranks:
            blocks = zip(_block_bytes(work, shape, rank), pools, strict=True)
            needed += sum(block * len(pool) for block, pool in blocks)
    return needed


def _require_memory(needed: int) -> None:
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    if needed > free * MEMORY_PART:
        raise DescriptionError(
            f"the two engines would need {show_bytes(needed)} of memory, and {show_bytes(free)} "
            "are free; move fewer bytes, or choose shapes with fewer ranks"
        )
