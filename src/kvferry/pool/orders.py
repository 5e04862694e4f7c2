"""What a scheduler asks of the ranks, and what they report: values that any engine can send."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.pool.hits import Segment
from kvferry.pool.keys import KeyMetadata


@dataclass(frozen=True, slots=True)
class TableBlocks:
    """Whole blocks of one block table."""

    table: int
    numbers: tuple[int, ...]  # of the blocks in the sequence
    block_ids: tuple[int, ...]
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save these blocks. They stay as they are until every rank has reported the job."""

    job_id: int
    tables: tuple[TableBlocks, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A rank's last word about a job."""

    job_id: int
    failed: tuple[tuple[int, int], ...] = ()  # (table, number of the block) that are not stored


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load these segments into a request's blocks."""

    request_id: str
    segments: tuple[Segment, ...]
    contents: dict[int, tuple[str, ...]]  # by block size in tokens
    tables: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended on one rank."""

    request_id: str
    error: str = ""  # empty: all bytes are there
    bad_from: int | None = None  # first token that is not there; tokens before it are
    hung: bool = False  # the store may still write: the blocks must not be used again yet
    bytes: int = 0
    seconds: float = 0.0
    missing: tuple[tuple[str, int], ...] = ()  # (group, first token) that the store had no more

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True)
class Scope:
    """What keys are made of; sent when it changes."""

    metadata: KeyMetadata
    layout_id: str  # our own
    records: dict[str, bytes] = field(default_factory=dict)  # layouts that ranks may need
