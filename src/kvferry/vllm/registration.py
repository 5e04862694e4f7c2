"""Keeps the bootstrap of another engine told of this one: a data-parallel rank without its own.

Ranks start in any order, and the one that serves the bootstrap may come late or come again; so this
goes on, on a thread of its own, and neither an engine's start nor its reset waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from kvferry.errors import KvferryError
from kvferry.vllm.bootstrap import register

log = logging.getLogger("kvferry")

AGAIN_SECONDS = 1.0  # after a failure
REFRESH_SECONDS = 30.0  # the server may have restarted, and then knows nothing


class Registration:
    def __init__(self, server: str, dp_rank: int, secret: str | None, seconds: float) -> None:
        """`seconds` is for one attempt."""
        self._to = (server, dp_rank)
        self._secret, self._seconds = secret, seconds
        self._entry: Mapping[str, Any] = {}
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvferry-register", daemon=True)

    def tell(self, entry: Mapping[str, Any]) -> None:
        """What the server is to know from now on."""
        self._entry = entry
        self._changed.set()
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def _run(self) -> None:
        pause, failed = 0.0, False
        while True:
            self._changed.wait(pause)
            self._changed.clear()
            if self._closed:
                return
            server, dp_rank = self._to
            try:
                register(server, dp_rank, self._entry, self._secret, self._seconds)
            except Exception as error:  # whatever it is: nobody else would register this rank
                if not failed:
                    log.warning(
                        "kvferry: requests by transfer id cannot reach data-parallel rank %d until "
                        "it has registered, which is tried again and again: %s",
                        dp_rank,
                        error,
                        exc_info=None if isinstance(error, KvferryError) else error,
                    )
                pause, failed = AGAIN_SECONDS, True
            else:
                if failed:
                    log.info("kvferry: data-parallel rank %d is registered at %s", dp_rank, server)
                pause, failed = REFRESH_SECONDS, False
