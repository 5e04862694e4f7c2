"""One case with real engines: prompts are handed over, caches and answers are compared.

What the decode engine holds after a hand-over is compared with what the prefill engine held, a
digest a layer, component, head and token, looked at without our layouts (tests/support); then the
tokens with those of one engine alone. Neither may be another prompt's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from matrix.cases import SHAPES, Case
from real_pairs import call, probed, require_same_cache, seen
from tiny_models import TINY, WINDOW, make_model
from vllm_engines import Engine, free_port, hand_over
from vllm_pairs import ids, mooncake_decode, mooncake_prefill, prompt, reaches, started

LENGTHS = (40, 700)  # tokens: less than one block, and several
HEAD = 200  # tokens that the decode engine has computed already, where the case says so
OUTPUT = 8
BYTES_ONLY = ("mla",)  # the CPU build's decode and prefill disagree by themselves
ARGUMENTS = {
    "mla": ["--attention-backend", "CPU_MLA"],
    "granite": ["--no-enable-prefix-caching"],
}
SECONDS = {"lease_seconds": 120.0, "load_seconds": 120.0}


def run_case(case: Case, out: Path) -> str:
    """What was shown; an AssertionError where something differs."""
    model = out / "models" / case.architecture
    if not (model / "config.json").exists():
        make_model(model, TINY[case.architecture])
    bootstrap = free_port()
    prefill = _engine(case, "prefill", case.prefill, case.prefill_block, bootstrap, model, out)
    decode = _engine(case, "decode", case.decode, case.decode_block, 0, model, out)
    try:
        for engine in started(prefill, decode):
            call(engine, "watch_cache")
        for tokens in LENGTHS:
            _compare(case, prefill, decode, bootstrap, tokens)
    finally:
        prefill.stop()
        decode.stop()
    return "bytes" if case.architecture in BYTES_ONLY else "bytes, tokens"


def _engine(
    case: Case, role: str, shape: str, block: int, bootstrap: int, model: Path, out: Path
) -> Engine:
    tp, pp = SHAPES[shape]
    connector: dict[str, Any] = {**SECONDS, "carriers": [case.carrier], "mode": case.mode}
    if case.style == "mooncake" and bootstrap:
        connector["bootstrap_port"] = bootstrap
    log = out / "logs" / f"{case.name}-{role}.log"
    engine = Engine(role, model, log, tp=tp, pp=pp, block_size=block, connector=connector)
    engine.arguments += ARGUMENTS.get(case.architecture, [])
    return probed(engine)


def _compare(case: Case, prefill: Engine, decode: Engine, bootstrap: int, tokens: int) -> None:
    asked, other = prompt(tokens, tokens), prompt(tokens + 1, tokens)
    head = min(HEAD, tokens // 2) if case.prefix == "part" else 0
    if head:
        decode.complete(asked[:head], max_tokens=1)
    answers, caches = [], []
    for number, one in enumerate((asked, other)):
        name = f"{case.name}-{tokens}-{number}"
        answers.append(ids(_hand_over(case, prefill, decode, bootstrap, name, one)))
        (held,), (loaded,) = seen(prefill), seen(decode)
        # what the decode engine computed may be rounded otherwise: ranks add up in another order
        computed = head if number == 0 else 0
        assert require_same_cache(held, loaded, max(0, tokens - WINDOW), computed) > 0
        caches.append(loaded)
    assert caches[0] != caches[1], "two prompts leave the same cache"
    if case.architecture not in BYTES_ONLY:
        assert answers[0] == ids(prefill.complete(asked, max_tokens=OUTPUT)), f"{tokens} tokens"
        assert answers[0] != answers[1], "two prompts have the same answer"


def _hand_over(
    case: Case, prefill: Engine, decode: Engine, bootstrap: int, name: str, asked: list[int]
) -> dict[str, Any]:
    if case.style == "nixl":
        return hand_over(prefill, decode, asked, max_tokens=OUTPUT)
    with ThreadPoolExecutor(1) as pool:  # the decode engine first: it must wait for the other
        params = mooncake_decode(name, bootstrap, prefill.name)
        answer = pool.submit(decode.complete, asked, max_tokens=OUTPUT, kv_transfer_params=params)
        assert reaches(lambda: decode.metric("vllm:num_requests_waiting") > 0, True)
        prefill.complete(asked, max_tokens=1, kv_transfer_params=mooncake_prefill(name))
        return answer.result(SECONDS["load_seconds"])
