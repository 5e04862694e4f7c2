"""Play rounds, and say what came of them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chaos import __doc__ as what_it_is
from chaos import peers
from chaos.outcome import Broken, Outcomes
from handover_peers import QUIET
from kvferry.errors import KvferryError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=(what_it_is or "").splitlines()[0])
    parser.add_argument("--faults", type=int, help="among peers; 500, or none with --router")
    parser.add_argument("--engines", type=int, default=0, help="faults among real engines, after")
    parser.add_argument("--router", type=int, default=0, help="faults around a router, after")
    parser.add_argument(
        "--idle",
        type=int,
        default=10_000,
        help="connections held before a router, after its faults",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="play rounds from this one on")
    parser.add_argument("--carrier", default="tcp", choices=["tcp", "local"])
    parser.add_argument("--modes", default="push,pull", help="of the two consumers")
    parser.add_argument("--verbose", action="store_true", help="let the processes log")
    chosen = parser.parse_args(arguments)
    if not chosen.verbose:
        os.environ[QUIET] = "1"
    first, second = chosen.modes.split(",")
    setting = f"--seed {chosen.seed} --carrier {chosen.carrier} --modes {chosen.modes}"

    def play_peers(outcomes: Outcomes, rounds: range, after: Callable[[str], None]) -> None:
        modes = (first, second)
        peers.play(outcomes, rounds, chosen.seed, chosen.carrier, modes, after)

    def play_engines(outcomes: Outcomes, rounds: range, after: Callable[[str], None]) -> None:
        from chaos import engines

        engines.play(outcomes, rounds, chosen.seed, after)

    def play_router(outcomes: Outcomes, rounds: range, after: Callable[[str], None]) -> None:
        from chaos.router import play

        play.play(outcomes, rounds, chosen.seed, chosen.idle, after)

    faults = chosen.faults if chosen.faults is not None else 0 if chosen.router else 500
    games = [
        Game("peers", setting, peers.COLUMNS, faults, play_peers),
        Game("engines", f"--seed {chosen.seed}", ENGINE_COLUMNS, chosen.engines, play_engines),
        Game("router", f"--seed {chosen.seed}", ROUTER_COLUMNS, chosen.router, play_router),
    ]
    for game in games:
        if game.faults and not game.run(chosen.first):
            return 1
    return 0


ENGINE_COLUMNS = ("rounds", "right", "right, alone", "no answer", "loads", "loads failed")
ROUTER_COLUMNS = ("rounds", "right", "cut", "garbage", "refused", "left")


@dataclass(frozen=True, slots=True)
class Game:
    name: str
    setting: str
    columns: tuple[str, ...]
    faults: int
    play: Callable[[Outcomes, range, Callable[[str], None]], None]

    def run(self, first: int) -> bool:
        """Whether nothing broke."""
        outcomes, begun = Outcomes(self.columns), time.monotonic()

        def after(fault: str) -> None:
            self._show(outcomes.played, begun, fault)

        try:
            self.play(outcomes, range(first, first + self.faults), after)
        except (Broken, KvferryError, AssertionError, OSError) as error:
            number = first + outcomes.played
            options = {"engines": "--engines 1 --faults 0", "router": "--router 1 --idle 0"}
            option = options.get(self.name, "--faults 1")
            print(
                f"\nbroken: {type(error).__name__}: {error}\n"
                f"{self.name}, round {number}; again: python scripts/chaos {self.setting} "
                f"--first {number} {option}",
                file=sys.stderr,
            )
            return False
        print(f"\n{self.name}, {self.setting}")
        print("\n".join(outcomes.lines()))
        print(f"every success is right; nothing left; {time.monotonic() - begun:.0f} s")
        return True

    def _show(self, done: int, begun: float, fault: str) -> None:
        spent = time.monotonic() - begun
        if sys.stderr.isatty():
            line = f"\r{self.name}: {done}/{self.faults}, {spent:.0f} s  {fault:40}"
            print(line, end="", file=sys.stderr)
        elif done % 25 == 0 or done == self.faults or self.name == "engines":
            line = f"{self.name}: {done}/{self.faults}, {spent:.0f} s  {fault}"
            print(line, file=sys.stderr, flush=True)
