"""vLLM is imported before the tests: its libraries warn of themselves when they are imported."""

import contextlib
import warnings


def pytest_configure() -> None:
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        import vllm.v1.request  # noqa: F401
