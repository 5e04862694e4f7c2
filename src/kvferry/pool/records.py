"""Layout records: how a writer's objects are laid out, for readers of any shape.

A record holds the model's description, what engines compare at a handshake, the writer's shape and
the layout of each of its ranks. Its id is a digest of these, so engines of one shape have one id,
and a record that was changed is noticed. Ranks that hold the same bytes of a table (replicated
heads, latents) are one *fragment*, named after the first of them; they write in turns, by block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from kvferry.errors import IncompatibleError, KvferryError, ProtocolError
from kvferry.layout.model import CacheModel, require_same_cache
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.p2p.describe import engine_info, rank_info, read_layout, read_model, read_shape
from kvferry.pool.keys import Fragment
from kvferry.pool.objects import TableKind, compact, object_memory, table_kinds
from kvferry.pool.store import MOST_RECORD_BYTES
from kvferry.wire.messages import EngineInfo, RankInfo

FORMAT = 1
ID_BYTES = 12


class LayoutRecord(msgspec.Struct, frozen=True):
    """What is stored."""

    format: int
    engine: EngineInfo
    ranks: list[RankInfo]


_records = msgspec.msgpack.Decoder(LayoutRecord)  # made once: its first use is on many threads


@dataclass(frozen=True, slots=True, eq=False)
class PoolLayout:
    """A writer's layout, ready to plan with."""

    id: str
    encoded: bytes
    model: CacheModel
    meaning: dict[str, str]
    shape: EngineShape
    ranks: dict[Rank, RankLayout]  # compact: of objects
    kinds: tuple[TableKind, ...]
    fragments: tuple[Fragment, ...]
    owner: dict[tuple[int, Rank], Fragment] = field(repr=False)  # of each table on each rank
    turns: dict[Fragment, tuple[Rank, ...]] = field(repr=False)  # ranks that write it

    def kind(self, table: int) -> TableKind:
        return next(kind for kind in self.kinds if kind.table == table)

    def fragments_of(self, group: str) -> tuple[Fragment, ...]:
        tables = {kind.table for kind in self.kinds if group in kind.groups}
        return tuple(f for f in self.fragments if f.table in tables)

    def block_tokens(self, group: str) -> int:
        return next(kind.block_tokens for kind in self.kinds if group in kind.groups)


def make_layout(
    model: CacheModel,
    meaning: Mapping[str, str],
    ranks: Sequence[RankLayout],
) -> PoolLayout:
    """The layout of an engine, from the memory of all its ranks."""
    compacted = [compact(layout, object_memory(model, layout)) for layout in ranks]
    shape = compacted[0].shape
    record = LayoutRecord(
        FORMAT,
        engine_info("", "", _nameless(model), shape, meaning),
        [rank_info(r, [0] * len(r.regions), "", "", {}) for r in sorted(compacted, key=_by_rank)],
    )
    return _ready(msgspec.msgpack.encode(record), record)


def _by_rank(layout: RankLayout) -> Rank:
    return layout.rank


def _nameless(model: CacheModel) -> CacheModel:
    """A model's name is a path, and says nothing about bytes."""
    return CacheModel("", model.groups, model.total_layers)


def layout_id(encoded: bytes) -> str:
    return blake2b(encoded, digest_size=ID_BYTES).hexdigest()


def read_record(encoded: bytes, expected_id: str) -> PoolLayout:
    """A record from a store, checked; raises a `KvferryError` that says what is wrong with it."""
    if len(encoded) > MOST_RECORD_BYTES or layout_id(encoded) != expected_id:
        raise ProtocolError(
            f"the record of layout {expected_id} has {len(encoded)} bytes and the digest "
            f"{layout_id(encoded)}; it was damaged, and its objects cannot be read"
        )
    try:
        record = _records.decode(encoded)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"layout {expected_id} cannot be read: {error}") from None
    if record.format != FORMAT:
        raise ProtocolError(
            f"layout {expected_id} has format {record.format}; this version reads {FORMAT}"
        )
    return _ready(encoded, record)


def _ready(encoded: bytes, record: LayoutRecord) -> PoolLayout:
    model, shape = read_model(record.engine), read_shape(record.engine)
    ranks = {}
    for info in record.ranks:
        layout, _ = read_layout(info, shape)
        ranks[layout.rank] = layout
    missing = sorted(set(shape.ranks) ^ set(ranks))
    if missing:
        raise ProtocolError(f"a layout's record lacks or repeats ranks {missing}")
    tables: dict[int, set[str]] = {}
    for layout in ranks.values():
        for part in layout.parts:
            tables.setdefault(part.table, set()).add(part.group)
    owner, turns = _replicas(ranks)
    return PoolLayout(
        id=layout_id(encoded),
        encoded=encoded,
        model=model,
        meaning=dict(record.engine.meaning),
        shape=shape,
        ranks=ranks,
        kinds=tuple(table_kinds(model, shape, tables)),
        fragments=tuple(sorted(turns)),
        owner=owner,
        turns=turns,
    )


def _replicas(
    ranks: Mapping[Rank, RankLayout],
) -> tuple[dict[tuple[int, Rank], Fragment], dict[Fragment, tuple[Rank, ...]]]:
    """Ranks whose objects of a table hold the very same bytes are one fragment."""
    first: dict[object, Fragment] = {}
    owner: dict[tuple[int, Rank], Fragment] = {}
    turns: dict[Fragment, list[Rank]] = {}
    for rank, layout in sorted(ranks.items()):
        for table in sorted({part.table for part in layout.parts}):
            parts = tuple(
                (
                    part.group,
                    tuple(part.layers.tolist()),
                    tuple(
                        (p.component, p.units, tuple(p.offsets.tolist())) for p in part.placements
                    ),
                )
                for part in layout.parts
                if part.table == table
            )
            # of opaque pages nobody knows what they hold: they are nobody's replicas
            opaque = any(part.is_opaque for part in layout.parts if part.table == table)
            phase = rank.tp if opaque else rank.tp % layout.shape.dcp
            held = (table, rank.pp, phase, parts)
            fragment = first.setdefault(held, Fragment(table, rank.pp, rank.tp))
            owner[table, rank] = fragment
            turns.setdefault(fragment, []).append(rank)
    return owner, {fragment: tuple(members) for fragment, members in turns.items()}


def require_readable(ours: PoolLayout, theirs: PoolLayout) -> None:
    """Refuse a record whose bytes mean something else, though its key says that they do not."""
    require_same_cache(theirs.model, ours.model)
    if theirs.meaning != ours.meaning:
        raise IncompatibleError(
            f"layout {theirs.id} holds {theirs.meaning}, this engine {ours.meaning}"
        )


def is_usable(ours: PoolLayout, theirs: PoolLayout) -> str:
    """Why a layout cannot be read here; empty where it can."""
    try:
        require_readable(ours, theirs)
    except KvferryError as error:
        return str(error)
    return ""
