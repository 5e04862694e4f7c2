"""Token-major caches of different tp, whose runs are short, handed over."""

from __future__ import annotations

import pytest

from handover_peers import Prompt, Spec, consumer, producer


@pytest.mark.parametrize("carrier", ["local", "tcp"])
def test_token_major_caches_are_handed_over(carrier: str) -> None:
    """One head is 64 bytes here; checksums agree with the oracle that every byte is right."""
    prompts = [Prompt(1, 250), Prompt(2, 97, src_first=20, dst_first=20)]
    source = Spec("p", "tp=2,block=16,order=LBNHC", carrier=carrier)
    with producer(source) as peer:
        for shape in ("tp=3,block=32,order=LBNHC", "tp=1,block=16,order=LBNHC"):
            sink = Spec(f"d-{shape[:4]}", shape, carrier=carrier, checksums=True)
            with consumer(sink, source, alone=False) as one:
                for prompt in prompts:
                    loaded = one.load(peer.hold(prompt, f"{shape} {prompt.number}"), prompt)
                    assert all(part.ok for part in loaded), loaded
                    assert all(part.descriptors > prompt.tokens for part in loaded)  # short runs
                assert one.wrong_bytes(*prompts) == 0
