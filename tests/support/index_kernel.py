"""Writes index keys with vLLM's own kernel, in Triton's interpreter: a program.

    index_kernel.py KEYS OUT BLOCK...

For each size of blocks, the cache of all keys (a NumPy file, [token, value]) goes to OUT.BLOCK, the
tokens in order from block 1 on. vLLM switches Triton off where there is no device, and the
interpreter must be chosen before Triton is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from types import SimpleNamespace as Fake

from triton.backends import backends

backends["cpu"] = Fake(driver=Fake(is_active=lambda: True))

import numpy as np
import torch
from vllm.models.deepseek_v32.common.kernels import _fp8_quant_and_cache_write
from vllm.triton_utils import tl, triton


@triton.jit
def insert(keys, cache, scales, block, stride, width: tl.constexpr):  # type: ignore[no-untyped-def]
    token, at = tl.program_id(0), tl.arange(0, width)
    _fp8_quant_and_cache_write(
        tl.load(keys + token * width + at),
        at < width,
        token + block,
        cache,
        scales,
        block,
        stride,
        at,
        width,
        False,  # SHUFFLE
        16,
        16,
        448.0,
        False,
    )


def main(keys_path: str, out: str, *blocks: str) -> None:
    keys = torch.from_numpy(np.load(keys_path))
    tokens, width = keys.shape
    for block in map(int, blocks):
        count = 1 + -(-tokens // block)
        cache = torch.zeros(count, block, width + 4, dtype=torch.uint8)
        fp8, scales = cache.view(torch.float8_e4m3fn), cache.view(torch.float32)
        insert[(tokens,)](keys, fp8, scales, block, cache.stride(0), width)
        cache.numpy().tofile(f"{out}.{block}")


if __name__ == "__main__":
    main(*sys.argv[1:])
