"""Which carriers an engine opens for its cache, and in what order it tries them."""

from __future__ import annotations

import logging
import warnings
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's and torch's imports
    import kvferry.vllm  # noqa: F401

from kvferry.carriers import MemoryRegion
from kvferry.carriers.host import HostMemory
from kvferry.errors import TransferError
from kvferry.vllm import worker
from kvferry.vllm.config import FerryConfig
from kvferry.vllm.worker import cache_carriers

RDMA: dict[str, Any] = {"mooncake": {"protocol": "rdma"}, "nixl": {"backends": ["UCX"]}}


class Scripted:
    closed: ClassVar[list[str]] = []

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options = name, options
        self.flavour = options.get("protocol", "")

    def register(self, regions: list[MemoryRegion]) -> None:
        if self.options.get("broken"):
            raise TransferError("it does not take this memory")

    def endpoint(self) -> bytes:
        return b""

    def close(self) -> None:
        self.closed.append(self.name)


def opened(config: dict[str, Any], number: int | None) -> list[str]:
    memory = np.zeros(64, dtype=np.uint8)
    regions = [MemoryRegion(memory.ctypes.data, 64)]
    read = FerryConfig.read(config)
    return [c.name for c in cache_carriers(read, regions, HostMemory(regions), number)]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "closed", [])
    monkeypatch.setattr(worker, "make_carrier", Scripted)


def test_what_is_configured_comes_before_tcp_also_on_a_gpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    assert opened({}, None) == ["local", "tcp"]
    assert "auto leaves out mooncake: it has no carrier_options; nixl: it has no" in caplog.text
    assert opened({}, 0) == ["cuda", "tcp"]
    assert opened({"carrier_options": RDMA}, 0) == ["cuda", "nixl", "mooncake", "tcp"]
    assert opened({"carrier_options": RDMA}, None) == ["local", "nixl", "mooncake", "tcp"]
    by_tcp = {"mooncake": {"protocol": "tcp"}}
    assert opened({"carrier_options": by_tcp}, None) == ["local", "tcp", "mooncake"]


def test_an_order_that_was_given_stays() -> None:
    given = {"carriers": ["tcp", "nixl"], "carrier_options": {"nixl": {}}}
    assert opened(given, None) == opened(given, 0) == ["tcp", "nixl"]


def test_on_a_gpu_what_cannot_take_the_memory_is_left_out() -> None:
    broken = {"carriers": ["cuda", "tcp"], "carrier_options": {"cuda": {"broken": True}}}
    assert opened(broken, 0) == ["tcp"]
    assert Scripted.closed == ["cuda"]  # its threads and sockets are gone
    with pytest.raises(TransferError, match="it does not take this memory"):
        opened({"carriers": ["tcp"], "carrier_options": {"tcp": {"broken": True}}}, None)
