# SPDX-License-Identifier: Apache-2.0
"""Plans: which bytes of one engine go where in another."""

from kvferry.copies import Copies, StridedCopies
from kvferry.plan.assign import Edge, Share
from kvferry.plan.bind import Bound, bind
from kvferry.plan.cover import Uncovered, everything_plan, uncovered, whole_blocks
from kvferry.plan.edge import EdgePlan
from kvferry.plan.pair import PairPlan, plan_pair

__all__ = [
    "Bound",
    "Copies",
    "Edge",
    "EdgePlan",
    "PairPlan",
    "Share",
    "StridedCopies",
    "Uncovered",
    "bind",
    "everything_plan",
    "plan_pair",
    "uncovered",
    "whole_blocks",
]
