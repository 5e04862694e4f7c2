# SPDX-License-Identifier: Apache-2.0
"""Names for weights and LoRA adapters. Caches are shared only between engines with equal names.

**Weights.** The name is the first of these that is known:

    named      the operator's `weight_revision`
    hub        a repository of the Hub and its commit, also for a snapshot in the Hub's cache
    files      a digest of the files. Up to 256 MiB they are read whole, like those of LoRA
               adapters. For larger ones the digest covers each file's size, and the SHA-256 that
               the Hub's client noted when it downloaded the file. Without that note, it covers the
               time of the last change, the table of contents, and samples
    unknown    a random name: the engine shares with no other engine, nor with itself after a
               restart

**LoRA adapters.** An adapter's *digest* covers its weights, its `adapter_config.json`, and the
engine's settings that change what it computes. The scheduler's process takes it once, when the
engine first serves the adapter. Name and number are not in it: on another engine they may mean
other files. vLLM knows an adapter by its number, and keeps the files that it first loaded under it.
So these adapters have no digest, and the caches of their requests are not shared:

- an adapter that is loaded in place: vLLM reads its files in every step;
- all adapters of a number that has come with two paths: vLLM may have loaded either;
- an adapter whose path is not a folder with weights and configuration on this machine.

Each reason is logged once. One thread reads files, and schedulers never wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, BinaryIO

from kvferry.errors import DescriptionError, KvferryError
from kvferry.workers import Threads

log = logging.getLogger("kvferry")

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLE_BYTES = 4096
SAMPLE_EVERY_BYTES = 1 << 20  # or further apart, so that there are at most
MOST_SAMPLES = 1 << 15  # in all files: seconds, even with a round trip to a file server for each
THREADS = 8
MOST_HEADER_BYTES = 100 << 20
WHOLE_BYTES = 256 << 20  # files of up to this size in all are read whole, in tenths of a second
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def engine_weights(vllm_config: Any, configured: str = "") -> str:
    """The name of the model's weights, and of its draft model's if that has its own."""
    model = vllm_config.model_config
    name = weight_revision(
        str(model.model),
        configured,
        commit=_commit(model),
        elsewhere=bool(getattr(model, "model_weights", "")),
    )
    if configured:
        return name
    if str(getattr(getattr(vllm_config, "load_config", None), "load_format", "")) == "dummy":
        name = f"dummy {name}"
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        name += f" with draft {weight_revision(str(draft.model), commit=_commit(draft))}"
    return name


def _commit(config: Any) -> str:
    """The commit to which vLLM resolved a branch's name at its start; a branch itself moves."""
    revision = getattr(config, "revision", None)
    commit = getattr(revision, "resolved", revision)
    return commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else ""


def weight_revision(
    model: str, configured: str = "", *, commit: str = "", elsewhere: bool = False
) -> str:
    """The name of a model's weights; see the module.

    commit     of the Hub, for a model that is a repository's name and not a path
    elsewhere  the weights are not beside the model's configuration
    """
    if configured:
        return f"named {configured}"
    path = Path(model)
    files = weight_files(path)
    if elsewhere:
        files, commit = [], ""
    if files:
        snapshot = hub_snapshot(path)
        if snapshot is not None and all(_blob(file) is not None for file in files):
            return f"hub {snapshot[0]} {snapshot[1]}"
        return f"files {_digest(files)}"
    if commit and not path.exists():
        return f"hub {model} {commit}"
    log.warning(
        "kvferry cannot tell which weights %s has: no other engine will find what this engine "
        "saves in the pool, nor will this one after a restart; name them with `weight_revision`",
        model,
    )
    return f"unknown {secrets.token_hex(16)}"


def weight_files(path: Path) -> list[Path]:
    """The files of weights in a folder, or the one file that a path names."""
    if path.is_file():
        return [path]
    return sorted(file for pattern in PATTERNS for file in path.glob(pattern))


def hub_snapshot(path: Path) -> tuple[str, str] | None:
    """Repository and commit of a folder in the Hub's cache."""
    parts = path.absolute().parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not _COMMIT.fullmatch(parts[-1]):
        return None
    kind, *name = parts[-3].split("--")
    return ("/".join(name), parts[-1]) if kind == "models" and name else None


def _blob(file: Path) -> str | None:
    """The name of a blob in the Hub's cache: a digest of its content."""
    if not file.is_symlink():
        return None
    target = file.resolve()
    return target.name if target.parent.name == "blobs" and target.is_file() else None


def _noted(file: Path) -> str | None:
    """The SHA-256 that the Hub's client noted for a download, if the file is unchanged since."""
    note = file.parent / ".cache/huggingface/download" / f"{file.name}.metadata"
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, digest, when = note.read_text().split()[:3]
        stat = file.stat()
        # Other weights may have been copied there with an older mtime (`cp -p`, `rsync -t`). The
        # ctime cannot be set, and shows that.
        changed = max(stat.st_mtime, stat.st_ctime)
        if _SHA256.fullmatch(digest) and changed - 1 <= float(when):
            return digest
    return None


