"""LoRA adapters of requests that are handed over: both engines know them by what their files hold.

A name is not enough: two engines may have other files under it, and what one computed would be
wrong tokens on the other. So the digest of a ticket holds the adapter's *revision*, the same that
the pool knows it by (`pool.adapters` says which adapters have one, and why others do not). A thread
reads files; whoever asks gets an answer later.

- The prefill engine asks when a request arrives, and looks at the files again when it has ended: if
  they are as they were, the engine can have loaded no others in between. Otherwise it is not held.
- The decode engine asks when a request arrives, and lets it wait for the answer. It looks again
  when vLLM is about to make room, so also after a long time in the queue. If its files are others
  than its ticket's, or changed, it computes the request itself.
- An adapter without a revision, on either side, matches nothing, nor do two without one.

Files mean something on one host: where a worker is elsewhere, it may have loaded others, and there
is no revision, unless files never change (`lora_files_final`, snapshots of the Hub).

A look takes about 0.3 ms, and the scheduler waits for it. A file system that is slow or hangs
stalls it once for `LOOK_SECONDS`; then nothing is handed over, and nobody looks, for a while.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from kvferry.p2p.ticket import prompt_digest
from kvferry.pool.adapter_files import AdapterCheck, AdapterFiles, this_host
from kvferry.pool.adapters import NOBODYS, Adapter, Adapters, Asked
from kvferry.vllm.context_parallel import replicas

DECODE_SECONDS = 2.0  # a request waits for its adapter's first reading; then it is computed
PREFILL_SECONDS = 60.0  # nobody waits
LOOK_SECONDS = 0.25  # of a step, for a look at a few files: far more than it takes
LATE_SECONDS = 10.0  # without looks, after one that took longer
AGAIN_SECONDS = 0.1  # requests that queue are looked at once in this time


@dataclass(slots=True)
class Loras:
    """The adapters of one engine."""

    adapters: Adapters = field(default_factory=lambda: Adapters(outcome="are not handed over"))
    replicas: int = 1  # workers that keep the same cache: only one of them says where it is
    _all_here: bool = False  # all workers see the files that this process sees
    _first: dict[int, Adapter] = field(default_factory=dict)  # by number
    _check: AdapterCheck = field(default_factory=lambda: AdapterCheck("is not handed over"))
    _late_until: float = 0.0

    @classmethod
    def of(cls, vllm_config: Any, *, final: bool) -> Loras:
        settings = lora_settings(vllm_config)
        adapters = Adapters(settings, final=final, outcome="are not handed over")
        return cls(adapters, replicas(vllm_config.parallel_config))

    def workers_at(self, hosts: set[str]) -> None:
        self._all_here = hosts == {this_host()} and self.replicas == 1

    def note(self, request: Any) -> None:
        """Every request, handed over or not: what a number first stood for, workers have loaded."""
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            adapter = Adapter.of(lora)
            self._first.setdefault(adapter.number, adapter)

    def ask(self, request: Any, seconds: float) -> Lora | None:
        """None: the request has no adapter."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        self.note(request)
        adapter = Adapter.of(lora)
        asked = None
        if self._first[adapter.number] == adapter:
            asked = self.adapters.ask(adapter, seconds)
        return Lora(self, asked, str(lora.lora_name))

    def unchanged(self, files: AdapterFiles) -> bool:
        """Whether what was computed until now can be of no other files."""
        now = time.monotonic()
        if now < self._late_until:
            return False
        if not self._all_here:
            files = files.elsewhere()
        same = self._check.unchanged(files, now + LOOK_SECONDS)
        if time.monotonic() >= now + LOOK_SECONDS:
            self._late_until = now + LATE_SECONDS
        return same

    def close(self) -> None:
        self.adapters.close()
        self._check.close()


@dataclass(slots=True)
class Lora:
    """The adapter of one request."""

    loras: Loras
    asked: Asked | None  # None: its number stood for another one before
    name: str  # for people
    _looked: float = 0.0

    def revision(self, fresh_seconds: float = 0.0) -> str | None:
        """What a cache that is computed by now is of. Empty: nobody knows; None: ask again.

        fresh_seconds  a look may be as old as this
        """
        if self.asked is None:
            return NOBODYS
        name, files = self.asked.name, self.asked.files
        if name and files is not None:
            now = time.monotonic()
            if not self._looked or now - self._looked > fresh_seconds:
                if not self.loras.unchanged(files):
                    return NOBODYS
                self._looked = now
        return name

    @property
    def unknown(self) -> str:
        """Why there is no revision, for clients, who need not know where files are."""
        return (
            f"nobody knows from which files its LoRA adapter {self.name!r:.100} was loaded; the "
            "log of this engine has the reason"
        )


def lora_settings(vllm_config: Any) -> str:
    """Of the engine: what changes the values that an adapter's files give."""
    lora = getattr(vllm_config, "lora_config", None)
    names = ("lora_dtype", "target_modules", "enable_moe_shared_loras")
    return "" if lora is None else repr([(n, getattr(lora, n, None)) for n in names])


def adapted(digest: str, revision: str) -> str:
    """The digest of a prompt, with the adapter that computes it."""
    if not revision:
        raise ValueError("an adapter without a revision has no digest")
    return prompt_digest((), (digest, f"lora {revision}"))
