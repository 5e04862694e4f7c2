"""`scripts/gpu-engines` without engines: its comparisons notice what is wrong, its page is true."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu_engines.cells import CELLS
from gpu_engines.checks import difference, require_like
from gpu_engines.engine import Answer
from gpu_engines.entries import Entries, same_as_saved, same_entries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
BEST = [{1: -0.1, 2: -2.5}, {3: -0.6, 4: -0.62}]  # the second token is almost a draw
REFERENCE = Answer("a", [[1, 3]], BEST)


def entries(tokens: int = 6) -> Entries:
    rows = np.arange(tokens * 4, dtype=np.uint8).reshape(tokens, 4)
    return Entries(
        tokens,
        {"layer": (rows, np.ones(tokens, dtype=bool))},
        {"layer": 0},
        {"state": (np.arange(5, dtype=np.uint8),)},
    )


def test_entries_are_compared() -> None:
    source, loaded = entries(), entries()
    assert same_entries(source, loaded) == 6 + 1
    loaded.layers["layer"][0][3, 2] ^= 1
    with pytest.raises(AssertionError, match="the first is token 3"):
        same_entries(source, loaded)
    loaded.first = 4  # it was not loaded
    assert same_entries(source, loaded) == 2 + 1
    source.layers["layer"][1][5] = False
    with pytest.raises(AssertionError, match="did not have"):
        same_entries(source, loaded)
    source, loaded = entries(), entries()
    loaded.layers["layer"][1][0] = False  # a hole, which a window may have
    with pytest.raises(AssertionError, match="no block for token 0"):
        same_entries(source, loaded)
    loaded.needed_from["layer"] = 2
    assert same_entries(source, loaded) == 5 + 1
    loaded.states["state"][0][4] ^= 1
    with pytest.raises(AssertionError, match="state"):
        same_entries(source, loaded)


def test_loads_are_compared_with_what_was_saved() -> None:
    loaded = entries()
    rows = loaded.layers["layer"][0].copy()
    loaded.contents, loaded.state_content = {"layer": ("a", "b")}, {"state": "b"}
    saved = {("layer", "a"): rows[:4], ("layer", "b"): np.pad(rows[4:], ((0, 2), (0, 0)))}
    assert loaded.names() == [("layer", "a"), ("layer", "b"), ("state", "b")]
    with pytest.raises(AssertionError, match="nobody saved"):
        same_as_saved(saved, loaded)
    saved["state", "b"] = loaded.states["state"]  # type: ignore[assignment]
    assert same_as_saved(saved, loaded) == 6 + 1
    del saved["layer", "a"]
    with pytest.raises(AssertionError, match="did not have"):
        same_as_saved(saved, loaded)


def test_answers_are_compared() -> None:
    off = Answer("b", [[1, 3]], [{1: -0.13, 2: -2.5}, {3: -0.6, 4: -0.62}])
    assert difference(REFERENCE, off) == pytest.approx(0.03)
    require_like(REFERENCE, off, 0.05, exact=True)
    with pytest.raises(AssertionError, match=r"off by 0\.03"):
        require_like(REFERENCE, off, 0.02, exact=True)
    draw = Answer("b", [[1, 4]], BEST)
    require_like(REFERENCE, draw, 0.05, exact=False)
    with pytest.raises(AssertionError, match="token 1"):
        require_like(REFERENCE, draw, 0.05, exact=True)
    with pytest.raises(AssertionError, match="token 0"):
        require_like(REFERENCE, Answer("b", [[2, 3]], BEST), 0.05, exact=False)


def test_the_page_names_every_cell() -> None:
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    page = PAGE.read_text()
    for cell in CELLS:
        assert f"| `{cell.name}` | {cell.backend} | {cell.blocks} | {cell.proves} |" in page
