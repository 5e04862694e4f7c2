"""`kvferry demo`: two engines of unlike shape, every rank a process, every byte checked.

Producer ranks fill the blocks of a few hundred requests; consumer ranks plan for themselves and
pull each request out of the producers' memory; then every byte that arrived is compared with what
it logically is, and every byte that nothing should have written with what it was.

How bytes move is the *method*:

    vm      process_vm_readv on the producers' private memory
    shared  producers keep their cache in shared memory, which consumers map, and copy themselves
    auto    vm where the system permits it, else shared

However the demo ends, its processes end with it. Shared memory has no name, so none can be left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.cli import demo_rank
from kvferry.cli.demo_rank import Checked, Done, Failed, Greeting, Order, Pulled, SharedFile
from kvferry.cli.demo_work import DEMO_FROM, DEMO_MODEL, DEMO_TO, Work, find_model, make_work
from kvferry.cli.units import show_bytes
from kvferry.errors import DescriptionError, PermissionDenied, TransferError
from kvferry.layout.shape import EngineShape, Rank

METHODS = ("auto", "vm", "shared")
SILENCE_SECONDS = 60.0  # a rank that works reports many times a second
FAREWELL_SECONDS = 2.0  # for a rank to end by itself, before it is made to
MEMORY_PART = 0.8  # of the memory that is free may be used
PICTURE = Path("out/demo-plan.html")
PICTURE_TOKENS = 4096  # of the one request that the picture shows


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a run moved and found.

    `gb_per_s` is `bytes` over `transfer_seconds`: the wall time from the order to pull until the
    last consumer rank had all its requests, binding each request included. `copy_gb_per_s` is
    over the time that the busiest consumer rank spent copying.
    """

    requests: int
    bytes: int
    mismatched_bytes: int
    gb_per_s: float
    method: str
    why: str  # the method
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


class Lines(Silent):
    """Plain lines, for logs and pipes."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write

    def say(self, text: str) -> None:
        self.write(text + "\n")

    def phase(self, name: str, total_bytes: int) -> None:
        self.say(f"{name} {show_bytes(total_bytes)}")


class Bars:
    """A progress bar for each phase."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("start", total=None)

    def say(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, soft_wrap=True)

    def phase(self, name: str, total_bytes: int) -> None:
        self._finish()
        self.task = self.progress.add_task(name, total=total_bytes)

    def advance(self, done_bytes: int) -> None:
        self.progress.advance(self.task, done_bytes)

    def _finish(self) -> None:
        task = self.progress.tasks[-1]
        done = task.total if task.total is not None else 1
        self.progress.update(self.task, total=done, completed=done)


@dataclass(slots=True, eq=False)
class _Member:
    """A rank's process, as the demo sees it."""

    name: str
    process: SpawnProcess
    pipe: Connection


@dataclass(slots=True, eq=False)
class _Crew:
    """All ranks. Leaving the context ends every process, in whatever state it is."""

    producers: list[_Member] = field(default_factory=list)
    consumers: list[_Member] = field(default_factory=list)

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        members = [*self.producers, *self.consumers]
        for member in members:
            member.pipe.close()  # a rank that is idle ends now
        deadline = time.monotonic() + FAREWELL_SECONDS
        failed = _[0] is not None
        for end in (SpawnProcess.terminate, SpawnProcess.kill):
            for member in members:
                if not failed:
                    member.process.join(max(0.0, deadline - time.monotonic()))
                if member.process.is_alive():
                    end(member.process)
            for member in members:
                member.process.join(FAREWELL_SECONDS)
        for member in members:
            member.process.close()

    def start(self, work: Work, fault: str, files: Sequence[SharedFile]) -> None:
        for index, rank in enumerate(work.src.ranks):
            mine = list(files[index : index + 1])
            self.producers.append(_member(work, True, rank, "", mine))
        for rank in work.dst.ranks:
            broken = fault if rank == work.dst.ranks[0] else ""
            self.consumers.append(_member(work, False, rank, broken, list(files)))

    def ask(self, members: Sequence[_Member], order: Order, advance: Callable[[int], None]) -> Any:
        """Give all of them an order; their answers, in the same order."""
        for member in members:
            self._send(member, order)
        answers: dict[str, Any] = {}
        everyone = [*self.producers, *self.consumers]
        while len(answers) < len(members):
            pipes = {m.pipe: m for m in members if m.name not in answers}
            ended = {m.process.sentinel: m for m in everyone}
            ready = wait([*pipes, *ended], SILENCE_SECONDS)
            if not ready:
                silent = ", ".join(m.name for m in pipes.values())
                raise TransferError(
                    f"no word from {silent} for {SILENCE_SECONDS:.0f} s while waiting for "
                    f"{order.name!r}; the machine is overloaded, or a rank hangs"
                )
            for item in ready:
                if item in ended and not ended[item].pipe.poll():
                    raise _gone(ended[item], order)
                if item not in pipes:
                    continue
                member = pipes[item]
                match self._receive(member, order):
                    case demo_rank.Progress(done):
                        advance(done)
                    case Done(value):
                        answers[member.name] = value
                    case Failed(error, text):
                        raise error or TransferError(f"{member.name} failed:\n{text}")
        return [answers[member.name] for member in members]

    def _send(self, member: _Member, order: Order) -> None:
        try:
            member.pipe.send(order)
        except ConnectionError:
            raise _gone(member, order) from None

    def _receive(self, member: _Member, order: Order) -> object:
        try:
            return member.pipe.recv()
        except (EOFError, ConnectionError):
            raise _gone(member, order) from None


