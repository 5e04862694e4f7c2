"""The router's fleet changes before real engines: keys, roles, draining, restarts, taking over.

While streams run, the decode engine is drained and restarted, the prefill engine gets a second
role, and a new router takes over. Every token is that of an engine alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

import httpx

from router_process import RouterProcess
from tiny_models import llama_config, make_model
from vllm_engines import Engine
from vllm_pairs import prompt, started
from waiting import wait_until

pytestmark = pytest.mark.matrix
STREAMS = 6
SHORT, LONG = 8, 1500  # tokens of an answer; a long one takes many seconds
TOKEN, CLIENT_KEY, ENGINE_KEY = "token-of-this-test", "key-of-a-client", "key-of-the-engines"


def ask(url: str, number: int, tokens: int, key: str, stream: bool = False) -> httpx.Response:
    body = {
        "model": "tiny",
        "prompt": prompt(number, 150 + number),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    headers = {"Authorization": f"Bearer {key}"}
    where = f"{url}/v1/completions"
    return httpx.post(where, json=body, headers=headers, timeout=240, trust_env=False)


def ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["token_ids"]
    *events, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    said = [json.loads(event.removeprefix("data: ")) for event in events]
    return [token for event in said for token in event["choices"][0]["token_ids"]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    folder = tmp_path_factory.mktemp("operations")
    make_model(folder / "tiny", llama_config(num_hidden_layers=2))
    made = []
    for name, block in (("a", 32), ("b", 64)):
        engine = Engine(name, folder / "tiny", folder / f"{name}.log", block_size=block)
        engine.connector = {"lease_seconds": 15.0, "load_seconds": 60.0}
        engine.arguments = ["--api-key", ENGINE_KEY]
        made.append(engine)
    a, b = started(*made)
    with a, b:
        yield a, b


def test_engines_and_routers_come_and_go(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    for name, secret in (("token", TOKEN), ("keys", CLIENT_KEY), ("engine", ENGINE_KEY)):
        (tmp_path / name).write_text(secret)
        (tmp_path / name).chmod(0o600)
    a, b = engines
    right = {n: ids(ask(a.url, n, LONG, ENGINE_KEY)) for n in range(STREAMS)}
    assert len({tuple(r[:SHORT]) for r in right.values()}) == STREAMS  # or a mix-up would not show
    more = ["--token-file", str(tmp_path / "token"), "--api-keys", str(tmp_path / "keys")]
    more += ["--engine-key-file", str(tmp_path / "engine")]
    more += ["--place", "load"]  # by cost, an idle decode engine computes by itself
    limits = {"drain_seconds": 240.0, "probe_every_seconds": 0.5}
    router = RouterProcess([a, b], limits, None, more=more)
    url = f"http://127.0.0.1:{router.port}"

    def fleet(*arguments: str) -> str:
        command = [sys.executable, "-m", "kvferry", "router", *arguments, "--router", url]
        command += ["--token-file", str(tmp_path / "token")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def check(number: int, path: str) -> None:
        answer = ask(url, number, SHORT, CLIENT_KEY)
        assert ids(answer) == right[number][:SHORT]
        assert answer.headers["x-kvferry-path"] == path

    def in_flight(of: Engine) -> int:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        said = httpx.get(f"{url}/admin/engines", headers=headers, trust_env=False).json()["engines"]
        return next(engine["in_flight"] for engine in said if engine["url"] == of.url)

    try:
        assert ask(url, 0, SHORT, "another-key").status_code == 401
        assert ask(url, 0, SHORT, ENGINE_KEY).status_code == 401
        with ThreadPoolExecutor(STREAMS) as pool:

            def streams() -> list[Future[httpx.Response]]:
                begun = [pool.submit(ask, url, n, LONG, CLIENT_KEY, True) for n in range(STREAMS)]
                wait_until(lambda: in_flight(b) == STREAMS, 60)
                return begun

            check(1, "prefill+decode")
            running = streams()
            fleet("change", a.url, "--role", "prefill", "--role", "decode")
            assert "draining" in fleet("drain", b.url, "--stay")
            check(2, "decode-only")  # by a, which hands over to nobody
            fleet("drain", b.url, "--stay", "--wait", "200")
            assert [ids(one.result()) for one in running] == list(right.values())
            assert "drained" in fleet("list")

            b.stop()
            b.start().wait_ready()
            fleet("add", b.url, "--role", "decode")
            fleet("change", a.url, "--role", "prefill")
            wait_until(lambda: " up" in fleet("list").split(b.url)[1].splitlines()[0], 60)
            check(3, "prefill+decode")

            running = streams()
            new = RouterProcess([a, b], limits, None, more=[*more, "--take-over"], port=router.port)
            try:
                begun = time.monotonic()
                for number in range(STREAMS):
                    check(number, "prefill+decode")
                print(f"{STREAMS} answers of the new router in {time.monotonic() - begun:.1f} s")
                assert [ids(one.result()) for one in running] == list(right.values())
                assert router.process.wait(30) == 0
                check(1, "prefill+decode")
            finally:
                new.stop()
        assert not any(ENGINE_KEY in line or CLIENT_KEY in line for line in router.log + new.log)
    finally:
        router.stop()
