"""`kvferry doctor --peer`: an engine's directory, our secret, and every carrier that it offers.

Each carrier is opened once, in a process of its own, as an engine here would open it; it connects
to every rank that offers it. A library's carrier without options of ours speaks as the peer's does.
What an engine here would use of all this is then chosen as it would choose (`picks`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.cli import children
from kvferry.cli.asked import LOOPBACK, Asked
from kvferry.cli.checks import ADVICE, PACKAGES, Finding, State, version_of
from kvferry.cli.picks import Way, as_configured, options_of, pick
from kvferry.errors import DescriptionError, KvferryError
from kvferry.transport import make_carrier
from kvferry.transport.auto import AUTO, ENGINES, select
from kvferry.transport.registry import CARRIERS
from kvferry.wire.messages import SeenRank
from kvferry.wire.names import is_loopback

PEER_SECONDS = 10.0  # for its directory, and for one rank by one carrier
CARRIER_SECONDS = 30.0  # for all ranks by one carrier
START_SECONDS = 30.0  # for a library to load


class Connected(msgspec.Struct, frozen=True):
    """How a carrier reached one rank, or why not."""

    why_not: str = ""
    detour: str = ""
    milliseconds: float = 0.0
    warning: str = ""  # what an engine's log would have


class Opened(msgspec.Struct, frozen=True):
    """A carrier that was opened, and the ranks that it was tried with, in their order."""

    flavour: str
    ranks: list[Connected]


@dataclass(frozen=True, slots=True)
class Tried:
    """A carrier, by rank; `why_not` where it does not even open."""

    ranks: Mapping[int, Connected]
    flavour: str
    why_not: str = ""


def look_at_peer(address: str, asked: Asked) -> Iterator[Finding]:
    """Its directory, our secret, and each of its ranks by each carrier that it offers."""
    from kvferry.wire.messages import Seen

    reply = _ask_directory(address, asked.secret)
    if not isinstance(reply, Seen):
        yield reply
        return
    taken = "our secret is accepted" if asked.secret else "it is of this user"
    said = f"engine {reply.engine_id} ({reply.model}), {len(reply.ranks)} ranks; {taken}"
    yield Finding("peer", address, "ok", said)
    if not reply.ranks:
        yield Finding("peer", "ranks", "missing", "its workers are still starting", "try again")
        return
    host = asked.host or own_address(address)
    if not asked.host and not is_loopback(host):
        advice = f'for nixl and mooncake, an engine here needs it: "host": "{host}"'
        yield Finding("peer", "host", "info", f"{host} is how this host reaches it", advice)
    tried = _try_all(reply.ranks, asked, host)
    for name, one in tried.items():
        if one.why_not:
            must = name in asked.named
            state: State = "broken" if must else "missing"
            said = f"offered, but cannot be opened here: {one.why_not}"
            yield Finding("peer", name, state, said, _how_to_open(name, must))
    for number, rank in enumerate(reply.ranks):
        who = f"rank ({rank.pp_rank}, {rank.tp_rank})"
        for name, one in tried.items():
            if number in one.ranks:
                yield _connects(name, who, one.ranks[number], rank, name in asked.named)
        yield _picked(who, rank, number, tried, asked)


def _ask_directory(address: str, secret: str | None) -> Any:
    """What it says of itself, or what is wrong."""
    from kvferry.p2p.caller import Caller
    from kvferry.wire.messages import VERSION, Look, Refused, Seen
    from kvferry.wire.sockets import Sockets

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise DescriptionError(f"--peer is the HOST:PORT of an engine's directory, not {address!r}")
    sockets = Sockets(secret)
    caller = Caller(sockets)
    try:
        call = caller.call(address, Look(VERSION), time.monotonic() + PEER_SECONDS)
        reply = call.result(PEER_SECONDS + 5)
    except KvferryError as error:
        advice = "is it the directory's port, and the same secret?"
        return Finding("peer", address, "broken", str(error), advice)
    finally:
        caller.close()
        sockets.close()
    if isinstance(reply, Refused):
        return Finding("peer", address, "broken", reply.message, "run the same kvferry on both")
    if not isinstance(reply, Seen):
        return Finding("peer", address, "broken", f"answered with a {type(reply).__name__}")
    return reply


def own_address(peer: str) -> str:
    """The address of this host that its way to a peer begins at; nothing is sent."""
    host, _, port = peer.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        for family, kind, _, _, where in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)
                found: str = probe.getsockname()[0]
                return found
    return LOOPBACK


def _try_all(ranks: Sequence[SeenRank], asked: Asked, host: str) -> dict[str, Tried]:
    """Every carrier that a rank offers, all at once."""
    offered = {name for rank in ranks for name in rank.carriers}
    names = [n for n in CARRIERS if n in offered] + sorted(offered - set(CARRIERS))
    with ThreadPoolExecutor(len(names) or 1) as pool:
        found = pool.map(lambda name: _try_one(name, ranks, asked, host), names)
        return dict(zip(names, found, strict=True))


def _try_one(name: str, ranks: Sequence[SeenRank], asked: Asked, host: str) -> Tried:
    numbers = [number for number, rank in enumerate(ranks) if name in rank.carriers]
    endpoints = [ranks[number].carriers[name] for number in numbers]
    if name not in CARRIERS:
        return Tried({}, name, "this kvferry has no such carrier")
    if name in PACKAGES and version_of(name) is None:
        return Tried({}, name, "its library is not installed")
    options = {} if name == "null" else asked.opening(name, host)
    question = {
        "name": name,
        "options": options,
        "as_offered": name in ENGINES and name not in asked.options,
        "endpoints": [endpoint.hex() for endpoint in endpoints],
    }
    try:
        found = msgspec.convert(
            children.ask("peers", question, START_SECONDS + CARRIER_SECONDS), Opened
        )
    except KvferryError as error:
        return Tried({}, name, str(error))
    return Tried(dict(zip(numbers, found.ranks, strict=True)), found.flavour)


def answer(question: dict[str, Any]) -> Any:
    """The program of the process that tries one carrier with all ranks."""
    name, options = question["name"], question["options"]
    endpoints = [bytes.fromhex(endpoint) for endpoint in question["endpoints"]]
    if question["as_offered"]:
        options |= options_of(name, endpoints[0])
    carrier = make_carrier(name, **options)
    until = time.monotonic() + CARRIER_SECONDS
    ranks = [_connect(carrier, endpoint, until) for endpoint in endpoints]
    return msgspec.to_builtins(Opened(str(getattr(carrier, "flavour", "")), ranks))


def _connect(carrier: Any, endpoint: bytes, until: float) -> Connected:
    begin = time.monotonic()
    if begin >= until:
        return Connected(f"not tried: the ranks before it took {CARRIER_SECONDS:g} s")
    with _warnings() as heard:
        try:
            link = carrier.connect(endpoint, min(begin + PEER_SECONDS, until))
        except KvferryError as error:
            return Connected(str(error))
        except Exception as error:  # of its library
            return Connected(f"{type(error).__name__}: {error}")
        took = (time.monotonic() - begin) * 1e3
    detour = str(getattr(link, "detour", ""))
    with contextlib.suppress(Exception):
        carrier.disconnect(link)
    return Connected("", detour, took, "" if detour else "; ".join(heard))


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What kvferry says in its log meanwhile."""
    heard: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    handler = Listening(logging.WARNING)
    logging.getLogger("kvferry").addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger("kvferry").removeHandler(handler)


