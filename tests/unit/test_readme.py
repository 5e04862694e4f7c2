"""What the README prints runs as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_example_runs_and_is_short() -> None:
    (example,) = blocks("python")
    assert len(example.strip().splitlines()) <= 10
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) == 32 * 40 * 2 * 128 * 2  # layers, tokens, K and V of a head


def test_the_plan_command_runs(tmp_path: Path) -> None:
    (text,) = [b for b in blocks("") if b.startswith("kvferry plan")]
    command = shlex.split(text.replace("\\\n", " "))
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", *command[1:]],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.html").stat().st_size > 10_000


def test_make_targets_and_links_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_commands_exist() -> None:
    from typer.main import get_command

    from kvferry.cli.main import app

    known = get_command(app).commands  # type: ignore[attr-defined]
    for name in set(re.findall(r"`kvferry ([a-z]+)", README)):
        assert name in known, name
