"""The conformance suite on device memory: the cuda carrier, and tcp with staging.

The tests are those of tests/transport/test_conformance.py; here is what differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import device_peer
import numpy as np
import pytest
import test_conformance as suite
from carrier_peer import Peer
from device_peer import KINDS, DeviceArea, DeviceKind
from test_conformance import (  # noqa: F401, the tests themselves
    Pair,
    pair,
    quick_switches,
    test_a_deadline_leaves_the_transfer_running,
    test_a_restarted_peer_is_another_peer,
    test_after_cancel_no_byte_arrives,
    test_arrays_that_make_no_sense_are_refused,
    test_both_regions_and_their_edges,
    test_cancel_after_the_end_changes_nothing,
    test_close_ends_what_runs,
    test_disconnect_ends_that_peer_only,
    test_many_scattered_copies,
    test_many_transfers_at_once,
    test_nothing_to_do,
    test_one_copy_of_any_length,
    test_other_threads_keep_running,
    test_out_of_bounds_writes_nothing,
    test_peer_killed_in_the_middle,
)

from scattered import copy_scattered


@cache
def own_area() -> DeviceArea:
    return DeviceArea.allocate()


@pytest.fixture(autouse=True, scope="module")
def on_the_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "own_memory", own_area)
        patch.setattr(suite, "owner", device_peer.owner)
        patch.setattr(suite, "user", device_peer.user)
        patch.setattr(suite, "copy_scattered", _copy_scattered)
        patch.setattr(Pair, "long", _long)
        yield


def _long(self: Pair, direction: str) -> Any:
    rounds = self.kind.long_rounds  # type: ignore[attr-defined]
    at = np.full(rounds, suite.FIRST[0])
    return self.start(direction, at, at, np.full(rounds, suite.BIG))


def _copy_scattered(src: Any, *rest: Any) -> None:
    copy_scattered(np.asarray(src), *rest)


@pytest.fixture(scope="module", params=list(KINDS))
def standing(request: pytest.FixtureRequest) -> Iterator[tuple[DeviceKind, Peer]]:
    kind = KINDS[request.param]
    with device_peer.owner(kind) as peer:
        yield kind, peer


@pytest.fixture(params=list(KINDS))
def mortal(request: pytest.FixtureRequest) -> Iterator[Pair]:
    kind = KINDS[request.param]
    with device_peer.owner(kind) as peer:
        yield from suite.make_pair(kind, peer)  # type: ignore[arg-type]
