"""Random interleavings of all that can happen to a hold, with several ranks and engines.

One producer of two ranks, and two consumers of different shapes. A rank's blocks are overwritten as
soon as it has reported their hold, so a load that believes a closed hold has wrong bytes. A slot of
a consumer is watched from the report of its load on: no byte may arrive there. Transfers are cut
into small slices with pauses between them, so most events hit in the middle of one. `SEEDS=100`
plays more games, `SEED=7` one of them.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from handover_peers import Consumer, Producer, Prompt, Spec, WrappedCarrier
from kvferry.demo.cache import CANARY
from kvferry.handover import load as load_module
from kvferry.handover import push as push_module
from kvferry.handover.load import Loaded
from kvferry.handover.ticket import Ticket
from seeds import SEEDS
from waiting import soon, wait_until

STEPS = 100
LEASES_SECONDS = (0.3, 1.0, 3.0)
SLOTS, SLOT_BLOCKS, MOST_TOKENS = 5, 45, 700
REUSED = 50_000_000  # added to the number of a prompt that overwrites another


class HesitantCarrier(WrappedCarrier):
    """A carrier whose transfers take a moment longer, by chance."""

    def __init__(self, carrier: Any, seed: int) -> None:
        super().__init__(carrier)
        self._rng = random.Random(seed)

    def read(self, peer: Any, copies: Any) -> Any:
        time.sleep(self._rng.choice((0, 0, 0.001, 0.01)))
        return self._carrier.read(peer, copies)

    def write_granted(self, peer: Any, copies: Any, grant: bytes) -> Any:
        time.sleep(self._rng.choice((0, 0, 0.001, 0.01)))
        return self._carrier.write_granted(peer, copies, grant)


def hesitant(consumer: Consumer, seed: int) -> Consumer:
    for number in range(len(consumer.ranks)):
        peers = consumer.known(number)
        peers.carriers = [HesitantCarrier(carrier, seed) for carrier in peers.carriers]
    return consumer


@dataclass(eq=False)
class Held:
    """A prompt that the producer holds, or will hold."""

    prompt: Prompt
    ticket: Ticket
    slot: int
    unopened: list[int]  # ranks that have not opened it yet
    closed: set[int] = field(default_factory=set)  # ranks that have reported it


@dataclass(eq=False)
class Flight:
    held: Held
    prompt: Prompt  # at its place on the consumer
    consumer: int
    slot: int


class Game:
    def __init__(self, seed: int, producer: Producer, consumers: list[Consumer]) -> None:
        self.rng = random.Random(seed)
        self.producer, self.consumers = producer, consumers
        self.held: dict[str, Held] = {}  # by request id
        self.flights: dict[str, Flight] = {}
        self.sources = list(range(SLOTS))  # free slots
        self.targets = [list(range(SLOTS)) for _ in consumers]
        self.numbers = iter(range(1, 1_000_000))
        self.life = 0
        self.counts: Counter[str] = Counter()  # how holds and loads ended

    def play(self) -> None:
        acts = (
            (self.prefill, 8),
            (self.open_one_rank, 12),
            (self.load, 14),
            (self.cancel, 2),
            (self.release, 1),
            (self.withdraw, 1),
            (self.stall, 0.5),
            (self.reset, 0.3),
            (self.restart, 0.3),
        )
        for _ in range(STEPS):
            act = self.rng.choices([a for a, _ in acts], [w for _, w in acts])[0]
            act()
            self.look()
            time.sleep(self.rng.choice((0, 0, 0.001, 0.01, 0.03)))
        for held in list(self.held.values()):
            while held.unopened:
                self.open_rank(held)
        deadline = soon()
        while (self.flights or self.held) and time.monotonic() < deadline:
            self.look()
            time.sleep(0.005)
        assert not self.flights and not self.held, "a load or a hold was never reported"

    def prefill(self) -> None:
        if self.sources:
            slot = self.sources.pop(self.rng.randrange(len(self.sources)))
            prompt = Prompt(
                next(self.numbers), self.rng.randint(1, MOST_TOKENS), 1 + slot * SLOT_BLOCKS
            )
            self.producer.fill(prompt)
            ranks = list(range(len(self.producer.ranks)))
            self.rng.shuffle(ranks)
            ticket = self.producer.ticket(prompt)
            self.held[ticket.request_id] = Held(prompt, ticket, slot, ranks)

    def open_one_rank(self) -> None:
        if waiting := [held for held in self.held.values() if held.unopened]:
            self.open_rank(self.rng.choice(waiting))

    def open_rank(self, held: Held) -> None:
        self.producer.open(held.prompt, ranks=[held.unopened.pop()])

    def load(self) -> None:
        consumer = self.rng.randrange(len(self.consumers))
        free = self.targets[consumer]
        if not free or not self.held:
            return
        held, slot = self.rng.choice(list(self.held.values())), free.pop(0)
        self.require_untouched(consumer, slot)
        prompt = replace(held.prompt, dst_first=1 + slot * SLOT_BLOCKS)
        request_id = f"load-{next(self.numbers)}"
        self.flights[request_id] = Flight(held, prompt, consumer, slot)
        self.consumers[consumer].start(
            held.ticket,
            prompt,
            seconds=self.rng.choice((0.05, 1.0, 5.0)),
            keep_open=self.rng.random() < 0.3,
            request_id=request_id,
            fails="the device failed" if self.rng.random() < 0.03 else "",
        )

    def cancel(self) -> None:
        if self.flights:
            request_id, flight = self.rng.choice(list(self.flights.items()))
            self.consumers[flight.consumer].cancel(request_id)

    def release(self) -> None:
        if self.held:
            held = self.rng.choice(list(self.held.values()))
            self.rng.choice(self.consumers).release(held.ticket)

    def withdraw(self) -> None:
        """By some ranks or by all; a hold that has not come yet is withdrawn too."""
        if self.held:
            held = self.rng.choice(list(self.held.values()))
            for rank in self.producer.ranks:
                if self.rng.random() < 0.7:
                    rank.withdraw(held.ticket.hold_id)

    def stall(self) -> None:
        """A rank's thread that answers, or that hears answers, stands still for a while."""
        loading = [rank._caller for consumer in self.consumers for rank in consumer.ranks]
        seconds = self.rng.choice((0.05, 0.5, 1.0))
        self.rng.choice([*self.producer.ranks, *loading]).submit(lambda: time.sleep(seconds))

    def reset(self) -> None:
        self.life += 1
        now, producer = f"life {self.life}", self.producer
        producer.spec = replace(producer.spec, incarnation=now)
        producer.engine = msgspec.structs.replace(producer.engine, incarnation=now)
        producer.infos = [msgspec.structs.replace(i, incarnation=now) for i in producer.infos]
        for rank in producer.ranks:
            rank.reset(now)
        producer.tell()

    def restart(self) -> None:
        """A consumer ends in the middle of its loads, and comes back. Nothing is said of them."""
        number = self.rng.randrange(len(self.consumers))
        old = self.consumers[number]
        old.close()
        self.life += 1
        spec = replace(old.spec, incarnation=f"life {self.life}")
        self.consumers[number] = hesitant(Consumer(spec, old.source), self.life)
        self.flights = {r: one for r, one in self.flights.items() if one.consumer != number}
        self.targets[number] = list(range(SLOTS))
        self.counts["restarts"] += 1

    def look(self) -> None:
        for number, reports in enumerate(self.producer.closed()):
            for closed in reports:
                held = self.held[closed.request_id]
                assert number not in held.closed, f"{closed} was reported twice"
                held.closed.add(number)
                self.counts[closed.why] += 1
                reused = replace(held.prompt, number=held.prompt.number + REUSED)
                self.producer.racks[number].fill(reused)
                if len(held.closed) == len(self.producer.ranks):
                    del self.held[closed.request_id]
                    self.sources.append(held.slot)
        for number, consumer in enumerate(self.consumers):
            for request_id, reports in consumer.finished().items():
                flight = self.flights.pop(request_id)
                assert flight.consumer == number
                self.judge(consumer, flight, reports)
                for rack in consumer.racks:
                    for view in rack.views:
                        view.write(blocks_of(flight.slot), CANARY)
                self.targets[number].append(flight.slot)

    def judge(self, consumer: Consumer, flight: Flight, reports: list[Loaded]) -> None:
        for rack, loaded in zip(consumer.racks, reports, strict=True):
            self.counts[loaded.kind or "good"] += 1
            if loaded.ok:
                wrong = rack.wrong_bytes([flight.prompt], consumer.source, -1)
                assert not wrong, f"{loaded} has {wrong} wrong bytes"
                self.counts["written"] += loaded.pushed
            else:
                assert loaded.kind != "internal error", loaded.error

    def require_untouched(self, consumer: int, slot: int) -> None:
        """No byte arrives in a slot after its load was reported."""
        views = [view for rack in self.consumers[consumer].racks for view in rack.views]
        assert not sum(view.wrong(blocks_of(slot), CANARY) for view in views)

    def require_nothing_left(self) -> None:
        for consumer in range(len(self.consumers)):
            for slot in range(SLOTS):
                self.require_untouched(consumer, slot)

        def left() -> dict[str, int]:
            found: Counter[str] = Counter()
            for rank in self.producer.ranks:
                table = rank._table
                found["parked claims"] += table.parked
                found["parked bytes"] += table._parked_budget.used_bytes
                found["early words"] += len(table._early)
                found["internal errors"] += rank.counters["internal errors"]
            found["writes"] = sum(self.producer.pushes())
            for consumer in self.consumers:
                for number, rack in enumerate(consumer.racks):
                    engines = consumer.known(number).engines.values()
                    found["loads of engines"] += sum(engine.users for engine in engines)
                    if rack.spec.carrier == "tcp":
                        found["grants"] += len(rack.carrier.server.grants)
                found["abandoned"] += consumer.counts()["abandoned"]
            return {what: count for what, count in found.items() if count}

        wait_until(lambda: not left(), what=lambda: f"{left()} left")


