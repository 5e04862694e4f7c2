"""The kernels without a GPU: in Triton's interpreter, and through its compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="needs Triton")

from kvferry.carriers.cuda import xxh3
from kvferry.carriers.cuda.kernels import TUNING, Form, compile_form

SUPPORT = Path(__file__).parents[1] / "support"


def test_interpreted_kernel_moves_the_right_bytes() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "interpreted_kernel.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout.split()[-1]) == 87


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", list(TUNING))
def test_kernel_compiles_for_hopper(chunk: int) -> None:
    """No GPU is needed for it. Accesses of 16 bytes are what its speed rests on."""
    code, name, _ = compile_form(Form(chunk), 90)
    assert code[:4] == b"\x7fELF" and name == "copy_runs"


@pytest.mark.filterwarnings("ignore")
def test_hashing_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    monkeypatch.setattr(xxh3, "Function", lambda code, name, **_: made.append(code))
    monkeypatch.setattr(xxh3, "_functions", {})
    xxh3.warm(SimpleNamespace(ordinal=0, capability=90))  # type: ignore[arg-type]
    assert [code[:4] for code in made] == [b"\x7fELF"] * 2
