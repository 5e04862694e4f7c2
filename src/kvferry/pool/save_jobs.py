"""Saves as the scheduler sees them: which blocks a step has filled, and who still needs them.

A block of tokens can be saved when its last token is final. When a recurrent state is whole, only
the engine knows: it names the block that holds the state after so many tokens.

A job's blocks are pinned until every rank has reported it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.pool.chain import ContentChain
from kvferry.pool.objects import TableKind
from kvferry.pool.orders import Saved, SaveOrder, TableBlocks

log = logging.getLogger("kvferry")

MOST_JOBS = 64  # saves under way; more wait for nothing but the store
Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class WholeState:
    """A block that holds the state after exactly so many tokens, and stays as it is."""

    table: int
    block_id: int
    tokens: int


def blocks_to_save(
    kinds: Iterable[TableKind],
    chain: ContentChain,
    start_tokens: int,
    stop_tokens: int,
    tables: Tables,
    null_block: int | None,
) -> Iterator[TableBlocks]:
    """Blocks of tokens of each table, full and still there."""
    for kind in kinds:
        if kind.residency.kind == "state" or kind.table >= len(tables):
            continue
        first, stop = start_tokens // kind.block_tokens, stop_tokens // kind.block_tokens
        ids = list(tables[kind.table][first:stop])
        contents = chain.digests(kind.block_tokens, stop)[first:stop]
        kept = [i for i, block in enumerate(ids) if block != null_block]
        if kept:
            yield TableBlocks(
                kind.table,
                tuple(first + i for i in kept),
                tuple(ids[i] for i in kept),
                tuple(contents[i] for i in kept),
            )


def states_to_save(
    kinds: Iterable[TableKind],
    chain: ContentChain,
    states: Sequence[WholeState],
    null_block: int | None,
) -> Iterator[TableBlocks]:
    """States at the ends of blocks; others cannot be found again."""
    for kind in kinds:
        span = kind.block_tokens
        mine = [
            state
            for state in states
            if state.table == kind.table
            and kind.residency.kind == "state"
            and state.block_id != null_block
            and 0 < state.tokens <= chain.tokens
            and state.tokens % span == 0
        ]
        if mine:
            numbers = tuple(state.tokens // span - 1 for state in mine)
            contents = chain.digests(span, max(numbers) + 1)
            yield TableBlocks(
                kind.table,
                numbers,
                tuple(state.block_id for state in mine),
                tuple(contents[n] for n in numbers),
            )


@dataclass(slots=True)
class _Job:
    """A save that not all ranks have reported."""

    block_ids: list[int]
    tables: tuple[TableBlocks, ...]
    tag: Any
    waiting: int
    failed: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """A job that all ranks have reported: what is stored in full, with the caller's tag."""

    tables: tuple[TableBlocks, ...]
    failed: frozenset[tuple[int, int]]
    tag: Any


class SaveJobs:
    """Jobs under way, and their pins."""

    def __init__(
        self,
        pin: Callable[[Sequence[int]], None],
        unpin: Callable[[Sequence[int]], None],
        most_pinned_blocks: int,
    ) -> None:
        self._pin, self._unpin, self._most = pin, unpin, most_pinned_blocks
        self._jobs: dict[int, _Job] = {}
        self._next = 0
        self.pinned_blocks = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def full(self) -> bool:
        return len(self._jobs) >= MOST_JOBS or self.pinned_blocks >= self._most

    def order(
        self, tables: tuple[TableBlocks, ...], ranks: int, seconds: float, tag: Any
    ) -> SaveOrder | None:
        """A job for these blocks; None where there are none."""
        ids = [i for blocks in tables for i in blocks.block_ids]
        if not ids:
            return None
        job_id, self._next = self._next, self._next + 1
        self._pin(ids)
        self.pinned_blocks += len(ids)
        self._jobs[job_id] = _Job(ids, tables, tag, ranks)
        return SaveOrder(job_id, tables, seconds)

    def reported(self, reports: Iterable[Saved]) -> list[SavedBlocks]:
        """Ranks' last words about jobs. Jobs that all have reported are over, and unpinned."""
        over = []
        for report in reports:
            job = self._jobs.get(report.job_id)
            if job is None:
                log.error("a rank reported save job %d, which is not open", report.job_id)
                continue
            job.failed |= set(report.failed)
            job.waiting -= 1
            if job.waiting == 0:
                del self._jobs[report.job_id]
                self.pinned_blocks -= len(job.block_ids)
                self._unpin(job.block_ids)
                over.append(SavedBlocks(job.tables, frozenset(job.failed), job.tag))
        return over
