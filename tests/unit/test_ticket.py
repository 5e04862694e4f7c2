"""Tickets pass proxies unchanged, and whatever a client makes of them is refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ProtocolError
from kvferry.handover.renew import MOST_HOLDS_PER_CALL
from kvferry.handover.ticket import FORMAT, MARK, MOST_HOLD_BYTES, Ticket, prompt_digest
from kvferry.net.messages import MAX_REQUEST_BYTES, VERSION, Renew, Request, encode

TICKET = Ticket(
    engine_id="prefill-0",
    incarnation="f00d",
    hold_id="a" * 32,
    digest="b" * 64,
    tokens=1234,
    host="127.0.0.1",
    port=5555,
    request_id="cmpl-1",
    tp_size=2,
    pp_size=3,
)


def changed(key: str, value: Any) -> dict[str, Any]:
    params = TICKET.to_params()
    where = params[MARK] if key in params[MARK] else params
    if value is ...:
        del where[key]
    else:
        where[key] = value
    return params


def test_round_trip_through_json() -> None:
    assert Ticket.from_params(json.loads(json.dumps(TICKET.to_params()))) == TICKET


def test_it_names_its_directory_and_keeps_the_names_that_proxies_know() -> None:
    assert TICKET.directory == "127.0.0.1:5555"
    params = TICKET.to_params()
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert {"remote_engine_id", "remote_host", "remote_port", "remote_request_id"} <= set(params)


@pytest.mark.parametrize("host", ["localhost", "node-3.cluster_a", "10.0.0.7", "::1", "[fe80::1]"])
def test_hosts(host: str) -> None:
    assert Ticket.from_params(changed("remote_host", host)).host == host


KEYS = {
    "remote_engine_id": "text",
    "remote_request_id": "text",
    "remote_host": "text",
    "remote_port": "number",
    "tp_size": "number",
    "pp_size": "number",
    "incarnation": "text",
    "hold": "text",
    "digest": "text",
    "tokens": "number",
}
BAD_TEXTS = [..., None, "", 7, b"bytes", ["list"], "x" * 513, "x" * 10_000_000]
BAD_NUMBERS = [..., None, 0, -1, 1.5, True, "12", [], 1 << 31, 10**400]


@pytest.mark.parametrize(
    ("key", "value"),
    [(k, v) for k, kind in KEYS.items() for v in (BAD_TEXTS if kind == "text" else BAD_NUMBERS)],
    ids=lambda v: str(v)[:20],
)
def test_damaged_tickets_are_refused_with_what_is_wrong(key: str, value: Any) -> None:
    with pytest.raises(ProtocolError) as caught:
        Ticket.from_params(changed(key, value))
    message = str(caught.value)
    assert key in message
    assert "the ticket is damaged" in message
    assert len(message) < 400


@pytest.mark.parametrize("port", [65_536, 1 << 30])
def test_ports_end_somewhere(port: int) -> None:
    with pytest.raises(ProtocolError, match="remote_port must be a number from 1 to 65535"):
        Ticket.from_params(changed("remote_port", port))


@pytest.mark.parametrize(
    "host", ["a b", "evil/path", "x;y", "tcp://x", "a\0b", "a@b", "ä", "*", "\n"]
)
def test_hosts_that_are_none_are_refused(host: str) -> None:
    with pytest.raises(ProtocolError, match="remote_host"):
        Ticket.from_params(changed("remote_host", host))


@pytest.mark.parametrize("letter", ["x", "\U0001f600"])
def test_holds_of_any_clients_fit_into_one_renewal(letter: str) -> None:
    """Else long ids of one client would end the renewals of all."""
    size = len(letter.encode())
    longest = letter * (MOST_HOLD_BYTES // size)
    hold_id = Ticket.from_params(changed("hold", longest)).hold_id
    body = Renew(VERSION, "\U0001f600" * 512, [hold_id] * MOST_HOLDS_PER_CALL)
    assert len(encode(Request(1, body))) < MAX_REQUEST_BYTES
    with pytest.raises(ProtocolError, match="hold must be the id of a hold, of at most"):
        Ticket.from_params(changed("hold", longest + letter))


@pytest.mark.parametrize(
    "found", [0, FORMAT - 1, FORMAT + 1, None, str(FORMAT), "x" * 100_000, {"a": 1}]
)
def test_other_formats_are_refused_with_both(found: Any) -> None:
    with pytest.raises(ProtocolError, match=f"this engine reads {FORMAT}") as caught:
        Ticket.from_params(changed("format", found))
    assert len(str(caught.value)) < 300


IN_TREE: list[Any] = [
    {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    },
    {"do_remote_prefill": True, "transfer_id": "xfer-1", "remote_bootstrap_addr": "http://x:1"},
    {},
    {MARK: None},
    {MARK: "text"},
    {MARK: []},
    [],
    None,
    "params",
]


@pytest.mark.parametrize("params", IN_TREE, ids=lambda p: str(p)[:30])
def test_other_connectors_parameters_are_told_apart(params: Any) -> None:
    with pytest.raises(ProtocolError, match="no kvferry ticket"):
        Ticket.from_params(params)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(
    st.dictionaries(st.sampled_from([*KEYS, MARK]), JSON),
    st.dictionaries(st.sampled_from(list(KEYS)), JSON),
)
@settings(max_examples=60)
def test_any_json_is_read_or_refused(outer: dict[str, Any], inner: dict[str, Any]) -> None:
    params = {**TICKET.to_params(), **outer}
    if isinstance(params[MARK], dict):
        params[MARK] = {**params[MARK], **inner}
    try:
        ticket = Ticket.from_params(params)
    except ProtocolError:
        return
    assert Ticket.from_params(ticket.to_params()) == ticket


def test_digests_tell_prompts_apart() -> None:
    prompts: list[tuple[list[int], list[str]]] = [
        ([], []),
        ([1, 2, 3], []),
        ([1, 2], []),
        ([1, 2, 3, 0], []),
        ([3, 2, 1], []),
        ([1, 2, 3], ["lora a"]),
        ([1, 2, 3], ["lora b"]),
        ([1, 2, 3], ["lora a", "salt x"]),
        ([1, 2, 3], ["salt x", "lora a"]),
        ([1, 2, 3], ["lora a\0salt x"]),
        ([1, 2, 3], [""]),
        ([1, 2, 3], ["", ""]),
        ([1], [(2).to_bytes(8, "little").decode()]),
        ([1, 2], [""]),
        ([1 << 32], []),  # the bytes of these two may be equal, but for the mark of wide ids
        ([0, 1], []),
        ([-1], []),
    ]
    digests = [prompt_digest(tokens, extra) for tokens, extra in prompts]
    assert len(set(digests)) == len(digests)
    assert prompt_digest((1, 2, 3), iter(["lora a"])) == digests[5]
