"""What strangers may take of a decode engine that asks bootstraps, and of a bootstrap itself."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch warns of itself
    warnings.simplefilter("ignore")
    import kvferry.vllm.connector  # noqa: F401

from kvferry.errors import HandoverError
from kvferry.net.rpc import Sockets
from kvferry.vllm.bootstrap import (
    Bootstrap,
    BootstrapPlace,
    Rendezvous,
    Whereabouts,
    query,
    register,
)
from kvferry.vllm.config import FerryConfig
from vllm_pairs import reaches

LOOPBACK = "127.0.0.1"
GOOD = Whereabouts("e", LOOPBACK, 77, "i")


@pytest.fixture
def bootstrap() -> Iterator[Bootstrap]:
    made = Bootstrap(None, 0, None)
    made.put(0, GOOD.entry({}))
    yield made
    made.close()


@pytest.mark.parametrize("count", [26, 60])
def test_silent_bootstraps_hold_up_no_question(bootstrap: Bootstrap, count: int) -> None:
    sockets = Sockets()
    rendezvous = Rendezvous(FerryConfig(bootstrap_seconds=6.0), sockets)
    with contextlib.ExitStack() as stack:
        stack.callback(sockets.close)
        stack.callback(rendezvous.close)
        silent = [
            # its owner never accepts: the kernel takes connections for it, and nobody answers
            stack.enter_context(socket.create_server((LOOPBACK, 0))).getsockname()[1]
            for _ in range(count)
        ]
        places = [
            BootstrapPlace("e", f"{LOOPBACK}:{port}", True) for port in silent for _ in range(3)
        ]
        assert all(rendezvous.find(place) is None for place in places)
        questions = [rendezvous._asked[place].answer for place in places]
        good = BootstrapPlace("e", f"{LOOPBACK}:{bootstrap.port}", True)
        assert reaches(lambda: rendezvous.find(good) is not None, True)
        assert not questions[0].done()  # it has the longest patience, and nobody waited for it
        with pytest.raises(HandoverError, match="does not answer"):
            questions[0].result(30)
        with pytest.raises(HandoverError, match="not asked again"):  # nor for another engine
            rendezvous.find(BootstrapPlace("other", places[0].address, True))


def trickle(port: int, count: int) -> list[socket.socket]:
    """Requests that are never finished, a byte now and then."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection((LOOPBACK, port), 5))
        made[-1].sendall(b"GET /query HTTP/1.1\r\nX-A")
    return made


def test_trickled_requests_hold_up_no_query(bootstrap: Bootstrap) -> None:
    before, server = threading.active_count(), f"{LOOPBACK}:{bootstrap.port}"
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(one) for one in trickle(bootstrap.port, 1500)]
        for round_ in range(20):
            for stranger in strangers[round_::20]:
                with contextlib.suppress(OSError):  # it was hung up on
                    stranger.sendall(b"a")
            assert query(server, "e", 5.0) == GOOD
            register(server, 1, Whereabouts("f", LOOPBACK, 78, "i").entry({}), None, 5.0)
        assert threading.active_count() <= before  # whatever the number of connections
        with urllib.request.urlopen(f"http://{server}/query", timeout=5) as answer:
            assert set(json.load(answer)) == {"0", "1"}


def test_what_trickles_is_hung_up_on_in_the_end(
    bootstrap: Bootstrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a byte comes: the deadline is the whole request's."""
    from kvferry.net import http

    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.5)
    (stranger,) = trickle(bootstrap.port, 1)
    with stranger:
        until = time.monotonic() + 30
        with pytest.raises(OSError):
            while True:
                assert time.monotonic() < until
                stranger.sendall(b"a")
                time.sleep(0.02)


def test_registrations_are_bounded_and_leave_the_engine_s_own_alone(bootstrap: Bootstrap) -> None:
    """A peer that knows the secret may be faulty. What is kept is bounded by what `query` reads."""
    server = f"{LOOPBACK}:{bootstrap.port}"
    with pytest.raises(HandoverError, match="own rank"):
        register(server, 0, Whereabouts("evil", LOOPBACK, 9, "i").entry({}), None, 5.0)
    large = {**Whereabouts("f", LOOPBACK, 78, "i").entry({}), "worker_addr": "x" * 300_000}
    for rank in range(1, 4):
        register(server, rank, large, None, 5.0)
    for rank in (4, -1, 1 << 40):
        with pytest.raises(HandoverError, match=r"more than|dp_rank"):
            register(server, rank, large, None, 5.0)
    assert query(server, "e", 5.0) == GOOD
