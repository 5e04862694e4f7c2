"""The owner in test_nixl_notes.py, a program: it asks for its notes, and says of each what its
memory held when it came."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from kvferry.carriers import MemoryRegion, make_carrier

BYTES = 2 << 20


def main() -> None:
    memory = np.zeros(BYTES, dtype=np.uint8)
    carrier: Any = make_carrier("nixl")
    carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    print(memory.ctypes.data, carrier.endpoint().hex(), flush=True)
    for line in sys.stdin:
        count, seconds = json.loads(line)
        until, heard = time.monotonic() + seconds, []
        while len(heard) < count and time.monotonic() < until:
            for note in carrier.notes():
                counts = np.bincount(memory)
                held = {str(value): int(counts[value]) for value in np.flatnonzero(counts)}
                heard.append((note.hex(), held))
        print(json.dumps(heard), flush=True)


if __name__ == "__main__":
    main()
