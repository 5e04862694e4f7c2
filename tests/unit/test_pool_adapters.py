"""Digests of LoRA adapters: other files, another digest; files that may be others, none."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest

from kvferry.pool import weights as module
from kvferry.pool.weights import NOT_SHARED, Adapters, Asked
from no_threads import no_threads
from waiting import wait_until

COMMIT = "1234567890" * 4


def folder(path: Path, data: bytes = b"a" * 100, config: str = '{"r": 8}') -> Path:
    path.mkdir(parents=True)
    weights = path / "adapter_model.safetensors"
    weights.write_bytes((8).to_bytes(8, "little") + b"{header}" + data)
    (path / "adapter_config.json").write_text(config)
    for file in path.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    return path


def request(number: int, path: Path | str, **options: bool) -> Any:
    lora = Fake(lora_int_id=number, lora_path=str(path), lora_name="sql", **options)
    return Fake(lora_request=lora)


def ask(adapters: Adapters, asked: Any, seconds: float = 10) -> Asked:
    made = adapters.ask(asked, seconds)
    assert made is not None
    return made


def digest(asked: Any, adapters: Adapters | None = None) -> str:
    some = adapters or Adapters()
    question = ask(some, asked)
    while (told := question.digest) is None:
        time.sleep(0.001)
    if adapters is None:
        some.close()
    return told


def test_what_an_adapter_computes_is_its_digest(tmp_path: Path) -> None:
    """Not where it lies, nor its number: copies share. All that changes its values counts."""
    first = folder(tmp_path / "a")
    shutil.copytree(first, tmp_path / "copy")
    same = [digest(request(1, first)), digest(request(7, tmp_path / "copy"))]
    assert same[0] == same[1] != NOT_SHARED
    others = [
        digest(request(1, folder(tmp_path / "b", b"b" * 100))),
        digest(request(1, folder(tmp_path / "c", config='{"r": 16}'))),
        digest(request(1, first, is_3d_lora_weight=True)),
        digest(request(1, first), Adapters("bfloat16")),
    ]
    assert len({*same, *others}) == 5 and NOT_SHARED not in others


def test_a_snapshot_of_the_hub(tmp_path: Path) -> None:
    """Wherever its cache lies, and whatever other files say of it."""
    digests = set()
    for cache in ("one", "other"):
        repository = tmp_path / cache / "models--org--adapter"
        blobs, snapshot = folder(repository / "blobs"), repository / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        for blob in blobs.iterdir():
            (snapshot / blob.name).symlink_to(blob)
        digests.add(digest(request(1, snapshot)))
    assert len(digests) == 1 and NOT_SHARED not in digests


def test_without_an_adapter() -> None:
    adapters = Adapters()
    assert adapters.ask(Fake(lora_request=None)) is adapters.ask(Fake()) is None


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the engine first serves the adapter. Loaded anew, it has a number of its own."""
    read = []
    real = module.weight_revision
    monkeypatch.setattr(module, "weight_revision", lambda path: read.append(path) or real(path))
    adapters, path = Adapters(), folder(tmp_path / "a")
    assert len({digest(request(1, path), adapters) for _ in range(3)}) == 1
    assert read == [str(path)]
    anew = folder(tmp_path / "b", b"b" * 100)
    assert digest(request(2, anew), adapters) != digest(request(1, path), adapters)
    assert read == [str(path), str(anew)]


def test_a_number_with_two_paths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever vLLM has loaded for this number: it may be either, also for who asked before."""
    adapters, first = Adapters(), request(1, folder(tmp_path / "a"))
    assert digest(first, adapters) != NOT_SHARED
    before = ask(adapters, first)
    other = request(1, folder(tmp_path / "b"))
    assert digest(other, adapters) == digest(other, adapters) == NOT_SHARED
    assert digest(first, adapters) == before.digest == NOT_SHARED
    assert caplog.text.count("under a new name") == 1
    assert digest(request(2, tmp_path / "b"), adapters) != NOT_SHARED


def test_loaded_in_place(tmp_path: Path) -> None:
    """Also if it was not, at first, or is not any more."""
    path = folder(tmp_path / "a")
    plain, in_place = request(1, path), request(1, path, load_inplace=True)
    for order in ((plain, in_place, plain), (in_place, plain, in_place)):
        adapters = Adapters()
        told = [digest(asked, adapters) for asked in order]
        assert told[1:] == [NOT_SHARED, NOT_SHARED]
        assert (told[0] == NOT_SHARED) == (order[0] is in_place)


def test_no_digest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Loaded anew in every step; not here; without weights, or what says how to use them."""
    adapters = Adapters()
    bare, empty = folder(tmp_path / "bare"), folder(tmp_path / "empty")
    (bare / "adapter_config.json").unlink()
    (empty / "adapter_model.safetensors").unlink()
    file = folder(tmp_path / "a") / "adapter_model.safetensors"
    asked = [
        request(1, tmp_path / "a", load_inplace=True),
        *(request(2 + i, path) for i, path in enumerate(("org/adapter", bare, empty, file))),
    ]
    for _ in range(2):
        assert {digest(each, adapters) for each in asked} == {NOT_SHARED}
    assert "in place" in caplog.text and "adapter_config.json" in caplog.text
    assert caplog.text.count("download it") == 3
    assert len(caplog.records) == len(asked)
    told = ask(adapters, asked[1]).unknown  # for clients
    assert "'sql'" in told and "org" not in told


def test_files_that_can_be_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no thread, or no folder: the engine goes on, and the next request finds it."""
    adapters, asked = Adapters(), request(1, tmp_path / "a")
    with no_threads(monkeypatch, "kvferry-lora"):
        assert digest(asked, adapters) == NOT_SHARED
    assert digest(asked, adapters) == NOT_SHARED
    folder(tmp_path / "a")
    assert digest(asked, adapters) != NOT_SHARED


def test_who_asks_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that hangs: until the deadline there is no answer, then there is no digest."""
    hang = threading.Event()

    def hangs(path: Path) -> None:
        hang.wait(20)
        raise ValueError("whatever a file system says")

    folder(tmp_path / "a")
    monkeypatch.setattr(module, "weight_files", hangs)
    adapters = Adapters()
    before = threading.enumerate()
    asked = [ask(adapters, request(n, tmp_path / "a"), seconds=0.5) for n in (1, 2)]
    assert [a.digest for a in asked] == [None, None]
    wait_until(lambda: [a.digest for a in asked] == [NOT_SHARED, NOT_SHARED])
    monkeypatch.undo()
    hang.set()
    assert digest(request(3, tmp_path / "a"), adapters) != NOT_SHARED
    assert asked[1].digest == digest(request(3, tmp_path / "a"), adapters)  # it was only late
    (thread,) = [t for t in threading.enumerate() if t not in before]
    adapters.close()
    thread.join(30)
    assert not thread.is_alive()
