# SPDX-License-Identifier: Apache-2.0
"""The logical cache of a model: components, groups of layers, residency.

A *component* is one stored thing of one layer: K, V, an MLA latent, a section of a convolution
state, an SSM state. Logically it is an array

    entries x units x dims x element

An entry is a token, a group of tokens, or a whole state. Tensor parallelism cuts between units:
heads, channels, or groups of channels. It never cuts inside the dims of one unit. All engines that
serve a model have the same logical array; an engine's shape says which rank holds which part.

Engines also send components and groups to each other. So their fields have bounds, which decoding
checks. The bounds are several times what real models need.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.errors import DescriptionError, IncompatibleError

ResidencyKind = Literal["full", "window", "chunk", "ring", "state"]
Sharding = Literal["split", "replicated"]
Name = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
Dims = Annotated[tuple[Count, ...], Meta(max_length=16)]
MOST_LAYERS = 4096  # of one group
Layers = Annotated[tuple[Count, ...], Meta(max_length=MOST_LAYERS)]


class Residency(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a sequence that the next step reads, so that a group must still hold them.

    full    every token
    window  the last `span - 1` tokens, so that the next token sees `span` with itself
    chunk   the tokens of the current chunk of `span`
    ring    the last `span` tokens, at slot = position mod capacity (the block size)
    state   no tokens: one recurrent state for the whole sequence
    """

    kind: ResidencyKind = "full"
    span: Count = 0

    def __post_init__(self) -> None:
        spanned = self.kind in ("window", "chunk", "ring")
        if spanned != (self.span > 0):
            raise DescriptionError(
                f"residency {self.kind!r} with span {self.span}: "
                + ("give the span in tokens" if spanned else "this kind has no span")
            )

    def needed_from(self, tokens: int) -> int:
        """First position that the computation of token number `tokens` reads."""
        match self.kind:
            case "window":
                return max(0, tokens - self.span + 1)
            case "chunk":
                return tokens // self.span * self.span
            case "ring":
                return max(0, tokens - self.span)
            case _:
                return 0


@dataclass(frozen=True, slots=True)
class Component:
    """One stored thing of one layer, over all ranks of the engine."""

    name: Name
    units: Count  # heads, channels or groups in the whole model
    dims: Dims  # elements inside one unit, outermost first
    element_bytes: Count
    sharding: Sharding = "split"
    content: Name = ""  # number format ("bf16", "fp8_e4m3"): compared, never converted

    def __post_init__(self) -> None:
        if self.units < 1 or not self.dims or min(self.dims) < 1:
            raise DescriptionError(
                f"component {self.name!r}: units and dims must be positive, "
                f"found units={self.units}, dims={self.dims}"
            )
        if self.element_bytes not in (1, 2, 4, 8):
            raise DescriptionError(
                f"component {self.name!r}: element_bytes must be 1, 2, 4 or 8, "
                f"found {self.element_bytes}"
            )

    @property
    def unit_bytes(self) -> int:
        return math.prod(self.dims) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that store the same components under the same residency.

    Layers are named by `role` and ordinal, never by position: a draft model's layer 0 is not the
    target's. `layers` are ordinals in ascending order.
    """

    name: Name
    layers: Layers
    components: Annotated[tuple[Component, ...], Meta(max_length=64)]
    residency: Residency = field(default_factory=Residency)
    role: Name = "target"
    tokens_per_entry: Count = 1  # tokens that one stored entry stands for
    partial_entries: bool = False  # whether an entry is stored before all its tokens are computed
    context_parallel: bool = True  # whether dcp cuts this group's tokens

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise DescriptionError(
                f"group {self.name!r}: layers must be distinct ordinals in ascending order, "
                f"found {self.layers}"
            )
        names = [c.name for c in self.components]
        if not names or len(set(names)) != len(names):
            raise DescriptionError(
                f"group {self.name!r}: needs components with distinct names, found {names}"
            )
        if self.residency.kind in ("ring", "state") and self.tokens_per_entry != 1:
            raise DescriptionError(
                f"group {self.name!r}: a {self.residency.kind} stores one entry a token or state, "
                f"found tokens_per_entry={self.tokens_per_entry}"
            )
        if self.tokens_per_entry < 1:
            raise DescriptionError(
                f"group {self.name!r}: tokens_per_entry must be at least 1, "
                f"found {self.tokens_per_entry}"
            )

    @property
    def is_state(self) -> bool:
        return self.residency.kind == "state"

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one layer, over all units."""
        return sum(c.units * c.unit_bytes for c in self.components)

    def component(self, name: str) -> Component:
        for component in self.components:
            if component.name == name:
                return component
        raise DescriptionError(
            f"group {self.name!r} has no component {name!r}; "
            f"it has {[c.name for c in self.components]}"
        )


