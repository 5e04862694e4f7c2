"""What `kvferry doctor` says of this host, and of a peer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from doctors import SECRET, examine, offering, refused
from handover_peers import LOOPBACK, Producer, Spec
from kvferry.bench.trial import TRIED_BYTES, Tried, child, own, try_endpoints
from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.cli import doctor
from kvferry.cli.doctor import Finding, own_address
from kvferry.errors import KvferryError
from kvferry.vllm.config import FerryConfig


def test_this_host() -> None:
    code, found = examine()
    assert code == 0
    assert found["tcp"] == {
        "section": "reachable",
        "name": "tcp",
        "state": "ok",
        "found": "1 MiB read and compared",
        "advice": "",
    }
    expected = "local" if found["local"]["state"] == "ok" else "tcp"
    chosen = found["host memory"]
    assert chosen["section"] == "chosen" and chosen["found"].startswith(expected)
    assert "nixl: it has no carrier_options" in chosen["found"]
    assert found["RDMA"]["found"]
    assert ("caches on GPUs" in found) == (found["CUDA"]["state"] == "ok")


def test_what_was_configured_must_work(monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = examine("--carriers", "tcp, cuda", "--options", '{"tcp": {"port": -1}}')
    assert code == 1
    assert "a port to listen on is" in found["tcp"]["found"]
    if found["CUDA"]["state"] != "ok":
        assert found["cuda"]["state"] == "broken"
        assert found["cuda"]["found"] == found["CUDA"]["found"]
    monkeypatch.setenv("KVFERRY_SECRET", SECRET)
    code, found = examine("--host", "203.0.113.7")  # no address of this host
    assert (code, found["host"]["state"], found["tcp"]["state"]) == (1, "broken", "broken")
    assert "203.0.113.7" in found["host"]["found"]
    code, found = examine("--carriers", "tcp,local", "--host", LOOPBACK)
    assert (code, found["host"]["state"]) == (0, "ok")
    assert found["host memory"]["found"].startswith("tcp")  # the order of the configuration


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--options", "{nixl}"), "--options is JSON"),
        (("--options", '{"nixl": 3}'), "a mapping of mappings"),
        (("--options", '{"pigeon": {}}'), "no such carriers"),
        (
            ("--options", '{"tcp": {"prot": 1}}'),
            "the carrier 'tcp' has no option prot; it has port, advertise, streams_per_transfer",
        ),
        (
            ("--carriers", "tcp", "--options", '{"nixl": {}}'),
            "carrier_options are for ['nixl'], but carriers are ['tcp']",
        ),
        (("--carriers", "tcp,pigeon"), "found ['tcp', 'pigeon']"),
        (("--carriers", "tcp,auto"), "found ['tcp', 'auto']"),
        (("--host", "203.0.113.7"), "cannot listen on 203.0.113.7 without a secret"),
        (("--secret-file", "/no/such/file"), "secret_file /no/such/file cannot be read"),
        (("--peer", "somewhere"), "HOST:PORT"),
        (("--peer", "localhost:0"), "not 'localhost:0'; the engine's log says"),
        (("--peer", "localhost:65536"), "not 'localhost:65536'; the engine's log says"),
    ],
)
def test_what_engines_refuse_is_refused(arguments: tuple[str, ...], said: str) -> None:
    assert said in " ".join(refused(*arguments).split())


def test_a_process_that_dies_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first >&2\necho no such luck >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    code, found = examine()
    said = "the process that tried it ended by code 3: no such luck"
    assert (code, found["tcp"]["found"], found["local"]["found"]) == (1, said, said)
    assert (found["local"]["state"], found["host memory"]["state"]) == ("missing", "broken")
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    with pytest.raises(KvferryError, match="ended by signal 11"), child(own, {}, 10):
        pass


def hang(question: dict[str, Any]) -> Generator[int]:
    """The program of a child."""
    print("a library's own words", end="")
    if question["hang"]:
        time.sleep(60)
    yield question["number"] + 1


def test_children_answer_once_and_in_time() -> None:
    with child(hang, {"hang": False, "number": 6}, 60) as answer:
        assert answer == 7
    with pytest.raises(KvferryError, match="KeyError: 'hang'"), child(hang, {}, 60):
        pass
    with (
        pytest.raises(KvferryError, match="no answer in time"),
        child(hang, {"hang": True}, 1),
    ):
        pass


def test_children_import_nothing_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("signal", "msgspec", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of a stranger')")
    monkeypatch.chdir(tmp_path)
    with child(hang, {"hang": False, "number": 6}, 60) as answer:
        assert answer == 7


def chatter(question: dict[str, Any]) -> Generator[None]:
    """The program of a child whose library prints before, while and after it answers."""

    def talk() -> None:
        os.write(1, b"a library's own words\n" * 10_000)  # more than a pipe holds
        Path(question["done"]).touch()

    os.write(1, b"a library's first words, which do not end the line")
    Thread(target=talk, daemon=True).start()
    yield None


def test_what_a_child_prints_does_not_stop_it(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with child(chatter, {"done": str(done)}, 60):
        until = time.monotonic() + 30
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert done.exists()


def test_bytes_that_differ_are_found() -> None:
    options = {"secret": SECRET, "host": LOOPBACK}
    other = np.zeros(TRIED_BYTES, dtype=np.uint8)
    with closing(make_carrier("tcp", **options)) as carrier:
        carrier.register([MemoryRegion(other.ctypes.data, TRIED_BYTES)])
        endpoints = {"other": carrier.endpoint()}
        found = try_endpoints("tcp", options, endpoints, other.ctypes.data)
    said = "the bytes that arrived are not those that were sent"
    assert found == {"other": Tried("tcp", said)}


def test_several_gpus() -> None:
    def found(**links: str) -> tuple[str, str, str]:
        pairs = {(int(pair[1]), int(pair[2])): link for pair, link in links.items()}
        finding = doctor.between_gpus(pairs)
        return finding.state, finding.found, finding.advice

    assert found(_01="NVLink")[:2] == ("ok", "cuda: all over NVLink")
    mixed = found(_01="NVLink", _02="PCIe", _12="PCIe")
    assert mixed[:2] == ("ok", "cuda: 0-1 over NVLink; 0-2, 1-2 over PCIe")
    state, said, advice = found(_01="PCIe", _02="", _12="")
    assert (state, said) == ("info", "cuda: 0-1 over PCIe; 0-2, 1-2 have no peer access")
    assert "by tcp" in advice
    assert found(_01="")[1] == "cuda: 0-1 have no peer access"


def test_rdma_devices(tmp_path: Path) -> None:
    devices, handles = tmp_path / "infiniband", tmp_path / "dev"
    assert doctor.rdma(devices, handles).state == "info"
    port = devices / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    hidden = doctor.rdma(devices, handles)
    assert (hidden.state, "/dev/infiniband" in hidden.advice) == ("missing", True)
    handles.mkdir()
    (handles / "uverbs0").touch()
    found = doctor.rdma(devices, handles)
    assert (found.state, found.found) == ("ok", "mlx5_0; mlx5_0 port 1 ACTIVE, 400 Gb/sec (4X NDR)")


GOOD = {name: Tried(name) for name in ("local", "tcp")}


def chosen(*tried: Tried, gpu: bool = False, **keys: Any) -> Finding:
    """The choice where local, tcp and these were tried, with these keys of the configuration."""
    reach = GOOD | {one.name: one for one in tried}
    return doctor.choose("memory", FerryConfig(**keys), gpu, reach)


def test_the_choice_looks_at_what_is_reachable() -> None:
    assert chosen(Tried("tcp", "no route")).found.startswith("local")
    found = chosen(Tried("local", "EPERM"))
    assert found.found.startswith("tcp") and "local: EPERM" in found.found
    failed = Tried("local", "EPERM"), Tried("tcp", "no route"), Tried("nixl", "no UCX")
    found = chosen(*failed, carrier_options={"nixl": {}})
    assert found.state == "broken"
    for reason in ("local: EPERM", "tcp: no route", "nixl: no UCX"):
        assert reason in found.found


def test_the_choice_looks_at_what_is_configured() -> None:
    nixl = Tried("nixl", flavour="UCX")
    found = chosen(Tried("local", "EPERM"), nixl)
    assert found.found.startswith("tcp") and "nixl: it has no carrier_options" in found.found
    assert '"carrier_options": {"nixl": {"backends": ["UCX"]}}' in found.advice
    found = chosen(Tried("local", "EPERM"), nixl, carrier_options={"nixl": {}})
    assert found.found.startswith("nixl; else tcp")
    assert chosen(carriers=("tcp", "local")).found.startswith("tcp")
    assert chosen(carriers=("local", "tcp")).found.startswith("local")


def test_the_choice_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(**keys: Any) -> dict[str, str]:
        found = doctor.chosen_here(FerryConfig(**keys), GOOD | {"cuda": Tried("cuda")})
        return {one.name: one.found for one in found}

    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    assert set(names()) == {"host memory"}
    assert set(names(carriers=("cuda", "tcp"))) == {"caches on GPUs"}  # cuda moves no host memory
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    found = names()
    assert found["host memory"].startswith("local")
    assert found["caches on GPUs"].startswith("cuda; else tcp")


def test_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", SECRET)
    peer = Producer(Spec("p", "tp=2,block=16", carrier="tcp", secret=SECRET))
    try:
        address = f"{LOOPBACK}:{peer.directory.port}"
        code, found = examine("--peer", address)
        assert code == 0
        assert "our secret is accepted" in found[address]["found"]
        assert found["tcp, rank (0, 1)"]["state"] == "ok"
        assert found["chosen, rank (0, 0)"]["found"].startswith("tcp")
        assert "local: the peer does not offer it" in found["chosen, rank (0, 0)"]["found"]
        monkeypatch.setenv("KVFERRY_SECRET", "quite another secret")
        code, found = examine("--peer", address)
        assert code == 1
        assert "does not take our secret" in found[address]["found"]
    finally:
        peer.close()
    code, found = examine("--peer", address)
    assert (code, found[address]["state"]) == (1, "broken")
    advice = "is the engine up? Its log says `offers its caches at port …`"
    assert found[address]["advice"] == advice


def test_every_carrier_that_a_peer_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", SECRET)
    strange = {"pigeon": b"?", "cuda": b"?", "nixl": b"?"}
    with offering("tcp", "local", shape="tp=2,block=16", endpoints=strange) as address:
        code, found = examine("--peer", address)
        assert code == 0
        assert "no such carrier" in found["pigeon, all ranks"]["found"]
        gpu = found["CUDA"]["state"] == "ok"  # then the choice is for caches on GPUs
        if not gpu:
            assert found["cuda, all ranks"]["state"] == "missing"
            assert "driver" in found["cuda, all ranks"]["found"]
        if doctor.version_of("nixl") is None:
            assert "pip install 'kvferry[nixl]'" in found["nixl, all ranks"]["advice"]
        assert found["tcp, rank (0, 1)"]["state"] == "ok"
        permitted = found["local"]["state"] == "ok"
        assert found["local, rank (0, 0)"]["state"] == ("ok" if permitted else "missing")
        first = "local" if permitted and not gpu else "tcp"
        assert found["chosen, rank (0, 0)"]["found"].startswith(first)


def test_a_peer_with_a_gpu() -> None:
    """Chosen by what was found: no GPU here to find it with."""
    assert chosen(Tried("cuda"), gpu=True).found.startswith("cuda; else tcp")
    assert chosen(Tried("cuda")).found.startswith("local; else tcp")
    # what engines make of `local` on a GPU
    found = chosen(Tried("cuda"), gpu=True, carriers=("local", "tcp")).found
    assert found.startswith("cuda; else tcp")
    found = chosen(Tried("cuda", "the peer runs on another host"), gpu=True).found
    assert found.startswith("tcp") and "cuda: the peer runs on another" in found


def test_the_way_to_a_peer_begins_at() -> None:
    assert own_address("127.0.0.1:9") == own_address("nowhere.invalid:9") == LOOPBACK
    assert own_address("[::1]:9") in ("::1", LOOPBACK)
