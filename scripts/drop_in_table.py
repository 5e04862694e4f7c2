"""The table in docs/compatibility.md of all that an operator, a proxy or a dashboard may use of the
connectors that ours stand in for, and what becomes of it.

    python scripts/drop_in_table.py           write it into the page
    python scripts/drop_in_table.py --check   status 1 where the page says something else

Keys and variables come from the code and from docs/configuration.md; the rest stands here.
tests/vllm/test_drop_in_table.py compares all of it with the vLLM that is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import configuration_reference as reference

PAGE = reference.ROOT / "docs" / "compatibility.md"
CONNECTORS = {
    "nixl": "`NixlConnector`, pull and push",
    "mooncake": "`MooncakeConnector`",
    "store": "`MooncakeStoreConnector`",
}
KINDS = ("key", "field", "variable", "request parameter", "response field", "metric")


class Row(NamedTuple):
    """`became`: same, translated, no effect or refused."""

    became: str
    why: str = ""


SAME = Row("same")
# Keys of the pool that vLLM had once; they are accepted, and are not in the table.
FORMER_KEYS = {"consumer_is_to_put", "discard_partial_chunks", "prefer_alloc_in_same_node"}
ROLE = {
    "kv_role": SAME,
    "engine_id": SAME,
    "kv_connector_extra_config": SAME,
}
FIELDS: Mapping[str, Mapping[str, Row]] = {  # of --kv-transfer-config itself
    "nixl": {
        "kv_role": Row("same", "an engine of any role prefills and decodes, as with vLLM's own"),
        "engine_id": SAME,
        "kv_buffer_device": Row("no effect", "caches are read where the engine has them"),
        "enable_permute_local_kv": Row(
            "no effect", "caches in any two memory orders are bridged, without asking"
        ),
    },
    "mooncake": ROLE,
    "store": {name: ROLE[name] for name in ("kv_role", "kv_connector_extra_config")},
}
# Variables of vLLM's connectors that no code of ours reads.
UNREAD: Mapping[str, str] = {
    "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO": "loads are not staged by the size of a disk buffer",
    "VLLM_MOONCAKE_LOAD_RECV_THREADS": "loads have threads of their own",
    "VLLM_MOONCAKE_STORE_TIER_LOG": "metrics tell what was loaded",
    "VLLM_RPC_BASE_PATH": "lookups need no socket in a directory",
}
ANY_SHAPE = "keys name bytes, so engines of a pool may have any shape"
WHY: Mapping[str, str] = {  # where the sentence gives no reason
    "custom_mem_pool": "caches stay in the memory that vLLM allocates",
    "enable_cross_layers_blocks": ANY_SHAPE,
    "enable_group_semantics": ANY_SHAPE,
    "prefill_tp_sizes": ANY_SHAPE,
    "store_tp_size": ANY_SHAPE,
}
SHAPE = Row("no effect", "the handshake tells the shape")
CUT = Row("same", "vLLM's own mark of a prompt that was cut")
PARAMETERS: Mapping[str, Mapping[str, Row]] = {
    "nixl": {
        "do_remote_decode": SAME,
        "do_remote_prefill": SAME,
        "remote_engine_id": SAME,
        "remote_host": SAME,
        "remote_port": SAME,
        "remote_request_id": SAME,
        "remote_block_ids": Row(
            "no effect", "the ticket (`kvferry`) names the blocks; without one, D computes"
        ),
        "remote_num_tokens": Row("no effect", "the ticket has the number of tokens"),
        "remote_blocks_expiry_time": Row(
            "no effect", "only decode engines that keep blocks send it, and kvferry's do not"
        ),
        "tp_size": SHAPE,
        "pp_size": SHAPE,
        "dcp_size": SHAPE,
        "remote_block_size": SHAPE,
        "_p_side_truncated": CUT,
        "_remote_blocks_processed": Row("no effect", "vLLM's scheduler notes it for itself"),
    },
    "mooncake": {
        "do_remote_decode": SAME,
        "do_remote_prefill": SAME,
        "transfer_id": SAME,
        "remote_engine_id": SAME,
        "remote_bootstrap_addr": SAME,
        "_p_side_truncated": CUT,
    },
    "store": {},
}
ANSWERS: Mapping[str, Mapping[str, Row]] = {
    "nixl": {
        "do_remote_prefill": SAME,
        "do_remote_decode": SAME,
        "remote_engine_id": SAME,
        "remote_request_id": SAME,
        "remote_host": SAME,
        "remote_port": SAME,
        "tp_size": SAME,
        "pp_size": SAME,
        "dcp_size": SAME,
        "remote_num_tokens": SAME,
        "transfer_mode": SAME,
        "remote_blocks_expiry_time": Row("same", "always null, as on vLLM's prefill engines"),
        "remote_block_ids": Row("translated", "`[[]]`; the ticket (`kvferry`) stands for them"),
    },
    "mooncake": {},
    "store": {},
}
BY_LOAD = "of one load of one rank, all its partners together"
METRICS: Mapping[str, Mapping[str, Row]] = {
    "nixl": {
        "vllm:nixl_xfer_time_seconds": Row("same", BY_LOAD),
        "vllm:nixl_post_time_seconds": Row("same", BY_LOAD),
        "vllm:nixl_bytes_transferred": Row("same", BY_LOAD),
        "vllm:nixl_num_descriptors": Row("same", BY_LOAD),
        "vllm:nixl_num_failed_transfers": SAME,
        "vllm:nixl_num_failed_notifications": Row(
            "same", "always 0: a hold that is not released expires"
        ),
        "vllm:nixl_num_kv_expired_reqs": SAME,
        "vllm:nixl_num_notifications_after_expiry": Row(
            "same", "always 0: a claim after expiry is refused, and the load fails"
        ),
    },
    "mooncake": {},
    "store": {
        "vllm:mooncake_store_operation_time_seconds": SAME,
        "vllm:mooncake_store_operation_total": SAME,
        "vllm:mooncake_store_operation_keys_total": SAME,
        "vllm:mooncake_store_operation_bytes_total": SAME,
        "vllm:mooncake_store_operation_failed_keys_total": SAME,
    },
}
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "nixl": ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
    "mooncake": (
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT",
        "VLLM_MOONCAKE_CONNECTOR_TIMEOUT",
    ),
    "store": (
        "MOONCAKE_PREFERRED_SEGMENT",
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
        "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO",
        "VLLM_MOONCAKE_LOAD_RECV_THREADS",
        "VLLM_MOONCAKE_STORE_TIER_LOG",
        "VLLM_RPC_BASE_PATH",
    ),
}
SAME_KEYS = {"store": ("cache_prefix", "enable_lookup", "save_decode_cache")}


def main() -> int:
    return reference.update(PAGE, {"drop-in": drop_in}, __file__)


def drop_in() -> str:
    lines = [
        (CONNECTORS[connector], kind, f"`{name}`", row.became, row.why)
        for connector, by_kind in rows().items()
        for kind, found in by_kind.items()
        for name, row in sorted(found.items())
    ]
    return reference.table(("of", "what", "name", "here", ""), lines)


def rows() -> dict[str, dict[str, dict[str, Row]]]:
    """All of it, by connector, kind and name."""
    found = {}
    for connector in CONNECTORS:
        kinds = (
            _keys(connector),
            FIELDS[connector],
            {name: _variable(name) for name in VARIABLES[connector]},
            PARAMETERS[connector],
            ANSWERS[connector],
            METRICS[connector],
        )
        found[connector] = {k: dict(told) for k, told in zip(KINDS, kinds, strict=True)}
    return found


def _keys(connector: str) -> dict[str, Row]:
    reference.their_keys()  # raises where sentences and code differ
    told = {
        name: _row(words)
        for name, words in reference.sentences_of_theirs(connector).items()
        if name not in FORMER_KEYS
    }
    known = import_module("kvferry.vllm.pool.config")
    for name in SAME_KEYS.get(connector, ()):
        reference.require_same(name, {name}, {name} & set(known.rules(known.PoolConfig)))
        told[name] = SAME
    return {
        name: row if row.why or row == SAME else Row(row.became, WHY.get(name, ""))
        for name, row in told.items()
    }


def _variable(name: str) -> Row:
    words = reference.sentences_of_variables().get(name)
    return _row(words) if words is not None else Row("no effect", UNREAD[name])


def _row(words: str) -> Row:
    """By how a sentence of docs/configuration.md begins."""
    for start, became in (
        ("No effect", "no effect"),
        ("Not supported", "no effect"),
        ("Refused", "refused"),
        ("Taken for", "translated"),
    ):
        if words.startswith(start):
            why = words.removeprefix(start).lstrip(":;, ").rstrip(".")
            return Row(became, f"to {why}" if became == "translated" else why)
    return Row("translated", words.rstrip("."))


if __name__ == "__main__":
    sys.exit(main())
