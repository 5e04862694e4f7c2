"""Which last blocks move whole."""

from __future__ import annotations

import pytest

from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.shape import EngineShape
from kvferry.plan.pieces import padded_tokens

KV = tuple(Component(name, 4, (8,), 2) for name in "kv")
FULL = CacheModel("full", (Group("full", (0, 1), KV),))
WINDOW = CacheModel("w", (*FULL.groups, Group("window", (2,), KV, Residency("window", 64))))


@pytest.mark.parametrize(
    ("source", "destination", "tokens", "moved"),
    [
        ("block=128", "block=128", 1000, 1024),
        ("block=128", "block=64", 1000, 1024),  # both end at the same token
        ("block=128", "block=32", 980, 980),  # 1024 and 992: they do not
        ("block=48", "block=32", 1000, 1000),
        ("block=128", "block=128", 1024, 1024),
        ("block=128", "block=128", 130, 130),  # 126 more tokens cost more than they spare
        ("tp=4,dcp=4,block=32", "block=128", 1000, 1024),
    ],
)
def test_up_to_the_end_of_both_last_blocks(
    source: str, destination: str, tokens: int, moved: int
) -> None:
    shapes = EngineShape.parse(source), EngineShape.parse(destination)
    assert padded_tokens(FULL, *shapes, tokens) == moved


def test_windows_depend_on_where_a_request_ends() -> None:
    shape = EngineShape.parse("block=128")
    assert padded_tokens(WINDOW, shape, shape, 1000) == 1000
