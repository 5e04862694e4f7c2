"""The conformance suite on the carriers that need a library, with the real libraries.

The tests are those of tests/transport/test_conformance.py, on other carriers; here is what differs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_conformance as suite
from carrier_peer import KINDS, Kind, Peer, owner
from test_conformance import (  # noqa: F401, the tests and their fixtures
    Pair,
    make_pair,
    pair,
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

LIBRARIES = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}


def kind_of(name: str) -> Kind:
    pytest.importorskip(LIBRARIES[name], reason=f"needs the library of the carrier {name}")
    return KINDS[name]


@pytest.fixture(scope="module", params=list(LIBRARIES))
def standing(request: pytest.FixtureRequest) -> Iterator[tuple[Kind, Peer]]:
    kind = kind_of(request.param)
    with owner(kind) as peer:
        yield kind, peer


@pytest.fixture(params=list(LIBRARIES))
def mortal(request: pytest.FixtureRequest) -> Iterator[Pair]:
    kind = kind_of(request.param)
    with owner(kind) as peer:
        yield from make_pair(kind, peer)


@pytest.mark.parametrize("name", list(LIBRARIES))
@suite.both_ways
def test_a_peer_that_stops_answering(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX on one host is one-sided and does not even notice; over TCP it does."""
    kind_of(name)
    monkeypatch.setenv("UCX_TLS", "tcp")
    suite.test_a_peer_that_stops_answering(name, direction)
