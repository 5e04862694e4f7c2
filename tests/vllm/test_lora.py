"""LoRA at both ends of a hand-over: only what the same files computed is taken over."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.core.sched.scheduler", reason="this tier runs in the environment with vLLM"
)

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvferry.handover.ticket import Ticket, prompt_digest
from kvferry.pool import weights
from kvferry.pool.weights import Adapters
from kvferry.vllm.bootstrap import derived_hold
from kvferry.vllm.connector import FerryConnector
from kvferry.vllm.consuming import Consuming
from kvferry.vllm.fingerprint import Prompts, adapted, request_digest
from kvferry.vllm.metadata import HandoverOrders
from kvferry.vllm.producing import Producing
from vllm_pairs import AllArrived, handover_parts

TOKENS = list(range(7, 47))
NAMED = {"transfer_id": "t", "remote_engine_id": "p", "remote_bootstrap_addr": "http://h:1"}


def folder(path: Path, data: bytes = b"a" * 100, config: str = '{"r": 8}') -> Path:
    path.mkdir(parents=True, exist_ok=True)
    weights = (8).to_bytes(8, "little") + b"{header}" + data
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text(config)
    for file in path.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    return path


def request(path: Path | str | None, number: int = 1, name: str = "sql", **params: Any) -> Request:
    lora = None if path is None else LoRARequest(name, number, str(path))
    made = Request("r", list(TOKENS), SamplingParams(max_tokens=9), None, lora_request=lora)
    made.kv_transfer_params = params
    return made


class Engine:
    """What of a scheduler hands over."""

    def __init__(self, settings: str = "") -> None:
        self.adapters = Adapters(settings)
        self.orders = HandoverOrders()
        parts = handover_parts("mooncake", adapters=self.adapters, orders=self.orders)
        self.stats = parts.stats
        self.offering = Producing(parts, "p", "i", (1, 1), 9, flat=True, second=False)
        found: Any = Fake(
            find=lambda _: Fake(engine_id="p", incarnation="i", host="127.0.0.1", port=9)
        )
        self.asking = Consuming(parts, found, AllArrived())

    def accepted(self, asked: Request) -> Request:
        """A prefill that has arrived, and its adapter's files were read."""
        self.offering.accept(asked)
        adapter = self.adapters.ask(asked)
        while adapter is not None and adapter.digest is None:
            time.sleep(0.001)
        return asked

    def ended(self, asked: Request) -> tuple[bool, dict[str, Any] | None]:
        asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return self.offering.finished(asked, ([1, 2, 3],))

    def ticket(self, path: Path | str | None, **more: Any) -> dict[str, Any]:
        held, params = self.ended(self.accepted(request(path, do_remote_decode=True, **more)))
        assert held and params is not None
        return params

    def matched(self, asked: Request) -> int:
        """Tokens that vLLM is told of, in the end, and again while the request queues."""
        self.asking.arrived(asked)
        while (count := self.asking.matched(asked, 0)[0]) is None:
            time.sleep(0.001)
        assert self.asking.matched(asked, 0)[0] == count
        return count

    @property
    def released(self) -> list[str]:
        self.asking.settle()
        return [ticket.hold_id for ticket in self.orders.releases]


