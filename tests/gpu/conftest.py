"""These tests need a GPU; without one they are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvferry.carriers.cuda.driver import device_count
from kvferry.errors import TransferError

sys.path.insert(0, str(Path(__file__).parents[1] / "transport"))  # the suite that runs here too
pytest.register_assert_rewrite("test_conformance", "carrier_peer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        found = device_count()
    except TransferError as error:
        found, why = 0, str(error)
    else:
        why = "no GPU is visible"
    if not found:
        for item in items:
            if Path(__file__).parent not in item.path.parents:
                continue
            item.add_marker(pytest.mark.skip(reason=why))
