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
