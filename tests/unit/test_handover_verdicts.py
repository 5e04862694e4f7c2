"""What `python -m benchmarks.handover` calls slower."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.handover import HandoverResult, app, sheet, so_far, verdicts
from benchmarks.timed import Times, timed

OURS = HandoverResult("kvferry", True, 5, 50.0, 400.0, 200.0, 0.4, 0.6, 30.0)
THEIRS = HandoverResult("theirs", False, 5, 60.0, 410.0, 210.0, 0.1, 12.0, 29.0)


def test_every_target_beside_every_other_connector() -> None:
    others = [THEIRS, replace(THEIRS, name="broken", error="it\ndied")]
    found = list(verdicts([OURS, *others]))
    assert len(found) == 6 and all(one.met for one in found)  # within the noise, below what is felt
    slower = replace(OURS, first_token_ms=70.0, decode_step_ms=13.0)
    missed = [str(one) for one in verdicts([slower, *others]) if not one.met]
    assert missed == [
        "NOT MET: first token, beside theirs: wanted at most 63.0 ms, found 70.0 ms",
        "NOT MET: D step, beside theirs: wanted at most 12.6 ms, found 13.0 ms",
    ]
    assert [row[0] for row in sheet([slower, *others]).rows] == ["kvferry", "theirs"]
    assert not list(verdicts([replace(OURS, error="x"), THEIRS]))


def test_progress_is_for_people_and_results_are_for_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One goes to stderr, in words; the other to stdout, alone."""
    broken = replace(THEIRS, name="broken", error="Traceback\n[bold]it died[/bold]")

    def run(requests: int, tokens: int, say: Callable[[str], None]) -> list[Any]:
        for one in (OURS, broken):
            say(so_far(one))
        return [OURS, broken]

    monkeypatch.setattr("benchmarks.handover.run", run)
    said = CliRunner().invoke(app, ["--json"])
    assert said.exit_code == 0
    assert [one["name"] for one in json.loads(said.stdout)] == ["kvferry", "broken"]
    told = said.stderr.replace("\n", " ")
    assert "kvferry: 5 hand-overs; first token after 50.0 ms" in told
    assert "broken: did not run: [bold]it died[/bold]" in told
    assert "HandoverResult" not in told


def test_calls_add_up_to_steps(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import benchmarks.timed as module

    now = 0.0

    class Connector:
        def start_load_kv(self) -> None:
            nonlocal now
            now += 0.01

        def get_finished(self) -> str:
            self.start_load_kv()  # part of this call: not counted twice
            return "finished"

        def build_connector_meta(self) -> None:
            pass

    times = Times(tmp_path / "times")  # type: ignore[operator]
    monkeypatch.setattr(module, "_times", times)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    made = timed(Connector)()
    assert type(made).__name__ == "Connector" and made.get_finished() == "finished"
    made.start_load_kv()
    made.build_connector_meta()
    made.start_load_kv()
    made.build_connector_meta()
    assert times.longest() == pytest.approx(0.02)
    times.clear()
    assert times.longest() == 0.0
