"""The carriers' conformance suite lies in tests/transport, and runs here too.

A run that is told to stop (by a time limit) ends as if interrupted: fixtures end their engines.
"""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transport"))
pytest.register_assert_rewrite("test_conformance", "carrier_peer")


def pytest_configure() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


# Of the conformance suite, what packing does not change: run in direct mode only.
DIRECT_ONLY = (
    "test_one_copy_of_any_length",
    "test_nothing_to_do",
    "test_arrays_that_make_no_sense_are_refused",
    "test_cancel_after_the_end_changes_nothing",
    "test_a_deadline_leaves_the_transfer_running",
    "test_a_restarted_peer_is_another_peer",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    twice = [i for i in items if i.name.startswith(DIRECT_ONLY) and "-packed" in i.name]
    if twice:
        config.hook.pytest_deselected(items=twice)
        items[:] = [i for i in items if i not in twice]
