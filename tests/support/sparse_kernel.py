"""Writes latents and index keys with vLLM's own kernel, in Triton's interpreter: a program.

    sparse_kernel.py OUT TOKENS TYPE:BLOCK...

For each type of cache and size of blocks, the caches of the same tokens go to OUT.TYPE.BLOCK.mla
and OUT.TYPE.BLOCK.indexer, the tokens in order from block 1 on. vLLM switches Triton off where
there is no device, and the interpreter must be chosen before Triton is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from types import SimpleNamespace as Fake

from triton.backends import backends

backends["cpu"] = Fake(driver=Fake(is_active=lambda: True))

import torch
from vllm.models.deepseek_v32.common.kernels import fused_norm_rope

LATENTS = {
    "auto": (576, torch.bfloat16),
    "fp8": (576, torch.uint8),
    "fp8_ds_mla": (656, torch.uint8),
}


def main(out: str, count: str, *cases: str) -> None:
    tokens, generator = int(count), torch.Generator().manual_seed(1)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rotations = drawn(tokens, 64)
    computed = {
        "positions": torch.arange(tokens),
        "q_c": drawn(tokens, 128, dtype=torch.bfloat16),
        "q_rms_norm_w": drawn(128),
        "q_rms_eps": 1e-6,
        "kv_c": drawn(tokens, 512, dtype=torch.bfloat16),
        "kv_rms_norm_w": drawn(512),
        "kv_rms_eps": 1e-6,
        "k_pe": drawn(tokens, 64, dtype=torch.bfloat16),
        "k_rope_cos_sin_cache": rotations,
        "index_k": drawn(tokens, 128, dtype=torch.bfloat16),
        "index_k_layer_norm_w": drawn(128),
        "index_k_layer_norm_bias": drawn(128),
        "index_k_layer_norm_eps": 1e-6,
        "index_k_rope_cos_sin_cache": rotations,
        "topk_indices_buffer": torch.zeros(tokens, 8, dtype=torch.int32),
    }
    for case in cases:
        cache_dtype, block = case.split(":")
        width, dtype = LATENTS[cache_dtype]
        blocks, size = 1 + -(-tokens // int(block)), int(block)
        latents = torch.zeros(blocks, size, width, dtype=dtype)
        keys = torch.zeros(blocks, size, 132, dtype=torch.uint8)
        fused_norm_rope(
            **computed,
            slot_mapping=torch.arange(size, size + tokens),
            indexer_k_cache=keys,
            mla_kv_cache=latents,
            mla_kv_cache_dtype=cache_dtype,
        )
        latents.view(torch.uint8).numpy().tofile(f"{out}.{cache_dtype}.{block}.mla")
        keys.numpy().tofile(f"{out}.{cache_dtype}.{block}.indexer")


if __name__ == "__main__":
    main(*sys.argv[1:])
