"""Random cases from a seed. Case `index` of a seed is the same each time, and needs no other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from kvferry.verify.case import CaseDict, GroupDict, ModelDict, ShapeDict, SideDict
from kvferry.verify.engine import Engine
from kvferry.verify.models import interiors, make_model

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
HEADS_OUTSIDE = ("LHBNC", "BHLNC")  # heads lie outside the page
SLOTS_OUTSIDE = ("LBNHC", "BLNHC")

# Pairs, in either direction. Small sizes are likelier: more ranks cost time and show little more.
NON_DIVIDING_TP = ((2, 3), (2, 3), (3, 4), (3, 4), (4, 6), (2, 5), (3, 5), (3, 8), (6, 4))
DIVIDING_TP = ((1, 1), (1, 2), (2, 2), (2, 2), (2, 4), (1, 4), (4, 4), (3, 6), (2, 8), (1, 3))
UNRELATED_BLOCKS = ((4, 6), (4, 6), (2, 3), (3, 5), (8, 12), (9, 6), (10, 4), (16, 24), (48, 32))
TILED_BLOCKS = ((16, 48), (32, 48), (16, 24), (16, 16), (32, 16), (16, 12))  # for tiles of 16
RELATED_BLOCKS = (
    (4, 4),
    (8, 8),
    (2, 8),
    (4, 8),
    (16, 8),
    (16, 16),
    (1, 4),
    (5, 5),
    (6, 12),
    (3, 6),
)

NON_DIVIDING_SHARE = 0.42
UNRELATED_SHARE = 0.42
PP_BOTH_SHARE = 0.42
FAULT_SHARE = 0.02  # tables that are broken on purpose
CARELESS_SHARE = 0.03  # shapes chosen without asking whether they exist
MOST_TOKENS = 120


def generate(seed: int, index: int) -> CaseDict:
    """Case number `index` of `seed`."""
    return _Generator(Random(f"kvferry {seed} {index}")).case()


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
            UNRELATED_BLOCKS if self.chance(UNRELATED_SHARE) else RELATED_BLOCKS
        )
        if kind == "amx":
            blocks = self._either_way(TILED_BLOCKS)
        sides = [self._side(kind, model, *choice) for choice in zip(tp, pp, blocks, strict=True)]
        if kind == "opaque" and self.chance(0.95):
            self._make_alike(sides[0], sides[1])
        if kind == "draft" and self.chance(0.2):
            rng.choice(sides)["absent_roles"] = ["draft"]
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
            self._allocate(Engine(model, side), case["tokens"])
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
        if tiled:  # tiles are inside heads, and not inside kernel blocks
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
        if shape["kernel_block_size"] and self.chance(0.3):  # another backend's kernels
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
            self._share_tokens(Engine(model, side), careless)
        return side

    def _stages(self, model: ModelDict, pp: int) -> list[int]:
        """Layers of each stage, or none to leave it to the rule."""
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

    def _share_tokens(self, engine: Engine, careless: bool) -> None:
        """Give an engine dcp, where its ranks hold enough copies of each head."""
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
        """Opaque pages move only between ranks that have them alike."""
        own = dst["shape"]
        shape: ShapeDict = {**src["shape"], "pp": own["pp"], "stages": own["stages"]}
        if not shape["kernel_block_size"] and shape["order"] not in HEADS_OUTSIDE:
            shape["page_align"], shape["overlay"] = own["page_align"], own["overlay"]
        shape["full_residency"] = own["full_residency"]
        match self.rng.choice(("order", "kernel", "block", "tp", *[""] * 9)):  # or almost alike
            case "order":
                shape["order"] = self.rng.choice(("LBHNC", "LBNHC"))
            case "kernel" if shape["order"].startswith("LB"):
                shape["kernel_block_size"] = shape["block_size"]
            case "block":
                shape["block_size"] *= 2
            case "tp":
                shape["tp"] = 2 * shape["dcp"]
        dst["shape"] = shape

    # the request

    def _request(self, case: CaseDict) -> None:
        rng = self.rng
        spans = [s["shape"]["block_size"] * s["shape"]["dcp"] for s in (case["src"], case["dst"])]
        case["tokens"] = tokens = rng.randint(1, min(MOST_TOKENS, 3 * max(spans) + 5))
        if self.chance(0.15):  # the last block is full on one side
            case["tokens"] = tokens = max(1, tokens // spans[0]) * spans[rng.randint(0, 1)]
        if self.chance(0.45):
            case["skip"] = rng.randint(0, tokens)
            if self.chance(0.6):
                case["skip"] = case["skip"] // spans[1] * spans[1]

    def _allocate(self, engine: Engine, tokens: int) -> None:
        """Block tables, with holes where nothing is kept, and ids scattered or in runs."""
        side, shape = engine.side, engine.shape
        counts = {
            name: 1
            if g["residency"]["kind"] in ("state", "ring")
            else -(-tokens // engine.block_positions(g)) + self.rng.choice((0, 0, 0, 1, 2))
            for name, g in engine.groups.items()
        }
        most = sum(counts.values()) if shape["overlay"] else max(counts.values())
        side["blocks"] = most + 1 + self.rng.randint(0, 4)
        shape["null_block"] = self.rng.choice((0, 0, 0, None, side["blocks"] - 1))
        pool = self._ids(side["blocks"], shape["null_block"])
        keeps_old = self.chance(0.2)
        for name, g in engine.groups.items():
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
        """All ids, to be taken from the end: in one run, in some runs, or anyhow."""
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
        """Break a table of a group that keeps all its blocks; the oracle says if it matters."""
        name = self.rng.choice([g["name"] for g in case["model"]["groups"]])
        group = next(g for g in case["model"]["groups"] if g["name"] == name)
        side = self.rng.choice((case["src"], case["dst"]))
        shared = max(case["src"]["shape"]["dcp"], case["dst"]["shape"]["dcp"]) > 1
        if name not in side["tables"] or shared or group["tokens_per_entry"] > 1:
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


def _copies(engine: Engine, group: GroupDict, dcp: int) -> bool:
    """Whether every unit of a group is on a rank of every dcp class."""
    for c in group["components"]:
        found = {
            (unit, tp % dcp)
            for tp in range(engine.shape["tp"])
            for unit in engine.units(group, c, tp)
        }
        if len(found) < c["units"] * dcp:
            return False
    return True
