"""Lives of one engine, told from its children that live at the same time."""

from __future__ import annotations

from kvferry.handover.ticket import after_reset, are_siblings, child


def test_children_of_one_engine_are_siblings() -> None:
    first, second = child("a", 0), child("a", 1)
    assert are_siblings(first, second)
    assert are_siblings(after_reset(first), second)
    assert are_siblings(after_reset(first), after_reset(second))


def test_another_life_is_no_sibling() -> None:
    for one, other in [
        ("a", "b"),
        ("a", after_reset("a")),
        (child("a", 0), after_reset(child("a", 0))),
        (after_reset(child("a", 0)), after_reset(child("a", 0))),
        (child("a", 0), child("b", 1)),
        (after_reset("a"), after_reset("a")),
    ]:
        assert not are_siblings(one, other)
