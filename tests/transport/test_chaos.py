"""A slice of `make chaos`, short enough for every change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos"


def test_60_random_faults() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--faults", "60", "--seed", "7", "--first", "0"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "every success is right; nothing left" in ran.stdout
