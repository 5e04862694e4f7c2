# SPDX-License-Identifier: Apache-2.0
"""Keys: a peer proves with a key that it may speak to this engine.

Every channel is authenticated by a key that is derived from one of these:

    a configured secret    for peers on any host that have the same secret
    the key of this user   for peers of the same user on this host: 32 random bytes in a file that
                           no other user can read; the first process that needs it makes it

Without a secret, a process listens on loopback only and dials loopback only.

scrypt stretches the secret once, so that an attacker who records a handshake cannot try millions of
secrets a second. Each purpose then gets a key of its own, from which neither the secret nor another
key can be computed. A `Key` cannot be written into a message: no codec knows its type, and it
refuses to be pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any

from kvferry.errors import DescriptionError, KvferryError, NotPrivate
from kvferry.private_files import private_directory, read_private, write_private

LEAST_SECRET_BYTES = 16
HOW_TO_MAKE_ONE = "make one with `openssl rand -hex 32`, and give all engines the same"
USER_KEY_BYTES = 32
# 16 MiB and about 50 ms: little for the start of an engine, much for each guess of an attacker.
SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "dklen": 32}
RUNTIME_DIRECTORY = "KVFERRY_RUNTIME_DIR"  # environment variable that names another directory


class Key:
    """The root of all keys of one engine."""

    def __init__(self, material: bytes, *, configured: bool) -> None:
        self._material = material
        self.configured = configured  # by the operator, so peers may be on other hosts

    @classmethod
    def of(cls, secret: str | bytes | None) -> Key:
        """The key of a secret. Without a secret, the key of this user."""
        if secret is None:
            return cls(_user_key(), configured=False)
        material = secret.encode() if isinstance(secret, str) else secret
        if len(material) < LEAST_SECRET_BYTES:
            raise DescriptionError(
                f"a secret must have at least {LEAST_SECRET_BYTES} bytes, found {len(material)}: "
                f"shorter ones can be guessed; {HOW_TO_MAKE_ONE}"
            )
        return cls(material, configured=True)

    def derive(self, purpose: str) -> bytes:
        """32 bytes for one purpose. Processes with the same key derive the same bytes."""
        return hmac.digest(
            _stretched(self._material), f"kvferry 2 {purpose}".encode(), hashlib.sha256
        )

    def __repr__(self) -> str:
        return f"<a {'configured' if self.configured else 'user'} key>"

    def __reduce__(self) -> Any:
        raise TypeError("a key must not leave its process")


def runtime_directory() -> Path:
    """The private directory in which processes of this user on this host find each other. It lies
    in shared memory, so containers that share /dev/shm share it."""
    named = os.environ.get(RUNTIME_DIRECTORY)
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    path = Path(named) if named else base / f"kvferry-run-{os.geteuid()}"
    try:
        private_directory(path)
    except (OSError, NotPrivate) as error:
        raise DescriptionError(
            f"{path}, where processes of this user find each other, cannot be used: {error}; name "
            f"another directory in the variable {RUNTIME_DIRECTORY}, the same for all engines, or "
            "configure a secret (`secret_file`)"
        ) from None
    return path


@cache  # an engine has one secret and several channels
def _stretched(material: bytes) -> bytes:
    return hashlib.scrypt(material, salt=b"kvferry 2", **SCRYPT)


def _user_key() -> bytes:
    path = runtime_directory() / "key"
    try:
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another process of this user was faster
                write_private(path, secrets.token_bytes(USER_KEY_BYTES))
        key = read_private(path, USER_KEY_BYTES)
    except (OSError, KvferryError) as error:
        raise DescriptionError(
            f"the key that engines of this user share cannot be used: {error}; remove {path}, or "
            "configure a secret (`secret_file`)"
        ) from None
    if len(key) != USER_KEY_BYTES:
        raise DescriptionError(
            f"{path} has {len(key)} bytes, expected {USER_KEY_BYTES}; remove it, and start the "
            "engines of this user again"
        )
    return key
