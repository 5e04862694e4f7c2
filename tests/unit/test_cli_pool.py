"""`kvferry pool` on a store that another process may have open."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.pool.embedded import EmbeddedStore
from kvferry.pool.store import Outcome, Ranges
from kvferry.transport.base import MemoryRegion

runner = CliRunner()


def test_commands(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    store = EmbeddedStore(directory, 1 << 20, tmp_path / "files", 4 << 20, slots=1024)
    data = np.arange(100_000, dtype=np.uint8)
    store.register([MemoryRegion(data.ctypes.data, data.nbytes)])
    address, length = (np.array([x], dtype=np.int64) for x in (data.ctypes.data, data.nbytes))
    keys = [f"key/{n}" for n in range(20)]
    deadline = time.monotonic() + 30
    store.access(keys, deadline)
    for key in keys:
        assert store.put([key], [Ranges(address, length)], deadline) == [Outcome.DONE]
    where = ["--dir", str(directory)]

    values = json.loads(runner.invoke(app, ["pool", "stats", *where, "--json"]).stdout)
    assert values["objects"] == 20 and values["bytes"] == 2_000_000
    assert values["demoted"] > 0 and values["policy"]["requests"] == 1
    listed = json.loads(runner.invoke(app, ["pool", "ls", *where, "--json"]).stdout)
    assert {one["key"] for one in listed} == set(keys)
    assert {one["tier"] for one in listed} >= {"memory", "disk"}
    assert "key/3" in runner.invoke(app, ["pool", "ls", *where]).stdout
    assert runner.invoke(app, ["pool", "verify", *where]).exit_code == 0
    file = next((tmp_path / "files").glob("??/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert runner.invoke(app, ["pool", "verify", *where]).exit_code == 1
    assert "removed 3 objects" in runner.invoke(app, ["pool", "evict", "250kb", *where]).stdout
    assert store.stats().objects == 16  # the engine's own view
    assert "removed 16" in runner.invoke(app, ["pool", "clear", *where]).stdout
    assert not store.exists(keys, deadline).any()
    store.close()


@pytest.mark.parametrize("command", [["stats"], ["ls"], ["verify"], ["evict", "1"], ["clear"]])
def test_no_store(tmp_path: Path, command: list[str]) -> None:
    result = runner.invoke(app, ["pool", *command, "--dir", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert not (tmp_path / "none").exists()
