"""`kvferry doctor` with the real libraries: this host, and engines that offer nothing else."""

from __future__ import annotations

import pytest

from doctors import SECRET, examine, offering
from kvferry.cli.doctor import Finding, look_at_peer
from kvferry.vllm.config import FerryConfig

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
    code, found = examine("--options", options)
    assert code == 1
    assert found["nixl"]["state"] == "broken"
    assert "no backend PIGEON in this NIXL" in found["nixl"]["found"]
    chosen = found["host memory"]
    assert "nixl: NIXL's agent does not start" in chosen["found"]
    assert found["mooncake"]["found"] == "1 MiB read and compared"
    assert "mooncake: it has no carrier_options" in chosen["found"]
    assert OPTIONS["mooncake"] in chosen["advice"]


def test_a_peer_that_offers_only_libraries() -> None:
    def look(**options: dict[str, object]) -> dict[str, Finding]:
        settings = FerryConfig(carrier_options=options, secret=SECRET)
        found = look_at_peer(address, settings)
        return {f.name: f for f in found}

    with offering("nixl", "mooncake") as address:
        found = look()
        chosen = found["chosen, rank (0, 0)"]
        assert chosen.state == "broken"
        for name, line in OPTIONS.items():
            assert found[f"{name}, rank (0, 0)"].state == "ok"
            assert f"{name}: it has no carrier_options" in chosen.found
            assert line in chosen.advice
        found = look(nixl={}, mooncake={"protocol": "rdma"})
        assert found["chosen, rank (0, 0)"].state == "ok"
        assert found["chosen, rank (0, 0)"].found.startswith("nixl")
        assert found["mooncake, all ranks"].state == "broken"
        assert "mooncake: " in found["chosen, rank (0, 0)"].found