@dataclass(frozen=True, slots=True)
class CacheModel:
    """The logical cache of a model, equal on all engines that serve it."""

    name: str
    groups: tuple[Group, ...]
    total_layers: int = 0  # target layers, if the last ones cache nothing; 0: counted from groups

    def __post_init__(self) -> None:
        names = [g.name for g in self.groups]
        if not names or len(set(names)) != len(names):
            raise DescriptionError(
                f"model {self.name!r}: needs groups with distinct names, found {names}"
            )

    @property
    def num_layers(self) -> int:
        """Layers of the target model. Pipeline stages divide them."""
        cached = 1 + max((max(g.layers) for g in self.groups if g.role != "draft"), default=0)
        return max(cached, self.total_layers)

    def group(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        raise DescriptionError(
            f"model {self.name!r} has no group {name!r}; it has {[g.name for g in self.groups]}"
        )

    def common(self, other: CacheModel) -> CacheModel:
        """Layers that both models have, as a model of their own."""
        groups = self._groups(other, shared=True)
        return replace(self, groups=groups, total_layers=self.num_layers)

    def beyond(self, other: CacheModel) -> CacheModel | None:
        """Layers that only this model has, as a model of their own, or None."""
        groups = self._groups(other, shared=False)
        return replace(self, groups=groups, total_layers=self.num_layers) if groups else None

    def _groups(self, other: CacheModel, shared: bool) -> tuple[Group, ...]:
        """This model's groups, with the layers that the other model has too, or the rest."""
        theirs = {g.name: set(g.layers) for g in other.groups}
        kept = [
            (g, tuple(x for x in g.layers if (x in theirs.get(g.name, ())) == shared))
            for g in self.groups
        ]
        return tuple(replace(group, layers=layers) for group, layers in kept if layers)

    @property
    def of_one_length(self) -> bool:
        """Whether a cache cannot be cut to fewer tokens, because of a state or a ring."""
        return any(g.residency.kind in ("state", "ring") for g in self.groups)

    def token_bytes(self) -> int:
        """Bytes that one token adds, over all layers and ranks. States and rings add none."""
        return sum(
            len(g.layers) * g.entry_bytes // g.tokens_per_entry
            for g in self.groups
            if g.residency.kind not in ("state", "ring")
        )

    def fingerprint(self) -> str:
        """Digest of the cache format. The name is left out: the caller compares the weights."""
        groups = [asdict(g) for g in sorted(self.groups, key=lambda g: g.name)]
        told = json.dumps([self.num_layers, groups], sort_keys=True, default=msgspec.structs.asdict)
        return hashlib.sha256(told.encode()).hexdigest()[:32]


def require_same_cache(
    src: CacheModel, dst: CacheModel, optional_roles: frozenset[str] = frozenset()
) -> None:
    """Refuse two models whose cache formats differ. The error names both values.

    Layers that only one side has are an error unless their role is in `optional_roles`.
    """

    def refuse(what: str, a: object, b: object) -> None:
        raise IncompatibleError(
            f"{what}: the source {src.name!r} has {a}, the destination {dst.name!r} has {b}; "
            "both engines must serve the same model with the same cache format"
        )

    src_groups = {g.name: g for g in src.groups}
    dst_groups = {g.name: g for g in dst.groups}
    for name in {**src_groups, **dst_groups}:
        a, b = src_groups.get(name), dst_groups.get(name)
        if a is None or b is None:
            only = a or b
            if only is not None and only.role not in optional_roles:
                refuse(
                    f"group {name!r} (role {only.role!r}) is on one side only",
                    "it" if a else "no such group",
                    "it" if b else "no such group",
                )
            continue
        if a.layers != b.layers and a.role not in optional_roles:
            only_a = sorted(set(a.layers) - set(b.layers))
            only_b = sorted(set(b.layers) - set(a.layers))
            refuse(f"layers of group {name!r} on one side only", only_a, only_b)
        for attribute in (
            "role",
            "residency",
            "tokens_per_entry",
            "partial_entries",
            "context_parallel",
        ):
            if getattr(a, attribute) != getattr(b, attribute):
                refuse(
                    f"{attribute} of group {name!r}", getattr(a, attribute), getattr(b, attribute)
                )
        a_names, b_names = [[c.name for c in g.components] for g in (a, b)]
        if a_names != b_names:
            refuse(f"components of group {name!r}", a_names, b_names)
        for ca, cb in zip(a.components, b.components, strict=True):
            for attribute in ("units", "dims", "element_bytes", "content", "sharding"):
                if getattr(ca, attribute) != getattr(cb, attribute):
                    refuse(
                        f"{attribute} of component {ca.name!r} in group {name!r}",
                        getattr(ca, attribute),
                        getattr(cb, attribute),
                    )
    if src.num_layers != dst.num_layers:  # pipeline stages would be cut at other layers
        refuse("layers of the whole model", src.num_layers, dst.num_layers)
