# SPDX-License-Identifier: Apache-2.0
"""Random cases from a seed, and the features by which a sweep counts them.

Case `index` of a seed is the same each time, and does not depend on other cases. Models are small
enough to be moved byte by byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

from kvferry.verify.oracle import (
    CaseDict,
    CaseEngine,
    ComponentDict,
    GroupDict,
    ModelDict,
    ShapeDict,
    SideDict,
    TensorsDict,
    table_of,
)

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
HEADS_OUTSIDE = ("LHBNC", "BHLNC")  # heads lie outside the page
SLOTS_OUTSIDE = ("LBNHC", "BLNHC")
# Pairs, in either direction. Small sizes are more frequent: more ranks cost time and test little
# more.
NON_DIVIDING_TP = ((2, 3), (2, 3), (3, 4), (3, 4), (4, 6), (2, 5), (3, 5), (3, 8), (6, 4))
DIVIDING_TP = ((1, 1), (1, 2), (2, 2), (2, 2), (2, 4), (1, 4), (4, 4), (3, 6), (2, 8), (1, 3))
UNRELATED_BLOCKS = ((4, 6), (4, 6), (2, 3), (3, 5), (8, 12), (9, 6), (10, 4), (16, 24), (48, 32))
TILED_BLOCKS = ((16, 48), (32, 48), (16, 24), (16, 16), (32, 16), (16, 12))  # for tiles of 16
COMMON_BLOCKS = ((4, 4), (8, 8), (2, 8), (4, 8), (16, 8), (16, 16), (1, 4), (5, 5), (6, 12), (3, 6))
NON_DIVIDING_SHARE = 0.42
UNRELATED_SHARE = 0.42
PP_BOTH_SHARE = 0.42
FAULT_SHARE = 0.02  # cases with a table that is broken on purpose
CARELESS_SHARE = 0.03  # shapes that may not exist
TENSORS_SHARE = 0.35  # engines whose layers are tensors of their own, as vLLM registers them
MOST_TOKENS = 120


def generate(seed: int, index: int) -> CaseDict:
    """Case number `index` of `seed`."""
    return _Generator(Random(f"kvferry {seed} {index}")).case()


def features(case: CaseDict) -> tuple[str, ...]:
    """Names of a case's features. A sweep reports the share of each."""
    src, dst, groups = case["src"]["shape"], case["dst"]["shape"], case["model"]["groups"]
    both = (src, dst)

    def unrelated(a: int, b: int) -> bool:
        return max(a, b) % min(a, b) != 0

    split = [c["units"] for g in groups for c in g["components"] if c["sharding"] == "split"]
    found = {
        "non_dividing_tp": unrelated(src["tp"], dst["tp"]),
        "different_order": src["order"] != dst["order"],
        "unrelated_blocks": unrelated(src["block_size"], dst["block_size"]),
        "pp_both": min(src["pp"], dst["pp"]) > 1,
        "uneven_stages": any(len(set(s["stages"])) > 1 for s in both),
        "dcp": any(s["dcp"] > 1 for s in both),
        "dcp_both": all(s["dcp"] > 1 for s in both),
        "kernel_blocks": any(s["kernel_block_size"] not in (0, s["block_size"]) for s in both),
        "kernel_blocks_by_group": any(s["kernel_block_size_of"] for s in both),
        "overlay": any(s["overlay"] for s in both),
        "padding": any(s["page_align"] > 1 for s in both),
        "different_interior": (src["interior"], src["interior_of"])
        != (dst["interior"], dst["interior_of"]),
        "replicated_both": any(units < min(src["tp"], dst["tp"]) for units in split),
        "role_tp": any(s["role_tp"] for s in both),
        "one_sided_role": any(
            s["absent_roles"] or "fewer" in s for s in (case["src"], case["dst"])
        ),
        "full_residency": any(s["full_residency"] for s in both),
        "tensors": any("tensors" in s for s in (case["src"], case["dst"])),
        "skip": case["skip"] > 0,
        "fault": bool(case["fault"]),
        f"model_{case['kind']}": True,
    }
    return tuple(name for name, is_so in found.items() if is_so)


