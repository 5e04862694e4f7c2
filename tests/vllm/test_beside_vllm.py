"""Beside the real vLLM: where it has an answer ours is the same; where it has none, ours is right.

Everything here calls vLLM's own code: its topology, its mapping, its sender's plan, its strides,
its cache managers, its cache-writing kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry import CacheModel, Component, EngineShape, Group, Rank, RankLayout, bind, plan_pair
from kvferry.errors import TopologyError
from kvferry.layout.model import Residency
from kvferry.layout.shape import even_stages
from kvferry.topology import EngineTransferInfo, TransferTopology

torch = pytest.importorskip("torch", reason="this tier runs in the environment with vLLM")
utils = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils")

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (
    mooncake_connector as mooncake,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import (
    compute_tp_mapping,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
HEADS = (1, 2, 4, 8, 12, 24)
HEAD_BYTES = 6
SLOTS = 4


def theirs(rank: int, tp: int, heads: int, mla: bool = False, mamba: bool = False):
    return utils.TransferTopology(rank, tp, 16, "local", mla, mamba, heads, [])


def ours(rank: int, tp: int, heads: int, mla: bool = False, mamba: bool = False):
    model = one_layer(heads, mla)
    if mamba:
        channels = Component("ssm", 1 << 16, (1,), 1)  # more than ranks: each holds some
        state = Group("state", (0,), (channels,), Residency("state"))
        model = CacheModel("hybrid", (*model.groups, state))
    return TransferTopology("local", model, EngineShape(tp=tp), Rank(0, rank))


def info(tp: int) -> EngineTransferInfo:
    return EngineTransferInfo(tp, 4096, 16, 1)


def legal(heads: int, tp: int) -> bool:
    """What vLLM itself would start: heads split evenly, or replicated evenly."""
    return heads % tp == 0 or tp % heads == 0


def pairs() -> Iterator[tuple[int, int, int]]:
    for heads, local, remote in product(HEADS, SIZES, SIZES):
        if legal(heads, local) and legal(heads, remote):
            yield heads, local, remote


@pytest.mark.parametrize("mla", [False, True])
def test_rank_lists_are_vllms(mla: bool) -> None:
    """Wherever vLLM has an answer, also for ranks with equal bytes. We then read from some."""
    answered = beyond = 0
    for heads, local, remote in pairs():
        heard: set[int] = set()
        for rank in range(local):
            mine, vllms = ours(rank, local, heads, mla), theirs(rank, local, heads, mla)
            mine.register_remote_engine("p", info(remote))
            vllms.register_remote_engine("p", utils.EngineTransferInfo(remote, 4096, 16, 1))
            met = mine.target_remote_ranks("p")
            heard |= {*met}
            assert met == mine.handshake_target_ranks(remote)
            read = mine.source_ranks("p")
            assert read and set(read) <= set(met)
            try:
                expected = vllms.target_remote_ranks("p"), vllms.handshake_target_ranks(remote)
                ratio = vllms.tp_ratio(remote)
            except AssertionError:
                beyond += 1  # sizes that do not divide have an answer too
                with pytest.raises(TopologyError):
                    mine.tp_ratio(remote)
                continue
            assert expected == (met, met), (heads, local, remote, rank)
            assert mine.tp_ratio(remote) == ratio
            if not mla:  # MLA has one latent here, and as many heads as are said there
                assert mine.is_kv_replicated("p") == vllms.is_kv_replicated("p")
            assert mine.replicates_kv_cache("p") == vllms.replicates_kv_cache("p")
            answered += 1
            if local <= heads and remote <= heads and not mla:
                assert read == met
        assert heard == set(range(remote)), "every remote rank hears from some rank"
    assert answered > 400 and beyond > 100


def test_rank_lists_are_vllms_with_context_parallelism() -> None:
    sizes = (1, 2, 4, 8)
    for local, remote, sharded in product(sizes, sizes, ((1, 0), (0, 1), (1, 1))):
        dcp, remote_dcp = (
            size if s else 1 for s, size in zip(sharded, (local, remote), strict=True)
        )
        for rank in range(local):
            shape = EngineShape(tp=local, dcp=dcp)
            mine = TransferTopology("local", one_layer(1, mla=True), shape, Rank(0, rank))
            vllms = utils.TransferTopology(
                rank, local, 16, "local", True, False, 1, [], dcp_size=dcp
            )
            expected = vllms.handshake_target_ranks(remote, remote_dcp)
            assert mine.handshake_target_ranks(remote, remote_dcp) == expected


def held_heads(topology: TransferTopology, tp: int, ranks: list[int]) -> set[int]:
    group = topology.model.groups[0]
    spans = [EngineShape(tp=tp).units(group, group.components[0], r) for r in ranks]
    return {unit for span in spans for unit in range(*span)}


def test_tp_mapping_reads_the_same_heads() -> None:
    """NIXL's mapping: equal ranks where nothing is replicated, equal heads everywhere."""
    compared = 0
    for heads, local, remote in pairs():
        if max(local, remote) % min(local, remote):
            continue  # its arithmetic rounds such sizes down without a word
        for rank in range(local):
            mapping = compute_tp_mapping(theirs(rank, local, heads), remote, (FullAttentionSpec,))
            mine = ours(rank, local, heads)
            mine.register_remote_engine("p", info(remote))
            read = mine.source_ranks("p")
            if local <= heads and remote <= heads:
                assert read == list(mapping.all_source_ranks)

            needed = held_heads(mine, local, [rank])
            assert needed <= held_heads(mine, remote, read)
            assert needed <= held_heads(mine, remote, list(mapping.all_source_ranks))
            compared += 1
    assert compared > 200


