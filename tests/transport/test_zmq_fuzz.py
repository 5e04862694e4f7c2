"""A slice of `make fuzz` against the two ZMQ servers, and what their limits say to a peer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from handover_peers import LOOPBACK, PATIENCE_SECONDS, Producer, Prompt, Spec
from kvferry.net.messages import (
    MAX_REQUEST_BYTES,
    VERSION,
    Claim,
    Reader,
    Refused,
    Renew,
    Renewed,
    Request,
    decode_reply,
    encode,
)
from kvferry.net.rpc import Sockets
from kvferry.net.server import kept_bytes

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from fuzz import zmq_frames

FRAMES = 15_000
READER = Reader("d", "x", 0, 0)
SECRET = "0123456789abcdef0123456789abcdef"


def test_garbage_is_answered_counted_and_survived() -> None:
    counts = zmq_frames.run(FRAMES, seed=14)
    assert counts["frames"] == FRAMES
    # a server that ends a connection takes unread answers with it: how many depends on the machine
    assert counts["malformed"] > FRAMES // 8
    for deep in ("Welcome", "Claimed", "Introduced", "Summed", "transfer", "stale"):
        assert counts[deep] > 0, counts


@pytest.fixture
def producer() -> Iterator[Producer]:
    made = Producer(Spec("p", "tp=1,block=16", secret=SECRET))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def dealer(producer: Producer) -> Iterator[zmq.Socket[bytes]]:
    sockets = Sockets(SECRET)
    address = f"{LOOPBACK}:{producer.ranks[0].port}"
    made = sockets.client(address)
    made.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))
    made.connect(f"tcp://{address}")
    try:
        yield made
    finally:
        sockets.close()


def test_a_frame_beyond_the_limit_ends_its_connection_and_nothing_else(
    producer: Producer, dealer: zmq.Socket[bytes]
) -> None:
    producer.open(Prompt(1, 50), "h")
    dealer.send(bytes(MAX_REQUEST_BYTES + 1))
    assert dealer.poll(300) == 0
    dealer.send(encode(Request(7, Renew(VERSION, producer.ranks[0].incarnation, ["h", "x"]))))
    reply = decode_reply(dealer.recv())
    assert (reply.id, reply.body) == (7, Renewed(["h"], []))


def test_claims_that_wait_are_bounded(
    monkeypatch: pytest.MonkeyPatch, producer: Producer, dealer: zmq.Socket[bytes]
) -> None:
    rank = producer.ranks[0]
    claim = Claim(VERSION, rank.incarnation, "h00", "d", READER, 1, 60.0)
    monkeypatch.setattr(rank._table._parked_budget, "limit_bytes", 100 * kept_bytes(claim))
    for number in range(80):
        claim = Claim(VERSION, rank.incarnation, f"h{number:02}", "d", READER, 1, 60.0)
        dealer.send(encode(Request(number, claim)))
    for number in range(50, 80):
        reply = decode_reply(dealer.recv())
        assert reply.id == number
        assert isinstance(reply.body, Refused)
        assert reply.body.reason == "busy"
    assert rank.parked_claims == 50
