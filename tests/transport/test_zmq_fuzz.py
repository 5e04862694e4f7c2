"""Garbage against the two ZMQ servers: they go on answering, count it, and close nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.errors import ProtocolError
from kvferry.wire.messages import (
    MAX_REQUEST_BYTES,
    VERSION,
    Claim,
    Closing,
    Complete,
    Hello,
    Introduce,
    Offer,
    Reader,
    Refused,
    Renew,
    Renewed,
    Reply,
    Request,
    Sum,
    Welcome,
    decode_reply,
    decode_request,
    encode,
    pack_tables,
)
from p2p_peers import PATIENCE_SECONDS, Producer, Prompt, Spec

FRAMES = 100_000
BATCH = 500  # sent before the replies are read
MOST_GROWTH_BYTES = 200 << 20
HOLD = "the-hold-that-must-stay-open"
READER = Reader("d", "x", 0, 0)


def frames(rng: random.Random, producer: Producer, count: int) -> Iterator[list[bytes]]:
    """Messages of one or several frames: noise, truncations, mutations, replays, wrong tags."""
    incarnation = producer.ranks[0].incarnation
    bodies = [
        Hello(VERSION, producer.engine),
        Hello(VERSION, msgspec.structs.replace(producer.engine, engine_id="other", shape={})),
        Claim(VERSION, incarnation, "unknown", "d", READER, 1, 1000.0),
        Claim(VERSION, incarnation, HOLD, "wrong", READER, 1, 1.0),
        Claim(VERSION, "another", HOLD, "digest-1", READER, 1, 1.0),
        Claim(VERSION + 1, incarnation, HOLD, "digest-1", READER, 1, 1.0),
        Complete(VERSION, incarnation, "unknown", READER, 1, "done"),
        Complete(VERSION, incarnation, "unknown", READER, 1, "failed"),
        Complete(VERSION, "another", HOLD, READER, 1, "done"),
        Renew(VERSION, incarnation, ["a", "b"]),
        Renew(VERSION, incarnation, []),
        Introduce(VERSION, incarnation, producer.engine, producer.infos[0]),
        Offer(
            VERSION,
            incarnation,
            HOLD,
            "wrong",
            READER,
            1,
            1.0,
            "tcp",
            b"g",
            1,
            0,
            pack_tables([[1]]),
            False,
        ),
        Offer(
            VERSION,
            incarnation,
            "unknown",
            "d",
            READER,
            1,
            9.0,
            "",
            b"g",
            1,
            0,
            pack_tables([]),
            True,
        ),
        Sum(VERSION, incarnation, HOLD, bytes(32)),
        Sum(VERSION, incarnation, "unknown", b"\x01" * 17),
    ]
    valid = [encode(Request(1 + n, body)) for n, body in enumerate(bodies)]
    replies: list[Any] = [Closing(True), Refused("closed", "x"), Renewed([], [HOLD])]
    tricks = [
        *(encode(Reply(1, body)) for body in replies),
        *(_with(body, rng) for body in bodies for _ in range(40)),
        encode(Request(0, Claim(VERSION, incarnation, "nan", "d", READER, 1, float("nan")))),
        encode(Request(0, Claim(VERSION, incarnation, "inf", "d", READER, 1, float("inf")))),
        encode(Request(0, Claim(VERSION, incarnation, "neg", "d", READER, 1, -1e308))),
        b"\x91" * 4096,
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x01\xdf\xff\xff\xff\xff",
        b"",
    ]
    for number in range(count):
        kind = number % 6
        if kind == 0:
            yield [rng.randbytes(rng.randrange(200))]
        elif kind == 1:
            frame = rng.choice(valid)
            yield [frame[: rng.randrange(len(frame))]]
        elif kind == 2:
            frame = bytearray(rng.choice(valid))
            for _ in range(rng.randrange(1, 6)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            yield [bytes(frame)]
        elif kind == 3:
            yield [rng.choice(valid)]  # replayed
        elif kind == 4:
            yield [rng.choice(tricks)]
        else:
            yield [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(2, 6))]


def _with(body: Any, rng: random.Random) -> bytes:
    """A valid message with one field of a wrong kind."""
    raw = msgspec.to_builtins(body)
    odd: list[Any] = [None, -1, 1 << 63, "x" * 600, [], {}, 1e308, b"\xff", True, [[[]]]]
    where = raw
    while True:
        key = rng.choice(list(where))
        if isinstance(where[key], dict) and where[key] and rng.random() < 0.7:
            where = where[key]
            continue
        where[key] = rng.choice(odd)
        return msgspec.msgpack.encode([rng.randrange(1 << 32), raw])


def speaks_for_the_hold(message: list[bytes]) -> bool:
    """By chance, a mutation may be a right last word: the hold's id is all that it takes."""
    try:
        body = decode_request(message[0]).body if len(message) == 1 else None
    except ProtocolError:
        return False
    return isinstance(body, Complete) and body.hold_id == HOLD


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("target", ["rank", "directory"])
def test_garbage_is_answered_counted_and_survived(target: str) -> None:
    producer = Producer(Spec("p", "tp=1,block=16", lease_seconds=600.0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        producer.open(Prompt(1, 50), HOLD)
        server: Any = producer.ranks[0] if target == "rank" else producer.directory
        address = f"tcp://127.0.0.1:{server.port}"
        rng = random.Random(target)
        before = resident_bytes()
        dealer = connect(context, address)
        sent = single = heard = refused = 0
        for number, message in enumerate(frames(rng, producer, FRAMES)):
            if speaks_for_the_hold(message):
                continue
            dealer.send_multipart(message)
            sent += 1
            single += len(message) == 1
            if number % BATCH == BATCH - 1:
                for body in drain(dealer):
                    heard += 1
                    refused += isinstance(body, Refused)
        reached(server, sent)
        for body in drain(dealer):
            heard += 1
            refused += isinstance(body, Refused)
        dealer.close(linger=0)
        too_long(context, address)
        check_alive(context, address, target, producer)
        counters = server.counters
        assert counters["messages"] >= sent
        assert counters["strangers"] + counters["malformed"] >= sent - single + refused // 2
        assert heard <= single
        assert refused > sent // 3
        assert counters["internal errors"] == 0
        assert producer.ranks[0].open_holds == 1
        assert producer.ranks[0].take_closed() == []
        assert producer.ranks[0].parked_claims <= 16_384
        assert resident_bytes() - before < MOST_GROWTH_BYTES
    finally:
        context.destroy(linger=0)
        producer.close()


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.SNDTIMEO, int(PATIENCE_SECONDS * 1000))
    dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))
    dealer.connect(address)
    return dealer


