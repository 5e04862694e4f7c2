"""Names of weights: other weights have other names, and nothing is guessed."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace as Config

import pytest

from kvferry.pool import weights as module
from kvferry.pool.weights import engine_weights, hub_snapshot, weight_revision

COMMIT, OTHER = "1234567890" * 4, "abcdef0123" * 4


def folder(path: Path, data: bytes, when: int = 1_700_000_000) -> Path:
    path.mkdir(parents=True)
    file = path / "model.safetensors"
    file.write_bytes((8).to_bytes(8, "little") + b"{header}" + data)
    os.utime(file, (when, when))
    return path


@pytest.fixture(params=["small", "large"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are read whole, and others."""
    if request.param == "large":
        monkeypatch.setattr(module, "WHOLE_BYTES", 0)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 0)


def name(path: Path) -> str:
    return weight_revision(str(path))


class Resolved(str):
    """A branch, and its commit when the engine started, as vLLM keeps them."""

    resolved: str


def engine(model: str, commit: str | None = None, **more: object) -> Config:
    revision = Resolved("main") if commit else None
    if revision is not None and commit:
        revision.resolved = commit
    config = Config(model=model, revision=revision, **more)
    return Config(model_config=config, load_config=Config(load_format="auto"))


def test_hub_names_and_commits() -> None:
    """Two models with one last name, two commits of one branch: four names. No commit, no name."""
    names = [
        engine_weights(engine(f"{org}/Llama-8B", commit))
        for org in ("orgA", "orgB")
        for commit in (COMMIT, OTHER)
    ]
    assert len(set(names)) == 4
    assert engine_weights(engine("orgA/Llama-8B", COMMIT)) == names[0]
    pinned = engine("orgA/Llama-8B")
    pinned.model_config.revision = COMMIT
    assert engine_weights(pinned) == names[0]
    pinned.model_config.revision = "main"  # a branch moves: it names nothing
    assert engine_weights(pinned) != engine_weights(pinned)
    assert engine_weights(pinned, "v7") == "named v7"


def test_weights_that_are_elsewhere() -> None:
    """A bucket's name says nothing about what lies in it."""
    streamed = engine("/tmp/config-only", COMMIT, model_weights="s3://bucket/llama")
    assert engine_weights(streamed).startswith("unknown")
    assert weight_revision("s3://bucket/llama") != weight_revision("s3://bucket/llama")


def test_draft_and_dummy_weights(tmp_path: Path) -> None:
    model = str(folder(tmp_path / "m", b"1" * 100))
    plain = engine(model)
    dummy = engine(model)
    dummy.load_config.load_format = "dummy"
    drafts = []
    for data in (b"a", b"b"):
        with_draft = engine(model)
        draft = Config(model=str(folder(tmp_path / f"draft{data!r}", data)), revision=None)
        with_draft.speculative_config = Config(draft_model_config=draft)
        drafts.append(with_draft)
    names = [engine_weights(e) for e in (plain, dummy, *drafts)]
    assert len(set(names)) == 4 and all("files" in n for n in names)


@pytest.mark.usefixtures("both")
def test_any_megabyte_that_differs_is_seen(tmp_path: Path) -> None:
    """Also one in between both ends and the middle, and also where the time was kept."""
    data = bytearray(os.urandom(1 << 20) * 9)
    first = name(folder(tmp_path / "a", bytes(data)))
    assert name(folder(tmp_path / "b", bytes(data))) == first  # wherever it lies
    for megabyte in range(9):
        other = bytearray(data)
        start = megabyte << 20
        other[start : start + (1 << 20)] = bytes(1 << 20)
        assert name(folder(tmp_path / f"c{megabyte}", bytes(other))) != first, megabyte


def test_small_files_are_known_by_all_they_hold(tmp_path: Path) -> None:
    """Whenever they were written, and however they came."""
    data = bytearray(os.urandom(3 << 20))
    first = name(folder(tmp_path / "a", bytes(data)))
    later = folder(tmp_path / "b", bytes(data), when=1_700_000_001)
    assert name(later) == first
    downloaded(later, time.time() + 1)
    assert name(later) == first
    data[2 << 20 | 123_456] ^= 1
    assert name(folder(tmp_path / "c", bytes(data))) != first  # as old as the first
    (later / "model.safetensors").rename(later / "other.safetensors")
    assert name(later) != first


