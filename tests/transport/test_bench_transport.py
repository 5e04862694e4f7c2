"""The transport benchmark runs, and says what it promises to say."""

from __future__ import annotations

import socket
import sys
from collections.abc import Generator
from threading import Thread
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.transport import PairedRow, judge, page
from kvferry.bench import transport
from kvferry.bench.transport import (
    LOOPBACK,
    CarrierResult,
    TransportResult,
    open_carrier,
    plain_socket,
    run,
)
from kvferry.carriers.base import Bytes, Carrier
from kvferry.cli.bench import transport_page
from kvferry.cli.main import app
from kvferry.errors import TransferError


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children have buffers of the usual size, and use the beginning."""
    monkeypatch.setattr(transport, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(transport, "BUFFER_BYTES", 32 << 20)


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
    shown = transport_page(result)
    assert [len(sheet.rows) for sheet in shown.sheets] == [3, len(rows)]
    html = shown.html()
    assert html.startswith("<!doctype html>") and "<h2>Writes</h2>" in html
    assert "http" not in html  # needs nothing from elsewhere


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(TransferError, match="1 to"):
        run(sizes=(0,))
    with pytest.raises(TransferError, match="raw-nixl"):
        run(carriers=("pigeon",))


def test_a_carrier_that_does_not_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(mover: str, memory: Bytes) -> Carrier:
        if mover == "local":
            raise TransferError("it does not start here")
        return open_carrier(mover, memory)

    without_libraries(monkeypatch)
    monkeypatch.setattr(transport, "open_carrier", start)
    result = run(sizes=(1 << 20,), seconds=0.0)
    assert {row.carrier for row in result.results} == {"memcpy", "tcp"}
    assert result.missing["local"] == "it does not start here"
    with pytest.raises(TransferError, match="local cannot be measured: it does not start"):
        run(sizes=(1 << 20,), seconds=0.0, carriers=("local",))


def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails


@pytest.mark.parametrize("carriers", ["nixl", "tcp,nixl"])
def test_what_is_named_must_be_installed(carriers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_libraries(monkeypatch)
    result = CliRunner().invoke(app, ["bench", "transport", "--carriers", carriers])
    assert result.exit_code == 2
    assert "needs NIXL" in result.output and "pip install" in result.output


def hang_up(_question: dict[str, Any]) -> Generator[int]:
    """The program of a child that ends each connection."""
    listener = socket.create_server((LOOPBACK, 0))
    Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
    yield listener.getsockname()[1]


def test_a_process_that_ends_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "send", hang_up)
    with (
        plain_socket(np.zeros(8, dtype=np.uint8)) as receive,
        pytest.raises(TransferError, match="the socket's other end"),
    ):
        receive()


RESULTS = (CarrierResult("memcpy", "copy", 4096, 1.0, 1.0, None),)


def row(carrier: str, op: str, of_library: float, size: int = 256) -> PairedRow:
    return PairedRow(carrier, op, size, 11, 1.0, of_library, 0.5, 2.0)


def test_targets_are_judged_by_their_worst_cell() -> None:
    rates = {
        ("local", "read", 4096): 4.0,
        ("raw-nixl", "read", 4096): 1.0,
        ("local", "write", 4096): 1.9,
        ("raw-nixl", "write", 4096): 1.0,
        ("local", "write", 256): 0.1,  # no target there
        ("raw-nixl", "write", 256): 1.0,
    }
    pairs = [row("mooncake", "read", 0.96), row("mooncake", "write", 0.94)]
    first, mooncake = judge(rates, pairs)  # the others were not measured
    assert first.bar == "local, of raw-nixl, 4.0 KiB to 64.0 KiB" and not first.met
    assert first.found.startswith("1.90 x at worst (write 4.0 KiB); 1 of 2 cells")
    assert not mooncake.met and mooncake.wanted == "at least 95%"
    assert mooncake.found.startswith("94% at worst (write 256 B)")
    shown = page(TransportResult(1.0, 1.0, 1.0, RESULTS, targets=(first, mooncake)))
    assert [note.partition(":")[0] for note in shown.notes] == ["NOT MET", "NOT MET"]
    (good,) = judge({}, [row("nixl", "read", 1.0, size) for size in (256, 1 << 20)])
    assert good.met