@pytest.fixture
def made() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(settings: str = "") -> Engine:
        engines.append(Engine(settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.adapters.close()


def test_without_an_adapter_nothing_changes(made: Any) -> None:
    """The digest is that of other versions."""
    prefill, decode = made(), made()
    params = prefill.ticket(None)
    assert Ticket.from_params(params).digest == prompt_digest(TOKENS)
    assert decode.matched(request(None, **params)) == len(TOKENS)


def test_the_same_files_elsewhere(tmp_path: Path, made: Any) -> None:
    """Another folder, another number: what one computed is the other's, too."""
    first = folder(tmp_path / "v1")
    copy = shutil.copytree(first, tmp_path / "elsewhere" / "sql")
    params = made().ticket(first)
    decode = made()
    assert decode.matched(request(copy, 7, **params)) == len(TOKENS)
    assert not decode.released
    assert made().matched(request(None, **params)) == 0  # the adapter's cache is not the model's


@pytest.mark.parametrize("other", ["byte", "configuration", "option", "settings", "old version"])
def test_other_files_under_the_same_name(
    tmp_path: Path, made: Any, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = made().ticket(folder(tmp_path / "v1"))
    theirs = folder(tmp_path / "v2")
    decode = made("[('lora_dtype', torch.float16)]" if other == "settings" else "")
    if other == "byte":
        folder(theirs, b"a" * 99 + b"b")
    elif other == "configuration":
        folder(theirs, config='{"r": 16}')
    asked = request(theirs, **params)
    if other == "option":
        asked.lora_request = LoRARequest("sql", 1, str(theirs), is_3d_lora_weight=True)
    elif other == "old version":  # which knew the name alone
        old = prompt_digest(TOKENS, ["lora sql"])
        asked.kv_transfer_params = replace(Ticket.from_params(params), digest=old).to_params()
    assert decode.matched(asked) == 0
    assert decode.released == [Ticket.from_params(params).hold_id]
    assert "its LoRA adapter 'sql'" in caplog.text


def test_no_two_digests_are_alike() -> None:
    plain, base = request_digest(request(None)), request_digest(request("/a"))
    assert len({plain, base, adapted(base, "1"), adapted(base, "2"), adapted(plain, "1")}) == 5
    with pytest.raises(ValueError, match="not shared"):
        adapted(base, "")


@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
def test_files_that_cannot_be_read(tmp_path: Path, made: Any, where: str) -> None:
    """Nobody takes a name's word for them, nor do two who know nothing."""
    path, unknown = folder(tmp_path / "v1"), "org/sql"
    prefill, decode = made(), made()
    if where != "decode":
        asked = prefill.accepted(request(unknown, do_remote_decode=True, transfer_id="t"))
        held, answer = prefill.ended(asked)
        assert not held and answer is not None
        assert "LoRA adapter 'sql'" in answer["kvferry"]["not_held"]
        assert unknown not in answer["kvferry"]["not_held"]
        assert prefill.orders.withdrawals == [derived_hold("i", "transfer t")]
        assert prefill.stats.data["requests_not_held"] == {"lora": 1}
        assert not prefill.orders.holds and not prefill.offering.accepted
    if where != "prefill":
        params = made().ticket(path)
        if where == "both":  # a client may say so
            digest = request_digest(request(unknown))
            params = replace(Ticket.from_params(params), digest=digest).to_params()
        assert decode.matched(request(unknown, **params)) == 0
        assert decode.released == [Ticket.from_params(params).hold_id]


@pytest.mark.parametrize("same", [True, False])
def test_engines_that_get_a_request_at_once(tmp_path: Path, made: Any, same: bool) -> None:
    """There is no ticket: the decode engine says its own digest, and the producer's rank compares
    it with its hold's."""
    first = folder(tmp_path / "v1")
    prefill, decode = made(), made()
    prefill.ticket(first, transfer_id="t")
    (hold,) = prefill.orders.holds
    mine = Path(shutil.copytree(first, tmp_path / "mine"))
    if not same:
        folder(mine, b"b" * 100)
    asked = request(mine, do_remote_prefill=True, **NAMED)
    assert decode.matched(asked) == len(TOKENS)
    decode.asking.allocated(asked, ([1, 2, 3],), len(TOKENS))
    (load,) = decode.orders.loads
    assert load.ticket.hold_id == hold.hold_id
    assert (load.ticket.digest == hold.digest) == same


def test_a_number_that_stood_for_another_adapter(tmp_path: Path, made: Any) -> None:
    """A request that nobody handed over was the first: workers have its files under the number."""
    engine = made()
    connector: Any = Fake(handover=None, pool=None, _prompts=Prompts(), _adapters=engine.adapters)
    FerryConnector.on_new_request(connector, request(folder(tmp_path / "first", b"b" * 100)))
    path = folder(tmp_path / "v1")
    assert not engine.ended(engine.accepted(request(path, do_remote_decode=True)))[0]
    assert engine.matched(request(path, **made().ticket(path))) == 0


def test_a_decode_engine_waits_for_a_digest_no_longer_than_it_may(
    tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the lease of its ticket is renewed meanwhile."""
    path, hang = folder(tmp_path / "v1"), threading.Event()
    params, decode = made().ticket(path), made()
    monkeypatch.setattr("kvferry.vllm.consuming.ADAPTER_SECONDS", 0.2)
    monkeypatch.setattr(weights, "weight_files", lambda _: hang.wait(20))
    begin, asked = time.monotonic(), request(path, **params)
    decode.asking.arrived(asked)
    assert decode.asking.matched(asked, 0) == (None, False)
    assert decode.asking.renewer.watched == {Ticket.from_params(params).hold_id}
    assert decode.matched(asked) == 0
    assert 0.2 <= time.monotonic() - begin < 2.0
    hang.set()
