"""Mooncake Store's configuration as its users write it."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.carriers.base import MemoryRegion
from kvferry.errors import DescriptionError, StoreError
from kvferry.pool.mooncake import MooncakeStore, MooncakeStoreConfig, portions
from kvferry.pool.store import Outcome, Slices
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


def test_a_disk_tier_and_vllms_variables(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"

    def read(offload: object, **variables: str) -> MooncakeStoreConfig:
        values = {"master_server_address": "h:1", "enable_offload": offload, "tier_log": True}
        path.write_text(json.dumps(values))
        return MooncakeStoreConfig.load_from_env({"MOONCAKE_CONFIG_PATH": str(path), **variables})

    assert (read(False).staging_bytes, read("false").staging_bytes) == (0, 0)
    assert read(True).staging_bytes == int(0.9 * (1280 << 20)) and not read(True).tier_log
    half = {"VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO": "0.5", "VLLM_MOONCAKE_STORE_TIER_LOG": "1"}
    assert read("True", **half).staging_bytes == 640 << 20 and read(True, **half).tier_log
    for name, value in (("DISK_STAGING_USABLE_RATIO", "2"), ("DISK_STAGING_USABLE_RATIO", "x")):
        with pytest.raises(StoreError, match=name):
            read(True, **{f"VLLM_MOONCAKE_{name}": value})
    for flag in (1, "maybe", []):
        with pytest.raises(StoreError, match="enable_offload must be true or false"):
            read(flag)


def wanted(*sizes: int) -> list[Slices]:
    """Whole objects of these sizes, each in two parts."""
    return [
        Slices(np.asarray([0, n // 2]), np.asarray([0, 0]), np.asarray([n // 2, n - n // 2]))
        for n in sizes
    ]


def test_reads_are_cut_to_the_buffer_of_the_disk_tier() -> None:
    """Each object takes its size, up to whole blocks of 4 KiB, and two such blocks more."""
    objects = wanted(4096, 4097, 8192, 100_000, 1)

    def bounds(most_bytes: int) -> list[tuple[int, int]]:
        return [(part.start, part.stop) for part in portions(objects, most_bytes)]

    assert bounds(0) == [(0, 5)] and portions([], 1 << 20) == []
    assert bounds(3 * 4096) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert bounds((3 + 4) * 4096) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert bounds(1 << 20) == [(0, 5)]
    none = np.empty(0, dtype=np.int64)
    assert portions([Slices(none, none, none)], 1 << 20) == [slice(0, 1)]


class Client:
    """What Mooncake's client gives for reads; keeps what it was asked."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.called: list[str] = []
        self.moving, self.may_end = threading.Event(), threading.Event()

    def setup(self, *_: Any) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> None:
        self.called.append("unregister")

    def close(self) -> None:
        self.called.append("close")

    def batch_put_from_multi_buffers(self, keys: list[str], *_: Any) -> list[int]:
        self.moving.set()
        assert self.may_end.wait(10)
        self.called.append("put")
        return [0] * len(keys)

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: Any, lengths: list[list[int]]
    ) -> list[int]:
        self.batches.append(keys)
        return [sum(row) for row in lengths]

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        memory = SimpleNamespace(is_memory_replica=lambda: True)
        disk = SimpleNamespace(is_memory_replica=lambda: False, is_disk_replica=lambda: True)
        return {keys[0]: [memory], keys[1]: [disk], keys[2]: []}


def opened(monkeypatch: pytest.MonkeyPatch, client: Client, **options: Any) -> MooncakeStore:
    """A store over this client. Its master's address is a directory's, which is not dialed."""
    library = SimpleNamespace(MooncakeDistributedStore=lambda: client)
    monkeypatch.setitem(sys.modules, "mooncake.store", library)
    config = MooncakeStoreConfig("etcd://h:1", local_hostname="h", **options)
    return MooncakeStore(config)


def test_a_store_reads_in_portions_and_says_where_objects_lay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, share = Client(), 3 * 4096 / (1280 << 20)
    store = opened(monkeypatch, client, enable_offload=True, tier_log=True, staging_share=share)
    deadline = time.monotonic() + 5
    with caplog.at_level(logging.INFO, "kvferry"):
        found = store.get(["a", "b", "c"], wanted(4096, 4096, 4096), deadline)
    assert found == [Outcome.DONE] * 3 and client.batches == [["a"], ["b"], ["c"]]
    assert "3 objects from Mooncake: 1 in memory, 1 on disk, 1 unknown" in caplog.text
    store.close()
    caplog.clear()
    plain = opened(monkeypatch, client)
    with caplog.at_level(logging.INFO, "kvferry"):
        plain.get(["a", "b", "c"], wanted(4096, 4096, 4096), deadline)
    assert client.batches[3:] == [["a", "b", "c"]] and "in memory" not in caplog.text
    plain.close()


def test_the_client_is_closed_after_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that a closing engine no longer waits for still reads registered memory."""
    client = Client()
    store = opened(monkeypatch, client)
    store.register([MemoryRegion(4096, 4096)])
    put = threading.Thread(target=store.put, args=(["a"], wanted(8), time.monotonic() + 5))
    put.start()
    assert client.moving.wait(10)
    store.close()
    assert client.called == []
    with pytest.raises(StoreError, match="closed"):
        store.get(["a"], wanted(8), time.monotonic() + 5)
    with pytest.raises(StoreError, match="closed"):
        store.exists(["a"], time.monotonic() + 5)
    client.may_end.set()
    put.join(10)
    assert client.called == ["put", "unregister", "close"]
    store.close()
    assert client.called == ["put", "unregister", "close"]


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
