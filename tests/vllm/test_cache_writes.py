"""vLLM's CPU attention writes; our layout finds every element at the byte where it was written."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry import CacheModel, Component, EngineShape, Group, Rank, RankLayout

torch = pytest.importorskip("torch", reason="this tier runs in the environment with vLLM")
ops = pytest.importorskip("vllm._custom_ops")

BLOCKS, HEADS = 5, 3
CASES = [("vec", "float32", 64, 32), ("vec", "float16", 64, 128), ("vec16", "float32", 80, 64)]
if torch.cpu._is_amx_tile_supported():
    CASES.append(("amx", "bfloat16", 64, 32))


@pytest.mark.parametrize(("isa", "dtype", "head_dim", "block"), CASES)
def test_written_elements_are_found(isa: str, dtype: str, head_dim: int, block: int) -> None:
    kind = getattr(torch, dtype)
    cache = torch.zeros(BLOCKS, HEADS, block, 2 * head_dim, dtype=kind)
    tokens = block + block // 2
    slots = torch.arange(block, block + tokens)  # block 1, and half of block 2
    generator = torch.Generator().manual_seed(0)
    written = {
        name: torch.randn(tokens, HEADS, head_dim, generator=generator).to(kind) for name in "kv"
    }
    planes = cache.view(BLOCKS, HEADS, 2 * block, head_dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(written["k"], written["v"], *planes, slots, isa)

    size = cache.element_size()
    components = tuple(Component(name, HEADS, (head_dim,), size) for name in "kv")
    model = CacheModel("m", (Group("attention", (0,), components),))
    shape = EngineShape(block_size=block, interior="cpu_amx" if isa == "amx" else "cpu")
    (part,) = RankLayout.build(model, shape, Rank(0, 0), BLOCKS).parts
    memory = cache.flatten().view(torch.uint8).numpy()
    for name in "kv":
        found = np.empty((tokens, HEADS, head_dim, size), dtype=np.uint8)
        placement = part.placements[part.index(name)]
        dims = np.unravel_index(np.arange(head_dim), placement.dim_sizes)
        inside = sum(i * s for i, s in zip(dims, placement.dim_strides, strict=True))
        for token, head in np.ndindex(tokens, HEADS):
            number, slot = divmod(block + token, block)
            tile, rest = divmod(slot, placement.tile_slots)
            start = int(placement.offsets[0]) + number * placement.block_stride
            start += tile * placement.tile_stride + rest * placement.slot_stride
            start += head * placement.unit_stride
            found[token, head] = memory[(start + inside)[:, None] + np.arange(size)]
        expected = written[name].contiguous().view(torch.uint8).numpy()
        assert np.array_equal(found.reshape(-1), expected.reshape(-1)), name
