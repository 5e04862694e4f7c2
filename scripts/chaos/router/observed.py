"""`kvferry router` as a user starts it; SIGUSR1 writes which tasks its event loop has.

python observed.py FILE router ...
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from kvferry.cli.main import app

FILE = Path(sys.argv.pop(1))


def write_tasks(*_: object) -> None:
    """On the main thread, between two steps of the event loop."""
    names = Counter(str(getattr(t.get_coro(), "__qualname__", "?")) for t in asyncio.all_tasks())
    part = FILE.with_suffix(".part")
    part.write_text(json.dumps({"process": os.getpid(), "tasks": names}))
    part.rename(FILE)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, write_tasks)
    app()