def test_hybrid_mapping_reads_states_from_all_ranks() -> None:
    for heads, local, remote in [(8, 2, 4), (8, 4, 2), (2, 2, 8), (2, 8, 4), (4, 4, 4)]:
        for rank in range(local):
            mapping = compute_tp_mapping(
                theirs(rank, local, heads, mamba=True), remote, (FullAttentionSpec, MambaSpec)
            )
            mine = ours(rank, local, heads, mamba=True)
            mine.register_remote_engine("p", info(remote))
            read = {
                name: tuple(
                    edge.src.tp
                    for edge in mine.pair_with("p").edges
                    if edge.dst == mine.rank and name in {share.group for share in edge.shares}
                )
                for name in ("attention", "state")
            }
            assert len(read["state"]) == len(mapping.source_ranks_per_group[1])
            if local <= heads and remote <= heads:
                assert tuple(mine.source_ranks("p")) == mapping.all_source_ranks
                assert read["attention"] == mapping.source_ranks_per_group[0]
            assert set(read["attention"]) <= set(mine.source_ranks("p"))


def one_layer(heads: int, mla: bool = False) -> CacheModel:
    sharding = "replicated" if mla else "split"
    component = Component("kv", 1 if mla else heads, (HEAD_BYTES,), 1, sharding)
    return CacheModel("one layer", (Group("attention", (0,), (component,)),))


