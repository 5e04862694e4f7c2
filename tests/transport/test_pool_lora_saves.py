"""Saves of what a LoRA adapter computed, in the embedded store: only if its files did not change
between the request's arrival and the end of its computation, wherever in between they were read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_pool_faults import FAST, Pair, all_ended, cases, sequence, simple

from kvferry.pool import adapter_files
from kvferry.pool.adapters import Adapter, Adapters
from kvferry.pool.chain import Extra
from kvferry.verify.case import CaseDict
from pool_engine import SmallEngine


@pytest.fixture(scope="module")
def case() -> CaseDict:
    return cases(1, simple)[0]


@pytest.fixture
def pair(case: CaseDict, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(case, tmp_path, FAST, embedded=True)
    yield made
    made.close()


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    made = Adapters(started_at=1e12)  # long after all files were written
    yield made
    made.close()


def folder(path: Path, data: bytes = b"first") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    weights = (2).to_bytes(8, "little") + b"{}" + data
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text('{"r": 8}')
    for file in path.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    return path


def arrives(engine: SmallEngine, request_id: str, adapters: Adapters, path: Path) -> None:
    """As vLLM's scheduler tells the pool: the name first, and with it what saves must compare."""
    asked = adapters.ask(Adapter(1, str(path)), 5)
    engine.until(lambda: asked.name is not None)
    assert asked.name
    engine.scheduler.track(request_id, lambda: [Extra(0, f"lora {asked.name}")], asked.files)


def counted(engine: SmallEngine, what: str) -> int:
    return sum(rank.counters[what] for rank in engine.ranks.values())


def found(pair: Pair, adapters: Adapters, path: Path) -> int:
    """Tokens that a new engine finds for the adapter."""
    reader = pair.engine("dst")
    arrives(reader, "r", adapters, path)
    return reader.matched("r", sequence(pair.case))


def test_files_that_stay_as_they_are(pair: Pair, adapters: Adapters) -> None:
    path, writer = folder(pair.path / "a"), pair.engine("src")
    arrives(writer, "w", adapters, path)
    writer.save("w", sequence(pair.case))
    assert counted(writer, "save_lora_refused") == 0 < counted(writer, "save_done")
    assert found(pair, adapters, path) == pair.case["tokens"]
    assert pair.engine("dst").matched("plain", sequence(pair.case)) == 0


@pytest.mark.parametrize("change", ["weights", "configuration", "folder", "gone"])
def test_files_that_change_after_the_arrival(
    pair: Pair, adapters: Adapters, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """The engine may have loaded the new ones: nothing is stored under the name of the old."""
    path, writer, tokens = folder(pair.path / "a"), pair.engine("src"), sequence(pair.case)
    arrives(writer, "w", adapters, path)
    arrives(writer, "w2", adapters, path)
    if change == "weights":
        folder(path, b"other")
    elif change == "configuration":
        (path / "adapter_config.json").write_text('{"r": 4}')
    else:
        path.rename(pair.path / "before")
        if change == "folder":
            folder(path, b"other")
    writer.save("w", tokens)
    writer.save("w2", tokens)
    all_ended(writer)
    assert all(saved.failed for saved in writer.saved)
    assert counted(writer, "save_lora_refused") == 2 * len(writer.ranks)
    assert counted(writer, "save_done") == counted(writer, "saved_bytes") == 0
    assert caplog.text.count("load changed weights under a new name") == len(writer.ranks)
    copy = folder(pair.path / "copy")  # the first files again: what was stored under their name?
    assert found(pair, Adapters(started_at=1e12), copy) == 0
    writer.save("plain", tokens)  # others go on, with no pause
    assert pair.engine("dst").matched("plain", tokens) == pair.case["tokens"]


def test_one_rank_that_cannot_compare(
    pair: Pair, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of which one part is missing is never found; the part can come later."""
    path, writer, tokens = folder(pair.path / "a"), pair.engine("src"), sequence(pair.case)
    first, *others = writer.ranks.values()
    monkeypatch.setattr(first._saver._adapters, "unchanged", lambda *_: False)
    arrives(writer, "w", adapters, path)
    writer.save("w", tokens)
    all_ended(writer)
    assert all(saved.failed for saved in writer.saved)
    assert first.counters["save_lora_refused"] == 1 and first.counters["save_done"] == 0
    assert others and all(rank.counters["save_done"] > 0 for rank in others)
    assert found(pair, adapters, path) == 0
    monkeypatch.undo()
    arrives(writer, "again", adapters, path)
    writer.save("again", tokens)
    assert found(pair, adapters, path) == pair.case["tokens"]


def test_a_file_server_that_hangs(
    pair: Pair, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look a rank is given up; nothing stays pinned, no thread joins the one that hangs."""
    path, writer, tokens = folder(pair.path / "a"), pair.engine("src"), sequence(pair.case)
    for request_id in ("w", "w2", "w3"):
        arrives(writer, request_id, adapters, path)
    hang = threading.Event()
    before = threading.active_count()

    def hangs(path: str) -> Any:
        assert hang.wait(20)
        return ()

    with monkeypatch.context() as patch:
        patch.setattr(adapter_files, "stamp_of", hangs)
        patch.setattr(adapter_files, "LOOK_SECONDS", 0.3)
        began = time.monotonic()
        writer.save("w", tokens)
        assert 0.3 <= time.monotonic() - began < 5
        all_ended(writer)
        began = time.monotonic()
        writer.save("w2", tokens)
        assert time.monotonic() - began < 0.3
        all_ended(writer)
        stuck = [t for t in threading.enumerate() if t.name == "kvferry-lora-files"]
        assert len(stuck) == len(writer.ranks)
        assert threading.active_count() <= before + 2 * len(writer.ranks)  # and the savers
        writer.save("plain", tokens)
        assert pair.engine("dst").matched("plain", tokens) == pair.case["tokens"]
        assert counted(writer, "save_lora_refused") == 2 * len(writer.ranks)
        hang.set()
        deadline = time.monotonic() + 5
        while any(rank._saver._adapters._looks._hanging for rank in writer.ranks.values()):
            assert time.monotonic() < deadline
            time.sleep(0.002)
    writer.save("w3", tokens)
    assert found(pair, adapters, path) == pair.case["tokens"]
