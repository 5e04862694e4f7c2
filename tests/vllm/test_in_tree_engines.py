"""Decode engines with vLLM's own connectors, sent to a prefill engine of ours: told no, alive."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from benchmarks import python_path
from tiny_models import make_model
from vllm_engines import Engine, free_port, hand_over, nixl_environment
from vllm_pairs import ids, mooncake_decode, mooncake_prefill, prompt, started

pytestmark = pytest.mark.matrix
THEIRS = "benchmarks.timed.vllm"  # MooncakeConnector as it is, told that there is a device 0
WORDS = "run kvferry's connector on both sides"


def engine(name: str, folder: Path, module: str, transfer: dict[str, Any], port: int) -> Engine:
    made = Engine(name, folder / "tiny", folder / f"{name}.log", on_failure="recompute")
    made.connector = {"mooncake_protocol": "tcp"} if "Moon" in transfer["kv_connector"] else {}
    made.transfer = {"kv_connector_module_path": module, **transfer}
    made.environment = {
        "PYTHONPATH": python_path(),
        **nixl_environment(),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
        "KVFERRY_BENCH_TIMES": str(folder / f"{name}.times"),
    }
    return made


@pytest.mark.parametrize("style", ["NixlConnector", "MooncakeConnector"])
def test_is_told_no_and_computes(style: str, tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    bootstrap, by_id = free_port(), style == "MooncakeConnector"
    roles = ("kv_producer", "kv_consumer") if by_id else ("kv_both", "kv_both")
    ours = {"kv_connector": style, "kv_role": roles[0]}
    theirs = {"kv_connector": style, "kv_role": roles[1]}
    theirs |= {} if by_id else {"kv_buffer_device": "cpu"}
    prefill = engine("p", tmp_path, "kvferry.vllm", ours, bootstrap)
    decode = engine("d", tmp_path, THEIRS, theirs, free_port())
    started(prefill, decode)
    try:
        asked, began = prompt(7, 300), time.monotonic()
        if by_id:
            prefill.complete(asked, max_tokens=1, kv_transfer_params=mooncake_prefill("t"))
            params = mooncake_decode("t", bootstrap, "p")
            answer = decode.complete(asked, max_tokens=6, kv_transfer_params=params)
        else:
            answer = hand_over(prefill, decode, asked, max_tokens=6)
        assert time.monotonic() - began < 60
        if by_id:  # it is told an address that is none
            assert WORDS in decode.log.read_text()
        else:  # it asks, and runs into its own timeout, of five seconds
            assert "one of vLLM's own connectors" in prefill.log.read_text()
        assert ids(answer) == ids(prefill.complete(asked, max_tokens=6))
        assert ids(decode.complete(prompt(8, 100), max_tokens=3))  # it goes on
    finally:
        prefill.stop()
        decode.stop()
