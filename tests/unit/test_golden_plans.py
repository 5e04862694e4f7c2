"""No plan of a preset changes unnoticed. `make golden-plans` keeps plans that are meant to change.

The digests were made in another process, whose hashes of strings were others: plans depend on
nothing but their input.
"""

from __future__ import annotations

import json

import pytest

from golden_plans import CASES, FOLDER, FULL, digests, plan
from kvferry.layout.hf import presets

KEPT = json.loads((FOLDER / "digests.json").read_text())


def test_every_preset_and_case_is_kept() -> None:
    assert {model: list(cases) for model, cases in KEPT.items()} == {
        model: list(CASES) for model in presets()
    }


@pytest.mark.parametrize("model", FULL)
def test_a_plan_is_what_it_was(model: str) -> None:
    assert plan(model, FULL[model]) == json.loads((FOLDER / f"{model}.json").read_text())


@pytest.mark.parametrize("model", presets())
def test_no_plan_of_a_preset_changes(model: str) -> None:
    assert digests(model) == KEPT[model]
