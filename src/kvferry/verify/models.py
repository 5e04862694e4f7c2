"""Random models of every kind, small enough to move byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvferry.verify.case import ComponentDict, GroupDict, ModelDict

# Split heads; each is below, at and above common tp sizes, and some divide none of them.
HEADS = (2, 2, 3, 4, 4, 5, 6, 8, 8, 12, 16, 24)
OFTEN_ONE_HEAD = (1, 1, 1, 1, *HEADS)  # one head is what dcp can share over any ranks
MOST_ENTRY_BYTES = 128  # of one entry of one layer and component, to keep cases fast


def component(
    rng: Random, name: str, units: int, replicated: bool = False, element: int = 0
) -> ComponentDict:
    """A component with a random inside, of at most MOST_ENTRY_BYTES over all units."""
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
    if rng.random() < 0.1:  # content of two axes
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
    """Layers of a mixed model: every so many of another kind, or some at random."""
    count = rng.randint(2, 7)
    period = rng.randint(2, 4)
    first = [i for i in range(count) if i % period == period - 1] or [count - 1]
    if rng.random() < 0.3:
        first = sorted(rng.sample(range(count), rng.randint(1, count - 1)))
    return first, [i for i in range(count) if i not in first]


def _gqa(rng: Random) -> list[GroupDict]:
    return [group("attention", _layers(rng), _kv(rng, rng.choice(HEADS)))]


def _mqa(rng: Random) -> list[GroupDict]:
    return [group("attention", _layers(rng), _kv(rng, 1))]


def _mha(rng: Random) -> list[GroupDict]:
    return [group("attention", _layers(rng), _kv(rng, rng.choice((12, 16, 24))))]


def _mla(rng: Random) -> list[GroupDict]:
    parts = [component(rng, "latent", 1, True)]
    if rng.random() < 0.5:
        parts.append(component(rng, "rope", 1, True))
    groups = [group("mla", _layers(rng), parts)]
    if rng.random() < 0.3:  # an indexer beside it, in layers of the target
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
    if rng.random() < 0.4:  # pages of equal size, of as many or half as many heads
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
    """A state group, mostly with attention layers in between."""
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
    """Head sizes that tiles of 16 divide."""
    k = component(rng, "k", rng.choice((1, 2, 2, 3, 4)), element=rng.choice((1, 2)))
    k["dims"] = [rng.choice((16, 16, 32))]
    return [group("attention", _layers(rng)[:3], [k, {**k, "name": "v"}])]


def _draft(rng: Random) -> list[GroupDict]:
    layers = list(range(rng.randint(1, 2)))
    draft = group("draft", layers, _kv(rng, rng.choice((1, *HEADS))), role="draft")
    return [*(_mla(rng) if rng.random() < 0.7 else _gqa(rng)), draft]


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


def _scaled(rng: Random, heads: int) -> list[ComponentDict]:
    k, scale = component(rng, "k", heads, element=1), component(rng, "k_scale", heads, element=1)
    return [k, scale, {**k, "name": "v"}, {**scale, "name": "v_scale"}]


def _nvfp4(rng: Random) -> list[GroupDict]:
    return [group("nvfp4", _layers(rng), _scaled(rng, rng.choice((1, *HEADS))))]


def _inline_scales(rng: Random) -> list[GroupDict]:
    return [group("inline", _layers(rng), _scaled(rng, rng.choice((1, *HEADS))))]


def _mla_scaled(rng: Random) -> list[GroupDict]:
    parts = [component(rng, name, 1, True) for name in ("latent", "scale")]
    return [group("mla_scaled", _layers(rng), parts)]


def _opaque(rng: Random) -> list[GroupDict]:
    full, other = _two_kinds(rng)
    parts = _kv(rng, rng.choice(HEADS)) if rng.random() < 0.7 else _mla(rng)[0]["components"]
    if rng.random() < 0.4:  # on every rank, unlike what lies beside it
        replicated = rng.random() < 0.5
        parts.append(component(rng, "extra", rng.choice((1, 3)) if replicated else 1, replicated))
    kinds = [("full", 0), ("window", rng.randint(1, 12)), ("ring", rng.randint(1, 8))]
    kind, span = rng.choice(kinds)
    return [
        group("opaque", full, parts),
        group("opaque_2", other, _kv(rng, rng.choice((1, *HEADS))), kind, span),
    ]


KINDS: dict[str, tuple[int, Callable[[Random], list[GroupDict]]]] = {  # weight, maker
    "gqa": (18, _gqa),
    "mqa": (6, _mqa),
    "mha": (6, _mha),
    "mla": (10, _mla),
    "sliding": (11, _sliding),
    "chunked": (7, _chunked),
    "mamba1": (5, _mamba1),
    "mamba2": (6, _mamba2),
    "gated_delta_net": (6, _gated_delta_net),
    "draft": (8, _draft),
    "ring": (5, _ring),
    "compressed": (6, _compressed),
    "nvfp4": (5, _nvfp4),
    "inline_scales": (3, _inline_scales),
    "mla_scaled": (4, _mla_scaled),
    "opaque": (5, _opaque),
    "amx": (3, _amx),
}


def interiors(kind: str, group: GroupDict) -> list[str]:
    """Interiors that a group of a kind of model can have."""
    names = [c["name"] for c in group["components"]]
    if kind == "opaque":
        return ["opaque"]
    if kind in ("nvfp4", "mla_scaled"):
        return [kind, kind, "planes", "split", "joined"]
    if names == ["k", "v"] and all(len(c["dims"]) == 1 for c in group["components"]):
        return ["joined", "split", "cpu", "planes", *["cpu_amx"] * (5 if kind == "amx" else 0)]
    return ["joined", "joined", "split", "planes"]


def make_model(rng: Random) -> tuple[str, ModelDict]:
    """A kind, and a model of it."""
    weights = [weight for weight, _ in KINDS.values()]
    kind = rng.choices(list(KINDS), weights)[0]
    groups = KINDS[kind][1](rng)
    cached = 1 + max((x for g in groups if g["role"] != "draft" for x in g["layers"]), default=0)
    total = cached + rng.choice((1, 2)) if rng.random() < 0.15 else 0
    return kind, {"name": kind, "total_layers": total, "groups": groups}
