"""Every kind of cache between engines of many shapes: processes, a real carrier, byte for byte.

What bytes should be where is said by `kvferry.demo.cache`, which shares no code with plans; bytes
that no load may touch are checked too.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from math import lcm

import pytest

from handover_peers import Prompt, Spec, consumer, producer
from kvferry.handover.peers import PeerKey

# model, source, destination, carrier
CASES = [
    # tensor parallel up to 8, sizes that do not divide, pipeline stages up to 4
    ("gqa", "tp=1,block=16", "tp=8,block=24,order=LBNHC", "local"),
    ("gqa", "tp=8,block=32,order=LBNHC", "tp=3,block=16", "tcp"),
    ("gqa", "tp=2,pp=4,block=16", "tp=8,block=16,kernel=8", "local"),
    ("gqa", "tp=4,block=24", "tp=2,pp=4,block=16", "tcp"),
    ("window", "tp=4,pp=2,block=32", "tp=3,pp=3,block=16", "local"),
    ("window", "tp=8,block=16,full=1", "tp=2,block=24", "tcp"),
    # last blocks that move whole, and whose tails are zeroed
    ("gqa", "tp=2,block=32,interior=cpu", "tp=2,block=16,interior=cpu", "local"),
    ("gqa", "tp=2,block=16,interior=cpu", "tp=4,block=32,interior=cpu", "tcp"),
    # latents and few heads, shared by the ranks of decode context parallelism
    ("mla", "tp=8,dcp=8,block=16", "tp=2,block=16", "local"),
    ("mla", "tp=2,pp=2,block=32", "tp=8,dcp=4,interleave=4,block=16", "tcp"),
    ("few heads", "tp=8,dcp=4,block=16", "tp=4,dcp=2,interleave=2,block=16", "local"),
    ("few heads", "tp=4,dcp=2,interleave=8,block=16", "tp=8,block=24", "tcp"),
    # recurrent states between different tp, orders of the convolution, paddings, overlays
    ("mamba2", "tp=2,block=16,conv=SD", "tp=8,block=24,conv=DS", "local"),
    ("mamba2", "tp=8,block=16,overlay=1", "tp=3,block=16,overlay=1,conv=SD", "tcp"),
    ("mamba2, one group", "tp=4,block=16,align=512", "tp=8,pp=2,block=32", "local"),
    ("delta net", "tp=8,block=16,overlay=1,conv=SD", "tp=1,block=16,align=256", "tcp"),
    ("delta net", "tp=1,pp=2,block=32", "tp=4,block=16,conv=SD", "local"),
    # a draft model with its own tp, blocks and kernel blocks; it runs on the last stage
    (
        "draft",
        "tp=4,draft_tp=1,block=32,kernel=16,kernel.draft=8",
        "tp=2,block=16,block.draft=24",
        "local",
    ),
    ("draft", "tp=2,pp=2,block=16", "tp=8,draft_tp=4,block=32,kernel.draft=16", "tcp"),
    ("draft", "tp=3,block=16,interior=cpu", "tp=8,pp=4,draft_tp=2,block=32", "local"),
    # latents on all ranks, and a draft's heads that every rank has, or that are cut
    (
        "mla and a draft",
        "tp=2,draft_tp=1,block=32,kernel=16",
        "tp=4,draft_tp=1,block=64,kernel=32,block.draft=48,kernel.draft=24",
        "local",
    ),
    (
        "mla and a draft",
        "tp=2,block=16,kernel.draft=8,order=LBNHC",
        "tp=4,draft_tp=1,block=24,kernel=8",
        "tcp",
    ),
]


@pytest.mark.parametrize(
    ("model", "source", "destination", "carrier"),
    CASES,
    ids=[f"{m}: {s} to {d}" for m, s, d, _ in CASES],
)
def test_bytes_are_equal(model: str, source: str, destination: str, carrier: str) -> None:
    p = Spec("p", source, model, carrier=carrier)
    d = Spec("d", destination, model, carrier=carrier)
    # one that ends in the middle of a block, one behind a prefix that is there already
    shape = d.engine_shape
    spans = [shape.block_tokens(g) * shape.dcp_for(g) for g in d.cache_model.groups]
    skip = lcm(*spans)
    prompts = [Prompt(1, 211), Prompt(2, skip + 85, src_first=30, dst_first=30, skip=skip)]
    with producer(p) as there, consumer(d, p) as here:
        for prompt in prompts:
            loaded = here.load(there.hold(prompt), prompt)
            assert [one.error for one in loaded] == [""] * len(here.ranks)
        assert here.wrong_bytes(*prompts) == 0
        assert all(one.why == "delivered" for rank in there.closed(2) for one in rank)


def test_the_check_can_fail() -> None:
    """The wrong prompt's bytes, in the right places, are noticed."""
    p, d = Spec("p", "tp=2,block=16,conv=SD", "mamba2"), Spec("d", "tp=4,block=16", "mamba2")
    with producer(p) as there, consumer(d, p) as here:
        loaded = here.load(there.hold(Prompt(1, 100)), Prompt(1, 100))
        assert loaded[0].ok and here.wrong_bytes(Prompt(1, 100)) == 0
        assert here.wrong_bytes(Prompt(2, 100)) > 1000


