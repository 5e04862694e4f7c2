"""What people mistype: one paragraph that says what was expected, and never a stack trace."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.bench.trial import Tried
from kvferry.carriers.tcp.carrier import TcpCarrier
from kvferry.cli import doctor
from kvferry.cli.doctor import Finding
from kvferry.cli.main import app
from kvferry.errors import DescriptionError
from kvferry.layout.hf import load_model, model_from_config
from kvferry.net.rpc import Sockets
from kvferry.units import parse_link
from kvferry.vllm.config import FerryConfig

PLAN = ["plan", "--to", "tp=2", "--tokens", "64", "--from"]
MISTAKES = [
    (["verify", "--pairs", "0"], "Invalid value for '--pairs'"),
    (["verify", "--pairs", "-1"], "Invalid value for '--pairs'"),
    (["pool", "ls", "--limit", "-3"], "Invalid value for '--limit'"),
    (["verify", "--processes", "0"], "Invalid value for '--processes'"),
    ([*PLAN, "tp=1", "--link", "0Gbit"], "must have some speed"),
    ([*PLAN, "tp=1", "--link", "0Gbit", "--json"], "must have some speed"),
    ([*PLAN, "tp=1", "--link", ""], "cannot read the link ''"),
    ([*PLAN, "tp=1", "--link", "1.2.3Gbit"], "cannot read the link '1.2.3Gbit'"),
    ([*PLAN, "tp=1", "--link", ".GB"], "cannot read the link '.GB'"),
    ([*PLAN, "block.attention=0"], "block of 'attention' must be at least 1 tokens, found 0"),
    ([*PLAN, "kernel=-16"], "kernel must be at least 0 tokens, found -16"),
    ([*PLAN, "kernel.attention=-16"], "kernel of 'attention' must be at least 0"),
    ([*PLAN, "block.nosuch=32"], "the group 'nosuch', which model 'llama-3.1-70b' does not have"),
    ([*PLAN, "interior.nosuch=split"], "the group 'nosuch'"),
    ([*PLAN, "drfat_tp=1"], "the role 'drfat'"),
    ([*PLAN, "tp=4,tp=2"], "says tp twice"),
    ([*PLAN, "block.attention=16,block.attention=32"], "says block.attention twice"),
    ([*PLAN, "tp=1", "--tokens", "100000000000"], "Invalid value for '--tokens'"),
    ([*PLAN, "tp=1", "--skip", "-1"], "Invalid value for '--skip'"),
    ([*PLAN, "tp=1", "--html", "/proc/none/plan.html"], "the folder /proc/none does not exist"),
    (["demo", "--html", "/proc/none/plan.html"], "the folder /proc/none does not exist"),
    ([*PLAN, "tp=1", "--html", "/proc"], "/proc is a folder; name a file"),
    (["demo", "--html", "/proc"], "/proc is a folder; name a file"),
    (["bench", "plan", "--html", "/proc"], "/proc is a folder; name a file"),
    ([*PLAN, "tp=1", "--model", "org/Model"], "names of the Hub are not downloaded: give the path"),
    (["demo", "--gib", "0"], "Invalid value for '--gib'"),
    (["demo", "--gib", "-1"], "Invalid value for '--gib'"),
    (["demo", "--gib", "inf"], "Invalid value for '--gib'"),
    (["demo", "--requests", "0"], "Invalid value for '--requests'"),
    (["bench", "transport", "--sizes", "a,b"], "cannot read the size 'a'; write"),
    (["bench", "transport", "--sizes", "0"], "a descriptor of 0 bytes; this measures 1 to"),
    (["bench", "transport", "--sizes", "4096,"], "cannot read the size ''; write"),
    (["bench", "transport", "--carriers", "nope"], "'nope' is not measured here; choose among loc"),
    (["bench", "transport", "--seconds", "-1"], "Invalid value for '--seconds'"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=str)
def test_mistakes_are_refused_in_words(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception  # none of Python's own
    assert words in result.output


def test_a_secret_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(app, ["doctor", "--secret-file", str(path)])
    assert result.exit_code == 2 and "text in UTF-8" in result.output


@pytest.mark.parametrize("text", ["", "\n", "too short"])
def test_a_secret_that_engines_refuse(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file is none that was left out: the engine does not start with it."""
    path = tmp_path / "secret"
    path.write_text(text)
    monkeypatch.setenv("KVFERRY_SECRET", "a secret that is long enough")
    result = CliRunner().invoke(app, ["doctor", "--secret-file", str(path)])
    assert result.exit_code == 2 and "at least 16 bytes" in result.output


