"""A system that has no more threads to give, for those of some names."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch, *prefixes: str) -> Iterator[None]:
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith(prefixes):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refusing)
        yield
