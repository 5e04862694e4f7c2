# SPDX-License-Identifier: Apache-2.0
"""Carry: the ways in which bytes move from one rank to another."""

from kvferry.carriers.auto import make_carrier
from kvferry.carriers.base import Carrier, MemoryRegion, Transfer, TransferState

__all__ = ["Carrier", "MemoryRegion", "Transfer", "TransferState", "make_carrier"]
