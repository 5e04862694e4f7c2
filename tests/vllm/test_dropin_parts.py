"""Parts of the drop-in connectors, without engines: names, families, holds, producers found."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch warns of itself
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig, set_current_vllm_config

    import kvferry.vllm.connector  # noqa: F401

from kvferry.errors import (
    AuthenticationError,
    DescriptionError,
    HandoverError,
    KvferryError,
    ProtocolError,
)
from kvferry.handover.producer import Directory
from kvferry.handover.ticket import Ticket
from kvferry.net.keys import Key
from kvferry.net.messages import EngineInfo
from kvferry.net.rpc import Sockets
from kvferry.vllm import (
    FerryConnector,
    MooncakeConnector,
    NixlConnector,
    NixlPushConnector,
)
from kvferry.vllm import bootstrap as registration_module
from kvferry.vllm import bootstrap as rendezvous_module
from kvferry.vllm.bootstrap import (
    FRESH_SECONDS,
    KEEP_SECONDS,
    MAC,
    PATIENCE_SECONDS,
    PURPOSE,
    Bootstrap,
    BootstrapPlace,
    Registration,
    Rendezvous,
    Whereabouts,
    appointment,
    derived_hold,
    query,
    register,
    transfer_name,
)
from kvferry.vllm.config import FerryConfig, host_port
from kvferry.vllm.metadata import HandoverOrders
from kvferry.vllm.multiconnector import Family, Siblings
from kvferry.vllm.plugin import NAMES
from kvferry.vllm.producing import PrefillCut, Producing
from vllm_engines import free_port
from vllm_pairs import handover_parts, mooncake_decode, push_decode, reaches

ROOT = Path(__file__).parents[2]
SECRET = "a secret for these tests"


class TestNames:
    def test_classes_have_names_of_their_own(self) -> None:
        classes = (FerryConnector, MooncakeConnector, NixlConnector, NixlPushConnector)
        assert {cls.__name__ for cls in classes} < set(NAMES)
        assert all(name.startswith("Ferry") for name in NAMES)

    def test_the_entry_point_registers_them(self, tmp_path: Path) -> None:
        """In a process that imports nothing of ours, as MultiConnector's statistics need it."""
        points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        (name, target), *_ = points["vllm.general_plugins"].items()
        folder = tmp_path / "kvferry_plugin_test-0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-plugin-test\n")
        (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {target}\n")
        code = (
            "import sys; from vllm.plugins import load_general_plugins as load; load(); load()\n"
            "from vllm.distributed.kv_transfer.kv_connector import factory\n"
            "f = factory.KVConnectorFactory\n"
            f"print([f.get_connector_class_by_name(n).__name__ for n in {NAMES!r}])"
        )
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert str(list(NAMES)) in run.stdout, run.stderr[-2000:]


class TestFamily:
    def test_who_takes_a_request(self) -> None:
        family, ours = Family(), range(3)
        assert family.join("nixl") == 0 and family.takes(0, {"transfer_id": "x"})
        assert [family.join("mooncake"), family.join("nixl")] == [1, 2]
        assert [family.takes(i, {"transfer_id": "x"}) for i in ours] == [False, True, False]
        assert [family.takes(i, {}) for i in ours] == [True, False, False]

    def test_children_of_one_engine_have_the_same_cache_and_role(self) -> None:
        one, other = SimpleNamespace(), SimpleNamespace()
        family = Family.of("worker", one)
        assert Family.of("worker", one) is family
        strangers = [Family.of("worker", other), Family.of("scheduler", one)]
        assert family not in strangers
        family.join("nixl")
        del family
        assert not Family.of("worker", one).styles, "the engine before has ended"

    def test_a_worker_reads_the_engines_configuration(self) -> None:
        """Also of a MultiConnector's children that are MultiConnectors; elsewhere it is alone."""

        def multi(*children: dict[str, Any]) -> dict[str, Any]:
            extra = {"connectors": list(children)}
            return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra, **both}

        both = {"kv_role": "kv_both"}
        theirs, pool, ours = (
            {"kv_connector": name, **both}
            for name in ("NixlConnector", "FerryPoolConnector", "FerryNixlConnector")
        )
        names = ("NixlPullConnector", "FerryPoolConnector")

        def read(transfer: dict[str, Any], index: int) -> Siblings | None:
            config: Any = SimpleNamespace(kv_transfer_config=KVTransferConfig(**transfer))
            with set_current_vllm_config(config):
                return Siblings.of(index)

        assert read(multi(ours, theirs, multi(pool, ours)), 0) == Siblings(names)
        assert read(multi(ours, theirs, multi(pool, ours)), 1) == Siblings(names, ahead=True)
        assert read(multi(ours), 0) == Siblings() and read(ours, 0) is None
        assert Siblings.of(0) is None, "no engine here"

    def test_a_ticket_beside_one_that_speaks_in_responses_too(self) -> None:
        assert Siblings().flat and Siblings(("ExampleConnector", "OffloadingConnector")).flat
        assert not Siblings(("NixlConnector",)).flat

    def test_a_sibling_that_leaves_fewer_tokens_to_decode_engines_is_refused(self) -> None:
        theirs = Siblings(("MooncakeConnector",))
        PrefillCut(1).require_fellows(theirs)
        PrefillCut(2).require_fellows(Siblings(("NixlPullConnector",)))
        with pytest.raises(DescriptionError, match="MooncakeConnector leaves one at most"):
            PrefillCut(2).require_fellows(theirs)
        ticket = Ticket("e", "i", "h" * 8, "d", 5, "127.0.0.1", 1234, "r")
        nested = ticket.to_params(flat=False)
        assert set(nested) == {"kvferry"}
        theirs = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_port": 1}
        assert Ticket.from_params({**theirs, **nested}) == ticket
        assert Ticket.from_params(ticket.to_params()) == ticket