def test_links_that_can_be_read() -> None:
    assert parse_link("0.5Tbit") == parse_link(".5 Tbps") == parse_link("500.Gbit/s") == 62.5e9


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama-3.1-8b", {"num_attention_heads": 0, "head_dim": None}, "'num_attention_heads' of at"),
    ("llama-3.1-8b", {"num_hidden_layers": 0}, "'num_hidden_layers' of at least 1, found 0"),
    ("llama-3.1-8b", {"num_hidden_layers": True}, "has no 'num_hidden_layers'"),
    ("gpt-oss-120b", {"layer_types": 5}, "'layer_types' must have one str for each of the"),
    ("gpt-oss-120b", {"layer_types": ["full_attention"]}, "one str for each of the 36 layers"),
    ("gpt-oss-120b", {"layer_types": [["a"]] * 36}, "one str for each"),
    ("jamba-1.5-mini", {"attn_layer_period": 0}, "'attn_layer_period' of at least 1, found 0"),
    ("llama-4-maverick", {"no_rope_layers": [1, 0]}, "'no_rope_layers' must have one int for each"),
    ("bamba-9b", {"mamba_n_heads": 0, "mamba_d_head": None}, "that its model cannot have"),
    ("qwen3-next-80b", {"layer_types": ["full_attention"]}, "one str for each of the 48 layers"),
]


@pytest.mark.parametrize(("name", "changes", "words"), CONFIGS, ids=str)
def test_configurations_that_cannot_be(name: str, changes: dict[str, Any], words: str) -> None:
    load_model(name)
    with pytest.raises(DescriptionError) as error:
        model_from_config({**preset(name), **changes})
    assert words in str(error.value), str(error.value)


def preset(name: str) -> dict[str, Any]:
    import kvferry.layout

    path = Path(kvferry.layout.__file__).parent / "presets.json"
    config: dict[str, Any] = json.loads(path.read_text())[name]
    return config


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_ports_that_do_not_exist(port: int) -> None:
    sockets = Sockets()
    try:
        with pytest.raises(DescriptionError, match=f"1 to 65535, .* found {port}"):
            sockets.server("127.0.0.1", port)
    finally:
        sockets.close()
    with pytest.raises(DescriptionError, match=f"found {port}"):
        TcpCarrier(port=port)
    arguments = ["router", "--decode", "http://127.0.0.1:1", "--port", str(port)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and f"found {port}" in " ".join(result.output.split())


def test_a_router_without_prefill_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = pytest.importorskip("kvferry.router.app")
    configs = []
    made = SimpleNamespace(routes={})
    monkeypatch.setattr(serve, "RouterApp", lambda config: configs.append(config) or made)
    monkeypatch.setattr(serve.uvicorn.Server, "run", lambda self: None)
    # it would send the log of this process, for good, to what the runner captures
    monkeypatch.setattr(serve.uvicorn.Config, "configure_logging", lambda self: None)
    result = CliRunner().invoke(app, ["router", "--decode", "127.0.0.1:8100"])
    assert result.exit_code == 0, result.output
    assert configs[0].prefill == () and configs[0].specs()[0].url == "http://127.0.0.1:8100"


def test_the_doctor_and_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Finding("CUDA", "missing", "the driver shows no GPU")
    monkeypatch.setattr(doctor, "cuda", lambda: none)
    tried = {"cuda": Tried("cuda", doctor.missing("cuda"))}
    (found,) = doctor.reachable(FerryConfig(carriers=("cuda",)), tried)
    assert (found.state, found.found) == ("broken", "the driver shows no GPU")
    assert not list(doctor.reachable(FerryConfig(), tried))
