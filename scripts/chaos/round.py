"""One round: prompts take off, a fault hits, every load is reported once and has its bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chaos.outcome import Broken, Outcomes
from chaos.world import (
    DST_BLOCKS,
    MOST_TOKENS,
    PER_ROUND,
    SLACK_SECONDS,
    SRC_BLOCKS,
    Flight,
    World,
)
from handover_peers import Prompt


@dataclass
class Round:
    """One fault and the prompts that fly while it hits."""

    world: World
    outcomes: Outcomes
    number: int
    rng: random.Random
    faults: Mapping[str, Callable[[Round], None]]
    flights: list[Flight] = field(default_factory=list)
    hit: Flight = field(init=False)
    fault: str = ""

    def run(self) -> None:
        self.fault, act = self.rng.choice(list(self.faults.items()))
        late = self.fault == "hold comes late"
        for index in range(PER_ROUND):
            prompt = Prompt(
                100_000 + self.number * PER_ROUND + index,
                self.rng.randint(1, MOST_TOKENS),
                src_first=1 + index * SRC_BLOCKS,
                dst_first=1 + index * DST_BLOCKS,
            )
            source, target = self.rng.randrange(2), self.rng.randrange(2)
            p = self.world.producers[source]
            p.ask("fill", prompt)
            ticket = p.ticket(prompt)
            self.flights.append(Flight(prompt, source, target, ticket, f"{self.number}-{index}"))
        for flight in self.flights[late:]:  # one after the other at once: leases are short
            self.world.producers[flight.source].ask("open", flight.prompt)
        self.hit = self.flights[0]
        act(self)
        self._finish()
        self.outcomes.count(self.fault, "rounds")

    # What faults are made of

    def take_off(self) -> None:
        for flight in self.flights:
            self.world.consumers[flight.target].ask(
                "start",
                flight.ticket,
                flight.prompt,
                seconds=flight.seconds,
                request_id=flight.request_id,
            )

    def a_moment(self) -> None:
        time.sleep(self.rng.choice((0.0, 0.001, 0.003, 0.01, 0.03)))

    def spoil(self, wanted: Callable[[Flight], bool], seconds: float | None = None) -> None:
        for flight in self.flights:
            if wanted(flight):
                flight.spoiled = True
                flight.seconds = seconds or flight.seconds

    def _finish(self) -> None:
        """Wait for every report, and look at the bytes of what was good."""
        until = time.monotonic() + max(f.seconds for f in self.flights) + SLACK_SECONDS
        while any(f.result is None and not f.lost for f in self.flights):
            for number, d in enumerate(self.world.consumers):
                mine = {f.request_id: f for f in self.flights if f.target == number}
                for request_id, loaded in d.ask("finished").items():
                    if request_id not in mine or mine[request_id].result is not None:
                        raise Broken(f"load {request_id} was reported again, or by another")
                    mine[request_id].result = loaded
            if time.monotonic() > until:
                missing = [f.request_id for f in self.flights if f.result is None]
                raise Broken(f"loads {missing} were not reported in time")
            time.sleep(0.002)
        for flight in self.flights:
            self._judge(flight)

    def _judge(self, flight: Flight) -> None:
        if flight.lost:
            self.outcomes.count(self.fault, "lost with it")
            return
        assert flight.result is not None
        failed = [one for one in flight.result if one.error]
        what = f"{flight.request_id} from p{flight.source} to d{flight.target}"
        if not failed:
            if flight.must_fail:
                raise Broken(f"{what} succeeded, and must not have")
            wrong = self.world.consumers[flight.target].ask("wrong_bytes_of", flight.prompt)
            if wrong:
                raise Broken(f"{what} succeeded with {wrong} wrong bytes")
            self.outcomes.count(self.fault, "good", *["written"] * flight.result[0].pushed)
            return
        if not flight.spoiled:
            raise Broken(f"{what} failed, which the fault does not explain: {failed[0].error}")
        self.outcomes.count(self.fault, "failed")
        self.outcomes.reasons[failed[0].kind] += 1
