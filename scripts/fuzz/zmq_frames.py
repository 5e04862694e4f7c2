"""Against a directory and a producer rank (ZMQ), in a process of their own.

Most frames are of peers that know the secret: valid requests of every kind in which one or two
fields are replaced (extremes, other types, deep nesting, huge counts), keys doubled, bytes flipped
or cut, and plain junk. Among them come strangers: without the secret, with another one, and with
something that is not ZMQ at all. In between a good peer must be welcomed and have its claim
answered; the process must live, count no internal error, and stay within bounds of memory and
descriptors.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvferry.net.messages import (
    MAX_REQUEST_BYTES,
    VERSION,
    Claim,
    Closing,
    Complete,
    Hello,
    Introduce,
    Look,
    Offer,
    Reader,
    Refused,
    Renew,
    Renewed,
    Reply,
    Request,
    Sum,
    decode_reply,
    encode,
    pack_tables,
)
from kvferry.net.rpc import Sockets

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from handover_peers import LOOPBACK, Child, Prompt, Spec

SECRET = "5ec2e7" * 6
WRONG_SECRET = "badbad" * 6
GOOD, BAIT = "the-hold-of-the-good-peer", "bait"  # no frame names the first
CONNECTIONS = 4  # to each server
BURST = 50  # frames of one connection, one after another
CHECK_EVERY = 5000  # frames between two questions of a good peer
ANSWER_SECONDS = 20.0  # for it; the machine may be busy
MOST_GROWTH_BYTES = 400 << 20  # what may wait (256 MiB), and what an allocator keeps
MOST_MORE_DESCRIPTORS = 600  # of two doors, 256 connections each
CURVE_BYTES = 64  # that encryption adds to a frame, and more
READER = Reader("d", "x", 0, 0)

pack = msgspec.msgpack.encode

NUMBERS: list[Any] = [0, -1, 1, 255, 1 << 16, 1 << 31, 1 << 53, (1 << 62) - 1, 1 << 62]
NUMBERS += [(1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 0.0, -0.0, 1e308, 5e-324]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
TEXTS: list[Any] = ["", "\0", "x" * 512, "x" * 513, "\U0001f6a2" * 512, "/../" * 64, "%s%n" * 64]
ODD: list[Any] = [None, True, b"", b"\xff" * 65, [], {}, [[[]]], {"": {}}, [None] * 3, {1: 2}]
ODD += [msgspec.msgpack.Ext(5, b"xx"), [[]] * 3000, [0] * 3000, {str(n): n for n in range(300)}]
DEEP = msgspec.Raw(b"\x91" * 900 + b"\xc0")
TOO_DEEP = msgspec.Raw(b"\x91" * 5000 + b"\xc0")
LIARS = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc1"]
LIARS += [b"\xc6\xff\xff\xff\xff", b"\x92\x01\xdf\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xc9"]

Path_ = tuple[Any, ...]


def run(frames: int, seed: int) -> dict[str, int]:
    """Send so many; replies by their kind. Raises where the servers do not go on as they should."""
    spec = Spec("p", secret=SECRET, carrier="tcp", lease_seconds=3600.0)
    child = Child.start("producer", spec)
    try:
        attack = Attack(child, random.Random(seed))
        try:
            return attack.run(frames)
        finally:
            attack.close()
    finally:
        child.kill()
        child.pipe.close()


@dataclass(slots=True)
class Frames:
    """Makes messages of one or several frames for servers that it knows all about."""

    rng: random.Random
    engine: Any
    info: Any
    digest: str
    bait: str = BAIT
    _bodies: dict[str, list[tuple[Any, list[Path_]]]] = field(default_factory=dict)

    def use(self, bait: str) -> None:
        """From now on, this hold is open; words about the one before may have closed it."""
        self.bait = bait
        read = [pack_and_read(body) for body in self._valid()]
        both = [(body, list(paths(body))) for body in read]
        asked = ("hello", "look")
        self._bodies["directory"] = [one for one in both if one[0]["type"] in asked]
        self._bodies["rank"] = [one for one in both if one[0]["type"] not in asked]

    def _valid(self) -> Iterator[Any]:
        about = self.info.incarnation, self.bait
        elsewhere = self.info.incarnation, "unknown"
        address = self.info.regions[0].address
        runs = b"".join(n.to_bytes(8, "little") for n in (address, 4096, address + 64, 100))
        tables = pack_tables([[1, 2, 3]])
        consumer = msgspec.structs.replace(
            self.engine, engine_id=READER.engine_id, incarnation=READER.incarnation
        )
        yield Hello(VERSION, self.engine)
        yield Look(VERSION)
        yield Introduce(VERSION, self.info.incarnation, consumer, self.info)
        for hold in (about, elsewhere):
            yield Claim(VERSION, *hold, self.digest, READER, 1, 1.0)
            yield Complete(VERSION, *hold, READER, 4, "failed")
            yield Offer(
                VERSION, *hold, self.digest, READER, 1, 1.0, "tcp", b"g", 48, 0, tables, True
            )
            yield Sum(VERSION, *hold, runs)
        yield Renew(VERSION, self.info.incarnation, [self.bait, "unknown"])

    def next(self, server: str) -> list[bytes]:
        """For the directory or for the rank; longer frames would only end their connection."""
        return [frame[: MAX_REQUEST_BYTES - CURVE_BYTES] for frame in self._next(server)]

    def _next(self, server: str) -> list[bytes]:
        rng = self.rng
        if rng.random() < 0.03:  # what the other one would take
            server = "rank" if server == "directory" else "directory"
        body, known = rng.choice(self._bodies[server])
        kind = rng.random()
        if kind < 0.65:
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                path = rng.choice(known)
                like = rng.random() < 0.7
                body = put(body, path, self._like(get(body, path)) if like else self._odd())
            return [self._request(body)]
        if kind < 0.72:
            return [self._request(body)]
        if kind < 0.77:
            return [self._doubled(body)]
        if body["type"] == "introduce":  # a flipped address would be dialed, whosever it is
            body = put(body, ("rank", "carriers"), {"tcp": b"\xff" * 30})
        frame = self._request(body)
        if kind < 0.82:
            return [frame[: rng.randrange(len(frame))]]
        if kind < 0.90:
            flipped = bytearray(frame)
            for _ in range(rng.randrange(1, 6)):
                flipped[rng.randrange(len(flipped))] = rng.randrange(256)
            return [bytes(flipped)]
        if kind < 0.93:
            cut = rng.randrange(len(frame))
            return [frame[:cut] + rng.choice(LIARS) + frame[cut:]]
        if kind < 0.96:
            return [rng.randbytes(rng.randrange(300))]
        if kind < 0.98:
            return [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(2, 6))]
        reply: Any = rng.choice([Closing(True), Refused("busy", ""), Renewed([], [self.bait])])
        return [encode(Reply(rng.randrange(1 << 32), reply))]

    def _like(self, old: Any) -> Any:
        """Another value that may pass for the old one, and so gets further."""
        rng = self.rng
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return rng.choice((0, 1, 2, 3, 7, 16, 63, 64, 1021, 1023, 1024, old + 1, old * 2))
        if isinstance(old, float):
            return rng.choice((0.0, 0.01, 1e9, 1e-9, -1.0, float("nan")))
        if isinstance(old, str):
            words = ("tcp", "xxh3", "mix128", "split", "replicated", "window", "ring", "state")
            return rng.choice((*words, "draft", "opaque", "full", "k", self.bait, "done", ""))
        if isinstance(old, bytes):
            return rng.choice((b"\xff" * 30, b"", old + b"\0", bytes(len(old))))
        if isinstance(old, list) and old:
            return rng.choice((old + old, old[1:], old[::-1], old * 30, [*old, old[0]]))
        if isinstance(old, dict) and old:
            gone = rng.choice(list(old))
            return {key: value for key, value in old.items() if key != gone}
        return rng.choice(([], [["draft", 1]], [1] * 5, None))

    def _odd(self) -> Any:
        rng = self.rng
        kind = rng.random()
        if kind < 0.4:
            return rng.choice(NUMBERS)
        if kind < 0.6:
            return rng.choice(TEXTS)
        if kind < 0.98:
            return rng.choice(ODD)
        if kind < 0.999:
            return rng.choice((DEEP, TOO_DEEP))
        filling = rng.choice(([], [[]], 70_000, "", {}, b""))
        count = (MAX_REQUEST_BYTES - 20_000) // len(pack(filling))
        return [filling] * rng.randrange(count)

    def _request(self, body: Any) -> bytes:
        number = self.rng.choice((1, 7, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, -5))
        try:
            return pack([number, body])
        except (msgspec.MsgspecError, OverflowError, RecursionError):
            return pack([number])

    def _doubled(self, body: dict[str, Any]) -> bytes:
        """A map that says some keys twice, the second time differently."""
        more = [(self.rng.choice(list(body)), self._odd()) for _ in range(3)]
        items = [*body.items(), *more]
        self.rng.shuffle(items)
        said = b"".join(pack(key) + pack(value) for key, value in items)
        return b"\x92\x01\xde" + len(items).to_bytes(2, "big") + said


def pack_and_read(body: Any) -> Any:
    return msgspec.msgpack.decode(pack(body))


def paths(tree: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Of every field; of a list, the first and the last only."""
    keys: Sequence[Any] = ()
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list) and tree:
        keys = sorted({0, len(tree) - 1})
    for key in keys:
        yield (*above, key)
        yield from paths(tree[key], (*above, key))


