# SPDX-License-Identifier: Apache-2.0
"""The operator's settings of the pool, and how each process opens its store.

`FerryPoolConnector` needs nothing: the embedded store of this host, in its default place. The keys
of vLLM's own MooncakeStoreConnector are understood, so that its configuration moves over as it is.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from msgspec import Meta

from kvferry.errors import DescriptionError, SettingsError
from kvferry.pool.scheduler import PoolLimits
from kvferry.pool.store import Store
from kvferry.units import parse_size
from kvferry.vllm.config import (
    MOST_COUNT,
    FilePath,
    Flag,
    Options,
    Rule,
    Seconds,
    Share,
    Text,
    good_keys,
    rules,
    told,
    without_removed,
)

log = logging.getLogger("kvferry")

# Keys of the in-tree connector that are not ours, with what became of each.
MOONCAKE_ONLY: Mapping[str, str] = {
    "preferred_segment": "No effect, and logged: Mooncake chooses where blocks lie.",
    "load_async": "Refused unless `true`: loads never stop the engine's steps.",
    "lookup_async": "No effect: lookups never stop the engine's steps.",
    "lookup_rpc_port": "No effect: lookups run in the scheduler's process and need no port.",
    "discard_partial_chunks": "Refused unless `true`: only whole blocks have a key.",
    "consumer_is_to_put": "No effect; see `save_decode_cache`.",
    "custom_mem_pool": "No effect: vLLM's own allocation is registered with the store.",
    "enable_cross_layers_blocks": "No effect: a block's layers are one object in any layout.",
    "enable_group_semantics": "No effect: a lookup asks for all parts of a block.",
    "enable_store_tp_lcm": "No effect: engines of a pool may have any tensor parallel size.",
    "prefer_alloc_in_same_node": "No effect: Mooncake chooses where blocks lie.",
    "prefill_tp_sizes": "No effect: engines of a pool may have any tensor parallel size.",
    "store_tp_size": "No effect: engines of a pool may have any tensor parallel size.",
}
# Of these, keys that only one value may have: the reason why.
MUST_BE_TRUE: Mapping[str, str] = {
    "load_async": "the pool loads beside the engine's steps, and has no way to stop them for a "
    "load (vLLM's own connector ends with an assertion)",
    "discard_partial_chunks": "the pool keeps whole blocks: the tokens of a block that is not full "
    "have no key, and are computed again",
}
LOOKUP_BUFFER_BYTES = 64 << 20


def _take_size(value: Any) -> int:
    try:
        return parse_size(value)
    except DescriptionError:
        raise ValueError from None


# Share of all blocks that fast saves may pin. The rest keeps the engine going if a save hangs.
FAST_SHARE = 0.9
Size = Annotated[int, Rule("a size such as 80GB, 512MiB or a number of bytes", _take_size)]
LeastTokens = Annotated[
    int | Literal["auto"],
    Rule.of(
        f'"auto" or a whole number from 0 to {MOST_COUNT}',
        Annotated[int, Meta(ge=0, le=MOST_COUNT)] | Literal["auto"],
    ),
]


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Keys of `kv_connector_extra_config`."""

    store: Text = "embedded"  # "mooncake", or "module:function" of your own
    path: FilePath | None = None  # of the embedded store; None: in shared memory, one per user
    size: Size | None = None  # its memory tier, such as "80GB"
    disk_path: FilePath | None = None
    disk_size: Size = 0
    options: Options = field(default_factory=dict)  # for a store of your own
    cache_prefix: Text = ""  # the tenant: engines with different ones share nothing
    model_id: Text = ""  # names the model, where its path differs between engines
    weight_revision: Text = ""  # names the weights; default: see `kvferry.pool.weights`
    enable_lookup: Flag = True
    save_decode_cache: Flag | None = None  # None: yes, of engines that save at all
    lookup_seconds: Seconds = 2.0
    load_seconds: Seconds = 60.0
    save_seconds: Seconds = 60.0
    min_load_tokens: LeastTokens = "auto"  # a shorter hit is computed; auto: where that is faster
    checksums: Flag = False  # over a store without its own; the embedded one always has them
    pinned_share: Share = 0.25  # of all blocks that saves may pin at a time

    @classmethod
    def read(cls, extra: Mapping[str, Any], **defaults: Any) -> PoolConfig:
        """From the keys of an operator. Defaults are those of a connector class."""
        known, found = set(rules(cls)), list[str]()
        extra = without_removed(extra)
        unknown = sorted(set(extra) - known - set(MOONCAKE_ONLY))
        if unknown:
            found.append(
                f"kv_connector_extra_config has {unknown}, which kvferry's pool does not know; it "
                f"knows {sorted(known)}"
            )
        found += [
            f"{name} must be true or left out, found {extra[name]!r:.40}: {why}"
            for name, why in MUST_BE_TRUE.items()
            if told(extra).get(name, True) is not True
        ]
        if extra.get("preferred_segment") or os.environ.get("MOONCAKE_PREFERRED_SEGMENT"):
            log.warning("preferred_segment is not known here: Mooncake chooses where blocks lie")
        unused = sorted(set(extra) & set(MOONCAKE_ONLY))
        if unused:
            log.info("kvferry's pool does not use %s", ", ".join(unused))
        given = {k: v for k, v in told(extra).items() if k in known}
        defaults = {"cache_prefix": os.environ.get("KVFERRY_POOL_PREFIX"), **defaults}
        asked = {**defaults, **given}
        good = good_keys(cls, asked, found)
        config = cls(**good)
        found += config._conflicts(told(asked).keys() - good.keys())
        if found:
            raise SettingsError(found)
        return config

    def _conflicts(self, wrong: Collection[str]) -> Iterator[str]:
        """Keys that would have no effect on the store that was chosen, apart from wrong ones."""
        own = self.store not in ("embedded", "mooncake")
        embedded = [n for n in ("path", "size", "disk_path", "disk_size") if getattr(self, n)]
        if own and ":" not in self.store:
            yield f"store is 'embedded', 'mooncake' or 'module:function', found {self.store!r}"
        elif self.store != "embedded" and embedded:
            yield (
                f"{', '.join(embedded)} set, which only the embedded store has, and store is "
                f"{self.store!r}; remove what is not meant (Mooncake's sizes are in the file that "
                "MOONCAKE_CONFIG_PATH names, those of a store of your own in `options`)"
            )
        if self.options and not own and "store" not in wrong:
            yield (
                "options are for a store of your own (module:function), and store is "
                f"{self.store!r}; remove one of the two"
            )
        alone = (self.disk_path is None) != (not self.disk_size)
        if alone and not {"disk_path", "disk_size"} & set(wrong):
            yield (
                "a disk tier needs both disk_path and disk_size, found "
                f"disk_path {self.disk_path!r} and disk_size {self.disk_size!r}"
            )

    def limits(self, blocks: int, *, produces: bool) -> PoolLimits:
        """Every role looks up, as prefill engines gain most; a consumer saves if it is told to."""
        return PoolLimits(
            lookup_seconds=self.lookup_seconds,
            load_seconds=self.load_seconds,
            save_seconds=self.save_seconds,
            most_pinned_blocks=max(1, int(blocks * self.pinned_share)),
            most_pinned_at_end=max(1, int(blocks * min(1, 2 * self.pinned_share))),
            most_pinned_soon=int(blocks * FAST_SHARE),
            min_load_tokens=self.min_load_tokens,
            lookup=self.enable_lookup,
            lookup_at_once=self.store == "embedded",
            save=produces or self.save_decode_cache is True,
        )

    @property
    def checked(self) -> bool:
        """Whether objects are stored with checksums of ours."""
        return self.checksums and self.store != "embedded"

    def opener(self, *, lookups_only: bool = False) -> Callable[[], Store]:
        """A function that opens the store. Each process opens one of its own."""
        if self.store == "embedded":
            return self._open_embedded
        if self.store == "mooncake":
            return lambda: self._open_mooncake(lookups_only)
        try:
            make = pkgutil.resolve_name(self.store)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise DescriptionError(
                f"store {self.store!r} cannot be imported: {error}; name a function of a module "
                "that every process of the engine finds (PYTHONPATH)"
            ) from error
        if not callable(make):
            raise DescriptionError(f"store {self.store!r} is not a function that makes a store")
        return lambda: cast(Store, make(**self.options))

    def _open_embedded(self) -> Store:
        from kvferry.pool.embedded.store import DEFAULT_MEMORY_BYTES, EmbeddedStore

        return EmbeddedStore(
            Path(self.path) if self.path is not None else None,
            DEFAULT_MEMORY_BYTES if self.size is None else self.size,
            Path(self.disk_path) if self.disk_path is not None else None,
            self.disk_size,
        )

    def _open_mooncake(self, lookups_only: bool) -> Store:
        from kvferry.pool.mooncake import MooncakeStore, MooncakeStoreConfig

        config = MooncakeStoreConfig.load_from_env()
        if lookups_only:  # gives no memory to the pool, and moves no blocks
            config = replace(
                config,
                mode="standalone-store",
                global_segment_size=0,
                local_buffer_size=LOOKUP_BUFFER_BYTES,
            )
        return MooncakeStore(config)
