"""A slice of `make chaos`, short enough for every change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos"


def test_60_random_faults() -> None:
    """Two halves beside each other: peers that are stopped past their leases mostly wait."""
    parts = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--faults", "30", "--seed", "7", "--first", first],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in ("0", "30")
    ]
    try:
        for part in parts:
            told, complaints = part.communicate(timeout=300)
            assert part.returncode == 0, complaints[-3000:]
            assert "every success is right; nothing left" in told
    finally:
        for part in parts:
            part.kill()
            part.communicate()
