"""Draft models in the pool: a key determines the bytes under it.

An Eagle or MTP layer's slot of token i is computed from token i + 1 too. Each engine here computes
its slots as such layers do: every slot holds a digest of the tokens on which it depends.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dir_store import DirStore
from kvferry.errors import ProtocolError
from kvferry.layout.model import CacheModel, Component, Group
from kvferry.layout.shape import EngineShape
from kvferry.pool.keys import ContentChain, Extra
from kvferry.pool.layout_registry import layout_id, make_layout, read_record
from kvferry.pool.objects import table_kinds
from pool_cases import plain_group, plain_shape
from pool_engine import SmallEngine

BLOCK, BLOCKS = 16, 8
SHARED = list(range(100, 164))  # 64 tokens: four blocks


def group(name: str, role: str) -> dict[str, object]:
    latent: dict[str, object] = {"name": "x", "units": 1, "dims": [2], "element_bytes": 4}
    return plain_group(name, role, [latent | {"sharding": "replicated"}])


def side() -> dict[str, Any]:
    shape = plain_shape(block_size=BLOCK, order="LBNHC", null_block=None)
    tables = {"target": list(range(BLOCKS)), "draft": list(reversed(range(BLOCKS)))}
    return {"shape": shape, "blocks": BLOCKS, "tables": tables, "absent_roles": []}


CASE: Any = {
    "kind": "draft",
    "fault": "",
    "model": {
        "name": "m",
        "total_layers": 0,
        "groups": [group("target", "target"), group("draft", "draft")],
    },
    "src": side(),
    "dst": side(),
    "tokens": 64,
    "skip": 0,
}
AHEAD = {"target": 0, "draft": 1}


class DraftEngine(SmallEngine):
    def slots(self, group: str) -> np.ndarray:
        """A group's slots, in the order of its block table."""
        (regions,) = self.memory.values()
        number = [g.name for g in self.model.groups].index(group)
        found: np.ndarray = regions[number].view(np.int64).reshape(BLOCKS, BLOCK)
        return found

    def compute(self, tokens: list[int]) -> None:
        for name, table in self.case["src"]["tables"].items():
            slots = self.slots(name)
            for at, value in enumerate(truth(name, tokens)):
                slots[table[at // BLOCK], at % BLOCK] = value

    def held(self, group: str, tokens: int) -> list[int]:
        slots, table = self.slots(group), self.case["dst"]["tables"][group]
        return [int(slots[table[at // BLOCK], at % BLOCK]) for at in range(tokens)]


def truth(group: str, tokens: list[int]) -> list[int]:
    """What each slot must hold. The last one of a draft takes the token that is sampled next."""
    known = [*tokens, 7]
    ends = range(1 + AHEAD[group], len(tokens) + 1 + AHEAD[group])
    digests = [blake2b(repr(known[:end]).encode(), digest_size=8).digest() for end in ends]
    return [int.from_bytes(d, "little", signed=True) for d in digests]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[DraftEngine, DraftEngine]]:
    case = copy.deepcopy(CASE)
    both = [DraftEngine(case, name, lambda: DirStore(tmp_path)) for name in ("src", "dst")]
    yield both[0], both[1]
    for engine in both:
        engine.close()


def read(engine: DraftEngine, name: str, tokens: list[int]) -> int:
    """Match and load; every byte that came is what this prompt would compute."""
    hit = engine.matched(name, tokens)
    if hit:
        assert all(end.ok for end in engine.load(name, hit))
    for kind in AHEAD:
        assert engine.held(kind, hit) == truth(kind, tokens)[:hit], kind
    return hit


def test_prompts_that_differ_after_a_block_do_not_exchange_draft_bytes(
    engines: tuple[DraftEngine, DraftEngine],
) -> None:
    writer, reader = engines
    first = [*SHARED, *range(200, 206)]
    writer.compute(first)
    writer.save("w", first)
    assert read(reader, "other", [*SHARED, *range(300, 306)]) == 48  # the fourth block differs
    assert read(reader, "same", first) == 64


def test_both_prompts_have_their_own_last_block(engines: tuple[DraftEngine, DraftEngine]) -> None:
    """What the one saved does not keep the other from saving: the last blocks are both shared."""
    writer, reader = engines
    prompts = [[*SHARED, *range(start, start + 6)] for start in (200, 300)]
    for number, tokens in enumerate(prompts):
        writer.compute(tokens)
        writer.save(str(number), tokens)
    assert [read(reader, f"r{n}", tokens) for n, tokens in enumerate(prompts)] == [64, 64]


def test_the_last_block_waits_for_its_next_token(
    engines: tuple[DraftEngine, DraftEngine],
) -> None:
    """A prompt ends with a block: its next token is sampled, and known one step later."""
    writer, reader = engines
    writer.compute(SHARED)
    writer.save("w", SHARED)
    assert read(reader, "early", [*SHARED, 7, 9]) == 48
    writer.save("w", [*SHARED, 7])
    assert read(reader, "late", [*SHARED, 7, 8]) == 64
    assert read(reader, "other", [*SHARED, 9, 8]) == 48


def test_a_chunk_ends_with_a_block(engines: tuple[DraftEngine, DraftEngine]) -> None:
    """The next token of the prompt is known before it is computed."""
    writer, reader = engines
    prompt = [*SHARED, *range(200, 206)]
    writer.compute(prompt)
    writer.save("w", prompt, final=32)
    assert read(reader, "r", prompt) == 32


def test_digests_cover_the_tokens_ahead_and_their_images() -> None:
    def digests(last: int, ahead: int, *extras: Extra) -> list[str]:
        chain = ContentChain(extras)
        chain.cover([*range(32), last], 33)
        return chain.digests(16, ahead=ahead)

    assert digests(5, 0) == digests(6, 0)
    assert digests(5, 1)[0] == digests(6, 1)[0] and digests(5, 1)[1] != digests(6, 1)[1]
    image = Extra(32, "mm a")  # begins at the token ahead
    assert digests(5, 1, image)[0] == digests(5, 1)[0]
    assert digests(5, 1, image)[1] not in (digests(5, 1)[1], digests(5, 1, Extra(32, "mm b"))[1])
    assert len(digests(5, 2)) == 1  # the second block's second token ahead is not known


def test_a_table_that_a_draft_shares_is_keyed_like_the_draft() -> None:
    part = Component("x", 1, (8,), 2)
    names = {"target": "target", "draft": "draft", "indexer": "indexer"}
    groups = tuple(Group(name, (0,), (part,), role=role) for name, role in names.items())
    model = CacheModel("m", groups)
    shape = EngineShape(block_size=16)
    together = table_kinds(model, shape, {0: {"target", "draft"}, 1: {"indexer"}}, {"draft": 1})
    apart = table_kinds(model, shape, {0: {"target", "indexer"}, 1: {"draft"}}, {"draft": 3})
    assert [kind.ahead for kind in together] == [1, 0]
    assert [kind.ahead for kind in apart] == [0, 3]


def test_records_that_do_not_say_it_are_not_read(
    engines: tuple[DraftEngine, DraftEngine],
) -> None:
    """Versions before this one keyed drafts by too few tokens."""
    engine = engines[0]
    ranks = list(engine.layouts.values())
    one, two = (make_layout(engine.model, {}, ranks, ahead) for ahead in (1, 2))
    assert one.id != two.id and (one.ahead, two.ahead) == (1, 2)
    assert read_record(two.encoded, two.id).ahead == 2
    said = b"\xa5ahead\x81\xa5draft"
    for wrong in (b"\xa5ahead\x80", said + b"\xff"):  # nothing, and -1
        record = one.encoded.replace(said + b"\x01", wrong)
        assert record != one.encoded
        with pytest.raises(ProtocolError, match="tokens after a block"):
            read_record(record, layout_id(record))
