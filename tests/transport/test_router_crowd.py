"""Idle connections and slow clients before a router's process, and faults around it, in short."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.router.api import Limits
from kvferry.router.clients import Guard
from router_crowd import hold_a_crowd

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos"


def test_500_idle_connections_and_slow_clients_hold_nobody_up() -> None:
    held = hold_a_crowd(500, slow=40)  # with large pieces they would take 58 MiB
    assert (held.idle, held.slow) == (500, 40)


@pytest.mark.parametrize(
    ("descriptors", "connections"),
    [
        (256, 48),  # each may be in flight: four descriptors each
        (20_000, 10_000),  # 1,024 may be in flight, 1,024 are not admitted yet
        (13_000, 9_864),
    ],
)
def test_the_limit_of_descriptors_bounds_connections(
    descriptors: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, descriptors))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    guard = Guard(Limits(max_connections=10_000))
    assert guard.most == connections
    assert guard.backlog == min(connections, 1024) // 2


def test_a_few_faults_around_a_router() -> None:
    """A few of `make chaos`: right answers or errors, and nothing left."""
    ran = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--router",
            "6",
            "--idle",
            "0",
            "--seed",
            "3",
            "--first",
            "0",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "every success is right; nothing left" in ran.stdout
