"""A host that loses its network in the middle of a request, in a network of its own."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import subprocess
import sys
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
    ran = subprocess.run(
        [*ALONE, sys.executable, str(Path(__file__)), who],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, f"{who}: ended\n"), ran.stderr


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
    transport = connections.EngineTransport(ssl.create_default_context(), 4, 2.0, 1.0)
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


if __name__ == "__main__":
    loopback(IFF_UP)
    asyncio.run({"engine": engine, "client": client}[sys.argv[1]]())
