# SPDX-License-Identifier: Apache-2.0
"""Every error that kvferry raises, in one tree.

    KvferryError
    ├── DescriptionError      a model, shape, interior or tensor cannot be described
    │   └── SettingsError     keys of a configuration are wrong
    ├── IncompatibleError     the two sides do not hold the same logical cache
    ├── CoverError            no choice of sources covers what the destination needs
    ├── TopologyError         a registration or a question about a remote engine is wrong
    │   └── UnknownEngine     a remote engine or stage that is not registered
    ├── BindError             block tables, bases or token counts do not fit the plan
    ├── TransferError         a carrier could not move bytes
    │   ├── PermissionDenied  the operating system forbids the access
    │   ├── OutOfBounds       an address outside the peer's registered memory
    │   ├── PeerLost          the peer died, restarted or closed the connection
    │   ├── DeadlineExceeded  the transfer missed its deadline
    │   └── Cancelled         the caller cancelled the transfer
    ├── HandoverError         a hand-over from producer to consumer failed
    │   ├── AuthenticationError  a peer without the shared secret
    │   ├── StaleTicket       the hold is closed, expired or of another incarnation
    │   ├── ChecksumError     the bytes that arrived differ from the source's
    │   └── ProtocolError     a message that this version does not understand
    ├── StoreError            a pool's store cannot be reached or used
    └── NotPrivate            other users could read or change kvferry's file or directory

A message says what was expected, what each side has, and what to do about it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


class KvferryError(Exception):
    """Base of all errors of this project."""


class DescriptionError(KvferryError, ValueError):
    """A model, shape, interior or tensor cannot be described."""


class SettingsError(DescriptionError):
    """Keys of a configuration are wrong. `found` has a message for each mistake."""

    def __init__(self, found: Sequence[str]) -> None:
        super().__init__("; ".join(found))
        self.found = tuple(found)

    def __reduce__(self) -> tuple[type[SettingsError], tuple[tuple[str, ...]]]:
        return type(self), (self.found,)


class IncompatibleError(KvferryError):
    """Two engines do not hold the same logical cache; nothing may move between them."""


class CoverError(KvferryError):
    """A byte that the destination needs has no source, or several."""


class TopologyError(KvferryError):
    """A remote engine is unknown, or was registered with contradicting facts."""


class UnknownEngine(TopologyError, KeyError):
    """A remote engine or stage is not registered. Callers of vLLM's topology expect a KeyError."""

    __str__ = Exception.__str__  # a KeyError's would put the message into quotes


class BindError(KvferryError, ValueError):
    """A plan cannot be bound to these block tables, addresses or token counts."""


class TransferError(KvferryError):
    """A carrier failed to move bytes."""


class PermissionDenied(TransferError):
    """The operating system does not let this process reach the peer's memory."""


class OutOfBounds(TransferError):
    """A copy reaches outside the regions that the peer registered."""


class PeerLost(TransferError):
    """The peer died, restarted, or closed the connection."""


class DeadlineExceeded(TransferError):
    """The transfer missed its deadline. Bytes that it wrote before stay written."""


class Cancelled(TransferError):
    """The caller cancelled the transfer."""


class HandoverError(KvferryError):
    """A hand-over from producer to consumer failed, before or after bytes moved."""


class AuthenticationError(HandoverError):
    """A peer does not have the shared secret, or no secret is configured and one is needed."""


class StaleTicket(HandoverError):
    """The ticket's hold is closed or expired, or it belongs to another incarnation."""


class ChecksumError(HandoverError):
    """The bytes that arrived differ from the source's. None of them may be used."""


class ProtocolError(HandoverError):
    """A message cannot be decoded, or the receiver does not expect it."""


class StoreError(KvferryError):
    """A pool's store cannot be reached or used."""


class NotPrivate(KvferryError):
    """A file or directory belongs to another user, or other users may read or change it."""


def text_of(error: BaseException) -> str:
    """An error's text for a person. Errors that are not kvferry's come with their class."""
    if isinstance(error, KvferryError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def install_command(*extras: str) -> str:
    """The command that installs extras of kvferry beside this Python, ready for a shell."""
    import importlib.metadata  # slow to import, and rarely needed

    try:
        importlib.metadata.distribution("kvferry")
        what = "kvferry"  # pip finds it installed, and adds what the extras need
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        what = str(Path(__file__).resolve().parents[2])
    return shlex.join([sys.executable, "-m", "pip", "install", f"{what}[{','.join(extras)}]"])
