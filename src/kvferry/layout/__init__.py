# SPDX-License-Identifier: Apache-2.0
"""Descriptions of caches: models, engine shapes, page interiors, and each rank's memory."""

from kvferry.layout.model import CacheModel, Component, Group, Residency, require_same_cache
from kvferry.layout.placement import Part, Placement, RankLayout, Region
from kvferry.layout.shape import ORDERS, EngineShape, Rank, Span, shard

__all__ = [
    "ORDERS",
    "CacheModel",
    "Component",
    "EngineShape",
    "Group",
    "Part",
    "Placement",
    "Rank",
    "RankLayout",
    "Region",
    "Residency",
    "Span",
    "require_same_cache",
    "shard",
]
