"""Settings that an engine would refuse are refused when vLLM makes its configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, VllmConfig

import kvferry.vllm
from kvferry.vllm.check import FIELDS, KINDS, POLICIES, ROLES

BAD = {"port": "x", "prot": 1}


def transfer(name: str = "FerryConnector", extra: Any = None, **more: Any) -> KVTransferConfig:
    more = {"kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both", **more}
    return KVTransferConfig(kv_connector=name, kv_connector_extra_config=extra or {}, **more)


def test_the_tables_are_those_of_vllm_and_of_the_classes() -> None:
    for name in kvferry.vllm.__all__:
        connector = getattr(kvferry.vllm, name)
        assert KINDS[name].style == connector.STYLE
        assert KINDS[name].pool_defaults == connector.POOL_DEFAULTS
    assert {one.name for one in fields(KVTransferConfig)} == set(FIELDS.split())
    for role in ROLES:
        transfer(kv_role=role)
    for policy in POLICIES:
        transfer(kv_load_failure_policy=policy)


def test_vllms_configuration_is_not_made() -> None:
    VllmConfig(kv_transfer_config=transfer())
    for name, module in (("FerryConnector", None), ("NixlConnector", "kvferry.vllm")):
        with pytest.raises(ValueError, match=r"\['prot'\].*port must be") as refused:
            VllmConfig(kv_transfer_config=transfer(name, BAD, kv_connector_module_path=module))
        assert "which kvferry does not know" in str(refused.value)
    with pytest.raises(ValueError, match="store is 'embedded'"):
        VllmConfig(kv_transfer_config=transfer("FerryPoolConnector", {"store": "embeded"}))
    child = {"kv_connector": "FerryConnector", "kv_role": "kv_both"}
    children = {"connectors": [{**child, "kv_connector_extra_config": BAD}]}
    with pytest.raises(ValueError, match="port must be"):
        VllmConfig(
            kv_transfer_config=transfer("MultiConnector", children, kv_connector_module_path=None)
        )
