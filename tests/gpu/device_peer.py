"""A peer for the carrier tests whose memory is a GPU's.

Tests see its bytes through an IPC handle of their own and plain copies of the driver, not through
the carrier under test. Run as a program, it is the process that owns the memory:
`python device_peer.py KIND`, one command per line after that.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "transport"))
from carrier_peer import FIRST, SECOND, SECRET, TOTAL, Peer

from kvferry.carriers import Carrier, MemoryRegion, make_carrier
from kvferry.carriers.cuda.driver import Device, device, driver
from kvferry.carriers.cuda.staging import DeviceMemory


@dataclass(frozen=True)
class DeviceKind:
    """A carrier under test, over device memory."""

    name: str
    long_rounds: int  # of 64 MiB: seconds of work
    second: int = 200_000  # descriptors that take it about a second, or less

    def carrier(self, regions: list[MemoryRegion]) -> Carrier:
        if self.name == "tcp":
            memory = DeviceMemory(regions)
            carrier = make_carrier(
                "tcp", secret=SECRET, host="127.0.0.1", memory=memory, writable=True
            )
        elif self.name in LIBRARIES:
            carrier = make_carrier(self.name, gpu=0)
        else:
            carrier = make_carrier("cuda", triton=self.name == "cuda")
        carrier.register(regions)
        return carrier


KINDS = {
    "cuda": DeviceKind("cuda", 40_000),
    "cuda-copies": DeviceKind("cuda-copies", 40_000),  # as without Triton
    "tcp": DeviceKind("tcp", 400),
}
# too slow on one host for the whole suite
LIBRARIES = {"nixl": DeviceKind("nixl", 4), "mooncake": DeviceKind("mooncake", 4)}


class DeviceBytes:
    """Device memory that looks enough like an array of bytes. Every access copies."""

    def __init__(self, on: Device, address: int, count: int) -> None:
        self._device, self.address, self._count = on, address, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: slice) -> np.ndarray:
        first, last, step = key.indices(self._count)
        assert step == 1
        out = np.empty(max(0, last - first), dtype=np.uint8)
        with self._device.current():
            driver().call(
                "cuMemcpyDtoH_v2",
                c_void_p(out.ctypes.data),
                c_uint64(self.address + first),
                c_size_t(len(out)),
            )
        return out

    def __setitem__(self, key: slice, value: Any) -> None:
        first, last, _ = key.indices(self._count)
        data = np.ascontiguousarray(
            np.broadcast_to(np.asarray(value, dtype=np.uint8), (last - first,))
        )
        with self._device.current():
            driver().call(
                "cuMemcpyHtoD_v2",
                c_uint64(self.address + first),
                c_void_p(data.ctypes.data),
                c_size_t(len(data)),
            )

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self[:]

    def __eq__(self, other: object) -> Any:
        return self[:] == other

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> np.ndarray:
        return self[:]

    def any(self) -> bool:
        return bool(self[:].any())


@contextmanager
def device_bytes(count: int) -> Iterator[DeviceBytes]:
    on = device(0)
    with on.current():
        address = on.allocate(count)
    yield DeviceBytes(on, address, count)
    with on.current():
        on.free(address)


@dataclass
class DeviceArea:
    """What `carrier_peer.Memory` is, on a device."""

    bytes: DeviceBytes

    @classmethod
    def allocate(cls) -> DeviceArea:
        on = device(0)
        with on.current():
            address = on.allocate(TOTAL)
        area = cls(DeviceBytes(on, address, TOTAL))
        area.bytes[:] = 0
        return area

    @property
    def address(self) -> int:
        return self.bytes.address

    def regions(self) -> list[MemoryRegion]:
        return [MemoryRegion(self.address + at, size) for at, size in (FIRST, SECOND)]


@contextmanager
def owner(kind: DeviceKind) -> Iterator[Peer]:
    on = device(0)
    with subprocess.Popen(
        [sys.executable, __file__, kind.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        opened = 0
        try:
            assert process.stdout
            address, handle, endpoint = process.stdout.readline().split()
            with on.current():
                opened = on.open(bytes.fromhex(handle))
            area = DeviceArea(DeviceBytes(on, opened, TOTAL))
            yield Peer(area, int(address), bytes.fromhex(endpoint), process)  # type: ignore[arg-type]
        finally:
            process.kill()
            if opened:
                with on.current():
                    on.close(opened)


@contextmanager
def user(kind: DeviceKind, area: DeviceArea) -> Iterator[Carrier]:
    carrier = kind.carrier(area.regions())
    try:
        yield carrier
    finally:
        carrier.close()


def main() -> None:
    kind, area = {**KINDS, **LIBRARIES}[sys.argv[1]], DeviceArea.allocate()
    carrier = kind.carrier(area.regions())
    with device(0).current():
        handle = device(0).export(area.address)
    print(area.address, handle.hex(), carrier.endpoint().hex(), flush=True)
    for _ in sys.stdin:
        print("{}", flush=True)
    carrier.close()


if __name__ == "__main__":
    main()
