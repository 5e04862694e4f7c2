"""Calls that cannot even be sent end at once, and say whose fault it is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvferry.errors import HandoverError, PeerLost
from kvferry.p2p.caller import Caller
from kvferry.wire.messages import VERSION, Hello, Renew
from kvferry.wire.sockets import Sockets

NOT_AN_ENGINE: Any = object()


@pytest.mark.parametrize(
    ("address", "body", "kind", "words"),
    [
        ("127.0.0.1:no port", Renew(VERSION, "i", ["h"]), PeerLost, "cannot be reached"),
        ("127.0.0.1:9", Hello(VERSION, NOT_AN_ENGINE), HandoverError, "internal error: TypeError"),
    ],
    ids=["the address", "ours"],
)
def test_what_cannot_be_sent(address: str, body: Any, kind: type, words: str) -> None:
    sockets = Sockets()
    caller = Caller(sockets)
    try:
        error = caller.call(address, body, time.monotonic() + 60).exception(timeout=10)
        assert type(error) is kind and words in str(error)
    finally:
        caller.close()
        sockets.close()
