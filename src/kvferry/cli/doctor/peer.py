"""`kvferry doctor --peer`: ask a running engine's directory, and try the carriers to its ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from kvferry.cli.doctor.checks import LOOPBACK, Finding, Settings
from kvferry.cli.doctor.choice import Host, choose
from kvferry.cli.doctor.tries import Tried, finding, try_offers
from kvferry.errors import DescriptionError, KvferryError
from kvferry.net.messages import VERSION, Look, Refused, Seen
from kvferry.net.names import is_loopback
from kvferry.net.rpc import Caller, Sockets

DIRECTORY_SECONDS = 10.0


def look_at_peer(address: str, settings: Settings, host: Host) -> Iterator[Finding]:
    """Findings about the directory, every carrier, and the chosen carrier for each rank."""
    try:
        seen = _ask_directory(address, settings.secret)
    except KvferryError as error:
        advice = "check the directory's port and the secret, and run the same kvferry on both"
        yield Finding(address, "broken", str(error), advice)
        return
    taken = "our secret is accepted" if settings.secret else "it belongs to this user"
    said = f"engine {seen.engine_id} ({seen.model}), {len(seen.ranks)} ranks; {taken}"
    yield Finding(address, "ok", said)
    if not seen.ranks:
        yield Finding("ranks", "missing", "its workers are still starting", "try again")
        return
    own = settings.host or own_address(address)
    if not settings.host and not is_loopback(own):
        advice = f'for nixl and mooncake, an engine here needs it: "host": "{own}"'
        yield Finding("host", "info", f"this host reaches it from {own}", advice)
    ranks = {f"rank ({rank.pp_rank}, {rank.tp_rank})": rank for rank in seen.ranks}
    names = sorted({name for rank in seen.ranks for name in rank.carriers})

    def try_ranks(name: str) -> dict[str, Tried]:
        offers = {where: r.carriers[name] for where, r in ranks.items() if name in r.carriers}
        return try_offers(name, offers, dataclasses.replace(settings, host=own))

    with ThreadPoolExecutor(len(names) or 1) as pool:
        tried = dict(zip(names, pool.map(try_ranks, names), strict=True))
    for name, by_rank in tried.items():
        yield from _reached(name, by_rank, settings.names(name))
    for where, rank in ranks.items():
        reach = {name: by_rank[where] for name, by_rank in tried.items() if where in by_rank}
        gpu = host.gpu and "cuda" in rank.carriers
        found = choose(f"chosen, {where}", host, gpu, reach, "")
        memory = "caches on GPUs" if gpu else "host memory"
        said = f"{found.found} (it offers {', '.join(rank.carriers) or 'nothing'}; for {memory})"
        yield dataclasses.replace(found, found=said)


def require_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise DescriptionError(f"--peer is the HOST:PORT of an engine's directory, not {address!r}")


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
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        for family, kind, _, _, where in found:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return LOOPBACK


def _reached(name: str, by_rank: Mapping[str, Tried], must: bool) -> Iterator[Finding]:
    """A line for each rank, or one line if all fail for the same reason."""
    first = next(iter(by_rank.values()))
    if first.why_not and {tried.why_not for tried in by_rank.values()} == {first.why_not}:
        by_rank = {"all ranks": first}
    for where, one in by_rank.items():
        good = f"connects in {one.milliseconds:.1f} ms"
        yield finding(f"{name}, {where}", one, must, good)
