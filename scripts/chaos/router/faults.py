"""What happens to engines, clients and the router while requests fly; each fault one function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from chaos.router.clients import Asked, Manner
from chaos.router.world import LIMITS, EngineProcess, World

USUAL: tuple[Manner, ...] = ("plain", "stream", "stream")
_RUSH = 80  # more than the router has places
_PAST_DEADLINES_SECONDS = LIMITS["first_byte_seconds"] + 0.5


@dataclass(slots=True)
class Round:
    world: World
    rng: Random
    number: int
    hit: EngineProcess  # the engine that the fault is about
    requests: int = 6
    manners: tuple[Manner, ...] = USUAL

    def asked(self) -> list[Asked]:
        """The requests of this round."""
        return [
            Asked.random(self.rng, f"c{self.number}-{i}", self.rng.choice(self.manners))
            for i in range(self.requests)
        ]

    async def a_moment(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.02, 0.3))


async def killed(r: Round) -> None:
    await r.a_moment()
    r.hit.kill()


async def restarted(r: Round) -> None:
    """With an empty cache, and events that begin again."""
    await r.a_moment()
    r.hit.kill()
    await r.hit.start()


async def all_decoders_killed(r: Round) -> None:
    await r.a_moment()
    for engine in r.world.of_role("decode"):
        engine.kill()
    await r.a_moment()
    for engine in r.world.of_role("decode"):
        await engine.start()


async def all_prefillers_killed(r: Round) -> None:
    for engine in r.world.of_role("prefill"):
        engine.kill()
    await r.a_moment()


async def stopped(r: Round) -> None:
    await r.a_moment()
    r.hit.stop()
    await r.a_moment()
    r.hit.go_on()


async def stopped_past_deadlines(r: Round) -> None:
    await r.a_moment()
    r.hit.stop()
    await asyncio.sleep(_PAST_DEADLINES_SECONDS)
    r.hit.go_on()


async def drained(r: Round) -> None:
    await r.a_moment()
    await r.world.admin("PATCH", r.hit, {"draining": "remove"})
    await r.a_moment()


async def removed(r: Round) -> None:
    """At once, while requests run there, and some on their way; it comes back as a new engine."""
    r.hit = r.rng.choice(r.world.of_role("decode"))
    for engine in r.world.of_role("prefill"):
        await r.world.tell(engine, *["slow"] * r.requests)
    await r.a_moment()
    await r.world.admin("DELETE", r.hit)
    if r.rng.random() < 0.25:
        await r.world.admin("POST", r.hit, r.hit.spec)


async def removed_and_killed(r: Round) -> None:
    await r.a_moment()
    await r.world.admin("DELETE", r.hit)
    r.hit.kill()


async def clients_leave(r: Round) -> None:
    await r.a_moment()


async def router_replaced(r: Round) -> None:
    await r.a_moment()
    await r.world.start_router(take_over=True)


def _answers(*acts: str) -> Callable[[Round], Awaitable[None]]:
    async def fault(r: Round) -> None:
        # As many as have a chance to be met; `repair` takes the rest back.
        await r.world.tell(r.hit, *(r.rng.choice(acts) for _ in range(4)))
        await r.a_moment()

    return fault


def _events(how: str) -> Callable[[Round], Awaitable[None]]:
    async def fault(r: Round) -> None:
        await r.world.tell(r.hit, events=how)
        await r.a_moment()

    return fault


@dataclass(frozen=True, slots=True)
class Fault:
    act: Callable[[Round], Awaitable[None]]
    requests: int = 6
    manners: tuple[Manner, ...] = USUAL


FAULTS: dict[str, Fault] = {
    "engine killed": Fault(killed),
    "engine restarted": Fault(restarted),
    "all decode engines restarted": Fault(all_decoders_killed),
    "all prefill engines killed": Fault(all_prefillers_killed),
    "engine stopped": Fault(stopped),
    "engine stopped past deadlines": Fault(stopped_past_deadlines),
    "engine drained": Fault(drained, 12),
    "engine removed": Fault(removed, 12),
    "engine removed and killed": Fault(removed_and_killed),
    "events lost": Fault(_events("lost")),
    "events garbage": Fault(_events("garbage")),
    "slow answers": Fault(_answers("slow")),
    "silent": Fault(_answers("silent")),
    "5xx": Fault(_answers("500", "502", "503")),
    "bad JSON": Fault(_answers("bad JSON")),
    "wrong length": Fault(_answers("long length", "short length")),
    "cut answers": Fault(_answers("cut", "early")),
    "no HTTP": Fault(_answers("no HTTP", "endless head")),
    "clients leave": Fault(clients_leave, 12, ("leaves", "half a body", "stream")),
    "slow clients": Fault(clients_leave, 8, ("slow", "slow", "plain")),
    "rush": Fault(clients_leave, _RUSH),
    "router replaced": Fault(router_replaced, 16),
}
