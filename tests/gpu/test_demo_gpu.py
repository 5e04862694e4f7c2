"""The demo over `cuda`: every rank's cache on the GPU, every byte checked."""

from __future__ import annotations

from kvferry.demo.run import run_demo


def test_every_byte_arrives_between_caches_on_the_gpu() -> None:
    result = run_demo(transport="cuda", min_bytes=64 << 20, requests=20, seed=3)
    assert result.ok and result.method == "cuda"
    assert result.bytes == result.checked_bytes >= 64 << 20
    assert result.guarded_bytes > 0
