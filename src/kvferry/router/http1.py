# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 messages as bytes: heads and bodies of clients' requests and of engines' answers.

The router reads both by the same rules, and refuses messages that two readers could understand in
two ways. Otherwise a client could smuggle a request into another client's connection:

- lines end with CR LF, and no line continues the one before
- no space stands between a header's name and its colon; values have no control characters
- a length is said once, by `Content-Length` or by `Transfer-Encoding: chunked`, never by both
- a request of HTTP/1.1 names one host; `Transfer-Encoding` needs HTTP/1.1

Everything here is pure. Connections feed bytes in and take the rest back (`Body.rest`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from http import HTTPStatus

from kvferry.errors import KvferryError
from kvferry.router.api import Headers

# Of a head, and of a line between two chunks. An engine's server may refuse a longer head by
# closing the connection, which looks like a failed engine.
MAX_HEAD_BYTES = 32 << 10

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [\t\x20-\x7e\x80-\xff]*)?")
_FIELDS = re.compile(rb"(?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)*")
_TRAILER = re.compile(_TOKEN + rb":[\t\x20-\x7e\x80-\xff]*")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_ONE_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class HttpError(KvferryError):
    """Bytes that are no HTTP/1.1 message, or one that can be read in two ways."""


class HeadTooLong(HttpError):
    """A head has more than MAX_HEAD_BYTES."""


@dataclass(slots=True)
class RequestHead:
    method: str
    target: bytes
    headers: Headers  # names in lower case
    keeps: bool  # the client may send another request behind this one
    is_1_1: bool  # it understands chunks
    continues: bool  # it waits for 100 Continue before it sends the body
    body: Body


@dataclass(slots=True)
class AnswerHead:
    status: int
    headers: Headers  # names in lower case
    keeps: bool  # the connection can bring another answer
    body: Body


def split_head(data: bytes) -> tuple[bytes, bytes] | None:
    """The head of a message without its last empty line, and the bytes behind it. None: the head is
    incomplete. Raises HttpError if no head can begin like this."""
    end = data.find(b"\r\n\r\n")
    if end > MAX_HEAD_BYTES or (end < 0 and len(data) > MAX_HEAD_BYTES):
        raise HeadTooLong(f"a head may have {MAX_HEAD_BYTES} bytes at most")
    if end >= 0:
        return data[: end + 2], data[end + 4 :]
    if b"\n\n" in data or b"\n\r\n" in data or b"\x00" in data:
        raise HttpError("lines must end with CR LF")
    return None


def read_request(head: bytes) -> RequestHead:
    """`head` ends with the last header's CR LF. Raises HttpError."""
    line, _, block = head.partition(b"\r\n")
    first = _REQUEST.fullmatch(line)
    if first is None:
        raise HttpError("the first line must be a method, a target and HTTP/1.1")
    headers, length, chunked, closes = _fields(block)
    is_1_1, hosts, expects = first[3] == b"1", 0, False
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"expect":
            expects |= is_1_1 and value.lower() == b"100-continue"
    if hosts > 1 or (is_1_1 and not hosts):
        raise HttpError(f"a request must have one Host header; this one has {hosts}")
    if chunked and not is_1_1:
        raise HttpError("HTTP/1.0 has no Transfer-Encoding")
    body, keeps = Body(chunked, length or 0), is_1_1 and not closes
    return RequestHead(first[1].decode(), first[2], headers, keeps, is_1_1, expects, body)


def read_answer(head: bytes, *, to_head: bool = False) -> AnswerHead:
    """The same for an answer; `to_head`: to a HEAD request, so without a body. Raises HttpError."""
    line, _, block = head.partition(b"\r\n")
    first = _STATUS.fullmatch(line)
    if first is None:
        raise HttpError(f"illegal status line {line[:40]!r}")
    headers, length, chunked, closes = _fields(block)
    status, is_1_1 = int(first[2]), first[1] == b"1"
    if status == 101:
        raise HttpError("an upgrade that was not asked for")
    if to_head or status < 200 or status in (204, 304):
        body = Body(False, 0)
    else:
        body = Body(chunked, math.inf if length is None else length)
    return AnswerHead(status, headers, is_1_1 and not closes, body)


