"""The carriers' conformance suite lies in tests/transport, and runs here too."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transport"))
pytest.register_assert_rewrite("test_conformance", "carrier_peer")
