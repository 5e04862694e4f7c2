# SPDX-License-Identifier: Apache-2.0
"""Sources of engines beside the command line: a file, and names that DNS resolves.

Each engine has one source (`EngineSpec.source`). A source lists its engines, and `reconcile` adds,
changes and drains engines until the fleet agrees. Engines of other sources stay as they are. An
engine that an operator drained to stay is not taken back.

The event loop reads files (`WatchedFile`) every `reload_seconds`, without inotify, so it also
notices a file that is replaced, mounted anew or linked elsewhere. A file that cannot be used is
refused with the reason in the log, and its former contents stay in force. It is tried again at each
look, because the reason may be another source. At the start, the router ends instead.

Names (`dns://host:port`) are resolved every `dns_seconds`; each address is an engine. A name that
cannot be resolved keeps its engines; probes find out whether they live.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from kvferry.errors import DescriptionError, KvferryError
from kvferry.router.api import EngineSpec, Limits
from kvferry.router.fleet.connections import addresses
from kvferry.router.fleet.engines import Fleet
from kvferry.router.keys import warn_if_readable

log = logging.getLogger(__name__)
Resolve = Callable[[str], Awaitable[Iterable[str]]]
_OPTIONS = {
    "fleet": "--fleet",
    "api_keys": "--api-keys",
    "engine_key": "--engine-key-file",
}
# The fields of an engine that a file or the admin API may set; the router sets the source.
SPEC_FIELDS = frozenset(field.name for field in fields(EngineSpec)) - {"source"}


def read_spec(said: Any, source: str) -> EngineSpec:
    """An engine from decoded JSON or TOML. Raises DescriptionError."""
    if not isinstance(said, dict):
        raise DescriptionError(f"an engine must be an object with url and roles, not {said!r:.80}")
    if unknown := set(said) - SPEC_FIELDS:
        raise DescriptionError(
            f"an engine has no {', '.join(sorted(map(repr, unknown)))[:200]}; it may have "
            f"{', '.join(sorted(SPEC_FIELDS))}"
        )
    if "@" in str(said.get("url")):
        said = {"url": "@", "roles": ["decode"]}  # a secret, which no message may repeat
    try:
        return msgspec.convert(said | {"source": source}, EngineSpec)
    except msgspec.ValidationError as error:
        raise DescriptionError(
            f"the engine {said.get('url')!r:.80} is not right: {error}"
        ) from None


def reconcile(fleet: Fleet, source: str, wanted: Sequence[EngineSpec]) -> None:
    """Make the engines of one source those in `wanted`; on an error, change nothing."""
    urls = Counter(spec.url for spec in wanted)
    for url, count in urls.items():
        if count > 1:
            raise DescriptionError(f"the engine {url} is named {count} times by {source}")
        there = fleet.get(url)
        if there is not None and there.spec.source != source and there.draining != "remove":
            raise DescriptionError(
                f"the engine {url} is named by {there.spec.source} and by {source}; name it once"
            )
    for spec in wanted:
        engine = fleet.get(spec.url)
        if engine is None or engine.draining == "remove":
            fleet.add(spec)
        else:
            fleet.change(engine, spec)
    for engine in fleet.engines:
        if engine.spec.source == source and engine.url not in urls:
            fleet.drain(engine, then="remove")


class Sources:
    """All files and names of one router, and the task that looks at them."""

    def __init__(self, fleet: Fleet, limits: Limits, resolve: Resolve | None = None) -> None:
        self.files: list[WatchedFile] = []
        self.names = DnsNames(fleet, limits, resolve or addresses)
        self._fleet = fleet
        self._limits = limits

    def watch(
        self, name: str, path: Path, use: Callable[[bytes], None], *, secret: bool = False
    ) -> None:
        """Read a file now, which may raise DescriptionError, and again when it changes."""
        file = WatchedFile(name, path, use)
        try:
            file.read()
        except DescriptionError as error:
            raise DescriptionError(f"{_OPTIONS[name]}: {error}") from None
        if secret:
            warn_if_readable(path)
        self.files.append(file)

    def watch_fleet(self, path: Path) -> None:
        source = str(path)

        def use(data: bytes) -> None:
            specs = read_fleet(data, path)
            names = [spec for spec in specs if spec.is_name]
            engines = [spec for spec in specs if not spec.is_name]
            others = [e.spec for e in self._fleet.engines if e.spec.source != source]
            if not any(
                "decode" in s.roles for s in [*specs, *others, *self.names.of_others(source)]
            ):
                raise DescriptionError(f"{path} leaves no decode engine; name one at least")
            every = Counter(spec.url for spec in [*names, *self.names.of_others(source)])
            if twice := [url for url, count in every.items() if count > 1]:
                raise DescriptionError(
                    f"{twice[0]} is named more than once; name it once, with its roles"
                )
            reconcile(self._fleet, source, engines)
            self.names.use(source, names)

        self.watch("fleet", path, use)

    async def run(self) -> None:
        """Look at the files and names until cancelled."""
        await asyncio.gather(
            self._every(self._limits.reload_seconds, self._look),
            self._every(self._limits.dns_seconds, self.names.refresh),
        )

    async def _look(self) -> None:
        used = [file.look() for file in self.files]
        if any(used):
            await self.names.refresh()

    async def _every(self, seconds: float, do: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await do()
            except Exception:  # later changes must be noticed all the same
                log.exception("looking for changes broke")


class WatchedFile:
    """A file whose contents are used again whenever they change."""

    def __init__(self, name: str, path: Path, use: Callable[[bytes], None]) -> None:
        self.name = name  # for metrics
        self.path = path
        self.used = 0  # contents that were used
        self.refused = 0
        self.problem = ""  # why the last contents are not used
        self._use = use
        self._digest = b""  # of the last contents, also if they were refused

    def read(self) -> None:
        """Use the contents, if they are new or were refused. Raises DescriptionError."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            self._digest = b""
            raise DescriptionError(f"cannot read {self.path}: {error.strerror}") from None
        digest = hashlib.sha256(data).digest()
        if digest == self._digest and not self.problem:
            return
        self._digest = digest
        self._use(data)
        self.used += 1
        self.problem = ""

    def look(self) -> bool:
        """Read the file again. A file that cannot be used changes nothing. Returns whether its
        contents are used anew."""
        used, before = self.used, (self._digest, self.problem)
        try:
            self.read()
        except KvferryError as error:
            self.problem = str(error)
            if (self._digest, self.problem) != before:
                self.refused += 1
                log.error(
                    "the %s file is not used, what it said before stays: %s", self.name, error
                )
        if self.used != used:
            log.info("%s was read again", self.path)
        return self.used != used


