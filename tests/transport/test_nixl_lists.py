"""Slots' numbers, for batches that NIXL makes by index: against a search through all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.carriers import MemoryRegion
from kvferry.carriers.base import RegionTable
from kvferry.carriers.library.nixl import MOST_LISTS, MOST_SLOTS, Numbered, SlotLists


class Agent:
    """Keeps what it was asked to prepare."""

    def __init__(self) -> None:
        self.prepared: list[tuple[Any, NDArray[np.uint64], str]] = []

    def prep_xfer_dlist(self, whose: Any, ranges: NDArray[np.uint64], kind: str) -> Any:
        if whose == "nobody":
            raise ValueError("no such agent")
        self.prepared.append((whose, ranges, kind))
        return len(self.prepared)


def spelt_out(ranges: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Address and length of every descriptor, as NIXL numbers those of a strided list."""
    return [
        (int(address) + n * int(stride), int(length))
        for address, length, _, stride, count in ranges
        for n in range(int(count))
    ]


@pytest.mark.parametrize("length", [1, 48, 64, 100, 1000])
@pytest.mark.parametrize("regions", [1, 5])
def test_numbers_are_those_of_the_prepared_list(length: int, regions: int) -> None:
    """Every byte of the regions and around them as an address."""
    rng = np.random.default_rng(length)
    where = [(10_000 * n + int(rng.integers(0, 99)), 64 * n + 1000) for n in range(1, regions + 1)]
    table = RegionTable.of([MemoryRegion(a, n) for a, n in where])
    agent = Agent()
    slots = SlotLists("them", "DRAM", 0).get(agent, table, length)
    assert slots is not None
    ((_, ranges, _),) = agent.prepared
    every = spelt_out(ranges)
    assert all(n == length for _, n in every)
    number_of = {address: number for number, (address, _) in enumerate(every)}
    inside = np.array(list(number_of), dtype=np.int64)
    for some in (inside, inside[::-1], rng.permutation(inside), inside[:1]):
        found = slots.numbers(some)
        assert found is not None and found.dtype == np.int32
        assert found.tolist() == [number_of[int(address)] for address in some]
    for address in range(where[0][0] - 5, where[-1][0] + where[-1][1] + 5):
        if address not in number_of:
            assert slots.numbers(np.array([address])) is None
            assert slots.numbers(np.append(inside, address)) is None


def test_batches_keep_their_numbers() -> None:
    table = RegionTable.of([MemoryRegion(0, 64 * 100)])
    slots = SlotLists("them", "DRAM", 0).get(Agent(), table, 64)
    assert slots is not None
    at = np.random.default_rng(1).permutation(100) * 64
    mine, theirs = slots.numbers(at), slots.numbers(at[::-1])
    assert mine is not None and theirs is not None
    whole = Numbered(at, at[::-1], np.full(100, 64), slots, slots, mine, theirs)
    few = [whole[first : first + 30] for first in range(0, 100, 30)]
    assert [len(batch) for batch in few] == [30, 30, 30, 10]
    for batch in few:
        assert isinstance(batch, Numbered)
        assert (batch.mine * 64 == batch.src).all() and (batch.theirs * 64 == batch.dst).all()


def test_what_cannot_be_numbered_has_no_list() -> None:
    agent = Agent()
    small, huge = (RegionTable.of([MemoryRegion(4096, n)]) for n in (63, MOST_SLOTS))
    assert SlotLists("them", "DRAM", 0).get(agent, small, 64) is None
    assert SlotLists("them", "DRAM", 0).get(agent, huge, 1) is None
    assert SlotLists("nobody", "DRAM", 0).get(agent, huge, 64) is None  # NIXL refuses
    assert agent.prepared == []


def test_lists_are_made_once_and_do_not_outlive_their_regions() -> None:
    agent, lists = Agent(), SlotLists("them", "VRAM", 3)
    table, other = (RegionTable.of([MemoryRegion(4096, n)]) for n in (8192, 16384))
    first = lists.get(agent, table, 64)
    assert first is not None and first is lists.get(agent, table, 64) and lists.has(first)
    ((whose, ranges, kind),) = agent.prepared
    assert (whose, kind, ranges.tolist()) == ("them", "VRAM", [[4096, 64, 3, 64, 128]])
    second = lists.get(agent, other, 64)
    assert second is not first and lists.has(second or first) and not lists.has(first)
    for length in range(1, MOST_LISTS):  # the oldest goes
        lists.get(agent, other, length)
    assert second is not None and lists.has(second)
    lists.get(agent, other, 200)
    assert not lists.has(second)
    lists.clear()
    assert lists.get(agent, other, 200) is not None and len(agent.prepared) == MOST_LISTS + 3
