# SPDX-License-Identifier: Apache-2.0
"""The pool beside vLLM's OffloadingConnector and beside an engine without a connector.

Each engine gets several prompts of a length, one right after another, so that the saves of one run
while the next is computed. Then the engine's own prefix cache is emptied, and it gets the same
prompts again. Engines take turns, a few prompts each, because a machine is not equally fast all the
time; of the longest prompt, kvferry gets all in a row, and some again later. The cache holds little
more than the longest prompt.
"""

from __future__ import annotations

import shutil
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines.fleet import Answer, Engine, Fleet
from benchmarks.measuring import middle
from benchmarks.report import Report, at_least, at_most
from kvferry.errors import DescriptionError, KvferryError

PLAIN, FERRY, OFFLOAD = "no connector", "kvferry", "OffloadingConnector"
CACHE = 1.17  # of the longest prompt
PROMPTS = (48, 12, 6)  # of each length; the last for all longer ones
MANY = 10  # of the longest prompt, for kvferry
ROOM = 1.08  # of a store, over what is saved
WARM_SECONDS = 10.0
TURN_PROMPTS = 4  # that an engine gets before the next one's turn
RATE = 0.7  # of a pinned copy
SLOWER = 0.03  # prefill with saves
FASTER = {8000: 2.0, 32000: 6.0}  # than computing, by tokens


@dataclass(slots=True)
class Found:
    """Of one engine and one length."""

    fresh: list[Answer] = field(default_factory=list)
    again: list[Answer] = field(default_factory=list)
    hits: list[Answer] = field(default_factory=list)  # in the engine's own cache
    settles: list[float] = field(default_factory=list)  # until no block was kept for a save

    @property
    def prefill(self) -> float:
        return middle([one.first_token for one in self.fresh])

    @property
    def from_pool(self) -> float:
        return middle([one.first_token for one in self.again])

    @property
    def hit(self) -> float:
        return middle([one.first_token for one in self.hits])

    def rate(self, token_bytes: int) -> float:
        """GB/s of loads, from the order to the report."""
        rates = [one.external * token_bytes / one.load / 1e9 for one in self.again if one.load]
        return middle(rates)


def prompts_of(lengths: Sequence[int]) -> dict[int, int]:
    return {length: PROMPTS[min(place, len(PROMPTS) - 1)] for place, length in enumerate(lengths)}


def plan_stores(fleet: Fleet, lengths: Sequence[int], free: float) -> tuple[dict[str, int], int]:
    """Bytes of each store, and how many of the longest prompt kvferry gets: as much as fits."""
    counts, longest = prompts_of(lengths), max(lengths)
    usual = sum(length * count for length, count in counts.items())
    for many in (MANY, 7, counts[longest]):
        tokens = {FERRY: usual + (many - counts[longest]) * longest}
        tokens[OFFLOAD] = counts[longest] * longest  # one length at a time: it keeps the latest
        sizes = {who: int(count * fleet.token_bytes * ROOM) for who, count in tokens.items()}
        if sum(sizes.values()) <= free:
            return sizes, many
    raise DescriptionError(
        f"the pool needs {sum(sizes.values()) / 1e9:.1f} GB of shared memory, and there are "
        f"{free / 1e9:.1f} GB to use: make /dev/shm larger, or take shorter --tokens"
    )


def free_memory(shared: Path) -> float:
    """Bytes that stores may take: of /dev/shm, and of memory, which engines need too."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(one.split()[1]) << 10 for one in lines if one.startswith("MemAvailable"))
    return min(shutil.disk_usage(shared).free * 0.9, available * 0.8)


def embedded(path: Path, size: int) -> dict[str, Any]:
    """kvferry's pool, with a store of its own."""
    return {
        "kv_connector": "FerryPoolConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_connector_extra_config": {
            "path": str(path),
            "size": size,
            "weight_revision": "dummy",
        },
    }


