"""What `kvferry doctor` says of this host, of two hosts by their reports, and of a peer."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from doctors import SECRET, examine, offering, refused, report
from kvferry.cli import checks, children
from kvferry.cli.asked import Asked
from kvferry.cli.between import Host, pick_between
from kvferry.cli.checks import Finding
from kvferry.cli.peers import Connected, Tried, _picked, own_address
from kvferry.wire.messages import SeenRank
from p2p_peers import LOOPBACK, Producer, Spec


def test_this_host(tmp_path: Path) -> None:
    code, found = examine("--between", "here", "here")
    assert code == 0
    assert found["loopback tcp"]["state"] == "ok"
    expected = "local" if found["process_vm_readv"]["state"] == "ok" else "tcp"
    (between,) = [f for n, f in found.items() if n.endswith(": host memory")]
    assert between["found"].startswith(expected)
    assert found["host memory"]["section"] == "auto"
    assert found["host memory"]["found"] == between["found"]
    assert "nixl: it has no carrier_options" in between["found"]
    assert found["RDMA"]["found"]
    if found["CUDA"]["state"] != "ok":
        assert found["caches on GPUs"]["found"].startswith("no GPU on ")
    (tmp_path / "no-report").write_text("[]")
    assert "is no report of" in refused("--between", "here", str(tmp_path / "no-report"))


def test_what_was_configured_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = examine("--carriers", "tcp, pigeon", "--options", '{"tcp": {"prot": 1}}')
    assert code == 1
    assert found["pigeon"]["state"] == "broken"
    assert "has no option prot" in found["tcp"]["found"]
    code, found = examine("--carriers", "tcp", "--host", "203.0.113.7")
    assert (code, found["tcp"]["state"]) == (1, "broken")
    assert "without a secret" in found["tcp"]["found"]
    monkeypatch.setenv("KVFERRY_SECRET", SECRET)
    code, found = examine("--carriers", "tcp,auto", "--host", "203.0.113.7")  # nobody's
    assert (found["host"]["state"], "203.0.113.7" in found["host"]["found"]) == ("broken", True)
    assert (code, found["auto"]["state"], found["tcp"]["state"]) == (1, "broken", "ok")
    assert found["host memory"]["section"] == "picked"
    assert "--options is JSON" in refused("--options", "{nixl}")
    assert "a mapping of mappings" in refused("--options", '{"nixl": 3}')
    assert "no such carriers" in refused("--options", '{"pigeon": {}}')
    said = " ".join(refused("--carriers", "tcp", "--options", '{"nixl": {}}').split())
    assert "carrier_options are for ['nixl'], but carriers are ['tcp']" in said
    assert "HOST:PORT" in refused("--peer", "somewhere")


def test_a_process_that_dies_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first >&2\necho no such luck >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    _, found = examine()
    assert found["two processes"]["found"] == "a second process ended by code 3: no such luck"
    with pytest.raises(children.NoAnswer, match="ended by code 3: no such luck"):
        children.ask("tries", {"name": "nixl"}, 10)
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    with pytest.raises(children.NoAnswer, match="ended by signal 11"):
        children.ask("tries", {"name": "nixl"}, 10)


def test_rdma_devices(tmp_path: Path) -> None:
    devices, handles = tmp_path / "infiniband", tmp_path / "dev"
    assert checks.rdma(devices, handles).state == "info"
    port = devices / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    hidden = checks.rdma(devices, handles)
    assert (hidden.state, "/dev/infiniband" in hidden.advice) == ("missing", True)
    handles.mkdir()
    (handles / "uverbs0").touch()
    found = checks.rdma(devices, handles)
    assert (found.state, found.found) == ("ok", "mlx5_0 (port 1 ACTIVE, 400 Gb/sec (4X NDR))")


@pytest.fixture(scope="module")
def healthy() -> dict[str, Any]:
    """A real report, of a host where local and tcp work, without GPUs."""
    _, found = report()
    one = Reports(found)
    one.set("process_vm_readv", "ok").set("loopback tcp", "ok").set("CUDA", "missing", "no GPU")
    return one.report


class Reports:
    """A report to be edited."""

    def __init__(self, original: dict[str, Any], name: str = "") -> None:
        self.report = copy.deepcopy(original)
        self.host = self.report["host"]
        self.host["name"] = name or self.host["name"]

    def set(self, name: str, state: str, found: str = "") -> Reports:
        others = [f for f in self.report["findings"] if f["name"] != name]
        section = "reachable"
        added = {"section": section, "name": name, "state": state, "found": found, "advice": ""}
        self.report["findings"] = [added, *others]
        return self

    def library(self, name: str, flavour: str, configured: bool = True) -> Reports:
        self.set(f"loopback {name}", "ok")
        if configured:
            self.host["libraries"][name] = {"flavour": flavour}
        return self


def picks(here: Reports, there: Reports) -> dict[str, Finding]:
    """By what they are about."""
    found = pick_between(Host.of(here.report, "a"), Host.of(there.report, "b"))
    return {f.name.rpartition(": ")[2]: f for f in found}


def test_between_looks_at_what_is_reachable(healthy: dict[str, Any], tmp_path: Path) -> None:
    here, there = Reports(healthy, "a"), Reports(healthy, "b")
    there.set("loopback tcp", "broken", "no route")
    assert picks(here, there)["host memory"].found.startswith("local")
    there.set("process_vm_readv", "missing", "EPERM").set("loopback nixl", "missing", "no UCX")
    here.library("nixl", "UCX")
    there.library("nixl", "UCX").set("loopback nixl", "missing", "no UCX")
    found = picks(here, there)["host memory"]
    assert found.state == "broken"
    for reason in ("local: on b: EPERM, and by tcp: on b: no route", "nixl: on b: no UCX"):
        assert reason in found.found
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, one in zip(paths, (here, there), strict=True):
        path.write_text(json.dumps(one.report))
    code, judged = examine("--between", *map(str, paths))
    assert (code, judged["a and b: host memory"]["found"]) == (1, found.found)


def test_between_two_hosts_with_gpus(healthy: dict[str, Any]) -> None:
    here, there = Reports(healthy, "a"), Reports(healthy, "b")
    for one in (here, there):
        one.set("CUDA", "ok", "1 GPUs").set("process_vm_readv", "missing", "EPERM")
    found = picks(here, there)
    assert found["caches on GPUs"].found.startswith("cuda; else tcp")
    assert found["host memory"].found.startswith("tcp")
    assert "local: on a: EPERM" in found["host memory"].found
    # containers of one host: cuda looks at the boot only, local at the pid namespace too
    for one in (here, there):
        one.set("process_vm_readv", "ok")
    there.host["pid_namespace"] = "pid:[7]"
    found = picks(here, there)
    assert found["caches on GPUs"].found.startswith("cuda; else tcp")
    assert "--ipc=host" in found["caches on GPUs"].advice
    assert found["host memory"].found.startswith("tcp")
    assert "another pid namespace" in found["host memory"].found
    there.set("CUDA IPC", "missing", "no peer access")
    found = picks(here, there)
    assert found["caches on GPUs"].found.startswith("tcp")
    assert "cuda: on b: no peer access" in found["caches on GPUs"].found
    there.set("CUDA IPC", "ok").host["boot"] = "another"
    found = picks(here, there)
    assert found["caches on GPUs"].found.startswith("tcp")
    assert "cuda: the peer runs on another host" in found["caches on GPUs"].found
    assert "same secret" in found["host memory"].advice
    assert picks(here, Reports(healthy, "c"))["caches on GPUs"].found == "no GPU on c"


def test_between_versions(healthy: dict[str, Any]) -> None:
    here, there = Reports(healthy, "a"), Reports(healthy, "b")
    assert set(picks(here, there)) == {"host memory", "caches on GPUs"}
    there.set("kvferry", "ok", "9.9.9, Python 3.11.7")
    found = picks(here, there)["versions"]
    assert (found.state, "9.9.9" in found.found) == ("missing", True)
    there.host["protocol"] += 1
    found = picks(here, there)["versions"]
    assert (found.state, "they refuse each other" in found.found) == ("broken", True)
    for name in ("protocol", "carriers", "libraries"):  # as an older one had it
        del there.host[name]
    found_older = picks(here, there)
    assert found_older["host memory"].state == "ok"
    assert found_older["versions"].state == "missing"


def test_between_by_what_is_configured(healthy: dict[str, Any]) -> None:
    here, there = Reports(healthy, "a"), Reports(healthy, "b")
    there.host["boot"] = "another"
    here.library("nixl", "UCX", configured=False)
    there.library("nixl", "UCX", configured=False)
    found = picks(here, there)["host memory"].found
    assert found.startswith("tcp") and "nixl: it has no carrier_options" in found
    here.library("nixl", "UCX")
    found = picks(here, there)["host memory"].found
    assert found.startswith("tcp")
    assert "nixl: b does not offer it: it has no carrier_options" in found
    there.library("nixl", "UCX")
    assert picks(here, there)["host memory"].found.startswith("nixl")
    there.library("nixl", "GDS")
    assert "nixl: the peer's uses GDS, this one UCX" in picks(here, there)["host memory"].found
    there.host["carriers"] = ["nixl"]
    assert picks(here, there)["host memory"].state == "broken"
    here.host["carriers"] = ["tcp", "local"]
    there.host["carriers"] = ["local", "tcp"]
    there.host["boot"] = here.host["boot"]
    assert picks(here, there)["host memory"].found.startswith("tcp")
    here.host["carriers"] = there.host["carriers"] = ["cuda"]
    assert picks(here, there)["host memory"].state == "info"  # it moves no host memory


def test_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", SECRET)
    peer = Producer(Spec("p", "tp=2,block=16", carrier="tcp", secret=SECRET))
    try:
        address = f"{LOOPBACK}:{peer.directory.port}"
        code, found = examine("--peer", address)
        assert code == 0
        assert "our secret is accepted" in found[address]["found"]
        assert found["tcp, rank (0, 1)"]["state"] == "ok"
        assert found["auto, rank (0, 0)"]["found"].startswith("tcp")
        assert "local: the peer does not offer it" in found["auto, rank (0, 0)"]["found"]
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
    with offering("tcp", "local", endpoints=strange) as address:
        code, found = examine("--peer", address)
        assert code == 0
        assert "no such carrier" in found["pigeon"]["found"]
        if checks.cuda().state != "ok":
            assert (found["cuda"]["state"], found["cuda"]["section"]) == ("missing", "peer")
            assert "driver" in found["cuda"]["advice"]
        if checks.version_of("nixl") is None:
            assert "pip install 'kvferry[nixl]'" in found["nixl"]["advice"]
        assert found["tcp, rank (0, 0)"]["state"] == "ok"
        permitted = found["process_vm_readv"]["state"] == "ok"
        assert found["local, rank (0, 0)"]["state"] == ("ok" if permitted else "missing")
        first = "local" if permitted else "tcp"
        assert found["auto, rank (0, 0)"]["found"].startswith(first)
        # as configured: local is told to go by tcp
        told = '{"local": {"force_fallback": true}}'
        code, found = examine("--peer", address, "--options", told)
        assert found["local, rank (0, 0)"]["found"] == "by tcp only: it was told to"
        assert found["auto, rank (0, 0)"]["found"].startswith("tcp")
        assert "local: it was told to" in found["auto, rank (0, 0)"]["found"]


def test_a_peer_with_a_gpu() -> None:
    """Chosen by what was found: no GPU here to find it with."""
    rank = SeenRank(0, 0, "", {"cuda": b"", "tcp": b""})
    tried = {"tcp": Tried({0: Connected()}, "tcp"), "cuda": Tried({0: Connected()}, "cuda")}
    found = _picked("r", rank, 0, tried, Asked())
    assert found.found.startswith("cuda; else tcp") and "for caches on GPUs" in found.found
    tried["cuda"] = Tried({0: Connected("the peer runs on another host")}, "cuda")
    found = _picked("r", rank, 0, tried, Asked())
    assert found.found.startswith("tcp") and "cuda: the peer runs on another" in found.found
    tried["cuda"] = Tried({}, "cuda", "no GPU")
    found = _picked("r", rank, 0, tried, Asked())
    assert found.found.startswith("tcp") and "for host memory" in found.found
    tried["cuda"] = Tried({0: Connected()}, "cuda")
    found = _picked("r", rank, 0, tried, Asked(("local", "tcp")))
    assert found.found.startswith("cuda; else tcp")  # what engines make of it on a GPU


def test_the_way_to_a_peer_begins_at() -> None:
    assert own_address("127.0.0.1:9") == own_address("nowhere.invalid:9") == LOOPBACK
    assert own_address("[::1]:9") in ("::1", LOOPBACK)