def _digest(files: Sequence[Path]) -> str:
    digest = blake2b(digest_size=16)
    with ThreadPoolExecutor(THREADS, "kvferry-weights") as threads:
        if sum(file.stat().st_size for file in files) <= WHOLE_BYTES:
            for file, content in zip(files, threads.map(_content, files), strict=True):
                digest.update(f"{file.name} {content}\n".encode())
            return digest.hexdigest()
        unknown = []
        for file in files:
            content = _blob(file) or ""
            if not _SHA256.fullmatch(content):
                content = _noted(file) or ""
            digest.update(f"{file.name} {file.stat().st_size} {content}\n".encode())
            if not content:
                unknown.append(file)
        total = sum(file.stat().st_size for file in unknown)
        apart = max(SAMPLE_EVERY_BYTES, total // MOST_SAMPLES)
        for file in unknown:
            digest.update(f"{file.name} {int(file.stat().st_mtime)}\n".encode())
            with file.open("rb") as opened:
                for part in _samples(opened, apart, threads):
                    digest.update(part)
    return digest.hexdigest()


def _content(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, lambda: blake2b(digest_size=32)).hexdigest()


def _samples(opened: BinaryIO, apart: int, threads: ThreadPoolExecutor) -> Iterator[bytes]:
    """The table of contents of a safetensors file (names, shapes, offsets), and digests of samples
    of any file."""
    fd = opened.fileno()
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    if opened.name.endswith(".safetensors"):
        size = int.from_bytes(os.pread(fd, 8, 0), "little")
        yield os.pread(fd, min(size, MOST_HEADER_BYTES), 8)
    last = max(0, os.fstat(fd).st_size - SAMPLE_BYTES)
    places = [*range(0, last, apart), last]

    def sample(share: int) -> bytes:
        digest = blake2b(digest_size=16)
        for place in places[share::THREADS]:
            digest.update(os.pread(fd, SAMPLE_BYTES, place))
        return digest.digest()

    yield from threads.map(sample, range(THREADS))


# LoRA adapters

NOT_SHARED = ""  # in place of a digest: the caches of this adapter's requests stay on this engine
CONFIGURATION = "adapter_config.json"  # has rank, scale and targets, which change the results


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a vLLM request."""

    number: int
    path: str
    name: str = field(default="", compare=False)  # for messages
    in_place: bool = False
    options: str = ""  # other options that change how its files are read

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
        """Why there is no digest. Clients read this, so it names no paths."""
        return (
            f"it is not known which files its LoRA adapter {self.adapter.name!r:.100} was loaded "
            "from; the log of this engine has the reason"
        )


class Adapters:
    """The adapters of one engine with these `adapter_settings`."""

    def __init__(self, settings: str = "") -> None:
        self._settings = settings
        self._readings: dict[int, _Reading] = {}  # by number
        self._told: set[tuple[int, str]] = set()
        self._threads = Threads("kvferry-lora", 1)

    def ask(self, request: Any, seconds: float = math.inf) -> Asked | None:
        """Ask for the adapter of a vLLM request, when it arrives; None if it has none. The first
        request of a number decides which files the number stands for.

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
        elif reading is None or reading.digest == NOT_SHARED:  # after a failure, read again
            reading = self._readings[adapter.number] = _Reading(adapter)
            try:
                self._threads.submit(partial(self._read, reading))
            except KvferryError as error:  # the next request tries again
                self._tell(adapter, str(error))
                reading.digest = NOT_SHARED
        return Asked(adapter, reading, time.monotonic() + seconds)

    def close(self) -> None:
        self._threads.close()

    def _read(self, reading: _Reading) -> None:
        try:
            reading.digest = self._digest(reading.adapter)
        except Exception as error:  # a later request reads the files again
            self._tell(reading.adapter, str(error))
            reading.digest = NOT_SHARED

    def _digest(self, adapter: Adapter) -> str:
        if adapter.in_place:
            raise DescriptionError("it was loaded in place, and vLLM reads its files in every step")
        path = Path(adapter.path).expanduser()
        if not path.is_dir() or not weight_files(path):
            raise DescriptionError(
                "it is not a folder with weights on this machine, so its files are unknown; "
                "download it, and load it from a folder"
            )
        digest = blake2b((path / CONFIGURATION).read_bytes(), digest_size=16)
        for told in (weight_revision(str(path)), self._settings, adapter.options):
            digest.update(f"\n{len(told)} {told}".encode())
        return digest.hexdigest()

    def _tell(self, adapter: Adapter, why: str) -> None:
        if (adapter.number, why) not in self._told:
            self._told.add((adapter.number, why))
            log.warning(
                "requests with the LoRA adapter of %s are not shared: %s", adapter.path, why
            )


def adapter_settings(vllm_config: Any) -> str:
    """The engine's settings that change what an adapter computes."""
    lora = getattr(vllm_config, "lora_config", None)
    names = (
        "lora_dtype",
        "target_modules",
        "enable_moe_shared_loras",
        "enable_tower_connector_lora",  # the encoder of media is adapted too
    )
    return "" if lora is None else repr([(n, getattr(lora, n, None)) for n in names])