def request(request_id: str = "cmpl-r-0-0123abcd", **params: Any) -> Any:
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params=params,
        prompt_token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        trace_headers=None,
    )


def offering(style: Any, **config: Any) -> tuple[Producing, HandoverOrders]:
    parts = handover_parts(style, FerryConfig(**config))
    return Producing(parts, "e", "i", (1, 1), 1234, flat=True, second=False), parts.orders


def ended(made: Producing, request: Any, tables: tuple[list[int], ...]) -> Any:
    """A request comes, and ends."""
    made.accept(request)
    return made.finished(request, tables)


class TestOffering:
    def test_names_are_derived_alike(self) -> None:
        made, orders = offering("mooncake")
        held, _ = ended(made, request(do_remote_decode=True, transfer_id="t"), ([0, 1, 2],))
        assert held and orders.holds[0].hold_id == derived_hold("i", "transfer t")
        assert made.held_blocks == 2  # the null block is nobody's

    @pytest.mark.parametrize("stages", [1, 2])
    def test_a_hold_names_the_last_step_that_writes_into_its_blocks(self, stages: int) -> None:
        """With pipeline stages it is any step before the one that brings the hold."""
        made, orders = offering("ferry")
        made.shape = 1, stages
        first, second = request("a"), request("b")
        made.accept(first)
        made.accept(second)
        for step, names in enumerate(({"a"}, {"a", "b"}, {"b"}, {"other"}), 1):
            assert made.scheduled(names) == step
        assert made.finished(first, ([1],))[0]
        assert orders.written == (2 if stages == 1 else 4)
        assert made.finished(second, ([2],))[0]
        taken = orders.take()
        assert taken.written == (3 if stages == 1 else 4) and len(taken.holds) == 2
        assert orders.written == 0 and not orders.pending

    def test_samples_of_one_request_share_a_hold(self) -> None:
        made, orders = offering("mooncake")
        ends = [
            ended(made, request(f"{i}_cmpl-a-0-11111111", transfer_id="t"), ([1],))
            for i in range(2)
        ]
        assert [held for held, _ in ends] == [True, False]
        assert ends[1][1] is None and len(orders.holds) == 1
        held, told = ended(made, request("cmpl-b-0-22222222", transfer_id="t"), ([1],))
        assert not held and told is not None and "used before" in told["kvferry"]["not_held"]
        assert not orders.withdrawals  # the first one's is not touched

    def test_an_aborted_request_with_a_name_is_withdrawn(self) -> None:
        from vllm.v1.request import RequestStatus

        made, orders = offering("mooncake")
        aborted = request(transfer_id="t")
        aborted.status = RequestStatus.FINISHED_ABORTED
        assert ended(made, aborted, ([1],)) == (False, None)
        assert orders.withdrawals == [derived_hold("i", "transfer t")]

    def test_a_limit(self) -> None:
        made, orders = offering("ferry", max_held_blocks=3)
        assert ended(made, request("a"), ([1, 2],))[0]
        held, told = ended(made, request("b"), ([3, 4],))
        assert not held and told is not None
        assert told["do_remote_prefill"] is False and "max_held_blocks" in str(told)
        made.sent(["a", "unknown"])
        assert made.held_blocks == 0 and ended(made, request("c"), ([3, 4],))[0]
        assert made.parts.stats.data["requests_not_held"] == {"limit": 1} and not orders.withdrawals

    def test_blocks_of_a_common_prefix_count_once(self) -> None:
        made, _ = offering("ferry", max_held_blocks=4)
        assert ended(made, request("a"), ([1, 2, 3],))[0]
        assert ended(made, request("b"), ([1, 2, 4],))[0]
        assert made.held_blocks == 4 and not ended(made, request("c"), ([1, 2, 5],))[0]
        made.sent(["a"])
        assert made.held_blocks == 3  # the prefix is still held
        made.sent(["b"])
        assert made.held_blocks == 0

    def test_a_request_id_that_comes_again(self) -> None:
        """Push style: the ticket still serves, the name does not."""
        made, orders = offering("push")
        for suffix in ("11111111", "22222222"):
            assert ended(made, request(f"cmpl-r-0-{suffix}"), ([1],))[0]
        first, second = (order.hold_id for order in orders.holds)
        assert first == derived_hold("i", "request cmpl-r-0") != second


