"""What several test folders share lies in tests/support, and is imported by its plain name.

With `--retry-at-most N` a run is the second try of tests that failed (see the Makefile). It ends
with their names. When more than N tests would be retried, it fails without running them.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))  # fuzzers

with contextlib.suppress(ImportError):  # not every environment has it
    from hypothesis import HealthCheck, settings

    # A busy machine may stop a test for longer than Hypothesis allows an example by itself.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

RETRIED = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--retry-at-most", type=int, metavar="N", help="name the tests, and refuse more than N"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """At this point the tests that did not fail before are deselected."""
    most = session.config.getoption("retry_at_most")
    if most is None:
        return
    names = [item.nodeid for item in session.items]
    too_many = len(names) > most
    title = f"not retried (more than {most} tests failed)" if too_many else "retried"
    session.config.stash[RETRIED] = f"{title}: {', '.join(names) or 'nothing'}"
    if too_many:
        raise session.Failed(title)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after what everybody else has to say
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:
    yield
    if RETRIED in config.stash:
        terminalreporter.line(config.stash[RETRIED])
