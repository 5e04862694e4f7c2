"""Play rounds: requests fly while one fault hits, all of them end, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from chaos.outcome import Broken, Outcomes
from chaos.router.clients import Asked, ask
from chaos.router.faults import FAULTS, USUAL, Round
from chaos.router.world import World, world
from router_crowd import hold_a_crowd

_WARM_UP_REQUESTS = 60
_SETTLE_EVERY = 50
_QUIET_SECONDS = 3.0  # after which the router has closed connections to engines that it used


def play(
    outcomes: Outcomes, rounds: range, seed: int, idle: int, after: Callable[[str], None]
) -> None:
    """Raises Broken. `idle`: connections of the crowd that is held afterwards; 0: none."""
    asyncio.run(_play(outcomes, rounds, seed, after))
    if idle:
        print(f"\n{hold_a_crowd(idle, slow=idle // 50)}")


def fault_of(seed: int, number: int) -> str:
    """Every cycle of rounds has every fault once, in an order of its own.

    Only the first one replaces the router, so that the next router lives long enough to leak.
    """
    cycle, at = 0, number
    order = list(FAULTS)
    if number >= len(FAULTS):
        order.remove("router replaced")
        cycle, at = divmod(number - len(FAULTS), len(order))
        cycle += 1
    Random(f"{seed}-order-{cycle}").shuffle(order)
    return order[at]


async def _play(outcomes: Outcomes, rounds: range, seed: int, after: Callable[[str], None]) -> None:
    async with world() as made:
        await made.all_up()
        await _fly(made, [_warm_up(seed, n) for n in range(_WARM_UP_REQUESTS)])
        await asyncio.sleep(_QUIET_SECONDS)
        before = await made.settled()
        most_bytes = 0
        for number in rounds:
            fault = fault_of(seed, number)
            await _round(made, outcomes, seed, number, fault)
            outcomes.played += 1
            most_bytes = max(most_bytes, made.router.memory_bytes())
            after(fault)
            if number % _SETTLE_EVERY == _SETTLE_EVERY - 1:
                await made.all_up()
                await made.settled(before)
        await made.all_up()
        now = await made.settled(before)
        requests, said = len(made.ended), made.read_log()
        print(
            f"\n{requests} requests, each with one outcome ({len(said)} in the routers' logs, "
            f"{len(made.routers)} routers), {made.handed_over()} handed over; tasks "
            f"{before.tasks.total()} before, {now.tasks.total()} after; files "
            f"{before.files}, {now.files}; memory "
            f"{before.memory_bytes >> 20} MiB, {now.memory_bytes >> 20} after, "
            f"{most_bytes >> 20} at most"
        )


async def _round(made: World, outcomes: Outcomes, seed: int, number: int, name: str) -> None:
    fault, rng = FAULTS[name], Random(f"{seed}-{number}")
    hit = rng.choice(made.engines)
    r = Round(made, rng, number, hit, fault.requests, fault.manners)
    flying = asyncio.create_task(_fly(made, r.asked()))
    try:
        await fault.act(r)
        ends = await flying
    except BaseException:
        flying.cancel()
        raise
    outcomes.count(name, "rounds", *ends)
    made.read_log()  # a bug of the router ends the round that showed it
    if made.router.process.poll() is not None:
        raise Broken(f"the router ended: {''.join(made.router.log[-20:])}")
    await made.no_strangers()
    await made.repair()


async def _fly(made: World, all_asked: list[Asked]) -> list[str]:
    """Send requests, and wait for all of them. Raises Broken."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(asked, made.port)) for asked in all_asked]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    ended = [task.result() for task in tasks]
    made.ended += ended
    return [e.end for e in ended]


def _warm_up(seed: int, number: int) -> Asked:
    rng = Random(f"{seed}-warm-{number}")
    return Asked.random(rng, f"cw-{number}", rng.choice(USUAL))
