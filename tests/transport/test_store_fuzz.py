"""A slice of the fuzzer of store files, short enough for every change."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz" / "store.py"
SEED = int(os.environ.get("KVFERRY_SEED", "20261116"))


def test_damaged_stores() -> None:
    found = importlib.util.spec_from_file_location("store_fuzz", SCRIPT)
    assert found is not None and found.loader is not None
    fuzz = importlib.util.module_from_spec(found)
    found.loader.exec_module(fuzz)
    counts = fuzz.run(100, SEED)
    assert counts["stores"] == 100 and counts["opened"] > 50
    assert counts["done"] > counts["corrupt"] > 0
