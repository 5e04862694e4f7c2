"""What is said to peers of other protocols; that they understand it is shown in tests/vllm."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.p2p.strangers import answer_stranger
from kvferry.wire.messages import VERSION, EngineInfo, Hello, Request
from kvferry.wire.messages import encode as encode_ours

encode = msgspec.msgpack.encode
MOONCAKE = {"remote_hostname": "h", "remote_port": 1, "req_blocks": {"r": ["t", [[1]]]}, "x": 2}


def test_nixl() -> None:
    answer = answer_stranger([b"", encode((b"get_meta_msg", 0, 1))])
    assert answer is not None and len(answer) == 3 and answer[0] == b""
    assert (
        "run kvferry's connector on both sides"
        in msgspec.msgpack.decode(answer[1])["compatibility_hash"]
    )


def test_mooncake() -> None:
    answer = answer_stranger([encode(MOONCAKE)])
    assert answer is not None and msgspec.msgpack.decode(answer[0])["status"] == 2


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b""],
        [b"", b"x"],
        [b"a", encode((b"get_meta_msg", 0, 1))],
        [encode((b"get_meta_msg", 0, 1))],
        [encode({**MOONCAKE, "req_blocks": 3})],
        [b"\x91" * 100_000],
        [b"", b"\x91" * 100_000],
        [encode_ours(Request(1, Hello(VERSION, EngineInfo("e", "i", "m", [], 0, {}, {}))))],
    ],
    ids=range(10),
)
def test_what_is_nobodys_or_ours_gets_none(frames: list[bytes]) -> None:
    assert answer_stranger(frames) is None
