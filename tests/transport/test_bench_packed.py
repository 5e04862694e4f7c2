"""The crossover benchmark and calibration measure what they say, on a small scale."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from kvferry.bench import calibrate, packed, packed_pair
from kvferry.bench.packed_pair import BATCH_BYTES, BLOCK_TOKENS, token_major
from kvferry.bench.wanted import Wanted
from kvferry.cli.main import app
from kvferry.errors import DescriptionError, TransferError
from kvferry.transport.cost import (
    ENVIRONMENT,
    Cost,
    Costs,
    load_costs,
    read_costs,
    shipped_costs,
)
from kvferry.transport.local import LocalCarrier
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
    assert not result.missing  # nobody asked for others
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
    with packed_pair.bench(Wanted.of(NAMES, packed_pair.CARRIERS)) as both:
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


def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails


@pytest.mark.parametrize("command", [["packed"], ["transport"], ["transport", "--calibrate"]])
@pytest.mark.parametrize("carriers", ["nixl", "tcp,nixl"])
def test_what_is_named_must_be_installed(
    command: list[str], carriers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_libraries(monkeypatch)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs.json"))
    result = CliRunner().invoke(app, ["bench", *command, "--carriers", carriers])
    assert result.exit_code == 2
    assert "needs NIXL" in result.output and "pip install" in result.output
    assert not list(tmp_path.iterdir())


def test_what_is_not_there_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_libraries(monkeypatch)
    monkeypatch.setattr(LocalCarrier, "_why_not_directly", lambda *_: "the system forbids it")
    result = packed.run((4096,), seconds=0.0)
    assert {row.carrier for row in result.rows} == set(result.crossover_bytes) == {"tcp"}
    assert set(result.missing) == {"local", "mooncake", "nixl"}
    said = [line for line in packed.lines(result) if line.startswith("not measured: ")]
    assert len(said) == 3 and "the system forbids it" in "".join(said)
    for run in (packed.run, calibrate.calibrate):
        named = {"carriers" if run is packed.run else "named": ("local", "tcp")}
        with pytest.raises(TransferError, match=r"local .* goes by tcp .* forbids it"):
            run(seconds=0.0, **named)  # type: ignore[operator]


def test_calibration_writes_what_is_then_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "costs.json"
    monkeypatch.setenv(ENVIRONMENT, str(path))
    monkeypatch.setattr(calibrate, "CALIBRATED_SIZES", (64, 4096))
    with calibrate.costs_file(path) as keep:
        made = calibrate.calibrate(seconds=0.0, named=NAMES).costs
        keep(made)
    assert load_costs() == made
    assert "cores" in made.name
    for carrier in NAMES:
        direct, staged = made.of(carrier, "direct"), made.of(carrier, "packed")
        assert direct is not None and staged is not None
        # a MiB in short runs costs something in either mode, and less than a minute
        assert 0 < direct.seconds(16384, 1 << 20) < 60
        assert staged.seconds(16384, 1 << 20) < 60
    assert set(made.carriers) >= set(shipped_costs().carriers)


def test_calibration_measures_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One carrier, for so long; the others keep what was measured before."""
    path = tmp_path / "costs.json"
    line = Cost(1.0, 2.0, 3.0)
    before = {name: {"direct": line, "packed": line} for name in ("tcp", "local", "abacus")}
    path.write_bytes(msgspec.json.encode(Costs("earlier", "", "", before)))
    monkeypatch.setenv(ENVIRONMENT, str(path))
    monkeypatch.setattr(calibrate, "CALIBRATED_SIZES", (64, 4096))
    asked: list[tuple[str, float]] = []
    rounds = packed_pair.Bench.rounds

    def spied(self: Any, carrier: str, copies: Any, modes: Any, seconds: float, least: int) -> Any:
        asked.append((carrier, seconds))
        return rounds(self, carrier, copies, modes, seconds, least)

    monkeypatch.setattr(packed_pair.Bench, "rounds", spied)
    arguments = ["bench", "transport", "--calibrate", "--carriers", "tcp", "--seconds", "0.01"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert set(asked) == {("tcp", 0.01)}
    found = load_costs()
    assert found.of("tcp", "direct") not in (line, shipped_costs().of("tcp", "direct"))
    assert {found.of(name, "packed") for name in ("local", "abacus")} == {line}
    assert found.carriers["nixl"] == shipped_costs().carriers["nixl"]
    assert "as before:" in found.name and found.command.endswith("--carriers tcp")
    assert "not measured, as it was: local: it was not named" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sizes", "64"], "--calibrate takes no --sizes; leave it out"),
        (["--sizes", "64", "--html", "x"], "--calibrate takes no --sizes and no --html"),
        ([], "/proc/nope/x: No such file or directory; let KVFERRY_COSTS name"),
    ],
)
def test_calibration_refuses_before_it_measures(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "/proc/nope/x")
    monkeypatch.setattr(calibrate, "bench", None)
    arguments = ["bench", "transport", "--calibrate", *options]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2 and words in result.output


def test_costs_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("as it was")
    link.symlink_to(real)
    with pytest.raises(ZeroDivisionError), calibrate.costs_file(link):
        raise ZeroDivisionError
    assert real.read_text() == "as it was" and len(list(tmp_path.iterdir())) == 2
    with calibrate.costs_file(link) as keep:
        assert real.read_text() == "as it was"
        keep(shipped_costs())
    assert link.is_symlink() and read_costs(real.read_bytes(), "it") == shipped_costs()
    assert len(list(tmp_path.iterdir())) == 2
    for path in (tmp_path, Path("/dev/null"), real / "below"):
        with (
            pytest.raises(DescriptionError, match="cannot keep costs in"),
            calibrate.costs_file(path),
        ):
            raise AssertionError("it was taken")
    assert Path("/dev/null").is_char_device()
