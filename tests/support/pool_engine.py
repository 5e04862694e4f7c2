"""A small engine over a pool, without vLLM: real memory, real threads, a scheduler and its ranks.

Memory is filled by the oracle of `kvferry.verify`: each byte is a function of the id of the logical
byte that lies there. A reader's memory is judged by the same oracle.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.pool.cost import LoadChoice
from kvferry.pool.keys import KeyMetadata
from kvferry.pool.layout_registry import make_layout
from kvferry.pool.orders import PoolLoaded, Saved
from kvferry.pool.rank import PoolRank
from kvferry.pool.scheduler import PoolLimits, PoolScheduler, RequestTracker, SaveJob
from kvferry.pool.store import Store
from kvferry.verify.oracle import CaseDict, Oracle, Worker
from kvferry.verify.sweep import build_model
from pool_cases import layouts

MEANING = {"dtype": "test"}
UNTOUCHED = 0xA5


def to_bytes(ids: np.ndarray) -> np.ndarray:
    """A byte for each logical byte's id."""
    mixed = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(37)
    return np.where(ids >= 0, mixed & np.uint64(0xFF), UNTOUCHED).astype(np.uint8)


class SmallEngine:
    """One side of a case. `step` is an engine's step: orders out, reports in.

    `shift` moves its memory to addresses that no pointer reaches.
    """

    def __init__(
        self,
        case: CaseDict,
        side: str,
        open_store: Callable[[], Store],
        *,
        limits: PoolLimits | None = None,
        shift: int = 0,
        tenant: str = "",
        weights: str = "",
        open_lookups: Callable[[], Store] | None = None,
        choice: LoadChoice | None = None,
        at_once: bool = False,
    ) -> None:
        self.case, self.side = case, side
        own = case["src"] if side == "src" else case["dst"]
        self.tables = [own["tables"][g["name"]] for g in case["model"]["groups"]]
        self.model = build_model(case["model"], own)
        self.layouts = layouts(case, side)
        self.memory = {
            rank: [np.full(region.bytes, UNTOUCHED, np.uint8) for region in layout.regions]
            for rank, layout in self.layouts.items()
        }
        self.ranks = {
            rank: PoolRank(
                open_store(), self.model, layout, [a.ctypes.data + shift for a in self.memory[rank]]
            )
            for rank, layout in self.layouts.items()
        }
        self.pins: Counter[int] = Counter()
        self.null = own["shape"]["null_block"]
        self.scheduler = PoolScheduler(
            limits
            or PoolLimits(
                lookup_seconds=5, load_seconds=10, save_seconds=10, lookup_at_once=at_once
            ),
            open_lookups or open_store,
            pin=self.pins.update,
            unpin=self.pins.subtract,
            null_block=self.null,
            choice=choice,
        )
        self.layout = make_layout(self.model, MEANING, list(self.layouts.values()))
        self.metadata = KeyMetadata.of(tenant, self.model.fingerprint(), MEANING, weights)
        self.scheduler.start(
            self.metadata,
            self.layout,
            len(self.ranks),
            full_residency=own["shape"]["full_residency"],
        )
        self.reports: list[Saved] = []
        self.ends: dict[str, list[PoolLoaded]] = {}
        self.saved: list[SaveJob] = []

    def fill(self, oracle: Oracle) -> None:
        """Put the source's bytes into memory."""
        for rank, regions in self.memory.items():
            images = oracle.source(Worker(*rank))
            for region, image in zip(regions, images, strict=True):
                region[:] = to_bytes(image)

    def step(self) -> None:
        orders = self.scheduler.take_orders()
        for rank in self.ranks.values():
            if orders.scope is not None:
                rank.tell(orders.scope)
            for load in orders.loads:
                rank.load(load)
            for save in orders.saves:
                rank.save(save)
        for rank in self.ranks.values():
            ended = rank.take()
            self.reports += ended.saved
            self.saved += self.scheduler.saved(ended.saved)
            self.scheduler.loaded(ended.loaded)
            self.scheduler.recovered(ended.recovered)
            for loaded in ended.loaded:
                self.ends.setdefault(loaded.request_id, []).append(loaded)
                if len(self.ends[loaded.request_id]) == len(self.ranks):
                    self.scheduler.load_over(loaded.request_id)

    def until(self, done: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "it hangs"
            self.step()
            time.sleep(0.002)

    def save(self, request_id: str, tokens: Sequence[int], final: int | None = None) -> None:
        """Compute and save a request, until all is reported."""
        self.scheduler.track(request_id, tuple)
        count = len(tokens) if final is None else final
        self.scheduler.computed(request_id, tokens, count, lambda: self.tables)
        self.until(lambda: not self.scheduler.has_work)

    def published(self) -> None:
        """Wait until engines of other shapes can read; lookups know no layout before."""
        self.until(lambda: self.scheduler.counters["layouts_published"] > 0)

    def matched(self, request_id: str, tokens: Sequence[int], computed: int = 0) -> int:
        tracker: RequestTracker = self.scheduler.track(request_id, tuple)
        found: list[int | None] = [None]

        def ask() -> bool:
            found[0] = self.scheduler.matched(request_id, tracker, tokens, computed)
            return found[0] is not None

        self.until(ask)
        assert found[0] is not None
        return found[0]

    def load(self, request_id: str, external: int) -> list[PoolLoaded]:
        """Load what was matched; how it ended on each rank."""
        self.ends.pop(request_id, None)
        self.scheduler.allocated(request_id, self.tables, external)
        self.until(lambda: len(self.ends.get(request_id, ())) == len(self.ranks))
        return self.ends[request_id]

    @property
    def pinned(self) -> int:
        return sum(self.pins.values())

    def wrong_bytes(self, oracle: Oracle) -> int:
        """Bytes that are not what the oracle says: due ones wrong, others touched."""
        wrong = 0
        for rank, regions in self.memory.items():
            for region, expected in zip(regions, oracle.target(Worker(*rank)), strict=True):
                due = expected >= 0
                wrong += int((region[due] != to_bytes(expected)[due]).sum())
                free = expected == -2
                wrong += int((region[~due & ~free] != UNTOUCHED).sum())
        return wrong

    def close(self) -> None:
        self.scheduler.close()
        for rank in self.ranks.values():
            rank.close()
