"""The demo finds every byte in place, and finds the ones that are not."""

from __future__ import annotations

import ctypes.util
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from typer.testing import CliRunner

import host_device
from kvferry.carriers.cuda import driver
from kvferry.cli.demo import describe
from kvferry.cli.main import app
from kvferry.demo import rank as rank_module
from kvferry.demo import run as run_module
from kvferry.demo.cache import make_views
from kvferry.demo.rank import DecodeRank, PrefillRank, RankMoved, open_carriers
from kvferry.demo.run import Prefill, Ranks, run_demo
from kvferry.demo.work import DEMO_FROM, DEMO_TO, DemoWork, find_model, make_work
from kvferry.errors import BindError, DescriptionError, TransferError
from kvferry.layout.model import CacheModel, Residency
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Rank, Span

WITHOUT_VM = Path(__file__).parent.parent / "support" / "without_vm.py"
SMALL = {"min_bytes": 24 << 20, "requests": 20, "seed": 3}
TWO_RANKS = ("demo", "tp=1,block=16,order=LBNHC,full=1", "tp=1,block=24,order=LBHNC")


def children() -> int:
    return len(multiprocessing.active_children())


class Phases:
    """Notes how many requests ranks have done in each phase, and of how many."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.total: dict[str, int] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.done[phase], self.total[phase] = done, total


@pytest.mark.parametrize(("transport", "method"), [("auto", "local"), ("tcp", "tcp")])
def test_every_byte_arrives(transport: str, method: str) -> None:
    phases = Phases()
    result = run_demo(progress=phases, transport=transport, **SMALL)
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
    assert phases.done == phases.total == {"fill": 80, "load": 60, "check": 60}
    keys = {"requests", "bytes", "mismatched_bytes", "gb_per_s", "method", "seconds", "descriptors"}
    assert keys <= result.to_dict().keys()


def test_damaged_bytes_are_counted() -> None:
    """Bytes that arrived, and bytes that no load may write."""
    work = small_work()
    with all_ranks(work, "tcp") as ([source], [target], prefill):
        hand_over(source, target, prefill)
        assert target.check().wrong_bytes == 0
        view = target.views[0]
        tables = [target.table(view, request) for request in work.requests]
        for block in (tables[0][-1], target.blocks_but(view, tables)[-1]):
            unit = view.array[-1, block, 0, 0, -1].view(np.uint8)[..., :3]
            unit ^= 0xFF
            assert target.check().wrong_bytes == 3
            unit ^= 0xFF


def test_wrong_bytes_are_said_and_are_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(run_demo(*TWO_RANKS, **SMALL), mismatched_bytes=3)
    assert not wrong.ok
    monkeypatch.setattr(run_module, "run_demo", lambda *_, **__: wrong)
    done = CliRunner().invoke(app, ["demo", "--html", str(tmp_path / "plan.html")])
    assert done.exit_code == 1
    assert "WRONG    3 bytes differ," in done.stdout


def test_a_rank_that_dies_ends_the_demo() -> None:
    def killer(phase: str, done: int, total: int) -> None:
        if phase == "load":
            for process in multiprocessing.active_children():
                if process.name.startswith("decode"):
                    process.kill()

    with pytest.raises(
        TransferError, match="decode rank pp0 tp0 ended with status -9 during 'load'"
    ):
        run_demo(*TWO_RANKS, progress=killer, **SMALL)
    assert children() == 0


def forbidden(folder: Path, *how: str) -> subprocess.CompletedProcess[str]:
    """The command where the system forbids to read another process's memory."""
    _, src, dst = TWO_RANKS
    command = [sys.executable, str(WITHOUT_VM), "demo", "--from", src, "--to", dst, *how]
    command += ["--gib", "0.01", "--requests", "5", "--json", "--html", str(folder / "plan.html")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["ok"]
    return result


def test_a_named_carrier_goes_no_other_way(tmp_path: Path) -> None:
    done = forbidden(tmp_path, "--transport", "local")
    assert done.returncode and "the system does not let" in done.stderr


def test_auto_leaves_out_what_the_system_forbids(tmp_path: Path) -> None:
    result = result_of(forbidden(tmp_path))
    assert result["method"] == "tcp"
    assert "ruled out: local: the system does not let" in result["why"]


def test_auto_takes_the_fastest() -> None:
    result = run_demo(*TWO_RANKS, transport="auto", **SMALL)
    assert result.ok and result.method == "local"
    assert "the first that both have" in result.why
    assert "ruled out" not in result.why
    assert f"carrier  local: {result.why}" in describe(result)


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a driver")
def test_cuda_without_a_driver_says_so() -> None:
    with pytest.raises(TransferError, match="no NVIDIA driver"):
        run_demo(*TWO_RANKS, transport="cuda", **SMALL)
    assert children() == 0


def test_ranks_that_ended_before_they_were_asked_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ranks.ask

    def late(ranks: Ranks, *question: Any) -> Any:
        for member in ranks.everyone:
            member.process.join(30)
        return ask(ranks, *question)

    monkeypatch.setattr(Ranks, "ask", late)
    with pytest.raises(TransferError, match="no NVIDIA driver"):
        run_demo(*TWO_RANKS, transport="cuda", **SMALL)


def test_command(tmp_path: Path) -> None:
    picture = tmp_path / "plan.html"
    _, src, dst = TWO_RANKS
    options = ["--from", src, "--to", dst, "--gib", "0.01", "--requests", "5"]
    shown = CliRunner().invoke(app, ["demo", *options, "--html", str(picture)])
    assert shown.exit_code == 0
    assert "every byte" in shown.stdout
    assert f"picture: {picture}" in shown.stderr
    assert "<html" in picture.read_text()
    unwritable = str(tmp_path / ("x" * 300))
    shown = CliRunner().invoke(app, ["demo", *options, "--html", unwritable])
    assert shown.exit_code == 2 and "every byte" in shown.stdout
    assert "name another file with --html" in shown.stderr


def test_more_than_the_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = CliRunner().invoke(app, ["demo", "--gib", "100000"])
    assert shown.exit_code == 2 and "the demo needs 97.7 TiB of memory or more" in shown.stderr
    monkeypatch.setattr(run_module, "available_bytes", lambda: 32 << 20)
    with pytest.raises(DescriptionError, match="or more, and 32"):
        run_demo(**SMALL)  # 24 MiB that move take more on both sides
    assert children() == 0


def test_a_model_from_its_config(tmp_path: Path) -> None:
    """The model's name is not where it was read from. The picture needs the place."""
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}
    folder, picture = tmp_path / "Tiny-3.1-8B", tmp_path / "plan.html"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 256}))
    options = ["--from", "tp=1", "--to", "tp=1,block=24", "--gib", "0.001", "--requests", "2"]
    command = ["demo", "--model", str(folder), *options, "--html", str(picture)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.stderr
    assert "from     Tiny-3.1-8B, tp=1" in shown.stdout
    assert "<html" in picture.read_text()


def test_refusals() -> None:
    with pytest.raises(DescriptionError, match="local, tcp"):
        run_demo(transport="pigeon")
    with pytest.raises(DescriptionError, match="opaque"):
        run_demo("demo", "tp=1,interior=opaque", "tp=1,interior=opaque", **SMALL)
    with pytest.raises(DescriptionError, match="names the group 'windoe'"):
        run_demo("demo", "tp=1,block.windoe=32", "tp=1", **SMALL)
    with pytest.raises(BindError, match="the source keeps those from"):
        run_demo("demo", "tp=1,block=16", "tp=1,block=24", **SMALL)
    assert children() == 0


@pytest.mark.parametrize(
    ("model", "src", "dst"),
    [
        ("demo", "tp=3,pp=3,block=8,order=BHLNC,full=1", "tp=4,block=48,order=LBHNC,interior=cpu"),
        ("demo", "tp=4,dcp=1,block=16,order=LHBNC,interior=split", "tp=1,block=16,align=512"),
        ("demo", "tp=2,block=24,overlay=1,full=1", "tp=5,block=16,order=BLNHC,interior=planes"),
        ("deepseek-v3", "tp=4,dcp=4,interleave=2,block=16", "tp=2,pp=2,block=32,order=LBNHC"),
        ("gpt-oss-20b", "tp=4,block=32,kernel=16,full=1", "tp=8,pp=2,block=16,full=1"),
        ("granite-4.0-h-small", "tp=2,block=16,conv=SD", "tp=4,block=32"),
        ("demo", "tp=2,block=32,interior=cpu_amx,full=1", "tp=3,block=16,order=LBNHC"),
    ],
)
def test_any_shape(model: str, src: str, dst: str) -> None:
    """The same ranks in one process, over shapes with one oddity each."""
    shapes = EngineShape.parse(src), EngineShape.parse(dst)
    work = make_work(find_model(model), *shapes, min_bytes=2 << 20, requests=6, seed=1)
    with all_ranks(work, "tcp") as (sources, targets, prefill):
        for source in sources:
            source.fill()
            source.hold(prefill.tickets)
        for target in targets:
            target.fill()
            moved = target.load(passed_on(prefill))
            assert {name for name, _ in moved.links} == {"tcp"}
            checked = target.check()
            assert checked.wrong_bytes == 0
            assert 0 < checked.arrived_bytes <= moved.bytes
        assert [source.delivered() for source in sources] == [len(work.requests)] * len(sources)


@contextmanager
def all_ranks(
    work: DemoWork, transport: str
) -> Iterator[tuple[list[PrefillRank], list[DecodeRank], Prefill]]:
    """All ranks of both engines in this process, met."""

    def nobody() -> None:
        pass

    def opened(rank: Any) -> Any:
        stack.callback(rank.close)
        return rank

    with closing(Prefill(work)) as prefill, ExitStack() as stack:
        sources = [
            opened(PrefillRank(work, rank, transport, nobody)) for rank in work.src.shape.ranks
        ]
        prefill.introduce([source.describe() for source in sources])
        targets = [
            opened(DecodeRank(work, rank, transport, nobody)) for rank in work.dst.shape.ranks
        ]
        yield sources, targets, prefill


def small_work() -> DemoWork:
    shapes = [EngineShape.parse(text) for text in TWO_RANKS[1:]]
    return make_work(find_model("demo"), *shapes, min_bytes=2 << 20, requests=6, seed=1)


def passed_on(prefill: Prefill) -> list[dict[str, Any]]:
    return [ticket.to_params() for ticket in prefill.tickets]


def hand_over(source: PrefillRank, target: DecodeRank, prefill: Prefill) -> RankMoved:
    source.fill()
    target.fill()
    source.hold(prefill.tickets)
    return target.load(passed_on(prefill))


def test_caches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is filled goes there, what is compared comes from there. The device is none, and tcp,
    which reaches its memory, stands in for the carrier."""
    on = host_device.use(monkeypatch)
    monkeypatch.setattr(driver, "device", lambda _: on)
    monkeypatch.setattr(
        rank_module, "open_carriers", lambda _, memory: open_carriers("tcp", memory)
    )
    with all_ranks(small_work(), "cuda") as ([source], [target], prefill):
        assert source.memory.address in on.live and target.memory.address in on.live
        for rank in (source, target):
            rank.fill()
            rank.memory.bytes[:] = 0  # from here on, nobody looks at the copies
        source.hold(prefill.tickets)
        moved = target.load(passed_on(prefill))
        checked = target.check()
        assert checked.wrong_bytes == 0
        assert 0 < checked.arrived_bytes <= moved.bytes and checked.guarded_bytes > 0
        on.live[target.memory.address][: target.memory.bytes.nbytes] ^= 1
        assert target.check().wrong_bytes >= checked.arrived_bytes


def test_work_covers_what_was_asked_for() -> None:
    shapes = EngineShape.parse(DEMO_FROM), EngineShape.parse(DEMO_TO)
    work = make_work(find_model("demo"), *shapes, min_bytes=1 << 30, requests=300, seed=0)
    again = make_work(find_model("demo"), *shapes, min_bytes=1 << 30, requests=300, seed=0)
    assert len(work.requests) == 300
    assert 1 << 30 <= work.bytes < 1.2 * (1 << 30)
    assert len({r.tokens for r in work.requests}) > 50
    assert sum(r.skip > 0 for r in work.requests) > 20
    for engine in (work.src, work.dst):
        for group in range(2):
            ids = np.concatenate([tables[group] for tables in engine.tables])
            ids = ids[ids != 0]
            assert len(np.unique(ids)) == len(ids)
            assert (np.diff(ids) == 1).mean() < 0.1  # scattered
    assert all(
        np.array_equal(a, b)
        for x, y in zip(work.dst.tables, again.dst.tables, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_work_of_a_model_whose_requests_do_not_grow(kind: Literal["window", "chunk"]) -> None:
    """Longer requests need as many bytes, a little more or less; so there are more of them."""
    full = find_model("demo").groups[0]
    model = CacheModel(kind, (replace(full, residency=Residency(kind, 100)),))
    shapes = EngineShape.parse("tp=2,block=16"), EngineShape.parse("tp=3,block=16")
    work = make_work(model, *shapes, min_bytes=256 << 20, requests=8, seed=1)
    assert work.bytes >= 256 << 20
    assert len(work.requests) < 1000 and max(r.tokens for r in work.requests) < 10_000_000


def test_every_logical_byte_has_its_own_value() -> None:
    """Two places, layers, units or requests never look alike, and the check sees one byte."""
    model, shape = find_model("demo"), EngineShape.parse("tp=1")
    layout = RankLayout.build(model, shape, Rank(0, 0), 4)
    views = make_views(model, layout, [np.zeros(r.bytes, np.uint8) for r in layout.regions])
    ids, entries = np.asarray([1, 3]), np.arange(32).reshape(2, 1, 16)
    for number, view in enumerate(views):
        view.write(ids, 0, (number,), entries)
        assert view.wrong(ids, 0, (number,), entries) == 0
        assert view.wrong(ids[::-1].copy(), 0, (number,), entries) > 0
    units = np.concatenate([v.array[:, ids].reshape(-1, v.array.shape[-1]) for v in views])
    assert len(np.unique(units, axis=0)) == len(units)
    views[0].array[2, 3, 0, 7, 5, 1] ^= np.uint64(1 << 20)
    assert views[0].wrong(ids, 0, (0,), entries) == 1
    assert views[0].units == Span(0, 12)
