"""Play what has not been played yet, keep it, and say what came of it."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos import __doc__ as what_it_is
from chaos import peers
from chaos.outcome import Broken, Kept, Outcomes
from kvferry.errors import KvferryError
from p2p_peers import QUIET

ROOT = Path(__file__).resolve().parents[2]


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
    parser.add_argument("--first", type=int, help="play rounds from this one, and keep nothing")
    parser.add_argument("--carrier", default="tcp", choices=["tcp", "local"])
    parser.add_argument("--modes", default="push,pull", help="of the two consumers")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after so many, go on later"
    )
    parser.add_argument("--again", action="store_true", help="from the beginning")
    parser.add_argument("--verbose", action="store_true", help="let the processes log")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "chaos.json")
    chosen = parser.parse_args(arguments)
    if not chosen.verbose:
        os.environ[QUIET] = "1"
    kept = None if chosen.first is not None else Kept(chosen.out)
    if kept and chosen.again:
        chosen.out.unlink(missing_ok=True)
    until = time.monotonic() + chosen.seconds
    first, second = chosen.modes.split(",")
    setting = f"--seed {chosen.seed} --carrier {chosen.carrier} --modes {chosen.modes}"

    def play_peers(outcomes: Outcomes, rounds: range, after: Callable[[str], bool]) -> None:
        modes = (first, second)
        peers.play(outcomes, rounds, chosen.seed, chosen.carrier, modes, after)

    def play_engines(outcomes: Outcomes, rounds: range, after: Callable[[str], bool]) -> None:
        from chaos import engines

        engines.play(outcomes, rounds, chosen.seed, after)

    def play_router(outcomes: Outcomes, rounds: range, after: Callable[[str], bool]) -> None:
        from chaos.router import play

        play.play(outcomes, rounds, chosen.seed, chosen.idle, after)

    faults = chosen.faults if chosen.faults is not None else 0 if chosen.router else 500
    games = [
        Game("peers", setting, peers.COLUMNS, faults, play_peers),
        Game("engines", f"--seed {chosen.seed}", ENGINE_COLUMNS, chosen.engines, play_engines),
        Game("router", f"--seed {chosen.seed}", ROUTER_COLUMNS, chosen.router, play_router),
    ]
    for game in games:
        if game.faults and not game.run(kept, chosen.first or 0, until):
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
    play: Callable[[Outcomes, range, Callable[[str], bool]], None]

    def run(self, kept: Kept | None, first: int, until: float) -> bool:
        """Whether all of it has been played, and nothing broke."""
        name = f"{self.name} {self.setting} code {code_digest()}"
        outcomes = kept.read(name, self.columns) if kept else Outcomes(self.columns)
        todo = range(first + outcomes.played, first + self.faults)
        begun = time.monotonic()

        def after(fault: str) -> bool:
            self._show(outcomes.played, begun, fault)
            return time.monotonic() < until

        # where it breaks, nothing is kept: what came before is not proven to have left nothing
        try:
            if todo:
                self.play(outcomes, todo, after)
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
        outcomes.seconds += time.monotonic() - begun
        if kept:
            kept.write(name, outcomes)
        left = self.faults - outcomes.played
        print(f"\n{self.name}, {self.setting}")
        print("\n".join(outcomes.lines()))
        print(
            f"every success is right; nothing left; {outcomes.seconds:.0f} s"
            + (f"; {left} faults are left for the next run" if left else "")
        )
        return not left

    def _show(self, done: int, begun: float, fault: str) -> None:
        spent = time.monotonic() - begun
        if sys.stderr.isatty():
            line = f"\r{self.name}: {done}/{self.faults}, {spent:.0f} s  {fault:40}"
            print(line, end="", file=sys.stderr)
        elif done % 25 == 0 or done == self.faults or self.name == "engines":
            line = f"{self.name}: {done}/{self.faults}, {spent:.0f} s  {fault}"
            print(line, file=sys.stderr, flush=True)


def code_digest() -> str:
    """Rounds count only for the code that they were played with."""
    digest = hashlib.sha256()
    for folder in ("src", "scripts/chaos"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
