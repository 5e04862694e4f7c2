"""Programs in processes of their own, which are forks of one Python that has imported a store.

A Python that starts anew takes half a second of processor time for these imports alone. A program
here may die in any way, as it may in a Python of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO


@dataclass(frozen=True, slots=True)
class Ended:
    status: int  # negative: the signal that ended it
    complaints: str


@dataclass(frozen=True, slots=True)
class Forks:
    _server: subprocess.Popen[str]
    _complaints: IO[str]

    def run(self, program: str, *arguments: str, seconds: int = 300) -> Ended:
        """The end of a program, which its own alarm ends after that many seconds."""
        assert self._server.stdin and self._server.stdout
        begin = self._complaints.seek(0, os.SEEK_END)
        self._server.stdin.write(json.dumps([program, arguments, seconds]) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        self._complaints.seek(begin)
        return Ended(status, self._complaints.read())


@contextmanager
def forks() -> Iterator[Forks]:
    with (
        TemporaryFile("w+", errors="replace") as complaints,
        subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        ) as server,
    ):
        try:
            yield Forks(server, complaints)
        finally:
            server.kill()


def main() -> None:
    import signal

    import pool_lines  # noqa: F401  # what programs import is here already

    for line in sys.stdin:
        program, arguments, seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)
            os.dup2(2, 1)
            status = 1
            try:
                sys.argv = ["-c", *arguments]
                exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            sys.exit(status)  # as any Python ends
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main()
