"""Keys and content hashes: equal exactly where bytes mean the same; hits of every kind of layer."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from dir_store import DirStore, FaultyStore
from kvferry.errors import DescriptionError
from kvferry.layout.model import Residency
from kvferry.pool.embedded.index import hash_keys
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.hits import Held, Hit, Need, PoolReader, Segment, longest_hit
from kvferry.pool.keys import (
    MARK,
    ContentChain,
    Extra,
    Fragment,
    KeyMetadata,
    PoolKey,
    frame,
    object_keys,
)
from kvferry.pool.orders import LaterTexts
from kvferry.verify.oracle import Oracle
from pool_cases import pool_case
from pool_engine import SmallEngine


def chain(tokens: list[int], *extras: Extra) -> ContentChain:
    made = ContentChain(extras)
    made.cover(tokens, len(tokens))
    return made


TOKENS = list(range(100, 164))


class TestContent:
    def test_grows_as_it_would_be_made_at_once(self) -> None:
        whole = chain(TOKENS).digests(8)
        grown = ContentChain()
        for stop in (3, 8, 9, 30, 64):
            grown.cover(TOKENS, stop)
            assert grown.digests(8) == whole[: stop // 8]

    def test_a_block_names_all_before_it(self) -> None:
        other = [TOKENS[0] + 1, *TOKENS[1:]]
        assert not set(chain(TOKENS).digests(8)) & set(chain(other).digests(8))
        tail = [*TOKENS[:-1], 7]
        assert chain(TOKENS).digests(8)[:-1] == chain(tail).digests(8)[:-1]

    def test_extras_change_what_follows_them(self) -> None:
        plain = chain(TOKENS).digests(8)
        image = chain(TOKENS, Extra(20, "mm a")).digests(8)
        assert image[:2] == plain[:2] and not set(image[2:]) & set(plain[2:])
        kinds = [
            chain(TOKENS, Extra(0, "lora a")),
            chain(TOKENS, Extra(0, "salt a")),
            chain(TOKENS, Extra(0, "lora a"), Extra(0, "salt a")),
            chain(TOKENS, Extra(0, "lora asalt a")),
            chain(TOKENS, Extra(1, "lora a")),
            chain(TOKENS, Extra(0, "mm a"), Extra(9, "mm b")),
            chain(TOKENS, Extra(0, "mm b"), Extra(9, "mm a")),
            chain(TOKENS),
        ]
        for a, b in combinations(kinds, 2):
            assert a.digests(16)[0] != b.digests(16)[0]

    def test_extras_come_out_the_same_however_they_are_cut(self) -> None:
        extras = (Extra(0, "lora a"), Extra(13, "mm b"), Extra(40, "mm c"))
        assert chain(TOKENS, *extras).digests(8)[3] == chain(TOKENS, *extras).digests(32)[0]
        grown = ContentChain(extras)
        for stop in (10, 14, 41, 64):
            grown.cover(TOKENS, stop)
            grown.digests(8)
        assert grown.digests(8) == chain(TOKENS, *extras).digests(8)

    def test_no_token_can_pass_for_an_extra(self) -> None:
        """The bytes of an extra cannot be spelled with tokens: none is as large as its mark."""
        words = np.frombuffer(frame("lora a"), dtype="<u4").tolist()
        assert words[0] == MARK
        with pytest.raises(DescriptionError, match="token ids"):
            chain(words)

    def test_another_process_finds_the_same(self) -> None:
        code = (
            "from kvferry.pool.keys import ContentChain, Extra\n"
            "c = ContentChain([Extra(0, 'lora a')]); c.cover(range(64), 64)\n"
            "print(c.digests(16)[-1])"
        )
        found = set()
        for seed in ("0", "1", "random"):
            run = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            )
            found.add(run.stdout.strip())
        assert found == {chain(list(range(64)), Extra(0, "lora a")).digests(16)[-1]}

    @pytest.mark.parametrize("token", [-1, 0xFFFFFFFF, 1 << 32])
    def test_a_token_that_could_pass_for_something_else_is_refused(self, token: int) -> None:
        with pytest.raises(DescriptionError, match="token ids are from 0"):
            ContentChain().cover([1, token, 2], 3)

    def test_a_sequence_that_is_too_short_is_refused(self) -> None:
        with pytest.raises(DescriptionError, match="expected 10"):
            ContentChain().cover([1, 2], 10)

    def test_neighbours_that_look_like_the_mark_are_tokens(self) -> None:
        made = ContentChain()
        made.cover([0xFFFF0000, 0x0000FFFF], 2)  # four bytes of ones, half of each token
        assert made.tokens == 2


class TestKeys:
    def test_whatever_differs_in_meaning_has_another_key(self) -> None:
        base = {"tenant": "", "model": "m", "meaning": {"dtype": "bf16"}, "weights": "w"}
        changes = [
            {},
            {"tenant": "a"},
            {"model": "n"},
            {"meaning": {"dtype": "fp8"}},
            {"meaning": {"dtype": "bf16", "quantization": "x"}},
            {"weights": "v"},
            {"tenant": "w", "weights": ""},
        ]
        made = [KeyMetadata.of(**{**base, **change}) for change in changes]  # type: ignore[arg-type]
        made.append(replace(made[0], epoch="1"))
        assert len({m.namespace for m in made}) == len(made)

    def test_parts_of_a_key(self) -> None:
        """A tenant's name cannot pass for other parts."""
        metadata = KeyMetadata.of("team/a ü", "m", {})
        (key,) = object_keys(metadata, "abc", Fragment(1, 2, 3), ["00ff"])
        parts = ["kvferry1", "team%2Fa%20%C3%BC", metadata.namespace, "abc", "1.2.3", "00ff"]
        assert key.split("/") == parts

    def test_a_pool_key_is_what_the_store_gets(self) -> None:
        metadata = KeyMetadata.of("team/a", "m", {})
        key = PoolKey(metadata, "abc", Fragment(1, 2, 3), "00ff")
        assert [key.to_string()] == object_keys(metadata, "abc", Fragment(1, 2, 3), ["00ff"])
        others = [
            replace(key, key_metadata=KeyMetadata.of("team", "a/m", {})),
            replace(key, layout_id="abd"),
            replace(key, fragment=Fragment(1, 23, 3)),
            replace(key, chunk_hash="00fe"),
        ]
        assert len({k.to_string() for k in (key, replace(key), *others)}) == 5


