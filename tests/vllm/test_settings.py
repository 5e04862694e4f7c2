"""What an operator may set: every key of both configurations, well and badly."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch warns of itself
    warnings.simplefilter("ignore")
    import kvferry.vllm.connector

from ipv6 import has_ipv6
from kvferry.errors import DescriptionError, HandoverError
from kvferry.vllm.bootstrap import Bootstrap, Whereabouts, query
from kvferry.vllm.config import FerryConfig, good_keys, rules
from kvferry.vllm.pool.config import PoolConfig

NAN, INFINITE = math.nan, math.inf
Z = "fe80::1%eth0"  # an address with a zone
NOT_TEXT = (5, True, ["a"], {}, "\ud800")
NOT_FLAG = ("false", "true", "", 0, 1, [], 0.0)
NOT_SECONDS = ("60", "", True, 0, -1, NAN, INFINITE, 1e30, 10**400, [1])
NOT_COUNT = ("64", "", True, -1, 1.5, 64.0, NAN, 1 << 40)
NOT_PORT = (*NOT_COUNT, 65536, 99999)
NOT_PATH = (5, True, "", " ", ["a"])
NOT_SIZE = ("80XB", "", True, -1, NAN, ["1GB"], "1e9")
NOT_PEER = ("10.0.0.0/88", "h1:8998", "10.0.0", "http://h", "10.0.0.256", "a b")
SECONDS = ((30, 30.0), (0.5, 0.5))
LONG = "a secret for these tests"

# By key: values that are taken, each with what becomes of it, and values that are refused.
FERRY: dict[str, tuple[Any, Any]] = {
    "secret": (((LONG, LONG),), (*NOT_TEXT, "", " \n", "short")),
    "host": (
        (
            ("10.0.0.1", "10.0.0.1"),
            ("[fd00::1]", "fd00::1"),
            ("Node-1.local", "Node-1.local"),
            ("localhost", "127.0.0.1"),
        ),
        (*NOT_TEXT, "", "0.0.0.0", "::", "[::]", "*", "1.2.3.4:99", "tcp://h", "10.0.0", "a b", Z),
    ),
    "port": (((0, 0), (65535, 65535)), NOT_PORT),
    "carriers": (
        (("tcp", ("tcp",)), (["local", "tcp"], ("local", "tcp")), (("tcp",), ("tcp",))),
        (5, [], "", [5], [""], {"tcp": {}}, True, "tcpp", ["auto", "tcp"]),
    ),
    "checksums": (((True, True), (False, False)), NOT_FLAG),
    "carrier_options": (
        (({"nixl": {}}, {"nixl": {}}), ({}, {})),
        (5, "nixl", [], {5: {}}, {"nixl": 5}, {"no such": {}}),
    ),
    "optional_carriers": (
        (("nixl", ("nixl",)), (["nixl", "mooncake"], ("nixl", "mooncake")), ([], ())),
        (5, "", [5], [""], True, "auto", ["no such"]),
    ),
    "mode": ((("push", "push"),), ("Push", "", 5, True)),
    "lease_seconds": (SECONDS, NOT_SECONDS),
    "load_seconds": (SECONDS, NOT_SECONDS),
    "model_id": ((("m", "m"), ("", "")), NOT_TEXT),
    "draft_layers": ((("zero", "zero"),), ("Zero", "", 0, False)),
    "load_failure_policy": (
        (("fail", "fail"), ("recompute", "recompute")),
        ("Fail", "", 0, False),
    ),
    "max_held_blocks": (((0, 0), (100, 100)), NOT_COUNT),
    "peers": (
        (
            ("10.0.0.0/8", ("10.0.0.0/8",)),
            (["10.1.2.3", "fd00::/8", "[::1]", "n1"], ("10.1.2.3", "fd00::/8", "[::1]", "n1")),
            ([], ()),
        ),
        (5, [5], True, "", [""], {}, "10.0.0.0/8,10.1.1.1", *([host] for host in NOT_PEER)),
    ),
    "bootstrap_port": (((0, 0), (8998, 8998)), NOT_PORT),
    "bootstrap_server": (
        (("http://h:8998", "http://h:8998"), ("[::1]:5", "[::1]:5"), ("", "")),
        (*NOT_TEXT, "foo", "h:0", "h:99999", "https://h:1", "http://u@h:1"),
    ),
    "bootstrap_seconds": (SECONDS, NOT_SECONDS),
}
POOL: dict[str, tuple[Any, Any]] = {
    "store": ((("mooncake", "mooncake"), ("a:b", "a:b")), NOT_TEXT),
    "path": ((("/a/b", "/a/b"), ("b", "b")), NOT_PATH),
    "size": ((("1.5GB", 3 << 29), (1 << 20, 1 << 20), (1.5e9, 1_500_000_000)), NOT_SIZE),
    "disk_path": ((("/a/b", "/a/b"),), NOT_PATH),
    "disk_size": ((("1TB", 1 << 40), (0, 0)), NOT_SIZE),
    "options": ((({"a": 1}, {"a": 1}), ({}, {})), (5, "a", [], {5: 1}, True)),
    "cache_prefix": ((("team", "team"), ("", "")), NOT_TEXT),
    "model_id": ((("m", "m"), ("", "")), NOT_TEXT),
    "weight_revision": ((("r", "r"), ("", "")), NOT_TEXT),
    "enable_lookup": (((False, False),), NOT_FLAG),
    "save_decode_cache": (((True, True), (False, False)), NOT_FLAG),
    "lookup_seconds": (SECONDS, NOT_SECONDS),
    "load_seconds": (SECONDS, NOT_SECONDS),
    "save_seconds": (SECONDS, NOT_SECONDS),
    "min_load_tokens": (((0, 0), (64, 64), ("auto", "auto")), (*NOT_COUNT, "Auto", "none")),
    "checksums": (((True, True),), NOT_FLAG),
    "pinned_share": (((0.5, 0.5), (1, 1.0)), ("0.5", True, 0, -1, 25, 1.01, NAN, INFINITE)),
}
BOTH: list[tuple[Any, dict[str, tuple[Any, Any]]]] = [(FerryConfig, FERRY), (PoolConfig, POOL)]
KEYS = [(kind, name) for kind, _ in BOTH for name in (f.name for f in fields(kind))]


def read(kind: Any, extra: dict[str, Any]) -> Any:
    return kind.read(extra, environment={}) if kind is FerryConfig else kind.read(extra)


@pytest.mark.parametrize(("kind", "name"), KEYS, ids=lambda x: getattr(x, "__name__", x))
class TestEveryKey:
    """A new field is missing in the tables above, and fails here."""

    def test_taken(self, kind: Any, name: str) -> None:
        taken, _ = dict(BOTH)[kind][name]
        for given, value in taken:
            found = good_keys(kind, {name: given}, [])[name]
            assert found == value and type(found) is type(value), given

    def test_refused(self, kind: Any, name: str) -> None:
        _, refused = dict(BOTH)[kind][name]
        for given in refused:
            with pytest.raises(DescriptionError, match=name) as caught:
                read(kind, {name: given})
            assert "found" in str(caught.value) or name == "carrier_options", given

    def test_null_is_not_given(self, kind: Any, name: str) -> None:
        assert read(kind, {name: None}) == read(kind, {})


def test_no_table_is_longer_than_its_class() -> None:
    for kind, table in BOTH:
        assert set(table) == set(rules(kind)) == {f.name for f in fields(kind)}


@pytest.mark.parametrize("kind", [FerryConfig, PoolConfig])
@pytest.mark.parametrize(
    "name, value, became",
    [
        ("packing", "packed", "has no effect any more"),
        (
            "lora_files_final",
            True,
            "has no effect any more: an engine reads an adapter's files once, when it first serves "
            "the adapter",
        ),
    ],
)
def test_a_key_of_an_earlier_version_is_answered_by_one_line(
    kind: Any, name: str, value: Any, became: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(kind, {name: value}) == read(kind, {})
    assert [r.getMessage() for r in caplog.records] == [f"kvferry: `{name}` {became}; remove it"]
    assert read(kind, {name: None}) == read(kind, {}) and len(caplog.records) == 1


class TestSecret:
    VARIABLE = {"KVFERRY_SECRET": "a secret of the environment"}

    def test_where_it_comes_from(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "secret"
        file.write_text("a secret of the file\n")
        file.chmod(0o600)
        monkeypatch.setenv("HOME", str(tmp_path))
        for extra, expected in (
            ({}, "a secret of the environment"),
            ({"secret": None, "secret_file": None}, "a secret of the environment"),
            ({"secret": "a secret that is given"}, "a secret that is given"),
            ({"secret_file": str(file)}, "a secret of the file"),
            ({"secret_file": "~/secret"}, "a secret of the file"),
            ({"secret": None, "secret_file": str(file)}, "a secret of the file"),
        ):
            assert FerryConfig.read(extra, environment=self.VARIABLE).secret == expected
        for variables in ({}, {"KVFERRY_SECRET": ""}):
            assert FerryConfig.read({}, environment=variables).secret is None

    def test_none_is_taken_for_one(self, tmp_path: Path) -> None:
        """What looks like a secret and is none would leave the engine open to everybody."""
        (tmp_path / "empty").write_text(" \n")
        (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "good").write_text("s")
        for extra, message in (
            ({"secret": ""}, "secret must be a text that is not empty"),
            ({"secret_file": ""}, "secret_file must be a path"),
            ({"secret_file": 5}, "secret_file must be a path"),
            (
                {"secret_file": str(tmp_path / "empty")},
                "secret_file .*empty: a secret must have at least",
            ),
            (
                {"secret_file": str(tmp_path / "bytes")},
                "secret_file .*bytes cannot be read: it is no text",
            ),
            ({"secret_file": str(tmp_path / "none")}, "secret_file .*none cannot be read: No such"),
            ({"secret_file": str(tmp_path)}, "secret_file .* cannot be read: Is a directory"),
            ({"secret": LONG, "secret_file": str(tmp_path / "good")}, "both given; remove one"),
            ({"secret_file": str(tmp_path / "good")}, "good: a secret must have at least 16 bytes"),
            ({"secret": "short"}, "openssl rand -hex 32"),
        ):
            with pytest.raises(DescriptionError, match=message):
                FerryConfig.read(extra, environment=self.VARIABLE)
        with pytest.raises(DescriptionError, match="KVFERRY_SECRET"):
            FerryConfig.read({}, environment={"KVFERRY_SECRET": " "})

    def test_it_is_shown_nowhere(self) -> None:
        assert "hush" not in repr(FerryConfig.read({"secret": "hush " * 9}, environment={}))
        with pytest.raises(DescriptionError) as short:
            FerryConfig.read({"secret": "hush"}, environment={})
        assert "hush" not in str(short.value)
        with pytest.raises(DescriptionError) as caught:
            FerryConfig.read({"secret": ["hush"]}, environment={})
        assert "hush" not in str(caught.value)

    def test_where_it_can_be_seen_is_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "secret"
        file.write_text(LONG)
        for mode, extra, words in (
            (0o600, {"secret": LONG}, "list of processes"),
            (0o644, {"secret_file": str(file)}, "chmod 600"),
            (0o600, {"secret_file": str(file)}, ""),
        ):
            file.chmod(mode)
            caplog.clear()
            FerryConfig.read(extra, environment={})
            assert LONG not in caplog.text
            assert words in caplog.text if words else not caplog.records

    def test_no_network_without_one(self) -> None:
        """Nobody would be kept from reading and writing caches."""
        variable = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1"}
        for extra, style, environment in (
            ({"host": "10.0.0.1"}, "ferry", {}),
            ({"host": "node-1"}, "mooncake", {}),
            ({}, "nixl", variable),
        ):
            with pytest.raises(DescriptionError, match=r"without a secret.*openssl rand"):
                FerryConfig.read(extra, style, environment)
            secret = {**environment, "KVFERRY_SECRET": LONG}
            assert FerryConfig.read(extra, style, secret).host
        for host in ("127.0.0.1", "::1", "localhost"):
            assert FerryConfig.read({"host": host}, environment={}).host


class TestOfOthers:
    """Keys and variables of the connectors that ours stand in for."""

    def test_nixl(self) -> None:
        variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3", "KVFERRY_SECRET": LONG}
        variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = "5600"
        keys = {"kv_lease_duration": 17, "backends": ["UCX"], "num_threads": 4}
        config = FerryConfig.read(keys, "nixl", variables, rank=3)
        assert (config.host, config.port, config.lease_seconds) == ("10.1.2.3", 5603, 17.0)
        assert config.bootstrap_port == 0

    def test_mooncake(self) -> None:
        config = FerryConfig.read({"mooncake_protocol": "rdma", "device_name": ""}, "mooncake", {})
        assert (config.bootstrap_port, config.lease_seconds) == (8998, 480.0)
        variables = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9001"}
        variables["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = "30"
        config = FerryConfig.read({"load_seconds": 5}, "mooncake", variables)
        assert (config.bootstrap_port, config.lease_seconds, config.load_seconds) == (9001, 30.0, 5)

    @pytest.mark.parametrize(
        ("style", "variable", "bad"),
        [
            ("nixl", "VLLM_NIXL_SIDE_CHANNEL_PORT", ("abc", "99999", "-5", "1.5")),
            ("push", "VLLM_NIXL_SIDE_CHANNEL_HOST", ("0.0.0.0", "::", "1.2.3.4:5")),
            ("mooncake", "VLLM_MOONCAKE_BOOTSTRAP_PORT", ("x", "70000")),
            ("mooncake", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", ("x", "0", "nan", "inf")),
            ("mooncake", "VLLM_MOONCAKE_CONNECTOR_TIMEOUT", ("x", "-1")),
        ],
    )
    def test_variables(self, style: Any, variable: str, bad: tuple[str, ...]) -> None:
        for text in bad:
            with pytest.raises(DescriptionError, match=variable):
                FerryConfig.read({}, style, {variable: text})
        assert FerryConfig.read({}, style, {variable: ""}) == FerryConfig.read({}, style, {})

    def test_keys(self) -> None:
        for style, extra, message in (
            ("ferry", {"backends": ["UCX"]}, "does not know"),
            ("mooncake", {"kv_lease_duration": 3}, "does not know"),
            ("nixl", {"bidirectional_kv_xfer": True}, "not offered"),
            ("nixl", {"kv_lease_duration": "x"}, "kv_lease_duration must be"),
            ("nixl", {"kv_lease_duration": 0}, "kv_lease_duration must be"),
            ("push", {"push_registration_timeout": NAN}, "push_registration_timeout must be"),
            ("nixl", {"enforce_handshake_compat": False}, "cannot be switched off"),
            ("nixl", {"enforce_handshake_compat": 0}, "cannot be switched off"),
            ("push", {"enforce_handshake_compat": "false"}, "cannot be switched off"),
            ("mooncake", {"bootstrap_server_address": "foo"}, "bootstrap_server_address must be"),
        ):
            with pytest.raises(DescriptionError, match=message):
                FerryConfig.read(extra, style, {})
        for compat in (True, None):
            FerryConfig.read({"enforce_handshake_compat": compat}, "nixl", {})
        spelled = {"push_registration_timeout": "7", "kv_lease_duration": 9}
        config = FerryConfig.read(spelled, "push", {})
        assert (config.load_seconds, config.lease_seconds) == (7.0, 9)

    def test_our_own_keys_win(self) -> None:
        variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0", "VLLM_NIXL_SIDE_CHANNEL_PORT": "x"}
        variables["KVFERRY_SECRET"] = LONG
        config = FerryConfig.read({"host": "10.0.0.1", "port": 7}, "nixl", variables, rank=2)
        assert (config.host, config.port) == ("10.0.0.1", 9)
        with pytest.raises(DescriptionError, match="data-parallel rank"):
            FerryConfig.read({"port": 65535}, rank=1, environment={})


def test_peers_are_compared_as_what_they_are() -> None:
    peers = ["10.0.0.0/8", "Node1.Local", "[fd00::1]", "192.168.1.7/24"]
    config = FerryConfig.read({"peers": peers}, environment={})
    for host in ("10.9.8.7", "node1.local", "NODE1.LOCAL", "fd00::1", "[fd00:0::1]", "192.168.1.9"):
        assert config.admits(host), host
    for host in ("0.0.0.5", "11.0.0.1", "node1", "fd00::2", "192.168.2.1", "::ffff:10.0.0.1"):
        assert not config.admits(host), host
    assert FerryConfig.read({}, environment={}).admits("anywhere")


class TestBootstrap:
    @pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
    @pytest.mark.parametrize("host", ["::1", "[::1]"])
    def test_where_the_host_is_one_of_ipv6(self, host: str) -> None:
        bootstrap = Bootstrap(host, 0, None)
        try:
            where = Whereabouts("e", "::1", 9, "i")
            bootstrap.put(0, where.entry({}))
            assert query(f"http://[::1]:{bootstrap.port}", "e", 5.0) == where
            with pytest.raises(HandoverError, match=r"\[::1\]:\d+: .*bootstrap_port"):
                Bootstrap(host, bootstrap.port, None)
        finally:
            bootstrap.close()

    def test_a_port_and_an_address_that_it_cannot_listen_at(self) -> None:
        with pytest.raises(DescriptionError, match="65535"):
            Bootstrap(None, 99999, None)
        with pytest.raises(
            HandoverError, match=r"192\.0\.2\.1:0.*set host to an address of this host"
        ):
            Bootstrap("192.0.2.1", 0, LONG)  # kept for documents: nobody's


class TestPool:
    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({"disk_size": "1GB"}, "needs both disk_path and disk_size"),
            ({"disk_path": "/d"}, "needs both disk_path and disk_size"),
            ({"options": {"a": 1}}, "options are for a store of your own"),
            ({"options": {"a": 1}, "store": "mooncake"}, "options are for a store of your own"),
            ({"path": "/p", "size": 1, "store": "mooncake"}, "path, size set, which only"),
            ({"disk_path": "/d", "disk_size": 1, "store": "m:f"}, "disk_path, disk_size set"),
        ],
    )
    def test_keys_that_contradict_each_other(self, extra: dict[str, Any], message: str) -> None:
        with pytest.raises(DescriptionError, match=message):
            PoolConfig.read(extra)

    def test_a_home_is_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        disk = {"disk_path": "~/disk", "disk_size": "1MiB"}
        store = PoolConfig.read({"path": "~/memory", "size": "4MiB", **disk}).opener()()
        store.close()
        assert {"memory", "disk"} <= {p.name for p in tmp_path.iterdir()}
        assert not (tmp_path / "~").exists()

    @pytest.mark.parametrize("store", ["no_such_module:f", "os:nope", ":f", ".x:f", "os:sep"])
    def test_a_store_that_is_none(self, store: str) -> None:
        with pytest.raises(DescriptionError, match=f"store '{store}'"):
            PoolConfig.read({"store": store}).opener()

    def test_a_store_of_your_own_gets_its_options(self) -> None:
        extra = {"store": "types:SimpleNamespace", "options": {"a": 1}}
        assert PoolConfig.read(extra).opener()().a == 1  # type: ignore[attr-defined]

    def test_defaults_of_a_class_stay_where_null_is_given(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        defaults = {"cache_prefix": "team", **kvferry.vllm.MooncakeStoreConnector.POOL_DEFAULTS}
        nulls = dict.fromkeys(("cache_prefix", "store", "save_decode_cache", "lookup_async"))
        with caplog.at_level(logging.INFO, "kvferry"):
            assert PoolConfig.read(nulls, **defaults) == PoolConfig.read({}, **defaults)
