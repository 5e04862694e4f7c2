"""What is said to peers that speak the protocols of vLLM's own connectors.

An engine with an in-tree connector that was sent here by a proxy would wait, or die, if it got no
answer. Each of their protocols has a way to say no, and it carries a text: their request fails at
once, under their own failure policy, and the text is in their log. Only the questions' outer form
is read; nothing that a stranger says changes anything here.

    NIXL       a REQ socket asks for agent metadata: a payload with another compatibility hash,
               which their check prints, and our clock
    Mooncake   a DEALER socket asks for blocks: a response of status ERROR with a message
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

WORDS = (
    "none: this engine runs kvferry's connector, which does not speak the protocol of vLLM's own; "
    "run kvferry's connector on both sides (kv_connector_module_path: kvferry.vllm)"
)
_MOONCAKE_ERROR = 2  # MooncakeXferResponseStatus.ERROR

_encode = msgspec.msgpack.encode
# of a NixlConnector's side channel: [name, pp rank, tp rank]
_nixl_question = msgspec.msgpack.Decoder(tuple[bytes, int, int])


class _MooncakeQuestion(msgspec.Struct):
    """The fields of a Mooncake worker's request that tell it from anything else."""

    remote_hostname: str
    remote_port: int
    req_blocks: Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=1 << 16)]


_mooncake_question = msgspec.msgpack.Decoder(_MooncakeQuestion)


def answer_stranger(frames: Sequence[bytes]) -> list[bytes] | None:
    """The answer's frames for a message (without the sender), or None where it is nobody's."""
    if len(frames) == 2 and not frames[0]:
        if not _reads(_nixl_question, frames[1]):
            return None
        payload = {"compatibility_hash": WORDS, "agent_metadata_bytes": b""}
        return [b"", _encode(payload), _encode(time.perf_counter())]
    if len(frames) == 1 and _reads(_mooncake_question, frames[0]):
        return [_encode({"status": _MOONCAKE_ERROR, "err_msg": WORDS})]
    return None


def _reads(decoder: msgspec.msgpack.Decoder[Any], frame: bytes) -> bool:
    try:
        decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
