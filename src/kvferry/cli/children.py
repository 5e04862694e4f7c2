"""Questions that a process of its own answers: a carrier's library may end it as it likes.

The question goes in as JSON on standard input, since it may hold a secret; the answer comes as one
marked line of standard output, which belongs to the library otherwise. A process that does not
answer is told by its own last words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from kvferry.errors import KvferryError

SAID = "kvferry doctor: "
WORDS = 300  # of a process that died, at most: characters


class NoAnswer(KvferryError):
    """What the other process said instead of an answer, or how it ended."""


def ask(module: str, question: dict[str, Any], seconds: float) -> Any:
    """What `module.answer(question)` returns, in another process."""
    code = f"from kvferry.cli import children, {module}; children.reply({module}.answer)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer within {seconds:g} s") from None
    found = read_reply(done.stdout)
    if found is None:
        raise NoAnswer(f"the process that tried it ended by {ending(done.returncode, done.stderr)}")
    return found


def reply(answer: Callable[[dict[str, Any]], Any]) -> None:
    """The program of that process."""
    say(lambda: answer(json.load(sys.stdin)))
    os._exit(0)  # whatever the library's threads do


def say(answer: Callable[[], Any]) -> bool:
    """Print an answer, or why there is none; whether there is one."""
    try:
        words = {"answer": answer()}
    except KvferryError as error:
        words = {"error": str(error)}
    except Exception as error:  # a library's own
        words = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + SAID + json.dumps(words), flush=True)
    return "answer" in words


def read_reply(text: str) -> Any | None:
    """None where the process did not come to one; `NoAnswer` where it says why."""
    said = [line for line in text.splitlines() if line.startswith(SAID)]
    if not said:
        return None
    words = json.loads(said[-1].removeprefix(SAID))
    if "error" in words:
        raise NoAnswer(words["error"])
    return words["answer"]


def ending(code: int | None, stderr: str) -> str:
    """How a process ended, and its last words."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = f": {lines[-1][-WORDS:]}" if lines else ""
    how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
    return how + last