def _member(
    work: Work, is_producer: bool, rank: Rank, fault: str, files: list[SharedFile]
) -> _Member:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    name = f"{'producer' if is_producer else 'consumer'} pp{rank.pp} tp{rank.tp}"
    process = context.Process(
        target=demo_rank.rank_main,
        args=(work, is_producer, rank, fault, files, theirs),
        name=name,
        daemon=True,
    )
    process.start()
    theirs.close()
    return _Member(name, process, ours)


def _gone(member: _Member, order: Order) -> TransferError:
    member.process.join(FAREWELL_SECONDS)
    return TransferError(
        f"{member.name} ended with status {member.process.exitcode} during {order.name!r}; "
        "a negative status is a signal (-9: often out of memory). All other ranks were ended too"
    )


def run_demo(
    model_name: str = DEMO_MODEL,
    from_shape: str = DEMO_FROM,
    to_shape: str = DEMO_TO,
    *,
    min_bytes: int = 1 << 30,
    requests: int = 300,
    seed: int = 0,
    method: str = "auto",
    progress: Watch | None = None,
    fault: str = "",
) -> DemoResult:
    """Run the whole demo, and say what it found.

    `fault` breaks the first consumer rank, for tests: "flip" damages three bytes that arrived,
    "stray" three that nothing may write, "die" ends it while it pulls.
    """
    if method not in METHODS:
        raise DescriptionError(f"method must be one of {', '.join(METHODS)}, found {method!r}")
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
    with ExitStack() as stack, _Crew() as crew:
        files = [_shared_file(stack) for _ in src.ranks] if method != "vm" else []
        crew.start(work, fault, files)
        peers = crew.ask(crew.producers, Order("greet"), watch.advance)
        crew.ask(crew.consumers, Order("greet"), watch.advance)
        method, why = _choose(crew, method, peers)
        watch.say(f"method {method}: {why}")
        watch.phase("fill", held_bytes)
        everyone = [*crew.producers, *crew.consumers]
        greetings: list[Greeting] = crew.ask(everyone, Order("set_up", (method,)), watch.advance)
        watch.phase("move", work.bytes)
        begun = time.monotonic()
        order = Order("pull", (greetings[: len(peers)],))
        pulled: list[Pulled] = crew.ask(crew.consumers, order, watch.advance)
        transfer_seconds = time.monotonic() - begun
        watch.phase("check", work.bytes)
        checked: list[Checked] = crew.ask(crew.consumers, Order("check"), watch.advance)
    moved = sum(p.bytes for p in pulled)
    return DemoResult(
        requests=len(work.requests),
        bytes=moved,
        mismatched_bytes=sum(c.wrong_bytes for c in checked),
        gb_per_s=moved / transfer_seconds / 1e9,
        method=method,
        why=why,
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


def _choose(crew: _Crew, method: str, peers: list[Greeting]) -> tuple[str, str]:
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


def demo(
    model: str = DEMO_MODEL,
    from_shape: str = DEMO_FROM,
    to_shape: str = DEMO_TO,
    *,
    gib: float = 1.0,
    requests: int = 300,
    seed: int = 0,
    method: str = "auto",
    as_json: bool = False,
    html: Path | None = PICTURE,
) -> int:
    """Run the demo on a terminal; 0 when every byte is right, 1 when not."""
    progress_console = Console(stderr=True)
    columns = (TextColumn("{task.description:6}"), BarColumn(), DownloadColumn(binary_units=True))
    with ExitStack() as stack:
        watch: Watch
        if progress_console.is_terminal:
            bars = Progress(*columns, TimeElapsedColumn(), console=progress_console)
            watch = Bars(stack.enter_context(bars))
        else:
            watch = Lines(sys.stderr.write)
        result = run_demo(
            model,
            from_shape,
            to_shape,
            min_bytes=int(gib * (1 << 30)),
            requests=requests,
            seed=seed,
            method=method,
            progress=watch,
        )
    if html is not None:
        draw(result, html)
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        print("\n".join(describe(result, html)))
    return 0 if result.ok else 1


def draw(result: DemoResult, path: Path) -> None:
    """Write the picture of the plan that the demo used."""
    from kvferry.cli.picture import plan_page
    from kvferry.plan.report import report

    model = find_model(result.model)
    shapes = EngineShape.parse(result.src), EngineShape.parse(result.dst)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan_page(report(model, *shapes, PICTURE_TOKENS), None))


def describe(result: DemoResult, picture: Path | None = None) -> list[str]:
    """The result in a few lines for people."""
    lines = [
        f"moved    {show_bytes(result.bytes)} of KV cache in {result.requests:,} requests "
        f"({result.tokens:,} tokens, {result.skipped_tokens:,} of them already there), "
        f"{result.descriptors:,} descriptors",
        f"from     {result.model}, {result.src} ({result.src_ranks} processes)",
        f"to       {result.model}, {result.dst} ({result.dst_ranks} processes)",
        f"speed    {result.gb_per_s:.2f} GB/s by method {result.method} "
        f"({result.transfer_seconds:.2f} s, binding every request included; "
        f"{result.copy_gb_per_s:.2f} GB/s copying alone); {result.seconds:.1f} s in all",
    ]
    if result.ok:
        lines.append(
            f"checked  every byte: {result.checked_bytes:,} arrived where they belong, and "
            f"{result.guarded_bytes:,} that nothing may write are unchanged or zero"
        )
    else:
        lines.append(
            f"WRONG    {result.mismatched_bytes:,} bytes differ ({result.checked_bytes:,} that "
            f"should have arrived and {result.guarded_bytes:,} others were compared)"
        )
    if picture is not None:
        lines.append(f"picture  {picture}")
    return lines
