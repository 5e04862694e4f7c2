"""NIXL beside the cuda carrier, where it is installed: the same descriptors, prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.bench.gpu_clock import wall
from kvferry.transport.regions import Arrays

if TYPE_CHECKING:
    from kvferry.bench.gpu import Bench


@dataclass(slots=True)
class Nixl:
    """NIXL's prepared transfers over the same memory."""

    bench: Bench
    agent: Any = None
    peer: Any = None
    why_not: str = ""

    def start(self) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            region = self.bench.region
            metadata = self.bench.owner.ask("nixl")["metadata"]
            self.agent = nixl_agent("reader", nixl_agent_config(backends=["UCX"]))
            self.agent.register_memory([(region.address, region.bytes, 0, "")], mem_type="VRAM")
            self.peer = self.agent.add_remote_agent(bytes.fromhex(metadata))
        except Exception as error:
            self.agent, self.why_not = None, f"{type(error).__name__}: {error}"

    def seconds(self, copies: Arrays) -> float:
        agent = self.agent
        rows = np.zeros((len(copies), 3), dtype=np.uint64)
        rows[:, 1] = copies.length
        lists = []
        for who, addresses in (("NIXL_INIT_AGENT", copies.dst), (self.peer, copies.src)):
            rows[:, 0] = addresses
            descriptors = agent.get_xfer_descs(rows, mem_type="VRAM")
            lists.append(agent.prep_xfer_dlist(who, descriptors))
        which = np.arange(len(copies), dtype=np.int32)

        def transfer() -> None:
            handle = agent.make_prepped_xfer("READ", lists[0], which, lists[1], which)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL ended with {state}")
            agent.release_xfer_handle(handle)

        return wall(transfer, 3)
