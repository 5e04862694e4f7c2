"""vLLM's own models without weights, and what their layers say that they cache.

A model is built on torch's meta device, on one rank, from a configuration that transformers' class
fills in. No engine runs, so a model takes a fraction of a second.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry

from vllm_engines import ENVIRONMENT, free_port


@contextmanager
def one_rank() -> Iterator[None]:
    """vLLM's groups of processes, with this one alone, for `built`."""
    with (
        patch.dict(os.environ, {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}),
        patch.object(registry._LazyRegisteredModel, "inspect_model_cls", _inspected),
    ):
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, backend="gloo")
            initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def built(
    folder: Path, config: dict[str, Any], device: str = "meta"
) -> tuple[VllmConfig, dict[str, Any]]:
    """vLLM's configuration of a model, and its specs by layer; layers that share have none."""
    (folder / "config.json").write_text(json.dumps(config, default=str))
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=256
    )
    vllm_config = arguments.create_engine_config()
    with set_current_vllm_config(vllm_config), torch.device(device):
        initialize_model(vllm_config)
    specs = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        shared = getattr(layer, "kv_sharing_target_layer_name", None)
        if isinstance(layer, AttentionLayerBase) and not shared:
            specs[name] = layer.get_kv_cache_spec(vllm_config)
    return vllm_config, specs


def _inspected(model: Any) -> Any:
    """As vLLM inspects a model's class, in this process."""
    return registry._ModelInfo.from_model_cls(model.load_model_cls())