def get(tree: Any, path: Path_) -> Any:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):  # replaced before
            return None
    return tree


def put(tree: Any, path: Path_, value: Any) -> Any:
    """The same tree with another value; what lies beside the path is shared, not copied."""
    if not path or not isinstance(tree, dict | list):
        return value
    key, *rest = path
    copy = tree.copy()
    try:
        copy[key] = put(copy[key], tuple(rest), value)
    except (KeyError, IndexError, TypeError):  # replaced before
        return value
    return copy


class Attack:
    """All connections of one run, and what they heard."""

    def __init__(self, child: Child, rng: random.Random) -> None:
        self.child, self.rng = child, rng
        self.counts: Counter[str] = Counter()
        prompt = Prompt(1, 48)
        child.ask("open", prompt, GOOD)
        ticket = child.ticket(prompt, GOOD)
        self.frames = Frames(rng, child.ask("welcome").engine, child.infos[0], ticket.digest)
        self.ports = {"directory": child.port, "rank": int(child.infos[0].address.split(":")[-1])}
        self.sockets, self.wrong = Sockets(SECRET), Sockets(WRONG_SECRET)
        self.plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealers = [
            (name, self._dealer(port))
            for name, port in self.ports.items()
            for _ in range(CONNECTIONS)
        ]
        self.good = {name: self._dealer(port) for name, port in self.ports.items()}
        self.asked = self.baits = 0

    def run(self, frames: int) -> dict[str, int]:
        self._check()
        before = self.child.ask("resident_bytes")
        descriptors = self.child.ask("census")["descriptors"]
        sent = 0
        while sent < frames:
            self._lay_bait()
            part = min(CHECK_EVERY, frames - sent)
            for done in range(0, part, BURST):
                self._burst(*self.rng.choice(self.dealers), min(BURST, part - done))
            sent += part
            self._strangers()
            self._check()
            grown = self.child.ask("resident_bytes") - before
            require(grown < MOST_GROWTH_BYTES, f"{grown} bytes more after {sent} frames")
            more = self.child.ask("census")["descriptors"] - descriptors
            require(more < MOST_MORE_DESCRIPTORS, f"{more} descriptors more after {sent} frames")
        self.counts["frames"] = sent
        return dict(self.counts)

    def close(self) -> None:
        self.sockets.close()
        self.wrong.close()
        self.plain.destroy(linger=0)

    def _dealer(self, port: int, sockets: Sockets | None = None) -> zmq.Socket[bytes]:
        dealer = (sockets or self.sockets).client(f"{LOOPBACK}:{port}")
        dealer.setsockopt(zmq.SNDTIMEO, int(ANSWER_SECONDS * 1000))
        dealer.connect(f"tcp://{LOOPBACK}:{port}")
        return dealer

    def _lay_bait(self) -> None:
        self.baits += 1
        bait = f"{BAIT}{self.baits}"
        self.child.ask("open", Prompt(1, 48), bait)
        self.frames.use(bait)

    def _burst(self, server: str, dealer: zmq.Socket[bytes], count: int) -> None:
        for _ in range(count):
            try:
                dealer.send_multipart(self.frames.next(server))
            except zmq.Again:
                raise AssertionError(f"a server reads nothing for {ANSWER_SECONDS} s") from None
        for _, one in self.dealers:  # a server drops replies that nobody reads
            self._drain(one)

    def _drain(self, dealer: zmq.Socket[bytes]) -> None:
        while dealer.poll(0):
            body: Any = decode_reply(b"".join(dealer.recv_multipart())).body
            self.counts[getattr(body, "reason", type(body).__name__)] += 1
            text = getattr(body, "message", "")
            require("internal error" not in text and "could not be" not in text, text)

    def _strangers(self) -> None:
        """Who does not know the secret, and is told nothing."""
        for server, port in self.ports.items():
            raw = socket.create_connection((LOOPBACK, port), ANSWER_SECONDS)
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15)
            told = self.rng.choice((greeting, greeting[:11], b"GET / HTTP/1.1\r\n\r\n", b""))
            raw.sendall(told + self.rng.randbytes(self.rng.randrange(200)))
            bare = self.plain.socket(zmq.DEALER)
            bare.connect(f"tcp://{LOOPBACK}:{port}")
            wrong = self._dealer(port, self.wrong)
            for stranger in (bare, wrong):
                with contextlib.suppress(zmq.Again):  # it was cut off already
                    for _ in range(5):
                        stranger.send_multipart(self.frames.next(server), zmq.NOBLOCK)
            heard = any(stranger.poll(20) for stranger in (bare, wrong))
            require(not heard, "a stranger was answered")
            raw.close()
            bare.close(linger=0)
            wrong.close(linger=0)
            self.counts["strangers"] += 3

    def _check(self) -> None:
        """A good peer is answered as if nothing had happened."""
        require(self.child.process.is_alive(), "the servers' process died")
        engine, info = self.frames.engine, self.child.infos[0]
        hello = self._ask("directory", Hello(VERSION, engine))
        require(type(hello).__name__ == "Welcome", f"a good hello: {hello!r:.500}")
        claim = Claim(VERSION, info.incarnation, GOOD, self.frames.digest, READER, 1, 1.0)
        claimed = self._ask("rank", claim)
        require(type(claimed).__name__ == "Claimed", f"a good claim: {claimed!r:.500}")
        for counters in self.child.ask("counters"):
            errors = counters.get("internal errors", 0)
            require(not errors, f"{errors} internal errors; the process's log has them")

    def _ask(self, name: str, body: Any) -> Any:
        self.asked += 1
        dealer, until = self.good[name], time.monotonic() + ANSWER_SECONDS
        dealer.send(encode(Request(self.asked, body)))
        while dealer.poll(max(0, int((until - time.monotonic()) * 1000))):
            reply = decode_reply(b"".join(dealer.recv_multipart()))
            if reply.id == self.asked:
                return reply.body
        raise AssertionError(f"the {name} did not answer a good peer in {ANSWER_SECONDS} s")


def require(holds: bool, why: str) -> None:
    if not holds:
        raise AssertionError(why)
