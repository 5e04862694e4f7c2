"""`kvferry check`: all mistakes at once, without vLLM."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.errors import SettingsError

runner = CliRunner()
OURS = {"kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both"}


def check(
    name: str, extra: Any = None, *more: str, **fields: Any
) -> tuple[int, list[str], list[str]]:
    config = {"kv_connector": name, **OURS, "kv_connector_extra_config": extra or {}, **fields}
    result = runner.invoke(app, ["check", json.dumps(config), "--json", *more])
    said = json.loads(result.stdout)
    return result.exit_code, said["refusals"], said["notes"]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFERRY_SECRET", "KVFERRY_POOL_PREFIX", "MOONCAKE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_good_ones() -> None:
    for name in ("FerryConnector", "NixlConnector", "MooncakeConnector", "FerryPoolConnector"):
        assert check(name) == (0, [], [])
    assert check("FerryConnector", {"pool": True, "port": 5600}, "--model", "llama-3.1-8b")[0] == 0
    assert check("FerryConnector", kv_connector_module_path=None) == (0, [], [])
    code, refused, notes = check("FerryConnector", {"packing": True})
    assert (code, refused) == (0, []) and "has no effect any more" in notes[0]


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    extra = {
        "prot": 1,
        "haste": 2,
        "port": "x",
        "host": "10.0.0.1",
        "kv_lease_duration": -1,
        "carriers": ["pigeon"],
        "secret_file": None,
    }
    code, refused, _ = check("NixlConnector", extra, "--model", str(tmp_path / "no"), kv_role="p")
    assert code == 1
    begins = [
        "kv_role must be one of kv_producer, kv_consumer, kv_both, found 'p'",
        "kv_connector_extra_config has ['haste', 'prot'], which kvferry does not know",
        "port must be a port from 0 to 65535, found 'x'",
        "kv_lease_duration must be a number of seconds",
        "cannot listen on 10.0.0.1 without a secret",
        "",
        "model: ",
    ]
    assert len(refused) == len(begins), refused
    assert all(one.startswith(begin) for one, begin in zip(refused, begins, strict=True)), refused
    assert "pigeon" in refused[5]


def test_all_mistakes_of_a_pool_at_once() -> None:
    extra = {
        "load_async": False,
        "discard_partial_chunks": False,
        "zzz": 1,
        "size": "x",
        "disk_path": "/a",
        "store": "nope",
    }
    code, refused, _ = check("FerryPoolConnector", extra)
    begins = ("kv_connector_extra_config has ['zzz']", "load_async must", "discard_partial_chunks")
    begins += ("size must be a size", "store is 'embedded', 'mooncake'", "a disk tier needs both")
    assert code == 1 and len(refused) == len(begins), refused
    assert all(one.startswith(begin) for one, begin in zip(refused, begins, strict=True)), refused


def test_mistakes_survive_a_way_between_processes() -> None:
    sent = pickle.loads(pickle.dumps(SettingsError(["port must be x", "size must be y"])))
    assert sent.found == ("port must be x", "size must be y") and str(sent).count("must") == 2


@pytest.mark.parametrize(
    ("name", "extra", "said"),
    [
        ("FerryConnector", {"pool": 7}, "`pool` in kv_connector_extra_config is true, false or"),
        (
            "FerryConnector",
            {"carrier_options": {"tcp": {"prot": 1}}},
            "the carrier 'tcp' has no option prot; it has port, advertise, streams_per_transfer",
        ),
        (
            "FerryConnector",
            {"carrier_options": {"tcp": {"writable": True}}},
            "the carrier 'tcp' has no option writable",
        ),
        (
            "FerryConnector",
            {"carrier_options": {"mooncake": {"protocl": "rdma", "patience_seconds": 3}}},
            "the carrier 'mooncake' has no option protocl; it has protocol, device, workers",
        ),
        ("FerryConnector", {"pool": {"size": "x"}}, "size must be a size such as 80GB"),
        ("FerryPoolConnector", {"store": "embeded"}, "store is 'embedded', 'mooncake' or"),
        ("FerryPoolConnector", {"store": "nosuch:thing"}, "cannot be imported"),
        ("FerryPoolConnector", {"disk_size": "1GB"}, "a disk tier needs both"),
        ("NixlConnector", {"bidirectional_kv_xfer": True}, "is not offered"),
        ("MooncakeStoreConnector", {}, "MOONCAKE_CONFIG_PATH"),
        ("FerryConnector", {"secret_file": "/no/such/file"}, "cannot be read"),
        ("Ferry", {}, "is not kvferry's; kvferry has FerryConnector, "),
    ],
)
def test_mistakes_of_each_kind(name: str, extra: Any, said: str) -> None:
    code, refused, _ = check(name, extra)
    assert code == 1 and len(refused) == 1 and said in refused[0]


def test_what_is_around_the_keys() -> None:
    policy = check("FerryConnector", kv_load_failure_policy="x")[1]
    assert policy == ["kv_load_failure_policy must be one of recompute, fail, found 'x'"]
    assert "vLLM does not know ['kv_rolle']" in check("FerryConnector", kv_rolle=1)[1][0]
    alone = check("NixlConnector", kv_connector_module_path=None)[1]
    assert "is vLLM's own connector" in alone[0]
    child = {"kv_connector": "FerryConnector", **OURS, "kv_connector_extra_config": {"port": -1}}
    children = {"connectors": [{"kv_connector": "OffloadingConnector"}, child]}
    refused = check("MultiConnector", children, kv_connector_module_path=None)[1]
    assert len(refused) == 1 and refused[0].startswith("connectors[1]: port must be")
    for text, said in (("{", "as JSON"), ("[1]", "JSON object"), ("@/no/file", "/no/file cannot")):
        result = runner.invoke(app, ["check", text])
        assert result.exit_code == 1 and said in result.stdout


def test_vllm_is_not_imported_and_can_be_later() -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from kvferry.cli.main import app\n"
        'config = \'{"kv_connector": "FerryConnector", "kv_role": "kv_both"}\'\n'
        'assert CliRunner().invoke(app, ["check", config]).exit_code == 0\n'
        'assert not {"vllm", "torch"} & set(sys.modules)\n'
    )
    subprocess.run([sys.executable, "-c", program], check=True)
