"""What a release needs: one version, tests in the source archive, licence lines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvferry import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_one_source() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert "version" not in PROJECT["project"] and "version" in PROJECT["project"]["dynamic"]
    attr = PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attr == "kvferry.__version__"


@pytest.mark.parametrize("url", ["", "https://example.org/us/kvferry/"])
def test_a_release_names_its_repository(tmp_path: Path, url: str) -> None:
    """Links of the README lead to the files of that version, on an index of packages too."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "src" / "kvferry"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "kvferry" / "__init__.py", package)
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", "."]
    environment = {**os.environ, "KVFERRY_URL": url}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    metadata = (tmp_path / "kvferry.egg-info" / "PKG-INFO").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", metadata)
    files = [link for link in links if "://" not in link and not link.startswith("#")]
    assert len(links) > 10
    if not url:
        assert files and "Project-URL" not in metadata
        return
    assert not files
    base = f"https://example.org/us/kvferry/blob/v{__version__}/"
    found = [link.removeprefix(base).partition("#")[0] for link in links if link.startswith(base)]
    assert found and all((ROOT / path).exists() for path in found)
    assert "Project-URL: Source, https://example.org/us/kvferry\n" in metadata
    assert f"/raw/v{__version__}/docs/kvferry.svg" in metadata


def test_the_source_archive_has_the_tests() -> None:
    grafted = re.findall(r"^graft (\S+)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    assert {"tests", "benchmarks", "scripts", "docs", "dashboards"} == set(grafted)
    assert all((ROOT / folder).is_dir() for folder in grafted)


def test_every_source_file_names_the_licence() -> None:
    line = f"# SPDX-License-Identifier: {PROJECT['project']['license']}\n"
    files = [f for folder in ("src", "benchmarks") for f in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    missing = [str(f.relative_to(ROOT)) for f in files if not f.read_text().startswith(line)]
    assert not missing, f"expected {line!r} first in {missing}"