def read_fleet(data: bytes, path: Path) -> list[EngineSpec]:
    """The engines of a file: `engines`, a list, in TOML, or in JSON if its name ends so.

    Raises DescriptionError.
    """
    try:
        text = data.decode()
        said = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise DescriptionError(f"{path} cannot be read: {error}") from None
    if not isinstance(said, dict) or set(said) != {"engines"}:
        raise DescriptionError(f"{path} must have `engines`, a list of engines, and nothing else")
    if not isinstance(said["engines"], list):
        raise DescriptionError(f"`engines` of {path} must be a list")
    return [read_spec(one, str(path)) for one in said["engines"]]


class DnsNames:
    """Engines behind names."""

    def __init__(self, fleet: Fleet, limits: Limits, resolve: Resolve) -> None:
        self.failures = 0
        self._fleet = fleet
        self._limits = limits
        self._resolve = resolve
        self._names: dict[str, EngineSpec] = {}  # by URL
        self._problems: dict[str, str] = {}
        self._lookups: dict[str, asyncio.Future[Iterable[str]]] = {}  # that take their time

    def use(self, source: str, specs: Sequence[EngineSpec]) -> None:
        """These are the names of one source from now on."""
        named = {spec.url: spec for spec in specs}
        for url in [u for u, spec in self._names.items() if spec.source == source]:
            if url not in named:
                del self._names[url]
                self._problems.pop(url, None)
                reconcile(self._fleet, url, [])
        self._names |= named

    def of_others(self, source: str) -> list[EngineSpec]:
        return [spec for spec in self._names.values() if spec.source != source]

    async def refresh(self) -> None:
        """Resolve all names, and update the fleet."""
        await asyncio.gather(*(self._refresh(spec) for spec in self._names.values()))

    async def _refresh(self, spec: EngineSpec) -> None:
        host, _ = spec.name_and_port()
        lookup = self._lookups.get(spec.url)
        if lookup is None:
            lookup = self._lookups[spec.url] = asyncio.ensure_future(self._resolve(host))
            lookup.add_done_callback(lambda done: self._lookups.pop(spec.url, None))
        try:
            # A lookup cannot be stopped. The next one waits for it, so there is one for each name.
            found = await asyncio.wait_for(asyncio.shield(lookup), self._limits.connect_seconds)
            now = self._names.get(spec.url)
            if now is None:  # no longer named
                return
            self._apply(now, sorted(set(found)))
            self._problems.pop(spec.url, None)
        except (OSError, TimeoutError, UnicodeError, KvferryError) as error:
            self.failures += 1
            problem = str(error) or "no answer in time"
            if self._problems.get(spec.url) != problem:
                self._problems[spec.url] = problem
                log.error("%s keeps its engines: %s", spec.url, problem)

    def _apply(self, spec: EngineSpec, found: list[str]) -> None:
        if not found:
            raise DescriptionError("it has no address")
        wanted = []
        for address in found:
            one = spec.at(address)
            there = self._fleet.get(one.url)
            if there is None or there.spec.source == spec.url or there.draining == "remove":
                wanted.append(one)  # else it has another source, which keeps it
        reconcile(self._fleet, spec.url, wanted)
