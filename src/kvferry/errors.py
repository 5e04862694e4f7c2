"""Every error that kvferry raises, in one tree.

    KvferryError
    ├── DescriptionError      a model, shape, interior or tensor cannot be described
    ├── IncompatibleError     the two sides do not hold the same logical cache
    ├── CoverError            no choice of sources covers what the destination needs
    ├── TopologyError         a registration or a question about a remote engine is wrong
    ├── BindError             block tables, bases or token counts do not fit the plan
    │   └── LimitError        more descriptors than the caller allows
    ├── TransferError         a carrier could not move bytes
    │   ├── PermissionDenied  the operating system forbids the access
    │   ├── OutOfBounds       an address outside of what the peer registered
    │   ├── PeerLost          the peer died, restarted or closed the connection
    │   ├── DeadlineExceeded  not done in time
    │   └── Cancelled         given up by the caller
    ├── HandoverError         producer and consumer do not come together
    │   ├── AuthenticationError  a peer without the shared secret
    │   ├── StaleTicket       the hold is closed, expired or of another incarnation
    │   ├── ChecksumError     bytes arrived differently than the source holds them
    │   └── ProtocolError     a message that this version does not understand
    ├── StoreError            a pool's store cannot be reached or used
    └── NotPrivate            a file or directory of ours that other users could read or change

Messages say what was expected, what was found on each side, and what to do about it.
"""

from __future__ import annotations


class KvferryError(Exception):
    """Base of all errors of this project."""


class DescriptionError(KvferryError, ValueError):
    """A cache cannot be described as asked."""


class IncompatibleError(KvferryError):
    """Two engines do not hold the same logical cache; nothing may move between them."""


class CoverError(KvferryError):
    """Some byte that the destination needs has no source, or more than one."""


class TopologyError(KvferryError):
    """A remote engine is unknown, or was registered with contradicting facts."""


class BindError(KvferryError, ValueError):
    """A plan cannot be bound to these block tables, addresses or token counts."""


class LimitError(BindError):
    """Binding would make more descriptors than the caller's limit."""


class TransferError(KvferryError):
    """A carrier failed to move bytes."""


class PermissionDenied(TransferError):
    """The operating system does not let this process reach the peer's memory."""


class OutOfBounds(TransferError):
    """A copy reaches outside of the regions that the peer registered."""


class PeerLost(TransferError):
    """The peer is gone: it died, restarted, or closed the connection."""


class DeadlineExceeded(TransferError):
    """The transfer was not done in time. What it had written stays written."""


class Cancelled(TransferError):
    """The caller gave the transfer up."""


class HandoverError(KvferryError):
    """A hand-over from producer to consumer failed before bytes moved, or after."""


class AuthenticationError(HandoverError):
    """A peer does not know the shared secret, or none was configured where one is needed."""


class StaleTicket(HandoverError):
    """The hold behind a ticket is closed, expired, or was another incarnation's."""


class ChecksumError(HandoverError):
    """What arrived is not what the source holds; nothing of it may be used."""


class ProtocolError(HandoverError):
    """A message that cannot be read, or that makes no sense here."""


class StoreError(KvferryError):
    """A pool's store cannot be reached or used."""


class NotPrivate(KvferryError):
    """A file or directory of ours belongs to another user, or other users may read or change it."""
