"""The kernels without a GPU: in Triton's interpreter, and through its compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="needs Triton")

from kvferry.carriers.cuda import kernels, xxh3
from kvferry.carriers.cuda.kernels import TUNING

SUPPORT = Path(__file__).parents[1] / "support"
HOPPER = SimpleNamespace(ordinal=0, capability=90)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, str]]:
    """Machine code and names of kernels that would be loaded."""
    found: list[tuple[bytes, str]] = []
    monkeypatch.setattr(kernels, "Function", lambda code, name, **_: found.append((code, name)))
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(kernels, "_kernels", {})
    return found


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
def test_kernel_compiles_for_hopper(chunk: int, made: list[tuple[bytes, str]]) -> None:
    """No GPU is needed for it. Accesses of 16 bytes are what its speed rests on."""
    found = kernels.kernel(HOPPER, chunk, search=False, fill=False, grain=16)  # type: ignore[arg-type]
    ((code, name),) = made
    assert found is not None and found.chunk == chunk
    assert code[:4] == b"\x7fELF" and name == "copy_runs"


@pytest.mark.filterwarnings("ignore")
def test_hashing_compiles_for_hopper(made: list[tuple[bytes, str]]) -> None:
    xxh3.warm(HOPPER)  # type: ignore[arg-type]
    assert [code[:4] for code, _ in made] == [b"\x7fELF"] * 2
