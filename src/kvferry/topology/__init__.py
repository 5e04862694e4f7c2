"""Topology: who this rank is, and what it knows of remote engines."""

from kvferry.topology.info import EngineTransferInfo, MambaEngineTransferInfo, TransferRegion
from kvferry.topology.topology import TransferTopology

__all__ = ["EngineTransferInfo", "MambaEngineTransferInfo", "TransferRegion", "TransferTopology"]
