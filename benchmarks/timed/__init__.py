# SPDX-License-Identifier: Apache-2.0
"""How long a connector keeps an engine's step: its calls, timed from outside.

`timed(Connector)` is the same connector. It adds up the time of its calls within a step, and keeps
the longest step in a small file, which the benchmark reads and clears. In the scheduler's process,
a step ends with `build_connector_meta`; in a worker's, with `clear_connector_metadata`. The time
includes waiting for the interpreter's lock within a call: other threads of the connector may hold
it. `python -m benchmarks.handover` measures every connector like this.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

FILE = "KVFERRY_BENCH_TIMES"  # the environment's name for the file
FREE = "benchmark_free"  # the parameter of a request of which nothing is loaded: see `ours`
STEP_ENDS = ("build_connector_meta", "clear_connector_metadata")
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


class Times:
    """The seconds of the longest step, in a shared file."""

    FORM = struct.Struct("d")

    def __init__(self, path: Path) -> None:
        if not path.exists() or path.stat().st_size < self.FORM.size:
            path.write_bytes(bytes(self.FORM.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self.FORM.size)
        self._step = 0.0
        self._depth = 0

    def longest(self) -> float:
        (longest,) = self.FORM.unpack(self._memory)
        return float(longest)

    def clear(self) -> None:
        self._memory[:] = bytes(self.FORM.size)

    def time(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depth:  # part of a call that is timed already
            return call(*args, **kwargs)
        self._depth = 1
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._step += time.perf_counter() - start
            self._depth = 0
            if name in STEP_ENDS:
                self.FORM.pack_into(self._memory, 0, max(self.longest(), self._step))
                self._step = 0.0


_times: Times | None = None


def _of_this_process() -> Times:
    """All processes of an engine share the file; what two write at once may be lost, once."""
    global _times
    if _times is None:
        _times = Times(Path(os.environ[FILE]))
    return _times


def timed(connector: type[Any]) -> type[Any]:
    """The connector under its own name, with its calls timed."""

    def wrapped(name: str) -> Callable[..., Any]:
        original = getattr(connector, name)

        @wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _of_this_process().time(name, original, self, *args, **kwargs)

        return call

    calls = {name: wrapped(name) for name in CALLS if hasattr(connector, name)}
    return type(connector.__name__, (connector,), calls)
