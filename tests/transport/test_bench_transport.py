"""The transport benchmark runs, and says what it promises to say."""

from __future__ import annotations

import pytest

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
    assert len(list(lines(result))) == 5 + len(rows) + len(result.missing)
    page = transport_bench_page(result)
    assert page.startswith("<!doctype html>") and "<h2>Writes</h2>" in page
    assert "http" not in page  # needs nothing from elsewhere


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(TransferError, match="1 to"):
        run(sizes=(0,))
    with pytest.raises(TransferError, match="raw-nixl"):
        run(carriers=("pigeon",))