def test_saved_blocks_are_asked_for_by_the_keys_of_their_objects(tmp_path: Path) -> None:
    """The scheduler watches what routers were told of, by keys that it makes itself."""
    ranks: Counter[int] = Counter()
    for index in range(60):
        case = pool_case(31, index, both_whole=True)
        if case is None or Oracle(case).errors() or sum(ranks.values()) == 12:
            continue
        put: set[str] = set()
        faults = {"put": lambda keys, *_, put=put: put.update(keys)}
        folder = str(tmp_path / str(index))
        engine = SmallEngine(case, "src", lambda f=folder, w=faults: FaultyStore(DirStore(f), w))  # type: ignore[misc]
        try:
            tokens = list(range(case["tokens"] + 1))  # a draft's last block waits for one more
            engine.save("r", tokens, final=case["tokens"])
            found = [
                key
                for job in engine.saved
                for blocks in job.tables
                for of_block in engine.scheduler.keys_of(blocks.table, blocks.contents)
                for key in of_block
            ]
        finally:
            engine.close()
        assert put and set(found) == put and len(found) == len(put), index
        ranks[len(engine.ranks)] += 1
    assert sum(ranks.values()) == 12 and len(ranks) > 2, ranks


def held(layout: str, group: str, size: int, exists: str) -> Held:
    return Held(layout, group, size, np.asarray([c == "x" for c in exists]))


def hit(needs: list[Need], have: list[Held], most: int, align: int, computed: int = 0) -> Hit:
    return longest_hit(PoolReader(tuple(needs), align), have, most, computed)


FULL = Residency()


