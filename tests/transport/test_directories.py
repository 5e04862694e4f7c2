"""Who tells of an engine: what one directory says counts for its own tickets, and children of one
engine live side by side.

All peers share this process: a test sees what the consumer knows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from handover_peers import Consumer, Producer, Prompt, Spec, hold, side_by_side
from kvferry.handover.load import Load
from kvferry.handover.peers import PeerKey, Remote
from kvferry.handover.ticket import child
from waiting import wait_until

P = Spec("p", "tp=2,block=16", carrier="tcp")
D = Spec("d", "tp=1,block=24", carrier="tcp")
peers = partial(side_by_side, target=D)
PROMPTS = [Prompt(number, 60, 1 + 8 * number, 1 + 8 * number) for number in range(4)]


def require_loaded(d: Consumer, p: Producer, prompt: Prompt) -> None:
    loaded = d.load(hold(p, prompt), prompt, seconds=10)
    assert [one.error for one in loaded] == [""] * len(loaded)
    assert d.wrong_bytes_of(prompt) == 0


def met(d: Consumer) -> dict[PeerKey, Remote]:
    """All that is known, with the connections that were made."""
    return d.known().engines


@pytest.mark.parametrize("shape", ["tp=2,block=16", "tp=1,block=32"])
def test_a_directory_speaks_for_its_own_tickets(shape: str) -> None:
    """One that claims to be another engine, in the same life, takes nothing of its tickets."""
    with peers(P, replace(P, shape=shape)) as (p, liar, d):
        require_loaded(d, liar, PROMPTS[0])
        require_loaded(d, p, PROMPTS[1])
        before = met(d)
        assert len(before) == 2
        require_loaded(d, liar, PROMPTS[2])
        require_loaded(d, p, PROMPTS[3])
        assert all(met(d)[key] is remote for key, remote in before.items())
        topology = d.ranks[0].topology
        sizes = [topology.get_engine_info(key.name).remote_tp_size for key in before]
        assert sizes == [liar.spec.engine_shape.tp, 2]


def test_children_of_one_engine_are_met_once_each() -> None:
    first, second = (replace(P, incarnation=child("life", number)) for number in range(2))
    with peers(first, second) as (one, other, d):
        require_loaded(d, one, PROMPTS[0])
        require_loaded(d, other, PROMPTS[1])
        before = met(d)
        assert {key.incarnation for key in before} == {"life.0", "life.1"}
        require_loaded(d, one, PROMPTS[2])
        require_loaded(d, other, PROMPTS[3])
        after = met(d)
        assert after.keys() == before.keys()
        assert all(after[key] is remote for key, remote in before.items())


def test_another_life_voids_those_before() -> None:
    with peers(P, replace(P, incarnation="second", shape="tp=1,block=32")) as (p, again, d):
        require_loaded(d, p, PROMPTS[0])
        require_loaded(d, again, PROMPTS[1])
        (key,) = met(d)
        assert key.incarnation == "second"
        assert d.ranks[0].topology.get_engine_info(key.name).remote_tp_size == 1


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_load_without_room_fails_and_tells_its_source(mode: Any) -> None:
    """What the adapter orders where vLLM made room for something else than a ticket holds."""
    with peers(P, target=replace(D, mode=mode)) as (p, d):
        ticket = hold(p, PROMPTS[0])
        (rank,) = d.ranks
        rank.start(Load("no room", ticket, ((),), 0, 10.0))
        ((loaded,),) = d.wait("no room")
        assert not loaded.ok and "too short" in loaded.error
        wait_until(lambda: all(rank.counters["closed: failed"] == 1 for rank in p.ranks))
        assert p.open_holds() == 0
        require_loaded(d, p, PROMPTS[1])
