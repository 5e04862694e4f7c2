"""Waiting for a carrier's transfers, and ending them for good."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kvferry.errors import DeadlineExceeded, KvferryError
from kvferry.p2p.watch import Watch
from kvferry.transport.base import Transfer, TransferState

log = logging.getLogger("kvferry")

STUCK_LOOK_SECONDS = 1.0  # between two tries to end a transfer
TRANSFER_LOOK_SECONDS = 0.1  # between two looks at whether a transfer is still wanted


def await_transfer(transfer: Transfer, watch: Watch) -> None:
    """Wait for a transfer, and look now and then whether anyone still wants it."""
    while True:
        watch.require_wanted()
        try:
            transfer.wait(min(watch.deadline, time.monotonic() + TRANSFER_LOOK_SECONDS))
            return
        except DeadlineExceeded:
            if time.monotonic() >= watch.deadline or transfer.poll() is TransferState.FAILED:
                raise


Stuck = Callable[[], AbstractContextManager[None]]


def end_for_good(end: Callable[[], bool], stuck: Stuck) -> None:
    """Call `end` until it is true: only then can no byte arrive any more.

    `stuck` is entered once that has failed, for as long as it takes: whoever counts what is stuck
    sees it. There is no way out but the end, because the memory must not be used before.
    """
    with contextlib.ExitStack() as stack:
        tries = 0
        while not end():
            tries += 1
            if tries == 1:
                stack.enter_context(stuck())


def end_transfers(transfers: Sequence[Transfer], stuck: Stuck) -> None:
    """Cancel all. Returns only when no byte of any can arrive: their blocks are used again."""
    left = list(transfers)

    def end() -> bool:
        while left:
            try:
                left[-1].cancel()
            except DeadlineExceeded as error:
                if not left[-1].settled():
                    log.error("a transfer that was cancelled keeps its blocks: %s", error)
                    _look_at(left[-1])
                    return False
            left.pop()
        return True

    end_for_good(end, stuck)


def _look_at(transfer: Transfer) -> None:
    """Until it ends, but not for long; it may end however it likes."""
    try:
        transfer.wait(time.monotonic() + STUCK_LOOK_SECONDS)
    except DeadlineExceeded:
        pass  # it goes on, as was said
    except KvferryError as error:
        log.info("a transfer that was cancelled has failed: %s", error)