def _connects(name: str, who: str, found: Connected, rank: SeenRank, must: bool) -> Finding:
    what = f"{name}, {who}"
    if found.why_not:
        advice = ""
        if name in ENGINES:
            with contextlib.suppress(KvferryError):
                theirs = options_of(name, rank.carriers[name])
                advice = f"the peer's is as by {as_configured(name, theirs)}"
        return Finding("peer", what, "broken" if must else "missing", found.why_not, advice)
    if found.detour:
        return Finding("peer", what, "missing", f"by tcp only: {found.detour}")
    said = f"connects in {found.milliseconds:.1f} ms"
    if found.warning:
        said += f", but {found.warning}"
    return Finding("peer", what, "ok", said)


def _how_to_open(name: str, must: bool) -> str:
    if name not in CARRIERS:
        return "run the same kvferry on both"
    if name in PACKAGES and version_of(name) is None:
        return ADVICE[name]
    if name == "cuda":
        return "caches on a GPU need NVIDIA's driver here; others are moved by other carriers"
    return "see --options and --host" if must or name in ENGINES else ""


def _picked(
    who: str,
    rank: SeenRank,
    number: int,
    tried: Mapping[str, Tried],
    asked: Asked,
) -> Finding:
    """What an engine here would use for that rank, where it has the same kind of memory."""
    what = f"{AUTO if asked.is_auto else 'picked'}, {who}"
    offers = ", ".join(rank.carriers) or "nothing"
    gpu = "cuda" in rank.carriers and not tried["cuda"].why_not
    ways, left_out = [], []
    for chosen in select(asked.wanted(gpu), device=gpu, configured=tuple(asked.options)):
        name = chosen.name
        if chosen.why_not:
            left_out.append(chosen)
        elif name not in rank.carriers:
            ways.append(Way(name, offered=False))
        else:
            one = tried[name]
            link = one.ranks.get(number, Connected(one.why_not))
            ways.append(Way(name, one.flavour, True, link.why_not, link.detour))
    found = pick(ways, left_out, in_order=not asked.is_auto)
    unused = [
        name
        for name in (one.name for one in left_out)
        if name in ENGINES and number in tried.get(name, Tried({}, name)).ranks
        if not tried[name].ranks[number].why_not
    ]
    advice = "; ".join(
        f"for auto to open {name}: {as_configured(name, options_of(name, rank.carriers[name]))}"
        for name in unused
    )
    memory = "caches on GPUs" if gpu else "host memory"
    said = f"{found.said} (it offers {offers}; for {memory})"
    if not found.name:
        return Finding("peer", what, "broken", said, advice or "see what failed above")
    return Finding("peer", what, "ok", said, advice)
