"""Plans as plain values: to keep, to send, to compare.

`dump` gives JSON-able values and `load` the same plan again. `digest` is equal on two sides exactly
when their plans are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from kvferry.errors import DescriptionError
from kvferry.layout.model import Component, Group, Residency
from kvferry.layout.shape import EngineShape, Rank
from kvferry.plan.edge import EdgePlan
from kvferry.plan.piece import Piece, Side, Slab
from kvferry.plan.runs import Axis
from kvferry.plan.tokens import Paging

FORMAT = 1


def dump(plan: EdgePlan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "src": list(plan.src),
        "dst": list(plan.dst),
        "src_shape": asdict(plan.src_shape),
        "dst_shape": asdict(plan.dst_shape),
        "groups": {name: asdict(group) for name, group in sorted(plan.groups.items())},
        "pieces": [
            {
                "group": piece.group,
                "opaque": piece.opaque,
                "src": _dump_side(piece.src),
                "dst": _dump_side(piece.dst),
                "slabs": [asdict(slab) for slab in piece.slabs],
            }
            for piece in plan.pieces
        ],
    }


def load(values: dict[str, Any]) -> EdgePlan:
    if values.get("format") != FORMAT:
        raise DescriptionError(
            f"a plan of format {values.get('format')!r}; this version reads {FORMAT}"
        )
    pieces = tuple(
        Piece(
            piece["group"],
            piece["opaque"],
            _load_side(piece["src"]),
            _load_side(piece["dst"]),
            tuple(_load_slab(slab) for slab in piece["slabs"]),
        )
        for piece in values["pieces"]
    )
    return EdgePlan(
        src=Rank(*values["src"]),
        dst=Rank(*values["dst"]),
        pieces=pieces,
        groups={name: _load_group(group) for name, group in values["groups"].items()},
        src_shape=_load_shape(values["src_shape"]),
        dst_shape=_load_shape(values["dst_shape"]),
    )


def digest(plan: EdgePlan) -> str:
    text = json.dumps(dump(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _dump_side(side: Side) -> dict[str, Any]:
    values = {f.name: getattr(side, f.name) for f in fields(side)}
    values["paging"] = asdict(side.paging)
    values["regions"], values["offsets"] = side.regions.tolist(), side.offsets.tolist()
    return values


def _load_side(values: dict[str, Any]) -> Side:
    arrays = {name: np.asarray(values[name], dtype=np.int64) for name in ("regions", "offsets")}
    return Side(**{**values, "paging": Paging(**values["paging"]), **arrays})


def _load_slab(values: dict[str, Any]) -> Slab:
    return Slab(**{**values, "axes": tuple(Axis(*axis) for axis in values["axes"])})


def _load_group(values: dict[str, Any]) -> Group:
    components = tuple(
        Component(**{**component, "dims": tuple(component["dims"])})
        for component in values["components"]
    )
    return Group(
        **{
            **values,
            "layers": tuple(values["layers"]),
            "components": components,
            "residency": Residency(**values["residency"]),
        }
    )


def _load_shape(values: dict[str, Any]) -> EngineShape:
    return EngineShape(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value
