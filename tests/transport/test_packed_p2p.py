"""Token-major caches of different tp, whose runs are short, handed over in both modes."""

from __future__ import annotations

import pytest

from p2p_peers import Prompt, Spec, consumer, producer


@pytest.mark.parametrize("carrier", ["local", "tcp"])
def test_short_runs_arrive_in_both_modes(carrier: str) -> None:
    """One head is 64 bytes here; checksums agree with the oracle that every byte is right."""
    prompts = [Prompt(1, 250), Prompt(2, 97, src_first=20, dst_first=20)]
    source = Spec("p", "tp=2,block=16,order=LBNHC", carrier=carrier, packing="packed")
    with producer(source) as peer:
        for packing, shape in (
            ("packed", "tp=3,block=32,order=LBNHC"),
            ("direct", "tp=3,block=32,order=LBNHC"),
            ("packed", "tp=1,block=16,order=LBNHC"),
        ):
            sink = Spec(
                f"d-{packing}-{shape[:4]}", shape, carrier=carrier, packing=packing, checksums=True
            )
            with consumer(sink, source, alone=False) as user:
                for prompt in prompts:
                    hold = f"{packing} {shape} {prompt.number}"
                    loaded = user.load(peer.hold(prompt, hold), prompt)
                    assert all(one.ok for one in loaded), loaded
                    assert all(one.descriptors > prompt.tokens for one in loaded)  # short runs
                assert user.wrong_bytes(*prompts) == 0
