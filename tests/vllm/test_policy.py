"""What becomes of requests whose load failed: computed here, unless an operator chose otherwise."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    from modelless import Modelless, expected, run

from kvferry.vllm.connector import names_policy
from tiny_models import make_model

pytestmark = pytest.mark.filterwarnings("ignore")
LINE = "kv_load_failure_policy: recompute"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    engines = []

    def made(name: str, **options: Any) -> Modelless:
        engines.append(Modelless(name, make_model(tmp_path / name), **options))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


def prompt(count: int) -> list[int]:
    return [i * 17 % 997 for i in range(count)]


@pytest.mark.parametrize(
    ("arguments", "extra", "policy"),
    [
        ([], {}, "recompute"),
        (["--kv-transfer-config", '{"kv_load_failure_policy": "fail"}'], {}, "fail"),
        (["--kv-transfer-config.kv-load-failure-policy", "fail"], {}, "fail"),
        ([], {"load_failure_policy": "fail"}, "fail"),
        (["--kv_load_failure_policy"], {"load_failure_policy": "recompute"}, "recompute"),
    ],
)
def test_a_default_is_told_from_a_choice(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: list[str],
    extra: dict[str, str],
    policy: str,
) -> None:
    """P's ticket is void when D loads; vLLM's own default is `fail`."""
    monkeypatch.setattr(sys, "argv", ["vllm", *arguments])
    with caplog.at_level("INFO", logger="kvferry"):
        d = make("d", policy="fail", **extra)
    assert d.scheduler.recompute_kv_load_failures == (policy == "recompute")
    assert (LINE in caplog.text) == (not arguments and not extra)
    p, tokens = make("p"), prompt(60)
    p.add("p", tokens, 1, do_remote_decode=True)
    run(p, until=lambda: "p" in p.ended)
    p.scheduler.reset_prefix_cache(reset_connector=True)
    run(p, until=lambda: not p.used_blocks)
    d.add("d", tokens, 3, **p.params["p"])
    run(p, d, until=lambda: "d" in d.ended)
    assert (d.tokens["d"] == expected(tokens, 3)) == (policy == "recompute")


def test_under_a_multiconnector_it_is_warned_of(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM reads the policy beside MultiConnector, which is not ours to change."""
    child = {"kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry.vllm"}
    children = [{**child, "kv_role": "kv_both", "kv_connector_extra_config": {}}]
    monkeypatch.setattr(sys, "argv", ["vllm"])
    with caplog.at_level("INFO", logger="kvferry"):
        engine = make("m", policy="fail", children=children)
    assert not engine.scheduler.recompute_kv_load_failures
    assert "kv_load_failure_policy is 'fail'" in caplog.text and LINE not in caplog.text
    caplog.clear()
    make("n", policy="recompute", children=children)
    monkeypatch.setattr(sys, "argv", ["vllm", "--kv-transfer-config.kv_load_failure_policy=fail"])
    make("o", policy="fail", children=children)
    assert "kv_load_failure_policy" not in caplog.text
    assert names_policy(sys.argv)