def blocks_of(slot: int) -> NDArray[np.int64]:
    return np.arange(SLOT_BLOCKS) + 1 + slot * SLOT_BLOCKS


@pytest.mark.parametrize("carrier", ["local", "tcp"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_interleavings(seed: int, carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "SLICE_DESCRIPTORS", 128)
    monkeypatch.setattr(push_module, "SLICE_DESCRIPTORS", 128)
    blocks = 2 + SLOTS * SLOT_BLOCKS
    shapes = random.Random(seed)
    model = shapes.choice(("gqa", "gqa", "window", "mla", "mamba2"))
    common = {"carrier": carrier, "blocks": blocks, "model": model}
    p = Spec(
        "p",
        shapes.choice(("tp=2,block=16", "pp=2,block=32,order=LBNHC")),
        lease_seconds=shapes.choice(LEASES_SECONDS),
        **common,
    )
    specs = [
        Spec(
            f"d{number}",
            shapes.choice(("tp=1,block=24", "tp=2,block=16", "tp=3,block=16,order=BLHNC")),
            mode="push" if shapes.random() < 0.5 and carrier == "tcp" else "pull",
            checksums=shapes.random() < 0.3,
            **common,
        )
        for number in range(2)
    ]
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        producer = Producer(p)
        stack.callback(producer.close)
        producer.wrap_carriers(lambda c: HesitantCarrier(c, seed))
        if shapes.random() < 0.3:  # a load may be written by one rank, and read from the other
            producer.ranks[1]._pusher = None
        game = Game(seed, producer, [hesitant(Consumer(spec, p), seed) for spec in specs])
        for number in range(len(specs)):
            stack.callback(lambda n=number: game.consumers[n].close())
        game.play()
        game.require_nothing_left()

    def threads_left() -> list[str]:
        new = [thread.name for thread in threading.enumerate() if thread not in before]
        return [name for name in new if "kvferry" in name and "kvferry-names" not in name]

    wait_until(lambda: not threads_left(), what=lambda: f"{threads_left()} left")