@dataclass
class _Generator:
    rng: Random

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def case(self) -> CaseDict:
        rng = self.rng
        kind, model = make_model(rng)
        tp = self._either_way(NON_DIVIDING_TP if self.chance(NON_DIVIDING_SHARE) else DIVIDING_TP)
        pp = (rng.choice((1, 1, 2, 3)), 1)
        if self.chance(PP_BOTH_SHARE):
            pp = (rng.choice((2, 2, 3, 4)), rng.choice((2, 2, 3, 4)))
        elif self.chance(0.5):
            pp = (pp[1], pp[0])
        blocks = self._either_way(
            UNRELATED_BLOCKS if self.chance(UNRELATED_SHARE) else COMMON_BLOCKS
        )
        if kind == "amx":
            blocks = self._either_way(TILED_BLOCKS)
        sides = [self._side(kind, model, *choice) for choice in zip(tp, pp, blocks, strict=True)]
        if kind == "opaque" and self.chance(0.95):
            self._make_alike(sides[0], sides[1])
        if kind == "draft" and self.chance(0.2):
            rng.choice(sides)["absent_roles"] = ["draft"]
        elif kind == "draft" and self.chance(0.3):  # MTP modules of another number
            rng.choice(sides)["fewer"] = {"draft": 1}
        for side in sides:
            if self.chance(TENSORS_SHARE):
                side["tensors"] = self._tensors(CaseEngine(model, side).groups.values())
        case: CaseDict = {
            "kind": kind,
            "fault": "",
            "model": model,
            "src": sides[0],
            "dst": sides[1],
            "tokens": 1,
            "skip": 0,
        }
        self._request(case)
        for side in sides:
            self._allocate(CaseEngine(model, side), case["tokens"])
        if self.chance(FAULT_SHARE):
            self._break(case)
        return case

    def _either_way(self, pairs: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        a, b = self.rng.choice(pairs)
        return (a, b) if self.chance(0.5) else (b, a)

    # shapes

    def _side(self, kind: str, model: ModelDict, tp: int, pp: int, block: int) -> SideDict:
        rng, groups = self.rng, model["groups"]
        careless = self.chance(CARELESS_SHARE)
        order = rng.choice(ORDERS)
        heads = max(c["units"] for g in groups for c in g["components"])
        if heads > 1 and kind in ("opaque", "nvfp4") and not careless:
            order = rng.choice(("LBHNC", "LBNHC", "BLHNC", "BLNHC"))
        tiled = kind == "amx" and self.chance(0.8)
        if tiled:  # tiles lie inside heads, never inside kernel blocks
            order = rng.choice(("LBHNC", "LHBNC", "BLHNC", "BHLNC"))
        bare = careless or heads == 1 or order not in HEADS_OUTSIDE
        overlay = len(groups) > 1 and self.chance(0.4 if bare else 0.08)
        kernel, align = 0, 1
        if order.startswith("LB") and (careless or not (overlay or tiled)) and self.chance(0.45):
            kernel = rng.choice([d for d in range(1, block + 1) if block % d == 0])
        if bare and (not kernel or careless) and self.chance(0.4):
            align = rng.choice((8, 16, 24, 32, 64, 100, 128))
        shape: ShapeDict = {
            "tp": tp,
            "pp": pp,
            "stages": self._stages(model, pp),
            "dcp": 1,
            "interleave": 1,
            "role_tp": {},
            "block_size": block,
            "block_size_of": self._block_sizes(groups, block),
            "kernel_block_size": kernel,
            "kernel_block_size_of": {},
            "order": order,
            "interior": "joined",
            "interior_of": {},
            "conv_order": rng.choice(("DS", "SD")),
            "page_align": align,
            "overlay": overlay,
            "full_residency": self.chance(0.2),
            "null_block": 0,
        }
        if any(g["tokens_per_entry"] > 1 and kernel % g["tokens_per_entry"] for g in groups):
            shape["kernel_block_size"] = 0
        if any(g["role"] == "draft" for g in groups) and self.chance(0.8):
            shape["role_tp"] = {"draft": rng.choice([d for d in range(1, tp + 1) if tp % d == 0])}
        if shape["kernel_block_size"] and self.chance(0.3):  # one group has another backend
            own = shape["block_size_of"].get(groups[-1]["name"], block)
            per = groups[-1]["tokens_per_entry"]
            sizes = [d for d in range(per, own + 1, per) if own % d == 0]
            if sizes and groups[-1]["residency"]["kind"] != "state":
                shape["kernel_block_size_of"] = {groups[-1]["name"]: rng.choice(sizes)}
        for g in groups:
            if g["residency"]["kind"] != "state":
                shape["interior_of"][g["name"]] = self._interior(kind, g, shape, careless)
        if len(set(shape["interior_of"].values())) == 1:
            shape["interior"] = next(iter(shape["interior_of"].values()))
            shape["interior_of"] = {}
        side: SideDict = {"shape": shape, "blocks": 1, "tables": {}, "absent_roles": []}
        if tp > 1 and self.chance(0.45):
            self._share_tokens(CaseEngine(model, side), careless)
        return side

    def _stages(self, model: ModelDict, pp: int) -> list[int]:
        """Layers of each stage, or an empty list for even stages."""
        cached = [x + 1 for g in model["groups"] if g["role"] != "draft" for x in g["layers"]]
        layers = max(model["total_layers"], *cached, 1)
        if pp == 1 or layers < pp or self.chance(0.4):
            return []
        cuts = sorted(self.rng.sample(range(1, layers), pp - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]

    def _block_sizes(self, groups: list[GroupDict], block: int) -> dict[str, int]:
        sizes = {}
        for g in groups:
            per, residency = g["tokens_per_entry"], g["residency"]
            if residency["kind"] == "ring":
                sizes[g["name"]] = residency["span"] + self.rng.choice((0, 1, 2, 5))
                if self.chance(0.02):
                    sizes[g["name"]] = max(1, residency["span"] - 1)
            elif block % per:
                sizes[g["name"]] = block * per
            elif residency["kind"] == "full" and self.chance(0.1):
                sizes[g["name"]] = block * self.rng.choice((1, 2))
        return sizes

    def _interior(self, kind: str, group: GroupDict, shape: ShapeDict, careless: bool) -> str:
        choices = interiors(kind, group)
        if not careless and (shape["block_size"] % 16 or shape["kernel_block_size"]):
            choices = [c for c in choices if c != "cpu_amx"]
        many = max(c["units"] for c in group["components"]) > 1
        if not careless and many and shape["order"] in HEADS_OUTSIDE:
            choices = [c for c in choices if c not in ("planes", "nvfp4")] or choices
        if not careless and many and shape["order"] in SLOTS_OUTSIDE:
            choices = [c for c in choices if not c.startswith("cpu")]
        if not careless and shape["overlay"]:
            choices = [c for c in choices if c != "split"]
        return self.rng.choice(choices)

    def _share_tokens(self, engine: CaseEngine, careless: bool) -> None:
        """Give an engine dcp, if its ranks hold enough copies of each head."""
        shape = engine.shape
        groups = [g for g in engine.groups.values() if engine.dcp(g) == 1]
        groups = [g for g in groups if g["context_parallel"] and g["residency"]["kind"] != "state"]
        sizes = [engine.block_tokens(g) for g in engine.groups.values()]
        per = math.lcm(*(g["tokens_per_entry"] for g in groups))
        common = math.gcd(shape["block_size"], *sizes)
        steps = [d for d in range(per, common + 1, per) if common % d == 0]
        options = [
            dcp
            for dcp in range(2, shape["tp"] + 1)
            if shape["tp"] % dcp == 0 and (careless or all(_copies(engine, g, dcp) for g in groups))
        ]
        if options and steps:
            shape["dcp"] = self.rng.choice(options)
            shape["interleave"] = self.rng.choice(steps)

    def _make_alike(self, src: SideDict, dst: SideDict) -> None:
        """Give both sides almost the same shape: opaque pages move between identical pages only."""
        own = dst["shape"]
        shape: ShapeDict = {**src["shape"], "pp": own["pp"], "stages": own["stages"]}
        if not shape["kernel_block_size"] and shape["order"] not in HEADS_OUTSIDE:
            shape["page_align"], shape["overlay"] = own["page_align"], own["overlay"]
        shape["full_residency"] = own["full_residency"]
        match self.rng.choice(("order", "kernel", "block", "tp", *[""] * 9)):  # mostly none
            case "order":
                shape["order"] = self.rng.choice(("LBHNC", "LBNHC"))
            case "kernel" if shape["order"].startswith("LB"):
                shape["kernel_block_size"] = shape["block_size"]
            case "block":
                shape["block_size"] *= 2
            case "tp":
                shape["tp"] = 2 * shape["dcp"]
        dst["shape"] = shape

    def _tensors(self, groups: Iterable[GroupDict]) -> TensorsDict:
        tables = {g["name"]: min(len(g["layers"]), self.rng.choice((1, 1, 2, 3))) for g in groups}
        return {
            "tables": tables,
            "turned": self.rng.choice((0, 0, 1, 2)),
            "apart": self.chance(0.5),
            "backwards": self.chance(0.3),
        }

    # the request

    def _request(self, case: CaseDict) -> None:
        rng = self.rng
        spans = [s["shape"]["block_size"] * s["shape"]["dcp"] for s in (case["src"], case["dst"])]
        case["tokens"] = tokens = rng.randint(1, min(MOST_TOKENS, 3 * max(spans) + 5))
        if self.chance(0.15):  # on one side the last block is full
            case["tokens"] = tokens = max(1, tokens // spans[0]) * spans[rng.randint(0, 1)]
        if self.chance(0.45):
            case["skip"] = rng.randint(0, tokens)
            if self.chance(0.6):
                case["skip"] = case["skip"] // spans[1] * spans[1]

    def _allocate(self, engine: CaseEngine, tokens: int) -> None:
        """Make block tables, with holes for dropped blocks, and ids scattered or in runs."""
        side, shape = engine.side, engine.shape
        tables = {table_of(one): one for g in engine.groups.values() for one in engine.dealt(g)}
        counts = {
            name: 1
            if g["residency"]["kind"] in ("state", "ring")
            else -(-tokens // engine.block_positions(g)) + self.rng.choice((0, 0, 0, 1, 2))
            for name, g in tables.items()
        }
        most = sum(counts.values()) if shape["overlay"] else max(counts.values())
        side["blocks"] = most + 1 + self.rng.randint(0, 4)
        shape["null_block"] = self.rng.choice((0, 0, 0, None, side["blocks"] - 1))
        pool = self._ids(side["blocks"], shape["null_block"])
        keeps_old = self.chance(0.2)
        for name, g in tables.items():
            if not shape["overlay"]:
                pool = self._ids(side["blocks"], shape["null_block"])
            table = [pool.pop() for _ in range(counts[name])]
            if g["residency"]["kind"] in ("window", "chunk") and not keeps_old:
                kept = {p // engine.block_positions(g) for p in engine.kept(g, tokens)}
                for number in range(min(kept, default=0)):
                    null = shape["null_block"]
                    table[number] = self.rng.randrange(side["blocks"]) if null is None else null
            side["tables"][name] = table

    def _ids(self, blocks: int, null: int | None) -> list[int]:
        """All ids in one run, in several runs, or scattered. They are taken from the end."""
        ids = [i for i in range(blocks) if i != null]
        longest = self.rng.choice((1, 2, 4, blocks))
        runs = []
        while ids:
            size = self.rng.randint(1, longest)
            runs.append(ids[:size])
            ids = ids[size:]
        self.rng.shuffle(runs)
        up = self.rng.random() < 0.85
        return [i for run in runs for i in (reversed(run) if up else run)]

    def _break(self, case: CaseDict) -> None:
        """Break a table of a group that keeps all blocks. The oracle decides if it matters."""
        side = self.rng.choice((case["src"], case["dst"]))
        engine = CaseEngine(case["model"], side)
        group = self.rng.choice([one for g in engine.groups.values() for one in engine.dealt(g)])
        name = table_of(group)
        shared = max(case["src"]["shape"]["dcp"], case["dst"]["shape"]["dcp"]) > 1
        # layers that only one side has are in no edge
        lacking = any(s["absent_roles"] or "fewer" in s for s in (case["src"], case["dst"]))
        if shared or lacking or group["tokens_per_entry"] > 1:
            return
        if group["residency"]["kind"] in ("window", "chunk"):
            return
        table, null = side["tables"][name], side["shape"]["null_block"]
        at = self.rng.randrange(len(table))
        match self.rng.choice(("hole", "short", "range", "twice")):
            case "hole" if null is not None:
                table[at], case["fault"] = null, "hole"
            case "short":
                side["tables"][name], case["fault"] = table[:at], "short"
            case "range":
                table[at], case["fault"] = side["blocks"] + at, "range"
            case "twice" if side is case["dst"]:
                table[at], case["fault"] = self.rng.choice(table), "twice"


def _copies(engine: CaseEngine, group: GroupDict, dcp: int) -> bool:
    """Whether every dcp class has a rank with each unit of a group."""
    for c in group["components"]:
        found = {
            (unit, tp % dcp)
            for tp in range(engine.shape["tp"])
            for unit in engine.units(group, c, tp)
        }
        if len(found) < c["units"] * dcp:
            return False
    return True


# Numbers of split heads: below, at and above common tp sizes. Some divide none of these sizes.
HEADS = (2, 2, 3, 4, 4, 5, 6, 8, 8, 12, 16, 24)
OFTEN_ONE_HEAD = (1, 1, 1, 1, *HEADS)  # dcp can share one head over any number of ranks
MOST_ENTRY_BYTES = 128  # of one entry of one layer and component, so that cases are fast


def component(
    rng: Random, name: str, units: int, replicated: bool = False, element: int = 0
) -> ComponentDict:
    """A component with random dims, of at most MOST_ENTRY_BYTES over all units."""
    element = element or rng.choice((1, 2, 2, 4))
    room = max(1, MOST_ENTRY_BYTES // (units * element))
    return {
        "name": name,
        "units": units,
        "dims": [min(room, rng.choice((1, 2, 3, 4, 5, 8, 16)))],
        "element_bytes": element,
        "sharding": "replicated" if replicated else "split",
    }


def group(
    name: str,
    layers: list[int],
    components: list[ComponentDict],
    kind: str = "full",
    span: int = 0,
    **more: object,
) -> GroupDict:
    made: GroupDict = {
        "name": name,
        "role": "target",
        "layers": layers,
        "components": components,
        "residency": {"kind": kind, "span": span},
        "tokens_per_entry": 1,
        "partial_entries": False,
        "context_parallel": True,
    }
    made.update(more)  # type: ignore[typeddict-item]
    return made


def _kv(rng: Random, heads: int) -> list[ComponentDict]:
    k = component(rng, "k", heads)
    if rng.random() < 0.1:  # two dims
        k["dims"] = [2, -(-k["dims"][0] // 2)]
    v: ComponentDict = {**k, "name": "v"}
    if rng.random() < 0.2:  # V of another size, as in MLA without absorption
        v = component(rng, "v", heads)
    return [k, v]


def _layers(rng: Random) -> list[int]:
    layers = list(range(rng.randint(2, 6)))
    if rng.random() < 0.15:  # a layer that caches nothing
        layers.remove(rng.choice(layers))
    return layers


def _two_kinds(rng: Random) -> tuple[list[int], list[int]]:
    """Layers of the two kinds of a mixed model, at a fixed period or at random."""
    count = rng.randint(2, 7)
    period = rng.randint(2, 4)
    first = [i for i in range(count) if i % period == period - 1] or [count - 1]
    if rng.random() < 0.3:
        first = sorted(rng.sample(range(count), rng.randint(1, count - 1)))
    return first, [i for i in range(count) if i not in first]


def _attention(heads: tuple[int, ...], rng: Random) -> list[GroupDict]:
    return [group("attention", _layers(rng), _kv(rng, rng.choice(heads)))]


def _mla(rng: Random) -> list[GroupDict]:
    parts = [component(rng, "latent", 1, True)]
    if rng.random() < 0.5:
        parts.append(component(rng, "rope", 1, True))
    groups = [group("mla", _layers(rng), parts)]
    if rng.random() < 0.3:  # an indexer in the same layers
        index = component(rng, "index", 1, True)
        groups.append(group("indexer", groups[0]["layers"], [index], role="indexer"))
    return groups


def _sliding(rng: Random) -> list[GroupDict]:
    full, window = _two_kinds(rng)
    shared = rng.choice(OFTEN_ONE_HEAD)
    heads = shared if rng.random() < 0.7 else rng.choice(HEADS)
    cut = rng.random() < 0.5
    span = rng.choice((1, 2, 4, 5, 8, 13, 16, 24))
    parts, others = _kv(rng, shared), _kv(rng, heads)
    if rng.random() < 0.4:  # pages of equal size, with as many or half as many heads
        others = [{**c} for c in parts]
        if shared % 2 == 0 and rng.random() < 0.3:
            for c in others:
                c["units"], c["dims"] = c["units"] // 2, [*c["dims"][:-1], c["dims"][-1] * 2]
    return [
        group("full", full, parts),
        group("window", window, others, "window", span, context_parallel=cut),
    ]


def _chunked(rng: Random) -> list[GroupDict]:
    full, chunk = _two_kinds(rng)
    heads, cut = rng.choice(OFTEN_ONE_HEAD), rng.random() < 0.5
    span = rng.choice((4, 8, 12, 16, 20))
    return [
        group("chunk", chunk, _kv(rng, heads), "chunk", span, context_parallel=cut),
        group("full", full, _kv(rng, heads)),
    ]


def _conv(rng: Random, name: str, units: int, rows: int, element: int) -> ComponentDict:
    made = component(rng, name, units, element=element)
    return {**made, "dims": [rng.choice((1, 1, 2, 3)), rows]}


def _hybrid(rng: Random, state: list[ComponentDict]) -> list[GroupDict]:
    """A group of states, mostly with attention layers between them."""
    if rng.random() < 0.2:
        return [group("state", _layers(rng), state, "state")]
    attention, recurrent = _two_kinds(rng)
    groups = [
        group("attention", attention, _kv(rng, rng.choice((1, *HEADS)))),
        group("state", recurrent, state, "state"),
    ]
    rng.shuffle(groups)
    return groups


def _mamba1(rng: Random) -> list[GroupDict]:
    channels, element = rng.choice((8, 12, 16, 24)), rng.choice((1, 2, 4))
    conv = _conv(rng, "conv_x", channels, rng.randint(1, 4), element)
    return _hybrid(rng, [conv, component(rng, "ssm", channels)])


def _mamba2(rng: Random) -> list[GroupDict]:
    heads, parts = rng.choice((4, 8, 12, 16)), rng.choice((1, 2, 4, 8))
    rows, element = rng.randint(1, 4), rng.choice((1, 2, 4))
    ssm = component(rng, "ssm", heads)
    state = [
        _conv(rng, "conv_x", heads, rows, element),
        _conv(rng, "conv_B", parts, rows, element),
        _conv(rng, "conv_C", parts, rows, element),
        {**ssm, "dims": [2, *ssm["dims"]]},
    ]
    return _hybrid(rng, state)  # type: ignore[arg-type]


def _gated_delta_net(rng: Random) -> list[GroupDict]:
    keys, rows, element = rng.choice((2, 4, 6, 8)), rng.randint(1, 4), rng.choice((1, 2, 4))
    values = keys * rng.choice((1, 2))
    ssm = component(rng, "ssm", values)
    state = [
        _conv(rng, "conv_q", keys, rows, element),
        _conv(rng, "conv_k", keys, rows, element),
        _conv(rng, "conv_v", values, rows, element),
        {**ssm, "dims": [*ssm["dims"], 2]},
    ]
    return _hybrid(rng, state)  # type: ignore[arg-type]


def _amx(rng: Random) -> list[GroupDict]:
    """Attention with head sizes that are multiples of 16."""
    k = component(rng, "k", rng.choice((1, 2, 2, 3, 4)), element=rng.choice((1, 2)))
    k["dims"] = [rng.choice((16, 16, 32))]
    return [group("attention", _layers(rng)[:3], [k, {**k, "name": "v"}])]


def _draft(rng: Random) -> list[GroupDict]:
    layers = list(range(rng.randint(1, 2)))
    draft = group("draft", layers, _kv(rng, rng.choice((1, *HEADS))), role="draft")
    return [*(_mla(rng) if rng.random() < 0.7 else _attention(HEADS, rng)), draft]


def _ring(rng: Random) -> list[GroupDict]:
    full, ring = _two_kinds(rng)
    heads = rng.choice(OFTEN_ONE_HEAD)
    span, cut = rng.randint(1, 12), rng.random() < 0.3
    return [
        group("full", full, _kv(rng, heads)),
        group("ring", ring, _kv(rng, heads), "ring", span, context_parallel=cut),
    ]


def _compressed(rng: Random) -> list[GroupDict]:
    full, small = _two_kinds(rng)
    heads = rng.choice(OFTEN_ONE_HEAD)
    latent = component(rng, "latent", 1, True)
    made = group(
        "compressed",
        small,
        [latent] if heads == 1 else _kv(rng, heads),
        tokens_per_entry=rng.choice((2, 4)),
        partial_entries=rng.random() < 0.5,
        context_parallel=rng.random() < 0.7,
    )
    return [made, group("full", full, _kv(rng, heads))]


def _scaled(name: str, rng: Random) -> list[GroupDict]:
    layers, heads = _layers(rng), rng.choice((1, *HEADS))
    k, scale = component(rng, "k", heads, element=1), component(rng, "k_scale", heads, element=1)
    return [group(name, layers, [k, scale, {**k, "name": "v"}, {**scale, "name": "v_scale"}])]


def _mla_scaled(rng: Random) -> list[GroupDict]:
    parts = [component(rng, name, 1, True) for name in ("latent", "scale")]
    return [group("mla_scaled", _layers(rng), parts)]


def _opaque(rng: Random) -> list[GroupDict]:
    full, other = _two_kinds(rng)
    parts = _kv(rng, rng.choice(HEADS)) if rng.random() < 0.7 else _mla(rng)[0]["components"]
    if rng.random() < 0.4:  # a component with another number of units
        replicated = rng.random() < 0.5
        parts.append(component(rng, "extra", rng.choice((1, 3)) if replicated else 1, replicated))
    kinds = [("full", 0), ("window", rng.randint(1, 12)), ("ring", rng.randint(1, 8))]
    kind, span = rng.choice(kinds)
    return [
        group("opaque", full, parts),
        group("opaque_2", other, _kv(rng, rng.choice((1, *HEADS))), kind, span),
    ]


KINDS: dict[str, tuple[int, Callable[[Random], list[GroupDict]]]] = {  # weight, maker
    "gqa": (18, partial(_attention, HEADS)),
    "mqa": (6, partial(_attention, (1,))),
    "mha": (6, partial(_attention, (12, 16, 24))),
    "mla": (10, _mla),
    "sliding": (11, _sliding),
    "chunked": (7, _chunked),
    "mamba1": (5, _mamba1),
    "mamba2": (6, _mamba2),
    "gated_delta_net": (6, _gated_delta_net),
    "draft": (8, _draft),
    "ring": (5, _ring),
    "compressed": (6, _compressed),
    "nvfp4": (5, partial(_scaled, "nvfp4")),
    "inline_scales": (3, partial(_scaled, "inline")),
    "mla_scaled": (4, _mla_scaled),
    "opaque": (5, _opaque),
    "amx": (3, _amx),
}


def interiors(kind: str, group: GroupDict) -> list[str]:
    """Interiors that a group of this kind of model can have."""
    names = [c["name"] for c in group["components"]]
    if kind == "opaque":
        return ["opaque"]
    if kind in ("nvfp4", "mla_scaled"):
        return [kind, kind, "planes", "split", "joined"]
    if names == ["k", "v"] and all(len(c["dims"]) == 1 for c in group["components"]):
        return ["joined", "split", "cpu", "planes", *["cpu_amx"] * (5 if kind == "amx" else 0)]
    return ["joined", "joined", "split", "planes"]


def make_model(rng: Random) -> tuple[str, ModelDict]:
    """A random kind, and a model of it."""
    weights = [weight for weight, _ in KINDS.values()]
    kind = rng.choices(list(KINDS), weights)[0]
    groups = KINDS[kind][1](rng)
    cached = 1 + max((x for g in groups if g["role"] != "draft" for x in g["layers"]), default=0)
    total = cached + rng.choice((1, 2)) if rng.random() < 0.15 else 0
    return kind, {"name": kind, "total_layers": total, "groups": groups}
