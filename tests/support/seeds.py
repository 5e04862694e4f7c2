"""Seeds of random tests: `SEED=17` is that one alone, `SEEDS=200` are so many, from SEED or 0."""

from __future__ import annotations

import os

FIRST = int(os.environ.get("SEED", 0))
SEEDS = range(FIRST, FIRST + int(os.environ.get("SEEDS", 1 if "SEED" in os.environ else 2)))
