"""What a load reads, piece by piece, and how many of them at once.

A piece is what a carrier is given in one call: a slice of copies, bound when it is asked for, so
that no NumPy call takes long; or a whole strided batch, where the carrier takes it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvferry.p2p.remote import Source
from kvferry.p2p.transfers import await_transfer
from kvferry.p2p.watch import Watch
from kvferry.plan import Bound, Copies
from kvferry.transport.base import Transfer

SLICE_DESCRIPTORS = 65_536
# Slices under way at once, if there are not more sources. Each keeps a carrier's threads busy, and
# an engine's step waits for the interpreter behind all of them (benchmarks/stall.py).
LEAST_FLYING = 2


def post_reads(bound: Mapping[Source, Bound], transfers: list[Transfer], watch: Watch) -> None:
    """Have all of it read; what was begun is in `transfers`, also where this raises."""
    most = max(LEAST_FLYING, len(bound))
    for source, piece in _in_turn(bound):
        assert source.carrier is not None
        if len(transfers) >= most and not _takes_strided(source):
            await_transfer(transfers[-most], watch)
        transfers.append(source.carrier.read(source.peer, piece))


def _takes_strided(source: Source) -> bool:
    """Whether its carrier takes a whole batch as it is, and queues it elsewhere than here."""
    return bool(getattr(source.carrier, "takes_strided", False))


def _in_turn(bound: Mapping[Source, Bound]) -> Iterator[tuple[Source, Any]]:
    """A piece of each source after the other."""
    left = [(source, _pieces(source, copies)) for source, copies in bound.items()]
    while left:
        for turn in list(left):
            piece = next(turn[1], None)
            if piece is None:
                left.remove(turn)
            else:
                yield turn[0], piece


def _pieces(source: Source, copies: Bound) -> Iterator[Any]:
    if _takes_strided(source):
        yield from copies.batches
        return
    for piece in copies.slices(SLICE_DESCRIPTORS):
        yield Copies(piece.src.copy(), piece.dst.copy(), piece.length.copy())
