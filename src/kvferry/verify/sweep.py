"""The sweep: many random pairs, each planned, executed, and compared byte by byte.

A pair passes when every byte that the destination needs holds exactly what the oracle says and was
written once, nothing else was touched but padding, and `uncovered` names exactly the rest of the
loaded blocks; or when it was refused and the oracle says that it had to be.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np

from kvferry.errors import BindError, KvferryError
from kvferry.layout import Rank
from kvferry.plan import Copies
from kvferry.verify.case import CaseDict
from kvferry.verify.engine import Worker
from kvferry.verify.execute import AddressSpace, MismatchError, Product
from kvferry.verify.generate import generate
from kvferry.verify.mix import features
from kvferry.verify.oracle import FREE, GAP, NOTHING, Oracle

CHUNK = 40  # pairs a process takes at a time
MOST_DETAILS = 20  # mismatches that a report tells in full
THOROUGH_EVERY = 4  # every so many pairs, slices and strided batches are compared too

Corrupt = Callable[[Copies], Copies]


@dataclass
class Result:
    """What came of one pair."""

    index: int
    mismatch: str = ""  # what was wrong; "" when the product and the oracle agree
    refused: bool = False  # rightly
    features: tuple[str, ...] = ()


@dataclass
class Report:
    """What came of a sweep. `mix` is the share of pairs with each feature."""

    seed: int
    pairs: int = 0
    mismatches: int = 0
    refused: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    details: list[dict[str, Any]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.pairs += 1
        self.refused += result.refused
        self.counts.update(result.features)
        if result.mismatch:
            self.mismatches += 1
            self.details.append({"index": result.index, "what": result.mismatch})

    @property
    def mix(self) -> dict[str, float]:
        return {name: round(n / self.pairs, 4) for name, n in sorted(self.counts.items())}

    def to_dict(self) -> dict[str, Any]:
        """With stable keys, for JSON."""
        details = sorted(self.details, key=lambda d: int(d["index"]))
        return {
            "pairs": self.pairs,
            "mismatches": self.mismatches,
            "refused": self.refused,
            "mix": self.mix,
            "seconds": round(self.seconds, 2),
            "seed": self.seed,
            "details": details[:MOST_DETAILS],
        }


def run(
    pairs: int,
    seed: int,
    processes: int = 2,
    progress: Callable[[int, int], None] | None = None,
    first: int = 0,
) -> Report:
    """Check `pairs` pairs from number `first` on; `progress` is told how many of them are done."""
    began = time.perf_counter()
    report = Report(seed)

    def take(results: Iterable[Result]) -> None:
        for result in results:
            report.add(result)
        if progress is not None:
            progress(report.pairs, pairs)

    chunks = [
        range(start, min(start + CHUNK, first + pairs))
        for start in range(first, first + pairs, CHUNK)
    ]
    if processes <= 1:
        for chunk in chunks:
            take(_check_all(seed, chunk))
    else:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            for future in as_completed([pool.submit(_check_all, seed, c) for c in chunks]):
                take(future.result())
    report.seconds = time.perf_counter() - began
    return report


def _check_all(seed: int, indices: range) -> list[Result]:
    return [check(seed, index) for index in indices]


def check(seed: int, index: int) -> Result:
    """Check one pair of a seed; the same pair each time."""
    case = generate(seed, index)
    result = Result(index, features=features(case))
    try:
        result.refused = check_case(case, thorough=index % THOROUGH_EVERY == 0)
    except MismatchError as wrong:
        result.mismatch = str(wrong)
    except Exception:  # a crash of the product is a finding like any other
        result.mismatch = traceback.format_exc(limit=-3)
    return result


def check_case(case: CaseDict, thorough: bool = True, corrupt: Corrupt | None = None) -> bool:
    """Whether the case was refused, rightly. Anything that is not as it must be is raised.

    `corrupt` may change the copies before they run, to see that it is noticed.
    """
    oracle = Oracle(case)
    expected = oracle.errors()
    try:
        product = Product(case, thorough)
        if expected and not expected & {"BindError"}:
            raise MismatchError(f"must be refused with {sorted(expected)}, but was planned")
        lacking = oracle.lacking()
        if lacking and not expected:
            _require_refusals(product, lacking)
        copies = product.copies(allow_uncacheable=bool(lacking))
    except KvferryError as error:
        if type(error).__name__ in expected:
            return True
        raise MismatchError(
            f"refused with {type(error).__name__}: {error}; expected {sorted(expected)}"
        ) from error
    if expected:
        raise MismatchError(f"must be refused with {sorted(expected)}, but was bound")
    _compare(product, oracle, copies if corrupt is None else corrupt(copies))
    return bool(lacking)


def _require_refusals(product: Product, lacking: set[str]) -> None:
    """Exactly the edges with a group whose first block lacks its head refuse to be bound."""
    for plan in product.plans:
        refused = False
        try:
            product.bind(plan, allow_uncacheable=False)
        except BindError:
            refused = True
        if refused != bool(lacking & set(plan.groups)):
            raise MismatchError(
                f"edge {plan.src} -> {plan.dst} was {'' if refused else 'not '}refused, though the "
                f"groups that lack the head of a block are {sorted(lacking)}"
            )


def _compare(product: Product, oracle: Oracle, copies: Copies) -> None:
    source = product.src.fill({r: oracle.source(Worker(*r)) for r in product.src.layouts}, NOTHING)
    target = product.dst.fill({r: oracle.target(Worker(*r)) for r in product.dst.layouts}, NOTHING)
    reads = product.src.bytes_of(copies.src, copies.length)
    writes = product.dst.bytes_of(copies.dst, copies.length)
    arrived = np.full(len(target), NOTHING, dtype=np.int32)
    arrived[writes] = source[reads]
    times = np.bincount(writes, minlength=len(target))
    needed = target >= 0
    _require("hold something else than they must", needed & (arrived != target), product.dst)
    _require("are not written exactly once", needed & (times != 1), product.dst)
    _require("are written but must not be", ~needed & (target != FREE) & (times > 0), product.dst)
    _compare_uncovered(product, oracle, target == GAP, target == FREE)


def _compare_uncovered(product: Product, oracle: Oracle, gap: Any, free: Any) -> None:
    allow = bool(oracle.lacking())
    named = np.zeros(len(gap), dtype=np.int64)
    for rank in product.dst.layouts:
        told = product.uncovered(rank, allow)
        if product.dst.stray(told.address, told.length, rank) is not None:
            raise MismatchError(f"rank {tuple(rank)}: an uncovered range is outside a region")
        np.add.at(named, product.dst.bytes_of(told.address, told.length), 1)
        for name in {g.name for g in product.pair.model.groups}:
            _require_blocks(product, oracle, rank, name, told.uncacheable)
    _require("are not named uncovered exactly once", gap & (named != 1), product.dst)
    _require("are wrongly named uncovered", ~gap & ~free & (named > 0), product.dst)


def _require_blocks(
    product: Product, oracle: Oracle, rank: Rank, group: str, told: dict[str, Any]
) -> None:
    layout = product.dst.layouts[rank]
    expected = oracle.uncacheable(group) if layout.parts_of(group) else set()
    parts = layout.parts_of(group)
    if parts and parts[0].is_opaque:
        return  # the group moves whole pages, of which none is named
    found = set(range(*told[group])) if group in told else set()
    if found != expected:
        raise MismatchError(
            f"rank {tuple(rank)}, group {group!r}: blocks {sorted(found)} are named uncacheable, "
            f"expected {sorted(expected)}"
        )


def _require(what: str, wrong: Any, memory: AddressSpace) -> None:
    """Refuse a mask of bytes with anything in it, naming the first place."""
    places = np.flatnonzero(wrong)
    if len(places) == 0:
        return
    address = memory.first + int(places[0])
    region = int(np.searchsorted(memory.starts, address, side="right")) - 1
    raise MismatchError(
        f"{len(places)} bytes {what}; the first is byte {address - int(memory.starts[region])} of "
        f"a region of rank {tuple(memory.owners[region])}"
    )
