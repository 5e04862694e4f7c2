"""vLLM's own unit tests of connectors, run against our classes.

They are read from a checkout of vLLM 0.32, whose path is in VLLM_SRC; without it there is nothing
to run. `verdicts.toml` says what becomes of every test that concerns connectors in general, NIXL,
Mooncake or the store. Each of our classes has a process of its own (`ours.py`), in which each test
of the files that apply runs once for each role. What passes and what fails must be what the list
says, in both directions.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = os.environ.get("VLLM_SRC", "")
UNIT = Path(SOURCE, "tests/v1/kv_connector/unit")
RUN_SECONDS = 300  # one class: about 100 tests, each with a scheduler of its own
VERDICTS: dict[str, Any] = tomllib.loads((HERE / "verdicts.toml").read_text())
CLASSES = sorted({one for group in VERDICTS["classes"].values() for one in group})
ROLES: list[str] = VERDICTS["roles"]
FAULTS = ("ours", "test")
needs_checkout = pytest.mark.skipif(not SOURCE, reason="VLLM_SRC names no checkout of vLLM")


def names(path: Path) -> list[str]:
    """The tests of a file, as pytest names them, without parameters."""
    found = []
    for node in ast.parse(path.read_text()).body:
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            function = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            if function and one.name.startswith("test_"):
                found.append(prefix + one.name)
    return found


def chosen() -> list[str]:
    """The tests that run, as "file" or "file::test"."""
    found = []
    for one in VERDICTS["file"]:
        tests = one.get("runs", [])
        found += [one["name"]] if tests == "all" else [f"{one['name']}::{t}" for t in tests]
    return found


def expected_failures(name: str) -> set[tuple[str, str]]:
    """Tests and roles that fail with a class."""
    return {
        (f"{one['file']}::{test}", role)
        for one in VERDICTS["fails"]
        if name in VERDICTS["classes"].get(one["classes"], [one["classes"]])
        for test in one["tests"]
        for role in one["roles"]
    }


def outcomes(name: str, folder: Path) -> dict[str, dict[str, str]]:
    """Run the tests in a process of their own: {test: {role: "passed", or how it failed}}."""
    told = folder / "outcomes.json"
    paths = [ROOT / "src", ROOT / "tests/support", HERE]
    around = {
        **os.environ,
        "KVFERRY_CLASS": name,
        "KVFERRY_OUTCOMES": str(told),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",  # the checkout stays as it is
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    # vLLM's conftest for all its tests needs packages that these tests do not. The one beside them
    # lets CPU attention take blocks of 16.
    flags = "-q --noconftest -p ours -p tests.v1.kv_connector.unit.conftest -p no:cacheprovider"
    flags += f" -c {os.devnull} --rootdir {SOURCE} -W ignore --tb=short"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *flags.split(), *(str(UNIT / one) for one in chosen())],
        cwd=folder,
        env=around,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    said = ran.stdout[-4000:] + ran.stderr[-2000:]
    assert ran.returncode in (0, 1) and told.exists(), said  # 1: some tests failed
    found: dict[str, dict[str, str]] = json.loads(told.read_text())
    return found


@needs_checkout
@pytest.mark.parametrize("name", CLASSES)
def test_outcomes_are_those_of_the_list(name: str, tmp_path: Path) -> None:
    found = outcomes(name, tmp_path)
    assert {role for roles in found.values() for role in roles} == set(ROLES)
    failed = {
        (test, role): how
        for test, roles in found.items()
        for role, how in roles.items()
        if how != "passed"
    }
    expected = expected_failures(name)
    new = {key: how for key, how in failed.items() if key not in expected}
    assert not new, "these fail, and the list says that they pass:\n" + "\n".join(
        f"{test} as {role}: {how}" for (test, role), how in sorted(new.items())
    )
    gone = expected - set(failed)
    assert not gone, f"these pass or did not run, and the list says that they fail: {sorted(gone)}"


@needs_checkout
def test_every_test_of_the_checkout_has_a_verdict() -> None:
    listed = {one["name"]: one for one in VERDICTS["file"]}
    there = {str(path.relative_to(UNIT)): names(path) for path in UNIT.rglob("test_*.py")}
    assert set(listed) == set(there), sorted(set(listed) ^ set(there))
    counts = {name: len(tests) for name, tests in there.items()}
    differ = {
        n: (one["tests"], counts[n]) for n, one in listed.items() if one["tests"] != counts[n]
    }
    assert not differ, f"files with another number of tests, (listed, found): {differ}"
    for name, one in listed.items():
        runs = one.get("runs", [])
        assert runs == "all" or set(runs) <= set(there[name]), f"{name} has no such test"
        assert runs == "all" or one["why"], f"{name}: say why its tests do not run"
    for one in VERDICTS["fails"]:
        assert set(one["tests"]) <= set(there[one["file"]]), f"{one['file']} has no such test"
        assert one["classes"] in (*VERDICTS["classes"], *CLASSES)
        assert one["fault"] in FAULTS and one["why"] and set(one["roles"]) <= set(ROLES)
