"""Blocks of the reader's own layout are loaded as they were saved, without a plan: the same bytes
to the same places as by a plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dir_store import DirStore
from kvferry.pool import rank as ranks
from kvferry.pool.hits import Segment
from kvferry.pool.layout_registry import WantedParts
from kvferry.pool.rank import Pace
from kvferry.verify.oracle import Oracle
from pool_cases import pool_case
from pool_engine import SmallEngine


def places(parts: WantedParts) -> dict[tuple[str, int, int], int]:
    """By fragment, block and offset in the object: the address of each byte."""
    found: dict[tuple[str, int, int], int] = {}
    for fragment, block, part in zip(parts.fragments, parts.blocks, parts.slices, strict=True):
        for offset, address, length in zip(part.offset, part.address, part.length, strict=True):
            for at in range(int(length)):
                found[fragment.name, block, int(offset) + at] = int(address) + at
    return found


def test_as_a_plan_says(tmp_path: Path) -> None:
    compared = planned_only = nulls = 0
    for index in range(400):
        case = pool_case(29, index, both_whole=True)
        if case is None or case["skip"] or Oracle(case).errors() or compared > 40:
            continue
        store = tmp_path / str(index)
        engine = SmallEngine(case, "src", lambda store=store: DirStore(str(store)))  # type: ignore[misc]
        orders = engine.scheduler.take_orders()
        assert orders.scope is not None
        tables = [np.asarray(ids, dtype=np.int64) for ids in engine.tables]
        for rank in engine.ranks.values():
            rank.tell(orders.scope)
            scope = rank._scope
            assert scope is not None
            for group in engine.model.groups:
                span = engine.layout.block_tokens(group.name)
                stop = case["tokens"] // span * span
                if group.is_state or not stop:
                    continue
                segment = Segment(engine.layout.id, group.name, 0, stop)
                own = scope.own_blocks(segment, tables)
                if own is None:
                    planned_only += 1
                    continue
                planned = places(scope.plan(engine.layout.id).bind(segment, tables, scope.bases))
                mine = places(own)
                assert planned.items() <= mine.items()
                if scope.null_block is not None:
                    holes = [np.r_[scope.null_block, t[1:]] for t in tables]
                    assert scope.own_blocks(segment, holes) is None
                    nulls += 1
                assert len(set(mine.values())) == len(mine)
                compared += bool(planned)
        engine.close()
    assert compared > 20 and planned_only > 0 and nulls > 0


@pytest.mark.parametrize(
    ("start", "stop", "pace", "ends"),
    [
        (0, 96, Pace(chunk_tokens=40), [32, 64, 96]),  # where blocks of 32 end
        (8, 96, Pace(chunk_tokens=1 << 30), [96]),
        (40, 90, Pace(chunk_tokens=1), [64, 90]),  # a block at least
        (64, 64, Pace(), [64]),  # a state
    ],
)
def test_a_load_is_cut_where_blocks_end(start: int, stop: int, pace: Pace, ends: list[int]) -> None:
    theirs = SimpleNamespace(block_tokens=lambda group: 32)
    chunks = ranks._cut(Segment("l", "g", start, stop), SimpleNamespace(theirs=theirs), pace)  # type: ignore[arg-type]
    assert [chunk.stop for chunk in chunks] == ends
    assert [chunk.start for chunk in chunks] == [start, *ends[:-1]]