class TestDataParallel:
    """Each data parallel rank is an engine of its own."""

    def test_two_to_one(self) -> None:
        first = Spec("p_dp0", "tp=2,block=16", "window")
        second = replace(first, engine_id="p_dp1")
        d = Spec("d", "tp=3,block=16", "window")
        prompts = [Prompt(1, 150), Prompt(2, 170, dst_first=30)]
        with producer(first) as a, producer(second) as b, consumer(d, first) as here:
            tickets = [p.hold(prompt) for p, prompt in zip((a, b), prompts, strict=True)]
            started = [
                here.start(ticket, prompt) for ticket, prompt in zip(tickets, prompts, strict=True)
            ]
            assert all(one.ok for loads in here.wait(*started) for one in loads)
            assert here.wrong_bytes(*prompts) == 0
            names = [PeerKey.of(ticket).name for ticket in tickets]
            for rank in here.ranks:
                assert rank.topology.get_engine_info(names[0]).remote_tp_size == 2
                assert "reads from tp ranks" in rank.topology.describe(names[1])

    def test_one_to_two(self) -> None:
        p = Spec("p", "tp=4,block=32", "mamba2")
        first = Spec("d_dp0", "tp=2,block=16", "mamba2")
        with producer(p) as there, contextlib.ExitStack() as stack:
            for number, engine_id in enumerate(("d_dp0", "d_dp1"), 1):
                spec = replace(first, engine_id=engine_id)
                here = stack.enter_context(consumer(spec, p, alone=False))
                prompt = Prompt(number, 100 + number, src_first=30 * number)
                assert all(one.ok for one in here.load(there.hold(prompt), prompt))
                assert here.wrong_bytes(prompt) == 0


class TestDraftLayersOnOneSide:
    P = Spec("p", "tp=2,block=16", "draft", absent=("draft",))
    D = Spec("d", "tp=4,draft_tp=1,block=32,kernel.draft=16", "draft")

    def test_refused_by_default(self) -> None:
        prompt = Prompt(1, 100)
        with producer(self.P) as there, consumer(self.D, self.P) as here:
            loaded = here.load(there.hold(prompt), prompt)
            assert all("group 'draft'" in one.error for one in loaded), loaded
            assert here.wrong_bytes() == 0  # nothing was written

    def test_zeroed_where_allowed(self, caplog: pytest.LogCaptureFixture) -> None:
        d = replace(self.D, optional=("draft",))
        prompts = [Prompt(1, 100), Prompt(2, 128, src_first=30, dst_first=30, skip=64)]
        with producer(self.P) as there, consumer(d, self.P) as here:
            for prompt in prompts:
                loaded = here.load(there.hold(prompt), prompt)
                assert [one.error for one in loaded] == [""] * 4
                # two layers x four heads x K and V of eight bf16, whole blocks of 32
                blocks = -(-(prompt.tokens - prompt.skip) // 32)
                assert {one.zeroed_bytes for one in loaded} == {blocks * 32 * 2 * 4 * 2 * 16}
            assert here.wrong_bytes(*prompts) == 0
        assert "has no layers [0, 1] of group 'draft', which will be zeroed" in caplog.text

    def test_layers_that_only_the_source_has_are_left_out(self) -> None:
        p, d = replace(self.P, absent=()), replace(self.D, absent=("draft",), optional=("draft",))
        d = replace(d, shape="tp=4,block=32")
        prompt = Prompt(1, 100)
        with producer(p) as there, consumer(d, p) as here:
            assert all(one.ok for one in here.load(there.hold(prompt), prompt))
            assert here.wrong_bytes(prompt) == 0


def test_an_engine_may_decode_what_it_prefilled() -> None:
    """One engine with both roles: its own tickets are as good as others'."""
    spec, prompt = Spec("both", "tp=2,block=16", "mamba2"), Prompt(1, 100)
    with producer(spec) as there, consumer(spec, spec) as here:
        assert all(one.ok for one in here.load(there.hold(prompt), prompt))
        assert here.wrong_bytes(prompt) == 0
        assert all(one.why == "delivered" for rank in there.closed(1) for one in rank)
