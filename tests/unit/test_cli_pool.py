"""`kvferry pool` on a store that another process may have open."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvferry.carriers.base import MemoryRegion
from kvferry.cli.main import app
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices

runner = CliRunner()


def test_commands(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    store = EmbeddedStore(directory, 1 << 20, tmp_path / "files", 4 << 20, slots=1024)
    data = np.arange(100_000, dtype=np.uint8)
    store.register([MemoryRegion(data.ctypes.data, data.nbytes)])
    address, length = (np.array([x], dtype=np.int64) for x in (data.ctypes.data, data.nbytes))
    keys = [f"key/[/{n}]" for n in range(20)]  # what Rich takes for markup
    deadline = time.monotonic() + 30
    store.access(keys, deadline)
    for key in keys:
        assert store.put([key], [Slices.whole(address, length)], deadline) == [Outcome.DONE]
    where = ["--dir", str(directory)]

    values = json.loads(runner.invoke(app, ["pool", "stats", *where, "--json"]).stdout)
    assert values["objects"] == 20 and values["bytes"] == 2_000_000
    assert values["demoted"] > 0 and values["policy"]["requests"] == 1
    said = runner.invoke(app, ["pool", "stats", *where]).stdout
    assert "bytes                    1.9 MiB" in said and "requests                 1\n" in said
    listed = json.loads(runner.invoke(app, ["pool", "ls", *where, "--json"]).stdout)
    assert {one["key"] for one in listed} == set(keys)
    assert {one["tier"] for one in listed} >= {"memory", "disk"}
    assert "key/[/3]" in runner.invoke(app, ["pool", "ls", *where]).stdout
    assert runner.invoke(app, ["pool", "verify", *where]).exit_code == 0
    file = next((tmp_path / "files").glob("??/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert runner.invoke(app, ["pool", "verify", *where]).exit_code == 1
    for answer in ("n\n", ""):
        for command in (["evict", "250kb"], ["evict", "1GB"], ["clear"]):
            result = runner.invoke(app, ["pool", *command, *where], input=answer)
            assert f"The store at {directory} has 19 objects" in result.stderr
            assert result.exit_code == 2 and "nothing was removed" in result.stderr
    assert store.counters()["objects"] == 19  # the engine's own view
    result = runner.invoke(app, ["pool", "evict", "250kb", *where], input="y\n")
    assert "removed 3 objects" in result.stdout
    assert store.counters()["objects"] == 16
    assert "removed 16" in runner.invoke(app, ["pool", "clear", *where, "--yes"]).stdout
    assert not store.exists(keys, deadline).any()
    store.close()


def test_what_cannot_be_read_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file that cannot be opened now: the others are read, and it stays."""
    directory = tmp_path / "store"
    store = EmbeddedStore(directory, 1 << 16, tmp_path / "files", 4 << 20, slots=1024)
    deadline = time.monotonic() + 30
    for n in range(6):
        assert store.put_bytes(f"key/{n}", bytes(20_000), deadline) is Outcome.DONE
    files = sorted((tmp_path / "files").glob("??/*"))
    assert len(files) >= 3
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"!")
    really = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path) == files[1]:
            raise OSError(errno.EMFILE, "Too many open files")
        return really(path, *args, **kwargs)

    command = ["pool", "verify", "--dir", str(directory), "--json"]
    with monkeypatch.context() as patch:
        patch.setattr("kvferry.pool.embedded.disk.os.open", refuse)
        result = runner.invoke(app, command)
        assert result.exit_code == 1 and "Too many open files" in result.stderr
        assert json.loads(result.stdout) == {"good": 4, "corrupt": 1, "unread": 1}
        result = runner.invoke(app, command[:-1])
        assert result.exit_code == 2 and "1 could not be read" in result.stdout
    result = runner.invoke(app, command)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"good": 5, "corrupt": 0, "unread": 0}
    assert store.verify(0.0)[:3] == (0, 0, 5)  # no time
    store.close()


def test_a_size_that_cannot_be_read(tmp_path: Path) -> None:
    where = ["--dir", str(tmp_path)]
    EmbeddedStore(tmp_path, 1 << 20, slots=1024).close()
    result = runner.invoke(app, ["pool", "evict", "[red]", *where])
    assert result.exit_code == 2 and "'[red]'" in result.stderr
    assert runner.invoke(app, ["pool", "stats", *where]).exit_code == 0


def test_a_store_that_this_user_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("kvferry.pool.embedded.index.open_private", refuse)
    result = runner.invoke(app, ["pool", "stats", "--dir", str(tmp_path)])
    said = f"cannot read {tmp_path}/index: Permission denied; run this as the store's owner"
    assert result.exit_code == 2 and said in result.stderr


def test_a_store_of_another_version_is_named(tmp_path: Path) -> None:
    EmbeddedStore(tmp_path, 1 << 20, slots=1024).close()
    with (tmp_path / "index").open("r+b") as file:
        file.write(b"\xff")
    result = runner.invoke(app, ["pool", "stats", "--dir", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path} holds a store of another version" in result.stderr


@pytest.mark.parametrize("command", [["stats"], ["ls"], ["verify"], ["evict", "1"], ["clear"]])
def test_no_store(tmp_path: Path, command: list[str]) -> None:
    result = runner.invoke(app, ["pool", *command, "--dir", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert not (tmp_path / "none").exists()
    said = " ".join(result.output.split())
    assert said.endswith(
        "name its directory with --dir, or start an engine with FerryPoolConnector"
    )