def drain(dealer: zmq.Socket[bytes]) -> Iterator[Any]:
    while dealer.poll(0):
        yield decode_reply(b"".join(dealer.recv_multipart())).body


def reached(server: Any, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.counters["messages"] < count:
        assert time.monotonic() < deadline, f"{server.counters} of {count}"
        time.sleep(0.01)


def too_long(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    """A frame beyond the limit ends its connection, and nothing else."""
    dealer = connect(context, address)
    dealer.send(bytes(MAX_REQUEST_BYTES + 1))
    assert dealer.poll(300) == 0
    dealer.close(linger=0)


def check_alive(
    context: zmq.Context[zmq.Socket[bytes]], address: str, target: str, producer: Producer
) -> None:
    dealer = connect(context, address)
    if target == "rank":
        body: Any = Renew(VERSION, producer.ranks[0].incarnation, [HOLD, "x"])
        expected: Any = Renewed([HOLD], [])
    else:
        body = Hello(VERSION, producer.engine)
        expected = Welcome(producer.engine, producer.infos)
    dealer.send(encode(Request(77, body)))
    assert decode_reply(b"".join(dealer.recv_multipart())) == Reply(77, expected)
    dealer.close(linger=0)


def test_claims_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.p2p.holds.PARKED_BYTES", 2 * 50 * 2048)
    producer = Producer(Spec("p", "tp=1,block=16"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        rank = producer.ranks[0]
        dealer = connect(context, f"tcp://127.0.0.1:{rank.port}")
        for number in range(80):
            claim = Claim(VERSION, rank.incarnation, f"h{number}", "d", READER, 1, 60.0)
            dealer.send(encode(Request(number, claim)))
        for number in range(50, 80):
            reply = decode_reply(dealer.recv())
            assert reply.id == number
            assert isinstance(reply.body, Refused)
            assert reply.body.reason == "busy"
        assert (rank.parked_claims, rank.counters["parked"]) == (50, 50)
    finally:
        context.destroy(linger=0)
        producer.close()
