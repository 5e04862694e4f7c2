"""Mooncake Store's configuration as its users write it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.errors import StoreError
from kvferry.pool.mooncake_config import MooncakeStoreConfig, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 << 30),
        ("512 mb", 512 << 20),
        (4096, 4096),
        ("1.5kb", 1536),
        ("7", 7),
        ("2g", 2 << 30),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1.2.3GB", None, -5, "5 elephants"])
def test_bad_sizes(text: object) -> None:
    with pytest.raises(StoreError, match="80GB"):
        parse_size(text)


def test_file_and_variables(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": "10.0.0.1:50051",
                "protocol": "rdma",
                "device_name": "mlx5_0",
                "global_segment_size": "80GB",
                "local_buffer_size": "1GB",
                "tenant_id": " a ",
                "something_new": 1,
            }
        )
    )
    config = MooncakeStoreConfig.load({"MOONCAKE_CONFIG_PATH": str(path)})
    assert (config.protocol, config.global_segment_size, config.tenant_id) == (
        "rdma",
        80 << 30,
        "a",
    )
    config = MooncakeStoreConfig.load(
        {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_MASTER": "h:1", "MOONCAKE_PROTOCOL": "tcp"}
    )
    assert (config.master_server_address, config.protocol) == ("h:1", "tcp")
    alone = {"MOONCAKE_MASTER": "127.0.0.1:5", "MOONCAKE_MODE": "standalone-store"}
    assert MooncakeStoreConfig.load(alone).global_segment_size == 0
    assert MooncakeStoreConfig.load(alone).hostname == "127.0.0.1"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="MOONCAKE_MASTER"):
        MooncakeStoreConfig.load({})
    with pytest.raises(StoreError, match="cannot be read"):
        MooncakeStoreConfig.load({"MOONCAKE_CONFIG_PATH": str(tmp_path / "none")})
    with pytest.raises(StoreError, match="standalone-store"):
        MooncakeStoreConfig.load({"MOONCAKE_MASTER": "h:1", "MOONCAKE_MODE": "else"})
    with pytest.raises(StoreError, match="gives memory"):
        MooncakeStoreConfig.of({"master_server_address": "h:1", "global_segment_size": 0})
