"""vLLM's own example proxies, from a checkout of vLLM, before engines without a model.

The checkout is given by path (KVFERRY_VLLM_CHECKOUT). Nothing of a proxy is changed or copied: it
runs as a process, and talks HTTP to two engines with vLLM's scheduler and our connectors. Skipped
where there is no checkout; requests built exactly as the proxies send them are in test_dropin.py
and test_lifecycle.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    from modelless import Modelless, expected
    from modelless_front import Front

from tiny_models import make_model
from vllm_engines import free_port
from vllm_pairs import post

CHECKOUT = os.environ.get("KVFERRY_VLLM_CHECKOUT", "")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not CHECKOUT, reason="needs a checkout at KVFERRY_VLLM_CHECKOUT"),
]
PROXIES = {
    "NixlConnector": "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
    "MooncakeConnector": "examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py",
    "NixlPushConnector": "examples/disaggregated/disaggregated_serving/"
    "disagg_proxy_pushconnector_demo.py",
}


@pytest.fixture(params=list(PROXIES))
def proxied(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Front, Front, int]]:
    """Prefill and decode engine, and the port of a proxy before them."""
    kind, bootstrap, side, port = request.param, free_port(), free_port(), free_port()
    folder = make_model(tmp_path / "tiny")
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(bootstrap))
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(side))
    p = Front(Modelless("p", folder, connector=kind))
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(free_port()))
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
    d = Front(Modelless("d", folder, connector=kind, blocks=128, block_size=8))
    arguments = {
        "NixlConnector": f"--prefiller-host 127.0.0.1 --prefiller-port {p.port} "
        f"--decoder-host 127.0.0.1 --decoder-port {d.port}",
        "MooncakeConnector": f"--prefill http://127.0.0.1:{p.port} {bootstrap} "
        f"--decode http://127.0.0.1:{d.port}",
        "NixlPushConnector": f"--model tiny --prefill 127.0.0.1:{p.port} "
        f"--decode 127.0.0.1:{d.port} --prefill-engine-id p --prefill-kv-host 127.0.0.1 "
        f"--prefill-side-channel-port {side}",
    }[kind]
    script = Path(CHECKOUT) / PROXIES[kind]
    command = [sys.executable, str(script), "--port", str(port), *arguments.split()]
    proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            assert proxy.poll() is None, "the proxy ended"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=5).close()
                break
            except OSError:
                time.sleep(0.3)
        yield p, d, port
    finally:
        proxy.terminate()
        proxy.wait(20)
        p.close()
        d.close()


def test_behind_vllm_proxies(proxied: tuple[Front, Front, int]) -> None:
    p, d, port = proxied
    for seed, count in ((1, 20), (2, 200), (3, 64)):
        tokens = [(seed * 131 + i * 17) % 997 for i in range(count)]
        deadline = time.monotonic() + 60
        while True:  # a proxy may still be looking for its engines
            body = {"model": "tiny", "prompt": tokens, "max_tokens": 5}
            status, answer = post(f"http://127.0.0.1:{port}/v1/completions", body)
            if status == 200 or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == expected(tokens, 5)
    assert sum(d.engine.told("loads")) == 3  # all of them were loaded
    deadline = time.monotonic() + 20
    while p.engine.used_blocks and time.monotonic() < deadline:
        time.sleep(0.05)
    assert p.engine.used_blocks == d.engine.used_blocks == 0
