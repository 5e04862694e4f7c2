"""Which carriers an engine opens for its cache, and in what order it tries them."""

from __future__ import annotations

import logging
import queue
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace as Fake
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's and torch's imports
    import kvferry.vllm.connector  # noqa: F401

import host_device
from golden import golden
from kvferry.carriers import MemoryRegion
from kvferry.carriers.cuda.staging import DeviceMemory
from kvferry.carriers.host import HostMemory
from kvferry.errors import DescriptionError, TransferError
from kvferry.handover.holds import HoldOrder
from kvferry.handover.wakeup import WhenReady
from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.shape import Rank
from kvferry.vllm import worker
from kvferry.vllm.config import FerryConfig
from kvferry.vllm.describe import CacheRank
from kvferry.vllm.metadata import HandoverOrders
from kvferry.vllm.worker import FerryWorker, cache_carriers
from workers import Worker

RDMA: dict[str, Any] = {"mooncake": {"protocol": "rdma"}, "nixl": {"backends": ["UCX"]}}


class Scripted:
    closed: ClassVar[list[str]] = []

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options = name, options
        self.flavour = options.get("protocol", "")

    def register(self, regions: list[MemoryRegion]) -> None:
        if self.options.get("host") == "broken":
            raise TransferError("it does not take this memory")

    def endpoint(self) -> bytes:
        return b""

    def close(self) -> None:
        self.closed.append(self.name)


def opened(config: dict[str, Any], number: int | None, style: Any = "ferry") -> list[str]:
    memory = np.zeros(64, dtype=np.uint8)
    regions = [MemoryRegion(memory.ctypes.data, 64)]
    read = FerryConfig.read(config, style, {})
    return [c.name for c in cache_carriers(read, regions, HostMemory(regions), number)]


@pytest.mark.parametrize(
    ("change", "late"),
    [
        ({}, False),
        ({"role": "indexer"}, False),
        ({"residency": Residency("window", 8)}, False),
        ({"role": "draft"}, True),
        ({"residency": Residency("state")}, True),
        ({"residency": Residency("ring", 4)}, True),
        ({"partial_entries": True, "tokens_per_entry": 4}, True),
    ],
)
def test_which_caches_are_written_after_a_prompt_is_computed(
    change: dict[str, Any], late: bool
) -> None:
    groups = [Group("kept", (0,), (Component("k", 1, (8,), 2),))]
    assert not worker.written_late(CacheModel("m", tuple(groups)))
    groups.append(replace(groups[0], name="other", layers=(1,), **change))
    assert worker.written_late(CacheModel("m", tuple(groups))) is late


class Mark:
    """An event that the test lets the device come to."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def synchronize(self) -> None:
        assert self.reached.wait(10)


class Told:
    """In place of a producer and a consumer: what they were told, in order."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def open_hold(self, hold: HoldOrder) -> None:
        self.told.put(f"hold {hold.hold_id}")

    def accept(self, load: Any) -> Callable[[str], None]:
        return lambda error: self.told.put(f"load {load}{error}")

    def cancel(self, request_id: str) -> None:
        self.told.put(f"cancel {request_id}")

    def release(self, ticket: Any, outcome: str) -> None:
        self.told.put(f"{outcome} {ticket}")

    def next(self) -> str:
        return self.told.get(timeout=10)


def on_device(rank: Told, marks: list[Mark], *, late: bool) -> Any:
    """A worker whose device comes to these marks, one for each step that it records."""
    made: Any = worker.FerryWorker.__new__(worker.FerryWorker)
    made.producer = made.consumer = rank
    made._place, made._written_late = CacheRank(Rank(0, 0), 1), late
    left = iter(marks)
    made.ready = WhenReady(gpu=True, record=lambda: next(left))
    return made


@pytest.mark.parametrize("late", [False, True])
def test_a_hold_is_readable_when_its_own_last_step_is_over(late: bool) -> None:
    """Not when the step of another prompt is, which was queued since; a load waits for that."""
    marks = [Mark() for _ in range(4)]
    rank = Told()
    made = on_device(rank, marks, late=late)
    made.start(HandoverOrders(), step=1)  # computes a prompt
    made.start(HandoverOrders(), step=2)  # computes another one
    orders = HandoverOrders([HoldOrder("a", "r", "", 1, [[1]])], ["b"], written=1)  # type: ignore[list-item]
    made.start(orders, step=3)
    if late:
        with pytest.raises(queue.Empty):
            rank.told.get(timeout=0.1)
        marks[1].reached.set()  # the first step is over, the second one is not
    assert rank.next() == "hold a"
    with pytest.raises(queue.Empty):
        rank.told.get(timeout=0.1)
    marks[2 if late else 0].reached.set()  # nothing was recorded for the steps without orders
    assert rank.next() == "load b"
    made.ready.close()


@pytest.mark.parametrize("late", [False, True])
def test_what_need_not_wait_for_the_device_goes_out_at_once(late: bool) -> None:
    """Only a load waits, also if its own cancel comes meanwhile."""
    marks, rank = [Mark() for _ in range(2)], Told()
    made = on_device(rank, marks, late=late)
    made.start(HandoverOrders(loads=["a", "b"], cancels=["a"], releases=["t"]), step=1)  # type: ignore[list-item]
    assert [rank.next(), rank.next()] == ["cancel a", "not needed t"]  # of an earlier load "a"
    made.start(HandoverOrders(cancels=["b"]), step=2)
    assert rank.next() == "cancel b"
    with pytest.raises(queue.Empty):
        rank.told.get(timeout=0.1)
    for mark in marks:
        mark.reached.set()
    assert [rank.next(), rank.next()] == ["load a", "load b"]
    made.ready.close()


