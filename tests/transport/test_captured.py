"""Memory as real vLLM engines registered it: handed over between processes, byte for byte."""

from __future__ import annotations

import pytest

from captured import Captured, CapturedConsumer
from handover_peers import Child

# source, destination, tokens; names are files of tests/fixtures/vllm-0.32
PAIRS = [
    ("llama-tp1", "llama-tp2", 333),
    ("llama-pp2", "llama-tp1-block32", 256),
    ("llama-tp1-block32", "llama-pp2", 200),
    ("llama-tp2-bf16-block32", "llama-tp1-bf16", 130),
    ("llama-tp1-fp8", "llama-tp1-fp8", 333),
    ("llama-mqa-tp2", "llama-mqa-tp2", 140),
    ("mistral-tp2", "mistral-tp1", 333),
    ("gpt-oss-tp1", "gpt-oss-tp2", 256),
    ("gemma3-tp1", "gemma3-tp2", 333),
    ("gemma3-tp2", "gemma3-tp1", 129),
    ("deepseek-v2-tp1-cpu-mla", "deepseek-v2-tp2-cpu-mla", 70),
    ("deepseek-v2-tp2", "deepseek-v2-tp1", 333),
    ("granite-hybrid-tp1", "granite-hybrid-tp2", 333),
    ("granite-hybrid-tp2", "granite-hybrid-tp1", 256),
    ("granite-hybrid-1group-tp2", "granite-hybrid-1group-tp2", 100),
    ("qwen3-next-tp1", "qwen3-next-tp2", 333),
    ("qwen3-next-tp2", "qwen3-next-tp2-ds", 128),
    ("qwen3-next-tp2-ds", "qwen3-next-tp1", 90),
]


@pytest.mark.parametrize(
    ("source", "destination", "tokens"), PAIRS, ids=[f"{a} to {b}" for a, b, _ in PAIRS]
)
def test_bytes_are_equal(source: str, destination: str, tokens: int) -> None:
    carrier = "tcp" if tokens % 2 else "local"
    p = Child.start("captured", Captured(source, carrier))  # type: ignore[arg-type]
    d = CapturedConsumer(Captured(destination, carrier))
    try:
        assert d.wrong_bytes(tokens) > 0
        loaded = d.load(p.ask("hold", tokens))
        assert [one.error for one in loaded] == [""] * len(d.ranks)
        assert d.wrong_bytes(tokens) == 0
    finally:
        d.close()
        p.stop()
