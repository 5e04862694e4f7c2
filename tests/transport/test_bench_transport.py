"""The transport benchmark runs, and says what it promises to say."""

from __future__ import annotations

import pytest

from kvferry.bench.paired import PairedRow
from kvferry.bench.targets import judge
from kvferry.bench.transport import lines, run
from kvferry.cli.bench import transport_bench_page
from kvferry.errors import TransferError


def test_a_short_run() -> None:
    result = run(sizes=(4096, 1 << 20), seconds=0.1, carriers=("local", "tcp"))
    assert min(result.memcpy_gb_s, result.scatter_memcpy_gb_s, result.socket_gb_s) > 0
    rows = {(r.carrier, r.op, r.descriptor_bytes): r for r in result.results}
    movers = [("memcpy", "copy"), *((c, op) for c in ("local", "tcp") for op in ("read", "write"))]
    assert set(rows) == {(*mover, s) for mover in movers for s in (4096, 1 << 20)}
    for (carrier, _, size), row in rows.items():
        assert row.gb_s > 0
        assert row.descriptors_s == pytest.approx(row.gb_s * 1e9 / size)
        assert (row.of_baseline is None) == (carrier == "memcpy")
    assert not result.paired  # neither of them has a library of its own
    assert {t.met for t in result.targets} == {None}  # nothing to compare with was measured
    assert len(list(lines(result))) == 5 + len(rows) + len(result.missing) + 1 + len(result.targets)
    page = transport_bench_page(result)
    assert page.startswith("<!doctype html>") and "<h2>Writes</h2>" in page
    assert "http" not in page  # needs nothing from elsewhere


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(TransferError, match="1 to"):
        run(sizes=(0,))
    with pytest.raises(TransferError, match="raw-nixl"):
        run(carriers=("pigeon",))


def test_targets_are_judged_by_their_worst_cell() -> None:
    rates = {
        ("local", "read", 4096): 4.0,
        ("raw-nixl", "read", 4096): 1.0,
        ("local", "write", 4096): 1.9,
        ("raw-nixl", "write", 4096): 1.0,
        ("local", "write", 256): 0.1,  # no target there
        ("raw-nixl", "write", 256): 1.0,
    }
    pairs = [
        PairedRow("mooncake", "read", 256, "direct", 11, 1.0, 0.96, 0.5, 2.0),
        PairedRow("mooncake", "write", 256, "direct", 11, 1.0, 0.94, 0.5, 2.0),
        PairedRow("nixl", "write", 256, "packed", 11, 1.0, 1.2, 0.5, 2.0),
        PairedRow("nixl", "write", 256, "direct", 11, 1.0, 0.9, 0.5, 2.0),  # as it does not come
    ]
    first, *others, mooncake, nixl = judge(rates, pairs)
    assert (first.found, first.where, first.met) == (1.9, "write 4.0 KiB", False)
    assert {t.met for t in others} == {None}
    assert (mooncake.found, mooncake.where, mooncake.met) == (0.94, "write 256 B", False)
    assert nixl.met
