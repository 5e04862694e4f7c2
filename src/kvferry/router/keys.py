# SPDX-License-Identifier: Apache-2.0
"""Keys of clients, the token of the admin API, and the key that the router sends to engines.

The router keeps secrets as SHA-256 digests. It compares each request's secret with all of them, in
constant time, so the time reveals neither how much of a secret is right nor which one it is. No
message, log line or page shows a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from pathlib import Path

from kvferry.errors import DescriptionError
from kvferry.router.api import ApiError, Headers

log = logging.getLogger(__name__)
_LEAST_LETTERS = 8  # of a key
_LEAST_TOKEN_LETTERS = 16  # of a token, which may change the fleet
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SECRET = re.compile(r"[\x21-\x7e]+")


class Secrets:
    """Secrets of which a client must show one, as `Authorization: Bearer ...`."""

    def __init__(self, what: str, *secrets: str) -> None:
        self._what = what  # for messages: "API key"
        self._digests = tuple(_digest(secret.encode()) for secret in secrets)

    def use(self, data: bytes) -> None:
        """Take the secrets of a file, one on a line: as it is, or `sha256:` and its digest in hex.

        Empty lines and lines with # do not count. Raises DescriptionError.
        """
        digests = []
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            word = line.strip()
            if not word or word.startswith("#"):
                continue
            if _DIGEST.fullmatch(word.lower()):
                digests.append(bytes.fromhex(word[len("sha256:") :]))
            elif word.startswith("sha256:") or not _usable(word, _LEAST_LETTERS):
                raise DescriptionError(
                    f"line {number} is no {self._what}: expected {_LEAST_LETTERS} letters or more "
                    "without spaces, or sha256: and 64 hexadecimal digits"
                )
            else:
                digests.append(_digest(word.encode()))
        if not digests:
            raise DescriptionError(f"expected a line with an {self._what}, or several")
        self._digests = tuple(digests)

    def require(self, headers: Headers) -> str:
        """The name of the secret that a request shows, for quotas and logs. Raises ApiError 401."""
        shown = [value for name, value in headers if name == b"authorization"]
        scheme, _, secret = shown[0].partition(b" ") if len(shown) == 1 else (b"", b"", b"")
        secret = secret.strip()
        mine = _digest(secret)
        found = False
        for digest in self._digests:  # without an early exit, which would take less time
            found |= hmac.compare_digest(digest, mine)
        if not found or scheme.lower() != b"bearer":
            why = f"the {self._what} is missing or not known"
            why += "; send Authorization: Bearer and the key"
            refusal = ApiError(401, "invalid_api_key", why)
            refusal.answer.headers.append((b"www-authenticate", b"Bearer"))
            raise refusal
        return f"key {mine.hex()[:12]}"


class EngineKey:
    """The key that engines get in place of the clients'."""

    def __init__(self) -> None:
        self._header = b""

    def use(self, data: bytes) -> None:
        word = data.decode("utf-8", "replace").strip()
        if not _usable(word, 1):
            raise DescriptionError("the engines' key must be one line of ASCII without spaces")
        self._header = b"Bearer " + word.encode()

    def replace(self, headers: Headers) -> Headers:
        kept = [(name, value) for name, value in headers if name != b"authorization"]
        return [*kept, (b"authorization", self._header)]


def admin_token(file: Path | None) -> str | None:
    """The token of the admin API, from a file or KVFERRY_ROUTER_TOKEN; None: there is no such API.

    Raises DescriptionError.
    """
    if file is None:
        # An empty variable counts as unset, an empty file does not.
        token = os.environ.get("KVFERRY_ROUTER_TOKEN", "").strip()
        if not token:
            return None
        where = "KVFERRY_ROUTER_TOKEN"
    else:
        try:
            token = file.read_text("utf-8", "replace").strip()
        except OSError as error:
            raise DescriptionError(f"cannot read the token file {file}: {error.strerror}") from None
        warn_if_readable(file)
        where = str(file)
    if not _usable(token, _LEAST_TOKEN_LETTERS):
        raise DescriptionError(
            f"{where} must have a token of {_LEAST_TOKEN_LETTERS} letters or more, on one line, "
            "without spaces; make one with: openssl rand -hex 32"
        )
    return token


def warn_if_readable(file: Path) -> None:
    """Warn if other users can read a file with secrets."""
    if file.stat().st_mode & 0o007:
        log.warning("%s can be read by all users of this host; run chmod 600 on it", file)


def _usable(word: str, least: int) -> bool:
    return len(word) >= least and _SECRET.fullmatch(word) is not None


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