def make_engines(fleet: Fleet, lengths: Sequence[int], report: Report) -> tuple[list[Engine], int]:
    """Engines for `Pool`, not started, and how many of the longest prompt kvferry gets."""
    sizes, many = plan_stores(fleet, lengths, free_memory(fleet.shared))
    stores = ", ".join(f"{who} {size / 1e9:.1f} GB" for who, size in sizes.items())
    report.say(f"stores: {stores}; {many} prompts of {max(lengths):,} tokens in a row")

    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": sizes[OFFLOAD]},
    }
    cache, ferry = int(max(lengths) * CACHE), embedded(fleet.shared / FERRY, sizes[FERRY])
    engines = [
        fleet.engine(PLAIN, cache),
        fleet.engine(FERRY, cache, transfer=ferry),
        fleet.engine(OFFLOAD, cache, transfer=offload),
    ]
    return engines, many


class Pool:
    """Measures engines that are started, and judges at the end."""

    def __init__(
        self, fleet: Fleet, report: Report, lengths: Sequence[int], engines: Sequence[Engine]
    ) -> None:
        self.fleet, self.report, self.lengths = fleet, report, lengths
        self.engines = {one.name: one for one in engines}
        self.found: dict[tuple[str, int], Found] = {}

    def run(self, many: int) -> None:
        """One engine after another. kvferry gets so `many` of the longest prompt in a row."""
        for each in self.engines.values():
            pin_memory(each, min(self.lengths), self.report)
        for each in self.engines.values():
            warm_up(each, min(self.lengths), self.report)
        for length, count in prompts_of(self.lengths).items():
            for turn in range(0, count, TURN_PROMPTS):
                for who in (PLAIN, FERRY, OFFLOAD):
                    few = min(TURN_PROMPTS, count - turn)
                    self._turn(who, length, few, many, first=not turn)
            for who in (PLAIN, FERRY, OFFLOAD):
                if (who, length) in self.found and self.found[who, length].fresh:
                    self._show(who, length)
        self._rates()
        self._judge()

    def _turn(self, who: str, length: int, few: int, many: int, *, first: bool) -> None:
        if (engine := self.engines.get(who)) is None or engine.error:
            return
        one = self.found.setdefault((who, length), Found())
        try:
            if who != FERRY or length != max(self.lengths):
                measure(engine, length, few, one)
            elif first:
                measure(engine, length, many, one)
            else:
                load_again(engine, length, few, one)
        except KvferryError as error:
            self.report.failed("Pool", who, f"{error}")

    def _show(self, who: str, length: int) -> None:
        one, plain = self.found[who, length], self.found.get((PLAIN, length))
        expected = blocks_of(self.fleet, length) * len(one.again)
        self.report.row(
            "Pool",
            {
                "prefill_ms": [x.first_token * 1e3 for x in one.fresh],
                "again_ms": [x.first_token * 1e3 for x in one.again],
                "load_ms": [x.load * 1e3 for x in one.again],
                "external": [x.external for x in one.again],
                "hit_ms": [x.first_token * 1e3 for x in one.hits],
            },
            engine=who,
            tokens=length,
            prompts=len(one.fresh),
            prefill_ms=one.prefill * 1e3,
            slower=f"{one.prefill / plain.prefill - 1:+.1%}" if plain else None,
            saves_end_after_ms=middle(one.settles) * 1e3,
            again_ms=one.from_pool * 1e3 if one.again else None,
            faster=f"{plain.prefill / one.from_pool:.1f} x" if plain and one.again else None,
            found=f"{sum(x.external for x in one.again) / expected:.1%}" if one.again else None,
            load_ms=middle([x.load for x in one.again]) * 1e3 if one.again else None,
            load_GB_s=one.rate(self.fleet.token_bytes) if one.again else None,
            own_hit_ms=one.hit * 1e3,
        )

    def _rates(self) -> None:
        """Loads of the longest prompts, from the order to the report, beside a pinned copy."""
        ferry, longest = self.engines.get(FERRY), max(self.lengths)
        if ferry is None or ferry.error:
            return
        limit, table = ferry.call("pinned"), "Loads, GB/s"
        self.report.row(table, who="pinned copy", load=limit)
        for who in (FERRY, OFFLOAD):
            if (who, longest) in self.found:
                rate = self.found[who, longest].rate(self.fleet.token_bytes)
                self.report.row(table, who=who, load=rate)
                if who == FERRY:
                    bar = "pool: load, of a pinned copy"
                    self.report.judge(at_least(bar, rate / limit, RATE, "{:.0%}"))

    def _judge(self) -> None:
        found, judge = self.found, self.report.judge
        for length in self.lengths:
            plain, ours = found.get((PLAIN, length)), found.get((FERRY, length))
            if plain is None or ours is None or not ours.again:
                continue
            what = f"pool: {length:,} tokens"
            if length in FASTER:
                times = plain.prefill / ours.from_pool
                judge(at_least(f"{what}, faster than computing", times, FASTER[length], "{:.1f} x"))
            theirs = found.get((OFFLOAD, length))
            if theirs is not None and theirs.again:
                first, most = ours.from_pool * 1e3, theirs.from_pool * 1e3
                judge(at_most(f"{what}, first token beside {OFFLOAD}", first, most, "{:.1f} ms"))
            slower = ours.prefill / plain.prefill - 1
            judge(at_most(f"{what}, prefill with saves", slower, SLOWER, "{:+.1%}"))
            least, whole = min(one.external for one in ours.again), blocks_of(self.fleet, length)
            longest = length == max(self.lengths)
            row = len(ours.fresh) if longest else min(TURN_PROMPTS, len(ours.fresh))
            bar = f"{what}, {len(ours.fresh)} prompts, {row} in a row, found of each"
            judge(at_least(bar, least, whole, "{:,} tokens"))


