"""A decode engine's scheduler goes on, whatever a bootstrap answers and whatever vLLM makes room
for; no engines here."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch warns of itself
    warnings.simplefilter("ignore")
    import kvferry.vllm.connector  # noqa: F401

from kvferry.errors import AuthenticationError, HandoverError, ProtocolError
from kvferry.handover.ticket import FORMAT, MARK, Ticket
from kvferry.net.rpc import Sockets
from kvferry.vllm import bootstrap as bootstrap_module
from kvferry.vllm.bootstrap import (
    FRESH_SECONDS,
    MAC,
    Bootstrap,
    BootstrapPlace,
    Rendezvous,
    Whereabouts,
    derived_hold,
    query,
    register,
    transfer_name,
)
from kvferry.vllm.config import FerryConfig
from kvferry.vllm.consuming import Consuming
from kvferry.vllm.fingerprint import request_digest
from kvferry.vllm.metrics import ComputedHere
from vllm_pairs import AllArrived, handover_parts, mooncake_decode, reaches

TOKENS = 40
SECRET = "a secret for these tests"
GOOD = {"host": "127.0.0.1", "port": 9, "incarnation": "i"}


def request(**params: Any) -> Any:
    return SimpleNamespace(
        request_id="cmpl-r-0-0123abcd",
        kv_transfer_params=params,
        prompt_token_ids=list(range(TOKENS)),
        num_prompt_tokens=TOKENS,
        num_tokens=TOKENS,
        mm_features=None,
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
    )


class Engine:
    """The asking part of a scheduler, with a real bootstrap to ask."""

    def __init__(self, config: FerryConfig | None = None) -> None:
        config = config or FerryConfig()
        self.sockets, parts = Sockets(), handover_parts("mooncake", config)
        self.rendezvous = Rendezvous(config, self.sockets)
        self.asking = Consuming(parts, self.rendezvous, AllArrived())
        self.orders, self.stats = parts.orders, parts.stats

    @cached_property
    def bootstrap(self) -> Bootstrap:
        """Made where one is needed: it takes half a second to end."""
        return Bootstrap(None, 0, None)

    def request(self) -> Any:
        return request(**mooncake_decode("t", self.bootstrap.port, "e"))

    @property
    def here(self) -> dict[ComputedHere, int]:
        """Requests that were computed here, by reason."""
        counted: dict[ComputedHere, int] = self.stats.data.get("requests_computed_here", {})
        return counted

    def look(self, asked: Any) -> tuple[int | None, bool]:
        """What vLLM is told in the end."""
        assert reaches(lambda: self.asking.matched(asked, 0)[0] is not None, True)
        return self.asking.matched(asked, 0)

    def close(self) -> None:
        self.rendezvous.close()
        if "bootstrap" in vars(self):
            self.bootstrap.close()
        self.sockets.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


@pytest.mark.parametrize(
    "told",
    [
        {"incarnation": "\ud800"},
        {"host": "h\ud800"},
        {"host": "10.0.0.1;10.0.0.2"},
        {"host": "a b"},
        {"port": True},
    ],
    ids=ascii,
)
def test_what_a_bootstrap_answers_is_refused(
    engine: Engine, told: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine.bootstrap.put(0, {"engine_id": "e", "kvferry": {**GOOD, **told}})
    caplog.set_level(logging.INFO, "kvferry")
    asked = engine.request()
    engine.asking.arrived(asked)
    assert engine.look(asked) == (0, False)
    assert "damaged" in caplog.text or "is no bootstrap" in caplog.text
    aborted = engine.request()
    aborted.request_id = "cmpl-s-0-0123abcd"
    engine.asking.arrived(aborted)
    engine.asking.finished(aborted.request_id)
    assert engine.asking.unsettled

    def settled() -> bool:
        engine.asking.settle()
        return not engine.asking.unsettled

    assert reaches(settled, True)
    assert "not given back" in caplog.text and not engine.orders.releases


def test_a_bootstrap_that_refuses_late_is_asked_once_for_all_that_were_aborted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else this engine would step on for as long as the bootstrap refuses, and never sleep."""
    asked: list[str] = []

    def refuse(address: str, engine_id: str, seconds: float) -> Any:
        asked.append(address)
        time.sleep(1.2 * FRESH_SECONDS)
        raise ProtocolError("no bootstrap")

    monkeypatch.setattr(bootstrap_module, "query", refuse)
    for number in range(5):
        aborted = request(**mooncake_decode(f"t{number}", 1, "e"))
        aborted.request_id = f"cmpl-{number}-0-0123abcd"
        engine.asking.arrived(aborted)
        engine.asking.finished(aborted.request_id)

    def settled() -> bool:
        engine.asking.settle()
        return not engine.asking.unsettled

    assert reaches(settled, True)
    assert len(asked) == 1


