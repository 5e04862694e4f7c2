"""Random faults among producer and consumer processes with a real carrier.

Two producers and two consumers of different shapes, each a process. In every round prompts are
handed over at once, and one fault hits: a process is killed and comes back at its address, or is
stopped, past its deadline or its lease, and goes on; a load is given up; a hold is withdrawn, comes
late, or is claimed with a ticket that is wrong in one of several ways. What must hold, in every
round:

    every load of a consumer that lives is reported once, by its deadline
    every success has the right bytes, when the fault is healed and all others have ended too
    what the fault did not touch succeeds
    at the end, no hold, parked claim, push, grant or kept block is left, and no process has more
    threads, file descriptors or memory than before

Bytes are compared with contents that are derived from positions, without any plan. All rounds use
the same blocks, so that a late write of one would be seen in another.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from chaos.faults import FAULTS
from chaos.outcome import Outcomes
from chaos.round import Round
from chaos.world import World, require_nothing_left, take_measure

COLUMNS = ("rounds", "good", "written", "failed", "lost with it")


def play(
    outcomes: Outcomes,
    rounds: range,
    seed: int,
    carrier: str,
    modes: tuple[str, str],
    after: Callable[[str], None],
) -> None:
    """Play these rounds, and call `after` each of them with its fault."""
    world = World(carrier, modes)
    try:
        world.start()
        take_measure(world)
        for number in rounds:
            one = Round(world, outcomes, number, random.Random(f"{seed}-{number}"), FAULTS)
            one.run()
            outcomes.played += 1
            after(one.fault)
        require_nothing_left(world)
    finally:
        world.close()
