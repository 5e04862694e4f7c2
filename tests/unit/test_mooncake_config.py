"""Mooncake Store's configuration as its users write it."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import DescriptionError, StoreError
from kvferry.pool.mooncake import MooncakeStoreConfig
from kvferry.units import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 << 30),
        ("512 mb", 512 << 20),
        (4096, 4096),
        ("1.5kb", 1536),
        ("7", 7),
        ("2g", 2 << 30),
        ("80GiB", 80 << 30),
        (".5GB", 1 << 29),
        ("2.GB", 2 << 30),
        ("512MiB", 512 << 20),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1.2.3GB", ".GB", None, -5, "5 elephants"])
def test_bad_sizes(text: object) -> None:
    with pytest.raises(DescriptionError, match="80GB"):
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
    config = MooncakeStoreConfig.load_from_env({"MOONCAKE_CONFIG_PATH": str(path)})
    assert config == MooncakeStoreConfig.from_file(path)
    assert (config.protocol, config.global_segment_size, config.tenant_id) == (
        "rdma",
        80 << 30,
        "a",
    )
    config = MooncakeStoreConfig.load_from_env(
        {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_MASTER": "h:1", "MOONCAKE_PROTOCOL": "tcp"}
    )
    assert (config.master_server_address, config.protocol) == ("h:1", "tcp")
    alone = {"MOONCAKE_MASTER": "127.0.0.1:5", "MOONCAKE_MODE": "standalone-store"}
    assert MooncakeStoreConfig.load_from_env(alone).global_segment_size == 0
    assert MooncakeStoreConfig.load_from_env(alone).hostname == "127.0.0.1"


def test_a_file_means_what_it_means_to_vllm(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "127.0.0.1:1", "local_hostname": "x"}))
    found = MooncakeStoreConfig.load_from_env({"MOONCAKE_CONFIG_PATH": str(path)})
    assert (found.protocol, found.metadata_server, found.hostname) == ("rdma", "P2PHANDSHAKE", "x")
    named = {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": " node7 "}
    assert MooncakeStoreConfig.load_from_env(named).hostname == "node7"
    assert MooncakeStoreConfig.load_from_env({"MOONCAKE_MASTER": "127.0.0.1:1"}).protocol == "tcp"


def test_variables_have_two_names() -> None:
    """The field in capitals, and what Mooncake's own processes read, which wins."""
    ours = {"MOONCAKE_MASTER_SERVER_ADDRESS": "h:1", "MOONCAKE_DEVICE_NAME": "mlx5_0"}
    ours |= {"MOONCAKE_METADATA_SERVER": "http://a/metadata"}
    theirs = {"MOONCAKE_MASTER": "h:2", "MOONCAKE_DEVICE": "mlx5_1"}
    theirs |= {"MOONCAKE_TE_META_DATA_SERVER": "http://b/metadata"}

    def read(variables: dict[str, str]) -> tuple[Any, ...]:
        c = MooncakeStoreConfig.load_from_env(variables)
        return c.master_server_address, c.device_name, c.metadata_server

    assert read(ours) == ("h:1", "mlx5_0", "http://a/metadata")
    assert read(theirs) == ("h:2", "mlx5_1", "http://b/metadata")
    assert read({**theirs, **ours}) == read(theirs)


def test_null_is_absent_and_unknown_keys_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mooncake.json"
    known = ("metadata_server", "protocol", "device_name", "mode", "global_segment_size")
    known += ("local_buffer_size", "enable_offload", "tenant_id", "local_hostname")
    least = {"master_server_address": "h:1"}
    found = []
    for values in (least, {**least, **dict.fromkeys(known), "protocl": "tcp", "new": None}):
        path.write_text(json.dumps(values))
        with caplog.at_level(logging.WARNING, "kvferry"):
            found += [MooncakeStoreConfig.load_from_env({"MOONCAKE_CONFIG_PATH": str(path)})] * 2
    assert found == [found[0]] * 4 and found[0].protocol == "rdma"
    MooncakeStoreConfig.load_from_env({"MOONCAKE_CONFIG_PATH": str(path)})
    (message,) = [r.getMessage() for r in caplog.records]
    assert "protocl in" in message and "new" not in message


def test_the_name_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the host calls itself, which Debian resolves to 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")

    def host(master: str, **variables: str) -> str:
        return MooncakeStoreConfig.load_from_env({"MOONCAKE_MASTER": master, **variables}).hostname

    assert host("10.0.0.1:5", VLLM_HOST_IP="10.0.0.7") == "10.0.0.7"
    both = {"VLLM_HOST_IP": "10.0.0.7", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "node7"}
    assert host("10.0.0.1:5", **both) == "node7"
    assert host("127.0.0.1:5") == host("localhost:5") == host("etcd://127.0.0.1:5;h:6")
    assert host("127.0.0.1:5") == "127.0.0.1" and host("[::1]:5") in ("::1", "127.0.0.1")
    asked = []

    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            asked.append(address)

        def getsockname(self) -> Any:
            return ("10.9.8.7", 1)

    monkeypatch.setattr(socket, "socket", Probe)
    assert host("10.0.0.1:50051") == "10.9.8.7" and asked == [("10.0.0.1", 50051)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(OSError("?")))
    with pytest.raises(StoreError, match="local_hostname"):
        host("nowhere:1")


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="MOONCAKE_MASTER"):
        MooncakeStoreConfig.load_from_env({})
    with pytest.raises(StoreError, match="cannot be read"):
        MooncakeStoreConfig.load_from_env({"MOONCAKE_CONFIG_PATH": str(tmp_path / "none")})
    with pytest.raises(StoreError, match="standalone-store"):
        MooncakeStoreConfig.load_from_env({"MOONCAKE_MASTER": "h:1", "MOONCAKE_MODE": "else"})
    for bad in ({"local_hostname": 5}, {"protocol": ["tcp"]}):
        with pytest.raises(StoreError, match=next(iter(bad))):
            MooncakeStoreConfig.of({"master_server_address": "h:1", **bad})
    assert MooncakeStoreConfig.of(
        {"master_server_address": "h:1", "protocol": "RDMA"}
    ).protocol == ("rdma")
    with pytest.raises(StoreError, match="gives memory"):
        MooncakeStoreConfig.of({"master_server_address": "h:1", "global_segment_size": 0})
