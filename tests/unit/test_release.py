"""What a release needs: one version, tests in the source archive, licence lines."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from kvferry import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_one_source() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    attr = PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attr == "kvferry.__version__"


def test_the_source_archive_has_the_tests() -> None:
    grafted = re.findall(r"^graft (\S+)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    assert {"tests", "benchmarks", "scripts", "docs", "dashboards"} == set(grafted)
    assert all((ROOT / folder).is_dir() for folder in grafted)


def test_every_source_file_names_the_licence() -> None:
    line = f"# SPDX-License-Identifier: {PROJECT['project']['license']}\n"
    files = [f for folder in ("src", "benchmarks") for f in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    missing = [str(f.relative_to(ROOT)) for f in files if not f.read_text().startswith(line)]
    assert not missing, f"run python scripts/licence_lines.py: {missing}"
