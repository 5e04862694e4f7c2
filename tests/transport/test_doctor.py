"""What `kvferry doctor` says of this host, of two hosts by their reports, and of a peer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest

from doctors import SECRET, examine, offering, refused, report
from kvferry.bench.trial import TRIED_BYTES, Tried, child, own, try_endpoints
from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.cli import doctor
from kvferry.cli.doctor import Finding, Host, own_address
from kvferry.errors import KvferryError
from p2p_peers import LOOPBACK, Producer, Spec


def test_this_host(tmp_path: Path) -> None:
    code, found = examine("--between", "here", "here")
    assert code == 0
    assert found["tcp"] == {
        "section": "reachable",
        "name": "tcp",
        "state": "ok",
        "found": "1 MiB read and compared",
        "advice": "",
    }
    expected = "local" if found["local"]["state"] == "ok" else "tcp"
    (between,) = [f for n, f in found.items() if n.endswith(": host memory")]
    assert between["found"].startswith(expected)
    assert found["host memory"]["section"] == "chosen"
    assert found["host memory"]["found"] == between["found"]
    assert "nixl: it has no carrier_options" in between["found"]
    assert found["RDMA"]["found"]
    assert ("caches on GPUs" in found) == (found["CUDA"]["state"] == "ok")
    for text in ("[]", '{"host": {"name": "a"}}', "no JSON"):
        (tmp_path / "no-report").write_text(text)
        assert "is no report of" in refused("--between", "here", str(tmp_path / "no-report"))


def test_what_was_configured_must_work(monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = examine("--carriers", "tcp, cuda", "--options", '{"tcp": {"prot": 1}}')
    assert code == 1
    assert "has no option prot" in found["tcp"]["found"]
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
            ("--carriers", "tcp", "--options", '{"nixl": {}}'),
            "carrier_options are for ['nixl'], but carriers are ['tcp']",
        ),
        (("--carriers", "tcp,pigeon"), "found ['tcp', 'pigeon']"),
        (("--carriers", "tcp,auto"), "found ['tcp', 'auto']"),
        (("--host", "203.0.113.7"), "cannot listen on 203.0.113.7 without a secret"),
        (("--secret-file", "/no/such/file"), "secret_file /no/such/file cannot be read"),
        (("--peer", "somewhere"), "HOST:PORT"),
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


def test_children_answer_once_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    with child(hang, {"hang": False, "number": 6}, 60) as answer:
        assert answer == 7
    with pytest.raises(KvferryError, match="KeyError: 'hang'"), child(hang, {}, 60):
        pass
    with (
        pytest.raises(KvferryError, match="no answer in time"),
        child(hang, {"hang": True}, 3),
    ):
        pass


def chatter(question: dict[str, Any]) -> Generator[None]:
    """The program of a child whose library prints before, while and after it answers."""

    def talk() -> None:
        os.write(1, b"a library's own words\n" * 10_000)  # more than a pipe holds
        Path(question["done"]).touch()

    os.write(1, b"a library's first words, which do not end the line")
    Thread(target=talk, daemon=True).start()
    yield None


def test_what_a_child_prints_does_not_stop_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
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


@pytest.fixture(scope="module")
def host() -> Host:
    """A host without GPUs where local and tcp work, from a real report."""
    _, found = report()
    real = msgspec.convert(found["host"], Host)
    tried = {name: Tried(name) for name in ("local", "tcp")}
    tried["cuda"] = Tried("cuda", "no GPU")
    for name in ("nixl", "mooncake"):
        tried[name] = Tried(name, "its library is not installed")
    return msgspec.structs.replace(real, name="a", gpu=False, tried=tried)


def with_(host: Host, *tried: Tried, **facts: Any) -> Host:
    facts["tried"] = host.tried | {one.name: one for one in tried}
    return msgspec.structs.replace(host, **facts)


def with_nixl(host: Host, backend: str, **facts: Any) -> Host:
    return with_(host, Tried("nixl", flavour=backend), **facts)


def picks(here: Host, there: Host) -> dict[str, Finding]:
    """By what they are about."""
    return {f.name.rpartition(": ")[2]: f for f in doctor.between(here, there)}


def test_between_looks_at_what_is_reachable(host: Host, tmp_path: Path) -> None:
    there = with_(host, Tried("tcp", "no route"), name="b")
    assert picks(host, there)["host memory"].found.startswith("local")
    here = with_nixl(host, "UCX", configured=["nixl"])
    there = with_(there, Tried("local", "EPERM"), Tried("nixl", "no UCX"), configured=["nixl"])
    found = picks(here, there)["host memory"]
    assert found.state == "broken"
    for reason in ("local: on b: EPERM", "tcp: on b: no route", "nixl: on b: no UCX"):
        assert reason in found.found
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, one in zip(paths, (here, there), strict=True):
        path.write_bytes(msgspec.json.encode({"host": one}))
    code, judged = examine("--between", *map(str, paths))
    assert (code, judged["a and b: host memory"]["found"]) == (1, found.found)


def test_between_two_hosts_with_gpus(host: Host) -> None:
    here = with_(host, Tried("cuda"), Tried("local", "", "EPERM"), gpu=True)
    there = with_(here, name="b")
    found = picks(here, there)
    assert found["caches on GPUs"].found.startswith("cuda; else tcp")
    assert found["host memory"].found.startswith("tcp")
    assert "local: EPERM" in found["host memory"].found
    # containers of one host: cuda looks at the boot only, local at the pid namespace too
    here = with_(here, host.tried["local"])
    there = with_(here, name="b", pid_namespace="pid:[7]")
    found = picks(here, there)
    assert found["caches on GPUs"].found.startswith("cuda; else tcp")
    assert "--ipc=host" in found["caches on GPUs"].advice
    assert found["host memory"].found.startswith("tcp")
    assert "another pid namespace" in found["host memory"].found
    found = picks(here, with_(there, Tried("cuda", "no peer access")))
    assert found["caches on GPUs"].found.startswith("tcp")
    assert "cuda: on b: no peer access" in found["caches on GPUs"].found
    found = picks(here, with_(there, boot="another"))
    assert found["caches on GPUs"].found.startswith("tcp")
    assert "cuda: the peer runs on another host" in found["caches on GPUs"].found
    assert "same secret" in found["host memory"].advice
    assert "caches on GPUs" not in picks(here, host)


def test_between_versions(host: Host) -> None:
    assert set(picks(host, host)) == {"host memory"}
    there = with_(host, kvferry="9.9.9")
    found = picks(host, there)["versions"]
    assert (found.state, "9.9.9" in found.found) == ("missing", True)
    found = picks(host, with_(there, protocol=host.protocol + 1))["versions"]
    assert (found.state, "refuse each other" in found.advice) == ("broken", True)


def test_between_by_what_is_configured(host: Host) -> None:
    here, there = with_nixl(host, "UCX"), with_nixl(host, "UCX", name="b", boot="another")
    found = picks(here, there)["host memory"]
    assert found.found.startswith("tcp") and "nixl: it has no carrier_options" in found.found
    assert '"carrier_options": {"nixl": {"backends": ["UCX"]}}' in found.advice
    here = with_(here, configured=["nixl"])
    found = picks(here, there)["host memory"]
    assert found.found.startswith("tcp")
    assert "nixl: b does not offer it: it has no carrier_options" in found.found
    there = with_(there, configured=["nixl"])
    assert picks(here, there)["host memory"].found.startswith("nixl; else tcp")
    found = picks(here, with_nixl(there, "GDS"))["host memory"]
    assert "nixl: b uses GDS, a UCX" in found.found
    assert picks(here, with_nixl(there, "GDS", carriers=["nixl"]))["host memory"].state == "broken"
    here, there = with_(host, carriers=["tcp", "local"]), with_(host, carriers=["local", "tcp"])
    assert picks(here, there)["host memory"].found.startswith("tcp")  # the first one chooses
    assert picks(there, here)["host memory"].found.startswith("local")
    found_cuda = picks(
        with_(here, carriers=["cuda", "tcp"]), with_(there, carriers=["cuda", "tcp"])
    )
    assert set(found_cuda) == {"caches on GPUs"}  # cuda moves no host memory
    assert found_cuda["caches on GPUs"].found.startswith("tcp")


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
        # as configured: local is told to go by tcp
        told = '{"local": {"force_fallback": true}}'
        code, found = examine("--peer", address, "--options", told)
        assert (code, found["local"]["found"]) == (0, "by tcp only: it was told to")
        assert found["local, rank (0, 0)"]["found"] == "by tcp only: it was told to"
        assert found["chosen, rank (0, 0)"]["found"].startswith("tcp")
        assert gpu or "local: it was told to" in found["chosen, rank (0, 0)"]["found"]


def test_a_peer_with_a_gpu(host: Host) -> None:
    """Chosen by what was found: no GPU here to find it with."""
    reach = {"tcp": host.tried["tcp"], "cuda": Tried("cuda")}

    def chosen(host: Host, gpu: bool = True) -> str:
        return doctor.choose("r", host, gpu, reach, "").found

    assert chosen(host).startswith("cuda; else tcp")
    assert chosen(host, gpu=False).startswith("tcp")
    # what engines make of `local` on a GPU
    assert chosen(with_(host, carriers=["local", "tcp"])).startswith("cuda; else tcp")
    reach["cuda"] = Tried("cuda", "the peer runs on another host")
    assert chosen(host).startswith("tcp") and "cuda: the peer runs on another" in chosen(host)


def test_the_way_to_a_peer_begins_at() -> None:
    assert own_address("127.0.0.1:9") == own_address("nowhere.invalid:9") == LOOPBACK
    assert own_address("[::1]:9") in ("::1", LOOPBACK)
