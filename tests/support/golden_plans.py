"""What `kvferry plan --json` says for every preset and many pairs of shapes, as kept in fixtures.

`make golden-plans` writes the fixtures again; read the difference before you commit it.
`digests.json` has a digest for each preset and case, or the error's name where the pair is refused.
The plans in FULL are also kept in full, so that a change can be read.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from typer.main import get_command

from kvferry.cli.main import app
from kvferry.errors import KvferryError
from kvferry.layout.hf import presets

FOLDER = Path(__file__).parents[1] / "fixtures" / "plans"
COMMAND = get_command(app)  # once: it takes longer to make than most plans
TOKENS = 8500  # longer than every window and chunk, and not a whole number of blocks
CASES = (
    "--from tp=1 --to tp=1",
    "--from tp=2 --to tp=8",
    "--from tp=8 --to tp=2",
    "--from tp=3 --to tp=2",
    "--from tp=16 --to tp=4",
    "--from pp=2,tp=2 --to tp=4",
    "--from tp=2 --to pp=3",
    "--from tp=2,block=16 --to tp=2,block=48",
    "--from block=64,kernel=16 --to block=32",
    "--from order=LBHNC --to tp=2,order=LBNHC",
    "--from tp=2,order=LHBNC --to order=BHLNC",
    "--from order=BLHNC --to tp=2,order=BLNHC",
    "--from tp=2,interior=split --to interior=planes",
    "--from interior=cpu --to tp=2",
    "--from conv=DS --to tp=2,conv=SD",
    "--from tp=16,dcp=2 --to tp=2",
    "--from tp=2 --to tp=8,dcp=4,interleave=8",
    "--from align=512,overlay=1 --to tp=2",
    "--from tp=2,full=1 --to tp=1",
    "--from tp=4 --to tp=2 --skip 4096 --contiguous",
    "--from tp=4 --to tp=2,draft_tp=1 --draft-layers 1 --cache-dtype fp8_e4m3 --link 400Gbit",
)
FULL = {
    "llama-3.1-8b": CASES[1],
    "deepseek-v3.2": CASES[15],
    "gemma-3-27b": CASES[6],
    "gpt-oss-20b": CASES[10],
    "qwen3-next-80b": CASES[14],
    "llama-4-maverick": CASES[19],
}


def plan(model: str, case: str) -> dict[str, Any] | str:
    """The plan, or the name of the error that refuses it."""
    words = f"plan --json --model {model} --tokens {TOKENS} {case}".split()
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            COMMAND.main(words)
        except SystemExit as ended:
            status, refusal = ended.code, _refusal(ended)
    if status == 0:
        made: dict[str, Any] = json.loads(out.getvalue())
        del made["notes"]  # words
        return made
    assert status == 2 and refusal is not None, err.getvalue()
    return type(refusal).__name__


def _refusal(ended: BaseException) -> KvferryError | None:
    """The error of ours for which a command ended. The command shows its message alone."""
    cause: BaseException | None = ended
    while cause is not None and not isinstance(cause, KvferryError):
        cause = cause.__context__
    return cause


def digest(made: dict[str, Any] | str) -> str:
    if isinstance(made, str):
        return made
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]


def digests(model: str) -> dict[str, str]:
    return {case: digest(plan(model, case)) for case in CASES}


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    kept = {model: digests(model) for model in presets()}
    (FOLDER / "digests.json").write_text(json.dumps(kept, indent=1) + "\n")
    for model, case in FULL.items():
        (FOLDER / f"{model}.json").write_text(json.dumps(plan(model, case), indent=1) + "\n")


if __name__ == "__main__":
    write()
