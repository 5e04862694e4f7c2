"""`kvferry doctor` with the real libraries: this host, and engines that offer nothing else."""

from __future__ import annotations

import pytest

from doctors import SECRET, examine, offering
from kvferry.cli.asked import Asked
from kvferry.cli.checks import Finding
from kvferry.cli.peers import look_at_peer

LIBRARIES = {"nixl": "nixl._api", "mooncake": "mooncake.engine"}
OPTIONS = {
    "nixl": '"carrier_options": {"nixl": {"backends": ["UCX"]}}',
    "mooncake": '"carrier_options": {"mooncake": {"protocol": "tcp"}}',
}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in LIBRARIES.values():
        pytest.importorskip(library)
    monkeypatch.setenv("KVFERRY_SECRET", SECRET)


def test_configured_and_not() -> None:
    options = '{"nixl": {"backends": ["PIGEON"]}}'
    code, found = examine("--options", options, "--between", "here", "here")
    assert code == 1
    assert found["loopback nixl"]["state"] == "broken"
    assert "no backend PIGEON in this NIXL" in found["loopback nixl"]["found"]
    (between,) = [f for n, f in found.items() if n.endswith(": host memory")]
    assert "nixl: NIXL's agent does not start" in between["found"]
    assert found["loopback mooncake"]["state"] == "ok"
    # the last finding of that name is what auto says
    assert found["mooncake"]["found"].endswith("is not used: it has no carrier_options")
    assert OPTIONS["mooncake"] in found["mooncake"]["advice"]


def test_a_peer_that_offers_only_libraries() -> None:
    def look(**options: dict[str, object]) -> dict[str, Finding]:
        asked = Asked(options=options, secret=SECRET)
        return {f.name: f for f in look_at_peer(address, asked)}

    with offering("nixl", "mooncake") as address:
        found = look()
        auto = found["auto, rank (0, 0)"]
        assert auto.state == "broken"
        for name, line in OPTIONS.items():
            assert found[f"{name}, rank (0, 0)"].state == "ok"
            assert f"{name}: it has no carrier_options" in auto.found
            assert line in auto.advice
        found = look(nixl={}, mooncake={"protocol": "rdma"})
        assert found["auto, rank (0, 0)"].state == "ok"
        assert found["auto, rank (0, 0)"].found.startswith("nixl")
        other = found.get("mooncake, rank (0, 0)") or found["mooncake"]  # it may not even start
        assert other.state == "broken"
        assert "mooncake: " in found["auto, rank (0, 0)"].found
