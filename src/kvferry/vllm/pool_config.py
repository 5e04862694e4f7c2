"""What an operator may set for the pool, and how its store is opened.

`FerryPoolConnector` needs nothing: the embedded store of this host, in its default place. The keys
of vLLM's own MooncakeStoreConnector are understood, so that its configuration moves over as it is.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvferry.errors import DescriptionError, StoreError
from kvferry.pool.mooncake_config import parse_size
from kvferry.pool.requests import PoolLimits
from kvferry.pool.store import Store

log = logging.getLogger("kvferry")

# Keys of the in-tree connector that ask for what is always so here, or mean nothing to us.
MOONCAKE_ONLY = frozenset(
    {
        "consumer_is_to_put",
        "custom_mem_pool",
        "enable_cross_layers_blocks",
        "enable_group_semantics",
        "enable_store_tp_lcm",
        "lookup_async",
        "prefer_alloc_in_same_node",
        "preferred_segment",
        "prefill_tp_sizes",
        "store_tp_size",
    }
)
LOOKUP_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Keys of `kv_connector_extra_config`."""

    store: str = "embedded"  # "mooncake", or "module:function" of your own
    path: str | None = None  # of the embedded store; None: in shared memory, one per user
    size: int | str | None = None  # its memory tier, such as "80GB"
    disk_path: str | None = None
    disk_size: int | str = 0
    options: dict[str, Any] = field(default_factory=dict)  # for a store of your own
    cache_prefix: str = ""  # the tenant: engines with different ones share nothing
    model_id: str = ""  # names the model, where its path differs between engines
    weight_revision: str = ""  # names the weights; default: see `kvferry.pool.weights`
    lora_files_final: bool = False  # adapters' files never change: see `kvferry.pool.adapters`
    load_async: bool = True
    discard_partial_chunks: bool = True
    lookup_rpc_port: int | str = 0  # no port is needed: accepted, and not used
    enable_lookup: bool = True
    save_decode_cache: bool | None = None  # None: yes, of engines that save at all
    lookup_seconds: float = 2.0
    load_seconds: float = 60.0
    save_seconds: float = 60.0
    min_load_tokens: int = 1  # a shorter hit is computed
    checksums: bool = False  # over a store without its own; the embedded one always has them
    pinned_share: float = 0.25  # of all blocks that saves may pin at a time

    @classmethod
    def read(cls, extra: Mapping[str, Any], **defaults: Any) -> PoolConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(extra) - known - MOONCAKE_ONLY)
        if unknown:
            raise DescriptionError(
                f"kv_connector_extra_config has {unknown}, which kvferry's pool does not know; it "
                f"knows {sorted(known)}"
            )
        if extra.get("preferred_segment") or os.environ.get("MOONCAKE_PREFERRED_SEGMENT"):
            log.warning("preferred_segment is not known here: Mooncake chooses where blocks lie")
        unused = sorted(set(extra) & MOONCAKE_ONLY)
        if unused:
            log.info("kvferry's pool has no need of %s", ", ".join(unused))
        config = cls(**{**defaults, **{k: v for k, v in extra.items() if k in known}})
        for name in ("lookup_seconds", "load_seconds", "save_seconds"):
            if getattr(config, name) <= 0:
                raise DescriptionError(f"{name} must be positive, found {getattr(config, name)}")
        if not config.load_async:
            log.info("load_async is off: loads are asynchronous all the same, and no step waits")
        if not config.discard_partial_chunks:
            log.info("discard_partial_chunks is off: only whole blocks are kept all the same")
        return config

    def limits(self, blocks: int, *, produces: bool) -> PoolLimits:
        """Every role looks up, as prefill engines gain most; a consumer saves if it is told to."""
        return PoolLimits(
            lookup_seconds=self.lookup_seconds,
            load_seconds=self.load_seconds,
            save_seconds=self.save_seconds,
            most_pinned_blocks=max(1, int(blocks * self.pinned_share)),
            min_load_tokens=self.min_load_tokens,
            lookup=self.enable_lookup,
            save=produces or self.save_decode_cache is True,
        )

    @property
    def checked(self) -> bool:
        """Whether objects are stored with checksums of ours."""
        return self.checksums and self.store != "embedded"

    def opener(self, *, lookups_only: bool = False) -> Callable[[], Store]:
        """What opens the store; every process and every lookup server opens its own."""
        if self.store == "embedded":
            return self._open_embedded
        if self.store == "mooncake":
            return lambda: self._open_mooncake(lookups_only)
        module, _, name = self.store.partition(":")
        if not name:
            raise DescriptionError(
                f"store is 'embedded', 'mooncake' or 'module:function', found {self.store!r}"
            )
        make = getattr(importlib.import_module(module), name)
        return lambda: make(**self.options)

    def _open_embedded(self) -> Store:
        from kvferry.pool.embedded import EmbeddedStore

        sizes: dict[str, Any] = {}
        if self.size is not None:
            sizes["memory_bytes"] = parse_bytes(self.size)
        if self.disk_path is not None:
            sizes["disk_directory"] = Path(self.disk_path)
            sizes["disk_bytes"] = parse_bytes(self.disk_size)
        return EmbeddedStore(Path(self.path) if self.path else None, **sizes)

    def _open_mooncake(self, lookups_only: bool) -> Store:
        from kvferry.pool.mooncake import MooncakeStore
        from kvferry.pool.mooncake_config import MooncakeStoreConfig

        config = MooncakeStoreConfig.load()
        if lookups_only:  # gives no memory to the pool, and moves no blocks
            config = replace(
                config,
                mode="standalone-store",
                global_segment_size=0,
                local_buffer_size=LOOKUP_BUFFER_BYTES,
            )
        return MooncakeStore(config, hold_memory=True)


def parse_bytes(amount: int | str) -> int:
    """Bytes of an amount such as 80GB, 512MiB or 1073741824; a GB is 2^30 bytes, as in Mooncake."""
    try:
        return parse_size(amount)
    except StoreError as error:
        raise DescriptionError(f"cannot read a size: {error}") from None


def default_tenant() -> str:
    return os.environ.get("KVFERRY_POOL_PREFIX", "")