def test_a_worker_closes_all_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    """Also after one that cannot be closed: carriers own threads, ports and registered memory."""
    closed: list[str] = []

    def part(name: str, *, fails: bool = False) -> Any:
        def close() -> None:
            closed.append(name)
            if fails:
                raise RuntimeError(f"the {name} does not close")

        return Fake(close=close)

    config = Fake(kv_transfer_config=Fake(engine_id="e"), instance_id="i")
    made: Any = FerryWorker(FerryConfig.read({}, "ferry", {}), config, 0, None)
    made.ready, made.producer = part("ready", fails=True), part("producer", fails=True)
    made.carriers = [part("tcp"), part("local")]
    made._memory, made._sockets = part("memory"), part("sockets")
    made.close()
    assert closed == ["ready", "producer", "tcp", "local", "memory", "sockets"]
    assert caplog.text.count("could not be closed") == 2


def test_an_engine_that_ends_gives_its_staging_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process may go on, and make another engine."""
    on = host_device.use(monkeypatch)
    cache = np.zeros(64, dtype=np.uint8)
    memory = DeviceMemory([MemoryRegion(cache.ctypes.data, cache.nbytes)])
    assert memory.warmed.wait(30) and on.live
    config = Fake(kv_transfer_config=Fake(engine_id="e"), instance_id="i")
    made = FerryWorker(FerryConfig.read({}, "ferry", {}), config, 0, None)
    described = Worker(golden("llama-tp1"), Rank(0, 0)).describe()
    made.serve(CacheRank(Rank(0, 0), 1), described, memory, [])
    made.close()
    assert not on.live and not host_device.made


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
    broken = {"carriers": ["cuda", "tcp"], "carrier_options": {"cuda": {"host": "broken"}}}
    assert opened(broken, 0) == ["tcp"]
    assert Scripted.closed == ["cuda"]  # its threads and sockets are gone
    with pytest.raises(TransferError, match="it does not take this memory"):
        opened({"carriers": ["tcp"], "carrier_options": {"tcp": {"host": "broken"}}}, None)


@pytest.mark.parametrize(
    ("style", "library", "theirs", "options"),
    [
        ("nixl", "nixl", {}, {}),
        (
            "push",
            "nixl",
            {"backends": ["UCX", "GDS"], "num_threads": 6},
            {"backends": ("UCX", "GDS"), "threads": 6},
        ),
        ("mooncake", "mooncake", {}, {"protocol": "rdma"}),
        (
            "mooncake",
            "mooncake",
            {"mooncake_protocol": "rdma", "device_name": "mlx5_0", "num_workers": 7},
            {"protocol": "rdma", "device": "mlx5_0", "workers": 7},
        ),
    ],
)
def test_a_stand_in_uses_the_library_of_its_name(
    style: Any, library: str, theirs: dict[str, Any], options: dict[str, Any]
) -> None:
    """What is faster on one host comes before it; kvferry's own `tcp` after it."""
    config = FerryConfig.read(theirs, style, {})
    assert config.carrier_options == {library: options}
    assert opened(theirs, None, style) == ["local", library, "tcp"]
    assert opened(theirs, 0, style) == ["cuda", library, "tcp"]
    with_more = {**theirs, "carrier_options": {"tcp": {"port": 9}}}
    assert opened(with_more, None, style) == ["local", library, "tcp"]
    assert FerryConfig.read(with_more, style, {}).carrier_options[library] == options


@pytest.mark.parametrize("number", [None, 0])
def test_a_library_that_cannot_be_used(
    number: int | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning with the reason; an error where the operator named the library."""

    def none_installed(name: str, **options: Any) -> Any:
        if name == "nixl":
            raise TransferError("NIXL is not installed")
        return Scripted(name, **options)

    monkeypatch.setattr(worker, "make_carrier", none_installed)
    others = ["local" if number is None else "cuda", "tcp"]
    assert opened({"backends": ["UCX"]}, number, "nixl") == others
    [said] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert said.getMessage() == "kvferry: the carrier nixl is not used: NIXL is not installed"
    for named in (
        {"carriers": ["nixl", "tcp"]},
        {"carrier_options": {"nixl": {}}},
    ):
        with pytest.raises(TransferError, match="NIXL is not installed"):
            opened(named, number, "nixl")
    assert opened({"carriers": ["nixl", "tcp"], "optional_carriers": ["nixl"]}, number) == ["tcp"]


def test_carriers_that_were_given_win(caplog: pytest.LogCaptureFixture) -> None:
    given = {"carriers": ["tcp"], "backends": ["UCX"], "num_threads": 4}
    assert opened(given, None, "nixl") == ["tcp"]
    assert "backends, num_threads have no effect: `carriers` does not name nixl" in caplog.text
    assert opened({"carriers": "auto"}, None, "mooncake") == ["local", "tcp"]
    named = {"carriers": ["nixl"], "backends": ["UCX"]}
    assert FerryConfig.read(named, "nixl", {}).carrier_options == {"nixl": {"backends": ("UCX",)}}
    both = {"backends": ["UCX"], "carrier_options": {"nixl": {"backends": ["GDS"]}}}
    assert FerryConfig.read(both, "nixl", {}).carrier_options == {"nixl": {"backends": ["GDS"]}}
    for style, bad in (("nixl", {"num_threads": "4"}), ("mooncake", {"num_workers": 0})):
        with pytest.raises(DescriptionError, match=f"{next(iter(bad))} must be"):
            FerryConfig.read(bad, style, {})  # type: ignore[arg-type]
