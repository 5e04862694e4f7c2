"""Random faults while prompts flow: producer and consumer processes, a real carrier, right bytes.

Two producers and two consumers of different shapes, each a process. In every round prompts are
handed over at once, and one fault hits: a process is killed and comes back at its address, or is
stopped, past its deadline or its lease, and goes on; a load is given up; a hold is withdrawn, comes
late, or is claimed with a ticket that is wrong in one of several ways. What must hold, in every
round:

    every load of a consumer that lives is reported once, by its deadline
    every success has the right bytes, when the fault is healed and all others have ended too
    what the fault did not touch succeeds
    at the end, no hold, parked claim, push, grant or kept block is left

Bytes are compared with contents that are derived from positions, without any plan. All rounds use
the same blocks, so that a late write of one would be seen in another. A round's choices depend on
the seed and its number alone: `--seed S --first N --faults 1` plays round N again (the machine's
timing is its own).

`--engines N` does the same to real vLLM engines; see chaos_engines.py.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from kvferry.p2p.load import Loaded
from kvferry.p2p.ticket import Ticket
from p2p_peers import QUIET, Child, Prompt, Spec

LEASE_SECONDS = 3.0
LOAD_SECONDS = 20.0  # where the fault is no reason to be late
SHORT_SECONDS = 0.6  # where it is
SLACK_SECONDS = 20.0  # for a busy machine
PER_ROUND = 4
SRC_BLOCKS, DST_BLOCKS = 100, 100  # of one prompt, at most
MOST_TOKENS = 1500


class Broken(Exception):
    """Something that must never be."""


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
    """The processes, and what came of it all."""

    carrier: str
    modes: tuple[str, str]
    producers: list[Child] = field(default_factory=list)
    consumers: list[Child] = field(default_factory=list)
    lives: Counter[str] = field(default_factory=Counter)
    table: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: Counter[str] = field(default_factory=Counter)

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

    def close(self) -> None:
        for child in (*self.producers, *self.consumers):
            child.kill()
            child.pipe.close()


@dataclass
class Round:
    """One fault and the prompts that fly while it hits."""

    world: World
    number: int
    rng: random.Random
    flights: list[Flight] = field(default_factory=list)
    hit: Flight = field(init=False)
    fault: str = ""

    def run(self) -> None:
        self.fault, act = self.rng.choice(list(FAULTS.items()))
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
            held_back = late and index == 0
            if held_back:
                p.ask("fill", prompt)
            ticket = p.ticket(prompt) if held_back else p.hold(prompt)
            self.flights.append(Flight(prompt, source, target, ticket, f"{self.number}-{index}"))
        self.hit = self.flights[0]
        act(self)
        self._finish()

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
        counts = self.world.table[self.fault]
        if flight.lost:
            counts["lost with its process"] += 1
            return
        assert flight.result is not None
        errors = [one.error for one in flight.result if one.error]
        what = f"{flight.request_id} from p{flight.source} to d{flight.target}"
        if not errors:
            if flight.must_fail:
                raise Broken(f"{what} succeeded, and must not have")
            wrong = self.world.consumers[flight.target].ask("wrong_bytes_of", flight.prompt)
            if wrong:
                raise Broken(f"{what} succeeded with {wrong} wrong bytes")
            counts["good"] += 1
            counts["written"] += flight.result[0].pushed
            return
        if not flight.spoiled:
            raise Broken(f"{what} failed, which the fault does not explain: {errors[0]}")
        counts["failed"] += 1
        self.world.reasons[errors[0].partition(":")[0]] += 1


# --- faults --------------------------------------------------------------------------------------


def kill_producer(r: Round) -> None:
    r.spoil(lambda f: f.source == r.hit.source)
    r.take_off()
    r.a_moment()
    r.world.kill_producer(r.hit.source)


def kill_consumer(r: Round) -> None:
    r.take_off()
    r.a_moment()
    r.world.kill_consumer(r.hit.target)
    for flight in r.flights:
        flight.lost |= flight.target == r.hit.target


def stop_producer(r: Round) -> None:
    """Past the deadline of its loads."""
    r.spoil(lambda f: f.source == r.hit.source, SHORT_SECONDS)
    r.take_off()
    r.a_moment()
    p = r.world.producers[r.hit.source]
    p.signal(signal.SIGSTOP)
    time.sleep(SHORT_SECONDS + 0.3)
    p.signal(signal.SIGCONT)


def stop_producer_shortly(r: Round) -> None:
    r.take_off()
    r.a_moment()
    p = r.world.producers[r.hit.source]
    p.signal(signal.SIGSTOP)
    time.sleep(r.rng.uniform(0.01, 0.2))
    p.signal(signal.SIGCONT)


def stop_consumer(r: Round) -> None:
    r.take_off()
    r.a_moment()
    d = r.world.consumers[r.hit.target]
    d.signal(signal.SIGSTOP)
    time.sleep(r.rng.uniform(0.01, 0.2))
    d.signal(signal.SIGCONT)


def stop_consumer_past_the_lease(r: Round) -> None:
    """Then its sources' blocks are another's: what it moved must not be believed."""
    r.spoil(lambda f: f.target == r.hit.target)
    r.take_off()
    r.a_moment()
    d = r.world.consumers[r.hit.target]
    d.signal(signal.SIGSTOP)
    time.sleep(LEASE_SECONDS + 0.3)
    for flight in r.flights:
        if flight.target == r.hit.target:  # reuse
            reused = replace(flight.prompt, number=flight.prompt.number + 50_000_000)
            r.world.producers[flight.source].ask("fill", reused)
    d.signal(signal.SIGCONT)


def give_up(r: Round) -> None:
    r.hit.spoiled = True
    r.take_off()
    r.a_moment()
    r.world.consumers[r.hit.target].ask("cancel", r.hit.request_id)


def give_all_up(r: Round) -> None:
    r.spoil(lambda f: True)
    r.take_off()
    for flight in r.flights:
        r.a_moment()
        r.world.consumers[flight.target].ask("cancel", flight.request_id)


def withdraw(r: Round) -> None:
    """The producer takes its blocks back, and uses them again at once."""
    r.hit.spoiled = True
    r.take_off()
    r.a_moment()
    p = r.world.producers[r.hit.source]
    p.ask("withdraw", r.hit.ticket.hold_id)
    p.ask("flush")
    p.ask("fill", replace(r.hit.prompt, number=r.hit.prompt.number + 50_000_000))


def late_hold(r: Round) -> None:
    r.take_off()
    r.a_moment()
    r.world.producers[r.hit.source].ask("open", r.hit.prompt)


def hold_that_never_comes(r: Round) -> None:
    r.hit.ticket = replace(r.hit.ticket, hold_id=f"never-{r.number}")
    r.hit.spoiled = r.hit.must_fail = True
    r.hit.seconds = SHORT_SECONDS
    r.take_off()


def another_prompts_ticket(r: Round) -> None:
    """It asks for one prompt with the ticket of another."""
    r.hit.ticket = replace(r.hit.ticket, digest="digest-of-another")
    r.hit.spoiled = r.hit.must_fail = True
    r.take_off()


def more_tokens_than_held(r: Round) -> None:
    tokens = r.hit.prompt.tokens + 1
    r.hit.ticket = replace(r.hit.ticket, tokens=tokens)
    r.hit.prompt = replace(r.hit.prompt, tokens=tokens)
    r.hit.spoiled = r.hit.must_fail = True
    r.take_off()


def ticket_of_an_earlier_life(r: Round) -> None:
    r.hit.ticket = replace(r.hit.ticket, incarnation="life 0")
    r.hit.spoiled = r.hit.must_fail = True
    r.take_off()


def address_of_another_engine(r: Round) -> None:
    other = r.world.producers[1 - r.hit.source]
    r.hit.ticket = replace(r.hit.ticket, port=other.port)
    r.hit.spoiled = True  # unless they have met: then nobody asks at that address
    r.take_off()


def used_ticket(r: Round) -> None:
    d = r.world.consumers[r.hit.target]
    d.ask("load", r.hit.ticket, r.hit.prompt, request_id=f"{r.number}-first")
    r.hit.spoiled = r.hit.must_fail = True
    r.take_off()


FAULTS: dict[str, Callable[[Round], None]] = {
    "producer killed": kill_producer,
    "consumer killed": kill_consumer,
    "producer stopped past deadline": stop_producer,
    "producer stopped": stop_producer_shortly,
    "consumer stopped": stop_consumer,
    "consumer stopped past lease": stop_consumer_past_the_lease,
    "load given up": give_up,
    "all loads given up": give_all_up,
    "hold withdrawn, blocks reused": withdraw,
    "hold comes late": late_hold,
    "hold never comes": hold_that_never_comes,
    "another prompt's ticket": another_prompts_ticket,
    "more tokens than held": more_tokens_than_held,
    "ticket of an earlier life": ticket_of_an_earlier_life,
    "another engine's address": address_of_another_engine,
    "ticket used twice": used_ticket,
}


# --- all of it -----------------------------------------------------------------------------------


def require_nothing_left(world: World) -> None:
    """What could leak is gone when the last lease has run out."""
    until = time.monotonic() + LEASE_SECONDS + SLACK_SECONDS
    kinds = ("holds", "parked", "pushes", "grants", "abandoned", "quarantined")
    while True:
        left = {
            f"{child.spec.engine_id} {kind}": count
            for child in (*world.producers, *world.consumers)
            for kind, count in child.ask("census").items()
            if kind in kinds and count
        }
        if not left:
            return
        if time.monotonic() > until:
            raise Broken(f"at the end there is left: {left}")
        time.sleep(0.1)


def run(faults: int, seed: int, first: int, carrier: str, modes: tuple[str, str]) -> World:
    world = World(carrier, modes)
    world.start()
    begun = time.monotonic()
    number = first
    try:
        for number in range(first, first + faults):
            one = Round(world, number, random.Random(f"{seed}-{number}"))
            one.run()
            world.table[one.fault]["rounds"] += 1
            show(number - first + 1, faults, begun, one.fault)
        require_nothing_left(world)
    except BaseException:
        print(
            f"\nround {number} broke; again: scripts/chaos.py --carrier {carrier} "
            f"--modes {','.join(modes)} --seed {seed} --first {number} --faults 1",
            file=sys.stderr,
        )
        raise
    finally:
        world.close()
    return world


def show(done: int, faults: int, begun: float, fault: str) -> None:
    spent = time.monotonic() - begun
    if sys.stderr.isatty():
        print(f"\r{done}/{faults} faults, {spent:.0f} s  {fault:40}", end="", file=sys.stderr)
    elif done % 25 == 0 or done == faults:
        print(f"{done}/{faults} faults, {spent:.0f} s", file=sys.stderr, flush=True)


def summary(world: World, seconds: float) -> str:
    columns = ("rounds", "good", "written", "failed", "lost with its process")
    lines = [f"{'fault':32}" + "".join(f"{c:>10.10}" for c in columns)]
    total: Counter[str] = Counter()
    for fault, counts in sorted(world.table.items()):
        total.update(counts)
        lines.append(f"{fault:32}" + "".join(f"{counts[c]:>10}" for c in columns))
    lines.append(f"{'all':32}" + "".join(f"{total[c]:>10}" for c in columns))
    reasons = ", ".join(f"{reason} {count}" for reason, count in world.reasons.most_common())
    lines.append(f"failed by: {reasons}")
    lines.append(
        f"{total['good']} successes, all with the right bytes; nothing left; {seconds:.0f} s"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--engines", type=int, default=0, help="faults with real engines, after")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--carrier", default="tcp", choices=["tcp", "local"])
    parser.add_argument("--modes", default="push,pull", help="of the two consumers")
    parser.add_argument("--verbose", action="store_true", help="let the processes log")
    options = parser.parse_args()
    if not options.verbose:
        os.environ[QUIET] = "1"
    first_mode, second_mode = options.modes.split(",")
    if options.faults:
        begun = time.monotonic()
        modes = (first_mode, second_mode)
        world = run(options.faults, options.seed, options.first, options.carrier, modes)
        print(f"\nseed {options.seed}, carrier {options.carrier}, modes {options.modes}")
        print(summary(world, time.monotonic() - begun), flush=True)
    if options.engines:
        from chaos_engines import run_engines

        run_engines(options.engines, options.seed)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Broken as error:
        sys.exit(f"broken: {error}")
