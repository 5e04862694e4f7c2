"""`kvferry doctor` on a host with a GPU: what it tries here, and a peer whose cache is on one."""

from __future__ import annotations

import pytest
from device_peer import DeviceArea

from doctors import SECRET, examine, offering
from kvferry.carriers import make_carrier


def test_a_gpu_is_shared_between_two_processes() -> None:
    code, found = examine("--carriers", "cuda,tcp")
    assert (code, found["cuda"]["state"]) == (0, "ok")
    assert found["caches on GPUs"]["found"].startswith("cuda; else tcp")


def test_a_peer_with_its_cache_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", SECRET)
    area = DeviceArea.allocate()
    carrier = make_carrier("cuda", triton=False)
    try:
        carrier.register(area.regions())
        with offering("tcp", endpoints={"cuda": carrier.endpoint()}) as address:
            code, found = examine("--peer", address)
        assert (code, found["cuda, rank (0, 0)"]["state"]) == (0, "ok")
        picked = found["chosen, rank (0, 0)"]["found"]
        assert picked.startswith("cuda; else tcp") and "for caches on GPUs" in picked
    finally:
        carrier.close()
