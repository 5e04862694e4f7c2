"""The crossover benchmark and calibration measure what they say, on a small scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.bench import calibrate, packed, packed_pair
from kvferry.bench.packed_pair import BATCH_BYTES, BLOCK_TOKENS, token_major
from kvferry.transport.cost import ENVIRONMENT, load_costs, shipped_costs
from kvferry.transport.local_move import LocalMover
from kvferry.transport.tcp_payload import Payload

NAMES = ("local", "tcp")


def test_all_modes_are_measured_in_one_run() -> None:
    result = packed.run((64, 4096), seconds=0.0, carriers=NAMES)
    assert [(r.carrier, r.run_bytes) for r in result.rows] == [
        (carrier, size) for carrier in NAMES for size in (64, 4096)
    ]
    for row in result.rows:
        assert min(row.direct_gb_s, row.packed_gb_s, row.chosen_gb_s) > 0
        assert min(row.cpu_ns_per_byte.values()) > 0
        assert row.runs * row.run_bytes <= BATCH_BYTES
        assert row.rounds >= packed.LEAST_ROUNDS and row.noise >= packed.LEAST_NOISE
    table = list(packed.lines(result))
    assert len(table) == 2 + 4 + 2 + 2
    assert set(result.crossover_bytes) == set(NAMES)


def test_each_mode_is_what_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; the other one is told in words, and answers."""
    packed_by: list[str] = []
    for name, kind, method in (("local", LocalMover, "_read_covers"), ("tcp", Payload, "_staging")):
        original = getattr(kind, method)

        def spied(*given: Any, name: str = name, original: Any = original) -> Any:
            packed_by.append(name)
            return original(*given)

        monkeypatch.setattr(kind, method, spied)
    with packed_pair.bench(NAMES) as both:
        for name in NAMES:
            for mode, packs in (("direct", False), ("packed", True), ("direct", False)):
                copies = both.token_major(64, 64)
                both.landing[:] = 1
                packed_by.clear()
                both.rounds(name, copies, (mode,), 0.0, 1)  # type: ignore[arg-type]
                assert (name in packed_by) == packs
                assert int((both.landing == 3).sum()) == 64 * 64


@pytest.mark.parametrize(
    ("ratio", "noise", "cpu", "slower", "dearer"),
    [(0.99, 0.05, 0.91, False, False), (0.94, 0.05, 1, True, False), (2, 0.05, 0.89, False, True)],
)
def test_the_verdict(ratio: float, noise: float, cpu: float, slower: bool, dearer: bool) -> None:
    row = packed.PackedRow("tcp", 64, 1, 7, 1.0, 1.0, 1.0, 1.0, ratio, noise, {}, cpu, 0.1)
    assert (not row.not_slower, not row.not_dearer) == (slower, dearer)


def test_the_batches_are_token_major_and_do_not_overlap() -> None:
    copies = token_major(0, 0, 256, 4096)
    for ends in (copies.src, copies.dst):
        assert (np.diff(ends.reshape(-1, BLOCK_TOKENS), axis=1) == 2 * 256).all()
        assert (np.diff(np.sort(ends)) >= 256).all()


def test_calibration_writes_what_is_then_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "deep" / "costs.json"))
    monkeypatch.setattr(calibrate, "CALIBRATED_SIZES", (64, 4096))
    made = calibrate.calibrate(seconds=0.0, names=NAMES)
    assert calibrate.write_costs(made) == tmp_path / "deep" / "costs.json"
    assert load_costs() == made
    assert "cores" in made.name
    for carrier in NAMES:
        direct, staged = made.of(carrier, "direct"), made.of(carrier, "packed")
        assert direct is not None and staged is not None
        # a MiB in short runs costs something in either mode, and less than a minute
        assert 0 < direct.seconds(16384, 1 << 20) < 60
        assert staged.seconds(16384, 1 << 20) < 60
    assert set(made.carriers) >= set(shipped_costs().carriers)
