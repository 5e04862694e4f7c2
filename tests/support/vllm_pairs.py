"""Pairs of real engines for tests: prompts, life cycle, requests as proxies send them."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_engines import Engine

if TYPE_CHECKING:
    from kvferry.vllm.config import FerryConfig, Style
    from kvferry.vllm.producing import HandoverParts

USAGE = "vllm:kv_cache_usage_perc"
OURS = {"kv_connector_module_path": "kvferry.vllm"}
STARTED = r"kvferry: (engine|rank) .*(?:offers its caches|carriers) .*"
IN_VLLMS_FORMAT = re.compile(
    rf"^\([^()]+ pid=(\d+)\) INFO \d\d-\d\d [\d:]+ \[\w+\.py:\d+\] {STARTED}$", re.M
)


def handover_parts(style: Style, config: FerryConfig | None = None, **others: Any) -> HandoverParts:
    """What a scheduler's two directions share, without an engine and without traces."""
    from kvferry.pool.weights import Adapters
    from kvferry.vllm.config import FerryConfig
    from kvferry.vllm.fingerprint import Prompts
    from kvferry.vllm.producing import HandoverParts, PrefillCut

    spans: Any = SimpleNamespace(begin=lambda *_, **__: None, end=lambda *_: None)
    made = {"cut": PrefillCut(), "prompts": Prompts(), "adapters": Adapters(), **others}
    return HandoverParts(config or FerryConfig(), style, spans, **made)


class AllArrived:
    """In place of a renewer: every hold is open at its producer."""

    def __init__(self) -> None:
        self.watched: set[str] = set()

    def watch(self, ticket: Any, *, early: bool = False) -> None:
        self.watched.add(ticket.hold_id)

    def drop(self, hold_id: str) -> None:
        self.watched.discard(hold_id)

    def arrived(self, hold_id: str) -> bool:
        return True


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + i * (37 + seed)) % 500 + 3 for i in range(tokens)]


def ids(answer: Mapping[str, Any]) -> list[list[int]]:
    assert "choices" in answer, answer
    return [choice["token_ids"] for choice in answer["choices"]]


def started(*engines: Engine) -> list[Engine]:
    """Start engines at once; end all of them if one does not come up."""
    try:
        for engine in engines:
            engine.start()
        return [engine.wait_ready() for engine in engines]
    except BaseException:
        for engine in engines:
            engine.kill()
        raise


def settled(engine: Engine, seconds: float = 60.0) -> bool:
    """Whether all blocks of an idle engine come back; small requests keep it stepping."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        engine.complete(prompt(999, 5), max_tokens=1)
        if engine.metric(USAGE) == 0:
            return True
        time.sleep(0.3)
    return False


def reaches(question: Any, wanted: Any, seconds: float = 30.0) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if question() == wanted:
            return True
        time.sleep(0.1)
    return False


def post(
    url: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON of a POST."""
    data = json.dumps(body).encode() if body is not None else b""
    headers = {"Content-Type": "application/json", **(headers or {})}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=120
        ) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")


class StartLine(NamedTuple):
    pid: int
    what: str


def start_lines(log: str) -> list[StartLine]:
    """What our schedulers and workers say as they start; all of it must be in vLLM's format."""
    found = [StartLine(int(pid), what) for pid, what in IN_VLLMS_FORMAT.findall(log)]
    assert len(found) == len(re.findall(STARTED, log)), log[-4000:]
    return found


# Exactly what vLLM's example proxies send.


def toy_proxy_prefill() -> dict[str, Any]:
    """tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def mooncake_prefill(transfer_id: str) -> dict[str, Any]:
    """examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py"""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def mooncake_decode(transfer_id: str, bootstrap: int, engine_id: str) -> dict[str, Any]:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://127.0.0.1:{bootstrap}",
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }


def push_decode(request_id: str, engine_id: str, port: int) -> dict[str, Any]:
    """examples/disaggregated/disaggregated_serving/disagg_proxy_pushconnector_demo.py"""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": engine_id,
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "tp_size": 1,
        "pp_size": 1,
        "remote_request_id": request_id,
    }