class TestAppointments:
    def test_names(self) -> None:
        assert transfer_name({"transfer_id": "x"}, "r", "mooncake") == "transfer x"
        assert transfer_name({}, "2_cmpl-u-0-0123abcd", "push") == "request cmpl-u-0"
        assert transfer_name({}, "r", "nixl") is None
        with pytest.raises(ProtocolError, match="transfer_id"):
            transfer_name({"transfer_id": 7}, "r", "mooncake")

    def test_places(self) -> None:
        named = appointment(mooncake_decode("x", 8998, "e"), "r", "mooncake")
        assert named.place == BootstrapPlace("e", "127.0.0.1:8998", True)
        named = appointment(push_decode("u", "e", 5600), "cmpl-u-0-0123abcd", "push")
        assert named.place == BootstrapPlace("e", "127.0.0.1:5600", False)

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"remote_block_ids": [[1]]}, "vLLM's own NixlConnector"),
            ({"transfer_id": "x"}, "remote_bootstrap_addr"),
            ({}, "hold no kvferry ticket"),
            (
                {**mooncake_decode("x", 1, "e"), "remote_bootstrap_addr": "ftp://h:1"},
                "no bootstrap",
            ),
            ({**mooncake_decode("x", 1, "e"), "remote_bootstrap_addr": 5}, "a text"),
            (
                {**mooncake_decode("x", 1, "e"), "remote_bootstrap_addr": "http://h:99999"},
                "no boot",
            ),
            ({**mooncake_decode("x", 1, "e"), "remote_engine_id": {"a": 1}}, "transfer_id"),
        ],
    )
    def test_refused(self, params: dict[str, Any], message: str) -> None:
        with pytest.raises(ProtocolError, match=message):
            appointment(params, "r", "mooncake")


