"""Carry: the ways in which bytes move from one rank to another."""

from kvferry.transport.base import Carrier, CopyArrays, MemoryRegion, Transfer, TransferState
from kvferry.transport.registry import make_carrier

__all__ = [
    "Carrier",
    "CopyArrays",
    "MemoryRegion",
    "Transfer",
    "TransferState",
    "make_carrier",
]
