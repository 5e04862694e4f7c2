"""Endpoints that no carrier made: each is refused by an error of ours, and nothing is left open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from carrier_peer import KINDS, owner, soon

from kvferry.carriers import make_carrier
from kvferry.carriers.cuda.carrier import CudaEndpoint
from kvferry.carriers.library.shared import LibraryEndpoint
from kvferry.carriers.liveness import Liveness
from kvferry.carriers.local import LocalEndpoint, _text
from kvferry.carriers.tcp.carrier import TcpEndpoint
from kvferry.errors import DeadlineExceeded, KvferryError, ProtocolError, TransferError
from kvferry.net import names

ID, HUGE = b"i" * 16, 1 << 63
TCP = ("tcp", "127.0.0.1", 5000, ID)
LOCAL = ("local", "boot", "ns", 4, 5, 4096, ID, [(4096, 10)], "v")
CUDA = ("cuda", "b", ID, "h", 5000, ID, ID, [(4096, 10, b"h" * 64, b"u")], [(4096, 10)], "v")
FOREIGN = ("pigeon", "", "h", 5000, ID, ID, [(4096, 10)], -1, b"")


def foreign(raw: bytes) -> LibraryEndpoint:
    return LibraryEndpoint.decode(raw, "pigeon")


DECODERS: list[tuple[Callable[[bytes], object], tuple[Any, ...]]] = [
    (TcpEndpoint.decode, TCP),
    (LocalEndpoint.decode, LOCAL),
    (CudaEndpoint.decode, CUDA),
    (foreign, FOREIGN),
]


@pytest.mark.parametrize(("decode", "good"), DECODERS, ids=["tcp", "local", "cuda", "foreign"])
def test_text_that_is_no_text(decode: Callable[[bytes], object], good: tuple[Any, ...]) -> None:
    raw = msgspec.msgpack.encode(good)
    decode(raw)
    name = good[0].encode()
    with pytest.raises(ProtocolError):
        decode(raw.replace(name, b"\xff" * len(name), 1))


@pytest.mark.parametrize(
    ("decode", "good", "at", "bad"),
    [
        *((TcpEndpoint.decode, TCP, 2, bad) for bad in (0, -1, 65536, HUGE)),
        *((LocalEndpoint.decode, LOCAL, 3, bad) for bad in (0, -1, 1 << 31, HUGE)),
        *((LocalEndpoint.decode, LOCAL, 5, bad) for bad in (-1, HUGE - 1, HUGE)),
        *((CudaEndpoint.decode, CUDA, 4, bad) for bad in (0, 65536)),
        *((CudaEndpoint.decode, CUDA, 2, bad) for bad in (1234, b"", b"short")),
        *(
            (CudaEndpoint.decode, CUDA, 7, [(base, size, b"h" * 64, b"u")])
            for base, size in ((HUGE, 10), (-1, 10), (4096, HUGE), (4096, -1))
        ),
        *((foreign, FOREIGN, 3, bad) for bad in (0, -1, 65536)),
        *((foreign, FOREIGN, 7, bad) for bad in (-2, HUGE, b"")),
    ],
)
def test_numbers_that_cannot_be(
    decode: Callable[[bytes], object], good: tuple[Any, ...], at: int, bad: object
) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode((*good[:at], bad, *good[at + 1 :])))


@pytest.mark.parametrize("host", ["..", "a" * 64 + ".example"])
def test_hosts_that_are_no_names(host: str) -> None:
    tcp = make_carrier("tcp", secret="a secret for these tests", host="127.0.0.1")
    with pytest.raises(TransferError):
        tcp.connect(msgspec.msgpack.encode(("tcp", host, 5000, ID)), soon(5))
    tcp.close()
    with pytest.raises(TransferError, match="cannot be resolved"):
        Liveness.connect(host, 5000, ID, ID, time.monotonic() + 5)


def test_a_token_at_an_impossible_address() -> None:
    with owner(KINDS["local"]) as peer:
        carrier = make_carrier("local")
        found = LocalEndpoint.decode(peer.endpoint)
        for address in (1, (1 << 62) - 1, HUGE, (1 << 64) - 1):
            changed = msgspec.structs.replace(found, token_address=address)
            with pytest.raises(KvferryError):
                carrier.connect(msgspec.msgpack.encode(changed), soon(5))
        carrier.close()


def test_the_name_of_a_process_may_be_any_bytes(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_bytes(b"7 (\xff\xfe) S 1")
    assert _text(str(stat)).endswith(") S 1")


@pytest.mark.parametrize("whose", ["tcp", "liveness"])
def test_a_name_that_takes_its_time(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`getaddrinfo` has no deadline; `connect` has one."""
    slow = threading.Event()

    def look_up(host: str) -> tuple[str, ...]:
        slow.wait(20)
        return ()

    monkeypatch.setattr(names, "NAMES", names.Names(look_up))
    begun = time.monotonic()
    try:
        with pytest.raises(DeadlineExceeded, match="not resolved in time"):
            if whose == "tcp":
                tcp = make_carrier("tcp", secret="a secret for these tests", host="127.0.0.1")
                try:
                    tcp.connect(msgspec.msgpack.encode(("tcp", "slow", 5000, ID)), soon(0.3))
                finally:
                    tcp.close()
            else:
                Liveness.connect("slow", 5000, ID, ID, soon(0.3))
    finally:
        slow.set()
    assert time.monotonic() - begun < 5
