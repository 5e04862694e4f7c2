"""What differs where the cache lies on a GPU: which carriers there are, and what zeroes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.errors import TransferError
from kvferry.transport import make_carrier
from kvferry.transport.auto import AUTO, fastest_first, select
from kvferry.transport.base import Carrier, MemoryRegion
from kvferry.transport.host import HostMemory
from kvferry.transport.memory import Memory
from kvferry.vllm.config import FerryConfig

log = logging.getLogger("kvferry")


def on_gpu(kv_caches: Mapping[str, Any]) -> bool:
    """Whether the cache's tensors are a GPU's."""
    return gpu_of(kv_caches) is not None


def gpu_of(kv_caches: Mapping[str, Any]) -> int | None:
    """The number of the GPU that holds the cache's tensors; None where the host does."""
    found = [t.device.index or 0 for t in kv_caches.values() if t.device.type == "cuda"]
    return found[0] if found else None


def memory_of(regions: Sequence[MemoryRegion], gpu: bool) -> Memory:
    """What gathers, scatters and zeroes the cache's memory."""
    if not gpu:
        return HostMemory(regions)
    from kvferry.transport.staging import DeviceMemory

    return DeviceMemory(regions)


def cache_carriers(
    config: FerryConfig, regions: Sequence[MemoryRegion], memory: Memory, number: int | None
) -> list[Carrier]:
    """The carriers that were configured, with the cache registered, in order of preference.

    On a GPU, `local` is `cuda`, and `tcp` stages. One that cannot take this memory (CUDA IPC does
    not share what an allocator of virtual memory made) is left out, if another can.
    """
    wanted, gpu = config.carriers, number is not None
    if gpu:
        wanted = tuple(dict.fromkeys("cuda" if name == "local" else name for name in wanted))
    carriers: list[Carrier] = []
    left_out: list[str] = []
    for chosen in select(wanted, device=gpu, configured=tuple(config.carrier_options)):
        if chosen.why_not:
            left_out.append(f"{chosen.name}: {chosen.why_not}")
            continue
        # as reachable as the engine's directory, and no more
        host = config.host or "127.0.0.1"
        options: dict[str, Any] = {"secret": config.secret, "host": host}
        if config.peers:
            options["admits"] = config.admits
        if gpu and chosen.name == "tcp":
            options["memory"] = memory
        if gpu and chosen.name == "nixl":
            options["device"] = number
        options |= config.carrier_options.get(chosen.name, {})
        try:
            carrier = make_carrier(chosen.name, **options)
            carrier.register(regions)
            carrier.endpoint()
        except TransferError as error:
            if not gpu:
                raise
            log.warning("kvferry: the carrier %s is not used: %s", chosen.name, error)
            continue
        carriers.append(carrier)
    if not carriers:
        raise TransferError(f"none of the carriers {', '.join(wanted)} can move this cache")
    if left_out:
        log.info("kvferry: auto leaves out %s", "; ".join(left_out))
    return fastest_first(carriers) if config.carriers == (AUTO,) else carriers