class TestHits:
    @pytest.mark.parametrize(
        ("residency", "leaves"),
        [
            (FULL, False),
            (Residency("window", 4096), False),
            (Residency("window", 33), True),  # its last token needs one block more than the next
            (Residency("chunk", 64), True),
            (Residency("state"), True),
        ],
    )
    def test_where_the_last_token_cannot_be_computed_again(
        self, residency: Residency, leaves: bool
    ) -> None:
        assert Need("a", residency, 16).last_needs_more is leaves

    def test_the_first_gap_ends_it(self) -> None:
        need = [Need("a", FULL, 4)]
        assert hit(need, [held("L", "a", 8, "xx.x")], 31, 4).tokens == 16
        assert hit(need, [held("L", "a", 8, ".xxx")], 31, 4).tokens == 0
        assert hit(need, [held("L", "a", 8, ".xxx")], 31, 4, computed=8).tokens == 28

    def test_whole_blocks_of_the_reader(self) -> None:
        assert hit([Need("a", FULL, 8)], [held("L", "a", 4, "xxxxxxx")], 27, 8).tokens == 24
        assert hit([Need("a", FULL, 4)], [held("L", "a", 16, "xx")], 31, 4).tokens == 28

    def test_one_layout_after_another(self) -> None:
        """Where one has a gap the other goes on, also in the middle of its block."""
        found = hit(
            [Need("a", FULL, 4)], [held("L", "a", 16, "x.."), held("M", "a", 12, ".xxx")], 48, 4
        )
        assert found == Hit(48, (Segment("L", "a", 0, 16), Segment("M", "a", 16, 48)))

    def test_every_group_must_have_it(self) -> None:
        needs = [Need("a", FULL, 4), Need("b", FULL, 4)]
        assert hit(needs, [held("L", "a", 4, "xxxx"), held("L", "b", 4, "xx.x")], 16, 4).tokens == 8
        assert hit(needs, [held("L", "a", 4, "xxxx")], 16, 4).tokens == 0

    def test_a_window_needs_its_own_blocks_only(self) -> None:
        needs = [Need("a", FULL, 4), Need("w", Residency("window", 6), 4)]
        found = hit(needs, [held("L", "a", 4, "xxxxxx"), held("L", "w", 4, "....xx")], 24, 4)
        # token 24 sees 19..24: blocks 4 and 5
        assert found == Hit(24, (Segment("L", "a", 0, 24), Segment("L", "w", 16, 24)))
        # without block 4, no boundary later than 16 has its window; and 16 lacks block 2
        assert (
            hit(needs, [held("L", "a", 4, "xxxxxx"), held("L", "w", 4, ".x...x")], 24, 4).tokens
            == 0
        )
        assert (
            hit(needs, [held("L", "a", 4, "xxxxxx"), held("L", "w", 4, "xx...x")], 24, 4).tokens
            == 8
        )

    def test_an_engine_that_keeps_all_of_a_window(self) -> None:
        needs = [Need("w", FULL, 4)]
        assert hit(needs, [held("L", "w", 4, ".xxx")], 16, 4).tokens == 0

    def test_a_state_is_there_at_its_boundary_or_not(self) -> None:
        needs = [Need("a", FULL, 4), Need("s", Residency("state"), 8)]
        have = [held("L", "a", 4, "xxxxxx"), held("L", "s", 8, "x..")]
        assert hit(needs, have, 24, 8) == Hit(8, (Segment("L", "a", 0, 8), Segment("L", "s", 8, 8)))
        have[1] = held("L", "s", 8, "xx.")
        assert hit(needs, have, 24, 8).tokens == 16
        assert hit(needs, have, 15, 8).tokens == 8  # one token is left to compute
        have[1] = held("L", "s", 12, "xx")  # states at 12 and 24: only 24 is ours too
        assert hit(needs, have, 24, 8).tokens == 24
        assert hit(needs, have, 23, 8).tokens == 0

    def test_agrees_with_trying_every_length(self) -> None:
        rng = np.random.default_rng(5)
        kinds = [FULL, Residency("window", 7), Residency("window", 30), Residency("chunk", 16)]
        for _ in range(300):
            groups = [(f"g{i}", kinds[i]) for i in rng.permutation(4)[: rng.integers(1, 4)]]
            align = int(rng.choice([4, 8]))
            needs = [Need(name, kind, align) for name, kind in groups]
            have = [
                Held(f"L{size}", name, size, rng.random(64 // size) < 0.85)
                for name, _ in groups
                for size in (4, 12, 16)
                if rng.random() < 0.8
            ]
            computed = int(rng.choice([0, align, 2 * align]))
            found = hit(needs, have, 63, align, computed)
            assert found.tokens == brute(needs, have, 63, align, computed)
            for segment in found.segments:
                (one,) = [
                    h for h in have if (h.layout_id, h.group) == (segment.layout_id, segment.group)
                ]
                used = {t // one.block_tokens for t in range(segment.start, segment.stop)}
                assert all(one.exists[list(used)])


def brute(needs: list[Need], have: list[Held], most: int, align: int, computed: int) -> int:
    """Every length, every token."""
    best = 0
    for tokens in range(align, most + 1, align):
        if tokens <= computed:
            continue
        good = True
        for need in needs:
            first = need.residency.needed_from(tokens) // need.block_tokens * need.block_tokens
            for token in range(max(first, computed), tokens):
                good &= any(
                    h.group == need.group
                    and token // h.block_tokens < len(h.exists)
                    and bool(h.exists[token // h.block_tokens])
                    for h in have
                )
        best = tokens if good else best
    return best


def test_texts_are_made_when_they_are_needed_and_travel_as_a_tuple() -> None:
    made: list[int] = []

    def make() -> list[str]:
        made.append(1)
        return ["a", "b"]

    texts = LaterTexts(make)
    assert not made
    assert pickle.loads(pickle.dumps(texts)) == ("a", "b")
    assert list(texts) == ["a", "b"] and texts[1:] == ("b",) and len(made) == 1


def test_one_key_is_found_as_in_a_batch(tmp_path: Path) -> None:
    """With so few records that buckets are full, and a key's second bucket is often used."""
    store = EmbeddedStore(tmp_path, 1 << 20, slots=64)
    keys = [f"key {number}" for number in range(100)]
    for key in keys[:48]:
        store.put_bytes(key, b"x", time.monotonic() + 5)
    store.remove(keys[:8], time.monotonic() + 5)
    index = store._index
    batch = index.readable(index.find(*hash_keys(keys))).tolist()
    assert [index.has(key) for key in keys] == batch
    assert store.exists(keys[:10], time.monotonic() + 5).tolist() == batch[:10]
    assert 20 < sum(batch) < 48
    store.close()
