"""What happens to peers while prompts fly, each fault one function of its round."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace

from chaos.round import Round
from chaos.world import LEASE_SECONDS, SHORT_SECONDS
from handover_peers import Child
from waiting import wait_until


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
    _stop(r, r.world.producers[r.hit.source], SHORT_SECONDS + 0.3)


def stop_producer_shortly(r: Round) -> None:
    _stop(r, r.world.producers[r.hit.source])


def stop_consumer(r: Round) -> None:
    _stop(r, r.world.consumers[r.hit.target])


def _stop(r: Round, child: Child, seconds: float = 0.0) -> None:
    """For a moment, or for so long."""
    r.take_off()
    r.a_moment()
    child.signal(signal.SIGSTOP)
    time.sleep(seconds or r.rng.uniform(0.01, 0.2))
    child.signal(signal.SIGCONT)


def stop_consumer_past_the_lease(r: Round) -> None:
    """Then its sources' blocks are another's: what it moved must not be believed."""
    r.spoil(lambda f: f.target == r.hit.target)
    r.take_off()
    r.a_moment()
    d = r.world.consumers[r.hit.target]
    d.signal(signal.SIGSTOP)
    time.sleep(LEASE_SECONDS)
    for p in r.world.producers:  # blocks are reused when no rank holds them any more, not earlier
        wait_until(lambda: p.ask("open_holds") == 0)  # noqa: B023
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
