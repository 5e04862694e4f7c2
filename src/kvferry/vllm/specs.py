"""vLLM's cache specs, as far as we read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def layer_spec(spec: Any, layer: str) -> Any:
    """A layer's own spec, where its group holds several."""
    return spec.kv_cache_specs[layer] if hasattr(spec, "kv_cache_specs") else spec


def group_spec(spec: Any) -> Any:
    """One of a group's specs; those of states are alike."""
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def is_state(spec: Any) -> bool:
    return hasattr(spec, "mamba_type")


def layer_specs(kv_cache_config: Any) -> Iterator[tuple[int, str, Any]]:
    """Table, name and spec of every layer on this worker."""
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            yield table, name, layer_spec(group.kv_cache_spec, name)
