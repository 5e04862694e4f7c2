"""Entries of caches, and how those of two engines are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

State = tuple[np.ndarray, ...]


@dataclass
class Entries:
    """What an engine's cache held of one request, by layer."""

    tokens: int
    # of each layer: bytes by token, and which tokens it holds
    layers: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    needed_from: dict[str, int] = field(default_factory=dict)  # of windows: not from the first on
    states: dict[str, State] = field(default_factory=dict)
    first: int = 0  # tokens before it were not loaded
    # of loads from the pool, by layer: the names of the prompt's blocks, and of its state
    contents: dict[str, tuple[str, ...]] = field(default_factory=dict)
    state_content: dict[str, str] = field(default_factory=dict)

    def names(self) -> list[tuple[str, str]]:
        """What the pool must hold for this load, as (layer, content)."""
        blocks = [(layer, name) for layer, names in self.contents.items() for name in names]
        return blocks + list(self.state_content.items())


def same_entries(source: Entries, loaded: Entries) -> int:
    """Every entry that was loaded must be the source's; how many were compared."""
    assert source.tokens == loaded.tokens, f"{source.tokens} and {loaded.tokens} tokens"
    assert source.layers.keys() == loaded.layers.keys()
    assert source.states.keys() == loaded.states.keys()
    compared = 0
    for layer, (theirs, kept) in source.layers.items():
        compared += _same_rows(layer, theirs, kept, loaded)
    for layer, state in source.states.items():
        compared += _same_state(layer, state, loaded.states[layer])
    return compared


def same_as_saved(saved: Mapping[tuple[str, str], Any], loaded: Entries) -> int:
    """As above, where the source is what another engine saved, by layer and content."""
    compared = 0
    for layer, names in loaded.contents.items():
        ours, _ = loaded.layers[layer]
        theirs, kept = np.zeros_like(ours), np.zeros(len(ours), dtype=bool)
        for number, name in enumerate(names):
            block = saved.get((layer, name))
            if block is not None:
                where = slice(number * len(block), min((number + 1) * len(block), len(ours)))
                theirs[where], kept[where] = block[: where.stop - where.start], True
        compared += _same_rows(layer, theirs, kept, loaded)
    for layer, name in loaded.state_content.items():
        assert (layer, name) in saved, f"{layer}: a state that nobody saved was loaded"
        compared += _same_state(layer, saved[layer, name], loaded.states[layer])
    return compared


def _same_rows(layer: str, theirs: np.ndarray, kept: np.ndarray, loaded: Entries) -> int:
    ours, there = loaded.layers[layer]
    assert ours.shape == theirs.shape, f"{layer}: {ours.shape} and {theirs.shape}"
    due = there & (np.arange(len(ours)) >= loaded.first)
    missing = np.flatnonzero(~there[loaded.needed_from[layer] :])
    assert not len(missing), f"{layer}: no block for token {loaded.needed_from[layer] + missing[0]}"
    assert kept[due].all(), f"{layer}: loaded entries that the source did not have"
    wrong = np.flatnonzero(due & (ours != theirs).any(axis=1))
    assert not len(wrong), (
        f"{layer}: {len(wrong)} of {due.sum()} entries differ, the first is token {wrong[0]}"
    )
    return int(due.sum())


def _same_state(layer: str, theirs: State, ours: State) -> int:
    assert len(theirs) == len(ours), layer
    for part, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        assert one.shape == other.shape and (one == other).all(), f"{layer}: part {part} differs"
    return len(ours)
