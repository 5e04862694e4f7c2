# SPDX-License-Identifier: Apache-2.0
"""A case in plain JSON values: a model, two engines, one request.

The oracle and the product read only this, so neither depends on the other.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class ComponentDict(TypedDict):
    name: str
    units: int
    dims: list[int]
    element_bytes: int
    sharding: Literal["split", "replicated"]


class ResidencyDict(TypedDict):
    kind: str
    span: int


class GroupDict(TypedDict):
    name: str
    role: str
    layers: list[int]
    components: list[ComponentDict]
    residency: ResidencyDict
    tokens_per_entry: int
    partial_entries: bool
    context_parallel: bool


class ModelDict(TypedDict):
    name: str
    total_layers: int
    groups: list[GroupDict]


class ShapeDict(TypedDict):
    tp: int
    pp: int
    stages: list[int]
    dcp: int
    interleave: int
    role_tp: dict[str, int]
    block_size: int
    block_size_of: dict[str, int]
    kernel_block_size: int
    kernel_block_size_of: dict[str, int]
    order: str
    interior: str
    interior_of: dict[str, str]
    conv_order: str
    page_align: int
    overlay: bool
    full_residency: bool
    null_block: int | None


class SideDict(TypedDict):
    shape: ShapeDict
    blocks: int
    tables: dict[str, list[int]]
    absent_roles: list[str]  # roles whose groups this engine does not have


class CaseDict(TypedDict):
    kind: str  # of the model; a sweep reports the share of each
    fault: str  # how a table was broken on purpose; "" if none was
    model: ModelDict
    src: SideDict
    dst: SideDict
    tokens: int
    skip: int
