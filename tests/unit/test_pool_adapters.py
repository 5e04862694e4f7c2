"""Names of LoRA adapters: other files, another name; files that may be others, none."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.pool import adapter_files
from kvferry.pool import adapters as module
from kvferry.pool.adapters import NOBODYS, Adapter, Adapters, Asked
from no_threads import no_threads

LATER = 1e12  # an engine that starts long after all files were written
COMMIT = "1234567890" * 4


def folder(path: Path, data: bytes = b"a" * 100, config: str = '{"r": 8}') -> Path:
    path.mkdir(parents=True)
    weights = path / "adapter_model.safetensors"
    weights.write_bytes((8).to_bytes(8, "little") + b"{header}" + data)
    (path / "adapter_config.json").write_text(config)
    for file in path.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    return path


def answered(adapter: Adapter, adapters: Adapters | None = None) -> Asked:
    some = adapters or Adapters(started_at=LATER)
    asked = some.ask(adapter, seconds=10)
    while asked.name is None:
        time.sleep(0.001)
    if adapters is None:
        some.close()
    return asked


def name(adapter: Adapter, adapters: Adapters | None = None) -> str:
    told = answered(adapter, adapters).name
    assert told is not None
    return told


def snapshot_of_the_hub(path: Path) -> Path:
    blobs = folder(path / "models--org--adapter" / "blobs")
    snapshot = path / "models--org--adapter" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    return snapshot


def test_what_an_adapter_computes_is_its_name(tmp_path: Path) -> None:
    """Not where it lies, nor its number: copies share. All that changes its values counts."""
    first = folder(tmp_path / "a")
    shutil.copytree(first, tmp_path / "copy")
    same = [name(Adapter(1, str(first))), name(Adapter(7, str(tmp_path / "copy")))]
    assert same[0] == same[1] != NOBODYS
    others = [
        name(Adapter(1, str(folder(tmp_path / "b", b"b" * 100)))),
        name(Adapter(1, str(folder(tmp_path / "c", config='{"r": 16}')))),
        name(Adapter(1, str(first), options="3d")),
        name(Adapter(1, str(first)), Adapters("bfloat16", started_at=LATER)),
    ]
    assert len({*same, *others}) == 5 and NOBODYS not in others


def test_files_that_changed_after_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine may have loaded what was there before; only the operator knows."""
    adapter = Adapter(1, str(folder(tmp_path / "a")))
    running = Adapters()
    assert name(adapter, running) == name(adapter, running) == NOBODYS
    assert caplog.text.count("lora_files_final") == 1
    assert name(adapter, Adapters(final=True)) == name(adapter)


def test_a_snapshot_of_the_hub_never_changes(tmp_path: Path) -> None:
    snapshot = snapshot_of_the_hub(tmp_path)
    assert name(Adapter(1, str(snapshot)), Adapters()) != NOBODYS


@pytest.mark.parametrize("change", ["weights", "configuration", "folder", "link", "number"])
def test_files_that_are_not_the_first_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """Whatever the engine has loaded for this number: it may be either."""
    path = folder(tmp_path / "a")
    link = tmp_path / "link"
    link.symlink_to(path)
    adapters, adapter = Adapters(started_at=LATER), Adapter(1, str(link))
    assert name(adapter, adapters) != NOBODYS
    if change == "weights":
        shutil.copyfile(
            folder(tmp_path / "b", b"b" * 100) / "adapter_model.safetensors",
            path / "adapter_model.safetensors",
        )
    elif change == "configuration":
        (path / "adapter_config.json").write_text('{"r": 4}')
    elif change == "folder":
        path.rename(tmp_path / "before")
        folder(path)
    elif change == "link":
        link.unlink()
        link.symlink_to(folder(tmp_path / "b"))
    else:
        adapter = Adapter(1, str(folder(tmp_path / "b")))
    assert name(adapter, adapters) == NOBODYS
    assert "under a new name" in caplog.text


@pytest.mark.parametrize("change", ["link", "folder"])
def test_files_that_took_the_place_of_others_after_the_start(tmp_path: Path, change: str) -> None:
    """Older than the engine, but not where it found its own."""
    first, second = folder(tmp_path / "v1"), folder(tmp_path / "v2", b"b" * 100)
    current = tmp_path / "current"
    current.symlink_to(first)
    time.sleep(0.05)
    started_at = time.time() + module.CLOCK_SECONDS
    assert name(Adapter(1, str(current)), Adapters(started_at=started_at)) != NOBODYS
    time.sleep(0.05)
    current.unlink()
    if change == "link":
        current.symlink_to(second)
    else:
        second.rename(current)
    assert name(Adapter(1, str(current)), Adapters(started_at=started_at)) == NOBODYS


def test_no_thread_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on, and the next request finds a name."""
    adapters, adapter = Adapters(started_at=LATER), Adapter(1, str(folder(tmp_path / "a")))
    with no_threads(monkeypatch, "kvferry-lora"):
        assert name(adapter, adapters) == NOBODYS
    assert name(adapter, adapters) != NOBODYS


def test_no_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Loaded anew in every step; not here; without what says how it is to be used."""
    assert name(Adapter(1, str(folder(tmp_path / "a")), in_place=True)) == NOBODYS
    assert name(Adapter(2, "org/adapter")) == NOBODYS
    bare = folder(tmp_path / "bare")
    (bare / "adapter_config.json").unlink()
    assert name(Adapter(3, str(bare))) == NOBODYS
    assert "in place" in caplog.text and "download it" in caplog.text
    assert "adapter_config.json" in caplog.text


