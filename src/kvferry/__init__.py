# SPDX-License-Identifier: Apache-2.0
"""kvferry: moves and shares KV caches between LLM engines of any shape."""

from kvferry.layout import CacheModel, Component, EngineShape, Group, Rank, RankLayout, Residency
from kvferry.plan import Bound, Copies, EdgePlan, PairPlan, bind, plan_pair

__version__ = "0.1.0"
SUPPORTED_VLLM = ("0.32.",)  # beginnings of versions

__all__ = [
    "SUPPORTED_VLLM",
    "Bound",
    "CacheModel",
    "Component",
    "Copies",
    "EdgePlan",
    "EngineShape",
    "Group",
    "PairPlan",
    "Rank",
    "RankLayout",
    "Residency",
    "__version__",
    "bind",
    "plan_pair",
]
