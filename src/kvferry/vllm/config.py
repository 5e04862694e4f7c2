"""What an operator may set in `kv_connector_extra_config`, with defaults that need nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.support import SUPPORTED_VLLM
from kvferry.transport.cost import Packing, require_packing


@dataclass(frozen=True, slots=True)
class FerryConfig:
    """Keys of `kv_connector_extra_config`."""

    secret: str | None = None  # or secret_file, or the environment's KVFERRY_SECRET
    host: str | None = None  # address that peers reach this engine at; None: loopback
    port: int = 0  # of the directory; 0: any
    carriers: tuple[str, ...] = ("auto",)  # or names, in order of preference
    packing: Packing = "auto"  # or direct, packed: how short runs are moved
    checksums: bool = False  # compare what arrives with digests of what the source holds
    lease_seconds: float = 60.0  # a hold lasts this long without a word from its consumer
    load_seconds: float = 120.0  # a load has failed after this long
    model_id: str = ""  # names the weights, where the model's path differs between engines

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> FerryConfig:
        known = {f.name for f in fields(cls)} | {"secret_file"}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise DescriptionError(
                f"kv_connector_extra_config has {unknown}, which kvferry does not know; it knows "
                f"{sorted(known)}"
            )
        values = {k: v for k, v in extra.items() if k != "secret_file"}
        if "secret_file" in extra:
            values["secret"] = Path(extra["secret_file"]).read_text().strip()
        values.setdefault("secret", os.environ.get("KVFERRY_SECRET") or None)
        if "carriers" in values:
            chosen = values["carriers"]
            values["carriers"] = (chosen,) if isinstance(chosen, str) else tuple(chosen)
        config = cls(**values)
        require_packing(config.packing)
        if config.lease_seconds <= 0 or config.load_seconds <= 0:
            raise DescriptionError("lease_seconds and load_seconds must be positive")
        return config


def incarnation(vllm_config: Any) -> str:
    """One value for all processes of an engine, and another one after each start."""
    return str(vllm_config.instance_id)


def require_supported_vllm(version: str) -> None:
    if not version.startswith(SUPPORTED_VLLM):
        raise DescriptionError(
            f"kvferry's connector is made for vLLM {', '.join(v + 'x' for v in SUPPORTED_VLLM)}; "
            f"this is {version}. The connector interface changes between versions: install a "
            "matching pair"
        )