def test_files_that_change_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path / "a")
    real = module.weight_revision

    def revision(model: str) -> str:
        told = real(model)
        (path / "adapter_model.safetensors").write_bytes(b"other")
        return told

    monkeypatch.setattr(module, "weight_revision", revision)
    assert name(Adapter(1, str(path))) == NOBODYS


def test_who_asks_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that hangs: until the deadline there is no answer, then there is no name."""
    hang = threading.Event()

    def hangs(path: str) -> None:
        hang.wait(20)
        raise ValueError("whatever a file system says")

    monkeypatch.setattr(module, "stamp_of", hangs)
    adapters = Adapters(started_at=LATER)
    begin = time.monotonic()
    asked = [adapters.ask(Adapter(n, str(tmp_path)), seconds=0.2) for n in (1, 2)]
    assert [a.name for a in asked] == [None, None]
    assert time.monotonic() - begin < 0.2
    time.sleep(0.25)
    assert [a.name for a in asked] == [NOBODYS, NOBODYS]
    monkeypatch.undo()
    hang.set()
    assert name(Adapter(3, str(folder(tmp_path / "a"))), adapters) != NOBODYS
    adapters.close()
    thread = adapters._thread
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()


# What saves must find unchanged


def test_what_a_save_must_find_unchanged(tmp_path: Path) -> None:
    """Nothing where files cannot change, or the operator says so; nor where there is no name."""
    adapter = Adapter(1, str(folder(tmp_path / "a")))
    files = answered(adapter).files
    assert files is not None and files.path == adapter.path and files.why_not() == ""
    assert answered(adapter, Adapters(final=True)).files is None
    assert answered(Adapter(1, str(snapshot_of_the_hub(tmp_path)))).files is None
    unnamed = answered(adapter, Adapters())
    assert (unnamed.name, unnamed.files) == (NOBODYS, None)


@pytest.mark.parametrize("relative", [False, True])
def test_a_folder_further_up_is_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    """The adapter and its own folder are the same, down to their times; what they lie in is not."""
    path = folder(tmp_path / "up" / "team" / "a")
    monkeypatch.chdir(path.parent)
    adapters, adapter = Adapters(started_at=LATER), Adapter(1, "a" if relative else str(path))
    files = answered(adapter, adapters).files
    assert files is not None
    (tmp_path / "up" / "beside").mkdir()
    (tmp_path / "up" / "team" / "beside").mkdir()
    assert files.why_not() == "" and name(adapter, adapters) != NOBODYS
    (tmp_path / "up").rename(tmp_path / "before")
    (tmp_path / "up").mkdir()
    (tmp_path / "before" / "team").rename(tmp_path / "up" / "team")
    assert files.why_not() == adapter_files.CHANGED
    assert name(adapter, adapters) == NOBODYS


def moved_away_and_back(path: Path) -> None:
    time.sleep(0.02)  # file systems' clocks tick
    path.rename(path.with_name("elsewhere"))
    path.with_name("elsewhere").rename(path)


@pytest.mark.parametrize("through", ["itself", "a link"])
def test_a_folder_further_up_is_exchanged_and_put_back(tmp_path: Path, through: str) -> None:
    """Meanwhile the engine may have loaded what stood in its place."""
    path = folder(tmp_path / "up" / "team" / "a")
    link = tmp_path / "links" / "current"
    link.parent.mkdir()
    link.symlink_to(path.parent)
    adapters = Adapters(started_at=LATER)
    adapter = Adapter(1, str(path if through == "itself" else link / "a"))
    for beside in ("one", "two"):
        time.sleep(0.02)
        (tmp_path / "up" / beside).mkdir()
        files = answered(adapter, adapters).files
        assert files is not None and files.why_not() == "", "something was put beside it"
    moved_away_and_back(tmp_path / "up")
    assert files.why_not() == adapter_files.CHANGED
    assert name(adapter, adapters) == NOBODYS


def test_a_folder_further_up_was_moved_after_the_start(tmp_path: Path) -> None:
    """And everything in it is older than the engine."""
    path = folder(tmp_path / "up" / "team" / "a")
    time.sleep(0.05)
    started_at = time.time() + module.CLOCK_SECONDS
    adapter = Adapter(1, str(path))
    time.sleep(0.05)
    (tmp_path / "beside").mkdir()
    assert name(adapter, Adapters(started_at=started_at)) != NOBODYS
    moved_away_and_back(tmp_path / "up")
    assert name(adapter, Adapters(started_at=started_at)) == NOBODYS
    assert name(adapter, Adapters(started_at=started_at, final=True)) != NOBODYS


def test_files_of_somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host, another working folder, or gone: nobody can say that they are the same."""
    folder(tmp_path / "a")
    folder(tmp_path / "other" / "a")
    monkeypatch.chdir(tmp_path)
    files = answered(Adapter(1, "a")).files
    assert files is not None and files.why_not() == ""
    for host in ("", "another host"):
        assert replace(files, host=host).why_not() == adapter_files.ELSEWHERE
    with monkeypatch.context() as patch:
        patch.setattr(adapter_files, "this_host", lambda: "")
        assert replace(files, host="").why_not() == adapter_files.ELSEWHERE
    monkeypatch.chdir(tmp_path / "other")
    assert files.why_not() == adapter_files.CHANGED
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(tmp_path / "a")
    assert "no folder with weights" in files.why_not()
