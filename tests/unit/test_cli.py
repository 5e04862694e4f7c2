"""The command line: stable JSON, exit codes, errors without stack traces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry import __version__
from kvferry.cli.console import print_table
from kvferry.cli.main import app
from kvferry.units import parse_link, show_bytes, show_seconds

runner = CliRunner()
PLAN = ["plan", "--from", "tp=4,pp=2,block=16,order=LBNHC", "--to", "tp=8,block=32"]


def test_plan_json_has_the_stable_keys() -> None:
    result = runner.invoke(app, [*PLAN, "--tokens", "4096", "--link", "400Gbit", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["total_bytes"] == data["lower_bound_bytes"] == 4096 * 327680
    assert len(data["edges"]) == 16
    for edge in data["edges"]:
        assert len(edge["src"]) == len(edge["dst"]) == 2
        assert edge["bytes"] > 0 and edge["descriptors"] > 0
    assert data["predicted_seconds"] == 4096 * 327680 / 8 / 50e9


def test_plan_table_and_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = [*PLAN, "--link", "400Gbit", "--html", str(page)]
    result = runner.invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout  # no number is cut
    assert "pp1 tp3" in result.stdout and "busiest rank" in result.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_only_the_folder_of_the_default_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runner.invoke(app, [*PLAN, "--html", "new/plan.html"]).exit_code == 2
    assert not list(tmp_path.iterdir())
    assert runner.invoke(app, [*PLAN, "--html", "out/plan.html"]).exit_code == 0
    assert runner.invoke(app, [*PLAN, "--html", "plan.html"]).exit_code == 0
    assert {file.name for file in tmp_path.iterdir()} == {"out", "plan.html"}


def test_large_numbers_stay_whole_on_a_narrow_terminal() -> None:
    words = ["plan", "--from", "tp=4", "--to", "tp=8", "--tokens", "100000000"]
    result = runner.invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0 and result.stdout.count("  500,000,000  500,000,000  ") == 8


def test_a_narrow_terminal_cuts_nothing_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table(["case", *"abcdefgh"], [["a name", *["1,234,567 x"] * 8]])
    said = capsys.readouterr().out
    assert said.count("1,234,567 x") == 8 and "name" in said and "…" not in said
    monkeypatch.setenv("COLUMNS", "80")
    state = "not up yet: cannot connect: [Errno 111] Connect call failed ('127.0.0.1', 19103)"
    engine = ["http://127.0.0.1:19103", "decode", state, "the command line", "0"]
    print_table(["engine", "roles", "state", "from", "in flight"], [engine], words=4)
    said = capsys.readouterr().out
    assert engine[0] in said and "19103)" in said and "…" not in said
    assert max(map(len, said.splitlines())) <= 80


def test_a_file_in_the_place_of_the_default_folder_is_noticed_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").touch()
    result = runner.invoke(app, ["demo"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "every byte" not in result.stdout
    assert "the folder out does not exist, or is not writable" in result.stderr


@pytest.mark.parametrize("words", [["models"], [*PLAN, "--json"]])
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    """Also where output is written as late as when the process ends."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "kvferry", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    said = "error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_refusals_are_one_paragraph() -> None:
    result = runner.invoke(app, ["plan", "--from", "tp=0", "--to", "tp=1"])
    assert result.exit_code == 2
    assert "tp must be at least 1" in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--from", "pp=81", "--to", "tp=1"], "pp=81 leaves stages without a layer"),
        (["plan", "--from", "tp=1", "--to", "tp=5000"], "has 5,000 ranks"),
        (["demo", "--to", "tp=5000"], "has 5,000 ranks"),
        (["demo", "--from", "pp=9", "--to", "tp=1"], "leaves stages without a layer"),
    ],
)
def test_shapes_that_no_engine_has(words: list[str], said: str) -> None:
    result = runner.invoke(app, words)
    assert result.exit_code == 2 and said in result.stderr


def test_odd_shapes_are_planned_with_a_note() -> None:
    result = runner.invoke(app, ["plan", "--from", "tp=1000", "--to", "tp=3", "--json"])
    notes = json.loads(result.stdout)["notes"]
    assert [note.partition(",")[0].partition(" neither")[0] for note in notes] == [
        "from: tp=1000: each of the 8 heads or channels of 'attention' lies on 125 ranks",
        "to: tp=3",
    ]
    assert json.loads(runner.invoke(app, [*PLAN, "--json"]).stdout)["notes"] == []


def test_windows_that_are_computed_are_noted() -> None:
    """Which pairs of engines load not every prompt: whether this prompt is one of them."""

    def planned(tokens: int, src: str, dst: str) -> str:
        words = ["plan", "--model", "gpt-oss-20b", "--tokens", f"{tokens}", "--from", src]
        result = runner.invoke(app, [*words, "--to", dst, "--json"])
        (note,) = json.loads(result.stdout)["notes"] or [""]
        shown = runner.invoke(app, [*words, "--to", dst])
        assert " ".join(note.split()) in " ".join(shown.stdout.split())
        return str(note)

    # a window of 128 drops whole blocks of 16, in half of all cases the first half of one of 32
    assert planned(710, "tp=1,block=16", "tp=2,block=32") == ""
    note = planned(720, "tp=1,block=16", "tp=2,block=32")
    assert note.startswith("not loaded but computed by the destination: group 'window': of 720")
    assert "keeps those from 592 on" in note and "whole blocks from token 576 on" in note
    assert "use source blocks that are a multiple of the destination's" in note
    for src, dst in (("block=32", "block=16"), ("block=16,full=1", "block=32")):
        assert planned(720, src, dst) == ""


def test_models_and_version() -> None:
    assert "deepseek-v3" in runner.invoke(app, ["models"]).stdout
    assert runner.invoke(app, ["--version"]).stdout.strip() == __version__


def test_verify_json_has_the_stable_keys() -> None:
    command = ["verify", "--pairs", "12", "--seed", "7", "--processes", "1", "--json"]
    result = runner.invoke(app, command)
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert data["pairs"] == 12 and data["mismatches"] == 0
    assert {"refused", "mix", "seconds"} <= set(data)
    replay = ["verify", "--seed", "7", "--replay", "3"]
    assert "pair 3: " in runner.invoke(app, replay).stdout
    result = runner.invoke(app, [*replay, "--json"])
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and (data["seed"], data["index"], data["mismatch"]) == (7, 3, "")
    assert data["features"] and "pair 3: " in result.stderr


def test_bench_plan_json_has_the_stable_keys(tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    result = runner.invoke(app, ["bench", "plan", "--quick", "--json", "--html", str(page)])
    assert result.exit_code == 0, result.output
    cases = json.loads(result.stdout)["cases"]
    keys = "name kvferry_ms strided_ms vllm_ms ratio strided_ratio nixl_handover_ratio"
    assert {*keys.split(), "descriptors", "vllm_descriptors"} <= set(cases[0])
    assert "<svg" in page.read_text()


def test_units() -> None:
    assert parse_link("400Gbit") == parse_link("50GB/s") == 50e9
    assert show_bytes(1536) == "1.5 KiB" and show_bytes(3) == "3 B"
    assert show_seconds(0.0268) == "26.8 ms"
    assert show_seconds(0.9996) == "1,000 ms" and show_seconds(3600) == "3,600 s"