@pytest.mark.usefixtures("large")
def test_a_small_change_is_seen_by_its_time(tmp_path: Path) -> None:
    data = bytearray(os.urandom(3 << 20))
    first = name(folder(tmp_path / "a", bytes(data)))
    data[2 << 20 | 123_456] ^= 1
    assert name(folder(tmp_path / "b", bytes(data), when=1_700_000_001)) != first


@pytest.mark.usefixtures("both")
def test_the_table_of_contents_counts(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", bytes(100))
    first = name(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"{header}", b"{reader}"))
    os.utime(file, (1_700_000_000,) * 2)
    assert name(path) != first


def snapshot(home: Path, repository: str, commit: str, data: bytes) -> Path:
    """As the Hub's client lays its cache out."""
    root = home / ("models--" + repository.replace("/", "--"))
    blob = root / "blobs" / hashlib.sha256(data).hexdigest()
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    path = root / "snapshots" / commit
    path.mkdir(parents=True)
    (path / "model.safetensors").symlink_to(Path("../../blobs") / blob.name)
    return path


def test_a_snapshot_is_its_commit(tmp_path: Path) -> None:
    """The same on every host, and for an engine that knows the Hub's name only."""
    one = snapshot(tmp_path / "one", "org/Llama-8B", COMMIT, b"w")
    time.sleep(0.01)
    two = snapshot(tmp_path / "two", "org/Llama-8B", COMMIT, b"w")
    assert hub_snapshot(one) == ("org/Llama-8B", COMMIT)
    assert name(one) == name(two) == engine_weights(engine("org/Llama-8B", COMMIT))
    assert name(snapshot(tmp_path / "one", "org/Llama-8B", OTHER, b"w")) != name(one)
    (one / "model.safetensors").unlink()  # somebody's own file in place of the Hub's
    (one / "model.safetensors").write_bytes(b"x")
    assert name(one) != name(two)


@pytest.mark.usefixtures("large")
def test_what_the_hubs_client_noted(tmp_path: Path) -> None:
    """Downloads of one file at different times share; a file that was changed since does not."""
    paths = [folder(tmp_path / str(n), b"w" * 1000, 1_700_000_000 + n) for n in range(2)]
    for path in paths:
        downloaded(path, time.time())
    names = [name(path) for path in paths]
    assert names[0] == names[1]
    os.utime(paths[1] / "model.safetensors", (time.time() + 5,) * 2)
    assert name(paths[1]) != names[1]


def downloaded(path: Path, when: float) -> None:
    """As the Hub's client notes it beside the file."""
    note = path / ".cache/huggingface/download/model.safetensors.metadata"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"{COMMIT}\n{hashlib.sha256(b'w').hexdigest()}\n{when}\n")


@pytest.mark.usefixtures("both")
def test_other_weights_that_keep_an_older_time(tmp_path: Path) -> None:
    """Put over a download from an hour ago, as `cp -p`, `rsync -t` and tar do it."""
    first = folder(tmp_path / "a", b"w" * 1000)
    other = folder(tmp_path / "b", b"v" * 1000)  # as long, and as old
    for path in (first, other):
        downloaded(path, time.time() - 3600)
    assert name(first) != name(other)
    longer = folder(tmp_path / "c", b"w" * 1001)
    for path in (first, longer):  # also where a note is believed, it is not all
        downloaded(path, time.time() + 1)
    assert name(first) != name(longer)


def test_nothing_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    with caplog.at_level("WARNING", "kvferry"):
        assert name(tmp_path / "empty") != name(tmp_path / "empty")
    assert "weight_revision" in caplog.text


def test_it_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the files are, the number of reads is bounded."""
    path = folder(tmp_path / "a", b"x")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(200 << 30)  # a hole
    reads = []
    pread = os.pread

    def counted(*args: int) -> bytes:
        reads.append(args)
        return pread(*args)

    monkeypatch.setattr(module.os, "pread", counted)
    assert name(path).startswith("files")
    assert len(reads) <= module.MOST_SAMPLES + 8
