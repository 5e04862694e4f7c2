"""A host that loses its network, in a network of its own."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

IFF_UP, SIOCSIFFLAGS = 1, 0x8914
ALONE = ("unshare", "--user", "--map-root-user", "--net")


def loopback(flags: int) -> None:
    with socket.socket() as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags))


@pytest.fixture(scope="module", autouse=True)
def _may_have_a_network() -> None:
    try:
        subprocess.run([*ALONE, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network of its own: {error}")


@pytest.mark.parametrize("who", ["engine", "client"])
def test_a_request_ends_when_its_host_is_silent(who: str) -> None:
    run_alone(who)


def test_what_an_engines_events_told_is_known_after_its_host_was_silent() -> None:
    run_alone("events")


def run_alone(what: str) -> None:
    ran = subprocess.run(
        [*ALONE, sys.executable, str(Path(__file__)), what],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, f"{what}: ended\n"), ran.stderr


async def engine() -> None:
    """A request waits for an engine that will not answer for a long time."""
    import ssl

    from kvferry.router.fleet import connections

    connections._SILENT_SECONDS = 2.0
    asked = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await asyncio.Event().wait()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    at = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
    transport = connections.EngineTransport(ssl.create_default_context(), 2.0, 1.0)
    request = asyncio.create_task(transport.ask(connections.address_of_url(at), b"POST", [], b"{}"))
    await asked.wait()
    loopback(0)
    try:
        await request
    except connections.BrokenAnswer as error:
        assert "timed out" in str(error)
        print("engine: ended")


async def client() -> None:
    """A client waits for an answer. Its request is cancelled, and so the engine would abort."""
    from uvicorn.server import ServerState

    from kvferry.router.api import Limits
    from kvferry.router.app import connections_of
    from kvferry.router.clients import ClientRequest

    begun, ended = asyncio.Event(), asyncio.Event()

    async def route(request: ClientRequest) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            assert request.gone
            ended.set()

    connection = connections_of({"/": route}, Limits(client_seconds=2.0))
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: connection(server_state=state), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
    await begun.wait()
    loopback(0)
    await ended.wait()
    print("client: ended")


async def events() -> None:
    """An engine is not reached for a while. What its events told is known afterwards."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from test_router_events import Publisher, stored

    from kvferry.router.api import Limits, RouterConfig
    from kvferry.router.flow import Router

    async def healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    publisher = Publisher()
    server = await asyncio.start_server(healthy, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    source = publisher.source
    limits = Limits(probe_every_seconds=0.1, probe_seconds=0.3, connect_seconds=0.3)
    named = (f"{url}={source.events},{source.replay}",)
    router = Router(RouterConfig(prefill=(), decode=(url,), events=named, limits=limits))
    parts = [asyncio.create_task(part.run()) for part in (router.fleet, router.placing)]
    (engine,), told = router.fleet.engines, router.placing.index.part(url)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    for seed in range(3):
        await publisher.publish(stored(seed))
    await until(lambda: engine.up and told.known == 9 and told.state == "live")
    publisher.remembers = 1
    await publisher.publish(stored(3))
    await until(lambda: told.known == 12)
    loopback(0)
    await until(lambda: not engine.up)
    loopback(IFF_UP)
    asked = len(publisher.asked)
    await until(lambda: engine.up and len(publisher.asked) > asked)
    await publisher.publish(stored(4))
    await until(lambda: told.known == 15 and told.state == "live")
    assert told.lost_events == 0
    for part in parts:
        part.cancel()
    await asyncio.gather(*parts, return_exceptions=True)
    await publisher.close()
    print("events: ended")


if __name__ == "__main__":
    loopback(IFF_UP)
    asyncio.run({"engine": engine, "client": client, "events": events}[sys.argv[1]]())
