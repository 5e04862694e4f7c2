# SPDX-License-Identifier: Apache-2.0
"""Tables, verdicts and the plot of the benchmarks, also of those that need a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from xml.dom import minidom

import pytest

from benchmarks.engines.fleet import Answer
from benchmarks.engines.stream import Coming, Point, plot, show
from benchmarks.report import Report, at_least, at_most, sheet, tell


def test_a_report_is_whole_after_every_row(tmp_path: Path) -> None:
    report = Report(tmp_path / "out.json", {"device": "none"})
    report.row("Times", {"ms": [1.0, 2.0]}, who="a", first_ms=1234.56, count=1000, none=None)
    report.judge(at_least("speed", 1.5, 2.0, "{:.1f} x", " (of 3)"))
    report.row("Times", who="b", first_ms=1.0, count=2, none=None)
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["device"] == "none" and told["tables"]["Times"][0]["samples"] == {"ms": [1.0, 2.0]}
    wanted = {"bar": "speed", "wanted": "at least 2.0 x", "found": "1.5 x (of 3)", "met": False}
    assert told["verdicts"] == [wanted]
    assert (tmp_path / "out.md").read_text().splitlines() == [
        "**Times**",
        "",
        "| who | first ms | count | none |",
        "|---|---|---|---|",
        "| a | 1,234.6 | 1,000 | - |",
        "| b | 1.0 | 2 | - |",
        "",
        "- NOT MET: speed: wanted at least 2.0 x, found 1.5 x (of 3)",
    ]


def test_tables_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = at_most("time", 1.0, 1.0, "{:.0f} s")
    table = sheet("Verdicts [all]", [verdict], {"bar": "{r.bar}", "found": "{r.found:>4}"})
    tell({"a": 1}, True, [table], [verdict])
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    tell({"a": 1}, False, [table], [verdict])
    said = capsys.readouterr().out
    assert "Verdicts [all]" in said and said.endswith("met: time: wanted at most 1 s, found 1 s\n")


def test_a_stream_is_plotted_without_systems_that_ended_nothing(tmp_path: Path) -> None:
    answer = Answer(0.0, (0.5, 0.54, 0.6), 0, 0, None)
    ended = [Coming(0.0, 100, 0.0, answer) for _ in range(3)]
    points = [Point("kvferry", 3.0, ended), Point("NIXL", 3.0, [Coming(0.0, 100)])]
    assert (points[0].good, points[0].good_in_every_gap, points[0].goodput) == (3, 0, 3.0)
    plot(points, tmp_path / "stream.svg")
    names = [one.firstChild.data for one in _texts(tmp_path / "stream.svg")]
    assert names.count("kvferry") == 2 and names.count("NIXL") == 1
    report = Report(tmp_path / "out.json", {})
    for point in points:
        show(report, point)
    assert [row["ended"] for row in report.rows["Stream"]] == [3, 0]


def _texts(path: Path) -> list[minidom.Element]:
    found = minidom.parse(str(path)).getElementsByTagName("text")
    return [one for one in found if one.firstChild is not None]
