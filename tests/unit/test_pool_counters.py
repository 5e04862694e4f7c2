"""Every event of the pool is known, so that metrics have it from the start; one unit a metric."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from kvferry.pool.cost import Reason
from kvferry.pool.orders import METRICS

ROOT = Path(__file__).parents[2]
OUTCOMES = {  # of a store, by what is asked of it
    "load": ("done", "missing", "corrupt", "failed"),
    "save": ("done", "exists", "full", "declined", "failed"),
}


def test_all_that_is_counted_is_known() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "src" / "kvferry" / "pool").glob("*.py"))
    counted = re.findall(r'counters\.add\(\s*(f?)"(.*?)"', sources)
    named = {name for f, name in counted if not f}
    assert {name for f, name in counted if f} == {
        "declined_{tracker.declined}",
        "load_{outcome.value}",
        "save_{outcome.value}",
    }
    named |= {f"{what}_{outcome}" for what, told in OUTCOMES.items() for outcome in told}
    named |= {f"declined_{reason}" for reason in ("short", *get_args(Reason)) if reason}
    events = [event for metric in METRICS.values() for event in metric.events]
    assert named == set(events) and len(events) == len(set(events))
