"""What is said to engines with vLLM's own connectors; that they understand it: tests/vllm."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
import zmq

from kvferry.p2p.strangers import StrangerServer, is_question
from kvferry.wire.messages import VERSION, EngineInfo, Hello, Look, Request
from kvferry.wire.messages import encode as encode_ours
from kvferry.wire.sockets import Sockets

encode = msgspec.msgpack.encode
MOONCAKE = {"remote_hostname": "h", "remote_port": 1, "req_blocks": {"r": ["t", [[1]]]}, "x": 2}
OTHERS = [
    b"",
    b"x",
    encode((b"get_meta_msg", 0, 1)),
    encode({**MOONCAKE, "req_blocks": 3}),
    b"\x91" * 100_000,
    encode_ours(Request(1, Hello(VERSION, EngineInfo("e", "i", "m", [], 0, {}, {})))),
    encode_ours(Request(1, Look(VERSION))),
]


@pytest.mark.parametrize("frame", OTHERS, ids=range(len(OTHERS)))
def test_what_is_no_question(frame: bytes) -> None:
    assert not is_question(frame)


def test_a_question_is_refused_and_nothing_else_answered() -> None:
    sockets = Sockets()
    server = StrangerServer(sockets, None)
    server.start()
    with contextlib.closing(sockets), contextlib.closing(server):
        asking = sockets.context.socket(zmq.DEALER)
        asking.connect(f"tcp://127.0.0.1:{server.port}")
        for frame in (*OTHERS, encode(MOONCAKE)):
            asking.send(frame)
        assert asking.poll(20_000)
        answer = msgspec.msgpack.decode(asking.recv())
        assert answer["status"] == 2
        assert "run kvferry's connector on both sides" in answer["err_msg"]
        assert not asking.poll(100)
        assert server.counters["malformed"] == len(OTHERS)
        asking.close(linger=0)