def write_head(first: bytes, headers: Headers) -> bytes:
    """A head with its empty line. Headers that were read have no line breaks (`_FIELDS`)."""
    return b"\r\n".join([first, *[name + b": " + value for name, value in headers], b"\r\n"])


def status_line(status: int) -> bytes:
    return b"HTTP/1.1 %d %s" % (status, _REASONS.get(status, b""))


class Body:
    """The body of one message, as it comes."""

    def __init__(self, chunked: bool, length: float) -> None:
        """`length` of a body without chunks; infinite: it ends with the connection."""
        self.chunked = chunked
        self.parts: list[bytes] = []  # that came, and were not taken yet
        self.rest = b""  # that came behind the body
        self.whole = not chunked and not length
        self._left = 0 if chunked else length  # of the body, or of a chunk
        self._line = b""  # between chunks: a line that has not come to its end
        self._behind_chunk = self._behind_last = False

    @property
    def ends_with_connection(self) -> bool:
        return self._left == math.inf

    def take(self) -> bytes:
        """The bytes that came since the last call."""
        parts = self.parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return data

    def receive(self, data: bytes) -> None:
        """Raises HttpError."""
        if not self.chunked:
            self._receive_plain(data)
            return
        if self._line:
            data = self._line + data
        elif not (self._left or self._behind_chunk or self._behind_last) and self._one_chunk(data):
            return
        at, size = 0, len(data)
        while not self.whole and at < size:
            if self._left:
                end = min(size, at + int(self._left))
                self.parts.append(data[at:end])
                self._left -= end - at
                at = end
                self._behind_chunk = not self._left
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            self._read_line(data[at:end])
            at = end + 2
        if self.whole:
            self._line, self.rest = b"", data[at:]
            return
        self._line = data[at:]
        if len(self._line) > MAX_HEAD_BYTES:
            raise HttpError("a line between two chunks is too long")
        if self._behind_chunk and self._line and self._line != b"\r":
            raise HttpError(f"no chunk ends with {self._line[:40]!r}")

    def _one_chunk(self, data: bytes) -> bool:
        """Take `data` if it is one whole chunk, like most events of a stream. Otherwise return
        False, and take nothing."""
        found = _ONE_CHUNK.match(data)
        if found is None:
            return False
        begin, size = found.end(), int(found[1], 16)
        if not size or len(data) != begin + size + 2 or not data.endswith(b"\r\n"):
            return False
        self.parts.append(data[begin:-2])
        return True

    def _receive_plain(self, data: bytes) -> None:
        size = len(data)
        if size > self._left:
            end = int(self._left)
            data, self.rest = data[:end], data[end:]
            size = end
        if size:
            self.parts.append(data)
            self._left -= size
        self.whole = not self._left

    def _read_line(self, line: bytes) -> None:
        """Read the size of a chunk, the end of one, or a trailer."""
        if self._behind_last:
            self.whole = not line  # other lines are trailers, which are dropped
            if line and _TRAILER.fullmatch(line) is None:
                raise HttpError(f"no trailer is {line[:40]!r}")
        elif self._behind_chunk and not line:
            self._behind_chunk = False
        elif not self._behind_chunk and (found := _CHUNK_SIZE.fullmatch(line)):
            self._left = int(found[1], 16)
            self._behind_last = not self._left
        else:
            raise HttpError(f"no chunk begins with {line[:40]!r}")


def _fields(block: bytes) -> tuple[Headers, int | None, bool, bool]:
    """The headers; the length that they give, whether there are chunks, whether the sender closes
    the connection. Raises HttpError."""
    if _FIELDS.fullmatch(block) is None:
        raise HttpError("a header is a name, a colon and a value without control characters")
    headers: Headers = []
    length, chunked, closes = None, False, False
    for line in block.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        headers.append((name, value))
        if name == b"content-length":
            if length is not None or not value.isdigit() or len(value) > 18:
                raise HttpError("Content-Length must be one number, said once")
            length = int(value)
        elif name == b"transfer-encoding":
            if chunked or value.lower() != b"chunked":
                raise HttpError("the only Transfer-Encoding that is understood is chunked, once")
            chunked = True
        elif name == b"connection":
            closes |= b"close" in value.lower()
    if chunked and length is not None:
        raise HttpError("Content-Length and Transfer-Encoding contradict each other")
    return headers, length, chunked, closes
