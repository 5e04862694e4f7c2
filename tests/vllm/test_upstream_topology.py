"""vLLM's own tests of TransferTopology and of its tp mapping, run against our class.

They are read from a checkout of vLLM, whose path is in VLLM_SRC; without it there is nothing to
run. Two lists say what becomes of each test that touches a topology. A test of the checkout that is
in neither of them fails here, so that the lists stay complete.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import CacheModel, Component, EngineShape, Group, Rank
from kvferry.topology import EngineTransferInfo, TransferTopology

UNIT = Path(os.environ.get("VLLM_SRC", ""), "tests/v1/kv_connector/unit")
needs_checkout = pytest.mark.skipif(
    not os.environ.get("VLLM_SRC"), reason="VLLM_SRC names no checkout of vLLM"
)
WORDS = ("TransferTopology", "transfer_topo", "_compute_mapping", "_make_topology")

PASS = """
test_transfer_topology_sharded.py test_legacy_register_remote_engine_uses_pp_rank_zero
test_transfer_topology_sharded.py test_register_remote_engine_stores_pp_ranks_separately
test_transfer_topology_sharded.py test_helpers_use_requested_pp_rank
test_transfer_topology_sharded.py test_engine_info_fields_have_backward_compatible_defaults
test_nixl_connector.py test_transfer_topology_unregister
test_tp_mapping.py test_source_ranks_homogeneous
test_tp_mapping.py test_source_ranks_d_gt_p
test_tp_mapping.py test_source_ranks_p_gt_d
"""
PASSING = [tuple(line.split()) for line in PASS.split("\n") if line]

NIXL = "looks inside vLLM's NIXL worker, which carries its topology along"
MOONCAKE = "looks inside vLLM's Mooncake worker, which carries its topology along"
NOT_OURS = {
    "test_mooncake_connector.py": {
        "test_build_transfer_params_separates_prefill_pp_layers": MOONCAKE,
        "test_register_kv_caches_supports_mixed_mla_and_eagle_shapes": MOONCAKE,
        "test_kv_producer_heterogeneous_tp": MOONCAKE,
    },
    "test_mooncake_connector_hybrid_mamba.py": {
        "test_register_kv_caches_emits_fa_and_gdn_regions": MOONCAKE,
        "test_hybrid_gdn_keeps_packed_fa_and_gdn_regions_whole": MOONCAKE,
    },
    "test_nixl_connector.py": {
        "test_engine_ttl_eviction": "asks a mock whether the NIXL worker called it",
        "test_handshake_decode_errors": NIXL,
        "test_prefill_tp_size_greater_than_decode_tp_size": NIXL,
        "test_prefill_tp_size_greater_than_decode_tp_size_mla": NIXL,
        "test_hybrid_mamba_attention_remote_descs_use_packed_head_slices": NIXL,
        "test_handshake_validates_gqa_replicated_block_len": NIXL,
        "test_handshake_rejects_wrong_block_len_without_gqa_replication": NIXL,
        "test_mla_broadcast_notif_uses_remote_request_id": NIXL,
    },
    "test_nixl_connector_hma.py": {
        "test_read_blocks_for_req_expands_remote_ids": NIXL,
        "test_post_process_zeroes_untransferred_tail": NIXL,
        "test_push_write_hybrid_mla_replicates_attention": NIXL,
    },
    "test_nixl_push_connector.py": {
        "test_get_new_notifs_processes_forwarded_completion_notif": NIXL,
        "test_get_new_notifs_unknown_request_is_logged_and_skipped": NIXL,
        "test_get_new_notifs_extends_lease_on_heartbeat": NIXL,
        "test_completion_waits_for_one_notif_per_pp_stage": NIXL,
        "test_add_remote_agent_slices_remote_regions_to_local_pp_window": NIXL,
    },
    "test_tp_mapping.py": {
        "test_build_src_split_handles": "splits NIXL's descriptors; our plans have none",
    },
}


def topology(
    tp_rank: int, tp_size: int, engine_id: str, is_mla: bool, total_num_kv_heads: int, **_: object
) -> TransferTopology:
    """Our class, from the sizes that vLLM's takes."""
    units, sharding = (1, "replicated") if is_mla else (total_num_kv_heads, "split")
    component: Any = Component("kv", units, (2,), 1, sharding)  # type: ignore[arg-type]
    model = CacheModel("sizes", (Group("attention", (0,), (component,)),))
    return TransferTopology(engine_id, model, EngineShape(tp=tp_size), Rank(0, tp_rank))


def mapping(
    tp_rank: int = 0,
    tp_size: int = 1,
    remote_tp_size: int = 1,
    is_mla: bool = False,
    num_kv_heads: int = 8,
    **_: object,
) -> SimpleNamespace:
    """Our source ranks, as the result of vLLM's mapping."""
    ours = topology(tp_rank, tp_size, "local", is_mla, num_kv_heads)
    ours.register_remote_engine("remote", EngineTransferInfo(remote_tp_size, 1024, 16, 1))
    return SimpleNamespace(all_source_ranks=tuple(ours.source_ranks("remote")))


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """The functions of a file, each with whether it is a method."""
    for node in tree.body:
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(one, ast.FunctionDef):
                yield one, node is not one


def upstream(file: str, name: str) -> Callable[[], None]:
    """One test of the checkout, with our names in place of vLLM's."""
    tree = ast.parse((UNIT / file).read_text())
    plain = [one for one, method in functions(tree) if not method and one.name.startswith("_")]
    ((test, method),) = [(one, m) for one, m in functions(tree) if one.name == name]
    ours = {"TransferTopology": topology, "EngineTransferInfo": EngineTransferInfo}
    around: dict[str, Any] = {"pytest": pytest, "_FakeAttentionBackend": object, **ours}
    wanted = [one for one in plain if one.name == "_make_topology"] + [test]
    future = ast.parse("from __future__ import annotations").body
    for one in wanted:
        one.decorator_list = []
    exec(compile(ast.Module([*future, *wanted], []), str(UNIT / file), "exec"), around)
    around["_compute_mapping"] = mapping
    made = around[name]
    return (lambda: made(None)) if method else made


@needs_checkout
@pytest.mark.parametrize(("file", "name"), PASSING)
def test_passes(file: str, name: str) -> None:
    pytest.importorskip("vllm")
    upstream(file, name)()


@needs_checkout
def test_no_test_of_a_topology_is_left_out() -> None:
    found = {
        (path.name, one.name)
        for path in UNIT.glob("test_*.py")
        for text in [path.read_text()]
        if any(word in text for word in WORDS)
        for one, _ in functions(ast.parse(text))
        if one.name.startswith("test_")
        and any(word in (ast.get_source_segment(text, one) or "") for word in WORDS)
    }
    listed = {*PASSING, *((file, name) for file, names in NOT_OURS.items() for name in names)}
    assert found <= listed, f"say what becomes of {sorted(found - listed)}"
