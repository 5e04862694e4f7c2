# SPDX-License-Identifier: Apache-2.0
"""Measurements of kvferry beside others, run from the repository's root:

    python -m benchmarks.plan       planning, beside vLLM's planner
    python -m benchmarks.pool       the pool: hit rates, lookups, bandwidth
    python -m benchmarks.handover   prefill to decode between real engines
    python -m benchmarks.stall      how long a hand-over holds up an engine's step
    python -m benchmarks.gpu        everything about device memory

`kvferry bench plan` and `kvferry bench transport` are in the package. docs/benchmarks.md has the
results.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))  # real engines and tiny models


def python_path() -> str:
    """PYTHONPATH of a process that imports `benchmarks` wherever it starts."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
