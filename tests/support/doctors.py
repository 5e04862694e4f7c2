"""`kvferry doctor` as a user runs it, and engines for it to look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from typer.testing import CliRunner

from handover_peers import LOOPBACK, Producer, Spec, memory_regions
from kvferry.carriers import make_carrier
from kvferry.cli.main import app

SECRET = "the right secret"


def examine(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and the findings of `--json` by name."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    found = json.loads(result.stdout.splitlines()[-1])
    return result.exit_code, {f["name"]: f for f in found["findings"]}


def refused(*arguments: str) -> str:
    """What is said to who cannot be helped."""
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit), result.exception
    return result.output


@contextmanager
def offering(
    *names: str, shape: str = "tp=1,block=16", endpoints: dict[str, bytes] | None = None
) -> Iterator[str]:
    """The address of a producer whose ranks offer these carriers, and these endpoints."""
    peer = Producer(Spec("p", shape, carrier=names[0], secret=SECRET))
    more = []
    try:
        infos = []
        for info, rack in zip(peer.infos, peer.racks, strict=True):
            offered = {**info.carriers, **(endpoints or {})}
            for name in names[1:]:
                carrier = make_carrier(name, secret=SECRET, host=LOOPBACK)
                more.append(carrier)
                carrier.register(memory_regions(rack.layout, rack.memory))
                offered[name] = carrier.endpoint()
            infos.append(msgspec.structs.replace(info, carriers=offered))
        peer.tell(infos)
        yield f"{LOOPBACK}:{peer.directory.port}"
    finally:
        for carrier in more:
            carrier.close()
        peer.close()
