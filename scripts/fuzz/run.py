"""The command: which parts are sent what share of the frames, and what came of it."""

from __future__ import annotations

import argparse
import importlib
import secrets
import time
import traceback

# Parts by name: the module, and its share of all frames. Files of a store and HTTP requests cost
# a hundred times what a frame costs.
PARTS = {
    "tcp": ("tcp_frames", 0.65),
    "zmq": ("zmq_frames", 0.30),
    "bootstrap": ("bootstrap", 0.02),
    "router": ("router", 0.02),
    "store": ("store", 0.01),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=None, help="sends the same frames again")
    parser.add_argument("--only", default="", help=f"of {','.join(PARTS)}, with commas")
    asked = parser.parse_args()
    names = [name for name in asked.only.split(",") if name] or list(PARTS)
    unknown = sorted(set(names) - set(PARTS))
    if unknown or asked.frames < 1:
        parser.error(f"there is no part {unknown}" if unknown else "--frames is at least 1")
    seed = secrets.randbelow(1 << 31) if asked.seed is None else asked.seed
    whole = sum(PARTS[name][1] for name in names)
    sent, failed = 0, []
    for name in names:
        module, share = PARTS[name]
        frames = max(1, round(asked.frames * share / whole))
        print(f"{name}: {frames:,} frames, seed {seed} ...", flush=True)
        begun = time.monotonic()
        try:
            found = importlib.import_module(f"fuzz.{module}").run(frames, seed)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        sent += frames
        came = ", ".join(f"{count:,} {what}" for what, count in sorted(found.items()))
        print(f"{name}: {came}, in {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{sent:,} frames survived" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0
