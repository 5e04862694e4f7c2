"""LoRA adapters by what their files hold: the pool's keys and a hand-over's tickets know them so.

An adapter's *digest* covers its weights (see `weights`), its `adapter_config.json`, and the
settings of the engine that change what it computes. The scheduler's process takes it once, when the
engine first serves the adapter, and it stands until the engine ends. Copies of the files have the
same digest. Name and number are no part of it: on another engine they may mean other files.
Files that change in place under a running engine, or that differ between its hosts, are the
operator's mistake.

vLLM knows an adapter by its number. It keeps the files that it first loaded under a number, unless
a request says to load them in place, which it then does in every step. So these adapters have no
digest, and the caches of their requests are not shared:

- an adapter that is loaded in place;
- all adapters of a number that has come with two paths: vLLM may have loaded either;
- an adapter whose path is not a folder with weights and configuration on this machine.

Each reason is logged once. One thread reads files; schedulers never wait for it.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.pool.weights import weight_files, weight_revision

log = logging.getLogger("kvferry")

NOT_SHARED = ""  # in place of a digest: the caches of this adapter's requests stay on this engine
CONFIGURATION = "adapter_config.json"  # rank, scale and targets: they change what is computed


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a request of vLLM says of its adapter."""

    number: int
    path: str
    name: str = field(default="", compare=False)  # for people
    in_place: bool = False
    options: str = ""  # whatever else changes how its files are read

    @classmethod
    def of(cls, lora: Any) -> Adapter:
        return cls(
            int(lora.lora_int_id),
            str(lora.lora_path),
            str(lora.lora_name),
            bool(getattr(lora, "load_inplace", False)),
            "3d" if getattr(lora, "is_3d_lora_weight", False) else "",
        )


@dataclass(slots=True, eq=False)
class _Reading:
    """The first adapter that came under a number."""

    adapter: Adapter
    digest: str | None = None  # None until the thread has read the files
    mixed: bool = False  # another adapter has come under the number


@dataclass(frozen=True, slots=True)
class Asked:
    """One request's question for the digest of its adapter."""

    adapter: Adapter
    _reading: _Reading
    _deadline: float

    @property
    def digest(self) -> str | None:
        """None: ask again."""
        if self._reading.mixed:
            return NOT_SHARED
        digest = self._reading.digest
        return NOT_SHARED if digest is None and time.monotonic() >= self._deadline else digest

    @property
    def unknown(self) -> str:
        """Why there is no digest, for clients, who need not know where files are."""
        return (
            f"it is not known which files its LoRA adapter {self.adapter.name!r:.100} was loaded "
            "from; the log of this engine has the reason"
        )


class Adapters:
    """The adapters of one engine.

    settings  of the engine, that change what adapters compute (`adapter_settings`)
    outcome   for requests whose adapter has no digest, for the log
    """

    def __init__(self, settings: str = "", outcome: str = "are kept out of the pool") -> None:
        self._settings, self._outcome = settings, outcome
        self._readings: dict[int, _Reading] = {}  # by number
        self._told: set[tuple[int, str]] = set()
        self._queue: queue.SimpleQueue[_Reading | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, request: Any, seconds: float = math.inf) -> Asked | None:
        """What adapter a request of vLLM has; None: it has none.

        Every request must come here when it arrives, shared or not: the first one of a number
        decides which files the number stands for.

        seconds  after which an adapter that is still being read counts as `NOT_SHARED`
        """
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        adapter = Adapter.of(lora)
        reading = self._readings.get(adapter.number)
        if reading is not None and reading.adapter != adapter:
            reading.mixed = True
            self._tell(
                adapter,
                f"its number, {adapter.number}, was first used for {reading.adapter.path}, and "
                "vLLM may have loaded either; load other weights under a new name",
            )
        elif reading is None or reading.digest == NOT_SHARED:  # what failed is tried again
            reading = self._readings[adapter.number] = _Reading(adapter)
            self._begin(reading)
        return Asked(adapter, reading, time.monotonic() + seconds)

    def close(self) -> None:
        self._queue.put(None)

    def _begin(self, reading: _Reading) -> None:
        if self._thread is None:  # a daemon: a file server that hangs must not keep a process
            thread = threading.Thread(target=self._serve, name="kvferry-lora", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # the next request tries again
                self._tell(reading.adapter, str(error))
                reading.digest = NOT_SHARED
                return
            self._thread = thread
        self._queue.put(reading)

    def _serve(self) -> None:
        while (reading := self._queue.get()) is not None:
            try:
                reading.digest = self._digest(reading.adapter)
            except Exception as error:  # whatever files come up with: other adapters ask, too
                self._tell(reading.adapter, str(error))
                reading.digest = NOT_SHARED

    def _digest(self, adapter: Adapter) -> str:
        if adapter.in_place:
            raise DescriptionError("it was loaded in place, and vLLM reads its files in every step")
        path = Path(adapter.path).expanduser()
        if not path.is_dir() or not weight_files(path):
            raise DescriptionError(
                "it is no folder with weights on this machine, so that nothing tells which it has; "
                "download it, and load it from there"
            )
        digest = blake2b((path / CONFIGURATION).read_bytes(), digest_size=16)
        for told in (weight_revision(str(path)), self._settings, adapter.options):
            digest.update(f"\n{len(told)} {told}".encode())
        return digest.hexdigest()

    def _tell(self, adapter: Adapter, why: str) -> None:
        if (adapter.number, why) not in self._told:
            self._told.add((adapter.number, why))
            log.warning(
                "requests with the LoRA adapter of %s %s: %s", adapter.path, self._outcome, why
            )


def adapter_settings(vllm_config: Any) -> str:
    """What of an engine's settings changes the values that an adapter's files give."""
    lora = getattr(vllm_config, "lora_config", None)
    names = ("lora_dtype", "target_modules", "enable_moe_shared_loras")
    return "" if lora is None else repr([(n, getattr(lora, n, None)) for n in names])
