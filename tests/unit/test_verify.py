"""The sweep on a few hundred pairs, and proof that it can fail."""

from __future__ import annotations

import ast
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvferry.plan import Copies, bind, uncovered
from kvferry.verify import sweep
from kvferry.verify.generate import KINDS, generate
from kvferry.verify.oracle import FREE, GAP, NOTHING, CaseDict, Oracle, Worker
from kvferry.verify.sweep import MismatchError, Product, check, check_case, run
from pool_cases import plain_group, plain_shape

Corrupt = Callable[[Copies], Copies]
SEED = 11
PAIRS = 240


def small_case(src: dict[str, object], dst: dict[str, object]) -> CaseDict:
    """One layer, two heads, K and V of one byte each; three tokens in blocks of two."""
    parts: list[dict[str, object]] = [
        {"name": name, "units": 2, "dims": [1], "element_bytes": 1, "sharding": "split"}
        for name in ("k", "v")
    ]
    group = plain_group("attention", "target", parts)
    side = {"blocks": 3, "tables": {"attention": [2, 1]}, "absent_roles": []}
    case = {
        "kind": "gqa",
        "fault": "",
        "model": {"name": "small", "total_layers": 0, "groups": [group]},
        "src": side | {"shape": plain_shape(**src)},
        "dst": side | {"shape": plain_shape(**dst)},
        "tokens": 3,
        "skip": 0,
    }
    return cast(CaseDict, case)


def test_random_pairs_agree_with_the_oracle() -> None:
    report = run(pairs=PAIRS, seed=SEED, processes=2)
    told = report.to_dict()
    assert told["mismatches"] == 0, told["details"]
    assert told["pairs"] == PAIRS
    for name in ("non_dividing_tp", "different_order", "unrelated_blocks", "pp_both"):
        assert told["mix"][name] >= 0.3, name
    for name in ("dcp", "kernel_blocks", "overlay", "padding", "skip", "tensors", "role_tp"):
        assert told["mix"][name] > 0.02, name
    assert {f"model_{kind}" for kind in KINDS} <= set(told["mix"])
    assert 0 < told["refused"] < 0.2 * PAIRS


def test_an_interrupt_ends_a_sweep() -> None:
    """Ctrl-C reaches all processes. None of them goes on to the pairs that wait."""
    command = (
        "from kvferry.verify.sweep import run; run(10**5, 1, 2, lambda n: print(n, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as sweeping:
        try:
            assert sweeping.stdout is not None and sweeping.stdout.readline()
            os.killpg(sweeping.pid, signal.SIGINT)
            assert sweeping.wait(60) != 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(sweeping.pid, signal.SIGKILL)


def test_a_case_is_replayed_alone() -> None:
    case = generate(SEED, 7)
    assert case == generate(SEED, 7)
    assert case == json.loads(json.dumps(case))
    assert check(SEED, 7) == check(SEED, 7)


def test_the_oracle_shares_no_code_with_the_product() -> None:
    for name in ("oracle", "generate"):
        module = importlib.import_module(f"kvferry.verify.{name}")
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {
            node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        } | {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        ours = {m for m in imported if m.startswith("kvferry")}
        assert all(m.startswith("kvferry.verify.") for m in ours), (name, ours)


def test_images_are_what_a_person_would_draw() -> None:
    # ids: K is [token, head] = 0..5, V is 6..11; the table is block 2, then block 1
    oracle = Oracle(small_case({"order": "LBNHC"}, {"page_align": 10}))
    assert oracle.errors() == set()
    (source,) = oracle.source(Worker(0, 0))
    token_major = [NOTHING] * 8 + [4, 10, 5, 11] + [NOTHING] * 4 + [0, 6, 1, 7, 2, 8, 3, 9]
    assert source.tolist() == token_major
    (target,) = oracle.target(Worker(0, 0))
    block_1 = [4, 10, GAP, GAP, 5, 11, GAP, GAP, FREE, FREE]  # head by head; one token, one gap
    block_2 = [0, 6, 2, 8, 1, 7, 3, 9, FREE, FREE]
    assert target.tolist() == [NOTHING] * 10 + block_1 + block_2


def test_planes_and_split_images() -> None:
    oracle = Oracle(small_case({"interior": "planes"}, {"interior": "split", "tp": 2}))
    (source,) = oracle.source(Worker(0, 0))
    assert source.tolist()[8:] == [4, -1, 5, -1, 10, -1, 11, -1, 0, 2, 1, 3, 6, 8, 7, 9]
    k, v = oracle.target(Worker(0, 1))  # the second head
    assert k.tolist() == [NOTHING, NOTHING, 5, GAP, 1, 3]
    assert v.tolist() == [NOTHING, NOTHING, 11, GAP, 7, 9]


def lose_one(copies: Copies) -> Copies:
    return Copies(copies.src[1:], copies.dst[1:], copies.length[1:])


def repeat_one(copies: Copies) -> Copies:
    arrays = [np.append(a, a[:1]) for a in (copies.src, copies.dst, copies.length)]
    return Copies(*arrays)


def shorten_one(copies: Copies) -> Copies:
    copies.length[-1] -= 1
    return copies


def misread_one(copies: Copies) -> Copies:
    copies.src[0] += 1
    return copies


def swap_two(copies: Copies) -> Copies:
    copies.dst[[0, -1]] = copies.dst[[-1, 0]]
    return copies


def change_copies(monkeypatch: pytest.MonkeyPatch, corrupt: Corrupt) -> None:
    """Change what the product copies, before it is compared."""
    right = Product.copies
    monkeypatch.setattr(Product, "copies", lambda *args, **named: corrupt(right(*args, **named)))


@pytest.mark.parametrize("corrupt", [lose_one, repeat_one, shorten_one, misread_one, swap_two])
def test_a_wrong_copy_is_noticed(corrupt: Corrupt, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_case({"order": "LBNHC", "tp": 2}, {})
    check_case(case)
    change_copies(monkeypatch, corrupt)
    with pytest.raises(MismatchError, match="bytes"):
        check_case(case)


def test_a_touched_byte_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stray(copies: Copies) -> Copies:
        first = sweep.FIRST_ADDRESS["dst"]  # block 0: nobody's
        return Copies(
            np.append(copies.src, copies.src[0]),
            np.append(copies.dst, first),
            np.append(copies.length, 1),
        )

    change_copies(monkeypatch, stray)
    with pytest.raises(MismatchError, match="must not be"):
        check_case(small_case({}, {}))


def test_a_missing_refusal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in (generate(SEED, i) for i in range(400)) if Oracle(c).lacking())
    assert check_case(case)

    def lenient(*args: Any, **named: Any) -> object:
        return bind(*args, **{**named, "allow_uncacheable": True})

    monkeypatch.setattr(sweep, "bind", lenient)
    with pytest.raises(MismatchError, match="not refused"):
        check_case(case)


def test_an_unexpected_refusal_is_noticed() -> None:
    case = small_case({}, {"interior": "unheard-of"})  # which the oracle does not judge
    with pytest.raises(MismatchError, match="refused with DescriptionError"):
        check_case(case)


def test_a_gap_that_is_not_named_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: Any, **named: Any) -> object:
        told = uncovered(*args, **named)
        return type(told)(told.address[1:], told.length[1:])

    monkeypatch.setattr(sweep, "uncovered", forgetful)
    with pytest.raises(MismatchError, match="uncovered"):
        check_case(small_case({}, {}))