ENGINE = EngineInfo("e", "i", "m", [], 0, {}, {})


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a server that says what it likes to its first client."""

    def run() -> None:
        with contextlib.suppress(OSError):
            client, _ = server.accept()
            with client:
                client.recv(1 << 16)
                serve(client)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
    thread.join(10)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def meet() -> Iterator[Callable[..., Rendezvous]]:
    """Makes a `Rendezvous`, which is closed after the test."""
    with contextlib.ExitStack() as stack:

        def made(clock: Any = time.monotonic, **config: Any) -> Rendezvous:
            sockets = Sockets()
            stack.callback(sockets.close)
            rendezvous = Rendezvous(FerryConfig(**config), sockets, clock)
            stack.callback(rendezvous.close)
            return rendezvous

        yield made


@pytest.fixture
def bootstrap() -> Iterator[Bootstrap]:
    made = Bootstrap(None, 0, None)
    made.put(0, Whereabouts("e", "127.0.0.1", 77, "i").entry({}))
    yield made
    made.close()


class TestRendezvous:
    def find(self, rendezvous: Rendezvous, place: BootstrapPlace) -> Whereabouts:
        assert reaches(lambda: rendezvous.find(place) is not None, True)
        found = rendezvous.find(place)
        assert found is not None
        return found

    def test_by_bootstrap(self, meet: Callable[..., Rendezvous], bootstrap: Bootstrap) -> None:
        rendezvous = meet()
        place = BootstrapPlace("e", f"127.0.0.1:{bootstrap.port}", True)
        assert self.find(rendezvous, place) == Whereabouts("e", "127.0.0.1", 77, "i")
        bootstrap.put(0, Whereabouts("e", "127.0.0.1", 77, "j").entry({}))
        assert self.find(rendezvous, place).incarnation == "i"  # for a second
        rendezvous.forget(place)
        assert self.find(rendezvous, place).incarnation == "j"
        with pytest.raises(ProtocolError, match="restarted"):
            self.find(rendezvous, BootstrapPlace("other", place.address, True))

    def test_what_was_answered_is_asked_for_anew(
        self, meet: Callable[..., Rendezvous], bootstrap: Bootstrap
    ) -> None:
        """So that no request is sent by it to an engine that was reset; the last answer serves
        where none comes, for a while."""
        clock = Clock()
        rendezvous = meet(clock, bootstrap_seconds=1.0)
        place = BootstrapPlace("e", f"127.0.0.1:{bootstrap.port}", True)
        assert self.find(rendezvous, place).incarnation == "i"
        bootstrap.put(0, Whereabouts("e", "127.0.0.1", 77, "j").entry({}))
        clock.now += FRESH_SECONDS + 0.1
        assert rendezvous.find(place) is None  # it is asked for, and the caller does not wait
        assert self.find(rendezvous, place).incarnation == "j"
        bootstrap.put(0, Whereabouts("other", "127.0.0.1", 77, "k").entry({}))
        clock.now += FRESH_SECONDS + 0.1
        with pytest.raises(ProtocolError, match="restarted"):  # it did answer
            self.find(rendezvous, place)
        bootstrap.put(0, Whereabouts("e", "127.0.0.1", 77, "l").entry({}))
        assert self.find(rendezvous, place).incarnation == "l"
        bootstrap.close()
        clock.now += FRESH_SECONDS + 0.1
        assert self.find(rendezvous, place).incarnation == "l"  # there is no answer
        clock.now += KEEP_SECONDS
        with pytest.raises(KvferryError, match="bootstrap"):
            self.find(rendezvous, place)

    def test_a_bootstrap_that_is_slow_does_not_hold_up_a_request_with_a_known_producer(
        self, meet: Callable[..., Rendezvous], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers, release = iter([0.3, 20.0]), threading.Event()

        def slow(address: str, engine_id: str, seconds: float) -> Whereabouts:
            release.wait(next(answers))
            return Whereabouts(engine_id, "127.0.0.1", 77, "i")

        monkeypatch.setattr(rendezvous_module, "query", slow)
        clock = Clock()
        rendezvous, place = meet(clock), BootstrapPlace("e", "127.0.0.1:1", True)
        try:
            assert self.find(rendezvous, place).incarnation == "i"  # however long it took
            clock.now += FRESH_SECONDS + 0.1
            assert rendezvous.find(place) is None
            clock.now += PATIENCE_SECONDS + 0.1
            found = rendezvous.find(place)  # while the second question is still open
            assert found is not None and found.incarnation == "i"
        finally:
            release.set()

    @pytest.mark.parametrize("known", [False, True])
    def test_an_error_that_came_late_is_raised_once(
        self, meet: Callable[..., Rendezvous], known: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However long the question took: else those who look now and then ask for ever."""
        answers: list[Any] = [ProtocolError("no bootstrap")]
        if known:
            answers.insert(0, Whereabouts("e", "127.0.0.1", 77, "i"))
        asked: list[str] = []

        def slow(address: str, engine_id: str, seconds: float) -> Whereabouts:
            if address != place.address:  # a thread that a test before has left
                raise ProtocolError("not ours")
            asked.append(address)
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                clock.now += 2 * FRESH_SECONDS
                raise answer
            found: Whereabouts = answer
            return found

        monkeypatch.setattr(rendezvous_module, "query", slow)
        clock = Clock()
        rendezvous, place = meet(clock), BootstrapPlace("e", "127.0.0.1:2", True)
        if known:
            assert self.find(rendezvous, place).incarnation == "i"
            clock.now += FRESH_SECONDS + 0.1
        rendezvous.find(place)
        assert rendezvous._asked[place].answer.exception(10) is not None
        with pytest.raises(ProtocolError, match="no bootstrap"):
            rendezvous.find(place)
        assert len(asked) == 1 + known

    def test_by_directory_that_is_still_starting(self, meet: Callable[..., Rendezvous]) -> None:
        sockets, rendezvous = Sockets(), meet()
        directory = Directory(sockets)
        directory.start()
        place = BootstrapPlace("e", f"127.0.0.1:{directory.port}", False)
        try:
            assert rendezvous.find(place) is None
            rendezvous.introduce(ENGINE)
            time.sleep(0.2)
            assert rendezvous.find(place) is None
            directory.set_engine(ENGINE, [])
            assert self.find(rendezvous, place).engine_id == "e"
        finally:
            directory.close()
            sockets.close()

    def test_what_is_asked_after_the_end_opens_nothing(
        self, meet: Callable[..., Rendezvous], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A question that waited for another one to the same address."""
        gate, where = threading.Event(), Whereabouts("e", "127.0.0.1", 77, "i")
        monkeypatch.setattr(rendezvous_module, "query", lambda *_: gate.wait(10) and where)
        rendezvous, waits = meet(), BootstrapPlace("e", "127.0.0.1:1", False)
        try:
            rendezvous.introduce(ENGINE)
            assert rendezvous.find(BootstrapPlace("e", waits.address, True)) is None
            assert rendezvous.find(waits) is None
            rendezvous.close()
            gate.set()
            error = rendezvous._asked[waits].answer.exception(10)
            assert "shutting down" in str(error) and rendezvous._caller is None
        finally:
            gate.set()

    @pytest.mark.parametrize(
        ("config", "address", "error"),
        [
            ({}, "10.0.0.1:8998", AuthenticationError),  # no secret, another host
            ({"secret": SECRET, "peers": ("10.0.0.2",)}, "10.0.0.1:8998", AuthenticationError),
            ({}, "127.0.0.1:1", HandoverError),  # nobody listens
        ],
    )
    def test_refused(
        self,
        meet: Callable[..., Rendezvous],
        config: dict[str, Any],
        address: str,
        error: type[Exception],
    ) -> None:
        with pytest.raises(error):
            self.find(meet(**config), BootstrapPlace("e", address, True))


def registered(port: int) -> str | None:
    """The incarnation that a bootstrap tells of data-parallel rank 1."""
    with contextlib.suppress(KvferryError):
        return query(f"127.0.0.1:{port}", "e_dp1", 5.0).incarnation
    return None


class TestBootstrap:
    def test_registrations_need_the_secret(self) -> None:
        bootstrap = Bootstrap(None, 0, SECRET)
        server, entry = f"127.0.0.1:{bootstrap.port}", Whereabouts("e_dp1", "h", 1, "i").entry({})
        try:
            register(server, 1, entry, SECRET, 5.0)
            assert query(server, "e_dp1", 5.0).host == "h"
            for secret in (None, "a secret of others"):
                with pytest.raises(HandoverError, match="secret"):
                    register(server, 1, entry, secret, 5.0)
        finally:
            bootstrap.close()

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b'{"dp_rank": 1}', b'{"dp_rank": "x"}', b'{"dp_rank": 1, "\x86": 2}'],
    )
    def test_bad_registrations_are_answered(self, bootstrap: Bootstrap, body: bytes) -> None:
        url = f"http://127.0.0.1:{bootstrap.port}"
        with pytest.raises(urllib.error.HTTPError) as refused:
            said = body or b" "
            mac = {MAC: hmac.digest(Key.of(None).derive(PURPOSE), said, "sha256").hex()}
            asked = urllib.request.Request(f"{url}/register", said, mac)
            urllib.request.urlopen(asked, timeout=5)
        assert refused.value.code == 400
        refused.value.close()
        with urllib.request.urlopen(f"{url}/query", timeout=5) as answer:
            assert set(json.load(answer)) == {"0"}  # the engine's own

    @pytest.mark.parametrize(
        "answer", [b"[" * 200_000, b"{", b"null", b"{}" * (1 << 20), b'{"\x86": {}}']
    )
    def test_no_bootstrap(self, answer: bytes) -> None:
        head = b"HTTP/1.0 200 OK\r\n\r\n"
        expected = pytest.raises(KvferryError, match=r"no bootstrap|more than|does not answer")
        with listening(lambda client: client.sendall(head + answer)) as server, expected:
            query(server, "e", 5.0)

    @pytest.mark.parametrize(
        "length",
        [b"Content-Length: 1" + b"0" * 30, b"Transfer-Encoding: chunked\r\n\r\n1" + b"0" * 30],
        ids=["whole", "in chunks"],
    )
    def test_one_that_announces_more_than_there_is(self, length: bytes) -> None:
        answer = b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n{}"
        expected = pytest.raises(HandoverError, match="does not answer")
        with listening(lambda client: client.sendall(answer)) as server, expected:
            query(server, "e", 5.0)

    def test_one_that_answers_drop_by_drop(self) -> None:
        def drip(client: socket.socket) -> None:
            for byte in b"HTTP/1.0 200 OK\r\n" * 10:
                client.sendall(bytes([byte]))
                time.sleep(0.05)

        with listening(drip) as server:
            began = time.monotonic()
            with pytest.raises(HandoverError, match="does not answer"):
                query(server, "e", 0.4)
            assert time.monotonic() - began < 2.0

    def test_a_rank_registers_as_soon_as_a_bootstrap_listens(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        port = free_port()
        registration = Registration(f"127.0.0.1:{port}", SECRET, 5.0)
        registration.put(1, Whereabouts("e_dp1", "h", 1, "i").entry({}))
        assert reaches(lambda: "until it has registered" in caplog.text, True)
        bootstrap = Bootstrap(None, port, SECRET)
        try:
            assert reaches(lambda: registered(port), "i")
            registration.put(1, Whereabouts("e_dp1", "h", 1, "j").entry({}))
            assert reaches(lambda: registered(port), "j")
        finally:
            registration.close()
            bootstrap.close()

    def test_a_rank_registers_after_any_error(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(registration_module, "TELL_AGAIN_SECONDS", 0.01)
        errors: list[Exception] = [MemoryError("none left"), KeyError("x"), HandoverError("no")]

        def fails_first(*told: Any) -> None:
            if errors:
                raise errors.pop()
            register(*told)

        monkeypatch.setattr(registration_module, "register", fails_first)
        bootstrap = Bootstrap(None, 0, SECRET)
        registration = Registration(f"127.0.0.1:{bootstrap.port}", SECRET, 5.0)
        try:
            registration.put(1, Whereabouts("e_dp1", "h", 1, "i").entry({}))
            assert reaches(lambda: registered(bootstrap.port), "i")
            assert [record.getMessage()[-2:] for record in caplog.records] == ["no"]  # said once
        finally:
            registration.close()
            bootstrap.close()

    def test_addresses(self) -> None:
        assert host_port("http://[::1]:8998") == ("::1", 8998)
        assert host_port("p.example:9") == ("p.example", 9)
        for bad in (
            "http://h",
            "https://h:1",
            "http://u@h:1",
            "",
            "x" * 600,
            "http://[x",
            "a..b:80",
        ):
            with pytest.raises(ProtocolError):
                host_port(bad)
