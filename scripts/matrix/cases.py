"""What engines may differ in, and a small set of cases in which every pair of values occurs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass

SHAPES = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}  # (tp, pp)
DEFAULT = 0  # a block size: vLLM's own choice
CPU_BLOCK = 128  # which is this on the CPU
WINDOWS = ("gemma3", "gpt-oss", "mistral")


@dataclass(frozen=True, slots=True, order=True)
class Case:
    architecture: str
    prefill: str  # of SHAPES
    decode: str
    prefill_block: int
    decode_block: int
    prefix: str  # none, or part: the decode engine has computed the prompt's head already
    mode: str  # pull or push
    carrier: str
    style: str  # of the request's parameters: nixl (prefill first) or mooncake (both at once)

    @property
    def name(self) -> str:
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:12]

    @property
    def workers(self) -> int:
        return sum(tp * pp for tp, pp in (SHAPES[self.prefill], SHAPES[self.decode]))

    def describe(self) -> str:
        blocks = f"{self.prefill_block or 'default'} → {self.decode_block or 'default'}"
        return (
            f"{self.architecture}, {self.prefill} → {self.decode}, blocks {blocks}, prefix "
            f"{self.prefix}, {self.mode}, {self.carrier}, {self.style} style"
        )


VALUES: dict[str, Sequence[object]] = {
    "architecture": ("llama", "mistral", "gemma3", "gpt-oss", "mla", "granite"),
    "prefill": tuple(SHAPES),
    "decode": tuple(SHAPES),
    "prefill_block": (DEFAULT, 32, 64),
    "decode_block": (DEFAULT, 32, 64),
    "prefix": ("none", "part"),
    "mode": ("pull", "push"),
    "carrier": ("local", "tcp", "mooncake", "nixl"),
    "style": ("nixl", "mooncake"),
}


def impossible(case: Case) -> str:
    """Why a case cannot be run, mostly by vLLM's CPU build; empty where it can."""
    blocks = (case.prefill_block, case.decode_block)
    if case.architecture in ("mla", "granite") and any(blocks):
        return "one block size on the CPU"
    if case.architecture == "granite" and case.prefix != "none":
        return "no prefix caching of states"
    if case.architecture in WINDOWS and (blocks[0] or CPU_BLOCK) % (blocks[1] or CPU_BLOCK):
        return "refused by kvferry where the source has dropped the head of a window's first block"
    if case.architecture == "granite" and "pp2" in case.prefill + case.decode:
        return "its weights cannot be loaded in stages (KeyError: layers.2.input_layernorm.weight)"
    return ""


def pairs(case: Case) -> frozenset[tuple[str, object, str, object]]:
    """All pairs of values that occur in a case."""
    items = list(asdict(case).items())
    return frozenset((a, x, b, y) for (a, x), (b, y) in itertools.combinations(items, 2))


def possible_cases() -> list[Case]:
    every = (Case(*values) for values in itertools.product(*VALUES.values()))  # type: ignore[arg-type]
    return [case for case in every if not impossible(case)]


def covering(passed: Collection[Case] = ()) -> list[Case]:
    """Cases in which every possible pair of values occurs; few, and small ones first.

    Those that have passed already are among them, so that others are chosen for the rest only.
    """
    left = [(case, pairs(case)) for case in possible_cases()]
    missing = set().union(*(p for _, p in left))
    chosen = [case for case in passed if not impossible(case)]
    missing -= set().union(*map(pairs, chosen))
    while missing:
        case, covered = max(left, key=lambda one: (len(one[1] & missing), -one[0].workers))
        chosen.append(case)
        missing -= covered
        left = [(c, p) for c, p in left if p & missing]
    return sorted(chosen, key=lambda case: (case.workers, case))
