"""Which carrier an engine would use to reach another one, and why.

`carriers.auto` itself makes the choice: which carriers an engine opens, in which order it tries
them, and which one it takes. It gets `Tried` objects in place of carriers. These were tried on this
host, on the hosts of two reports (`kvferry doctor --json`), or with a rank of a peer.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvferry import __version__
from kvferry.carriers.auto import AUTO, ENGINES, connect, fastest_first, select
from kvferry.cli.doctor.checks import Finding, Settings, State, cuda, read_text
from kvferry.cli.doctor.tries import HERE, Tried, as_configured
from kvferry.errors import DescriptionError, KvferryError
from kvferry.net.messages import VERSION

FOREVER = float("inf")
OTHER_HOST = "the peer runs on another host"


class Host(msgspec.Struct, frozen=True):
    """The facts of a host on which the choice of a carrier depends."""

    name: str
    boot: str  # the same for all containers of a host
    pid_namespace: str
    kvferry: str
    protocol: int
    gpu: bool
    carriers: list[str]  # as configured
    configured: list[str]  # those with carrier_options
    tried: dict[str, Tried]

    @classmethod
    def here(cls, settings: Settings, tried: dict[str, Tried]) -> Host:
        return cls(
            name=socket.gethostname(),
            boot=read_text(Path("/proc/sys/kernel/random/boot_id")),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
            kvferry=__version__,
            protocol=VERSION,
            gpu=cuda().state == "ok",
            carriers=list(settings.carriers),
            configured=list(settings.options),
            tried=tried,
        )

    def opens(self, gpu: bool) -> dict[str, str]:
        """By carrier, in the order of the configuration: why it stays closed, or an empty text."""
        names = ["cuda" if gpu and name == "local" else name for name in self.carriers]
        chosen = select(list(dict.fromkeys(names)), device=gpu, configured=self.configured)
        return {one.name: one.why_not for one in chosen}


def load_host(path: str) -> Host | None:
    """The host of a report; None for "here"."""
    if path == HERE:
        return None
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
        return msgspec.convert(found.get("host"), Host)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise DescriptionError(
            f"{path} is no report of this version's `kvferry doctor --json` ({error}); run that on "
            'the other host and copy its output. "here" stands for this host'
        ) from None


def between(here: Host, there: Host) -> Iterator[Finding]:
    """The choice of an engine on the first host that reads from one on the second."""
    names = f"{here.name} and {there.name}: "
    if here.kvferry != there.kvferry or here.protocol != there.protocol:
        said = " and ".join(f"kvferry {h.kvferry} (protocol {h.protocol})" for h in (here, there))
        state: State = "missing" if here.protocol == there.protocol else "broken"
        advice = "install one version; with two protocols they refuse each other"
        yield Finding(names + "versions", state, said, advice)
    yield from for_each_memory(here, there, names)


def choose(what: str, host: Host, gpu: bool, reach: Mapping[str, Tried], advice: str) -> Finding:
    """The carrier that an engine of `host` uses. `reach`: how each offered carrier reaches it."""
    opens = host.opens(gpu)
    ways: list[Any] = [  # in place of carriers, for `carriers.auto`
        reach.get(name, Tried(name, "the peer does not offer it"))
        for name, closed in opens.items()
        if not closed
    ]
    if host.carriers == [AUTO]:
        ways = list(fastest_first(ways))
    out = {way.name: way.why_not or way.detour for way in ways}
    out |= {name: closed for name, closed in opens.items() if closed}
    unused = [n for n in ENGINES if opens.get(n) and n in reach and not reach[n].why_not]
    lines = [f"for auto to open {n}, on both: {as_configured(reach[n])}" for n in unused]
    advice = "; ".join(filter(None, [advice, *lines]))
    try:
        taken: Any = connect({way.name: b"" for way in ways}, ways, FOREVER)[0]
    except KvferryError:
        said = f"no carrier reaches it ({_reasons(out)})"
        advice = advice or "make one of these work on both, or name another one in `carriers`"
        return Finding(what, "broken", said, advice)
    detour = out.pop(taken.name)
    said = taken.name + (f", by tcp: {detour}" if detour else "")
    later = [way.name for way in ways if out.get(way.name) == ""]
    if later:
        said += f"; else {', then '.join(later)}"
    if any(out.values()):
        said += f"; ruled out: {_reasons(out)}"
    return Finding(what, "ok", said, advice)


def _reasons(out: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in out.items() if why)


def for_each_memory(here: Host, there: Host, names: str = "") -> Iterator[Finding]:
    """The choice for host memory, and for GPUs if both hosts have them.

    An engine that names cuda has its cache on GPUs only.
    """
    advice = ""
    if here.boot != there.boot:
        advice = (
            "the network between them was not tried: `kvferry doctor --peer HOST:PORT` does. Both "
            "engines need the same secret, and a `host` that the other one reaches"
        )
    elif here.pid_namespace != there.pid_namespace:
        advice = "containers must share their namespaces: --pid=host for local, --ipc=host for cuda"
    named = "cuda" in (*here.carriers, *there.carriers)
    kinds = {"host memory": not named, "caches on GPUs": named or (here.gpu and there.gpu)}
    for what in (kind for kind, exists in kinds.items() if exists):
        gpu = what != "host memory"
        reach = {name: _way(name, here, there, gpu) for name in here.tried}
        yield choose(names + what, here, gpu, reach, advice)


def _way(name: str, here: Host, there: Host, gpu: bool) -> Tried:
    """How a carrier reaches the second host from the first, from the tries on each host."""
    closed = there.opens(gpu).get(name, "it is not among its `carriers`")
    if closed and not here.opens(gpu).get(name):
        return Tried(name, f"{there.name} does not offer it: {closed}")
    mine, theirs = here.tried[name], there.tried.get(name, Tried(name, "it was not tried"))
    if here is there:
        return mine
    failed = [(h.name, t.why_not) for h, t in ((here, mine), (there, theirs)) if t.why_not]
    why = "; ".join(f"on {name}: {reason}" for name, reason in failed)
    if not why and mine.flavour != theirs.flavour:
        why = f"{there.name} uses {theirs.flavour}, {here.name} {mine.flavour}"
    detour = mine.detour or theirs.detour
    if name == "local" and here.pid_namespace != there.pid_namespace:
        detour = "the peer runs in another pid namespace (container)"
    if here.boot != there.boot:
        why = OTHER_HOST if name == "cuda" else why
        detour = OTHER_HOST if name == "local" else detour
    return msgspec.structs.replace(mine, why_not=why, detour=detour)
