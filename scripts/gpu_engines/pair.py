"""An engine's process, as the harness sees it: started, called with deadlines, ended."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu_engines.engine import Answer, Answers, Ask
from gpu_engines.entries import Entries
from vllm_engines import ENVIRONMENT

COMMAND = (sys.executable, str(Path(__file__).resolve().parent))  # this package
RESET_SECONDS = 40.0  # longer than a lease: what a failed check left behind is gone then
STOP_SECONDS = 5.0
OURS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineLost(Exception):
    """An engine's process has ended, or does not answer: nothing more can be asked of it."""


class EngineError(Exception):
    """A call failed in the engine's process."""


@dataclass
class Remembered:
    """What an engine's cache held; see `probe`."""

    held: dict[str, Entries]
    loaded: dict[str, Entries]
    pool_loaded: dict[str, Entries]
    failed: list[str]


class Engine:
    """One engine. `deadline` (monotonic) bounds every wait."""

    def __init__(
        self,
        name: str,
        log: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        deadline: float,
        call_seconds: float,
    ) -> None:
        self.name, self.log, self.deadline = name, log, deadline
        self.told: dict[str, Any] = {}
        self._call_seconds = call_seconds
        self._pipe: Connection
        self._pipe, theirs = Pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*COMMAND, "--engine", str(theirs.fileno())],
                env={**os.environ, **ENVIRONMENT, **OURS, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        theirs.close()
        self._pipe.send(dict(options))

    def wait_ready(self, seconds: float) -> None:
        self.told = self._receive(seconds, "start")

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        return self._receive(self._call_seconds + 5, method)

    def _receive(self, seconds: float, what: str) -> Any:
        until = min(self.deadline, time.monotonic() + seconds)
        try:
            while not self._pipe.poll(0.2):
                if time.monotonic() > until:
                    raise EngineLost(f"{self.name}: no answer to {what!r} in time")
                if self._process.poll() is not None and not self._pipe.poll(0):
                    raise EngineLost(f"{self.name}: ended with {self._process.returncode}")
            status, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise EngineLost(f"{self.name}: its process has ended ({what!r})") from error
        if status != "ok":
            if what == "start":
                raise EngineLost(f"{self.name} did not start: {_reason(value)}")
            raise EngineError(f"{self.name}, {what}: {_reason(value)}")
        return value

    def ask(self, *asked: Ask) -> Answers:
        answers: Answers = self.call("ask", list(asked), self._call_seconds)
        return answers

    def one(self, prompt: list[int], **options: Any) -> Answer:
        return self.ask(Ask(prompt, **options)).answers[0]

    def reset(self) -> None:
        self.call("reset", RESET_SECONDS)

    def settled(self, seconds: float) -> None:
        left = self.call("settle", seconds)
        assert not left, f"{self.name}: {left} blocks are still in use after {seconds:g} s"

    def remembered(self) -> Remembered:
        return Remembered(**self.call("take_remembered"))

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def leave(self) -> None:
        """Ask the process to end."""
        with contextlib.suppress(OSError):
            self._pipe.send(("stop", ()))

    def stop(self) -> None:
        """Wait until it has ended, for a moment, and end it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._process.kill()
        self._process.wait(STOP_SECONDS)
        self._pipe.close()


def _reason(trace: str) -> str:
    """The message of a traceback, which may have several lines."""
    lines = trace.strip().splitlines()
    starts = [
        i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)
    ]
    return " ".join(lines[starts[-1] if starts else -1 :])[:500]
