"""Which carrier two engines would use, from the reports of their hosts; also this host's own.

A report is what `kvferry doctor --json` prints. Its findings say what works there, and why what
does not; its `host` what they leave out: `boot` and `pid_namespace` tell one host from another,
`carriers` and `libraries` what was configured (`--carriers`, `--options`), `protocol` which
messages are spoken. The first of the two is the consumer, who chooses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cli import tries_gpu
from kvferry.cli.asked import Asked
from kvferry.cli.checks import Finding
from kvferry.cli.picks import Way, as_configured, pick, usual_options
from kvferry.errors import DescriptionError
from kvferry.transport.auto import AUTO, ENGINES, Selected, select

HERE = "here"
CUDA_IPC = tries_gpu.WHAT
MEMORY, GPU = "host memory", "caches on GPUs"
WORKS_BY = {"local": "process_vm_readv", "tcp": "loopback tcp", "cuda": "CUDA"}
OTHER_HOST = "the peer runs on another host"
OTHER_NAMESPACE = "the peer runs in another pid namespace (container)"


@dataclass(frozen=True, slots=True)
class Host:
    """A report, as far as the choice of a carrier goes."""

    name: str
    boot: str
    pid_namespace: str
    findings: dict[str, dict[str, str]]  # by name
    asked: Asked
    libraries: dict[str, dict[str, str]]  # configured ones: flavour
    protocol: int | None

    @classmethod
    def of(cls, report: dict[str, Any], whose: str) -> Host:
        """`DescriptionError` where that is no report."""
        try:
            host = report["host"]
            findings = {str(f["name"]): f for f in reversed(report["findings"])}
            for finding in findings.values():
                finding["state"], finding["found"]  # must be there
            libraries = dict(host.get("libraries", {}))
            return cls(
                str(host["name"]),
                str(host["boot"]),
                str(host["pid_namespace"]),
                findings,
                Asked(tuple(host.get("carriers", (AUTO,))), {name: {} for name in libraries}),
                {name: dict(facts) for name, facts in libraries.items()},
                host.get("protocol"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DescriptionError(
                f"{whose} is no report of `kvferry doctor --json` ({error!r}); run that on the "
                'other host and copy its output. "here" stands for this host'
            ) from None

    @property
    def version(self) -> str:
        return self.findings.get("kvferry", {}).get("found", "").partition(",")[0]

    @property
    def has_gpu(self) -> bool:
        return self.findings.get(WORKS_BY["cuda"], {}).get("state") == "ok"

    def why_not(self, name: str) -> str:
        """Why a carrier does not work on that host; empty where it does."""
        found = self.findings.get(WORKS_BY.get(name, f"loopback {name}"))
        if name == "cuda" and self.has_gpu:
            found = self.findings.get(CUDA_IPC, found)
        if found is None:
            unknown = self.findings.get("two processes", {}).get("found", "it was not tried")
            return "it is not installed" if name in ENGINES else unknown
        return "" if found["state"] == "ok" else found["found"] or "it does not work"

    def selected(self, gpu: bool) -> list[Selected]:
        return select(self.asked.wanted(gpu), device=gpu, configured=tuple(self.asked.options))


def load_host(path: str, own: dict[str, Any]) -> Host:
    """A report of `kvferry doctor --json`; "here" is the one that is being made."""
    if path == HERE:
        return Host.of(own, HERE)
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise DescriptionError(
            f"{path} is no report of `kvferry doctor --json` ({error}); run that on the other host "
            'and copy its output. "here" stands for this host'
        ) from None
    return Host.of(found, path)


def picked_here(here: Host, rdma: list[str]) -> Iterator[Finding]:
    """Between two engines of this host, and which carriers only wait for their options."""
    section = AUTO if here.asked.is_auto else "picked"
    yield from _picked(section, "", here, here)
    if not here.asked.is_auto:
        return
    for name in ENGINES:
        if name not in here.asked.options and not here.why_not(name):
            options = as_configured(name, usual_options(name, rdma))
            advice = f"for auto to open it, on both engines: {options}"
            said = "works here, and is not used: it has no carrier_options"
            yield Finding(section, name, "info", said, advice)


def pick_between(here: Host, there: Host) -> Iterator[Finding]:
    """What the first of two engines would use to fetch from the second."""
    names = f"{here.name} and {there.name}"
    yield from _versions(names, here, there)
    yield from _picked("between", f"{names}: ", here, there)


def _versions(names: str, here: Host, there: Host) -> Iterator[Finding]:
    said = f"kvferry {here.version} and {there.version}"
    if None not in (here.protocol, there.protocol) and here.protocol != there.protocol:
        said += f", protocol {here.protocol} and {there.protocol}: they refuse each other"
        yield Finding("between", f"{names}: versions", "broken", said, "install one version")
    elif here.version != there.version:
        advice = "install one version: nobody has tried these two together"
        yield Finding("between", f"{names}: versions", "missing", said, advice)


def _picked(section: str, names: str, here: Host, there: Host) -> Iterator[Finding]:
    for gpu, what in ((False, MEMORY), (True, GPU)):
        without = [h.name for h in (here, there) if gpu and not h.has_gpu]
        if without:
            said = f"no GPU on {' and '.join(dict.fromkeys(without))}"
            yield Finding(section, names + what, "info", said)
            continue
        if not gpu and any("cuda" in h.asked.carriers for h in (here, there)):
            said = "engines that name cuda have their caches on GPUs"
            yield Finding(section, names + what, "info", said)
            continue
        ways, left_out = ways_between(here, there, gpu)
        found = pick(ways, left_out, in_order=not here.asked.is_auto)
        if not found.name:
            advice = "make one of these work on both, or name another one in `carriers`"
            yield Finding(section, names + what, "broken", found.said, advice)
            continue
        yield Finding(section, names + what, "ok", found.said, _advice(here, there, gpu))


def ways_between(here: Host, there: Host, gpu: bool) -> tuple[list[Way], list[Selected]]:
    """Carriers that the first opens, with what stands in their way, and those that it does not."""
    left_out = [one for one in here.selected(gpu) if one.why_not]
    theirs = {one.name: one.why_not for one in there.selected(gpu)}
    ways = []
    for chosen in here.selected(gpu):
        if chosen.why_not:
            continue
        name = chosen.name
        reason = theirs.get(name, f"{there.name} does not name it in `carriers`")
        why = f"{there.name} does not offer it: {reason}" if reason else ""
        detour = ""
        if not why:
            why, detour = _way(name, here, there)
        flavour = here.libraries.get(name, {}).get("flavour", "")
        ways.append(Way(name, flavour, not reason, why, detour))
    return ways, left_out


def _way(name: str, here: Host, there: Host) -> tuple[str, str]:
    """Why a carrier that both open does not reach the other host, or why only by a detour."""
    apart = OTHER_HOST if here.boot != there.boot else ""
    own = _on_both(name, here, there)
    if name == "cuda":
        return apart or own, ""
    if name == "local":
        if not apart and here.pid_namespace != there.pid_namespace:
            apart = OTHER_NAMESPACE
        detour = apart or own
        no_tcp = _on_both("tcp", here, there)
        return (f"{detour}, and by tcp: {no_tcp}", "") if detour and no_tcp else ("", detour)
    if name in ENGINES and not own:
        mine, other = (host.libraries.get(name, {}).get("flavour", "") for host in (here, there))
        if mine != other:
            return f"the peer's uses {other or 'another'}, this one {mine or 'another'}", ""
    return own, ""


def _on_both(name: str, here: Host, there: Host) -> str:
    for host in (here, there):
        if why := host.why_not(name):
            return why if here.name == there.name else f"on {host.name}: {why}"
    return ""


def _advice(here: Host, there: Host, gpu: bool) -> str:
    if here.boot != there.boot:
        return (
            "the network between them was not tried: `kvferry doctor --peer HOST:PORT` does. Both "
            "engines need the same secret, and a `host` that the other one reaches"
        )
    if here.pid_namespace != there.pid_namespace:
        if gpu:
            return "containers must share their IPC namespace (--ipc=host)"
        return "for local, containers must share their pid namespace (--pid=host)"
    return ""
