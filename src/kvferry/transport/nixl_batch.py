"""One batch of NIXL's, from its start until NIXL has let go of it."""

from __future__ import annotations

import time
from typing import Any

from kvferry.errors import PeerLost, TransferError
from kvferry.transport.foreign import GRACE_SECONDS
from kvferry.transport.foreign_peer import ForeignPeer
from kvferry.transport.jobs import Job
from kvferry.transport.nixl_agent import mapped

SPINS = 50  # looks at a batch before sleeping in between
SHORT_NAP_SECONDS, LONG_NAP_SECONDS = 20e-6, 1e-3
PULSE_SECONDS = 0.02  # between two looks at whether the peer lives


def run(agent: Any, job: Job, peer: ForeignPeer, request: Any) -> None:
    """Until NIXL has let go of the batch: whatever became of the peer, its bytes may still be
    on their way, and the memory is in use. Who waits for them hears of a lost peer before."""
    looks, next_pulse, dead_until = 0, time.monotonic() + PULSE_SECONDS, 0.0
    try:
        state = agent.transfer(request)
        while state == "PROC":
            looks += 1
            if looks > SPINS:
                time.sleep(SHORT_NAP_SECONDS if looks < 100 * SPINS else LONG_NAP_SECONDS)
            now = time.monotonic()
            if now >= next_pulse:
                next_pulse = now + PULSE_SECONDS
                if not dead_until and not peer.pulse.alive():
                    dead_until = now + GRACE_SECONDS
                if dead_until and now > dead_until:
                    job.give_up(PeerLost("the peer is gone: it died or closed its carrier"))
            state = agent.check_xfer_state(request)
    except TransferError:
        raise
    except Exception as error:
        raise mapped(error) from None
    if state != "DONE":
        raise TransferError("NIXL reports that the batch failed; its own log says why")
