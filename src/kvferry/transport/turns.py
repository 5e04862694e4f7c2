"""Large tables are worked on by one thread at a time.

NumPy lets go of the interpreter's lock in every call that has much to do. Threads that prepare a
table each would then wait for each other at every single call, and all of them would be late; one
after another, the first is done, and on its way, while the others have not begun.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager

MANY = 1 << 11  # rows: what takes NumPy longer than it takes to get the interpreter's lock back

_turn = threading.Lock()
_none: AbstractContextManager[object] = contextlib.nullcontext()


def turn(rows: int) -> AbstractContextManager[object]:
    """To be held while a table of so many rows is prepared, and no longer."""
    return _turn if rows >= MANY else _none
