"""Names for LoRA adapters: by what their files hold, so that one trained anew is another one.

An engine loads an adapter's files when it pleases: at its start, when it is told to, with the first
request, and again when too many others pushed it out. Nobody tells which files those were, so an
adapter has a name only where they can have been no others:

- neither its files nor its folder nor a link to it have changed since the engine started, or the
  files are the Hub's, whose names are digests of what they hold. Otherwise the operator must say
  that they are `final`;
- the same number stands for the same folder, and it is as it was when first seen;
- it is not loaded in place, which means anew with every step.

Requests with any other adapter are computed, and kept out of the pool; each reason is logged once.
Files may still change after the answer, before the engine loads them: unless they are final, it
comes with what saves must find unchanged (`adapter_files`).
Files are read by a thread of its own. Who asks never waits, and gives up at a deadline.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.pool.adapter_files import CONFIGURATION, AdapterFiles, Stamp, stamp_of, this_host
from kvferry.pool.weights import weight_revision

log = logging.getLogger("kvferry")

NOBODYS = ""  # the name of an adapter whose blocks are not for the pool
CLOCK_SECONDS = 2.0  # file systems' clocks are coarse, and those of file servers differ


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a request says of its adapter."""

    number: int
    path: str
    in_place: bool = False
    options: str = ""  # whatever else changes how its files are read

    @classmethod
    def of(cls, lora: Any) -> Adapter:
        """Of vLLM's request for one."""
        return cls(
            int(lora.lora_int_id),
            str(lora.lora_path),
            bool(getattr(lora, "load_inplace", False)),
            "3d" if getattr(lora, "is_3d_lora_weight", False) else "",
        )


class Asked:
    """A question for an adapter's name."""

    __slots__ = ("adapter", "answer", "deadline")

    def __init__(self, adapter: Adapter, deadline: float) -> None:
        self.adapter, self.deadline = adapter, deadline
        self.answer: Named | None = None  # written once, by the thread

    @property
    def name(self) -> str | None:
        """None: ask again."""
        answer = self.answer
        if answer is None:
            return NOBODYS if time.monotonic() >= self.deadline else None
        return answer.name

    @property
    def files(self) -> AdapterFiles | None:
        """What the name stands for as long as it is unchanged; None: for ever."""
        return self.answer.files if self.answer is not None else None


@dataclass(frozen=True, slots=True)
class Named:
    name: str
    files: AdapterFiles | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    adapter: Adapter
    stamp: Stamp
    name: str
    final: bool


class Adapters:
    """The names of one engine's adapters.

    settings    of the engine, that change what adapters compute
    final       the operator's word that files never change
    outcome     of requests whose adapter has no name, for the log
    started_at  of the engine, by the clock of files
    """

    def __init__(
        self,
        settings: str = "",
        *,
        final: bool = False,
        started_at: float | None = None,
        outcome: str = "are kept out of the pool",
    ) -> None:
        self._settings, self._final, self._outcome = settings, final, outcome
        self._started_at = time.time() if started_at is None else started_at
        self._known: dict[int, _Known] = {}
        self._told: set[tuple[int, str]] = set()
        self._questions: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, adapter: Adapter, seconds: float) -> Asked:
        asked = Asked(adapter, time.monotonic() + seconds)
        if self._thread is None:  # a daemon: a file server that hangs must not keep a process
            thread = threading.Thread(target=self._serve, name="kvferry-lora", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # the next request tries again
                self._tell(adapter, str(error))
                asked.answer = Named(NOBODYS)
                return asked
            self._thread = thread
        self._questions.put(asked)
        return asked

    def close(self) -> None:
        self._questions.put(None)

    def _serve(self) -> None:
        while (asked := self._questions.get()) is not None:
            if time.monotonic() >= asked.deadline:
                continue  # whoever asked has given up
            try:
                asked.answer = self._name(asked.adapter)
            except Exception as error:  # whatever files come up with: other adapters ask, too
                self._tell(asked.adapter, str(error))
                asked.answer = Named(NOBODYS)

    def _name(self, adapter: Adapter) -> Named:
        if adapter.in_place:
            raise DescriptionError("it was loaded in place, and vLLM reads its files in every step")
        stamp = stamp_of(adapter.path)
        known = self._known.get(adapter.number)
        if known is None:
            known = self._known[adapter.number] = self._read(adapter, stamp)
        if known.adapter != adapter or not known.stamp.holds(stamp):
            raise DescriptionError(
                f"its number, {adapter.number}, was first used for {known.adapter.path}, and with "
                "other files: nobody knows which of them the engine has loaded; load changed "
                "weights under a new name"
            )
        known = self._known[adapter.number] = replace(known, stamp=stamp)  # the latest sight of it
        files = None if known.final else AdapterFiles(adapter.path, stamp, this_host())
        return Named(known.name, files)

    def _read(self, adapter: Adapter, stamp: Stamp) -> _Known:
        path = Path(adapter.path).expanduser()
        revision = weight_revision(str(path))
        late = stamp.changed_at > self._started_at - CLOCK_SECONDS
        final = self._final or revision.startswith("hub ")
        if late and not final:
            raise DescriptionError(
                "its files changed after the engine's start, which may have loaded them before; "
                "restart the engine, or set lora_files_final if adapters' files never change once "
                "they are written"
            )
        digest = blake2b((path / CONFIGURATION).read_bytes(), digest_size=16)
        for told in (revision, self._settings, adapter.options):
            digest.update(f"\n{len(told)} {told}".encode())
        if not stamp.holds(stamp_of(adapter.path)):
            raise DescriptionError("its files change while they are read")
        return _Known(adapter, stamp, digest.hexdigest(), final)

    def _tell(self, adapter: Adapter, why: str) -> None:
        if (adapter.number, why) not in self._told:
            self._told.add((adapter.number, why))
            log.warning(
                "requests with the LoRA adapter of %s %s: %s",
                adapter.path,
                self._outcome,
                why,
            )
