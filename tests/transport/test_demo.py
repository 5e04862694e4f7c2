"""The demo finds every byte in place, and finds the ones that are not."""

from __future__ import annotations

import ctypes.util
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import host_device
from kvferry.cli.demo import Lines, demo, describe
from kvferry.demo import consumer as consumer_module
from kvferry.demo import on_gpu
from kvferry.demo import producer as producer_module
from kvferry.demo import run as demo_module
from kvferry.demo.cache import make_views, write_entries, wrong_entries
from kvferry.demo.consumer import Consumer
from kvferry.demo.ends import carriers_for
from kvferry.demo.producer import Producer
from kvferry.demo.run import run_demo
from kvferry.demo.work import DEMO_FROM, DEMO_TO, demo_model, find_model, make_work
from kvferry.errors import DescriptionError, PermissionDenied, TransferError
from kvferry.layout.shape import EngineShape, Rank, Span

WITHOUT_VM = Path(__file__).parent.parent / "support" / "without_vm.py"
SMALL = {"min_bytes": 24 << 20, "requests": 20, "seed": 3}
TWO_RANKS = ("demo", "tp=1,block=16,order=LBNHC", "tp=1,block=24,order=LBHNC")


def children() -> int:
    return len(multiprocessing.active_children())


@pytest.mark.parametrize("method", ["vm", "shared", "tcp"])
def test_every_byte_arrives(method: str) -> None:
    lines: list[str] = []
    how = {"transport" if method == "tcp" else "method": method}
    result = run_demo(progress=Lines(lines.append), **how, **SMALL)
    assert result.ok
    assert result.mismatched_bytes == 0
    assert result.method == method
    assert result.requests == 20
    assert result.bytes == result.checked_bytes >= 24 << 20
    assert result.guarded_bytes > 0
    assert result.skipped_tokens > 0
    assert (result.src_ranks, result.dst_ranks) == (4, 3)
    assert children() == 0
    assert "every byte" in "\n".join(describe(result))
    assert any(line.startswith("move") for line in lines)
    keys = {"requests", "bytes", "mismatched_bytes", "gb_per_s", "method", "seconds", "descriptors"}
    assert keys <= result.to_dict().keys()


@pytest.mark.parametrize(("fault", "method"), [("flip", "vm"), ("stray", "shared")])
def test_damaged_bytes_are_counted(fault: str, method: str) -> None:
    result = run_demo(*TWO_RANKS, method=method, fault=fault, **SMALL)
    assert result.mismatched_bytes == 3
    assert not result.ok
    assert "WRONG" in "\n".join(describe(result))


def test_a_rank_that_dies_ends_the_demo() -> None:
    with pytest.raises(TransferError, match=r"consumer pp0 tp0 ended with status 3 during 'pull'"):
        run_demo(*TWO_RANKS, fault="die", **SMALL)
    assert children() == 0


