"""The carriers' conformance suite lies in tests/transport, and runs here too.

A run that is told to stop (by a time limit) ends as if interrupted: fixtures end their engines.
vLLM is imported before the tests, because its libraries warn of themselves when they are imported.
"""

import contextlib
import logging
import signal
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transport"))
pytest.register_assert_rewrite("test_conformance", "carrier_peer")


def pytest_configure() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        import vllm.v1.request  # noqa: F401


@pytest.fixture(autouse=True)
def _log_to_the_root() -> None:
    """`caplog` listens there; our lines go to vLLM once a test has made it load its plugins."""
    logging.getLogger("kvferry").parent = logging.getLogger()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    from tiny_models import make_model

    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")
