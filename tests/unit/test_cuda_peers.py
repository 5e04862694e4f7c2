"""Which process the cuda carrier takes for its own, and how much of a peer's memory it uses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import pytest

import host_device
from kvferry.carriers import MemoryRegion, vouch
from kvferry.carriers.cuda import carrier, driver
from kvferry.carriers.cuda.carrier import Allocation, CudaCarrier, CudaEndpoint, this_process
from kvferry.carriers.cuda.driver import IPC_HANDLE_BYTES, DevicePlace
from kvferry.carriers.liveness import LivenessServer
from kvferry.carriers.local import boot_id
from kvferry.errors import PeerLost, PermissionDenied, ProtocolError, TransferError

BASE, SIZE, OPENED_AT = 1 << 40, 1 << 20, 1 << 41


@dataclass
class Gpu(host_device.HostDevice):
    """Opens any handle, at one place."""

    open_now: list[int] = field(default_factory=list)
    opened: int = 0

    def can_reach(self, other: Any) -> bool:
        return True

    def reach(self, other: Any) -> None: ...

    def open(self, handle: bytes) -> int:
        self.opened += 1
        self.open_now.append(OPENED_AT)
        return OPENED_AT

    def close(self, address: int) -> None:
        self.open_now.remove(address)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(carrier, "device_count", lambda: 1)
    monkeypatch.setattr(carrier, "device", lambda ordinal: found)
    # an allocation of ours lies where one of the peer's does, as it often happens
    monkeypatch.setattr(carrier, "place_of", lambda address: DevicePlace(0, BASE, SIZE))
    monkeypatch.setattr(carrier, "is_mapped", lambda address, size: size <= SIZE)
    return found


@pytest.fixture
def endpoint() -> Iterator[CudaEndpoint]:
    server = LivenessServer("127.0.0.1")
    handle = b"h" * IPC_HANDLE_BYTES
    yield CudaEndpoint(
        carrier="cuda",
        boot=boot_id(),
        process=b"another process!",
        host="127.0.0.1",
        liveness_port=server.port,
        token=server.token,
        incarnation=server.incarnation,
        allocations=[Allocation(BASE, SIZE, handle, b"u" * 16)],
        regions=[(BASE, SIZE)],
        voucher="vouch-" + "0" * 32,
    )
    server.close()


def owned_by(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That process vouches for every endpoint."""
    monkeypatch.setattr(carrier, "ask", lambda *_: pid)


def raw(endpoint: CudaEndpoint, **changes: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(endpoint, **changes))


