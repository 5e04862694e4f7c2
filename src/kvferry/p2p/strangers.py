"""A server for engines with vLLM's own MooncakeConnector: it says no in their words, and no more.

Such an engine that a proxy sends here would wait for eight minutes if it got no answer. Its
protocol has a way to say no, with a text: its request fails at once, under its own failure policy,
and the text is in its log. (An in-tree NixlConnector gives up by itself after five seconds.)

This server has no key and no state. Only the outer form of a question is read, and whatever it
says, the answer is the same.
"""

from __future__ import annotations

import msgspec

from kvferry.p2p.server import Server
from kvferry.wire.sockets import Sockets

WORDS = (
    "none: this engine runs kvferry's connector, which does not speak the protocol of vLLM's own; "
    "run kvferry's connector on both sides (kv_connector_module_path: kvferry.vllm)"
)
REFUSAL = msgspec.msgpack.encode(
    {"status": 2, "err_msg": WORDS}
)  # MooncakeXferResponseStatus.ERROR


class _Question(msgspec.Struct):
    """The fields of a Mooncake worker's request that tell it from anything else."""

    remote_hostname: str
    remote_port: int
    req_blocks: dict[str, msgspec.Raw]


_questions = msgspec.msgpack.Decoder(_Question)


class StrangerServer(Server):
    def __init__(self, sockets: Sockets, host: str | None) -> None:
        super().__init__(sockets, host, 0, "kvferry-strangers", open_to_all=True)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or not is_question(frames[1]):
            self.counters["malformed"] += 1
            return
        self.counters["refused"] += 1
        self.complain(
            "stranger",
            "an engine with one of vLLM's own connectors asked for a cache, and was refused; run "
            "kvferry's connector on both sides",
        )
        self._send([frames[0], REFUSAL])


def is_question(frame: bytes) -> bool:
    try:
        _questions.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return True
