"""What the tcp carrier says on the wire.

Every frame is a header of 32 bytes and `body_bytes` more, little-endian:

    magic "KVFT" · version u16 · kind u16 · request u64 · body_bytes u64 · payload_bytes u64

    server                                      client
    HELLO   nonce_s, server incarnation  ---->
                                         <----  AUTH     nonce_c, client incarnation, mac_c
    WELCOME mac_s, table of regions      ---->
                                         <----  READ     table, payload_bytes = its sum
    DATA    payload_bytes of payload     ---->
                                         <----  WRITE    table, payload_bytes = its sum
    GO                                   ---->           after every descriptor was checked
                                         <----           payload
    APPLIED                              ---->           after every byte is in place
                                         <----  GRANTED  grant, table, payload_bytes: a WRITE into
                                                         what the owner opened (tcp_grants.py)
    ERROR   code u32, text               ---->           in place of any answer

    mac_c = HMAC-SHA256(key, "client" | nonce_s | nonce_c | both incarnations)
    mac_s = HMAC-SHA256(key, "server" | nonce_s | nonce_c | both incarnations | regions)

A table is rows of (address i64, length i64): the ranges of the server's memory, in the order in
which the payload comes; a grant is 16 bytes that only the owner can have told. Requests are
numbered upwards on each connection; a number that does not rise is a replay. Nonces make a recorded
AUTH worthless on the next connection.

Both sides prove that they have the key (wire/keys.py) before anything else is said. Bytes are
neither encrypted nor signed: who can change packets on the way can change caches. Use it on a
network you trust.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvferry.errors import (
    AuthenticationError,
    KvferryError,
    OutOfBounds,
    PeerLost,
    ProtocolError,
    TransferError,
)
from kvferry.transport.base import GRANT_BYTES, Ints

MAGIC = b"KVFT"
VERSION = 2  # since 2, the key is stretched, and writes need a grant
HEADER = struct.Struct("<4sHHQQQ")
ROW_BYTES = 16
NONCE_BYTES = 32
INCARNATION_BYTES = 16
MAC_BYTES = 32
HELLO_BYTES = NONCE_BYTES + INCARNATION_BYTES
AUTH_BYTES = NONCE_BYTES + INCARNATION_BYTES + MAC_BYTES
ERROR_CODE = struct.Struct("<I")
ERROR_TEXT_BYTES = 512

# One frame's limits. 32 Ki rows are half a MiB and one NumPy window; 256 MiB keep the round trip
# per frame under a percent of its time at 10 GB/s.
MAX_ROWS = 1 << 15
MAX_PAYLOAD_BYTES = 256 << 20
MAX_BODY_BYTES = MAX_ROWS * ROW_BYTES + GRANT_BYTES
MAX_REGIONS = MAX_ROWS


class Kind(IntEnum):
    HELLO = 1
    AUTH = 2
    WELCOME = 3
    READ = 4
    DATA = 5
    WRITE = 6
    GO = 7
    APPLIED = 8
    ERROR = 9
    GRANTED = 10


class Code(IntEnum):
    """Why a request was refused."""

    MALFORMED = 1
    UNAUTHENTICATED = 2
    OUT_OF_BOUNDS = 3
    TOO_LARGE = 4
    REPLAYED = 5
    BUSY = 6
    REVOKED = 7
    INTERNAL = 8


_ERRORS: dict[int, type[KvferryError]] = {
    Code.MALFORMED: ProtocolError,
    Code.UNAUTHENTICATED: AuthenticationError,
    Code.OUT_OF_BOUNDS: OutOfBounds,
    Code.TOO_LARGE: ProtocolError,
    Code.REPLAYED: ProtocolError,
    Code.BUSY: TransferError,
    Code.REVOKED: PeerLost,
    Code.INTERNAL: TransferError,
}


@dataclass(frozen=True, slots=True)
class Header:
    kind: int
    request: int
    body_bytes: int = 0
    payload_bytes: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(
            MAGIC, VERSION, self.kind, self.request, self.body_bytes, self.payload_bytes
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """Refuses what is not ours, another version, and sizes that no frame has."""
        magic, version, kind, request, body_bytes, payload_bytes = HEADER.unpack(raw)
        if magic != MAGIC:
            raise ProtocolError(f"a frame begins with {magic!r}; kvferry's begin with {MAGIC!r}")
        if version != VERSION:
            raise ProtocolError(
                f"the peer speaks version {version} of the tcp carrier's protocol, this is version "
                f"{VERSION}; run the same release of kvferry on both sides"
            )
        if body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"a frame of {body_bytes} + {payload_bytes} bytes; at most {MAX_BODY_BYTES} + "
                f"{MAX_PAYLOAD_BYTES} are allowed"
            )
        return cls(kind, request, body_bytes, payload_bytes)


def error_frame(request: int, code: Code, text: str) -> bytes:
    body = ERROR_CODE.pack(code) + text.encode()[:ERROR_TEXT_BYTES]
    return Header(Kind.ERROR, request, len(body)).pack() + body


def error_of(body: bytes) -> KvferryError:
    """The error that an ERROR frame's body stands for."""
    if len(body) < ERROR_CODE.size:
        return ProtocolError("the peer sent an error without a code")
    (code,) = ERROR_CODE.unpack_from(body)
    text = body[ERROR_CODE.size :].decode(errors="replace")
    return _ERRORS.get(code, TransferError)(f"the peer refused: {text}")


def table_of(body: bytes | bytearray) -> tuple[Ints, Ints]:
    """Addresses and lengths of a frame's table."""
    rows = np.frombuffer(body, dtype="<i8").reshape(-1, 2)
    return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])


def table_bytes(address: Ints, length: Ints) -> bytes:
    rows = np.empty((len(address), 2), dtype="<i8")
    rows[:, 0] = address
    rows[:, 1] = length
    return rows.tobytes()


@dataclass(frozen=True, slots=True)
class Session:
    """What both sides of one connection have said in the clear."""

    server_nonce: bytes
    client_nonce: bytes
    server: bytes  # incarnations
    client: bytes

    def client_mac(self, key: bytes) -> bytes:
        return self._mac(key, b"client", b"")

    def server_mac(self, key: bytes, regions: bytes) -> bytes:
        return self._mac(key, b"server", regions)

    def _mac(self, key: bytes, role: bytes, more: bytes) -> bytes:
        said = (role, self.server_nonce, self.client_nonce, self.server, self.client, more)
        return hmac.digest(key, b"".join(said), hashlib.sha256)
