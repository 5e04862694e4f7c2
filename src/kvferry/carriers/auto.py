# SPDX-License-Identifier: Apache-2.0
"""Which carriers an engine has, and which of them it uses for a peer.

`carriers` in the configuration is a list of names, in order of preference, or "auto". With "auto",
an engine opens every carrier that could serve its memory, and a consumer rank tries them, the
fastest first, until one that the peer offers too connects. The log says once per peer which carrier
was chosen, and which were ruled out and why.

    cuda             memory on a GPU
    local            host memory, one host; only where the system permits it
    nixl, mooncake   only if the operator configured their options, which name devices and networks.
                     They come before tcp, because they are configured for a network that tcp cannot
                     use. Mooncake over TCP comes after tcp
    tcp              always
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from kvferry.carriers.base import Carrier
from kvferry.carriers.local import LocalCarrier
from kvferry.carriers.tcp.carrier import TcpCarrier
from kvferry.errors import (
    DeadlineExceeded,
    DescriptionError,
    HandoverError,
    KvferryError,
    TransferError,
    text_of,
)

log = logging.getLogger("kvferry")

AUTO = "auto"
LIBRARIES = ("nixl", "mooncake")
# `kvferry bench transport` measures them. On one host `nixl` is hardly faster than `tcp`; between
# hosts with RDMA it is, and so is Mooncake.
FASTEST_FIRST = ("cuda", "local", "nixl", "mooncake", "tcp", "mooncake over tcp")
# No single carrier may use up a load's time: another one may still connect.
LEAST_CONNECT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Selected:
    """A carrier to open, or the reason not to open it."""

    name: str
    why_not: str = ""


def select(
    asked: Sequence[str], *, device: bool = False, configured: Sequence[str] = ()
) -> list[Selected]:
    """The carriers that `asked` names; for "auto" all carriers, some with a reason to leave out."""
    if list(asked) != [AUTO]:
        return [Selected(name) for name in asked]
    found = []
    for name in CARRIERS:
        why = ""
        if name == "cuda" and not device:
            why = "the cache is not on a GPU"
        elif name == "local" and device:
            why = "the cache is on a GPU"
        elif name in LIBRARIES and name not in configured:
            why = "it has no carrier_options"
        found.append(Selected(name, why))
    return found


def fastest_first(carriers: Sequence[Carrier]) -> list[Carrier]:
    """The same carriers, in the order in which "auto" tries them."""

    def place(carrier: Carrier) -> int:
        over_tcp = (carrier.name, carrier.flavour) == ("mooncake", "tcp")
        return FASTEST_FIRST.index("mooncake over tcp" if over_tcp else carrier.name)

    return sorted(carriers, key=place)


class Link(NamedTuple):
    """A carrier, its connection to a peer, and why it was chosen."""

    carrier: Carrier
    peer: Any
    why: str
    late: tuple[str, ...] = ()  # others that did not connect in time; they may do so later


def connect(
    offered: Mapping[str, bytes], carriers: Sequence[Carrier], deadline: float, who: str = "a peer"
) -> Link:
    """Connect by the first of our carriers that the peer offers and that reaches it."""
    out: list[str] = []
    late: list[str] = []
    for number, carrier in enumerate(carriers):
        if carrier.name not in offered:
            out.append(f"{carrier.name}: the peer does not offer it")
            continue
        later = sum(c.name in offered for c in carriers[number + 1 :])
        try:
            peer = carrier.connect(offered[carrier.name], _until(deadline, later))
        except KvferryError as error:  # also a peer that does not know the secret
            out.append(f"{carrier.name}: {error}")
            if isinstance(error, DeadlineExceeded):
                late.append(carrier.name)
            continue
        except Exception as error:  # a bug in that carrier; the next one may work
            log.exception("%s: carrier %s failed by an error of ours", who, carrier.name)
            out.append(f"{carrier.name}: {text_of(error)}")
            continue
        why = "the first that both have and that connects"
        if out:
            why += f"; ruled out: {'; '.join(out)}"
        log.info("%s: carrier %s: %s", who, carrier.name, why)
        return Link(carrier, peer, why, tuple(late))
    raise HandoverError(f"no carrier reaches {who} ({'; '.join(out) or 'there is none'})")


def _until(deadline: float, others: int) -> float:
    """The deadline of one attempt, which leaves time for the other carriers."""
    now = time.monotonic()
    left = deadline - now
    return now + max(left / 2, min(left, LEAST_CONNECT_SECONDS)) if others else deadline


# A class, or its module and name if the carrier needs another library.
CARRIERS: dict[str, type[Any] | tuple[str, str]] = {
    "local": LocalCarrier,
    "tcp": TcpCarrier,
    "mooncake": ("kvferry.carriers.library.mooncake", "MooncakeCarrier"),
    "nixl": ("kvferry.carriers.library.nixl", "NixlCarrier"),
    "cuda": ("kvferry.carriers.cuda.carrier", "CudaCarrier"),
}
# Arguments that the engine gives to carriers that take them; the others are options.
ENGINES_OWN = {"secret", "host", "admits", "memory", "gpu", "limits", "writable"}
REMOVED_OPTIONS = {  # configurations may still have them
    "force_fallback": ("local",),
    "packing": ("local", "tcp", "mooncake", "nixl"),
    "patience_seconds": ("mooncake",),
    "workers": ("cuda",),
}


def make_carrier(name: str, **options: Any) -> Carrier:
    """Make the carrier of that name. `options` go to its constructor."""
    if name not in CARRIERS:
        raise TransferError(f"there is no carrier {name!r}; there are {', '.join(CARRIERS)}")
    kind = carrier_class(name)
    for removed, carriers in REMOVED_OPTIONS.items():
        if name in carriers and removed in options:
            del options[removed]
            log.warning("carrier %s: `%s` has no effect any more; remove it", name, removed)
    takes = inspect.signature(kind).parameters
    options = {k: v for k, v in options.items() if k in takes or k not in ENGINES_OWN}
    unknown = sorted(set(options) - set(takes))
    if unknown:
        raise TransferError(
            f"the carrier {name!r} has no option {', '.join(unknown)}; it has {', '.join(takes)}"
        )
    try:
        carrier: Carrier = kind(**options)
    except TypeError as error:
        raise TransferError(f"the carrier {name!r} cannot be made: {error}") from None
    return carrier


def require_carriers(carriers: Sequence[str]) -> None:
    unknown = sorted(set(carriers) - set(CARRIERS) - {AUTO})
    if unknown or not carriers or (AUTO in carriers and len(carriers) > 1):
        raise DescriptionError(
            f'carriers is "{AUTO}", or a list of {", ".join(CARRIERS)}; found {list(carriers)}'
        )


def carrier_class(name: str) -> type[Any]:
    kind = CARRIERS[name]
    if isinstance(kind, tuple):
        kind = getattr(import_module(kind[0]), kind[1])
    return kind


def require_options(carriers: Sequence[str], options: Any) -> None:
    """Check `carrier_options`: a mapping of mappings, for carriers that may be opened."""
    if not isinstance(options, Mapping) or not all(
        isinstance(of_one, Mapping) for of_one in options.values()
    ):
        raise DescriptionError(
            "carrier_options must be a mapping of mappings, such as "
            f'{{"nixl": {{"backends": ["UCX"]}}}}; found {options!r}'
        )
    unknown = sorted(set(options) - set(CARRIERS))
    if unknown:
        raise DescriptionError(
            f"carrier_options are for {unknown}, and there are no such carriers; there are "
            f"{', '.join(CARRIERS)}"
        )
    ours = sorted({key for of_one in options.values() for key in of_one} & {"secret", "admits"})
    if ours:
        raise DescriptionError(
            f"carrier_options has {ours}, which all carriers share; configure secret_file and peers"
        )
    for name, of_one in options.items():
        has = [o for o in inspect.signature(carrier_class(name)).parameters if o not in ENGINES_OWN]
        removed = {option for option, of in REMOVED_OPTIONS.items() if name in of}
        if strange := sorted(set(of_one) - {*has, "host"} - removed):
            raise DescriptionError(
                f"the carrier {name!r} has no option {', '.join(strange)}; it has {', '.join(has)}"
            )
    unused = sorted(set(options) - set(carriers))
    if unused and list(carriers) != [AUTO]:  # "auto" opens carriers that have options
        raise DescriptionError(
            f"carrier_options are for {unused}, but carriers are {list(carriers)}; add them there, "
            "or drop the options"
        )
