"""A test that fails is retried only by `make`, by name, and not when many fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Tests that leave a file behind pass when they find it.
TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({failing}))
def test_fails_once(number):
    mark = Path(__file__).with_name(f"tried-{{number}}")
    tried = mark.exists()
    mark.touch()
    assert tried and not {broken}

def test_passes():
    pass
"""


def run_as_make_does(
    folder: Path, *, failing: int, broken: bool = False, parallel: str = "-p no:xdist"
) -> str:
    """The recipe of `make test`, with another Python and in another folder."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_once.py").write_text(TESTS.format(failing=failing, broken=broken))
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^\t(.*-m pytest -n 3.*)$", makefile, re.MULTILINE)
    options = re.search(r"^ONCE_MORE := (.*)$", makefile, re.MULTILINE)
    assert recipe and options
    command = recipe[1].replace("$(ONCE_MORE)", options[1]).replace("$$", "$")
    command = command.replace("$(BIN)/python", sys.executable).replace(
        "-n 3 --dist worksteal", parallel
    )
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # they take long to import
        capture_output=True,
        text=True,
        timeout=120,
    )
    return f"{done.stdout}status {done.returncode}"


def last_lines(said: str) -> str:
    return "\n".join(said.splitlines()[-5:])


def test_without_failures_nothing_is_retried(tmp_path: Path) -> None:
    said = run_as_make_does(tmp_path, failing=0)
    assert "retried" not in said and said.endswith("status 0")


def test_a_retried_test_is_named_in_the_last_lines(tmp_path: Path) -> None:
    said = run_as_make_does(tmp_path, failing=2, parallel="-p xdist -n 2")
    names = "test_once.py::test_fails_once[0], test_once.py::test_fails_once[1]"
    assert f"\nretried: {names}\n" in last_lines(said)
    assert said.endswith("status 0")


def test_more_than_two_are_named_and_fail_the_run(tmp_path: Path) -> None:
    said = run_as_make_does(tmp_path, failing=3)
    assert "not retried (more than 2 tests failed): test_once.py::" in last_lines(said)
    assert "test_fails_once[2]" in last_lines(said) and not said.endswith("status 0")


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    said = run_as_make_does(tmp_path, failing=1, broken=True)
    assert "retried: test_once.py::test_fails_once[0]" in last_lines(said)
    assert said.endswith("status 1")


def test_a_run_that_was_not_completed_is_not_retried(tmp_path: Path) -> None:
    """Else the tests that it did not reach would count as passed."""
    said = run_as_make_does(tmp_path, failing=1, parallel="-p xdist -n 2 -x")
    assert "retried" not in said and not said.endswith("status 0")


@pytest.mark.parametrize("target", ["test", "test-vllm"])
def test_both_targets_retry_the_same_way(target: str) -> None:
    recipe = re.search(rf"^{target}:(?:.*\n)(?:\t.*\n)+", (ROOT / "Makefile").read_text(), re.M)
    assert recipe and "|| { test $$? -eq 1 && " in recipe[0] and "$(ONCE_MORE); }" in recipe[0]
