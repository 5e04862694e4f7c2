"""The processes of a chaos run, the prompts that fly between them, and what may not be left."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from chaos.outcome import Broken
from handover_peers import Child, Prompt, Spec
from kvferry.handover.load import Loaded
from kvferry.handover.ticket import Ticket
from kvferry.plan import plan_pair
from waiting import wait_until

LEASE_SECONDS = 5.0  # four loads at once end within it, on a busy machine too
LOAD_SECONDS = 20.0  # where the fault is no reason to be late
SHORT_SECONDS = 0.6  # where it is
SLACK_SECONDS = 20.0  # for a busy machine
PER_ROUND = 4
SRC_BLOCKS, DST_BLOCKS = 100, 100  # of one prompt, at most
MOST_TOKENS = 1500
# What may differ by chance: how many loads met at once, each with connections and threads of a pool
# that keeps them; pages of an allocator. A leak of one a fault is far beyond it.
SPARE = {"threads": 8, "descriptors": 16, "resident MiB": 64}


@dataclass
class Flight:
    """One prompt on its way."""

    prompt: Prompt
    source: int
    target: int
    ticket: Ticket
    request_id: str
    seconds: float = LOAD_SECONDS
    spoiled: bool = False  # whether the fault may make it fail
    must_fail: bool = False
    result: list[Loaded] | None = None
    lost: bool = False  # its consumer died


@dataclass
class World:
    """The processes."""

    carrier: str
    modes: tuple[str, str]
    producers: list[Child] = field(default_factory=list)
    consumers: list[Child] = field(default_factory=list)
    lives: Counter[str] = field(default_factory=Counter)
    usual: dict[str, dict[str, int]] = field(default_factory=dict)  # what each has when all is well

    def producer_spec(self, number: int, port: int = 0) -> Spec:
        shape = ("tp=2,block=16", "pp=2,block=32,order=LBNHC")[number]
        blocks = 2 + SRC_BLOCKS * PER_ROUND
        self.lives[f"p{number}"] += 1
        life = f"life {self.lives[f'p{number}']}"
        return Spec(
            f"p{number}",
            shape,
            carrier=self.carrier,
            blocks=blocks,
            lease_seconds=LEASE_SECONDS,
            port=port,
            incarnation=life,
            slice_descriptors=512,
            idle_seconds=2.0,
        )

    def consumer_spec(self, number: int) -> Spec:
        shape = ("tp=1,block=24", "tp=3,block=16,order=BLHNC")[number]
        self.lives[f"d{number}"] += 1
        return Spec(
            f"d{number}",
            shape,
            carrier=self.carrier,
            blocks=2 + DST_BLOCKS * PER_ROUND,
            incarnation=f"life {self.lives[f'd{number}']}",
            mode=self.modes[number],  # type: ignore[arg-type]
        )

    def start(self) -> None:
        self.producers = [Child.start("producer", self.producer_spec(n)) for n in range(2)]
        self.consumers = [self._consumer(n) for n in range(2)]

    def _consumer(self, number: int) -> Child:
        # what a source's shape decides (which blocks a window needs) is the same for both
        return Child.start("consumer", self.consumer_spec(number), self.producers[0].spec)

    def kill_producer(self, number: int) -> None:
        old = self.producers[number]
        old.kill()
        old.pipe.close()
        self.producers[number] = Child.start("producer", self.producer_spec(number, old.port))

    def kill_consumer(self, number: int) -> None:
        self.consumers[number].kill()
        self.consumers[number].pipe.close()
        self.consumers[number] = self._consumer(number)

    @property
    def children(self) -> list[Child]:
        return [*self.producers, *self.consumers]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.pipe.close()


def take_measure(world: World) -> None:
    """What each process has when everybody has met everybody, before the first fault."""
    _everybody_with_everybody(world, 0)
    for child in world.children:
        world.usual[child.spec.engine_id] = _belongings(child)


def require_nothing_left(world: World) -> None:
    """What could leak is gone when the last lease has run out, whatever each has lived through."""
    until = time.monotonic() + LEASE_SECONDS + SLACK_SECONDS
    _everybody_with_everybody(world, 100)
    while True:
        left = {}
        for child in world.children:
            name, found = child.spec.engine_id, _belongings(child)
            for what, count in found.items():
                if count > world.usual[name][what] + SPARE.get(what, 0):
                    left[f"{name} {what}"] = (world.usual[name][what], count)
        if not left:
            return
        if time.monotonic() > until:
            raise Broken(f"at the end there is more than at the beginning: {left}")
        time.sleep(0.1)


def _belongings(child: Child) -> dict[str, int]:
    counted: dict[str, int] = child.ask("census")
    return {**counted, "resident MiB": child.ask("resident_bytes") >> 20}


def _everybody_with_everybody(world: World, number: int) -> None:
    """As many at once as a round has, so that all threads and connections are there.

    Holds open once all claims wait for them: then all loads run at once, and leases do not run
    while peers meet, which takes long on a busy machine.
    """
    for p in world.producers:
        for d in world.consumers:
            prompts = []
            for slot in range(PER_ROUND):
                number += 1
                first = 1 + slot * SRC_BLOCKS, 1 + slot * DST_BLOCKS
                prompts.append(Prompt(number, MOST_TOKENS, *first))
                p.ask("fill", prompts[-1])
            loads = [d.ask("start", p.ticket(prompt), prompt) for prompt in prompts]
            pair = plan_pair(p.spec.cache_model, p.spec.engine_shape, d.spec.engine_shape)
            claims = len(pair.edges) * PER_ROUND
            wait_until(lambda p=p, claims=claims: p.ask("parked") == claims)  # type: ignore[misc]
            for prompt in prompts:
                p.ask("open", prompt)
            for loaded in d.ask("wait", *loads):
                if loaded[0].error:
                    raise Broken(f"a hand-over without a fault failed: {loaded[0].error}")
            if wrong := d.ask("wrong_bytes_of", *prompts):
                raise Broken(f"a hand-over without a fault has {wrong} wrong bytes")