def pin_memory(engine: Engine, length: int, report: Report) -> None:
    """Wait until a pool's memory is pinned: that begins with the first request, and the driver does
    little else meanwhile, for any engine. vLLM's connector does it while it starts."""
    if not engine.error:
        engine.ask(0, length)
        if (seconds := engine.call("ready_memory")) > 0.1:
            report.say(f"{engine.name}: its memory was pinned {seconds:.1f} s later")


def warm_up(engine: Engine, length: int, report: Report) -> None:
    """Until its connector finds what it has saved: a pool's first records take a moment."""
    began = time.monotonic()
    while True:
        engine.ask(0, length)
        engine.call("reset")
        if not engine.connector or engine.ask(0, length).external:
            return
        if time.monotonic() > began + WARM_SECONDS:
            report.say(f"{engine.name}: nothing was found again in {WARM_SECONDS:.0f} s")
            return
        engine.call("reset")
        time.sleep(0.1)


def measure(engine: Engine, length: int, count: int, found: Found) -> None:
    seeds = seeds_of(engine, length, len(found.fresh), count)
    found.fresh += [engine.ask(seed, length) for seed in seeds]
    settled = engine.call("reset")
    found.settles.append(settled["seconds"])
    if not settled["ok"]:
        raise KvferryError(f"saves of {length} tokens were not over in {settled['seconds']:.0f} s")
    if engine.connector:
        found.again += [engine.ask(seed, length) for seed in seeds]
    else:
        engine.ask(seeds[-1], length)
    found.hits += [engine.ask(seeds[-1], length) for _ in range(3)]
    engine.call("reset")


def load_again(engine: Engine, length: int, last: int, found: Found) -> None:
    """The prompts that were computed last, which every store still has."""
    seeds = seeds_of(engine, length, len(found.fresh) - last, last)
    found.again += [engine.ask(seed, length) for seed in seeds]
    engine.call("reset")


def seeds_of(engine: Engine, length: int, first: int, count: int) -> list[int]:
    return [
        zlib.crc32(f"{engine.name} {length} {number}".encode())
        for number in range(first, first + count)
    ]


def blocks_of(fleet: Fleet, length: int) -> int:
    """Tokens of a prompt in whole blocks; the last token is always computed."""
    return (length - 1) // fleet.block * fleet.block
