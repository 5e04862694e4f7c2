"""What producers and consumers of the demo do alike: map memory, view it, and make carriers."""

from __future__ import annotations

from kvferry.demo.cache import View, make_views
from kvferry.demo.memory import Memory
from kvferry.demo.work import Request, Work
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import Rank
from kvferry.transport import Carrier, MemoryRegion, make_carrier
from kvferry.transport.auto import select

OWN_METHODS = ("vm", "shared")  # others are names of carriers, or "auto"
ON_GPU = "cuda"  # moves nothing else


def views_of(work: Work, memory: Memory) -> list[View]:
    layout = memory.layout
    blocks = layout.parts[0].num_blocks if layout.parts else 0
    return make_views(work.model, layout.shape, layout.rank, blocks, memory.regions())


def map_rank(
    work: Work, is_producer: bool, rank: Rank, file: int | None = None, method: str = ""
) -> Memory:
    shape, blocks = (work.src, work.src_blocks) if is_producer else (work.dst, work.dst_blocks)
    layout = RankLayout.build(work.model, shape, rank, blocks)
    return Memory.map(layout, file, on_gpu=method == ON_GPU)


def carriers_for(method: str, memory: Memory) -> list[Carrier]:
    """The one that is named, or all that an engine with such memory opens for "auto"."""
    if method in OWN_METHODS:
        return []
    carriers = [make_carrier(chosen.name) for chosen in select([method]) if not chosen.why_not]
    for carrier in carriers:
        carrier.register([MemoryRegion(memory.address, memory.bytes.nbytes)])
    return carriers


def key_of(work: Work, request: Request, view: View) -> tuple[int, ...]:
    """What distinguishes one component of one request from all others."""
    group = work.model.groups.index(view.group)
    return (work.seed, request.number, group, view.group.components.index(view.component))