def test_an_error_of_ours_ends_no_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a bug")

    aborted, asked = engine.request(), engine.request()
    aborted.request_id = "cmpl-s-0-0123abcd"
    monkeypatch.setattr(engine.rendezvous, "find", lambda _: None)  # not yet
    engine.asking.arrived(aborted)
    engine.asking.finished(aborted.request_id)
    monkeypatch.setattr(engine.rendezvous, "find", fail)
    engine.asking.arrived(asked)
    assert engine.asking.matched(asked, 0) == (0, False)
    engine.asking.settle()
    assert not engine.asking.unsettled and caplog.text.count("KeyError: 'a bug'") == 2


def test_a_thread_that_cannot_start(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine.bootstrap.put(0, {"engine_id": "e", "kvferry": GOOD})
    asked = engine.request()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(HandoverError, match="cannot be asked"):
            engine.rendezvous.find(BootstrapPlace("e", "127.0.0.1:1", True))
        engine.asking.arrived(asked)
        assert engine.asking.matched(asked, 0) == (0, False)
    later = engine.request()
    later.request_id = "cmpl-s-0-0123abcd"
    engine.asking.arrived(later)
    assert engine.look(later) == (TOKENS, True)


def ticketed(asked: Any, **other: Any) -> Any:
    """A request with a ticket of its own."""
    told = {"digest": request_digest(asked), "tokens": TOKENS, **other}
    ticket = Ticket("e", "i", "h", host="127.0.0.1", port=9, request_id="r", **told)
    asked.kv_transfer_params = ticket.to_params()
    return asked


def changed(asked: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(asked, name, value)
    return asked


def with_format(asked: Any, number: int) -> Any:
    asked.kv_transfer_params[MARK]["format"] = number
    return asked


NOT_LOADED: list[tuple[ComputedHere, Any]] = [
    ("no ticket", lambda: request(do_remote_prefill=True)),
    ("no ticket", lambda: request(do_remote_prefill=True, remote_block_ids=[[1]])),
    ("no ticket", lambda: request(do_remote_prefill=True, transfer_id="t")),
    ("no ticket", lambda: request(**{MARK: "yes"})),
    ("bad ticket", lambda: with_format(ticketed(request()), 9)),
    ("bad ticket", lambda: request(**{MARK: {}})),
    ("bad ticket", lambda: ticketed(request(), tokens=TOKENS + 1)),
    ("another prompt", lambda: ticketed(request(), digest="d")),
    ("not held", lambda: request(**{MARK: {"format": FORMAT, "not_held": "over max_held_blocks"}})),
    ("unfit", lambda: ticketed(changed(request(), prompt_embeds=[1.0]))),
    ("unfit", lambda: changed(request(**mooncake_decode("t", 1, "e")), resumable=True)),
    ("error", lambda: changed(ticketed(request()), lora_request=object())),
]


@pytest.mark.parametrize(("reason", "make"), NOT_LOADED, ids=lambda x: x if x else "")
def test_what_is_computed_here_is_counted_once(
    engine: Engine, reason: ComputedHere, make: Any
) -> None:
    asked = make()
    engine.asking.arrived(asked)
    for _ in range(3):  # as often as vLLM likes
        assert engine.asking.matched(asked, 0) == (0, False)
    engine.asking.allocated(asked, ([1, 2, 3],), 0)
    engine.asking.reset()
    engine.asking.finished(asked.request_id)
    assert engine.here == {reason: 1} and reason in get_args(ComputedHere)
    assert engine.stats.reduce()[f"computed here: {reason}"] == 1
    # what vLLM sends to say that it rejected a request is no request
    engine.asking.arrived(changed(make(), abort_immediately=True))
    assert engine.here == {reason: 1}


def test_a_producer_that_is_not_found_is_counted_once(engine: Engine) -> None:
    engine.bootstrap.put(0, {"engine_id": "another", "kvferry": GOOD})
    asked = engine.request()
    engine.asking.arrived(asked)
    assert engine.look(asked) == engine.look(asked) == (0, False)
    engine.asking.finished(asked.request_id)
    assert engine.here == {"not found": 1}


def test_a_producer_that_never_answers_is_counted_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.rendezvous, "find", lambda _: None)
    asked = engine.request()
    engine.asking.arrived(asked)
    assert engine.asking.matched(asked, 0) == (None, False) and not engine.here
    engine.asking.wanted[asked.request_id].arrived -= 1000
    assert engine.look(asked) == engine.look(asked) == (0, False)
    assert engine.here == {"not found": 1}


def test_a_producer_is_found_while_vllm_asks_for_no_match(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots are taken for longer than a bootstrap may take; the hold is renewed meanwhile."""
    watched: list[Ticket] = []
    monkeypatch.setattr(engine.asking.renewer, "watch", lambda ticket, **_: watched.append(ticket))
    engine.bootstrap.put(0, {"engine_id": "e", "kvferry": GOOD})
    asked = engine.request()
    engine.asking.arrived(asked)

    def stepped() -> int:
        engine.asking.settle()
        return len(watched)

    assert reaches(stepped, 1)
    engine.asking.wanted[asked.request_id].arrived -= 1000
    assert engine.asking.matched(asked, 0) == (TOKENS, True)
    assert stepped() == 1 and not engine.here


@pytest.mark.parametrize("with_ticket", [True, False])
def test_hosts_that_are_no_peers_are_counted_once(with_ticket: bool) -> None:
    engine = Engine(FerryConfig(peers=("10.0.0.0/8",)))
    try:
        asked = ticketed(request()) if with_ticket else engine.request()
        engine.asking.arrived(asked)
        assert engine.look(asked) == engine.look(asked) == (0, False)
        assert engine.here == {"not allowed": 1} and not engine.orders.releases
    finally:
        engine.close()


def test_a_reset_counts_what_waited(engine: Engine) -> None:
    """What is loading is given up, and fails: that is another metric's."""
    waits, loads = ticketed(request()), ticketed(changed(request(), request_id="cmpl-l-0-0123abcd"))
    for asked in (waits, loads):
        engine.asking.arrived(asked)
        assert engine.asking.matched(asked, 0) == (TOKENS, True)
    engine.asking.allocated(loads, ([1, 2, 3],), TOKENS)
    engine.asking.reset()
    engine.asking.received([loads.request_id], {loads.request_id})
    assert engine.asking.matched(waits, 0) == (0, False)
    engine.asking.reset()
    assert engine.here == {"reset": 1}


def test_what_is_loaded_here_already_or_aborted_is_not_computed(engine: Engine) -> None:
    names = ("loaded", "here", "aborted")
    loaded, here, aborted = (ticketed(changed(request(), request_id=name)) for name in names)
    for asked, computed in ((loaded, 0), (here, TOKENS), (aborted, 0)):
        engine.asking.arrived(asked)
        engine.asking.matched(asked, computed)
    engine.asking.allocated(loaded, ([1, 2, 3],), TOKENS)
    engine.asking.received([loaded.request_id], ())
    engine.asking.allocated(here, ([1, 2, 3],), 0)
    for asked in (loaded, here, aborted):
        engine.asking.finished(asked.request_id)
    assert not engine.here and len(engine.stats.data["total_seconds"]) == 1


@pytest.mark.parametrize(
    ("local", "external"), [(0, TOKENS), (16, 24), (0, 32), (16, 16), (16, TOKENS)]
)
def test_room_for_other_tokens_than_a_ticket_holds(
    engine: Engine, local: int, external: int, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request()
    asked.kv_transfer_params = Ticket(
        "e", "i", "h", request_digest(asked), TOKENS, "127.0.0.1", 9, "r"
    ).to_params()
    engine.asking.arrived(asked)
    assert engine.asking.matched(asked, 0) == (TOKENS, True)  # there was no room that time
    assert engine.asking.matched(asked, local) == (TOKENS - local, True)
    engine.asking.allocated(asked, ([1, 2, 3],), external)
    (load,) = engine.orders.loads
    if local + external == TOKENS:
        assert (load.tables, load.skip) == (((1, 2, 3),), local)
    else:
        assert (load.tables, load.skip) == (((),), 0)  # which fails: tests/transport shows it
        assert "makes room" in caplog.text


def test_a_mac_that_is_no_digest() -> None:
    bootstrap = Bootstrap(None, 0, SECRET)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", bootstrap.port, timeout=5)
        body = json.dumps({"dp_rank": 1, "engine_id": "e", "kvferry": GOOD})
        connection.request("POST", "/register", body, {MAC: "\xe9" * 64})
        answer = connection.getresponse()
        assert answer.status == 400 and b"secret" in answer.read()
        register(f"127.0.0.1:{bootstrap.port}", 1, json.loads(body), SECRET, 5.0)
    finally:
        bootstrap.close()


def test_a_transfer_id_without_bytes() -> None:
    with pytest.raises(ProtocolError, match="transfer_id"):
        transfer_name({"transfer_id": "\ud800"}, "r", "mooncake")
    assert derived_hold("i", transfer_name({"transfer_id": "\U0001f600"}, "r", "mooncake") or "")


class TestNames:
    def test_a_slow_name_takes_the_question_s_time_at_most(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers = threading.Event()

        def slow(*_: Any, **__: Any) -> Any:
            answers.wait(30)
            raise OSError("no such name")

        monkeypatch.setattr(socket, "getaddrinfo", slow)
        began = time.monotonic()
        try:
            with pytest.raises(HandoverError, match="not resolved in time"):
                query("slow.example:8998", "e", 0.3)
            assert time.monotonic() - began < 5
        finally:
            answers.set()

    def test_the_next_address_where_nobody_listens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bootstrap = Bootstrap(None, 0, None)
        bootstrap.put(0, Whereabouts("e", "127.0.0.1", 77, "i").entry({}))
        real = socket.getaddrinfo

        def two(host: str, port: Any, *args: Any, **kwargs: Any) -> Any:
            if host != "two.example":
                return real(host, port, *args, **kwargs)
            return [(None, None, None, "", (a, 0)) for a in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(socket, "getaddrinfo", two)
        try:
            assert query(f"two.example:{bootstrap.port}", "e", 5.0).port == 77
        finally:
            bootstrap.close()

    @pytest.mark.parametrize("bootstrap", [False, True])
    def test_peers_are_compared_before_names_are_looked_up(
        self, bootstrap: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked_up: list[Any] = []
        monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **_: looked_up.append(a))
        sockets = Sockets(SECRET)
        rendezvous = Rendezvous(FerryConfig(secret=SECRET, peers=("p.example",)), sockets)
        place = BootstrapPlace("e", "q.example:8998", bootstrap)
        try:
            with pytest.raises(AuthenticationError, match="peers"):
                reaches(lambda: rendezvous.find(place), 1)
            assert not looked_up
        finally:
            rendezvous.close()
            sockets.close()
