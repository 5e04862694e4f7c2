# SPDX-License-Identifier: Apache-2.0
"""An engine's shape: how it cuts the logical cache over ranks, pages it, and orders it in memory.

Everything here is a pure function of the shape; there are no addresses yet. The rules are vLLM's.
Where vLLM would refuse a size, the rule is continued:

- Units (heads, channels) are split evenly over ranks. If there are fewer units than ranks,
  neighbouring ranks hold the same unit. If the numbers do not divide, the split is balanced.
- Pipeline stages take consecutive layers. A remainder goes to the stages before the last.
- With decode context parallelism (dcp), rank r of a dcp group holds the tokens whose
  `position // interleave % dcp` is `r % dcp`. A block then spans `block_size * dcp` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvferry.errors import DescriptionError
from kvferry.layout.model import CacheModel, Component, Group

MOST_RANKS = 4096  # of one engine
MOST_COPIES = 16  # of a head; more are noted as odd
# Layers (L), blocks (B), heads (H), slots of tokens (N), bytes of a slot (C), outermost first.
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


class Rank(NamedTuple):
    """A worker of an engine. Ranks sort by stage, then by tensor parallel rank."""

    pp: int
    tp: int


class Span(NamedTuple):
    """A half-open range."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def shard(units: int, parts: int, part: int) -> Span:
    """Units that one of `parts` ranks holds."""
    if units >= parts:
        return Span(part * units // parts, (part + 1) * units // parts)
    held = part * units // parts
    return Span(held, held + 1)


def even_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage. The remainder goes to the stages before the last, from the back."""
    counts = [layers // pp] * pp
    for i in range(layers % pp):
        counts[-2 - i] += 1
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Parallelism, paging and memory order of one engine.

    The `*_of` fields override the engine-wide value for single groups, by group name, as pairs.
    """

    tp: int = 1
    pp: int = 1
    stages: tuple[int, ...] = ()  # layers of each stage; empty: even
    dcp: int = 1
    interleave: int = 1  # consecutive tokens of one dcp rank
    role_tp: tuple[tuple[str, int], ...] = ()  # a draft model's own tp: (("draft", 1),)
    block_size: int = 16  # tokens in a block
    block_size_of: tuple[tuple[str, int], ...] = ()
    kernel_block_size: int = 0  # tokens in a kernel's block; 0: as in the engine's block
    kernel_block_size_of: tuple[tuple[str, int], ...] = ()  # a draft model may have another backend
    order: str = "LBHNC"
    interior: str = "joined"  # of attention groups; states are always "state"
    interior_of: tuple[tuple[str, str], ...] = ()
    conv_order: Literal["DS", "SD"] = "DS"  # channels outermost, or rows outermost
    page_align: int = 1  # pages are padded up to a multiple of this many bytes
    overlay: bool = False  # groups share one storage and one block pool
    full_residency: bool = False  # windows and chunks keep every block (no hybrid manager)
    null_block: int | None = 0  # an id that means "no block"; never read or written

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dcp", "interleave", "block_size", "page_align"):
            if getattr(self, name) < 1:
                raise DescriptionError(f"{name} must be at least 1, found {getattr(self, name)}")
        kernels = (("", self.kernel_block_size), *self.kernel_block_size_of)
        for word, sizes, least in (("block", self.block_size_of, 1), ("kernel", kernels, 0)):
            for name, size in sizes:
                if size < least:
                    raise DescriptionError(
                        f"{word}{f' of {name!r}' if name else ''} must be at least {least} "
                        f"tokens, found {size}"
                    )
        if self.order not in ORDERS:
            raise DescriptionError(f"order must be one of {', '.join(ORDERS)}, found {self.order}")
        if self.stages and (len(self.stages) != self.pp or min(self.stages) < 1):
            raise DescriptionError(
                f"stages must name the layers of each of the {self.pp} stages, found {self.stages}"
            )
        if self.tp % self.dcp:
            raise DescriptionError(f"dcp must divide tp, found dcp={self.dcp}, tp={self.tp}")
        for group, tokens in (("", self.block_size), *self.block_size_of):
            if self.dcp > 1 and tokens % self.interleave:
                raise DescriptionError(
                    f"interleave must divide the block size{f' of {group!r}' if group else ''}, "
                    f"found interleave={self.interleave}, block size {tokens}"
                )
        for role, tp in self.role_tp:
            if tp < 1 or self.tp % tp:
                raise DescriptionError(
                    f"the tp of role {role!r} must divide the engine's, found {tp} and {self.tp}"
                )
        split = self.kernel_block_size or any(size for _, size in self.kernel_block_size_of)
        if split and self.order not in ("LBHNC", "LBNHC"):
            raise DescriptionError(
                f"kernel blocks exist only in orders LBHNC and LBNHC, found {self.order}"
            )

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of all blocks and kernel blocks that the shape names."""
        named = (*self.block_size_of, *self.kernel_block_size_of)
        return (self.block_size, self.kernel_block_size, *(size for _, size in named))

    def require_possible(self, model: CacheModel) -> None:
        """Refuse a shape that no engine with this model has: it names groups or roles that the
        model lacks, or leaves a stage without a layer."""
        if self.pp > model.num_layers:
            raise DescriptionError(
                f"pp={self.pp} leaves stages without a layer: model {model.name!r} has "
                f"{model.num_layers}"
            )
        if (ranks := self.pp * self.tp) > MOST_RANKS:
            raise DescriptionError(
                f"the shape {self.describe()} has {ranks:,} ranks; an engine has at most "
                f"{MOST_RANKS:,}"
            )
        sizes = (*self.block_size_of, *self.kernel_block_size_of, *self.interior_of)
        for what, named, known in (
            ("group", [name for name, _ in sizes], [g.name for g in model.groups]),
            ("role", [name for name, _ in self.role_tp], sorted({g.role for g in model.groups})),
        ):
            unknown = sorted(set(named) - set(known))
            if unknown:
                raise DescriptionError(
                    f"the shape {self.describe()} names the {what} {unknown[0]!r}, which model "
                    f"{model.name!r} does not have; it has {', '.join(known)}"
                )

    def oddities(self, model: CacheModel) -> list[str]:
        """Notes for the operator on a shape that can be planned, but is unusual."""
        notes = []
        for group in model.groups:
            tp = self.tp_for(group)
            heads = {c.units for c in group.components if c.sharding != "replicated"} - {0}
            for units in sorted(heads):
                shared = tp // units
                if tp % units and units % tp:
                    notes.append(
                        f"tp={tp} neither divides the {units} heads or channels of {group.name!r} "
                        "nor is a multiple of them: kvferry splits them as evenly as possible, but "
                        "vLLM does not start with them"
                    )
                elif shared > MOST_COPIES:
                    notes.append(
                        f"tp={tp}: each of the {units} heads or channels of {group.name!r} lies on "
                        f"{shared} ranks"
                    )
        return notes

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(Rank(p, t) for p in range(self.pp) for t in range(self.tp))

    def tp_for(self, group: Group) -> int:
        return dict(self.role_tp).get(group.role, self.tp)

    def units(self, group: Group, component: Component, tp_rank: int) -> Span:
        """Units of a component that a tensor parallel rank holds."""
        if component.sharding == "replicated":
            return Span(0, component.units)
        tp = self.tp_for(group)
        return shard(component.units, tp, tp_rank * tp // self.tp)

    def dcp_for(self, group: Group) -> int:
        return self.dcp if group.context_parallel and not group.is_state else 1

    def stage_layers(self, model: CacheModel, pp_rank: int) -> Span:
        """Target layers of a pipeline stage."""
        counts = self.stages or even_stages(model.num_layers, self.pp)
        if sum(counts) != model.num_layers:
            raise DescriptionError(
                f"stages {counts} hold {sum(counts)} layers, "
                f"but model {model.name!r} has {model.num_layers}"
            )
        start = sum(counts[:pp_rank])
        return Span(start, start + counts[pp_rank])

    def layers(self, model: CacheModel, group: Group, pp_rank: int) -> tuple[int, ...]:
        """Layers of a group that a stage holds. A draft model runs on the last stage."""
        if group.role == "draft":
            return group.layers if pp_rank == self.pp - 1 else ()
        held = self.stage_layers(model, pp_rank)
        return tuple(layer for layer in group.layers if held.start <= layer < held.stop)

    def block_tokens(self, group: Group) -> int:
        """Tokens of a group in one block of one rank. For a ring, its capacity."""
        return dict(self.block_size_of).get(group.name, self.block_size)

    def entries(self, group: Group) -> tuple[int, int]:
        """Entries of a group in one block, and in one kernel block."""
        if group.is_state:
            return 1, 1
        tokens = self.block_tokens(group)
        sizes = dict(self.kernel_block_size_of)
        kernel = sizes.get(group.name, self.kernel_block_size) or tokens
        if tokens % kernel:
            kernel = tokens  # the kernel does not split this group's blocks
        per = group.tokens_per_entry
        if tokens % per or kernel % per:
            raise DescriptionError(
                f"group {group.name!r} stores one entry per {per} tokens, which does not divide "
                f"its block of {tokens} tokens (kernel block {kernel}); choose another block size"
            )
        return tokens // per, kernel // per

    def interior_for(self, group: Group) -> str:
        if group.is_state:
            return "state"
        return dict(self.interior_of).get(group.name, self.interior)

    def describe(self) -> str:
        """One line that `parse` reads."""
        words = [f"tp={self.tp}"]
        if self.pp > 1:
            words.append(f"pp={'+'.join(map(str, self.stages)) if self.stages else self.pp}")
        if self.dcp > 1:
            words.append(f"dcp={self.dcp}")
            words.append(f"interleave={self.interleave}")
        words += [f"{role}_tp={tp}" for role, tp in self.role_tp]
        usual = EngineShape()
        for word in ("block", "kernel", "order", "interior", "conv", "align", "overlay", "full"):
            value = getattr(self, _FIELDS[word])
            if word in ("block", "order") or value != getattr(usual, _FIELDS[word]):
                words.append(f"{word}={int(value) if value is True else value}")
            if word in ("block", "kernel", "interior"):
                own = getattr(self, f"{_FIELDS[word]}_of")
                words += [f"{word}.{name}={value}" for name, value in own]
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> EngineShape:
        """Read `tp=4,pp=2,block=16,order=LBNHC`; `pp=30+50` gives uneven stages."""
        fields: dict[str, Any] = {}
        said: set[str] = set()
        for word in filter(None, (w.strip() for w in text.split(","))):
            key, equals, value = word.partition("=")
            name, dot, group = key.partition(".")
            if key in said:
                raise DescriptionError(f"the shape {text!r} says {key} twice; give each word once")
            said.add(key)
            if equals and key == "pp":
                stages = tuple(_read(key, part) for part in value.split("+"))
                uneven = {"pp": len(stages), "stages": stages}
                fields |= uneven if len(stages) > 1 else {"pp": stages[0]}
            elif equals and key in _FIELDS:
                fields[_FIELDS[key]] = _read(key, value)
            elif equals and dot and name in ("block", "kernel", "interior"):
                known = fields.get(f"{_FIELDS[name]}_of", ())
                fields[f"{_FIELDS[name]}_of"] = (*known, (group, _read(key, value)))
            elif equals and key.endswith("_tp"):
                role = (key.removesuffix("_tp"), _read(key, value))
                fields["role_tp"] = (*fields.get("role_tp", ()), role)
            else:
                raise DescriptionError(
                    f"cannot read {word!r} in the shape {text!r}; use words such as tp=4, pp=2 or "
                    "pp=30+50, dcp=2, interleave=1, draft_tp=1, block=16, block.GROUP=32, "
                    f"kernel=16, kernel.GROUP=16, order={'|'.join(ORDERS)}, "
                    "interior=joined|split|planes|cpu|opaque, conv=DS|SD, align=512, overlay=1, "
                    "full=1"
                )
        return cls(**fields)


_FIELDS = {  # by their words in a shape
    "tp": "tp",
    "dcp": "dcp",
    "interleave": "interleave",
    "block": "block_size",
    "kernel": "kernel_block_size",
    "order": "order",
    "interior": "interior",
    "conv": "conv_order",
    "align": "page_align",
    "overlay": "overlay",
    "full": "full_residency",
}


def _read(key: str, value: str) -> object:
    """The value of one word of a shape."""
    if key == "conv" and value not in ("DS", "SD"):
        raise DescriptionError(f"conv must be DS or SD, found {value!r}")
    if key in ("conv", "order") or key.partition(".")[0] == "interior":
        return value
    try:
        number = int(value)
    except ValueError:
        raise DescriptionError(f"{key} takes a whole number, found {value!r}") from None
    return bool(number) if key in ("overlay", "full") else number