def vllm_moves(
    heads: int, src: int, dst: int, mla: bool
) -> dict[int, dict[int, set[tuple[int, int]]]]:
    """For each destination rank and byte of its block, the (rank, byte) that vLLM copies there."""
    src_len = HEAD_BYTES * SLOTS * (1 if mla else max(1, heads // src))
    dst_len = HEAD_BYTES * SLOTS * (1 if mla else max(1, heads // dst))
    moves: dict[int, dict[int, set[tuple[int, int]]]] = {r: {} for r in range(dst)}
    ratio = max(src, dst) // min(src, dst)
    for s, d in product(range(src), range(dst)):
        paired = d // ratio == s if dst >= src else s // ratio == d
        if not paired:
            continue
        send, src_offset, dst_offset, length = mooncake._compute_sender_transfer_plan(
            s, src, d, dst, src_len, dst_len, mla or src > heads, None if mla else heads
        )
        for byte in range(length) if send else ():
            moves[d].setdefault(dst_offset + byte, set()).add((s, src_offset + byte))
    return moves


def our_moves(
    model: CacheModel, src: EngineShape, dst: EngineShape
) -> dict[int, dict[int, tuple[int, int]]]:
    """The same of ours, for a request of exactly one block (number 1)."""
    pair = plan_pair(model, src, dst)
    moves: dict[int, dict[int, tuple[int, int]]] = {r: {} for r in range(dst.tp)}
    for edge in pair.edges:
        layouts = [
            RankLayout.build(model, shape, rank, 2)
            for shape, rank in ((src, edge.src), (dst, edge.dst))
        ]
        sizes = [layout.parts[0].placements[0].block_stride for layout in layouts]
        copies = bind(
            pair.plan(edge, *layouts),
            tokens=SLOTS,
            src_tables=[[1]],
            dst_tables=[[1]],
            src_bases=[-sizes[0]],
            dst_bases=[-sizes[1]],
        ).copies()
        for s, d, n in zip(copies.src, copies.dst, copies.length, strict=True):
            for byte in range(n):
                assert int(d) + byte not in moves[edge.dst.tp], "written twice"
                moves[edge.dst.tp][int(d) + byte] = (edge.src.tp, int(s) + byte)
    return moves


def content(heads: int, tp: int, rank: int, byte: int, mla: bool) -> tuple[int, int]:
    """Head and byte within it of one byte of a head-major block."""
    head, inside = divmod(byte, HEAD_BYTES * SLOTS)
    return (0 if mla else rank * heads // tp + head), inside


@pytest.mark.parametrize("mla", [False, True])
def test_sender_plans_move_the_same_bytes(mla: bool) -> None:
    """Mooncake's plan, head-major: the same bytes of the same heads arrive at the same place."""
    compared = refused = 0
    for heads, src, dst in pairs():
        try:
            vllms = vllm_moves(heads, src, dst, mla)
        except AssertionError:
            refused += 1
            continue
        if max(src, dst) % min(src, dst):
            refused += 1
            continue
        mine = our_moves(
            one_layer(heads, mla),
            EngineShape(tp=src, block_size=SLOTS),
            EngineShape(tp=dst, block_size=SLOTS),
        )
        for rank in range(dst):
            assert mine[rank].keys() == vllms[rank].keys(), (heads, src, dst, rank)
            for byte, (source, at) in mine[rank].items():
                arrived = {content(heads, src, s, b, mla) for s, b in vllms[rank][byte]}
                assert arrived == {content(heads, src, source, at, mla)}
        compared += 1
    assert compared > 80 and refused > 0


def test_sizes_that_do_not_divide_stop_vllm_and_not_us() -> None:
    with pytest.raises(AssertionError):
        vllm_moves(24, 3, 8, mla=False)
    mine = our_moves(
        one_layer(24), EngineShape(tp=3, block_size=SLOTS), EngineShape(tp=8, block_size=SLOTS)
    )
    for rank, moves in mine.items():
        assert len(moves) == 3 * HEAD_BYTES * SLOTS
        for byte, (source, at) in moves.items():
            assert content(24, 3, source, at, False) == content(24, 8, rank, byte, False)


def test_token_major_with_other_tp_is_wrong_in_vllm_and_right_here() -> None:
    """Its plan has no order, so on LBNHC it copies heads over tokens; ours follows the strides."""
    heads, src, dst = 4, 2, 4
    vllms = vllm_moves(heads, src, dst, mla=False)

    def token_major(tp: int, rank: int, byte: int) -> tuple[int, int, int]:
        held = heads // tp
        slot, rest = divmod(byte, held * HEAD_BYTES)
        head, inside = divmod(rest, HEAD_BYTES)
        return rank * held + head, slot, inside

    wrong = sum(
        token_major(dst, rank, byte) != token_major(src, *source)
        for rank, moves in vllms.items()
        for byte, sources in moves.items()
        for source in sources
    )
    assert wrong > 0
    shapes = [EngineShape(tp=tp, block_size=SLOTS, order="LBNHC") for tp in (src, dst)]
    for rank, moves in our_moves(one_layer(heads), *shapes).items():
        assert len(moves) == SLOTS * HEAD_BYTES
        for byte, source in moves.items():
            assert token_major(dst, rank, byte) == token_major(src, *source)


def existing_pages() -> list[tuple[KVCacheLayout, int, int]]:
    """Orders, paddings and kernel blocks that vLLM has: not every order goes with every page."""
    plain = [(layout, 0, 0) for layout in KVCacheLayout]
    padded = [(x, 100, 0) for x in KVCacheLayout if set(x.name[:2]) == {"L", "B"}]
    split = [(KVCacheLayout[name], 0, 8) for name in ("LBHNC", "LBNHC")]
    return plain + padded + split


@pytest.mark.parametrize(("layout", "padding", "kernel"), existing_pages())
def test_strides_are_vllms(layout: KVCacheLayout, padding: int, kernel: int) -> None:
    heads, head_dim, block, blocks, layers = 3, 20, 32, 5, 4
    page = heads * block * 2 * head_dim * 2
    spec = FullAttentionSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=head_dim,
        dtype=torch.bfloat16,
        page_size_padded=page + padding if padding else None,
    )
    expected = compute_layout_strides(
        spec, blocks, layers, layout, kernel_block_size=kernel or None
    )
    components = tuple(Component(name, heads, (head_dim,), 2) for name in "kv")
    model = CacheModel("m", (Group("attention", tuple(range(layers)), components),))
    shape = EngineShape(
        order=layout.name,
        block_size=block,
        kernel_block_size=kernel,
        page_align=page + padding if padding else 1,
    )
    (part,) = RankLayout.build(model, shape, Rank(0, 0), blocks).parts
    k, v = part.placements
    found = (int(np.diff(k.offsets)[0]), k.tile_stride, k.unit_stride, k.slot_stride)
    assert found == expected[:4]
    assert v.offsets[0] - k.offsets[0] == head_dim * 2
    assert k.dim_strides == (2 * expected[4],)


def test_stages_are_vllms() -> None:
    from vllm.distributed.utils import get_pp_indices

    for layers, pp in product((4, 5, 27, 61, 80, 126), (1, 2, 3, 4)):
        starts = np.cumsum((0, *even_stages(layers, pp)))
        expected = [get_pp_indices(layers, rank, pp) for rank in range(pp)]
        assert expected == [(starts[i], starts[i + 1]) for i in range(pp)]


def test_windows_keep_what_vllm_keeps() -> None:
    from vllm.v1.core import single_type_kv_cache_manager as managers

    for span, tokens in product((1, 4, 24, 100), range(1, 120, 7)):
        window = SimpleNamespace(sliding_window=span, extra_retained_tokens=0)
        expected = managers.SlidingWindowManager.get_num_skipped_tokens(window, tokens)
        assert Residency("window", span).needed_from(tokens) == expected
        chunk = SimpleNamespace(attention_chunk_size=span)
        expected = managers.ChunkedLocalAttentionManager.get_num_skipped_tokens(chunk, tokens)
        assert Residency("chunk", span).needed_from(tokens) == expected


def test_state_shapes_are_vllms() -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    from kvferry.layout.hf import load_model

    cases = {
        "granite-4.0-h-small": lambda tp: MambaStateShapeCalculator.mamba2_state_shape(
            tp, 8192, 1, 128, 64, 128, 4
        ),
        "jamba-1.5-mini": lambda tp: MambaStateShapeCalculator.mamba1_state_shape(tp, 8192, 16, 4),
        "qwen3-next-80b": lambda tp: MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp, 16, 32, 128, 128, 4
        ),
    }
    for (name, shapes), tp in product(cases.items(), (1, 2, 4, 8)):
        group = load_model(name).group("state")
        shape = EngineShape(tp=tp)
        conv, state = shapes(tp)
        local = {c.name: shape.units(group, c, 0).size for c in group.components}
        channels = sum(
            local[c.name] * c.dims[0] for c in group.components if c.name.startswith("conv_")
        )
        assert sorted(conv) == sorted((channels, 3)), name
        ssm = group.component("ssm")
        assert state == (local["ssm"], *ssm.dims), name