def test_memory_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto falls back and says why; vm gives the reason as an error."""

    class Crew(demo_module.Crew):
        def ask(self, members, order, advance):  # type: ignore[no-untyped-def]
            if order.name == "probe":
                return ["the system does not let us"]
            return super().ask(members, order, advance)

    monkeypatch.setattr(demo_module, "Crew", Crew)
    result = run_demo(*TWO_RANKS, method="auto", **SMALL)
    assert result.ok
    assert result.method == "shared"
    assert "does not let us" in result.why
    with pytest.raises(PermissionDenied, match="does not let us"):
        run_demo(*TWO_RANKS, method="vm", **SMALL)
    assert children() == 0


def asks_for(transport: str) -> list[str]:
    _, src, dst = TWO_RANKS
    sizes = ["--gib", "0.01", "--requests", "5", "--json"]
    return ["demo", "--from", src, "--to", dst, *sizes, "--transport", transport]


def forbidden(arguments: list[str], folder: Path) -> dict[str, Any]:
    """What the command prints where the system forbids to read another process's memory."""
    command = [sys.executable, str(WITHOUT_VM), *arguments, "--html", str(folder / "plan.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["ok"]
    assert f"method {result['method']}: {result['why']}" in done.stderr
    return result


def test_a_carrier_that_goes_another_way_says_so(tmp_path: Path) -> None:
    result = forbidden(asks_for("local"), tmp_path)
    assert result["method"] == "local, by tcp"
    assert "the system does not let" in result["why"]


def test_auto_leaves_out_what_the_system_forbids(tmp_path: Path) -> None:
    result = forbidden(asks_for("auto"), tmp_path)
    assert result["method"] == "tcp"
    assert "ruled out: local: the system does not let" in result["why"]
    assert "not opened: " in result["why"] and "nixl: it " in result["why"]


def test_auto_takes_the_fastest() -> None:
    result = run_demo(*TWO_RANKS, transport="auto", **SMALL)
    assert result.ok and result.method == "local"
    assert "carrier local: the first that both have" in result.why
    assert "ruled out: none before it" in result.why
    assert f"method   local: {result.why}" in describe(result)


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a driver")
def test_cuda_without_a_driver_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "make_work", None)
    with pytest.raises(TransferError, match="no NVIDIA driver"):
        run_demo(transport="cuda")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "deep" / "plan.html"
    assert demo(*TWO_RANKS, gib=0.01, requests=5, html=picture) == 0
    shown = capsys.readouterr()
    assert "every byte" in shown.out
    assert str(picture) in shown.out
    assert "<html" in picture.read_text()


def test_refusals() -> None:
    with pytest.raises(DescriptionError, match="method"):
        run_demo(method="magic")
    with pytest.raises(DescriptionError, match="local, tcp"):
        run_demo(transport="null")
    with pytest.raises(DescriptionError, match="memory"):
        run_demo(min_bytes=1 << 50, requests=1 << 10)
    with pytest.raises(DescriptionError, match="opaque"):
        run_demo("demo", "tp=1,interior=opaque", "tp=1,interior=opaque", **SMALL)
    assert children() == 0


@pytest.mark.parametrize(
    ("model", "src", "dst"),
    [
        ("demo", "tp=3,pp=3,block=8,order=BHLNC", "tp=4,block=48,order=LBHNC,interior=cpu"),
        ("demo", "tp=4,dcp=1,block=16,order=LHBNC,interior=split", "tp=1,block=16,align=512"),
        ("demo", "tp=2,block=24,overlay=1", "tp=5,block=16,order=BLNHC,interior=planes"),
        ("deepseek-v3", "tp=4,dcp=4,interleave=2,block=16", "tp=2,pp=2,block=32,order=LBNHC"),
        ("gpt-oss-20b", "tp=8,block=32,kernel=16", "tp=16,pp=5,block=16,full=1"),
        ("granite-4.0-h-small", "tp=2,block=16,conv=SD", "tp=4,block=32"),
    ],
)
def test_any_shape(model: str, src: str, dst: str) -> None:
    """The same ranks in one process, over shapes with one oddity each."""
    shapes = EngineShape.parse(src), EngineShape.parse(dst)
    work = make_work(find_model(model), *shapes, min_bytes=2 << 20, requests=6, seed=1)
    files = [os.memfd_create("test") for _ in work.src.ranks]

    def nobody(_: int) -> None:
        pass

    try:
        producers = [
            Producer(work, rank, "", [file], nobody)
            for rank, file in zip(work.src.ranks, files, strict=True)
        ]
        peers = [producer.set_up("shared") for producer in producers]
        for producer in producers:
            producer.fill()
        for rank in work.dst.ranks:
            consumer = Consumer(work, rank, "", files, nobody)
            consumer.set_up("shared")
            assert {link.method for link in consumer.link(peers)} <= {"shared"}
            consumer.fill()
            pulled = consumer.pull()
            checked = consumer.check()
            assert checked.wrong_bytes == 0
            assert 0 < checked.arrived_bytes <= pulled.bytes
    finally:
        for file in files:
            os.close(file)


def test_caches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is filled goes there, what is compared comes from there. The device is none, and tcp,
    which reaches its memory, stands in for the carrier."""
    on = host_device.use(monkeypatch)
    monkeypatch.setattr(on_gpu, "device", lambda _: on)
    for module in (producer_module, consumer_module):
        monkeypatch.setattr(module, "carriers_for", lambda _, memory: carriers_for("tcp", memory))
    shapes = [EngineShape.parse(text) for text in TWO_RANKS[1:]]
    work = make_work(find_model("demo"), *shapes, min_bytes=2 << 20, requests=6, seed=1)
    producer, consumer = (
        kind(work, Rank(0, 0), "", [], lambda _: None) for kind in (Producer, Consumer)
    )
    peer = producer.set_up("cuda")
    consumer.set_up("cuda")
    try:
        assert peer.address in on.live and consumer.memory.address in on.live
        consumer.link([peer])
        for rank in (producer, consumer):
            rank.fill()
        producer.memory.bytes[:] = 0  # from here on, nobody looks at the copies
        consumer.memory.bytes[:] = 0
        pulled = consumer.pull()
        checked = consumer.check()
        assert checked.wrong_bytes == 0
        assert 0 < checked.arrived_bytes <= pulled.bytes and checked.guarded_bytes > 0
        on.live[consumer.memory.address][: consumer.memory.bytes.nbytes] ^= 1
        assert consumer.check().wrong_bytes >= checked.arrived_bytes
    finally:
        for rank in (producer, consumer):
            rank.carriers[0].close()


def test_work_covers_what_was_asked_for() -> None:
    shapes = EngineShape.parse(DEMO_FROM), EngineShape.parse(DEMO_TO)
    work = make_work(demo_model(), *shapes, min_bytes=1 << 30, requests=300, seed=0)
    again = make_work(demo_model(), *shapes, min_bytes=1 << 30, requests=300, seed=0)
    assert len(work.requests) == 300
    assert 1 << 30 <= work.bytes < 1.2 * (1 << 30)
    assert len({r.tokens for r in work.requests}) > 50
    assert sum(r.skip > 0 for r in work.requests) > 20
    for tables in ("src_tables", "dst_tables"):
        for group in range(2):
            ids = np.concatenate([getattr(r, tables)[group] for r in work.requests])
            ids = ids[ids != 0]
            assert len(np.unique(ids)) == len(ids)
            assert (np.diff(ids) == 1).mean() < 0.1  # scattered
    assert all(
        np.array_equal(a, b)
        for x, y in zip(work.requests, again.requests, strict=True)
        for a, b in zip(x.dst_tables, y.dst_tables, strict=True)
    )


def test_every_logical_byte_has_its_own_value() -> None:
    """Two places, layers, units or requests never look alike, and the check sees one byte."""
    memory = {"full": np.zeros(5 * 4 * 16 * 12 * 512, np.uint8)}
    memory["window"] = np.zeros(2 * 4 * 16 * 12 * 512, np.uint8)
    views = make_views(demo_model(), EngineShape.parse("tp=1"), Rank(0, 0), 4, memory)
    ids, entries = np.asarray([1, 3]), np.arange(32).reshape(2, 1, 16)
    for number, view in enumerate(views):
        write_entries(view, (number,), ids, entries)
        assert wrong_entries(view, (number,), ids, entries) == 0
        assert wrong_entries(view, (number,), ids[::-1].copy(), entries) > 0
    units = np.concatenate([v.array[:, ids].reshape(-1, v.array.shape[-1]) for v in views])
    assert len(np.unique(units, axis=0)) == len(units)
    views[0].array[2, 3, 0, 7, 5, 1] ^= np.uint64(1 << 20)
    assert wrong_entries(views[0], (0,), ids, entries) == 1
    assert views[0].units == Span(0, 12)