def test_memory_of_another_process_is_opened(
    gpu: Gpu, endpoint: CudaEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = CudaCarrier()
    owned_by(1, monkeypatch)
    peer = carrier.connect(raw(endpoint), time.monotonic() + 5)
    assert peer.memory.shift_of(BASE, BASE + SIZE) == OPENED_AT - BASE
    carrier.disconnect(peer)
    assert (gpu.opened, gpu.open_now) == (1, [])
    owned_by(os.getpid(), monkeypatch)
    same = carrier.connect(raw(endpoint, process=this_process()), time.monotonic() + 5)
    assert same.memory.shift_of(BASE, BASE + SIZE) == 0
    assert gpu.opened == 1
    carrier.close()


def test_no_peer_names_memory_that_its_owner_does_not(gpu: Gpu, endpoint: CudaEndpoint) -> None:
    """Handles and regions of others, and allocations of this very process."""
    carrier = CudaCarrier()
    told = vouch.vouch_for(lambda name: raw(endpoint, process=this_process(), voucher=name))
    true = CudaEndpoint.decode(told)
    other = msgspec.structs.replace(endpoint.allocations[0], base=BASE + 4096, size=SIZE - 4096)
    try:
        carrier.connect(told, time.monotonic() + 5)
        for lie in (
            raw(true, regions=[(BASE, SIZE - 1)]),
            raw(true, allocations=[other], regions=[(BASE + 4096, 64)]),
            raw(true, process=b"another process!"),
        ):
            with pytest.raises(PeerLost, match="no open carrier with this endpoint"):
                carrier.connect(lie, time.monotonic() + 5)
        with pytest.raises(PermissionDenied, match="no process of this user answers"):
            carrier.connect(raw(endpoint), time.monotonic() + 5)
        assert gpu.opened == 0
    finally:
        vouch.forget([told])
        carrier.close()


def test_a_process_vouches_for_its_own_memory_alone(
    gpu: Gpu, endpoint: CudaEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = CudaCarrier()
    for pid, process in ((1, this_process()), (os.getpid(), b"another process!")):
        owned_by(pid, monkeypatch)
        with pytest.raises(ProtocolError, match="not its own"):
            carrier.connect(raw(endpoint, process=process), time.monotonic() + 5)
    carrier.close()


@pytest.mark.parametrize("here", [False, True])
def test_more_than_a_handle_opens_is_refused(
    gpu: Gpu, endpoint: CudaEndpoint, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned_by(os.getpid() if here else 1, monkeypatch)
    (honest,) = endpoint.allocations
    more = msgspec.structs.replace(honest, size=SIZE + 1)
    process = this_process() if here else endpoint.process
    carrier = CudaCarrier()
    with pytest.raises(ProtocolError, match=f"names {SIZE + 1} bytes"):
        carrier.connect(
            raw(endpoint, allocations=[more], regions=[(BASE, SIZE + 1)], process=process),
            time.monotonic() + 5,
        )
    assert gpu.open_now == []
    carrier.close()


def test_what_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def call(self, name: str, value: Any, attribute: int, at: Any) -> None:
            assert name == "cuPointerGetAttribute" and at.value >= OPENED_AT
            value._obj.value = {11: OPENED_AT, 12: SIZE}[attribute]  # cuda.h

    monkeypatch.setattr(driver, "driver", Driver)
    assert driver.is_mapped(OPENED_AT, SIZE)
    assert not driver.is_mapped(OPENED_AT, SIZE + 1)
    assert driver.is_mapped(OPENED_AT + 512, SIZE - 512)
    assert not driver.is_mapped(OPENED_AT + 512, SIZE)


@pytest.mark.parametrize(
    ("code", "value", "there"), [(0, 1, True), (0, 0, False), (1, 0, False), (700, 0, True)]
)
def test_whether_there_is_memory(
    code: int, value: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that failed says nothing about it."""

    class Driver:
        def status(self, name: str, found: Any, attribute: int, at: Any) -> int:
            assert (name, attribute, at.value) == ("cuPointerGetAttribute", 13, BASE)  # cuda.h
            found._obj.value = value
            return code

    monkeypatch.setattr(driver, "driver", Driver)
    assert driver.has_memory(BASE) is there


def test_a_forked_process_is_another_one() -> None:
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os\n"
            f"from {CudaEndpoint.__module__} import this_process\n"
            "print(this_process().hex(), this_process().hex(), flush=True)\n"
            "if os.fork() == 0: print(this_process().hex(), flush=True)\n"
            "else: os.wait()\n",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(said) == 3 and said[0] == said[1] != said[2]


def test_looking_for_a_peers_gpu_takes_no_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context takes some hundred MiB of its GPU, which other engines may have reserved."""
    contexts: list[int] = []
    linked = {(0, 1): True, (1, 0): True, (1, 2): True, (2, 1): True, (0, 2): True}

    class Driver:
        def call(self, name: str, first: Any, *rest: Any) -> None:
            if name == "cuDeviceGet":
                first._obj.value = rest[0]
            if name == "cuDevicePrimaryCtxRetain":
                contexts.append(rest[0].value)
            if name == "cuDeviceGetUuid_v2":
                first.raw = bytes([rest[0].value]) * driver.UUID_BYTES
            if name == "cuDeviceCanAccessPeer":
                first._obj.value = linked.get((rest[0].value, rest[1].value), False)
            if name == "cuDeviceGetP2PAttribute":
                assert rest[0] == 3  # cuda.h
                first._obj.value = rest[1].value == 0

        def push(self, context: Any) -> int:
            return 0

        def pop(self, popped: Any) -> int:
            return 0

        def check(self, name: str, code: int) -> None: ...

    monkeypatch.setattr(driver, "driver", Driver)
    monkeypatch.setattr(driver, "device", cache(driver.Device))
    monkeypatch.setattr(driver, "device_count", lambda: 3)
    assert driver.gpu_links() == {(0, 1): "NVLink", (0, 2): "", (1, 2): "PCIe"}
    assert [driver.device(ordinal).uuid[0] for ordinal in range(3)] == [0, 1, 2]
    assert contexts == []
    for _ in range(2):
        with driver.device(1).current():
            assert contexts == [1]


def test_memory_of_several_allocations_says_what_to_set(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's expandable segments are."""
    monkeypatch.setattr(
        carrier, "place_of", lambda address: DevicePlace(0, address // SIZE * SIZE, SIZE)
    )
    made = CudaCarrier(triton=False)
    with pytest.raises(TransferError, match="expandable_segments:False"):
        made.register([MemoryRegion(BASE, 2 * SIZE)])
    made.close()
