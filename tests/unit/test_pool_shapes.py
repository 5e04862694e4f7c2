"""Any shape reads any shape: random writers and readers over a pool, byte by byte."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.errors import KvferryError
from kvferry.verify.oracle import Oracle
from pool_cases import check, pool_case

SEED = 20261115
PAIRS = 120


def test_random_pairs() -> None:
    seen: Counter[str] = Counter()
    for index in range(PAIRS):
        case = pool_case(SEED, index)
        if case is None:
            seen["no pool"] += 1
            continue
        refusals = Oracle(case).errors()
        try:
            compared = check(case)
        except KvferryError as error:
            assert type(error).__name__ in refusals, (index, error)
            seen["refused"] += 1
            continue
        except AssertionError as error:
            raise AssertionError(f"case {index} of seed {SEED}: {error}") from error
        assert not refusals, (index, refusals)
        src, dst = case["src"]["shape"], case["dst"]["shape"]
        seen["compared"] += compared > 0
        seen["other tp"] += src["tp"] != dst["tp"]
        seen["other pp"] += src["pp"] != dst["pp"]
        seen["other blocks"] += src["block_size"] != dst["block_size"]
        seen["other order"] += src["order"] != dst["order"]
        seen["dcp"] += max(src["dcp"], dst["dcp"]) > 1
        for group in case["model"]["groups"]:
            seen[group["residency"]["kind"]] += 1
    for feature in ("other tp", "other pp", "other blocks", "other order", "dcp", "full"):
        assert seen[feature] >= 8, seen
    assert seen["compared"] >= PAIRS // 2 and seen["window"] and seen["state"], seen


def test_a_wrong_offset_is_noticed() -> None:
    """The comparison can fail: reads that are off by one byte do."""
    for index in range(40):
        case = pool_case(SEED, index)
        if case is None or Oracle(case).errors() or case["skip"] >= case["tokens"]:
            continue
        with pytest.raises(AssertionError, match="wrong"):
            check(case, break_range=True)
        return
    raise AssertionError("no case to break")
