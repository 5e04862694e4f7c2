"""Notes: a few bytes that tell a peer, over NIXL itself, that a transfer has ended.

    carrier.write(peer, copies, note=b"...")    after its last byte is there
    carrier.notes()                             what peers said since the last call

NIXL delivers notifications of whoever reaches an agent, also of one that nobody introduced. So each
is sealed by what the endpoint gave to those who may connect, and to nobody else: the token and the
incarnation of the peer that is meant. What has no such seal is not a note; it is counted and
dropped. A note has no answer, and an owner that does not ask for its notes lets them pile up within
NIXL: whoever needs to know that he was heard says it elsewhere, as kvferry's own engines do (a hold
ends by words that are answered).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from kvferry.errors import TransferError
from kvferry.transport.foreign_peer import ForeignEndpoint

MAGIC = b"kvferry-note-1\n"
SEAL_BYTES = 32
MOST_NOTE_BYTES = 4096


def require_note(note: bytes) -> None:
    if not 0 < len(note) <= MOST_NOTE_BYTES:
        raise TransferError(
            f"a note has between 1 and {MOST_NOTE_BYTES} bytes, found {len(note)}; send more by "
            "writing it to registered memory"
        )


def sealed(note: bytes, to: ForeignEndpoint) -> bytes:
    return MAGIC + _seal(note, to.token, to.incarnation) + note


def opened(messages: Iterable[bytes], token: bytes, incarnation: bytes) -> tuple[list[bytes], int]:
    """The notes among them, and how many are none."""
    notes, others = [], 0
    begin = len(MAGIC) + SEAL_BYTES
    for message in messages:
        note = message[begin:]
        whole = MAGIC + _seal(note, token, incarnation) + note
        if note and hmac.compare_digest(message, whole):
            notes.append(note)
        else:
            others += 1
    return notes, others


def _seal(note: bytes, token: bytes, incarnation: bytes) -> bytes:
    return hmac.digest(token + incarnation, MAGIC + note, "sha256")
