"""Beside torch: tensors inside its allocator's segments, and its streams."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from carrier_peer import copies, soon

from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.handover.wakeup import WhenReady

torch = pytest.importorskip("torch", reason="needs torch")

OWNER = """
import sys, torch
from kvferry.handover.wakeup import WhenReady
from kvferry.carriers import MemoryRegion, make_carrier
first, second = (torch.arange(n, dtype=torch.int32, device="cuda") for n in (1000, 70_000))
torch.cuda.synchronize()
carrier = make_carrier("cuda")
carrier.register([MemoryRegion(t.data_ptr(), t.nbytes) for t in (first, second)])
print(first.data_ptr(), second.data_ptr(), carrier.endpoint().hex(), flush=True)
sys.stdin.readline()
"""


def test_tensors_of_another_process() -> None:
    """Two tensors of one segment: the handle opens the segment, only the tensors are reachable."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout
            first, second, endpoint = owner.stdout.readline().split()
            here = torch.zeros(71_000, dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()
            carrier = make_carrier("cuda")
            carrier.register([MemoryRegion(here.data_ptr(), here.nbytes)])
            peer = carrier.connect(bytes.fromhex(endpoint), soon())
            to = here.data_ptr()
            carrier.read(
                peer, copies([int(first), int(second)], [to, to + 4000], [4000, 280_000])
            ).wait(soon())
            found = here.cpu().numpy()
            assert np.array_equal(found[:1000], np.arange(1000))
            assert np.array_equal(found[1000:], np.arange(70_000))
            with pytest.raises(Exception, match="the peer registered"):
                carrier.read(peer, copies(int(first) + 3996, to, 8)).wait(soon())
            carrier.close()
        finally:
            owner.kill()


def test_orders_wait_for_the_device() -> None:
    """What a step says of its blocks is passed on in order, when its kernels have run."""
    ready, done, over = WhenReady(gpu=True), [], threading.Event()
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    for _ in range(60):
        matrix = matrix @ matrix * 1e-4
    end.record()
    ready.begin(1)
    ready.after(0, lambda why: done.append(end.query() and not why))
    ready.after(0, lambda why: (done.append("second" + why), over.set()))
    assert not done and not end.query()  # the caller has not waited
    assert over.wait(30)
    assert done == [True, "second"]
    ready.close()
    begin = time.monotonic()
    WhenReady(gpu=False).after(0, lambda why: done.append("at once" + why))
    assert done[-1] == "at once" and time.monotonic() - begin < 1
